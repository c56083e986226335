"""Deals the samples of an update to leaves by their contents, so that every number of ranks computes the same sums.

verl deals samples to ranks by length and rank. Here the ranks exchange them first; rank r of W then computes leaf
i * W + r in round i, one backward each, and `rlkernel.parallel` adds the leaves in a tree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from rlkernel.parallel.tree import require_power_of_two

_CONTENTS = ("input_ids", "response_mask", "loss_mask", "old_log_probs", "advantages", "values", "returns")


@dataclass(frozen=True)
class Leaves:
    """How many leaves there are, and who computes them.

    Attributes:
        count: leaves of an update; doubled until a leaf is as small as a micro-batch may be.
        ranks, rank: of the data-parallel group.
        mesh: verl's device mesh.
    """

    count: int
    ranks: int
    rank: int
    mesh: Any

    def __post_init__(self) -> None:
        require_power_of_two("rl_kernel_leaves", self.count)
        require_power_of_two("the number of data-parallel ranks", self.ranks)
        if self.ranks > self.count:
            raise ValueError(
                f"rl_kernel_leaves is {self.count} for {self.ranks} ranks; expected at least one leaf for each: set "
                f"rl_kernel_leaves={self.ranks} under actor_rollout_ref.model, and under critic.model if there is one"
            )
        if self.mesh.ndim > 1 and self.mesh.size(0) > 2:
            raise ValueError(
                f"fsdp_config.fsdp_size={self.mesh.size(1)} makes {self.mesh.size(0)} replicas, which torch adds in an "
                f"order of its own; expected 1 or 2: set fsdp_size to {self.ranks} or {self.ranks // 2}"
            )


def deal(data: TensorDict, leaves: Leaves, group: dist.ProcessGroup) -> list[TensorDict]:
    """This rank's leaves of a mini-batch, in the order of the rounds.

    Args:
        data: this rank's samples, nested tensors [n, ...] or tensors [n, ...]; settings are kept, and other entries
            of samples, as text, are dropped.
        group: the data-parallel ranks.

    Raises:
        ValueError: there are fewer samples than leaves.
    """
    whole = _exchange(data, group) if leaves.ranks > 1 else _tensors(data)
    parts = partition(whole, leaves.count, _limits(data))
    settings = {key: value for key, value in data.items() if isinstance(value, NonTensorData)}
    mine = []
    for number in range(leaves.rank, len(parts), leaves.ranks):
        batch = TensorDict(
            {key: _rows(value, parts[number]) for key, value in whole.items()}, batch_size=len(parts[number])
        )
        tu.assign_non_tensor(batch, **settings)
        mine.append(batch)
    return mine


def partition(fields: dict[str, Tensor], count: int, limits: tuple[int, int]) -> list[list[int]]:
    """Indices of the samples of each leaf, by the samples' contents alone, not by their order.

    Args:
        fields: tensors of all samples, `input_ids` among them.
        count: leaves, at least.
        limits: samples and tokens that a leaf may have; a leaf has one sample at least.
    """
    size = len(fields["input_ids"])
    order = sorted(range(size), key=_digests(fields).__getitem__)
    lengths = _lengths(fields["input_ids"])[order].tolist()
    while True:
        if count > size:
            raise ValueError(
                f"an update has {size} samples for {count} leaves; lower rl_kernel_leaves or raise ppo_mini_batch_size"
            )
        found = get_seqlen_balanced_partitions(lengths, k_partitions=count, equal_size=size % count == 0)
        fits = all(len(part) <= limits[0] and sum(lengths[i] for i in part) <= limits[1] for part in found)
        if fits or 2 * count > size:
            return [[order[i] for i in sorted(part)] for part in found]
        count *= 2


def _limits(data: TensorDict) -> tuple[int, int]:
    """Samples and tokens of a micro-batch, of which verl's settings limit one."""
    most = 1 << 62
    if tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
        return most, int(data["max_token_len_per_gpu"])
    return int(data["micro_batch_size_per_gpu"]), most


def _digests(fields: dict[str, Tensor]) -> list[bytes]:
    """SHA-256 of what each sample's gradient depends on."""
    found = [hashlib.sha256() for _ in range(len(fields["input_ids"]))]
    for name in (name for name in _CONTENTS if name in fields):
        for digest, row in zip(found, fields[name].unbind(), strict=True):
            digest.update(row.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [digest.digest() for digest in found]


def _tensors(data: TensorDict) -> dict[str, Tensor]:
    return {key: value for key, value in sorted(data.items()) if isinstance(value, Tensor)}


def _lengths(nested: Any) -> Tensor:  # [B]
    lengths: Tensor = nested.offsets().diff()
    return lengths


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    if not values.is_nested:
        return values[rows]
    parts = values.unbind()
    return torch.nested.as_nested_tensor([parts[i] for i in rows], layout=torch.jagged)


def _exchange(data: TensorDict, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The tensors of all ranks' samples, by rank."""
    out = {}
    for key, value in _tensors(data).items():
        if not value.is_nested:
            out[key] = _all_gather(value, group)
            continue
        offsets = torch.nn.functional.pad(_all_gather(_lengths(value), group).cumsum(0), (1, 0))
        out[key] = torch.nested.nested_tensor_from_jagged(_all_gather(value.values(), group), offsets)
    return out


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:  # [n, ...] -> [sum of n, ...]
    """The ranks' tensors, of different n, one after another; on the CPU, where verl keeps samples."""
    ranks = dist.get_world_size(group)
    mine = mine.to(get_device_id())
    counts = [torch.zeros(1, dtype=torch.long, device=mine.device) for _ in range(ranks)]
    dist.all_gather(counts, counts[0].new_tensor([len(mine)]), group=group)
    most = int(max(counts))
    padded = torch.nn.functional.pad(mine, (0, 0) * (mine.dim() - 1) + (0, most - len(mine)))
    found = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(found, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(found, counts, strict=True)]).cpu()
