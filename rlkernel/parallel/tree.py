"""Sums of leaves in a balanced binary tree, in fp32, neighbours first: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def require_power_of_two(what: str, count: int) -> None:
    """Raises ValueError unless `count` is 1, 2, 4, ...: only then is the tree balanced on any number of ranks."""
    if count < 1 or count & (count - 1):
        raise ValueError(f"{what} is {count}; expected a power of two (1, 2, 4, 8, ...)")


def tree_sum(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 sum of tensors of one shape, in the tree.

    Raises:
        ValueError: their number is not a power of two.
    """
    require_power_of_two("tree_sum: the number of tensors", len(tensors))
    level = [tensor.float() for tensor in tensors]
    while len(level) > 1:
        level = [left + right for left, right in zip(level[0::2], level[1::2], strict=True)]
    return level[0]


class TreeSum:
    """The same sum of leaves that come one after another; with n leaves pushed it holds at most log2(n) + 1 tensors.

    Subtrees of equal size may be pushed in place of leaves.
    """

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Tensor]] = []  # (height, sum), heights descending: the bits of a counter

    def push(self, value: Tensor, *, owned: bool = True) -> None:
        """Adds the next leaf, an fp32 tensor.

        Args:
            owned: the tensor is the sum's from then on and may be overwritten; False: it is only read, and copied if
                the leaf has no partner yet.
        """
        height = 0
        while self._subtrees and self._subtrees[-1][0] == height:
            value = self._subtrees.pop()[1].add_(value)
            height += 1
        self._subtrees.append((height, value if owned or height else value.clone()))

    def result(self) -> Tensor:
        """The sum of all leaves; the next `push` begins a new one.

        If the number of leaves is not a power of two, the last subtrees are added to the larger ones before them, in
        the order that a power of two of leaves per round gives too.

        Raises:
            ValueError: there are no leaves.
        """
        if not self._subtrees:
            raise ValueError("TreeSum: there are no leaves; push at least one")
        _, total = self._subtrees.pop()
        while self._subtrees:
            total = self._subtrees.pop()[1].add_(total)
        return total
