"""The optimizer of a run: AdamW on fp32 master weights with a learning-rate schedule and gradient clipping.

Ops add weight gradients to `parameter.main_grad` (fp32) in the contract's order. Only the norm is copied to the host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlkernel import ops
from rlkernel.models import Backbone, merge_adapters_
from rlkernel.optim import AdamW
from rlkernel.optim_offload import OffloadedAdamW
from rlkernel.training.checkpoint import tensors_of
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.int8_adamw import Int8AdamW


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
        model: each of its trained parameters gets a zeroed fp32 `main_grad`.
        settings: AdamW's settings.
        total: number of updates that the schedule spans.

    Attributes:
        updates: number of updates made.
    """

    def __init__(self, model: Backbone, settings: OptimizerSettings, total: int):
        self.model, self.settings, self.total, self.updates = model, settings, total, 0
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.named = [(name, p) for name, p in trained if p.dim() >= 2] + [(n, p) for n, p in trained if p.dim() < 2]
        self.adamw = self._make_adamw()

    def _make_adamw(self) -> AdamW:
        """AdamW over the parameters, and their gradients' memory."""
        self.model.zero_main_grads()
        return self._adamw_over([p for _, p in self.named])

    def _adamw_over(self, parameters: Sequence[Tensor]) -> AdamW:
        """AdamW over matrices, which decay, and vectors, which do not."""
        settings = self.settings
        kind: type[AdamW] = Int8AdamW if settings.states == "int8" else AdamW
        if settings.offload and self.model.device.type != "cpu":
            kind = OffloadedAdamW
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return kind(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors by parameter and kind, JSON data) of a checkpoint."""
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for name, parameter in self.named:
            for kind, value in self.adamw.state[parameter].items():
                if kind == "step":
                    steps[name] = int(value)
                else:
                    tensors[f"{name}.{kind}"] = value
        return tensors, {"updates": self.updates, "steps": steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self.updates = numbers["updates"]
        for name, parameter in self.named:
            if name in numbers["steps"]:
                state = {key.rpartition(".")[2]: t for key, t in tensors.items() if key.rpartition(".")[0] == name}
                self.adamw.set_state(parameter, {"step": numbers["steps"][name], **state})

    def gather(self) -> None:
        """Adds `.grad`, which stock ops leave, to `main_grad`; call it after each backward."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
                parameter.grad = None

    @property
    def one_backward(self) -> bool:
        """Whether all items of a leaf must be in one backward."""
        return False

    def end_leaf(self) -> None:
        """Completes the gradients of a leaf, also of one without items; call it after its last backward."""

    def close(self) -> None:
        """Releases the model, with whole weights, for another optimizer or for saving."""

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside the block every rank has all weights, for a rollout; every rank must enter it."""
        yield

    def model_tensors(self) -> dict[str, Tensor]:
        """The model's tensors for a checkpoint, which rank 0 writes; every rank must call it."""
        return tensors_of(self.model)

    def discard_leaf(self) -> None:
        """Zeroes the gradients of an unfinished leaf, also those of a backward that failed."""
        self.model.zero_grad()
        self.model.zero_main_grads()

    def discard(self) -> None:
        """Zeroes the gradients without an update."""
        self.discard_leaf()

    def step(self) -> Update:
        """Clips the gradients, updates masters, parameters and merged weights, zeroes the gradients.

        Raises:
            FloatingPointError: a gradient is not finite; names the parameters. No weight was updated.
        """
        norm, scale, squares = self._norm()
        found = float(norm)
        if not math.isfinite(found):
            bad = [name for (name, _), s in zip(self.named, squares.tolist(), strict=True) if not math.isfinite(s)]
            raise FloatingPointError(
                f"the gradient of {', '.join(bad[:3])} is not finite; lower optimizer.lr or set optimizer.clip_norm"
            )
        lr = learning_rate(self.settings, self.updates, self.total)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step(scale=scale, zero_grad=True)
        self._share_weights()
        merge_adapters_(self.model)
        self.updates += 1
        return Update(found, lr)

    def _norm(self) -> ops.GradNorm:
        """Norm of the update's gradients, in the order of `named`."""
        self.model.fold_main_grads()
        return ops.grad_norm(self.adamw.gradients(), max_norm=self.settings.clip_norm)

    def _share_weights(self) -> None:
        """Gives every rank the updated weights."""
