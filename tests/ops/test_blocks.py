"""Blocks that switch all ops of the process, `stock` and `attention_variant`: those of several threads may overlap."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from rlkernel import ops


@pytest.fixture
def often() -> Iterator[None]:
    """Threads change places every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often")
def test_stock_blocks_of_two_threads_are_all_counted() -> None:
    start = threading.Barrier(2)

    def blocks() -> None:
        start.wait(10)
        for _ in range(20_000):
            with ops.stock(), ops.stock(False):
                assert ops.is_stock()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(blocks) for _ in range(2)]:
            done.result(60)
    assert not ops.is_stock()
    with ops.stock():
        assert ops.is_stock()
    assert not ops.is_stock()


def test_attention_variants_of_blocks_that_overlap() -> None:
    first, second = ExitStack(), ExitStack()  # of two threads
    first.enter_context(ops.attention_variant("fa3"))
    assert ops.current_attention_variant() == "fa3"
    second.enter_context(ops.attention_variant("split"))
    assert ops.current_attention_variant() == "split"
    first.close()
    assert ops.current_attention_variant() == "split"
    second.close()
    assert ops.current_attention_variant() == "split" and ops.attention_contract() == "rlk-2"
    assert ops.current_attention_variant("fa3") == "fa3", "nobody has chosen"


def test_an_attention_variant_set_in_a_block_ends_with_it() -> None:
    ops.set_attention_variant("fa3")
    try:
        with ops.attention_variant(None):
            ops.set_attention_variant("split")
            assert ops.current_attention_variant() == "split"
            with pytest.raises(ValueError, match="expected one of split, fa3"):
                ops.set_attention_variant("fa2")
            assert ops.current_attention_variant() == "split"
        assert ops.current_attention_variant() == "fa3"
        with pytest.raises(ValueError, match="expected one of split, fa3"), ops.attention_variant("fa2"):
            pass
        assert ops.current_attention_variant() == "fa3"
    finally:
        ops.set_attention_variant(None)
