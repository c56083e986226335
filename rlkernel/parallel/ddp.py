"""A communication hook of DistributedDataParallel that sums gradients over leaves in the tree.

    model.register_comm_hook(TreeHook(rounds=L // W), tree_hook)

A leaf is one backward, or the sum of those under `no_sync()` and the one that ends them, so micro-batches are part of a
run's identity. Rank r computes leaf i * W + r in its synchronising backward number i. Losses are divided by global
counts: the hook sums and does not divide by the number of ranks.
"""

# No `from __future__ import annotations`: DDP compares the annotations of `tree_hook` with these classes.

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from rlkernel.parallel.collectives import all_reduce
from rlkernel.parallel.tree import TreeSum, require_power_of_two


class TreeHook:
    """State of `tree_hook`.

    Args:
        rounds: synchronising backwards per update on each rank, L / W.
        group: of W ranks; default: all.

    Raises:
        ValueError: rounds is not a power of two.
    """

    def __init__(self, rounds: int = 1, group: ProcessGroup | None = None):
        require_power_of_two("TreeHook: rounds", rounds)
        self.rounds, self.group = rounds, group
        self._sums: dict[Tensor, TreeSum] = {}  # by parameter, because DDP rebuilds its buckets after one backward
        self._seen: dict[Tensor, int] = {}

    def over_rounds(self, parameter: Tensor, reduced: Tensor) -> None:
        """Replaces a round's gradient by -0, which adds nothing to the next round's, or in the last one by the sum."""
        total = self._sums.setdefault(parameter, TreeSum())
        total.push(reduced, owned=False)
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._seen[parameter] < self.rounds:
            reduced.fill_(-0.0)
        else:
            reduced.copy_(total.result())
            self._seen[parameter] = 0


def tree_hook(state: TreeHook, bucket: GradBucket) -> Future[Tensor]:
    """Sums a bucket over ranks and rounds. It does not overlap with the backward: it waits for the collective.

    Raises:
        ValueError: the gradients are not fp32.
    """
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        raise ValueError(f"tree_hook: gradients are {buffer.dtype}; expected float32 parameters (bf16 by autocast)")
    all_reduce(buffer, state.group)
    if state.rounds > 1:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            state.over_rounds(parameter, gradient)
    done: Future[Tensor] = Future()
    done.set_result(buffer)
    return done
