"""The ops: the only API that models, engine, trainer and integrations call."""

from rlkernel.ops._library import is_stock, stock
from rlkernel.ops.embedding import embedding
from rlkernel.ops.linear import linear
from rlkernel.ops.rms_norm import rms_norm
from rlkernel.ops.rope import rope
from rlkernel.ops.swiglu import swiglu

__all__ = ["embedding", "is_stock", "linear", "rms_norm", "rope", "stock", "swiglu"]
