"""FSDP2 with gradients summed over leaves in the tree: the same bits on any number of ranks.

A leaf is one backward, or the sum of those after `set_requires_gradient_sync(False)` and the one after `True`, so
micro-batches are part of a run's identity. Rank r computes leaf i * W + r in its synchronising backward number i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from rlkernel.parallel.collectives import reduce_scatter
from rlkernel.parallel.tree import TreeSum, require_power_of_two

REMEDY = "pass mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32) to fully_shard"


class TreeReduceScatter:
    """The sum over the ranks of a round, for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of inputs and outputs, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """FSDP2 calls it on its own stream; the collective is ordered on that stream.

        Raises:
            ValueError: the gradients are not fp32.
        """
        _check_dtype(input_tensor)
        reduce_scatter(output_tensor, input_tensor, group)


class RoundSum:
    """The sum over rounds, for `FSDPModule.set_all_reduce_hook`, which also runs on a single rank.

    FSDP2 adds each round's output to the gradient. This hook keeps the outputs back, writes -0 in their place, which
    adds nothing to any number, and writes the sum of the tree in the last round.
    """

    def __init__(self, rounds: int):
        self.rounds, self._seen, self._sum = rounds, 0, TreeSum()

    def __call__(self, reduced: Tensor) -> None:
        """Takes one round's output of one FSDP module, and changes it in place."""
        _check_dtype(reduced)
        if reduced.is_cuda:
            # FSDP2 allocates the output on its reduce-scatter stream, calls hooks on another one and drops the output:
            # without this line the next module's reduce-scatter could take the memory while this stream still reads it.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        if self.rounds == 1:
            return
        self._sum.push(reduced, owned=False)
        self._seen += 1
        if self._seen < self.rounds:
            reduced.fill_(-0.0)
        else:
            reduced.copy_(self._sum.result())
            self._seen = 0


def set_tree_reduction(model: nn.Module, rounds: int = 1) -> None:
    """Makes every FSDP module in `model` sum its gradients over leaves in the tree, in fp32 and without a division.

    Losses are divided by the global number of tokens or samples, not by the number of ranks.

    Args:
        model: after `fully_shard`, with reduce_dtype fp32; one or two replicas (HSDP), because torch adds over them.
        rounds: synchronising backwards per update on each rank, L / W.

    Raises:
        ValueError: rounds is not a power of two, or no module is sharded.
    """
    require_power_of_two("set_tree_reduction: rounds", rounds)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("set_tree_reduction: no module of the model is sharded; call fully_shard first")
    for module in modules:
        module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]  # its base class is private
        module.set_all_reduce_hook(RoundSum(rounds))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _check_dtype(reduced: Tensor) -> None:
    if reduced.dtype != torch.float32:
        raise ValueError(f"set_tree_reduction: gradients are reduced in {reduced.dtype}; expected float32: {REMEDY}")
