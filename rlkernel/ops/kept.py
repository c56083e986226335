"""Kept-token sets: the tokens that pass top-k, top-p and min-p, as bit masks or as ragged ids.

A mask is int32 [T, ceil(V/32)]; token v is bit `v & 31` of word `v >> 5`. Ragged ids are the compact form for storage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.ops.checks import check, check_dense, check_int, check_optional, check_tensors


def kept_words(vocab_size: int) -> int:
    """Words of 32 bits that hold one bit per vocabulary entry."""
    return (vocab_size + 31) // 32


def _vocabulary(op: str, vocab_size: int) -> int:
    return check_int(op, "vocab_size", vocab_size, "an integer of at least 0 and below 2^31", 0, 2**31 - 1)


def check_kept(op: str, kept: Tensor | None, tokens: int, vocab_size: int) -> None:
    """Raises ValueError unless `kept` is None or an int32 mask [tokens, ceil(vocab_size/32)]."""
    check_optional(op, kept=kept)
    expected = (tokens, kept_words(vocab_size))
    check(
        kept is None or (kept.dtype == torch.int32 and kept.shape == expected),
        lambda: (
            f"{op}: kept is {tuple(kept.shape)} {kept.dtype}; expected [T={tokens}, ceil(V/32)={expected[1]}] int32, "  # type: ignore[union-attr]
            "see rlkernel.ops.pack_kept"
        ),
    )


def pack_kept(
    mask: Tensor,  # [T, V] bool
) -> Tensor:  # [T, ceil(V/32)] int32
    """Bit mask of a boolean mask.

    Raises:
        ValueError: mask is not a boolean matrix. TypeError: it is not a tensor.
    """
    check_tensors("pack_kept", mask=mask)
    check_dense("pack_kept", ("mask",), (mask,))
    check(
        mask.dtype == torch.bool and mask.dim() == 2,
        lambda: f"pack_kept: mask is {tuple(mask.shape)} {mask.dtype}; expected [T, V] bool",
    )
    t, v = mask.shape
    bits = torch.nn.functional.pad(mask, (0, -v % 32)).view(t, kept_words(v), 32).to(torch.int64)
    words = (bits << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_kept(
    kept: Tensor,  # [T, ceil(V/32)] int32
    vocab_size: int,
) -> Tensor:  # [T, V] bool
    """Boolean mask of a bit mask.

    Raises:
        ValueError: kept is not an int32 mask of this vocabulary. TypeError: it is not a tensor, or vocab_size not an
            integer.
    """
    return _unpacked("unpack_kept", kept, vocab_size)


def _unpacked(op: str, kept: Tensor, vocab_size: int) -> Tensor:
    check_tensors(op, kept=kept)
    check_dense(op, ("kept",), (kept,))
    vocab_size = _vocabulary(op, vocab_size)
    check(
        kept.dim() == 2 and kept.dtype == torch.int32 and kept.shape[1] == kept_words(vocab_size),
        lambda: (
            f"{op}: kept is {tuple(kept.shape)} {kept.dtype}; expected [T, {kept_words(vocab_size)}] int32 "
            f"for V={vocab_size}"
        ),
    )
    bits = (kept[:, :, None] >> torch.arange(32, dtype=torch.int32, device=kept.device)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def kept_to_ids(
    kept: Tensor,  # [T, ceil(V/32)] int32
    vocab_size: int,
) -> tuple[Tensor, Tensor]:  # ids [N] int32, offsets [T+1] int64
    """Ragged form: `ids[offsets[t]:offsets[t+1]]` are the kept tokens of row t, ascending.

    Raises:
        ValueError, TypeError: as `unpack_kept`.
    """
    mask = _unpacked("kept_to_ids", kept, vocab_size)
    offsets = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=kept.device)
    torch.cumsum(mask.sum(-1), 0, out=offsets[1:])
    return mask.nonzero()[:, 1].to(torch.int32), offsets


def ids_to_kept(
    ids: Tensor,  # [N] int32
    offsets: Tensor,  # [T+1] int64
    vocab_size: int,
) -> Tensor:  # [T, ceil(V/32)] int32
    """Bit mask of the ragged form; the inverse of `kept_to_ids`.

    Raises:
        ValueError: offsets do not cover ids, or an id lies outside the vocabulary. TypeError: one is not a tensor of
            integers.
    """
    check_tensors("ids_to_kept", ids=ids, offsets=offsets)
    check_dense("ids_to_kept", ("ids", "offsets"), (ids, offsets))
    vocab_size = _vocabulary("ids_to_kept", vocab_size)
    for name, x in (("ids", ids), ("offsets", offsets)):
        if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1:
            expected = "[N]" if name == "ids" else "[T+1]"
            raise TypeError(f"ids_to_kept: {name} is {tuple(x.shape)} {x.dtype}; expected {expected} int32 or int64")
    check(
        offsets.numel() >= 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == ids.numel()
        and bool((offsets.diff() >= 0).all()),
        lambda: (
            f"ids_to_kept: offsets must be [T+1], start at 0, never decrease and end at the number of ids, "
            f"{ids.numel()}; they are {offsets.tolist()[:8]}"
        ),
    )
    check(
        ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size),
        lambda: f"ids_to_kept: ids range from {int(ids.min())} to {int(ids.max())}; expected 0 <= id < V={vocab_size}",
    )
    rows = offsets.numel() - 1
    mask = torch.zeros(rows, vocab_size, dtype=torch.bool, device=ids.device)
    row = torch.repeat_interleave(torch.arange(rows, device=ids.device), offsets.diff())
    mask[row, ids.long()] = True
    return pack_kept(mask)
