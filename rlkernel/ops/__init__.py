"""The ops: the only API that models, engine, trainer and integrations call."""

from rlkernel.ops._library import is_stock, stock
from rlkernel.ops.embedding import embedding
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.linear import linear
from rlkernel.ops.pack import Packed, pack, unpack
from rlkernel.ops.policy_loss import PolicyLoss, policy_loss
from rlkernel.ops.rms_norm import rms_norm
from rlkernel.ops.rope import rope
from rlkernel.ops.swiglu import swiglu

__all__ = [
    "Packed",
    "PolicyLoss",
    "embedding",
    "group_advantages",
    "is_stock",
    "linear",
    "pack",
    "policy_loss",
    "rms_norm",
    "rope",
    "stock",
    "swiglu",
    "unpack",
]
