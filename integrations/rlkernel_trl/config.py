"""TRL's configurations with the flag `use_rl_kernel_backend` and its settings.

With the flag off (the default) they equal TRL's own. With it on, accelerate's autocast is off, because the weights are
bf16 with fp32 masters.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import trl

from rlkernel_trl.errors import ExactnessLostError

_OLDEST = (1, 16)
if tuple(int(part) for part in trl.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"rlkernel_trl supports TRL 1.16, and TRL {trl.__version__} is installed: pip install 'trl>=1.16,<1.17'"
    )

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class RLKernelArguments:
    """Fields that every configuration of `rlkernel_trl` adds to TRL's.

    Attributes:
        use_rl_kernel_backend: run the forward, the log-probabilities, the optimizer and the rollout on rlkernel's ops.
            vLLM computes the rollout, or, without it, rlkernel's engine.
        rl_kernel_strict: raise if exactness is lost, and stop before an update if a sampled token's log-probability
            differs; False logs and continues.
        rl_kernel_check_steps: first generations whose old log-probabilities TRL computes with its own forward, compared
            token by token; if all are equal that forward is skipped from then on.
        rl_kernel_recheck_every: run that forward again every so many generations; 0 never. Every generation is compared
            with the training forward in any case, at no cost.
        rl_kernel_gradient_tree: sum the gradients of micro-batches in a binary tree on one process too, as several
            processes always do: the same weights then, and memory for more gradients.
        rl_kernel_tp_leaves: chunks of o_proj and down_proj: 1, 2, 4 or 8, a multiple of vLLM's tensor_parallel_size. It
            changes the bits, of trainer and rollout alike.
        rl_kernel_dtype: "bfloat16", with fp32 masters, or "float32" throughout; None: by `bf16`. It records the choice
            for copies of the configuration, because the flag sets `bf16` itself to False (no autocast).
    """

    use_rl_kernel_backend: bool = field(
        default=False,
        metadata={"help": "Run forward, log-probabilities, optimizer and rollout on rlkernel's batch-invariant ops."},
    )
    rl_kernel_strict: bool = field(
        default=True,
        metadata={"help": "Raise if rollout and training log-probabilities can differ; false logs and continues."},
    )
    rl_kernel_check_steps: int = field(
        default=2,
        metadata={"help": "First generations that keep TRL's forward for old log-probabilities, as a check."},
    )
    rl_kernel_recheck_every: int = field(
        default=50,
        metadata={"help": "Run that forward again every so many generations; 0 never."},
    )
    rl_kernel_gradient_tree: bool = field(
        default=False,
        metadata={"help": "Sum gradients of micro-batches in a tree on one process too, as several always do."},
    )
    rl_kernel_tp_leaves: int = field(
        default=1,
        metadata={"help": "Chunks of o_proj and down_proj (1, 2, 4, 8); vLLM's tensor_parallel_size must divide it."},
    )
    rl_kernel_dtype: str | None = field(
        default=None,
        metadata={"help": "Weights under the flag: bfloat16 (with fp32 masters) or float32; default: by bf16."},
    )

    def __post_init__(self) -> None:
        settings: Any = self
        for name in ("use_rl_kernel_backend", "rl_kernel_strict", "rl_kernel_gradient_tree"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if self.rl_kernel_tp_leaves not in (1, 2, 4, 8):
            raise ValueError(f"rl_kernel_tp_leaves is {self.rl_kernel_tp_leaves!r}; expected 1, 2, 4 or 8")
        if self.rl_kernel_dtype not in (None, *_DTYPES):
            raise ValueError(f"rl_kernel_dtype is {self.rl_kernel_dtype!r}; expected 'bfloat16' or 'float32'")
        if self.use_rl_kernel_backend:
            self._prepare()
        elif self.rl_kernel_dtype is not None:  # a copy with the flag switched off: bf16 has TRL's meaning again
            settings.bf16 = None if self.rl_kernel_dtype == "bfloat16" else settings.bf16
            self.rl_kernel_dtype = None
        super().__post_init__()  # type: ignore[misc]

    def _prepare(self) -> None:
        settings: Any = self
        if settings.fp16:
            raise ExactnessLostError(
                "use_rl_kernel_backend: fp16=True scales the loss, which is not supported; use bf16=True"
            )
        sharding = _sharding(settings)
        if sharding:
            raise ExactnessLostError(
                f"use_rl_kernel_backend: {sharding} sums weight gradients in an order of its own; launch with FSDP2 "
                "(fsdp_version: 2) or DDP (accelerate launch --multi_gpu)"
            )
        for name, least in (("rl_kernel_check_steps", 1), ("rl_kernel_recheck_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer, at least {least}")
        # Under the flag bf16 means bf16 weights with fp32 masters, not autocast over fp32 weights.
        if settings.bf16:
            self.rl_kernel_dtype = "bfloat16"
        elif self.rl_kernel_dtype is None:
            self.rl_kernel_dtype = "bfloat16" if settings.bf16 is None else "float32"
        settings.bf16 = False
        _guard_stock_trainers()


def _sharding(settings: Any) -> str:
    """What reduces gradients in another order, by the configuration or `accelerate launch`'s environment; or empty."""
    for name, field_name, variable in (
        ("DeepSpeed", "deepspeed", "ACCELERATE_USE_DEEPSPEED"),
        ("Megatron-LM", "", "ACCELERATE_USE_MEGATRON_LM"),
        ("tensor, context or sequence parallelism", "parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    ):
        if getattr(settings, field_name, None):
            return f"{name} ({field_name} in the configuration)"
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            return f"{name} ({variable}, set by accelerate launch)"
    return ""


def _guard_stock_trainers() -> None:
    """Makes a trainer that does not read the flag raise, because it would silently train without rlkernel.

    Set by the first configuration with the flag, so other processes keep transformers' constructor.
    """
    from transformers import Trainer

    stock = Trainer.__init__
    if getattr(stock, "rlkernel", False):
        return

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        if getattr(settings, "use_rl_kernel_backend", False) and not hasattr(type(self), "_rl_kernel"):
            kind = type(self)
            raise ExactnessLostError(
                f"use_rl_kernel_backend: {kind.__module__}.{kind.__name__} does not read the flag; use the trainer of "
                "rlkernel_trl, derive yours from it, or call rlkernel_trl.patch() before the script imports the name"
            )
        stock(self, *args, **kwargs)

    __init__.rlkernel = True  # type: ignore[attr-defined]
    Trainer.__init__ = __init__


@dataclass
class GRPOConfig(RLKernelArguments, trl.GRPOConfig):
    """`trl.GRPOConfig` with the fields of `RLKernelArguments`."""


@dataclass
class RLOOConfig(RLKernelArguments, trl.RLOOConfig):
    """`trl.RLOOConfig` with the fields of `RLKernelArguments`."""


@dataclass
class DPOConfig(RLKernelArguments, trl.DPOConfig):
    """`trl.DPOConfig` with the fields of `RLKernelArguments`."""


@dataclass
class SFTConfig(RLKernelArguments, trl.SFTConfig):
    """`trl.SFTConfig` with the fields of `RLKernelArguments`."""


def weight_dtype(settings: Any) -> torch.dtype:
    """dtype of the policy's weights and of vLLM's: bf16 unless the configuration sets fp32 throughout.

    Raises:
        ExactnessLostError: `model_init_kwargs` has another dtype.
    """
    if settings.rl_kernel_dtype == "bfloat16":
        return torch.bfloat16
    name = str((settings.model_init_kwargs or {}).get("dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ExactnessLostError(
            f"use_rl_kernel_backend: model_init_kwargs dtype is {name!r}; expected bfloat16, or float32 with bf16=False"
        )
    return _DTYPES[name]
