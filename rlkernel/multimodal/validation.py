"""Checks of a batch: each problem names the sample, the span and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.multimodal.schema import Medium, Modality, MultimodalBatch
from rlkernel.multimodal.screen import SYSTEMS, Screen, box_problem, point_problem


class Problem(NamedTuple):
    """What is wrong with a batch.

    Attributes:
        cause: a stable name, such as "placeholder-count".
        sample: index of the sample.
        begin, end: the tokens concerned, counted in the sample.
        message: one sentence with sample, span and remedy.
    """

    cause: str
    sample: int
    begin: int
    end: int
    message: str


def validate(batch: MultimodalBatch) -> None:
    """Checks shapes, spans, media, loss spans, boxes and points.

    Raises:
        ValueError: the first problem, with sample, span and remedy.
    """
    check_shapes(batch)
    problem = next(problems(batch), None)
    if problem is not None:
        raise ValueError(problem.message)


def problems(batch: MultimodalBatch) -> Iterator[Problem]:
    """The problems of a batch with valid shapes, in the order of its spans."""
    spans = {"modality_spans": batch.modality_spans, "loss_spans": batch.loss_spans}
    if batch.grounding is not None:
        spans |= {"region_spans": batch.grounding.region_spans, "action_spans": batch.grounding.action_spans}
    broken = [problem for name, of_name in spans.items() for problem in _disorder(batch, name, of_name)]
    yield from broken
    if not broken:  # the other checks read tokens at the spans
        yield from _media(batch)
        yield from _placeholders(batch)
        yield from _losses(batch)
        yield from _grounding(batch)


def _problem(batch: MultimodalBatch, cause: str, sample: int, begin: int, end: int, words: str) -> Problem:
    where = f"sample {batch.sample_ids[sample]!r}, tokens {begin} to {end - 1}"
    return Problem(cause, sample, begin, end, f"{where}: {words}")


def check_shapes(batch: MultimodalBatch) -> None:
    """Raises ValueError unless all tensors have the shapes of the schema, and spans name samples and media."""
    tokens, samples = len(batch.token_ids), batch.samples
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "token_ids": (batch.token_ids, (tokens,)),
        "cu_seqlens": (batch.cu_seqlens, (samples + 1,)),
        "modality_spans": (batch.modality_spans, (len(batch.modality_spans), 4)),
        "media_ids": (batch.media_ids, (len(batch.modality_spans),)),
        "loss_spans": (batch.loss_spans, (len(batch.loss_spans), 3)),
        "positions": (batch.positions, (len(batch.axes), tokens)),
        "attention_mask": (batch.attention_mask, (tokens,)),
    }
    g = batch.grounding
    if g is not None:
        shapes |= {
            "screen_size": (g.screen_size, (samples, 2)),
            "region_spans": (g.region_spans, (len(g.region_spans), 3)),
            "bbox_targets": (g.bbox_targets, (len(g.region_spans), 4)),
            "action_spans": (g.action_spans, (len(g.action_spans), 3)),
            "point_targets": (g.point_targets, (len(g.action_spans), 2)),
        }
    for name, (value, shape) in shapes.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} is {tuple(value.shape)}; expected {shape} for {samples} samples, {tokens} tokens")
        if value is not None and value.is_floating_point() and name not in ("bbox_targets", "point_targets"):
            raise ValueError(f"{name} is {value.dtype}; expected an integer dtype, or bool for a mask")
    if g is not None and g.coordinate_system not in SYSTEMS:
        raise ValueError(f"coordinate_system is {g.coordinate_system!r}; expected one of {', '.join(SYSTEMS)}")
    if batch.merge_size < 1:
        raise ValueError(f"merge_size is {batch.merge_size}; expected the encoder's spatial_merge_size, at least 1")
    ends = batch.cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens is {ends[:8]}; it must start at 0, never decrease and end at T={tokens}")
    named = {"modality_spans": batch.modality_spans, "loss_spans": batch.loss_spans}
    if g is not None:
        named |= {"region_spans": g.region_spans, "action_spans": g.action_spans}
    for name, spans in named.items():
        for i, sample in enumerate(spans[:, 0].tolist()):
            if not 0 <= sample < samples:
                raise ValueError(f"{name}[{i}] names sample {sample} of {samples}; count from 0")
    for i, kind in enumerate(batch.modality_spans[:, 3].tolist()):
        if kind not in (Modality.IMAGE, Modality.VIDEO):
            raise ValueError(f"modality_spans[{i}] has the modality {kind}; expected 1 (image) or 2 (video)")
    for i, medium in enumerate(batch.media_ids.tolist()):
        if medium >= len(batch.media):
            raise ValueError(f"media_ids[{i}] names medium {medium} of {len(batch.media)}; -1 stands for none")


def _disorder(batch: MultimodalBatch, name: str, spans: Tensor) -> Iterator[Problem]:
    """Spans that are empty, outside their sample, overlapping or descending."""
    lengths = [tokens.stop - tokens.start for tokens in batch.ranges]
    before = (-1, 0, 0)
    for i, (sample, begin, end) in enumerate(spans[:, :3].tolist()):
        if not 0 <= begin < end <= lengths[sample]:
            words = f"{name}[{i}] is empty or outside the sample's {lengths[sample]} tokens; rebuild it from the tokens"
            yield _problem(batch, "spans", sample, begin, end, words)
        elif (sample, begin) < (before[0], before[2]):
            overlaps = sample == before[0] and end > before[1]
            words = f"{name}[{i}] {'overlaps' if overlaps else 'begins before'} {name}[{i - 1}], which is "
            words += f"tokens {before[1]} to {before[2] - 1} of sample {batch.sample_ids[before[0]]!r}; "
            words += "sort the spans by sample and token, and merge those that share tokens"
            yield _problem(batch, "spans", sample, begin, end, words)
        before = (sample, begin, end)


# ---- media ---------------------------------------------------------------------------------------------------------


def _media(batch: MultimodalBatch) -> Iterator[Problem]:
    """Grids, and the number of placeholder tokens against them."""
    shown = set(batch.media_ids.tolist())
    for sample in range(batch.samples):
        shows = [medium for *_, medium in batch.runs[sample]]
        for begin, end, kind, m in batch.runs[sample]:
            problem = lambda cause, words, a=begin, b=end, s=sample: _problem(batch, cause, s, a, b, words)
            if m < 0:
                words = f"{kind.name.lower()} placeholders without a medium; pass its pixels, or drop the placeholders"
                yield problem("placeholder-without-media", words)
                continue
            medium = batch.media[m]
            wrong = _wrong_grid(medium, batch.merge_size)
            if wrong is not None:
                yield problem(*wrong)
            elif medium.modality != kind:
                words = f"{kind.name.lower()} placeholders show medium {m}, whose modality is "
                words += f"{medium.modality.name.lower()}; "
                yield problem("modality", words + "list media in the order of their placeholders")
            else:
                counted = _wrong_count(medium, end - begin, shows.count(m), batch.merge_size)
                if counted is not None:
                    yield problem(*counted)
    for m, medium in enumerate(batch.media):
        if m not in shown:
            words = f"medium {m} ({_named(medium)}) has no placeholder; put one into the prompt, or drop the medium"
            cause, words = _wrong_grid(medium, batch.merge_size) or ("media-without-placeholder", words)
            tokens = batch.ranges[medium.sample]
            yield _problem(batch, cause, medium.sample, 0, tokens.stop - tokens.start, words)


def _named(medium: Medium) -> str:
    return f"{medium.modality.name.lower()} of grid {'x'.join(map(str, medium.grid))}"


BROKEN_MEDIA = ("video-without-frames", "empty-medium", "grid-not-divisible", "video-times")
"""Causes that lie in a medium alone and not in its placeholders."""


def _wrong_grid(medium: Medium, merge: int) -> tuple[str, str] | None:
    t, h, w = medium.grid
    if medium.modality == Modality.VIDEO and t == 0:
        return "video-without-frames", "the video has no frames; check the sampling rate and the file"
    if min(medium.grid) <= 0:
        return "empty-medium", f"the {_named(medium)} has no pixels; check the file and the resize"
    if h % merge or w % merge:
        return "grid-not-divisible", (
            f"the {_named(medium)} does not divide into {merge}x{merge} patches; "
            f"resize to multiples of patch_size * {merge} pixels"
        )
    if medium.modality == Modality.IMAGE and t != 1:
        return "modality", f"the {_named(medium)} has {t} temporal patches; pass it as a video"
    if isinstance(medium.seconds, tuple) and len(medium.seconds) != t:
        return "video-times", f"the {_named(medium)} has {len(medium.seconds)} times; give one per temporal patch"
    return None


def _wrong_count(medium: Medium, tokens: int, runs: int, merge: int) -> tuple[str, str] | None:
    """A placeholder run whose length is not that of its grid."""
    each = runs > 1 and medium.modality == Modality.VIDEO  # one run per temporal patch
    if each and runs != medium.grid[0]:
        return "video-frames", (
            f"the {_named(medium)} has {runs} placeholder runs; expected 1, or one per temporal patch: "
            "sample the frames once and use the same frames on both sides"
        )
    expected = medium.tokens(merge) // (medium.grid[0] if each else 1)
    if tokens == expected:
        return None
    has = f"{tokens} placeholder tokens for the {_named(medium)}, which needs {expected}"
    if expected > 2 and tokens in (2 * expected - 1, 2 * expected, expected**2):
        return "double-expansion", (
            f"{has}: the placeholders were expanded twice; give the engine the prompt with one placeholder per medium"
        )
    amount = abs(tokens - expected)
    way = "too few" if tokens < expected else "too many"
    return (
        "placeholder-count",
        f"{has}: {amount} {way}; expand the placeholders from the grid that the processor returned",
    )


def _placeholders(batch: MultimodalBatch) -> Iterator[Problem]:
    """Placeholder tokens outside of the spans, and other tokens inside: the first of each sample."""
    for kind, token in batch.placeholder_ids.items():
        is_placeholder = batch.token_ids == token
        covered = torch.zeros_like(is_placeholder)
        spans = batch.modality_spans[batch.modality_spans[:, 3] == kind]
        for begin, end in batch.packed_rows(spans).tolist():
            covered[begin:end] = True
        name = kind.name.lower()
        for sample, tokens in enumerate(batch.ranges):
            for begin in torch.nonzero(is_placeholder[tokens] != covered[tokens])[:1].flatten().tolist():
                found = int(batch.token_ids[tokens][begin])
                if found == token:
                    words = f"{name} placeholders without a medium; pass its pixels, or drop the placeholders"
                    yield _problem(batch, "placeholder-without-media", sample, begin, begin + 1, words)
                else:
                    words = f"token {found} in a span of {name} placeholders ({token}); "
                    words += "build modality_spans from the token ids that the model receives"
                    yield _problem(batch, "spans", sample, begin, begin + 1, words)


# ---- losses, boxes, points -----------------------------------------------------------------------------------------


def _losses(batch: MultimodalBatch) -> Iterator[Problem]:
    for sample, begin, end in batch.loss_spans.tolist():
        if begin == 0:
            words = "the loss scores the sample's first token, which nothing predicts; begin at token 1"
            yield _problem(batch, "spans", sample, begin, end, words)
        for a, b, kind, _ in batch.runs[sample]:
            if a < end and begin < b:
                words = f"the loss scores {kind.name.lower()} placeholders; score only tokens that the policy sampled"
                yield _problem(batch, "media-scored", sample, max(a, begin), min(b, end), words)


def _grounding(batch: MultimodalBatch) -> Iterator[Problem]:
    g = batch.grounding
    if g is None:
        return
    for spans, targets, problem in (
        (g.region_spans, g.bbox_targets, box_problem),
        (g.action_spans, g.point_targets, point_problem),
    ):
        for (sample, begin, end), target in zip(spans.tolist(), targets.tolist(), strict=True):
            if problem is point_problem and all(math.isnan(x) for x in target):
                continue
            words = problem(target, Screen(*g.screen_size[sample].tolist()), g.coordinate_system)
            if words is not None:
                yield _problem(batch, "coordinates", sample, begin, end, words)
