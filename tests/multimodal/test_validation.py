"""Bad input: each error names the sample, the span and the remedy."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from layout_worlds import BEGIN, IMAGE, PLACEHOLDERS, STOP, VIDEO

from rlkernel.multimodal import (
    Grounding,
    Medium,
    Modality,
    MultimodalBatch,
    check_frames,
    check_size,
    frame_major,
    frame_mask,
    open_image,
    problems,
    token_major,
    validate,
)
from rlkernel.multimodal.build import Row, build_batch, kinds_of

SHOT, CLIP = Medium(Modality.IMAGE, (1, 4, 4)), Medium(Modality.VIDEO, (2, 4, 4))


def batch(ids: list[int], media: list[Medium], scored: tuple[int, int] = (1, 2)) -> MultimodalBatch:
    tokens = torch.tensor(ids)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[slice(*scored)] = True
    rows = [
        Row(torch.tensor([9, 9]), torch.zeros(2), []),
        Row(tokens, kinds_of(tokens, PLACEHOLDERS), media, None, mask),
    ]
    return build_batch(rows, sample_ids=["first", "b"], placeholder_ids=PLACEHOLDERS)


GOOD = [9, 9, BEGIN, *[IMAGE] * 4, STOP]
FRAMES = [9, 9, *[BEGIN, *[VIDEO] * 4, STOP] * 2]


def test_good_batches() -> None:
    validate(batch(GOOD, [SHOT]))
    validate(batch(FRAMES, [CLIP]))
    validate(batch([9, 9, BEGIN, *[VIDEO] * 8, STOP], [CLIP]))
    rows, features = batch(FRAMES, [CLIP]).feature_rows()
    assert features.tolist() == list(range(8)) and rows.tolist() == [5, 6, 7, 8, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("ids", "media", "words"),
    (
        (GOOD, [], "tokens 3 to 6: image placeholders without a medium; pass its pixels"),
        ([9, 9, 9], [SHOT], r"tokens 0 to 2: medium 0 \(image of grid 1x4x4\) has no placeholder; put one into"),
        (GOOD, [replace(SHOT, grid=(1, 4, 5))], "1x4x5 does not divide into 2x2 patches; resize to multiples"),
        (GOOD, [replace(SHOT, grid=(1, 0, 4))], "has no pixels; check the file"),
        (FRAMES, [replace(CLIP, grid=(0, 4, 4))], "the video has no frames; check the sampling rate"),
        (GOOD, [replace(SHOT, grid=(2, 4, 4))], "has 2 temporal patches; pass it as a video"),
        (GOOD[:-2] + [STOP], [SHOT], "tokens 3 to 5: 3 placeholder tokens .* needs 4: 1 too few"),
        ([9, 9, *[IMAGE] * 7], [SHOT], "were expanded twice; give the engine the prompt"),
        ([*FRAMES, BEGIN, *[VIDEO] * 4], [CLIP], "without a medium"),
        (FRAMES, [replace(CLIP, seconds=(0.0,))], "has 1 times; give one per temporal patch"),
        (FRAMES, [replace(CLIP, grid=(3, 4, 4))], "2 placeholder runs; expected 1, or one per temporal patch"),
    ),
)
def test_media_and_placeholders(ids: list[int], media: list[Medium], words: str) -> None:
    with pytest.raises(ValueError, match=rf"sample 'b', tokens .*{words.removeprefix('tokens ')}"):
        validate(batch(ids, media))


def _spans(*spans: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(spans, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"loss_spans": _spans((1, 1, 3), (1, 2, 4))}, r"'b', tokens 2 to 3: loss_spans\[1\] overlaps loss_spans\[0\]"),
        ({"loss_spans": _spans((1, 7, 8), (1, 1, 2))}, r"tokens 1 to 1: loss_spans\[1\] begins before loss_spans\[0\]"),
        ({"loss_spans": _spans((1, 2, 2))}, "is empty or outside the sample's 8 tokens"),
        ({"loss_spans": _spans((0, 1, 3))}, "sample 'first', tokens 1 to 2: .*outside the sample's 2 tokens"),
        ({"loss_spans": _spans((2, 1, 3))}, "names sample 2 of 2"),
        ({"loss_spans": _spans((1, 0, 2))}, "the sample's first token, which nothing predicts; begin at token 1"),
        ({"loss_spans": _spans((1, 1, 5))}, "'b', tokens 3 to 4: the loss scores image placeholders"),
        (
            {"modality_spans": _spans((1, 4, 8, 1))},
            "image placeholders without a medium|in a span of image placeholders",
        ),
        ({"modality_spans": _spans((1, 3, 7, 3))}, r"modality_spans\[0\] has the modality 3; expected 1 \(image\)"),
        ({"modality_spans": _spans((1, 3, 7, 2))}, "video placeholders show medium 0, whose modality is image"),
        ({"positions": torch.zeros(3, 4)}, r"positions is \(3, 4\); expected \(3, 10\)"),
        ({"cu_seqlens": torch.tensor([0, 11, 10])}, "must start at 0, never decrease"),
        ({"merge_size": 0}, "merge_size is 0; expected the encoder's"),
        ({"loss_spans": torch.tensor([[1.0, 1.0, 2.0]])}, r"loss_spans is torch.float32; expected an integer dtype"),
    ),
)
def test_spans_and_shapes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(replace(batch(GOOD, [SHOT]), **changes))


def test_stray_placeholders_of_each_sample() -> None:
    tokens = torch.tensor(GOOD)
    rows = [Row(tokens, torch.zeros(8), []), Row(tokens, kinds_of(tokens, PLACEHOLDERS), [SHOT])] * 2
    found = list(problems(build_batch(rows, placeholder_ids=PLACEHOLDERS)))
    assert [(p.cause, p.sample, p.begin) for p in found] == [("placeholder-without-media", b, 3) for b in (0, 2)]


def test_coordinates_outside_the_screen() -> None:
    grounding = Grounding(
        screen_size=torch.tensor([[0, 0], [100, 50]]),
        coordinate_system="pixel",
        region_spans=_spans((1, 7, 8)),
        bbox_targets=torch.tensor([[0.0, 0.0, 10.0, 10.0]]),
        action_spans=_spans((1, 1, 2)),
        point_targets=torch.tensor([[99.0, 49.0]]),
    )
    good = replace(batch(GOOD, [SHOT]), grounding=grounding)
    validate(good)
    for changes, words in (
        ({"point_targets": torch.tensor([[99.0, 50.0]])}, r"'b', tokens 1 to 1: point \(99, 50\) lies outside"),
        ({"bbox_targets": torch.tensor([[9.0, 0.0, 9.0, 10.0]])}, r"'b', tokens 7 to 7: box \(9, 0, 9, 10\) is empty"),
        ({"bbox_targets": torch.tensor([[0.0, 0.0, float("nan"), 9.0]])}, r"box \(0, 0, nan, 9\) is not 4 finite"),
        ({"point_targets": torch.tensor([[float("nan"), 9.0]])}, r"point \(nan, 9\) is not 2 finite"),
        ({"point_targets": torch.zeros(0, 2)}, r"point_targets is \(0, 2\); expected \(1, 2\)"),
        ({"region_spans": _spans((1, 7, 9))}, r"'b', tokens 7 to 8: region_spans\[0\] is .*outside the sample's 8"),
    ):
        with pytest.raises(ValueError, match=words):
            validate(replace(good, grounding=replace(grounding, **changes)))
    with pytest.raises(ValueError, match="coordinate_system is 'percent'; expected one of pixel, normalised"):
        validate(replace(good, grounding=replace(grounding, coordinate_system="percent")))


@pytest.mark.filterwarnings("error")
def test_files() -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (20, 10)).save(buffer, "PNG")
    image = open_image(buffer.getvalue(), sample="a")
    assert image.size == (20, 10) and image.mode == "RGB"
    with pytest.raises(ValueError, match=r"sample 'a', image 2: 40 bytes cannot be decoded .*; replace the file"):
        open_image(buffer.getvalue()[:40], sample="a", index=2)
    with pytest.raises(ValueError, match=r"sample 'a', image 0: missing.png cannot be decoded"):
        open_image("missing.png", sample="a")
    huge = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(huge, "PNG")
    with pytest.raises(ValueError, match="10000x10000 pixels, more than 64000000; resize it, or raise max_pixels"):
        open_image(huge.getvalue(), sample="a")
    with pytest.raises(ValueError, match="the image has 0x5 pixels"):
        check_size(0, 5, where="sample 'a', image 0")
    check_frames(np.zeros((2, 4, 6, 3)), sample="a")
    with pytest.raises(ValueError, match="sample 'a', video 1: the video has no frames"):
        check_frames([], sample="a", index=1)
    with pytest.raises(ValueError, match=r"frame 1 is \(4, 5\), frame 0 \(4, 6\)"):
        check_frames([np.zeros((4, 6, 3)), np.zeros((4, 5, 3))], sample="a")


def test_orders_of_video_rows() -> None:
    media = [replace(SHOT, grid=(1, 2, 4)), replace(CLIP, grid=(3, 2, 4))]
    order = token_major(media)
    assert order.tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    assert torch.equal(order[frame_major(media)], torch.arange(8))
    assert frame_mask(media, [[True], [True, False, True]]).tolist() == [True] * 4 + [False] * 2 + [True] * 2
    with pytest.raises(ValueError, match="medium 1 has 3 temporal patches and 2 flags"):
        frame_mask(media, [[True], [True, False]])
