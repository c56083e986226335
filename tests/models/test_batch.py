"""Checks of batches: one that does not fit the model is an error that names field, value and limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlkernel.models import BatchError, Decoder, KVCache, ModelConfig, PackedBatch, PagedBatch

CONFIG = ModelConfig("qwen3", 32, 16, 24, 1, 2, 1, 8, max_position_embeddings=16)


def paged() -> PagedBatch:
    """Two sequences: 2 new tokens after 3 cached ones, and 1 new token alone; pages of 4."""
    return PagedBatch(
        input_ids=torch.tensor([5, 6, 7]),
        positions=torch.tensor([3, 4, 0]),
        cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32),
        seq_lens_k=torch.tensor([5, 1], dtype=torch.int32),
        block_table=torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
        slots=torch.tensor([11, 0, 4]),
        kv_cache=KVCache(CONFIG, num_pages=3, page_size=4),
        max_seqlen_q=2,
        max_seqlen_k=5,
    )


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_good_batches() -> None:
    batch = PackedBatch.from_sequences([[1, 2, 3], torch.tensor([4])])
    batch.validate(CONFIG)
    assert batch.cu_seqlens.tolist() == [0, 3, 4] and batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.cu_seqlens.dtype == torch.int32 and batch.max_seqlen == 3
    paged().validate(CONFIG)
    replace(paged(), slots=torch.tensor([11, -1, 4])).validate(CONFIG)  # -1 stores nothing


PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"input_ids": torch.tensor([1, 32, 3])}, r"input_ids\[1\] is 32; it must be in \[0, 32\)"),
    "negative id": ({"input_ids": torch.tensor([1, 2, -100])}, r"input_ids\[2\] is -100"),
    "context": ({"positions": torch.tensor([0, 1, 16])}, r"positions\[2\] is 16(.*)max_position_embeddings"),
    "dtype": ({"input_ids": torch.tensor([1.0, 2.0, 3.0])}, r"input_ids is \(3,\) torch.float32; expected"),
    "count": ({"positions": torch.tensor([0, 1])}, r"positions is \(2,\)(.*)expected \[3\]"),
    "offset dtype": ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is(.*)int64; expected \[n\] torch.int32"),
    "end": ({"cu_seqlens": int32(0, 2)}, r"cu_seqlens is \[0, 2\](.*)rise from 0 to 3"),
    "empty sequence": ({"cu_seqlens": int32(0, 3, 3)}, "at least one per sequence"),
    "no sequence": ({"cu_seqlens": int32(0)}, "rise from 0 to 3"),
    "longest": ({"max_seqlen": 2}, "max_seqlen is 2, but the longest sequence has 3"),
    "nothing": (
        {"input_ids": torch.tensor([], dtype=torch.int64), "positions": torch.tensor([], dtype=torch.int64)},
        "is empty",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    changes, message = PACKED[name]
    with pytest.raises(BatchError, match=message):
        Decoder.from_config(CONFIG)(replace(PackedBatch.from_sequences([[1, 2, 3]]), **changes))


PAGED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"input_ids": torch.tensor([5, 6, 99])}, r"input_ids\[2\] is 99"),
    "position": ({"positions": torch.tensor([3, 5, 0])}, r"positions\[1\] is 5; (.*) at 4"),
    "context": ({"seq_lens_k": int32(5, 20), "positions": torch.tensor([3, 4, 19])}, r"positions\[2\] is 19"),
    "slot": ({"slots": torch.tensor([11, 12, 4])}, "slots run from 4 to 12; the cache holds slots 0 to 11"),
    "negative slot": ({"slots": torch.tensor([11, -2, 4])}, "slots run from -2"),
    "page": ({"block_table": int32(2, 3, 1, 0).view(2, 2)}, "names pages 1 to 3; the cache has pages 0 to 2"),
    "unset page": ({"block_table": int32(2, -1, 1, 0).view(2, 2)}, "names pages -1 to 2"),
    "short table": ({"block_table": int32(2, 1).view(2, 1)}, "has 1 pages per sequence; 5 keys need 2"),
    "table rows": ({"block_table": int32(2, 1).view(1, 2)}, r"block_table is \(1, 2\); expected \[2, pages\]"),
    "lengths": ({"seq_lens_k": int32(5)}, r"seq_lens_k is \(1,\)(.*)expected \[2\]"),
    "max_q": ({"max_seqlen_q": 1}, "max_seqlen_q is 1"),
    "max_k": ({"max_seqlen_k": 4}, "max_seqlen_k 4"),
    "new tokens": ({"seq_lens_k": int32(1, 1)}, r"positions\[0\] is 3; (.*) at -1"),
}


@pytest.mark.parametrize("name", PAGED)
def test_paged(name: str) -> None:
    changes, message = PAGED[name]
    with pytest.raises(BatchError, match=message):
        Decoder.from_config(CONFIG)(replace(paged(), **changes))


def test_from_sequences_and_cache() -> None:
    with pytest.raises(BatchError, match="sequence 1 is empty"):
        PackedBatch.from_sequences([[1], []])
    with pytest.raises(BatchError, match="there is no sequence"):
        PackedBatch.from_sequences([])
    with pytest.raises(ValueError, match="num_pages=0"):
        KVCache(CONFIG, 0, 4)
    cache = KVCache(CONFIG, 3, 4, torch.bfloat16)
    assert len(cache.k) == 1 and cache.k[0].shape == (3, 4, 1, 8) and cache.v[0].is_contiguous()
    assert KVCache.page_bytes(CONFIG, 4, torch.bfloat16) * 3 == 2 * cache.k[0].numel() * 2
