"""The ops: the only API that models, engine, trainer and integrations call."""

from rlkernel.ops._library import is_stock, stock
from rlkernel.ops.linear import linear

__all__ = ["is_stock", "linear", "stock"]
