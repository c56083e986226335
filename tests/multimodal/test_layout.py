"""The layout comparison: planted faults are named, and equal layouts of different frameworks raise no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import layout_worlds as worlds
import pytest
import torch
from layout_worlds import (
    BEGIN,
    END,
    IMAGE,
    PAD,
    PLACEHOLDERS,
    STOP,
    VIDEO,
    Sample,
    as_transformers,
    as_verl,
    as_vllm,
    conversation,
)

from rlkernel.multimodal import (
    Medium,
    Modality,
    compare_layout,
    digest_of_pixels,
    read_records,
    validate,
    write_records,
)
from rlkernel.multimodal.build import Row, build_batch, kinds_of


def drop_token(samples: list[Sample], rng: random.Random) -> None:
    """One image token too few."""
    begin, _ = samples[0].run(Modality.IMAGE)
    for values in (samples[0].ids, samples[0].kinds, samples[0].sampled):
        del values[begin]
    assert samples[0].positions is not None
    samples[0].positions = samples[0].positions[:, [i for i in range(len(samples[0].ids) + 1) if i != begin]]


def add_tokens(samples: list[Sample], count: int) -> None:
    begin, _ = samples[0].run(Modality.IMAGE)
    for values, value in ((samples[0].ids, IMAGE), (samples[0].kinds, 1), (samples[0].sampled, False)):
        values[begin:begin] = [value] * count  # type: ignore[list-item]
    samples[0].positions = torch.arange(len(samples[0].ids)).expand(3, -1)


def expand_twice(samples: list[Sample], rng: random.Random) -> None:
    begin, end = samples[0].run(Modality.IMAGE)
    add_tokens(samples, end - begin - 1)


def swap_images(samples: list[Sample], rng: random.Random) -> None:
    a, b = samples[:2]
    (a.media[0], b.media[0]), (a.pixels[0], b.pixels[0]) = (b.media[0], a.media[0]), (b.pixels[0], a.pixels[0])


def resize(samples: list[Sample], rng: random.Random) -> None:
    """Another target size: another grid, expanded consistently."""
    sample = samples[0]
    old = sample.media[0]
    sample.media[0], sample.pixels[0] = worlds.medium(rng, Modality.IMAGE, (1, old.grid[1] + 2, old.grid[2]))
    begin, _ = sample.run(Modality.IMAGE)
    more = sample.media[0].tokens(2) - old.tokens(2)
    for values, value in ((sample.ids, IMAGE), (sample.kinds, 1), (sample.sampled, False)):
        values[begin:begin] = [value] * more  # type: ignore[list-item]
    sample.place()


def resample(samples: list[Sample], rng: random.Random) -> None:
    """Another filter: the same grid, other pixels."""
    samples[0].pixels[0] = samples[0].pixels[0] + 1e-3
    samples[0].media[0] = replace(samples[0].media[0], digest=digest_of_pixels(samples[0].pixels[0]))


def mask_of_other_side(samples: list[Sample], rng: random.Random) -> None:
    """Ids padded left, the mask padded right: padding is read, and the last tokens are not."""
    sample, pad = samples[0], rng.randint(1, 3)
    sample.ids = [PAD] * pad + sample.ids
    sample.kinds, sample.sampled = [0] * pad + sample.kinds, [False] * pad + sample.sampled
    sample.attended = [True] * (len(sample.ids) - pad) + [False] * pad
    sample.positions = torch.arange(len(sample.ids)).expand(3, -1)


def reorder_axes(samples: list[Sample], rng: random.Random) -> None:
    for sample in samples:
        assert sample.positions is not None
        sample.positions = sample.positions[[2, 0, 1]]


def other_seconds(samples: list[Sample], rng: random.Random) -> None:
    for sample in samples:
        media = sample.media
        sample.media = [replace(m, seconds=4 * m.seconds) if m.modality == Modality.VIDEO else m for m in media]
        sample.place()
        sample.media = media


def flatten(samples: list[Sample], rng: random.Random) -> None:
    for sample in samples:
        sample.positions = torch.arange(len(sample.ids)).expand(3, -1)


def count_padding(samples: list[Sample], rng: random.Random) -> None:
    assert samples[0].positions is not None
    samples[0].positions = samples[0].positions + 3


def score_observation(samples: list[Sample], rng: random.Random) -> None:
    sample = samples[0]
    begin = sample.sampled.index(False, sample.prompt)
    end = sample.sampled.index(True, begin)
    text = [i for i in range(begin, end) if sample.kinds[i] == 0]
    for i in range(begin, text[1] + 1):
        sample.sampled[i] = True


def score_one_token_between_turns(samples: list[Sample], rng: random.Random) -> None:
    """The newline that chat templates write after the token that ends a turn."""
    samples[0].sampled[samples[0].sampled.index(False, samples[0].prompt)] = True


def drop_turn_end(samples: list[Sample], rng: random.Random) -> None:
    sample = samples[0]
    for i in range(sample.prompt, len(sample.ids)):
        sample.sampled[i] = sample.sampled[i] and sample.ids[i] != END


def other_text(samples: list[Sample], rng: random.Random) -> None:
    samples[0].ids[1] = 301


def drop_images(samples: list[Sample], rng: random.Random) -> None:
    """What TRL does with a truncated image: all pixels of the batch go, the placeholders stay."""
    for sample in samples:
        sample.media, sample.pixels, sample.kinds = [], [], [0] * len(sample.ids)


def mask_a_hole(samples: list[Sample], rng: random.Random) -> None:
    begin, _ = samples[0].run(Modality.IMAGE)
    samples[0].attended = [i != begin for i in range(len(samples[0].ids))]


def score_prompt(samples: list[Sample], rng: random.Random) -> None:
    for i in range(samples[0].prompt - 2, samples[0].prompt):
        samples[0].sampled[i] = True


FAULTS: dict[str, tuple[Callable[[list[Sample], random.Random], None], str]] = {
    "one image token too few": (drop_token, "placeholder-count"),
    "one image token too many": (lambda samples, rng: add_tokens(samples, 1), "placeholder-count"),
    "double expansion": (expand_twice, "double-expansion"),
    "images of two samples swapped": (swap_images, "swapped-media"),
    "another size": (resize, "resized"),
    "another filter": (resample, "pixels-differ"),
    "other padding side": (mask_of_other_side, "padding-side"),
    "dropped mm_processor_kwargs": (resize, "processor-settings"),
    "axes in another order": (reorder_axes, "axis-order"),
    "temporal positions off": (other_seconds, "temporal-positions"),
    "text positions for images": (flatten, "positions-flat"),
    "padding counted in positions": (count_padding, "positions-shift"),
    "observation scored": (score_observation, "observation-scored"),
    "token after the end of a turn scored": (score_one_token_between_turns, "observation-scored"),
    "end of a turn unscored": (drop_turn_end, "turn-end-unscored"),
    "another text": (other_text, "tokens-differ"),
    "another template": (other_text, "chat-template"),
    "images dropped": (drop_images, "media-count"),
    "a hole in the attention mask": (mask_a_hole, "attention-mask"),
    "prompt scored": (score_prompt, "prompt-scored"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    plant, cause = FAULTS[name]
    for seed in range(6):
        rng = random.Random(seed)
        video = "qwen2.5" if cause == "temporal-positions" else rng.choice(("", "qwen2.5", "qwen3"))
        truth = [conversation(rng, video=video, turns=2, grid=(4, 6) if seed % 2 else None) for _ in range(3)]
        faulty = worlds.clone(truth)
        plant(faulty, rng)
        read = as_verl if seed % 2 and name != "other padding side" else as_transformers
        rollout, train = as_vllm(truth), read(faulty)
        if name == "dropped mm_processor_kwargs":
            rollout = worlds.with_settings(rollout, worlds.settings(max_pixels=12544))
            train = worlds.with_settings(train, worlds.settings())
        if name == "another template":
            templates = [replace(worlds.settings(), chat_template=digest * 64) for digest in "ab"]
            rollout, train = (worlds.with_settings(b, t) for b, t in zip((rollout, train), templates, strict=True))
        for left, right in ((rollout, train), (train, rollout)):
            result = compare_layout(left, right)
            assert result.findings, name
            found = result.findings[0]
            scored = {"observation-scored": "action-unscored", "prompt-scored": "action-unscored"}
            sides = scored if left is train else {}
            assert found.cause == sides.get(cause, cause), str(result)
            assert found.rollout != found.train
        if cause in ("placeholder-count", "double-expansion"):
            counts = [batch.runs[0][0][1] - batch.runs[0][0][0] for batch in (rollout, train)]
            found = compare_layout(rollout, train).findings[0]
            assert found.rollout == f"{counts[0]} placeholder tokens of one image"
            assert found.train.startswith(f"{counts[1]} placeholder tokens for the image of grid 1x")
        if name == "dropped mm_processor_kwargs":
            assert "max_pixels=12544" in str(result) and "max_pixels=None" in str(result)


def test_no_false_alarm_in_200_healthy_pairs(tmp_path: Path) -> None:
    for seed in range(200):
        rng = random.Random(1000 + seed)
        samples = worlds.world(rng)
        rollout = as_vllm(samples)
        name = list(worlds.TRAINERS)[seed % 4]
        train = worlds.TRAINERS[name](worlds.clone(samples))
        if seed % 3 == 0:
            rollout = worlds.with_settings(rollout, worlds.settings())
            train = worlds.with_settings(train, worlds.settings(do_rescale=True))
        if seed % 5 == 0:
            write_records(train, tmp_path / "train.jsonl")
            train = read_records(tmp_path / "train.jsonl")
        result = compare_layout(rollout, train)
        assert not result.findings, f"{seed}, {name}:\n{result}"
        assert len(train.loss_spans) and result.samples == len(samples)
        validate(rollout), validate(train)


def test_what_was_not_compared_is_listed() -> None:
    samples = worlds.world(random.Random(0))
    result = compare_layout(as_vllm(samples), worlds.as_trl(samples))
    assert "positions" in result.unknown and "positions" not in " ".join(result.compared)
    assert "not compared: positions, processor settings" in str(result)
    bare = replace(as_vllm(samples), media=tuple(replace(m, digest="") for m in as_vllm(samples).media))
    settings = [worlds.settings(), worlds.settings(resample=2)]
    sides = [worlds.with_settings(bare, s) for s in settings]
    assert compare_layout(*sides).findings[0].cause == "processor-settings"
    with_pixels = [worlds.with_settings(as_vllm(samples), s) for s in settings]
    assert not compare_layout(*with_pixels).findings  # equal pixels show that the settings did not matter


def test_a_completion_that_training_drops_is_no_difference() -> None:
    """TRL's `mask_truncated_completions` masks the whole completion, also for attention."""
    samples = [conversation(random.Random(seed), turns=1) for seed in range(2)]
    dropped = worlds.clone(samples)
    sample = dropped[1]
    sample.attended = [i < sample.prompt for i in range(len(sample.ids))]
    sample.sampled = [False] * len(sample.ids)
    assert not compare_layout(as_vllm(samples), as_transformers(dropped)).findings
    sample.ids[0] += 1
    assert compare_layout(as_vllm(samples), as_transformers(dropped)).findings[0].cause == "tokens-differ"


@pytest.mark.parametrize(("grid", "cause"), (((1, 3, 4), "grid-not-divisible"), ((1, 0, 4), "empty-medium")))
def test_a_broken_medium_is_no_other_resize(grid: tuple[int, int, int], cause: str) -> None:
    batch = as_vllm([conversation(random.Random(0))])
    broken = replace(batch, media=(replace(batch.media[0], grid=grid), *batch.media[1:]))
    assert compare_layout(batch, broken).findings[0].cause == cause


def test_token_types_of_other_tokens() -> None:
    """Without placeholder ids only the other side shows that the token types are shifted."""
    sample = conversation(random.Random(0))
    batch = replace(as_vllm([sample]), placeholder_ids={})
    moved = replace(batch, modality_spans=batch.modality_spans + torch.tensor([0, 1, 1, 0]))
    found = compare_layout(batch, moved).findings[0]
    begin, end = sample.run(Modality.IMAGE)
    assert found.cause == "moved-media" and found.train == f"image at tokens {begin + 1} to {end}"


def test_samples_are_matched_by_their_ids() -> None:
    rng = random.Random(3)
    samples = [conversation(rng) for _ in range(3)]
    rollout = replace(as_vllm(samples), sample_ids=("a", "b", "c"))
    train = replace(as_verl([samples[2], samples[0]]), sample_ids=("c", "a"))
    result = compare_layout(rollout, train)
    assert result.samples == 2 and not result.findings
    assert result.unknown[-1] == "1 samples of the rollout that are not in training"
    group = replace(as_vllm(samples), sample_ids=("p", "p", "p"))
    assert not compare_layout(group, replace(as_verl(samples), sample_ids=("p", "p", "p"))).findings
    wrong = compare_layout(rollout, replace(train, sample_ids=("a", "c")))
    assert wrong.findings[0].cause == "swapped-media"
    with pytest.raises(ValueError, match="give both sides the same ids"):
        compare_layout(rollout, replace(train, sample_ids=("x", "y")))


def test_an_image_that_a_sample_shows_twice(tmp_path: Path) -> None:
    """One medium with two runs, or two equal media."""
    ids = torch.tensor([9, BEGIN, *[IMAGE] * 4, STOP, BEGIN, *[IMAGE] * 4, STOP])
    shot = Medium(Modality.IMAGE, (1, 4, 4), "0" * 64)
    two = build_batch([Row(ids, kinds_of(ids, PLACEHOLDERS), [shot, shot])])
    one = replace(two, media=(shot,), media_ids=torch.tensor([0, 0]))
    write_records(one, tmp_path / "one.jsonl")
    for other in (two, read_records(tmp_path / "one.jsonl")):
        assert not compare_layout(one, other).findings


def test_one_lost_token_is_no_padding() -> None:
    """A dropped first token and another last one: shifted by one, as by one token of padding."""
    sample = conversation(random.Random(0))
    faulty = worlds.clone([sample])
    faulty[0].ids, faulty[0].kinds = [*sample.ids[1:], 77], [*sample.kinds[1:], 0]
    assert compare_layout(as_vllm([sample]), as_transformers(faulty)).findings[0].cause == "tokens-differ"


def test_positions_behind_a_video() -> None:
    """transformers 5.17 continues after a video at max(h, w), also where its temporal axis is longer."""
    rng = random.Random(5)
    sample = conversation(rng, video="qwen2.5")
    faulty = worlds.clone([sample])
    _, end = sample.run(Modality.VIDEO)
    assert faulty[0].positions is not None
    faulty[0].positions[:, end:] -= 1
    found = compare_layout(as_vllm([sample]), as_transformers(faulty)).findings[0]
    assert found.cause == "temporal-positions" and found.begin == end and "after a video" in found.train
    assert VIDEO in sample.ids
