"""pack and unpack: concatenates sequences into one tensor with cu_seqlens, and splits it again. No arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.ops.checks import check, check_dense, check_tensors


class Packed(NamedTuple):
    """Result of `pack`.

    Attributes:
        flat: [T, ...], the sequences concatenated.
        cu_seqlens: [B + 1] int32, sequence b is flat[cu_seqlens[b]:cu_seqlens[b + 1]].
        positions: [T] int64, position of each token in its own sequence, from 0.
    """

    flat: Tensor
    cu_seqlens: Tensor
    positions: Tensor


def pack(sequences: Sequence[Tensor] | Sequence[Sequence[int]]) -> Packed:  # B x [L_i, ...]
    """Concatenates sequences without padding.

    Args:
        sequences: tensors [L_i, ...] of one dtype, device and trailing shape, or lists of token ids (int64 on the
            CPU). L_i may be 0. Differentiable in tensors.

    Returns:
        Packed(flat [T, ...], cu_seqlens [B + 1] int32, positions [T] int64), on the sequences' device.

    Raises:
        ValueError: no sequence, different dtypes, devices or shapes, or 2^31 tokens or more.
        TypeError: not a list of tensors, or of lists of integers below 2^63.
    """
    if not hasattr(sequences, "__len__") or isinstance(sequences, (str, bytes, dict)):
        raise TypeError(
            f"pack: sequences is of type {type(sequences).__name__}; expected a list of tensors or of lists of ids"
        )
    check(len(sequences) > 0, lambda: "pack: sequences is empty; pass at least one (it may have length 0)")
    rows = [x if isinstance(x, Tensor) else _ids(i, x) for i, x in enumerate(sequences)]
    first = rows[0]
    for i, row in enumerate(rows):
        _check_row(i, row, first)
    lengths = [row.shape[0] for row in rows]
    total = sum(lengths)
    check(total < 2**31, lambda: f"pack: {total} tokens do not fit an int32 cu_seqlens; split the batch")
    size = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu")
    ends = size.cumsum(0)
    positions = torch.arange(total, device="cpu") - torch.repeat_interleave(ends[:-1], size[1:])
    return Packed(torch.cat(rows), ends.to(first.device, torch.int32), positions.to(first.device))


def unpack(flat: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """The sequences of a packed tensor, as views: the inverse of `pack`.

    Args:
        flat: [T, ...].
        cu_seqlens: [B + 1] int32 or int64.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, or does not end at T. TypeError: cu_seqlens does not hold
            integers, or one is not a tensor.
    """
    check_tensors("unpack", flat=flat, cu_seqlens=cu_seqlens)
    check_dense("unpack", ("flat", "cu_seqlens"), (flat, cu_seqlens))
    check(flat.dim() >= 1, lambda: "unpack: flat is a scalar, expected [T, ...]")
    check(
        cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1,
        lambda: f"unpack: cu_seqlens is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; expected [B + 1] int32 or int64",
        TypeError,
    )
    ends = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    check(
        len(ends) > 0 and ends[0] == 0 and ends[-1] == flat.shape[0] and min(lengths, default=0) >= 0,
        lambda: (
            f"unpack: cu_seqlens must start at 0, never decrease and end at T={flat.shape[0]}; it is {ends[:8]}"
            f"{'...' if len(ends) > 8 else ''}"
        ),
    )
    return list(flat.split(lengths)) if lengths else []


def _ids(i: int, sequence: Iterable[int]) -> Tensor:
    try:
        ids = torch.tensor(list(sequence), device="cpu")
        are_integers = ids.numel() == 0 or not (ids.is_floating_point() or ids.is_complex())
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: 2^63
        are_integers = False
    check(
        are_integers,
        lambda: (
            f"pack: sequences[{i}] is neither a tensor nor a list of integers below 2^63; pass token ids, or a tensor"
        ),
        TypeError,
    )
    return ids.to(torch.int64)


def _check_row(i: int, row: Tensor, first: Tensor) -> None:
    check(row.dim() >= 1, lambda: f"pack: sequences[{i}] is a scalar, expected [L, ...]")
    check(
        row.dtype == first.dtype and row.device == first.device and row.shape[1:] == first.shape[1:],
        lambda: (
            f"pack: sequences[{i}] is {tuple(row.shape)} {row.dtype} on {row.device}, sequences[0] is "
            f"{tuple(first.shape)} {first.dtype} on {first.device}; only the first dimension may differ"
        ),
    )
