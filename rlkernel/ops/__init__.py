"""The ops: the only API that models, engine, trainer and integrations call."""

from rlkernel.kernels.errors import BuildError, VariantError
from rlkernel.ops.adamw import GradNorm, adamw_, grad_norm
from rlkernel.ops.all_reduce import all_reduce
from rlkernel.ops.attention import attention, attention_scratch_bytes, paged_attention, store_kv_
from rlkernel.ops.attention_variants import (
    attention_contract,
    attention_variant,
    check_attention_variant,
    current_attention_variant,
    set_attention_variant,
)
from rlkernel.ops.composed import gelu, layer_norm
from rlkernel.ops.define import register_backend
from rlkernel.ops.embedding import embedding
from rlkernel.ops.gae import GAE, gae
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.kept import ids_to_kept, kept_to_ids, pack_kept, unpack_kept
from rlkernel.ops.linear import linear
from rlkernel.ops.linear_logprob import linear_logprob
from rlkernel.ops.logprob import LogProb, logprob
from rlkernel.ops.pack import Packed, pack, unpack
from rlkernel.ops.policy_loss import PolicyLoss, policy_loss
from rlkernel.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_store
from rlkernel.ops.rms_norm import rms_norm
from rlkernel.ops.rope import rope
from rlkernel.ops.sample import Sample, sample
from rlkernel.ops.shared_prefix import SharedPrefix
from rlkernel.ops.spans import pack_spans, unpack_spans
from rlkernel.ops.stock_switch import is_stock, stock
from rlkernel.ops.swiglu import swiglu
from rlkernel.ops.token_rewards import (
    constrained_advantages,
    overlong_penalty,
    token_rewards,
    turn_advantages,
    update_multiplier,
)

__all__ = [
    "GAE",
    "BuildError",
    "GradNorm",
    "LogProb",
    "Packed",
    "PolicyLoss",
    "Sample",
    "SharedPrefix",
    "VariantError",
    "adamw_",
    "all_reduce",
    "attention",
    "attention_contract",
    "attention_scratch_bytes",
    "attention_variant",
    "check_attention_variant",
    "constrained_advantages",
    "current_attention_variant",
    "embedding",
    "gae",
    "gelu",
    "grad_norm",
    "group_advantages",
    "ids_to_kept",
    "is_stock",
    "kept_to_ids",
    "layer_norm",
    "linear",
    "linear_logprob",
    "logprob",
    "overlong_penalty",
    "pack",
    "pack_kept",
    "pack_spans",
    "paged_attention",
    "policy_loss",
    "qk_norm_rope",
    "qk_norm_rope_store",
    "register_backend",
    "rms_norm",
    "rope",
    "sample",
    "set_attention_variant",
    "stock",
    "store_kv_",
    "swiglu",
    "token_rewards",
    "turn_advantages",
    "unpack",
    "unpack_kept",
    "unpack_spans",
    "update_multiplier",
]
