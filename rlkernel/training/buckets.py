"""Parameters whose gradients are summed over leaves together, and of which each rank updates an equal part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import NORM_SEGMENT
from rlkernel.parallel.collectives import all_gather, reduce_scatter
from rlkernel.parallel.norm import aligned_squares
from rlkernel.parallel.ranks import Ranks
from rlkernel.parallel.tree import TreeSum


class Piece(NamedTuple):
    """This rank's part of a parameter.

    Attributes:
        weight: view of the flat parameter's elements `begin` to `end`; [1, n] of a matrix, which AdamW treats as one.
        place: of its first element in the rank's part of the bucket.
    """

    weight: Tensor
    begin: int
    end: int
    place: int


class Bucket:
    """Some parameters of a model, in one buffer, each from a multiple of NORM_SEGMENT elements.

    The parameters become views of the buffer; their objects stay. Their `main_grad` are views of another one.

    Args:
        named: names and parameters, of one dtype.
        ranks: they share the buffer evenly.
        grads: memory of the gradients, zeros, which buckets of one layout may share if their backwards follow one
            another; None: memory of its own.

    Attributes:
        grads: [W * part] fp32.
        pieces: this rank's parts by the parameters' names.
    """

    @torch.no_grad()
    def __init__(self, named: Sequence[tuple[str, Tensor]], ranks: Ranks, grads: Tensor | None = None):
        self.ranks, self._sum = ranks, TreeSum()
        self.sizes = {name: p.numel() for name, p in named}
        starts, stop = [], 0
        for _, p in named:
            starts.append(stop)
            stop += -(-p.numel() // NORM_SEGMENT) * NORM_SEGMENT
        part = -(-stop // (NORM_SEGMENT * ranks.size)) * NORM_SEGMENT
        own = range(ranks.rank * part, (ranks.rank + 1) * part)
        first = named[0][1]
        self._weights = torch.zeros(ranks.size * part, dtype=first.dtype, device=first.device)
        self._own_weights = self._weights[own.start : own.stop]
        self.grads = torch.zeros_like(self._weights, dtype=torch.float32) if grads is None else grads
        self.pieces: dict[str, Piece] = {}
        for (name, p), start in zip(named, starts, strict=True):
            place = self._weights[start : start + p.numel()].view(p.shape)
            p.data = place.copy_(p)
            p.main_grad = self.grads[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]
            begin, end = max(own.start, start) - start, min(own.stop, start + p.numel()) - start
            if begin < end:
                shape = (1, -1) if p.dim() >= 2 else (-1,)
                self.pieces[name] = Piece(place.view(-1)[begin:end].view(shape), begin, end, start + begin - own.start)

    def add_leaf(self) -> None:
        """Adds a round's leaves, whose gradients are complete on every rank, to the sum; zeroes the gradients."""
        if self.ranks.size == 1:
            self._sum.push(self.grads, owned=False)
        else:
            part = torch.empty_like(self._own_weights, dtype=torch.float32)
            reduce_scatter(part, self.grads, self.ranks.group)
            self._sum.push(part)
        self.grads.zero_()

    def discard(self) -> None:
        """Forgets the leaves added so far."""
        self._sum = TreeSum()

    def finish(self) -> dict[str, Tensor]:
        """Gives this rank's pieces their summed gradients; returns the sums of squares for the norm, by parameter."""
        part = self._sum.result()
        for weight, begin, end, place in self.pieces.values():
            weight.main_grad = part[place : place + end - begin].view(weight.shape)  # type: ignore[attr-defined]
        squares = aligned_squares(part, list(self.sizes.values()), self.ranks.group)
        return dict(zip(self.sizes, squares, strict=True))

    def share_weights(self) -> None:
        """Gives every rank the updated weights, and frees the summed gradients for the rollout."""
        for piece in self.pieces.values():
            piece.weight.main_grad = None  # type: ignore[attr-defined]
        all_gather(self._weights, self._own_weights, self.ranks.group)
