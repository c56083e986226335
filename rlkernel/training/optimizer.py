"""The optimizer of a run: AdamW on fp32 master weights with a learning-rate schedule and gradient clipping.

Ops add weight gradients to `parameter.main_grad` (fp32) in the contract's order. Only the norm is copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlkernel import ops
from rlkernel.models import Backbone
from rlkernel.optim import AdamW
from rlkernel.optim_offload import OffloadedAdamW
from rlkernel.training.config import OptimizerSettings


@dataclass(frozen=True)
class Update:
    """Gradient norm before clipping, and learning rate, of one optimizer step."""

    grad_norm: float
    lr: float


def learning_rate(settings: OptimizerSettings, update: int, total: int) -> float:
    """Learning rate of update `update` (from 0) of `total`: linear warm-up, then constant, linear or cosine decay."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, total - settings.warmup_steps)
    share = min(1.0, (update - settings.warmup_steps) / span)
    keep = 1.0 - share if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * keep)


class Optimizer:
    """The optimizer of one model.

    Args:
        model: each of its parameters gets a zeroed fp32 `main_grad`.
        settings: AdamW's settings.
        total: number of updates that the schedule spans.

    Attributes:
        updates: number of updates made.
    """

    def __init__(self, model: Backbone, settings: OptimizerSettings, total: int):
        self.model, self.settings, self.total, self.updates = model, settings, total, 0
        model.zero_main_grads()
        named = list(model.named_parameters())
        matrices = [(name, p) for name, p in named if p.dim() >= 2]
        vectors = [(name, p) for name, p in named if p.dim() < 2]
        self.names = [name for name, _ in matrices + vectors]
        kind = OffloadedAdamW if settings.offload and model.device.type != "cpu" else AdamW
        self.adamw = kind(
            [
                {"params": [p for _, p in matrices], "weight_decay": settings.weight_decay},
                {"params": [p for _, p in vectors], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors by parameter and kind, JSON data) of a checkpoint."""
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for name, parameter in self._parameters():
            for kind, value in self.adamw.state[parameter].items():
                if kind == "step":
                    steps[name] = int(value)
                else:
                    tensors[f"{name}.{kind}"] = value
        return tensors, {"updates": self.updates, "steps": steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self.updates = numbers["updates"]
        for name, parameter in self._parameters():
            if name in numbers["steps"]:
                kinds = [kind for kind in ("exp_avg", "exp_avg_sq", "master") if f"{name}.{kind}" in tensors]
                state = {kind: tensors[f"{name}.{kind}"] for kind in kinds}
                self.adamw.set_state(parameter, {"step": numbers["steps"][name], **state})

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        return zip(self.names, parameters, strict=True)

    def gather(self) -> None:
        """Adds `.grad`, which stock ops leave, to `main_grad`; call it after each backward."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
                parameter.grad = None

    def discard(self) -> None:
        """Zeroes the gradients without an update, also those of a backward that failed."""
        self.model.zero_grad()
        self.model.zero_main_grads()

    def step(self) -> Update:
        """Clips the gradients, updates masters and parameters, zeroes the gradients.

        Raises:
            FloatingPointError: a gradient is not finite; names the parameters. No weight was updated.
        """
        self.model.fold_main_grads()
        norm, scale, squares = ops.grad_norm(self.adamw.gradients(), max_norm=self.settings.clip_norm)
        lr = learning_rate(self.settings, self.updates, self.total)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step(scale=scale, zero_grad=True)
        found = float(norm)
        if not math.isfinite(found):
            bad = [name for name, square in zip(self.names, squares.tolist(), strict=True) if not math.isfinite(square)]
            raise FloatingPointError(
                f"the gradient of {', '.join(bad[:3])} is not finite; lower optimizer.lr or set optimizer.clip_norm"
            )
        self.updates += 1
        return Update(found, lr)
