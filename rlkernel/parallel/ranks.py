"""The ranks of a run, which leaves each computes, and exchanges of data between them that depend on no order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")


class RankError(RuntimeError):
    """The ranks cannot work together, or another one has failed; the message names it and its reason."""


def _no_cause(error: BaseException) -> str | None:
    return None


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of a run; by default the only one, with one leaf.

    Attributes:
        leaves: into how many leaves an update is dealt: item j of the update's order belongs to leaf j mod leaves.
        rank, size: size divides leaves. Rank r computes the leaves r, r + size, ...
        group: the ranks; None: all, or no process group with a size of 1. It moves CPU tensors too.
        cause_of: which failure of another rank explains an error of this one; None if none does.
    """

    leaves: int = 1
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    cause_of: Callable[[BaseException], str | None] = _no_cause

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which judges completions and writes the run's files."""
        return self.rank == 0

    def owns(self, leaf: int) -> bool:
        """Whether this rank computes a leaf."""
        return leaf % self.size == self.rank

    def deal(self, items: Sequence[T]) -> list[Sequence[T]]:
        """The items of each leaf."""
        return [items[leaf :: self.leaves] for leaf in range(self.leaves)]

    def over_leaves(self, dealt: Sequence[Sequence[T]], work: Callable[[Sequence[T]], R]) -> list[R]:
        """Results of `work` on the items of each leaf, in the order of the leaves, on every rank.

        Each rank calls it on its own leaves, ascending. The results are JSON data; with one rank any data.
        """
        everyone = self.gather([work(dealt[leaf]) for leaf in range(self.rank, self.leaves, self.size)])
        return [everyone[leaf % self.size][leaf // self.size] for leaf in range(self.leaves)]

    def gather(self, value: R) -> list[R]:
        """The values of all ranks, JSON data, on every rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = max(int(each) for each in sizes)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=self.group)
        return [json.loads(bytes(row[: int(each)].numpy())) for row, each in zip(rows, sizes, strict=True)]

    def broadcast(self, value: R) -> R:
        """Rank 0's value, JSON data, on every rank; the others' values are ignored."""
        return self.gather(value if self.leads else None)[0]  # type: ignore[return-value]

    def complete(self, tensor: Tensor) -> Tensor:
        """Fills in, on every rank and in place, the elements that other ranks have; all except one hold zeros there.

        Bytes are added as integers, so that the sign of a zero and the payload of a NaN survive.
        """
        if self.size > 1:
            dist.all_reduce(tensor.view(torch.uint8), group=self.group)
        return tensor

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises RankError in place of an error in the block that another rank's failure has caused."""
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            if isinstance(error, RankError) or (cause := self.cause_of(error)) is None:
                raise
            raise RankError(f"{cause}; the other ranks end too") from error

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.gather(None)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return max(self.gather(number))


def in_order(leaves: Sequence[Sequence[T]]) -> list[T]:
    """The items' results in the items' order, from `Ranks.over_leaves` with one result per item."""
    count = sum(map(len, leaves))
    return [leaves[j % len(leaves)][j // len(leaves)] for j in range(count)]
