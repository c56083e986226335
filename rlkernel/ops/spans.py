"""Spans of packed rows: gather them, put them back, and the index that does both. No arithmetic.

Spans are on the CPU, because the number of their rows is a shape; the index is copied to the device without a
synchronisation. Gather and scatter are torch's `index_select` and `index_copy`, which write every row once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.ops.checks import check, not_tensor
from rlkernel.ops.pack import Packed


def span_rows(op: str, spans: Any, tokens: int | None, device: torch.device) -> Tensor:  # [K, 2] -> [N] int64
    """The rows of all spans, ascending, on `device`.

    Args:
        tokens: the number of rows; None, if the host does not know it, skips that check.

    Raises:
        ValueError: the spans are not [K, 2] on the CPU, or empty, descending, overlapping, or outside [0, tokens].
        TypeError: they are not integers in a tensor.
    """
    if not isinstance(spans, Tensor):
        raise not_tensor(op, spans=spans)
    check(
        spans.dtype in (torch.int32, torch.int64),
        lambda: f"{op}: spans are {spans.dtype}; expected int32 or int64",
        TypeError,
    )
    check(
        spans.dim() == 2 and spans.shape[1] == 2 and spans.device.type == "cpu",
        lambda: f"{op}: spans are {tuple(spans.shape)} on {spans.device}; expected [K, 2] (begin, end) on the CPU",
    )
    begin, end = spans.long().unbind(1)
    before = torch.cat([begin.new_zeros(1), end[:-1]])
    is_wrong = (begin < before) | (end <= begin)
    wrong = torch.nonzero(is_wrong if tokens is None else is_wrong | (end > tokens)).flatten()
    check(
        len(wrong) == 0,
        lambda: (
            f"{op}: span {int(wrong[0])} is {spans[wrong[0]].tolist()}, after row {int(before[wrong[0]])}"
            f"{'' if tokens is None else f' of {tokens}'}; "
            "spans must ascend without overlap, hold at least one row and end within the rows"
        ),
    )
    lengths = end - begin
    starts = begin - (lengths.cumsum(0) - lengths)  # of each span, less its first index in the result
    rows = torch.arange(int(lengths.sum()), device="cpu") + torch.repeat_interleave(starts, lengths)
    return to_device(rows, device)


def scored_seqlens(spans: Tensor, cu_seqlens: Tensor, scored: int | None = None) -> Tensor:  # [B + 1] int32
    """Offsets of the sequences among the rows of the spans, computed on the device of `cu_seqlens`.

    Only on a CPU (`known_tokens`) is it checked that the spans end within the sequences.

    Raises:
        ValueError, TypeError: the spans are invalid, or do not have `scored` rows.
    """
    rows = span_rows("loss_spans", spans, known_tokens(cu_seqlens), cu_seqlens.device)
    check(
        scored is None or rows.shape[0] == scored,
        lambda: f"loss_spans: the spans have {rows.shape[0]} rows, and the vectors {scored}; pass those of the spans",
    )
    return seqlens_of_rows(rows, cu_seqlens)


def known_tokens(cu_seqlens: Tensor) -> int | None:
    """The number of tokens; None on a GPU, because reading it would synchronise."""
    return int(cu_seqlens[-1]) if cu_seqlens.device.type == "cpu" else None


def seqlens_of_rows(rows: Tensor, cu_seqlens: Tensor) -> Tensor:  # [N], [B + 1] -> [B + 1] int32
    """Offsets of the sequences among ascending rows; both on one device."""
    return torch.searchsorted(rows, cu_seqlens.long(), out_int32=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to `device`, through pinned memory, so that the host does not wait for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def pack_spans(x: Tensor, spans: Tensor) -> Packed:  # [T, ...], [K, 2] -> flat [N, ...]
    """The rows of ragged spans (text, patches, frames), concatenated. Differentiable in x.

    Args:
        x: [T, ...] on any device.
        spans: [K, 2] int32 or int64 on the CPU, begin and end of rows of x, ascending, without overlap.

    Returns:
        Packed(flat [N, ...], cu_seqlens [K + 1] int32 of the spans, positions [N] int64 of each row in its span).
        Row i of flat, in span k, is row begin[k] + positions[i] of x.

    Raises:
        ValueError, TypeError: x has no rows, or the spans are invalid; the message names the span.
    """
    if not isinstance(x, Tensor):
        raise not_tensor("pack_spans", x=x)
    check(x.dim() >= 1, lambda: "pack_spans: x is a scalar, expected [T, ...]")
    rows = span_rows("pack_spans", spans, x.shape[0], x.device)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), (spans[:, 1] - spans[:, 0]).long().cumsum(0)])
    lengths = ends.diff()
    positions = torch.arange(int(ends[-1]), device="cpu") - torch.repeat_interleave(ends[:-1], lengths)
    return Packed(x.index_select(0, rows), to_device(ends.int(), x.device), to_device(positions, x.device))


def unpack_spans(flat: Tensor, spans: Tensor, base: Tensor) -> Tensor:  # [N, ...], [K, 2], [T, ...] -> [T, ...]
    """`base` with the rows of the spans replaced by `flat`: the inverse of `pack_spans`. Differentiable in both.

    Raises:
        ValueError, TypeError: the spans are invalid, or flat does not have their rows and the dtype of base.
    """
    for name, value in (("flat", flat), ("base", base)):
        if not isinstance(value, Tensor):
            raise not_tensor("unpack_spans", **{name: value})
    check(base.dim() >= 1, lambda: "unpack_spans: base is a scalar, expected [T, ...]")
    rows = span_rows("unpack_spans", spans, base.shape[0], base.device)
    expected = (rows.shape[0], *base.shape[1:])
    check(
        flat.shape == expected and flat.dtype == base.dtype and flat.device == base.device,
        lambda: (
            f"unpack_spans: flat is {tuple(flat.shape)} {flat.dtype} on {flat.device}; expected {expected} "
            f"{base.dtype} on {base.device}, the rows of the spans"
        ),
    )
    return base.index_copy(0, rows, flat)
