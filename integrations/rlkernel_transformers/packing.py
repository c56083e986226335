"""Packs the inputs of a transformers call (padded rows, packed rows, a cache) into tokens [T], and unpacks results.

A call with a mask or `position_ids` reads back from the device once, to size the packed tensors; a call without them,
or with `cu_seq_lens_q`, does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # label of a token that is not scored, as in transformers


class CallError(ValueError):
    """A call of the model that rlkernel cannot compute exactly; the message names the argument and the remedy."""


@dataclass(frozen=True)
class Scored:
    """The N scored tokens: their indices in the packed batch and in the caller's [B, L].

    Attributes:
        rows: [N] int64 into the packed tokens; None: all T.
        places: [N] int64 into the flattened [B * L]; None: all, in order.
        valid: [N] bool, which of them count; None: all.
    """

    rows: Tensor | None = None
    places: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class Pages:
    """The paged cache of transformers' continuous batching, with the pages of this call's keys.

    Attributes:
        cache: transformers' PagedAttentionCache.
        read, write: per group of layers, the indices of all keys, and of the new ones.
    """

    cache: Any
    read: list[Tensor]
    write: list[Tensor]


class Rope:
    """Positions of several axes: token t is turned by row rows[t] of a table [T, D].

    A plain object, because FSDP2 would cast the fp32 table inside a dataclass.
    """

    def __init__(self, rows: Tensor, table: Tensor):
        self.rows, self.table = rows, table


class Deepstack:
    """Features that are added to the tokens at `places` [M] after each of the first layers: `levels`, [M, C] each."""

    def __init__(self, places: Tensor, levels: list[Tensor]):
        self.places, self.levels = places, levels

    def after(self, layer: int, like: Tensor) -> Tensor | None:
        """What is added to the hidden states [T, C] after a layer; -0.0, which changes no bit, at other tokens."""
        if layer >= len(self.levels):
            return None
        return torch.full_like(like, -0.0).index_copy(0, self.places, self.levels[layer].to(like.dtype))


@dataclass(frozen=True)
class PackedCall:
    """One call as packed tokens. (B, L) is the caller's shape, T the number of computed tokens.

    Attributes:
        shape: (B, L).
        positions: [T] int64, position of each token in its sequence.
        cu_seqlens: [S+1] int32; max_seqlen: length of the longest sequence, or more.
        index: [T] int64, index of each token in the flattened [B * L]; None: the identity.
        keep: [B, L] bool where `index` also lists padding (under torch.compile), else None.
        cache: the caller's past_key_values; None: no cache.
        past: keys in the cache before this call.
        keys: row and column of every key in the cache, including the new ones; None if there are only new ones.
        pages: the pages that hold the keys instead of `cache`.
        longest: tokens of the longest sequence, including cached ones, if the mask was read back; else None.
        cu_seqlens_k, max_seqlen_k: of the keys.
        scored: which tokens are scored, if the caller asked for it.
        dtype: dtype of the layers under autocast; None: that of the parameters.
        weights: whether attention weights are returned too.
        rope: positions of several axes, which replace `positions` in rope; None: those.
        deepstack: features of the encoder for the first layers.

    It holds no floating-point tensor, because FSDP2 casts those in a layer's arguments, even inside dataclasses.
    """

    shape: tuple[int, int]
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    index: Tensor | None = None
    keep: Tensor | None = None
    cache: Any = None
    past: int = 0
    keys: tuple[Tensor, Tensor] | None = None
    pages: Pages | None = None
    longest: int | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_k: int = 0
    scored: Scored = field(default_factory=Scored)
    dtype: torch.dtype | None = None
    weights: bool = False
    rope: Rope | None = None
    deepstack: Deepstack | None = None

    def gather(self, x: Tensor) -> Tensor:  # [B, L, ...] -> [T, ...]
        """The computed tokens of x."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def scatter(self, y: Tensor) -> Tensor:  # [T, ...] -> [B, L, ...]
        """y in the caller's shape; zero at padding."""
        if self.index is None:
            return y.view(*self.shape, *y.shape[1:])
        out = place(y, self.index, self.shape)
        if self.keep is None:
            return out
        keep = self.keep.view(*self.shape, *(1,) * (y.dim() - 1))
        return torch.where(keep, out, torch.zeros((), dtype=y.dtype, device=y.device))


def place(values: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:  # [N, ...] -> [B, L, ...]
    """A zero tensor [B, L, ...] with `values` at the flat indices `places`."""
    rows = shape[0] * shape[1]
    flat = values.new_zeros((rows, *values.shape[1:])).index_copy(0, places, values)
    return flat.view(*shape, *values.shape[1:])


def pack(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Tensor | None = None,  # [B, S]
    position_ids: Tensor | None = None,  # [B or 1, L]
    cu_seqlens: Tensor | None = None,  # [n+1] int32
    max_seqlen: int | None = None,
    cache: Any = None,
    targets: Tensor | None = None,  # [B, L]
    rows: Tensor | None = None,  # [N]
) -> PackedCall:
    """Packs one call.

    Without a mask, sequences are those of `cu_seqlens`, or the rows [B, L], cut where `position_ids` do not continue.
    With a mask, its zeros are padding, wherever they stand, and positions are counted over its ones.

    Args:
        shape: (B, L) of the input.
        cache: past_key_values to attend to and to fill.
        targets: the tokens to score, `IGNORED` where none is.
        rows: indices of the packed tokens to score, if the caller knows them; then nothing is read back for scoring.

    Raises:
        CallError: an argument has an unsupported form.
    """
    b, length = shape
    check(shape, attention_mask, position_ids, cu_seqlens, max_seqlen, cache)
    if targets is not None:
        check_targets("targets", targets, shape)
    past = 0 if cache is None else int(cache.get_seq_length())
    if cu_seqlens is not None:
        assert max_seqlen is not None
        positions = position_ids.reshape(-1) if position_ids is not None else _positions_of(cu_seqlens, b * length)
        scored = _score_all(targets) if rows is None else Scored(rows, rows)
        return PackedCall(shape, positions, cu_seqlens.to(torch.int32), int(max_seqlen), scored=scored)
    if attention_mask is not None:
        return _pack_mask(shape, attention_mask, position_ids, cache, past, targets, rows)
    if cache is not None:
        ones = torch.ones((b, past + length), dtype=torch.bool, device=device)
        return _pack_mask(shape, ones, position_ids, cache, past, targets, rows)
    if position_ids is not None:
        return _pack_positions(shape, position_ids, targets, rows)
    cu = torch.arange(0, (b + 1) * length, length, dtype=torch.int32, device=device)
    positions = torch.arange(length, device=device).repeat(b)
    return PackedCall(shape, positions, cu, length, scored=_scored_of(targets, rows))


def _pack_mask(
    shape: tuple[int, int],
    attention_mask: Tensor,
    position_ids: Tensor | None,
    cache: Any,
    past: int,
    targets: Tensor | None,
    rows: Tensor | None,
) -> PackedCall:
    b, length = shape
    mask = attention_mask.bool()
    keep = mask[:, past:]
    positions = (mask.cumsum(1) - 1)[:, past:].clamp_min(0)
    if position_ids is not None:
        positions = position_ids.expand(b, length)
    lengths = keep.sum(1)
    if torch.compiler.is_compiling():
        # No size may depend on the mask here, so padding is computed too, as sequences after all others, and dropped.
        order = torch.argsort(keep.flatten().logical_not().to(torch.int8), stable=True)
        cu = _cu_seqlens_of(torch.cat((lengths, length - lengths)))
        flat = torch.where(keep, positions, 0).flatten().index_select(0, order)
        wanted = keep if targets is None else keep & (targets != IGNORED)
        scored = Scored() if targets is None else Scored(None, order, wanted.flatten()[order])
        return PackedCall(shape, flat, cu, length, index=order, keep=keep, scored=scored)
    wanted = keep if targets is None or rows is not None else keep & (targets != IGNORED)
    counts = (keep.sum(), wanted.sum(), mask.sum(), mask.sum(1).max())
    kept, found, seen, longest = torch.stack(counts).tolist()
    if kept == 0:
        raise CallError("attention_mask is zero everywhere: there is no token to compute; leave the batch out")
    index = None if kept == b * length else torch.nonzero_static(keep.flatten(), size=kept)[:, 0]
    flat = positions.flatten() if index is None else positions.flatten().index_select(0, index)
    scored = Scored()
    if targets is not None and rows is not None:
        scored = Scored(rows, rows if index is None else index.index_select(0, rows))
    elif targets is not None:
        places = torch.nonzero_static(wanted.flatten(), size=found)[:, 0]
        scored = Scored((keep.flatten().cumsum(0) - 1).index_select(0, places), places)
    packed = PackedCall(
        shape, flat, _cu_seqlens_of(lengths), length, index=index, cache=cache, longest=longest, scored=scored
    )
    if cache is None or past == 0:
        return packed
    keys = torch.nonzero_static(mask, size=seen)
    return replace(
        packed,
        past=past,
        keys=(keys[:, 0], keys[:, 1]),
        cu_seqlens_k=_cu_seqlens_of(mask.sum(1)),
        max_seqlen_k=mask.shape[1],
    )


def _pack_positions(
    shape: tuple[int, int], position_ids: Tensor, targets: Tensor | None, rows: Tensor | None
) -> PackedCall:
    """Sequences start at each row's start and where a position is not its predecessor plus one."""
    b, length = shape
    positions = position_ids.expand(b, length)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = starts.flatten()
    place = torch.arange(b * length, device=starts.device)
    longest = (place - torch.where(starts, place, 0).cummax(0).values).max() + 1
    wanted = None if targets is None or rows is not None else targets.flatten() != IGNORED
    counts = (starts.sum(), longest, *([] if wanted is None else [wanted.sum()]))
    sequences, max_seqlen, *found = torch.stack(counts).tolist()
    first = torch.nonzero_static(starts, size=sequences)[:, 0]
    cu = torch.nn.functional.pad(first, (0, 1), value=b * length).to(torch.int32)
    scored = Scored() if rows is None else Scored(rows, rows)
    if wanted is not None:
        places = torch.nonzero_static(wanted, size=found[0])[:, 0]
        scored = Scored(places, places)
    return PackedCall(shape, positions.flatten(), cu, max_seqlen, scored=scored)


def _scored_of(targets: Tensor | None, rows: Tensor | None) -> Scored:
    """Scored tokens of a call without padding; their number is read back unless `rows` are given."""
    if targets is None:
        return Scored()
    if rows is not None:
        return Scored(rows, rows)
    if torch.compiler.is_compiling():
        return _score_all(targets)
    places = torch.nonzero(targets.flatten() != IGNORED)[:, 0]
    return Scored(places, places)


def _score_all(targets: Tensor | None) -> Scored:
    return Scored() if targets is None else Scored(valid=targets.flatten() != IGNORED)


def _cu_seqlens_of(lengths: Tensor) -> Tensor:  # [n] -> [n+1] int32
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _positions_of(cu_seqlens: Tensor, tokens: int) -> Tensor:  # [T] int64
    """Position of each token in its sequence."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    starts = cu_seqlens.long()
    return index - starts[torch.searchsorted(starts, index, right=True) - 1]


def check_targets(name: str, values: Any, shape: tuple[int, int]) -> None:
    """Raises CallError unless `values`, labels or targets, are one integer for each token."""
    if not isinstance(values, Tensor):
        raise CallError(f"{name} is a {type(values).__name__}; expected a tensor [B={shape[0]}, L={shape[1]}] int64")
    if values.shape != shape or values.dtype != torch.int64:
        raise CallError(
            f"{name} is {tuple(values.shape)} {values.dtype}; expected [B={shape[0]}, L={shape[1]}] int64, a token or "
            f"{IGNORED} for each token of the input"
        )


def check_rows(rows: Tensor, tokens: int) -> None:
    """Raises CallError unless `rows` are indices of packed tokens. On a GPU their values are not read back."""
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise CallError(f"rows is {tuple(rows.shape)} {rows.dtype}; expected [N] int64, indices of packed tokens")
    if torch.compiler.is_compiling() or rows.device.type != "cpu" or rows.numel() == 0:
        return
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= tokens:
        raise CallError(f"rows holds {low if low < 0 else high}; expected 0 <= rows < {tokens}, the packed tokens")


def _is_binary(mask: Tensor) -> bool:
    """Whether a floating-point mask, to which PEFT converts every mask, holds only 0 and 1; reads back its values."""
    if torch.compiler.is_compiling():
        raise CallError(f"attention_mask is {mask.dtype} under torch.compile; pass attention_mask.bool()")
    return bool(((mask == 0) | (mask == 1)).all())


def check(
    shape: tuple[int, int],
    attention_mask: Any,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    cache: Any,
) -> None:
    """Raises CallError for arguments of an unsupported form."""
    b, length = shape
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2):
        found = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise CallError(
            f"attention_mask is {found}; rlkernel computes causal attention and takes a padding mask [B, S] of zeros "
            "and ones, not a bias or a mask per query: pass the padding mask, or call "
            "rlkernel_transformers.remove(model)"
        )
    past = 0 if cache is None else int(cache.get_seq_length())
    if attention_mask is not None and attention_mask.shape != (b, past + length):
        raise CallError(
            f"attention_mask is {tuple(attention_mask.shape)}; expected [B={b}, {past + length}] for {length} tokens "
            f"per row after {past} cached ones"
        )
    if attention_mask is not None and attention_mask.is_floating_point() and not _is_binary(attention_mask):
        raise CallError(
            f"attention_mask is {attention_mask.dtype} and holds values other than 0 and 1, as a bias does; expected "
            "1 at tokens and 0 at padding"
        )
    if b * length == 0:
        raise CallError(f"the input is [{b}, {length}]; expected at least one token")
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape not in ((b, length), (1, length))):
        raise CallError(f"position_ids is {tuple(position_ids.shape)}; expected [B={b}, L={length}]")
    if cu_seqlens is None:
        return
    if max_seqlen is None:
        raise CallError("cu_seq_lens_q is given without max_length_q; pass both")
    if attention_mask is not None or cache is not None:
        raise CallError("cu_seq_lens_q is given with attention_mask or past_key_values; packed rows have neither")
    if b != 1 or cu_seqlens.dim() != 1:
        raise CallError(f"cu_seq_lens_q is given with an input [{b}, {length}]; pack the sequences into one row [1, T]")
