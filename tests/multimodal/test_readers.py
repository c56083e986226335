"""Readers on the output of transformers' own image processor, and records on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layout_worlds import BEGIN, IMAGE, PLACEHOLDERS, STOP

from rlkernel.multimodal import (
    Modality,
    MultimodalBatch,
    compare_layout,
    digest_of_pixels,
    fingerprint_of,
    from_transformers,
    from_vllm,
    read_records,
    validate,
    write_records,
)


def _processor(**options: Any) -> Any:
    from transformers import Qwen2VLImageProcessor

    budget = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    return Qwen2VLImageProcessor(patch_size=14, merge_size=2, **{"size": budget, **options})


def _batch(processor: Any, sizes: list[list[tuple[int, int]]], *, side: str = "left", **kwargs: Any) -> MultimodalBatch:
    """Samples with images of random pixels, through the processor, as transformers holds them."""
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 255, (h, w, 3), dtype=np.uint8) for shapes in sizes for h, w in shapes]
    media = processor(images=images, return_tensors="pt", **kwargs)
    grids = iter(media["image_grid_thw"].prod(-1).tolist())
    prompts = [[9, *(t for _ in shapes for t in (BEGIN, *[IMAGE] * (next(grids) // 4), STOP)), 9] for shapes in sizes]
    width = max(map(len, prompts)) + 3
    scored = []
    rows, masks = [], []
    for prompt in prompts:
        row, fill = [*prompt, 11, 12, 2], [0] * (width - len(prompt) - 3)
        rows.append(fill + row if side == "left" else row + fill)
        masks.append([int(t != 0) for t in rows[-1]])
        scored.append([False] * rows[-1].index(11) + [t in (11, 12, 2) for t in rows[-1][rows[-1].index(11) :]])
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks), **media}
    return from_transformers(
        inputs,
        scored=torch.tensor(scored),
        placeholder_ids=PLACEHOLDERS,
        processor=processor,
        mm_processor_kwargs=kwargs,
    )


SIZES = [[(60, 90)], [(40, 40), (100, 120)]]


def test_images_of_the_processor(tmp_path: Path) -> None:
    batch = _batch(_processor(), SIZES)
    validate(batch)
    assert batch.padding_side == "left" and batch.samples == 2
    assert [m.sample for m in batch.media] == [0, 1, 1] and batch.media_ids.tolist() == [0, 1, 2]
    assert batch.vision_token_offsets.tolist() == [0, *np.cumsum([m.tokens(2) for m in batch.media])]
    assert len(set(batch.media_cache_keys)) == 3 and all(len(key) == 64 for key in batch.media_cache_keys)
    rows, features = batch.feature_rows()
    assert (batch.token_ids[rows] == IMAGE).all() and features.tolist() == list(range(len(features)))
    embeddings, vision = torch.zeros(len(batch.token_ids), 3), torch.randn(len(features), 3)
    merged = embeddings.masked_scatter((batch.token_ids == IMAGE).unsqueeze(1), vision)  # transformers' way
    assert torch.equal(embeddings.index_copy(0, rows, vision.index_select(0, features)), merged)
    predicted = batch.packed_rows(batch.loss_spans, -1)
    assert [batch.token_ids[a + 1 : b + 1].tolist() for a, b in predicted.tolist()] == [[11, 12, 2]] * 2

    write_records(batch, tmp_path / "batch.jsonl")
    again = read_records(tmp_path / "batch.jsonl")
    for name in ("token_ids", "cu_seqlens", "modality_spans", "media_ids", "loss_spans"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert again.media == batch.media and again.media_cache_keys == batch.media_cache_keys
    assert not compare_layout(batch, again).findings

    right = _batch(_processor(), SIZES, side="right")
    assert right.padding_side == "right" and not compare_layout(batch, right).findings


def test_faults_of_the_processor_are_named() -> None:
    batch = _batch(_processor(), SIZES)
    small = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}
    dropped = compare_layout(_batch(_processor(), SIZES, size=small), batch).findings[0]
    assert dropped.cause == "processor-settings" and "max_pixels=3136" in dropped.rollout
    raw = _batch(_processor(), SIZES, do_rescale=False, do_normalize=False)  # as vLLM with mm_device_do_normalize
    result = compare_layout(raw, batch)
    assert "digests of pixels" in result.unknown and [f.cause for f in result.findings] == ["processor-settings"]
    bilinear = _batch(_processor(resample=2), SIZES)
    assert compare_layout(batch, bilinear).findings[0].cause == "processor-settings"
    assert batch.media[0].grid == bilinear.media[0].grid  # only the pixels show it
    assert batch.media_cache_keys[0] != bilinear.media_cache_keys[0]


def test_fingerprint() -> None:
    print_ = fingerprint_of(_processor())
    assert print_.min_pixels == 784 and print_.max_pixels == 12544 and print_.settings["patch_size"] == 14
    assert print_.versions["transformers"] and print_.digest == fingerprint_of(_processor()).digest
    assert fingerprint_of(_processor(), {"max_pixels": 784}).max_pixels == 784
    assert print_.digest != fingerprint_of(_processor(do_normalize=False)).digest
    assert digest_of_pixels(torch.ones(2, 3)) == digest_of_pixels(torch.ones(2, 3).bfloat16())


def test_the_package_needs_torch_alone() -> None:
    code = "import sys, rlkernel.multimodal; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"transformers", "vllm", "trl", "verl", "PIL", "rlkernel.ops", "rlkernel.kernels"}
    assert "torch" in loaded and not heavy & set(loaded)


def test_refusals(tmp_path: Path) -> None:
    ids = torch.tensor([[9, BEGIN, IMAGE, STOP]])
    grid = torch.tensor([[1, 2, 2]])
    with pytest.raises(ValueError, match="placeholder_ids say which tokens"):
        from_transformers({"input_ids": ids, "image_grid_thw": grid})
    with pytest.raises(ValueError, match=r"pixel_values has 5 rows, and image_grid_thw .* needs 4"):
        from_transformers(
            {"input_ids": ids, "image_grid_thw": grid, "pixel_values": torch.ones(5, 3)}, placeholder_ids=PLACEHOLDERS
        )
    with pytest.raises(ValueError, match="num_images has 2 numbers for 1 samples; give one each"):
        from_transformers({"input_ids": ids}, num_images=[1, 1])
    rows = {"input_ids": ids.repeat(2, 1), "image_grid_thw": grid.repeat(3, 1)}
    counted = from_transformers(rows, placeholder_ids=PLACEHOLDERS, num_images=[1, 1])
    with pytest.raises(ValueError, match=r"sample '1', .*: medium 2 \(image of grid 1x2x2\) has no placeholder"):
        validate(counted)  # a medium that num_images does not count
    for kind, name in ((3, "mm_token_type_ids"), ("audio", "mm_placeholders")):
        with pytest.raises(ValueError, match=f"modality '?{kind}'? is not supported"):
            if name == "mm_placeholders":
                place = SimpleNamespace(offset=1, length=1, is_embed=None)
                from_vllm([{"prompt_token_ids": [9, 3], "mm_placeholders": {"audio": [place]}}], [[11]])
            else:
                from_transformers({"input_ids": ids, name: torch.tensor([[0, 0, 3, 0]])})
    with pytest.raises(ValueError, match=r"skip_mm_cache=True"):
        from_vllm([{"prompt_token_ids": [9, 3], "mm_kwargs": {"image": [None]}}], [[11]])
    for text, words in (
        ('{"prompt_token_ids": [1]}', "field 'token_ids'"),
        (
            '{"token_ids": [1], "media": [{"modality": "sound", "grid": [1, 2, 2]}]}',
            "line 1: .*modality 'sound' is not supported; expected image or video",
        ),
        ("[1]", "line 1"),
        ("{", "line 1"),
        ("", "has no records"),
        (
            '{"id": "a", "token_ids": [1, 2, 3], "loss_spans": [[2, 1]]}',
            r"\(sample 'a'\): .*loss_spans\[0\] is \[2, 1\]",
        ),
        ('{"token_ids": [1, 2, 3], "loss_spans": [[1, 3], [2, 3]]}', r"loss_spans\[1\] is \[2, 3\].*: sort the spans"),
        ('{"token_ids": [1], "processor": {"class": "A"}}', "line 1.*keyword argument 'class'"),
        ('{"token_ids": [1, 2], "modality_spans": [[1, 3, "image"]]}', r"modality_spans\[0\] is \[1, 3, 'image'\]"),
        ('{"token_ids": [1, 2, 3], "mask": [true]}', r"mask has the shape \[1\]; give one .* 3 tokens"),
        ('{"token_ids": [1, 2, 3], "attention_mask": [1, 1]}', r"attention_mask has the shape \[2\]"),
        ('{"token_ids": [1, 2], "positions": [[0, 0, 0]], "axes": ["text"]}', r"positions has the shape \[3\]"),
        ('{"token_ids": [1, 2], "positions": [[0, 0], [1, 1]]}', "positions has 2 lists for the axes temporal, height"),
        (
            '{"token_ids": [1], "positions": [[0]], "axes": ["text"]}\n{"id": "b", "token_ids": [1], "axes": ["text"]}',
            "only one of sample 'b' and the first sample has positions",
        ),
        ('{"token_ids": [1, 2.5]}', "line 1: .*token_ids has fractions"),
        ('{"token_ids": [1], "merge_size": "2"}', "merge_size is '2'"),
        ('{"token_ids": [1], "axes": 3}', "axes is 3"),
        ('{"token_ids": [1], "placeholder_ids": {"image": "a"}}', "placeholder_ids is"),
        ('{"token_ids": [1], "padding_side": "up"}', "padding_side is 'up'"),
        ('{"token_ids": [1], "processor": {"processor": "A", "settings": [1]}}', "processor is"),
        ('{"token_ids": [1], "media": [{"modality": "image", "grid": [2, 2]}]}', r"grid is \[2, 2\]; give the three"),
        ('{"token_ids": [1]}\n{"id": "b", "token_ids": [1], "merge_size": 1}', "sample 'b' has another merge_size"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_records(tmp_path / "bad.jsonl")
    (tmp_path / "floats.jsonl").write_text('{"token_ids": [1, 2, 3], "mask": [0.0, 1.0, 1.0]}')
    assert read_records(tmp_path / "floats.jsonl").loss_spans.tolist() == [[0, 1, 3]]
    record = {"token_ids": [11, 2], "prompt_token_ids": [9, IMAGE], "placeholder_ids": {"image": IMAGE}}
    (tmp_path / "least.jsonl").write_text(json.dumps(record | {"media": [{"modality": "image", "grid": [1, 2, 2]}]}))
    least = read_records(tmp_path / "least.jsonl")
    validate(least)
    assert least.loss_spans.tolist() == [[0, 2, 4]] and least.modality_spans.tolist() == [[0, 1, 2, Modality.IMAGE]]
