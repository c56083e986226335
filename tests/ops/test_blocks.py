"""Blocks that change all ops of the process (`stock`, `attention_variant`, `strict`, `use`); those of several threads
may overlap."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels import scheduled_op, select
from rlkernel.kernels.errors import VariantError


@pytest.fixture
def often() -> Iterator[None]:
    """Switches threads every few instructions."""
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
    assert ops.current_attention_variant("fa3") == "fa3", "no variant was set"


def test_an_attention_variant_that_is_set_holds_in_open_blocks_and_behind_them() -> None:
    try:
        with ops.attention_variant("fa3"):
            ops.set_attention_variant("split")
            assert ops.current_attention_variant() == "split"
            with pytest.raises(ValueError, match="expected one of split, fa3"):
                ops.set_attention_variant("fa2")
            assert ops.current_attention_variant() == "split"
        assert ops.current_attention_variant() == "split"
        with pytest.raises(ValueError, match="expected one of split, fa3"), ops.attention_variant("fa2"):
            pass
        with pytest.raises(VariantError, match="'fa3' was requested in a process that is set to 'split'"):
            ops.current_attention_variant("fa3")
    finally:
        ops.set_attention_variant(None)


@pytest.mark.parametrize("block", ("stock", "attention_variant"))
def test_blocks_are_traced(block: str) -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    manager = {"stock": ops.stock, "attention_variant": lambda: ops.attention_variant("fa3")}[block]

    def run(x: Tensor) -> Tensor:
        with manager():
            return ops.rms_norm(x, w, 1e-6)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for _ in range(2):
        assert_bitwise(compiled(x), run(x))
        assert not ops.is_stock() and ops.current_attention_variant() == "split"


def test_blocks_of_strict_mode_that_overlap_end_alone() -> None:
    for first, second in ((True, True), (True, False), (False, True)):
        one, other = scheduled_op.strict(first), scheduled_op.strict(second)
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert scheduled_op._strict.now == second, "another thread's block"
        other.__exit__(None, None, None)
        assert not scheduled_op._strict.now
    with scheduled_op.strict():
        with scheduled_op.strict(False):
            assert not scheduled_op._strict.now
        assert scheduled_op._strict.now
        scheduled_op.set_strict(False)
        assert not scheduled_op._strict.now
    with scheduled_op.strict(False):
        scheduled_op.set_strict(True)
    try:
        assert scheduled_op._strict.now, "set_strict inside a block holds after it"
    finally:
        scheduled_op.set_strict(False)


def test_blocks_that_force_an_implementation_end_alone() -> None:
    one, other = select.use("reference"), select.use("cpu")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert select.choose("logprob", "cpu").implementation == "cpu"
    other.__exit__(None, None, None)
    assert not select.forced()
