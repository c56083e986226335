"""The ops: the only API that models, engine, trainer and integrations call."""

from rlkernel.ops._library import is_stock, stock
from rlkernel.ops.attention import attention, paged_attention, store_kv_
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
    "attention",
    "PolicyLoss",
    "embedding",
    "group_advantages",
    "is_stock",
    "linear",
    "pack",
    "paged_attention",
    "policy_loss",
    "rms_norm",
    "rope",
    "stock",
    "store_kv_",
    "swiglu",
    "unpack",
]
