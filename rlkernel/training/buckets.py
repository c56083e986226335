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
        shards_weights: this rank's part of the weights has memory of its own, so that the buffer can be freed.

    Attributes:
        grads: [W * part] fp32.
        pieces: this rank's parts by the parameters' names.
        is_whole: the buffer holds the weights of all ranks.
    """

    @torch.no_grad()
    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        ranks: Ranks,
        grads: Tensor | None = None,
        shards_weights: bool = False,
    ):
        self.ranks, self.shards_weights, self.is_whole = ranks, shards_weights, True
        self._sum = TreeSum()
        self.sizes = {name: p.numel() for name, p in named}
        starts, stop = [], 0
        for _, p in named:
            starts.append(stop)
            stop += -(-p.numel() // NORM_SEGMENT) * NORM_SEGMENT
        part = -(-stop // (NORM_SEGMENT * ranks.size)) * NORM_SEGMENT
        own = range(ranks.rank * part, (ranks.rank + 1) * part)
        first = named[0][1]
        self._weights = torch.zeros(ranks.size * part, dtype=first.dtype, device=first.device)
        self._own_place = slice(own.start, own.stop)
        self._own_weights = self._weights[self._own_place]
        if shards_weights:
            self._own_weights = self._own_weights.clone()
        self.grads = torch.zeros_like(self._weights, dtype=torch.float32) if grads is None else grads
        self.pieces: dict[str, Piece] = {}
        for (name, p), start in zip(named, starts, strict=True):
            place = self._weights[start : start + p.numel()].view(p.shape)
            p.data = place.copy_(p)
            p.main_grad = self.grads[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]
            begin, end = max(own.start, start) - start, min(own.stop, start + p.numel()) - start
            if begin < end:
                shape, at = (1, -1) if p.dim() >= 2 else (-1,), start + begin - own.start
                self.pieces[name] = Piece(self._own_weights[at : at + end - begin].view(shape), begin, end, at)
        self.take_own()

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
        """Gives every rank the updated weights, now or, of a sharded bucket, when they are needed; frees the summed
        gradients for the rollout."""
        for piece in self.pieces.values():
            piece.weight.main_grad = None  # type: ignore[attr-defined]
        self.free() if self.shards_weights else self.gather()

    @torch.no_grad()
    def take_own(self) -> None:
        """Takes this rank's part over from the whole weights, which may have been loaded."""
        if self.shards_weights:
            self._own_weights.copy_(self._weights[self._own_place])

    @torch.no_grad()
    def gather(self) -> None:
        """Makes the parameters whole."""
        self._weights.untyped_storage().resize_(self._weights.nbytes)
        all_gather(self._weights, self._own_weights, self.ranks.group)
        self.is_whole = True

    def free(self) -> None:
        """Frees the memory of the parameters, of which this rank keeps its part."""
        self._weights.untyped_storage().resize_(0)
        self.is_whole = False
