"""SharedPrefix: which sequences of a decode batch have the same first keys, an argument of `paged_attention`."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from rlkernel.ops.checks import check, check_tensors


class SharedPrefix(NamedTuple):
    """Groups of neighbouring sequences with the same first keys in the same pages.

    Attributes:
        groups: [G+1] int32, ascending from 0: sequences groups[g] to groups[g+1] - 1 form group g. Sequences from
            groups[G] on belong to no group.
        lengths: [B] int32, number of keys that a sequence shares with its group: equal within a group, less than the
            keys of each of its sequences, 0 outside groups.
        max_group, max_length: upper bounds of the sequences per group and of `lengths`; they size the launch.
    """

    groups: Tensor  # [G+1] int32
    lengths: Tensor  # [B] int32
    max_group: int
    max_length: int


def check_shared(op: str, shared: SharedPrefix, block_table: Tensor, seq_lens_k: Tensor, page_size: int) -> None:
    """Raises ValueError unless the groups fit the batch; values are checked on the CPU only."""
    groups, lengths = shared.groups, shared.lengths
    check_tensors(op, groups=groups, lengths=lengths)
    b = seq_lens_k.shape[0]
    for name, value, size in (("groups", groups, None), ("lengths", lengths, b)):
        fits = value.dim() == 1 and value.dtype == seq_lens_k.dtype and value.shape[0] == (size or value.shape[0])
        check(
            fits and value.shape[0] > 0,
            lambda name=name, value=value, size=size: (  # type: ignore[misc]
                f"{op}: shared.{name} is {tuple(value.shape)} {value.dtype}; expected "
                f"[{'G+1' if size is None else f'B={size}'}] int32"
            ),
        )
    if groups.device.type != "cpu":
        return
    borders, shares, keys = groups.tolist(), lengths.tolist(), seq_lens_k.tolist()
    check(
        borders[0] == 0 and borders == sorted(borders) and borders[-1] <= b,
        lambda: f"{op}: shared.groups is {borders[:8]}...; it must rise from 0 to at most B={b}",
    )
    for first, stop in itertools.pairwise(borders):
        members = range(first, stop)
        pages = -(-shares[first] // page_size) if members else 0
        for i in members:
            check(
                0 <= shares[i] == shares[first] < keys[i]
                and bool((block_table[i, :pages] == block_table[first, :pages]).all()),
                lambda i=i, first=first: (  # type: ignore[misc]
                    f"{op}: sequence {i} has {keys[i]} keys and shares {shares[i]}, the first of its group shares "
                    f"{shares[first]}; expected one number below the keys, and equal pages"
                ),
            )
    check(not any(shares[borders[-1] :]), lambda: f"{op}: shared.lengths must be 0 for sequences outside the groups")
