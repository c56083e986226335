"""Coordinates, actions and trajectories of screens."""

from __future__ import annotations

import math

import pytest
import torch
from layout_worlds import BEGIN, END, IMAGE, PLACEHOLDERS, STOP

from rlkernel import ops
from rlkernel.multimodal import (
    Medium,
    Modality,
    Screen,
    Turn,
    convert_box,
    convert_point,
    pack_trajectories,
    parse_action,
    validate,
)

SIZES = (1, 7, 392, 999, 1000, 1001, 1080, 1920, 2560)


@pytest.mark.parametrize("size", SIZES)
def test_conversion_is_exact_both_ways_on_the_grid(size: int) -> None:
    screen = Screen(size, size)
    pixels = range(size)
    for p in pixels:
        x = convert_point((p, 0), "pixel", "normalised", screen)
        assert convert_point(x, "normalised", "pixel", screen) == (p, 0) and 0 < x[0] < 1
        thousand = convert_point((p, 0), "pixel", "thousand", screen)
        assert 0 <= thousand[0] < 1000 and convert_point(x, "normalised", "thousand", screen) == thousand
        if size <= 1000:
            assert convert_point(thousand, "thousand", "pixel", screen) == (p, 0)
    for t in range(1000):
        pixel = convert_point((t, t), "thousand", "pixel", screen)
        assert 0 <= pixel[0] < size
        if size >= 1000:
            assert convert_point(pixel, "pixel", "thousand", screen) == (t, t)
        assert convert_point(convert_point((t, 0), "thousand", "normalised", screen), "normalised", "thousand", screen)[
            0
        ] == t  # fmt: skip
    for edge in range(1, (size if size <= 1000 else 1000) + 1):
        system, other = ("pixel", "thousand") if size <= 1000 else ("thousand", "pixel")
        box = (0, edge - 1, edge, edge)
        assert convert_box(convert_box(box, system, "normalised", screen), "normalised", system, screen) == box
        there = convert_box(box, system, other, screen)
        assert convert_box(there, other, system, screen) == box


@pytest.mark.parametrize(
    ("values", "system", "words"),
    (
        ((100, 5), "pixel", r"point \(100, 5\) lies outside the screen of 100x50 pixels: 100 is not in \[0, 100\)"),
        ((5, -1), "pixel", "-1 is not in"),
        ((0.5, 1.0), "normalised", r"1 is not in \[0, 1\)"),
        ((1000, 0), "thousand", r"1000 is not in \[0, 1000\)"),
        ((1.5, 0), "pixel", "has fractions"),
        ((math.nan, 0), "pixel", "not 2 finite numbers"),
        ((1, 2, 3), "pixel", "not 2 finite numbers"),
        ((1, 2), "percent", "'percent' is unknown"),
    ),
)
def test_points_outside(values: tuple[float, ...], system: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert_point(values, system, "pixel", Screen(100, 50))


def test_boxes_outside() -> None:
    screen = Screen(100, 50)
    assert convert_box((0, 0, 100, 50), "pixel", "thousand", screen) == (0, 0, 1000, 1000)
    for box, words in (
        ((10, 10, 10, 20), "is empty; expected left < right"),
        ((0, 0, 101, 20), r"101 is not in \[0, 100\]"),
        ((0, 30, 5, 20), "is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            convert_box(box, "pixel", "thousand", screen)
    with pytest.raises(ValueError, match="give screen_size"):
        convert_box((0, 0, 1, 1), "pixel", "thousand", Screen(0, 50))


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ('{"action": "click", "point": [40, 25]', r"JSON does not parse .* in '\{\"action\": \"click\""),
        ("[1, 2]", "no object with a string 'action'"),
        ('{"action": "fly"}', "unknown action 'fly' .*expected one of click"),
        ('{"action": "click"}', "'click' lacks 'point'"),
        ('{"action": "click", "point": [40, "25"]}', r"point is \[40, '25'\]"),
        ('{"action": "click", "point": [400, 25]}', r"400 is not in \[0, 100\) .* check the coordinate system"),
        ('{"action": "select", "box": [9, 9, 9, 9]}', "is empty"),
        ('{"action": "drag", "point": [1, 1], "to": [1, 50]}', r"50 is not in \[0, 50\)"),
        ('{"action": "type", "text": 5}', "text is 5"),
        (f'{{"action": "click", "point": [{"9" * 60}, 2]}}', r"point \(1e\+60, 2\) lies outside"),
    ),
)
def test_actions_are_refused_with_their_text(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        parse_action(text, Screen(100, 50), "pixel", where="sample 'a', turn 3")
    assert str(error.value).startswith("sample 'a', turn 3: ") and repr(text)[1:-1] in str(error.value)


SHOT = Medium(Modality.IMAGE, (1, 4, 4), "0" * 64)
OBSERVATION = [20, BEGIN, *[IMAGE] * 4, STOP, 21]
TRAJECTORIES = [
    [
        Turn(OBSERVATION, [30, 31, END], '{"action": "click", "point": [40, 25]}', 0.0, [SHOT]),
        Turn([22, *OBSERVATION], [32, END], '{"action": "select", "box": [1, 2, 30, 50]}', 1.0, [SHOT]),
    ],
    [Turn([23, 24], [33, 34, 35, END], None, 0.5)],
]


def test_trajectories_score_actions_alone() -> None:
    packed = pack_trajectories(TRAJECTORIES, [Screen(100, 50)] * 2, "pixel", PLACEHOLDERS, sample_ids=["a", "b"])
    batch = packed.batch
    validate(batch)
    scored = [batch.token_ids[a:b].tolist() for a, b in batch.packed_rows(batch.loss_spans).tolist()]
    assert scored == [[30, 31, END], [32, END], [33, 34, 35, END]]
    assert packed.rewards.tolist() == [0.0, 1.0, 0.5] and packed.turns == [2, 1]
    assert [a and a.name for a in packed.actions] == ["click", "select", None]
    grounding = batch.grounding
    assert grounding is not None and grounding.point_targets[0].tolist() == [40.0, 25.0]
    assert grounding.point_targets[1:].isnan().all() and batch.positions is not None
    assert torch.equal(grounding.action_spans, batch.loss_spans)
    assert grounding.region_spans.tolist() == batch.loss_spans[1:2].tolist()
    assert grounding.bbox_targets.tolist() == [[1.0, 2.0, 30.0, 50.0]]
    # from here the ops do the rest: per-step rewards to the tokens of their action
    spans = batch.packed_rows(batch.loss_spans, -1)
    values = ops.token_rewards(spans, batch.cu_seqlens, turns=packed.rewards)
    assert values.tolist() == [0.0] * 3 + [1.0] * 2 + [0.5] * 4


def test_bad_trajectories() -> None:
    pack = lambda *turns: pack_trajectories([turns], [Screen(100, 50)], "pixel", PLACEHOLDERS, sample_ids=["a"])
    good = TRAJECTORIES[0][0]
    with pytest.raises(ValueError, match="sample 'a', turn 1: JSON does not parse"):
        pack(good, Turn(OBSERVATION, [30], "{", media=[SHOT]))
    with pytest.raises(ValueError, match=r"sample 'a', turn 0: box \(1, 2, 30, 51\) lies outside .*check the coord"):
        pack(Turn(OBSERVATION, [30], '{"action": "select", "box": [1, 2, 30, 51]}', media=[SHOT]))
    with pytest.raises(ValueError, match="0 screens for 1 trajectories; give one each"):
        pack_trajectories([[good]], [], "pixel", PLACEHOLDERS)
    with pytest.raises(ValueError, match="the batch has no samples"):
        pack_trajectories([], [], "pixel", PLACEHOLDERS)
    with pytest.raises(ValueError, match="sample 'a', turn 1: no action tokens"):
        pack(good, Turn(OBSERVATION, [], media=[SHOT]))
    with pytest.raises(ValueError, match="sample 'a', turn 1: no observation tokens"):
        pack(good, Turn([], [30]))
    with pytest.raises(ValueError, match=r"sample 'a', tokens 13 to 16: image placeholders without a medium"):
        pack(good, Turn(OBSERVATION, [30]))
    with pytest.raises(ValueError, match=r"medium 1 \(image of grid 1x4x4\) has no placeholder"):
        pack(Turn(OBSERVATION, [30], media=[SHOT, SHOT]))
