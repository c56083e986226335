"""The optimizer of an update that is dealt to leaves: the same bits on any number of ranks.

Gradients are summed over leaves in the tree. Masters and moments are sharded over ranks (ZeRO-1, Rajbhandari et al.
2020, arXiv:1910.02054) by segments of 16384 elements, so that the norm has the contract's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract.orders import NORM_SEGMENT
from rlkernel.models import Backbone
from rlkernel.optim import AdamW
from rlkernel.parallel.collectives import all_gather, reduce_scatter
from rlkernel.parallel.norm import aligned_grad_norm
from rlkernel.parallel.ranks import Ranks
from rlkernel.parallel.tree import TreeSum
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.int8_adamw import MOMENTS
from rlkernel.training.int8_states import BLOCK
from rlkernel.training.optimizer import Optimizer


def make_optimizer(model: Backbone, settings: OptimizerSettings, total: int, ranks: Ranks) -> Optimizer:
    """The optimizer of a model in a run; arguments as in `Optimizer`."""
    if ranks.leaves == 1:
        return Optimizer(model, settings, total)
    return ShardedOptimizer(model, settings, total, ranks)


class Piece(NamedTuple):
    """This rank's part of a parameter: a flat view of the elements `begin` to `end`, of shape [1, n] of a matrix."""

    weight: Tensor
    begin: int
    end: int


class ShardedOptimizer(Optimizer):
    """`Optimizer` for a model that every rank holds whole.

    Weights lie in one buffer and gradients in another, each parameter from a multiple of NORM_SEGMENT elements, and
    each rank updates an equal part. Parameters become views of the buffer; their objects stay.
    """

    def __init__(self, model: Backbone, settings: OptimizerSettings, total: int, ranks: Ranks):
        self.ranks, self._sum = ranks, TreeSum()
        super().__init__(model, settings, total)

    @torch.no_grad()
    def _make_adamw(self) -> AdamW:
        starts, stop = [], 0
        for _, p in self.named:
            starts.append(stop)
            stop += -(-p.numel() // NORM_SEGMENT) * NORM_SEGMENT
        part = -(-stop // (NORM_SEGMENT * self.ranks.size)) * NORM_SEGMENT
        first = self.named[0][1]
        self._weights = torch.zeros(self.ranks.size * part, dtype=first.dtype, device=first.device)
        self._grads = torch.zeros_like(self._weights, dtype=torch.float32)
        self._grad_part = torch.zeros(part, device=first.device)
        own = range(self.ranks.rank * part, (self.ranks.rank + 1) * part)
        self._weights_part = self._weights[own.start : own.stop]
        self._pieces: dict[str, Piece] = {}
        for (name, p), start in zip(self.named, starts, strict=True):
            place = self._weights[start : start + p.numel()].view(p.shape)
            p.data = place.copy_(p)
            p.main_grad = self._grads[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]
            begin, end = max(own.start, start) - start, min(own.stop, start + p.numel()) - start
            if begin < end:
                shape = (1, -1) if p.dim() >= 2 else (-1,)
                weight = place.view(-1)[begin:end].view(shape)
                offset = start - own.start
                weight.main_grad = self._grad_part[offset + begin : offset + end].view(shape)  # type: ignore[attr-defined]
                self._pieces[name] = Piece(weight, begin, end)
        self.model.zero_main_grads()
        return self._adamw_over([piece.weight for piece in self._pieces.values()])

    def end_leaf(self) -> None:
        self.model.fold_main_grads()
        part = torch.empty_like(self._grad_part)
        reduce_scatter(part, self._grads, self.ranks.group)
        self._sum.push(part)
        self._grads.zero_()

    def discard(self) -> None:
        super().discard()
        self._sum = TreeSum()

    def _norm(self) -> ops.GradNorm:
        self._grad_part.copy_(self._sum.result())
        sizes = [p.numel() for _, p in self.named]
        return aligned_grad_norm(self._grad_part, sizes, self.settings.clip_norm, self.ranks.group)

    def _share_weights(self) -> None:
        all_gather(self._weights, self._weights_part, self.ranks.group)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `Optimizer.state`, with whole tensors on rank 0 and none on the others; every rank must call it."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.named if self.updates else ():
            for kind, (dtype, per) in self._kinds(p).items():
                whole = torch.zeros(-(-p.numel() // per), dtype=dtype, device=self._state_device)
                if name in self._pieces:
                    weight, begin, end = self._pieces[name]
                    whole[begin // per : -(-end // per)] = self.adamw.state[weight][kind].view(-1)
                self.ranks.complete(whole)
                if self.ranks.leads:
                    tensors[f"{name}.{kind}"] = (
                        whole.view(p.shape) if dtype == torch.float32 and per == 1 else whole
                    ).cpu()
        steps = {name: self.updates for name, _ in self.named} if self.updates else {}
        return tensors, {"updates": self.updates, "steps": steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.updates = numbers["updates"]
        for name, p in self.named:
            if name in numbers["steps"] and name in self._pieces:
                weight, begin, end = self._pieces[name]
                state: dict[str, Any] = {"step": numbers["steps"][name]}
                for kind, (dtype, per) in self._kinds(p).items():
                    part = tensors[f"{name}.{kind}"].view(-1)[begin // per : -(-end // per)]
                    state[kind] = part.view(weight.shape) if dtype == torch.float32 and per == 1 else part
                self.adamw.set_state(weight, state)

    @property
    def _state_device(self) -> torch.device:
        return torch.device("cpu") if self.settings.offload else self.model.device

    def _kinds(self, p: Tensor) -> dict[str, tuple[torch.dtype, int]]:
        """(dtype, elements of the parameter per value) of each state of a parameter."""
        fp32 = (torch.float32, 1)
        kinds: dict[str, tuple[torch.dtype, int]] = {}
        for moment in MOMENTS:
            if self.settings.states == "int8" and p.dim() >= 2:
                kinds |= {moment: (torch.uint8, 1), f"{moment}_max": (torch.float32, BLOCK)}
            else:
                kinds[moment] = fp32
        return kinds if p.dtype == torch.float32 else {**kinds, "master": fp32}
