"""`stock()`: a block in which every public op runs as plain torch, the control that shows the drift."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlkernel.kernels.switch import Switch
from rlkernel.ops.checks import check_flag

_stock = Switch(False)


@contextlib.contextmanager
def stock(active: bool = True) -> Iterator[None]:
    """Inside the block every public op runs as plain torch (`--backend torch`): the control, not batch-invariant.

    It applies to every thread of the process, because autograd recomputes a checkpointed forward in its own threads.

    Raises:
        TypeError: active is not True or False.
    """
    check_flag("stock", "active", active)
    with _stock.block(True) if active else contextlib.nullcontext():
        yield


def is_stock() -> bool:
    """Whether a `stock` block is active."""
    return _stock.now
