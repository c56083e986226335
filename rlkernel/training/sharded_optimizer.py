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
    """This rank's part of a parameter.

    Attributes:
        weight: view of the flat parameter's elements `begin` to `end`; [1, n] of a matrix, which AdamW treats as one.
        place: of its first element in the rank's part of the buffer.
    """

    weight: Tensor
    begin: int
    end: int
    place: int


class State(NamedTuple):
    """One state of a parameter: a value per element, or one per block of `per` elements.

    Attributes:
        is_flat: stored as [numel / per], not in the parameter's shape, as 8-bit moments are.
    """

    dtype: torch.dtype = torch.float32
    per: int = 1
    is_flat: bool = False

    def part(self, piece: Piece) -> slice:
        """The values of a piece."""
        return slice(piece.begin // self.per, -(-piece.end // self.per))


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
                self._pieces[name] = Piece(place.view(-1)[begin:end].view(shape), begin, end, start + begin - own.start)
        self.model.zero_main_grads()
        return self._adamw_over([piece.weight for piece in self._pieces.values()])

    def end_leaf(self) -> None:
        self.model.fold_main_grads()
        if self.ranks.size == 1:
            self._sum.push(self._grads, owned=False)
        else:
            part = torch.empty_like(self._weights_part, dtype=torch.float32)
            reduce_scatter(part, self._grads, self.ranks.group)
            self._sum.push(part)
        self._grads.zero_()

    def discard(self) -> None:
        super().discard()
        self._sum = TreeSum()

    def _norm(self) -> ops.GradNorm:
        part = self._sum.result()
        for weight, begin, end, place in self._pieces.values():
            weight.main_grad = part[place : place + end - begin].view(weight.shape)  # type: ignore[attr-defined]
        sizes = [p.numel() for _, p in self.named]
        return aligned_grad_norm(part, sizes, self.settings.clip_norm, self.ranks.group)

    def _share_weights(self) -> None:
        for piece in self._pieces.values():
            piece.weight.main_grad = None  # type: ignore[attr-defined]  # frees the sum for the rollout
        all_gather(self._weights, self._weights_part, self.ranks.group)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `Optimizer.state`, with whole tensors on rank 0 and none on the others; every rank must call it."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.named if self.updates else ():
            for kind, state in self._states(p).items():
                whole = torch.zeros(-(-p.numel() // state.per), dtype=state.dtype, device=self._state_device)
                if name in self._pieces:
                    piece = self._pieces[name]
                    whole[state.part(piece)] = self.adamw.state[piece.weight][kind].view(-1)
                self.ranks.complete(whole)
                if self.ranks.leads:
                    tensors[f"{name}.{kind}"] = (whole if state.is_flat else whole.view(p.shape)).cpu()
        steps = {name: self.updates for name, _ in self.named} if self.updates else {}
        return tensors, {"updates": self.updates, "steps": steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.updates = numbers["updates"]
        for name, p in self.named:
            if name in numbers["steps"] and name in self._pieces:
                piece = self._pieces[name]
                own: dict[str, Any] = {"step": numbers["steps"][name]}
                for kind, state in self._states(p).items():
                    part = tensors[f"{name}.{kind}"].view(-1)[state.part(piece)]
                    own[kind] = part if state.is_flat else part.view(piece.weight.shape)
                self.adamw.set_state(piece.weight, own)

    @property
    def _state_device(self) -> torch.device:
        return torch.device("cpu") if self.settings.offload else self.model.device

    def _states(self, p: Tensor) -> dict[str, State]:
        """The states of a parameter by their names in AdamW."""
        states: dict[str, State] = {}
        for moment in MOMENTS:
            if self.settings.states == "int8" and p.dim() >= 2:
                states |= {moment: State(torch.uint8, 1, True), f"{moment}_max": State(torch.float32, BLOCK, True)}
            else:
                states[moment] = State()
        return states if p.dtype == torch.float32 else {**states, "master": State()}
