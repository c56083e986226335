"""Weight gradients summed over micro-batches and ranks in one binary tree: the same bits on 1, 2, 4 or 8 ranks.

A leaf is one backward. accelerate deals micro-batch i * W + r to rank r of W in step i, so the ranks of a step hold
neighbouring leaves: a reduce-scatter adds a subtree, and each rank adds the subtrees of its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlkernel.parallel.collectives import all_gather, reduce_scatter
from rlkernel.parallel.fsdp2 import set_tree_reduction
from rlkernel.parallel.tree import TreeSum, require_power_of_two
from rlkernel_transformers import masters, support

BUCKET = 1 << 24
"""Elements that one collective moves without FSDP2, 64 MiB of scratch memory; a larger tensor is moved alone."""


class GradientTree:
    """The sum over an update's leaves.

    Without FSDP2 every backward is followed by a reduce-scatter of the `main_grad` buffers, and an update by one
    all-gather. Each rank keeps the subtrees of its part: 4 bytes per parameter for each bit of the number of
    micro-batches, over the number of ranks. With FSDP2 the reduce-scatters are FSDP2's own, within the backward.

    Args:
        model: after `main_grads`, or its DDP wrapper; or after `fully_shard`. Its parameters stay the same ones.

    Raises:
        ValueError: the number of ranks is not a power of two.
    """

    def __init__(self, model: nn.Module):
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        require_power_of_two("GradientTree: the number of processes", self.ranks)
        self.model = support.find_model(model)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._sums: defaultdict[Any, TreeSum] = defaultdict(TreeSum)  # by parameter or bucket
        if self._modules:
            masters.main_grads(model)
            set_tree_reduction(model)
        elif isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = False

    def backward(self, backward: Callable[..., None], loss: Tensor, **options: Any) -> None:
        """Runs `backward(loss / W)`, whose gradients are one leaf, also under accelerate's `no_sync`.

        As with DDP's average, a loss over a process's own samples counts 1 / W, and one over a global number of tokens
        has to be multiplied by W. W is a power of two, so neither changes a bit.
        """
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
        backward(loss / self.ranks, **options)
        self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of the last backward as this rank's next leaf."""
        if self._modules:
            for p in self.model.parameters():
                if p.grad is not None:
                    self._sums[p].push(p.grad.to_local())
                    p.grad = None
            return
        masters.settle(self.model)
        for number, buffers in enumerate(self._buckets()):
            leaf = self._flat(buffers)
            if self.ranks > 1:
                part = leaf.new_empty(leaf.numel() // self.ranks)
                reduce_scatter(part, leaf)
                leaf = part
            self._sums[number].push(leaf)
            torch._foreach_zero_(buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Writes the sums of all leaves to the gradients; the next `add` begins another update."""
        if self._modules:
            for p, total in self._sums.items():
                p.grad = DTensor.from_local(
                    total.result(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
        else:
            for number, buffers in enumerate(self._buckets()):
                whole = self._sums[number].result()
                if self.ranks > 1:
                    part, whole = whole, whole.new_empty(whole.numel() * self.ranks)
                    all_gather(whole, part)
                sizes = [buffer.numel() for buffer in buffers]
                for buffer, value in zip(buffers, whole[: sum(sizes)].split(sizes), strict=True):
                    buffer.copy_(value.view_as(buffer))
        self._sums.clear()

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        for p in self.model.parameters():
            buffer = getattr(p, "main_grad", None)
            if buffer is None:
                continue
            if bucket and sum(b.numel() for b in bucket) + buffer.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(buffer)
        if bucket:
            yield bucket

    def _flat(self, buffers: list[Tensor]) -> Tensor:  # [W * n]
        flat = torch.cat([buffer.view(-1) for buffer in buffers])
        return torch.nn.functional.pad(flat, (0, -flat.numel() % self.ranks))
