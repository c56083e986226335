"""The two packed batches of the forward: complete sequences, or new tokens with a paged KV cache.

Tokens of all sequences are concatenated, without padding. `validate` turns bad ids, positions and pages into errors; on
CUDA it checks shapes only, because reading values would synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.models.config import ModelConfig
from rlkernel.models.kv_cache import KVCache

_Batch = TypeVar("_Batch", "PackedBatch", "PagedBatch")


class BatchError(ValueError):
    """A batch that the model cannot compute; the message names the field, the value and the limit."""


@dataclass(frozen=True)
class PackedBatch:
    """Complete sequences, for training and scoring.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        cu_seqlens: [B+1] int32, first token of each sequence, then T.
        max_seqlen: length of the longest sequence, or more.
        axes: [3, T] int64, positions in time, height and width; None: the model counts them.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [B+1] int32
    max_seqlen: int
    axes: Tensor | None = None  # [3, T] int64

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[Sequence[int] | Tensor], device: torch.device | str = "cpu"
    ) -> PackedBatch:
        """Packs token id sequences in the given order, positions counted from 0.

        Raises:
            BatchError: there is no sequence, or one is empty.
        """
        empty = [i for i, row in enumerate(sequences) if len(row) == 0]
        if len(sequences) == 0 or empty:
            what = f"sequence {empty[0]} is empty" if empty else "there is no sequence"
            raise BatchError(f"PackedBatch.from_sequences: {what}; each needs at least one token id")
        rows = [torch.as_tensor(row, dtype=torch.int64, device="cpu") for row in sequences]
        ids, cu_seqlens, positions = ops.pack(rows)
        batch = cls(ids, positions, cu_seqlens, max(row.numel() for row in rows))
        return batch if torch.device(device).type == "cpu" else batch.to(device)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch with its tensors on another device."""
        return _to(self, device)

    def validate(self, config: ModelConfig, num_inputs: int | None = None) -> None:
        """Checks shapes and dtypes, and on the CPU the values too. Input ids are below `num_inputs`.

        Raises:
            BatchError: a token id outside the vocabulary, a position outside the context, or a malformed field.
        """
        _check_tokens(self.input_ids, self.positions)
        _check_vector("cu_seqlens", self.cu_seqlens, torch.int32)
        if _readable(self.input_ids):
            _check_values(self.input_ids, self.positions, config, num_inputs)
            longest = _check_offsets("cu_seqlens", self.cu_seqlens, self.input_ids.numel())
            if longest > self.max_seqlen:
                raise BatchError(f"max_seqlen is {self.max_seqlen}, but the longest sequence has {longest} tokens")


@dataclass(frozen=True)
class PagedBatch:
    """New tokens of sequences whose earlier keys and values are in a paged cache, for the engine.

    Attributes:
        input_ids, positions: [T] int64; the tokens of a sequence are its last ones.
        cu_seqlens_q: [B+1] int32, first new token of each sequence, then T.
        seq_lens_k: [B] int32, keys of each sequence, including the new tokens.
        block_table: [B, P] int32, page numbers of each sequence in order; entries past its length are not read.
        slots: [T] int64, where each token's key and value are stored: page * page_size + offset; -1: not stored.
        kv_cache: the cache of all layers, written by the forward.
        max_seqlen_q, max_seqlen_k: upper bounds of new tokens and of keys per sequence.
        shared: sequences with the same first keys, as in `ops.paged_attention`.
        axes: [3, T] int64, positions in time, height and width, for a model that has them.
        has_media: whether input ids may name media; if not, the model does not look for them, which would synchronise.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens_q: Tensor  # [B+1] int32
    seq_lens_k: Tensor  # [B] int32
    block_table: Tensor  # [B, P] int32
    slots: Tensor  # [T] int64
    kv_cache: KVCache
    max_seqlen_q: int
    max_seqlen_k: int
    shared: ops.SharedPrefix | None = None
    axes: Tensor | None = None  # [3, T] int64
    has_media: bool = True

    def to(self, device: torch.device | str) -> PagedBatch:
        """The batch with its index tensors on another device; the cache is not moved."""
        moved, shared = _to(self, device), self.shared
        if shared is None:
            return moved
        return replace(
            moved, shared=shared._replace(groups=shared.groups.to(device), lengths=shared.lengths.to(device))
        )

    def validate(self, config: ModelConfig, num_inputs: int | None = None) -> None:
        """Checks shapes and dtypes, and on the CPU the values too, so that no kernel reads outside the cache.

        Raises:
            BatchError: as `PackedBatch.validate`; or a page or slot is outside the cache, or positions are not the last
                ones of their sequence.
        """
        _check_tokens(self.input_ids, self.positions)
        _check_vector("cu_seqlens_q", self.cu_seqlens_q, torch.int32)
        _check_vector("seq_lens_k", self.seq_lens_k, torch.int32, self.cu_seqlens_q.numel() - 1)
        _check_vector("slots", self.slots, torch.int64, self.input_ids.numel())
        if self.block_table.dim() != 2 or self.block_table.shape[0] != self.seq_lens_k.numel():
            shape, rows = tuple(self.block_table.shape), self.seq_lens_k.numel()
            raise BatchError(f"block_table is {shape}; expected [{rows}, pages], one row per sequence")
        if _readable(self.input_ids):
            _check_values(self.input_ids, self.positions, config, num_inputs)
            self._check_pages()

    def _check_pages(self) -> None:
        cache, lengths = self.kv_cache, self.seq_lens_k.long()
        new = self.cu_seqlens_q.long().diff()
        longest = _check_offsets("cu_seqlens_q", self.cu_seqlens_q, self.input_ids.numel())
        if longest > self.max_seqlen_q or int(lengths.max()) > self.max_seqlen_k:
            raise BatchError(
                f"max_seqlen_q is {self.max_seqlen_q} and max_seqlen_k {self.max_seqlen_k}, but the longest sequences "
                f"have {longest} and {int(lengths.max())} tokens"
            )
        shift = torch.repeat_interleave(lengths - self.cu_seqlens_q[1:].long(), new)
        expected = shift + torch.arange(self.input_ids.numel())
        wrong = (self.positions != expected).nonzero()
        if wrong.numel():
            i = int(wrong[0])
            raise BatchError(
                f"positions[{i}] is {int(self.positions[i])}; by seq_lens_k and cu_seqlens_q this token is at "
                f"{int(expected[i])}"
            )
        last = cache.num_pages * cache.page_size - 1
        lowest, highest = (int(v) for v in self.slots.aminmax())
        if lowest < -1 or highest > last:
            raise BatchError(
                f"slots run from {lowest} to {highest}; the cache holds slots 0 to {last}, and -1 stores nothing"
            )
        pages = (lengths + cache.page_size - 1) // cache.page_size
        if int(pages.max()) > self.block_table.shape[1]:
            raise BatchError(
                f"block_table has {self.block_table.shape[1]} pages per sequence; {int(lengths.max())} keys need "
                f"{int(pages.max())}"
            )
        used = torch.arange(self.block_table.shape[1])[None, :] < pages[:, None]
        lowest, highest = (int(v) for v in self.block_table[used].aminmax())
        if lowest < 0 or highest >= cache.num_pages:
            raise BatchError(
                f"block_table names pages {lowest} to {highest}; the cache has pages 0 to {cache.num_pages - 1}"
            )


def _to(batch: _Batch, device: torch.device | str) -> _Batch:
    names = [f.name for f in fields(batch)]
    moved: dict[str, Any] = {
        name: getattr(batch, name).to(device) for name in names if isinstance(getattr(batch, name), Tensor)
    }
    return replace(batch, **moved)


def _readable(values: Tensor) -> bool:
    """Whether values can be read without waiting for a device; tensors have none while torch.compile traces."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_vector(name: str, value: Tensor, dtype: torch.dtype, size: int | None = None) -> None:
    if value.dim() != 1 or value.dtype != dtype or (size is not None and value.numel() != size):
        expected = "[n]" if size is None else f"[{size}]"
        raise BatchError(f"{name} is {tuple(value.shape)} {value.dtype}; expected {expected} {dtype}")


def _check_tokens(input_ids: Tensor, positions: Tensor) -> None:
    _check_vector("input_ids", input_ids, torch.int64)
    _check_vector("positions", positions, torch.int64, input_ids.numel())
    if input_ids.numel() == 0:
        raise BatchError("input_ids is empty; a batch needs at least one token")


def _check_values(input_ids: Tensor, positions: Tensor, config: ModelConfig, num_inputs: int | None) -> None:
    for name, values, limit, meaning in (
        (
            "input_ids",
            input_ids,
            num_inputs or config.vocab_size,
            "vocab_size; the tokenizer and the model do not belong together",
        ),
        ("positions", positions, config.max_position_embeddings, "max_position_embeddings; shorten the sequence"),
    ):
        lowest, highest = (int(v) for v in values.aminmax())
        if lowest < 0 or highest >= limit:
            bad = highest if highest >= limit else lowest
            at = int((values == bad).nonzero()[0])
            raise BatchError(f"{name}[{at}] is {bad}; it must be in [0, {limit}), below the model's {meaning}")


def _check_offsets(name: str, offsets: Tensor, total: int) -> int:
    """Checks that offsets rise from 0 to `total`; returns the longest span."""
    spans = offsets.diff()
    if offsets.numel() < 2 or int(offsets[0]) != 0 or int(offsets[-1]) != total or int(spans.min()) < 1:
        raise BatchError(
            f"{name} is {offsets.tolist()[:8]}...; it must rise from 0 to {total} tokens, by at least one per sequence"
        )
    return int(spans.max())
