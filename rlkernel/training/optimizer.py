"""AdamW on fp32 master weights: gradients gathered in fp32, clipped by a norm that no thread count changes.

Ops add weight gradients to `parameter.main_grad` (fp32) in the contract's order. An fp32 model is its own master;
of a bf16 or fp16 model the masters are fp32 copies, rounded into the parameters after each update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.models import Decoder
from rlkernel.training.config import OptimizerSettings


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: gradient norm before clipping, and the learning rate."""

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


def squared_norm(grad: Tensor) -> float:
    """Sum of squares in fp64: segments of 1024 elements, whose sums are added exactly (math.fsum), in any order."""
    flat = grad.reshape(-1)
    whole = flat.numel() // SEGMENT * SEGMENT
    sums: list[float] = []
    rows = flat[:whole].view(-1, SEGMENT)
    for block in rows.split(4096):  # keeps the fp64 copy of a large gradient small
        sums += block.double().square().sum(dim=1).tolist()
    if whole < flat.numel():
        sums.append(float(flat[whole:].double().square().sum()))
    return math.fsum(sums)


class Optimizer:
    """The optimizer of one model.

    Args:
        model: its parameters get a zeroed fp32 `main_grad` each.
        settings: AdamW's settings; total: updates that the schedule spans.

    Attributes:
        updates: number of updates made.
    """

    def __init__(self, model: Decoder, settings: OptimizerSettings, total: int):
        self.model, self.settings, self.total, self.updates = model, settings, total, 0
        model.zero_main_grads()
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.masters: list[Tensor] = []
        for parameter in self.parameters:
            same = parameter.dtype == torch.float32
            self.masters.append(parameter if same else parameter.detach().float().clone().requires_grad_())
        matrices = [m for m in self.masters if m.dim() >= 2]
        vectors = [m for m in self.masters if m.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps
        )

    def gather(self) -> None:
        """Moves what autograd left in `.grad` (stock ops) to `main_grad`; call it after each backward."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
                parameter.grad = None

    def discard(self) -> None:
        """Zeroes the gradients without an update."""
        self.model.zero_main_grads()

    @torch.no_grad()
    def step(self) -> Update:
        """Clips, updates the masters, rounds them into the parameters, zeroes the gradients.

        Raises:
            FloatingPointError: a gradient is not finite; names the parameter. Nothing was updated.
        """
        self.model.fold_main_grads()
        grads: list[Tensor] = [parameter.main_grad for parameter in self.parameters]  # type: ignore[attr-defined]
        squares = [squared_norm(grad) for grad in grads]
        for name, square in zip(self.names, squares, strict=True):
            if not math.isfinite(square):
                raise FloatingPointError(
                    f"the gradient of {name} is not finite; lower optimizer.lr or set optimizer.clip_norm"
                )
        norm = math.sqrt(math.fsum(squares))
        limit = self.settings.clip_norm
        if limit is not None and norm > limit:
            for grad in grads:
                grad.mul_(limit / norm)
        lr = learning_rate(self.settings, self.updates, self.total)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)
        self.discard()
        self.updates += 1
        return Update(norm, lr)
