"""The batch of samples with images and videos: token ids, spans, media, positions. Everything here is on the CPU.

Samples are packed, as everywhere in rlkernel. Spans count tokens from their sample's first, so packing does not change
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

TEMPORAL_AXES = ("temporal", "height", "width")
"""The axes of mRoPE, in the order of transformers and vLLM."""


class Modality(IntEnum):
    """Kind of a token, with the numbers of transformers' `mm_token_type_ids`."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2


def modality_of(name: object) -> Modality:
    """The modality of a name ("image") or of a number in `mm_token_type_ids`.

    Raises:
        ValueError: it is another one, such as audio.
    """
    found = next((kind for kind in Modality if name in (kind.name.lower(), int(kind))), None)
    if found is None:
        raise ValueError(
            f"modality {name!r} is not supported; expected image or video (audio: docs/multimodal/audio.md)"
        )
    return found


@dataclass(frozen=True)
class ProcessorFingerprint:
    """What decides how a processor expands and resizes media.

    Attributes:
        processor: class name.
        settings: image and video settings after `mm_processor_kwargs`: patch_size, merge_size, size, resample, ....
            A setting that is absent is unknown.
        versions: of transformers, Pillow, torchvision, vLLM, ....
        min_pixels, max_pixels: the pixel budget of an image; None if unknown.
        chat_template: sha256 of the template; "" if unknown.
    """

    processor: str
    settings: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    min_pixels: int | None = None
    max_pixels: int | None = None
    chat_template: str = ""

    @property
    def digest(self) -> str:
        """sha256 of all of it, as hexadecimal digits."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True, default=str).encode()).hexdigest()

    def key(self, digest: str, grid: tuple[int, int, int]) -> str:
        """Cache key of a medium from this processor: sha256 of the digest of its pixels, its grid and the processor."""
        return hashlib.sha256(f"{digest}|{tuple(grid)}|{self.digest}".encode()).hexdigest()


@dataclass(frozen=True)
class Medium:
    """An image or a video after its processor.

    Attributes:
        grid: (t, h, w) patches before merging; t counts temporal patches, 1 for an image.
        digest: sha256 of the processed pixels (`digest_of_pixels`); "" if unknown.
        seconds: of a video, the time between two temporal patches in seconds, or the time of each of the t patches
            where the frame rate varies.
        sample: the first sample that shows it.
    """

    modality: Modality
    grid: tuple[int, int, int]
    digest: str = ""
    seconds: float | tuple[float, ...] = 1.0
    sample: int = 0

    def tokens(self, merge_size: int) -> int:
        """Placeholder tokens, which are also the rows of its features."""
        t, h, w = self.grid
        return t * h * w // merge_size**2


@dataclass(frozen=True)
class Grounding:
    """Regions, boxes, points and actions on the screens of a batch.

    Attributes:
        screen_size: [B, 2] int64, width and height in pixels; (0, 0) for a sample without a screen.
        coordinate_system: "pixel", "normalised" (0 to 1) or "thousand" (0 to 1000), see `screen`.
        region_spans: [R, 3] int64 (sample, begin, end), the tokens that name region r.
        bbox_targets: [R, 4] fp64, left, top, right, bottom of region r.
        action_spans: [A, 3] int64, the tokens of action a.
        point_targets: [A, 2] fp64, the point of action a; NaN where it has none.
    """

    screen_size: Tensor
    coordinate_system: str
    region_spans: Tensor
    bbox_targets: Tensor
    action_spans: Tensor
    point_targets: Tensor


@dataclass(frozen=True)
class MultimodalBatch:
    """B samples of T tokens in total, packed, with M media. `validation.validate` checks it.

    Attributes:
        token_ids: [T] int64, without padding; placeholders are expanded.
        cu_seqlens: [B + 1] int32, sample b has the tokens cu_seqlens[b] to cu_seqlens[b + 1].
        sample_ids: B names, by which two batches are matched.
        modality_spans: [S, 4] int64 (sample, begin, end, Modality), the placeholder runs, ascending. An image has one;
            a video has one, or one per temporal patch if timestamps separate them (Qwen3-VL).
        media_ids: [S] int64, the medium that a span shows. Samples of a group may share a medium.
        media: the M media.
        loss_spans: [K, 3] int64 (sample, begin, end), the tokens that the loss scores: one span per turn, ascending.
        positions: [A, T] int64, one row per axis; None if unknown.
        axes: names of the A axes: ("text",), `TEMPORAL_AXES`, or verl's ("text", *TEMPORAL_AXES).
        attention_mask: [T] bool, tokens that are attended to; None means all.
        processor_fingerprint: None if unknown.
        padding_side: "left", "right" or "none", where the source had padding.
        merge_size: patches per side that one placeholder stands for.
        placeholder_ids: token id of each modality's placeholder; empty if unknown.
        grounding: None without a screen.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    sample_ids: tuple[str, ...]
    modality_spans: Tensor
    media_ids: Tensor
    media: tuple[Medium, ...]
    loss_spans: Tensor
    positions: Tensor | None = None
    axes: tuple[str, ...] = TEMPORAL_AXES
    attention_mask: Tensor | None = None
    processor_fingerprint: ProcessorFingerprint | None = None
    padding_side: str = "none"
    merge_size: int = 2
    placeholder_ids: Mapping[Modality, int] = field(default_factory=dict)
    grounding: Grounding | None = None

    @property
    def samples(self) -> int:
        """B."""
        return len(self.sample_ids)

    @cached_property
    def ranges(self) -> list[slice]:
        """The packed tokens of each sample."""
        return [slice(a, b) for a, b in pairwise(self.cu_seqlens.tolist())]

    @cached_property
    def vision_token_offsets(self) -> Tensor:
        """[M + 1] int64: the features of medium m are rows offsets[m] to offsets[m + 1] of those of all media."""
        return torch.tensor([0, *(m.tokens(self.merge_size) for m in self.media)]).cumsum(0)

    @cached_property
    def media_cache_keys(self) -> tuple[str, ...]:
        """One key per medium, of its content, its grid and the processor; "" where content or processor are unknown."""
        fingerprint = self.processor_fingerprint
        if fingerprint is None:
            return ("",) * len(self.media)
        return tuple(fingerprint.key(m.digest, m.grid) if m.digest else "" for m in self.media)

    @cached_property
    def runs(self) -> list[list[tuple[int, int, Modality, int]]]:
        """(begin, end, modality, medium) of the placeholder runs of each sample."""
        found: list[list[tuple[int, int, Modality, int]]] = [[] for _ in self.sample_ids]
        for (sample, begin, end, kind), m in zip(self.modality_spans.tolist(), self.media_ids.tolist(), strict=True):
            found[sample].append((begin, end, Modality(kind), m))
        return found

    @cached_property
    def media_of_samples(self) -> list[list[int]]:
        """The media of each sample by their runs, an image once per run and a video once; then those without a run."""
        shown = set(self.media_ids.tolist())
        media: list[list[int]] = []
        for sample, runs in enumerate(self.runs):
            found: list[int] = []
            for _, _, kind, m in runs:
                if m >= 0 and not (kind == Modality.VIDEO and m in found):
                    found.append(m)
            lost = [m for m, medium in enumerate(self.media) if medium.sample == sample and m not in shown]
            media.append(found + lost)
        return media

    @cached_property
    def scored(self) -> Tensor:
        """[T] bool, the tokens in loss spans."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for begin, end in self.packed_rows(self.loss_spans).tolist():
            mask[begin:end] = True
        return mask

    def packed_rows(self, spans: Tensor, shift: int = 0) -> Tensor:  # [K, 3] or [S, 4] -> [K, 2]
        """Spans of samples as [begin, end) of packed rows, int64.

        `packed_rows(loss_spans, -1)` are the rows that predict the scored tokens, as the ops' `loss_spans` wants them.
        """
        return spans[:, 1:3] + self.cu_seqlens.long()[spans[:, 0]].unsqueeze(1) + shift

    def feature_rows(self) -> tuple[Tensor, Tensor]:
        """([P], [P]) int64: the packed row of each placeholder token, and the row of its feature.

        Feature rows count through all media, as `vision_token_offsets` does. `embeddings.index_copy(0, rows,
        features.index_select(0, feature_rows))` writes each row once, so its result does not depend on the order.
        """
        rows, features = [], []
        begins = self.packed_rows(self.modality_spans).tolist()
        used: dict[tuple[int, int], int] = {}  # of each (sample, medium): a video may have several spans
        offsets = self.vision_token_offsets.tolist()
        samples = self.modality_spans[:, 0].tolist()
        for (begin, end), sample, medium in zip(begins, samples, self.media_ids.tolist(), strict=True):
            done = used.get((sample, medium), 0)
            first = offsets[medium] + done % max(self.media[medium].tokens(self.merge_size), 1)
            used[sample, medium] = done + end - begin
            rows.append(torch.arange(begin, end))
            features.append(torch.arange(first, first + end - begin))
        none = torch.zeros(0, dtype=torch.int64)
        return (torch.cat(rows), torch.cat(features)) if rows else (none, none)


def digest_of_pixels(
    pixels: Tensor,  # [patches, C]
) -> str:
    """sha256 of one medium's processed pixels, widened to fp32, as hexadecimal digits."""
    return hashlib.sha256(pixels.detach().float().cpu().contiguous().numpy().data).hexdigest()
