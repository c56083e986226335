"""Runs dense decoders of transformers on rlkernel's ops: `apply`, `token_logprobs`, `status`, `remove`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkernel.optim import AdamW
from rlkernel_transformers.adapters import merged_weights
from rlkernel_transformers.applied import Row, Status, apply, remove, status, token_logprobs
from rlkernel_transformers.attention import register as _register
from rlkernel_transformers.forwards import TokenLogprobs
from rlkernel_transformers.gradient_tree import GradientTree
from rlkernel_transformers.masters import fold_main_grads, main_grads
from rlkernel_transformers.packing import CallError
from rlkernel_transformers.support import UnsupportedModelError
from rlkernel_transformers.tensor_parallel import sharded_parameters

if TYPE_CHECKING:
    from rlkernel_transformers.trainer import Trainer as Trainer

_register()

__all__ = [
    "AdamW",
    "CallError",
    "GradientTree",
    "Row",
    "Status",
    "TokenLogprobs",
    "Trainer",
    "UnsupportedModelError",
    "apply",
    "fold_main_grads",
    "main_grads",
    "merged_weights",
    "remove",
    "sharded_parameters",
    "status",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # imports transformers' Trainer and accelerate, which most users of `apply` do not need
        from rlkernel_transformers.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
