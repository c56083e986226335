"""Random conversations with images and videos, as vLLM, transformers, TRL and verl hold them."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlkernel.multimodal import (
    Medium,
    Modality,
    MultimodalBatch,
    ProcessorFingerprint,
    digest_of_pixels,
    from_transformers,
    from_trl,
    from_verl,
    from_vllm,
    mrope_positions,
)
from rlkernel.multimodal.build import Row, build_batch

IMAGE, VIDEO, BEGIN, STOP, END, PAD = 4, 5, 6, 7, 2, 0
PLACEHOLDERS = {Modality.IMAGE: IMAGE, Modality.VIDEO: VIDEO}
TOKENS_PER_SECOND = 2.0


@dataclass
class Sample:
    """One conversation: tokens, kinds, which tokens were sampled, and the media with their pixels."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)
    pixels: list[Tensor] = field(default_factory=list)
    positions: Tensor | None = None  # [3, L]
    attended: list[bool] | None = None  # with padding in `ids`

    def add(self, ids: list[int], kind: int = 0, sampled: bool = False) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.sampled += [sampled] * len(ids)

    def run(self, kind: Modality) -> tuple[int, int]:
        begin = self.kinds.index(kind)
        end = next((i for i in range(begin, len(self.kinds)) if self.kinds[i] != kind), len(self.kinds))
        return begin, end

    def row(self) -> Row:
        return Row(torch.tensor(self.ids), torch.tensor(self.kinds), self.media)

    def place(self) -> None:
        """Positions of the tokens as they stand."""
        self.positions = mrope_positions(build_batch([self.row()]), tokens_per_second=TOKENS_PER_SECOND)

    @property
    def prompt(self) -> int:
        return self.sampled.index(True)


def medium(
    rng: random.Random, kind: Modality, grid: tuple[int, int, int], seconds: float = 1.0
) -> tuple[Medium, Tensor]:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    pixels = torch.randn(grid[0] * grid[1] * grid[2], 4, generator=generator)
    return Medium(kind, grid, digest_of_pixels(pixels), seconds), pixels


def conversation(rng: random.Random, *, video: str = "", turns: int = 2, grid: tuple[int, int] | None = None) -> Sample:
    """A prompt with an image (and a video), then turns of an action that ends with END, and an observation."""
    sample = Sample()
    text = lambda low, high: [rng.randrange(20, 300) for _ in range(rng.randint(low, high))]
    size = lambda: (2 * rng.randint(2, 3), 2 * rng.randint(2, 3))

    def image() -> None:
        shown, pixels = medium(rng, Modality.IMAGE, (1, *(grid or size())))
        sample.media.append(shown), sample.pixels.append(pixels)
        sample.add([BEGIN]), sample.add([IMAGE] * shown.tokens(2), Modality.IMAGE), sample.add([STOP])

    sample.add(text(2, 6))
    image()
    if video:
        seconds = rng.choice((0.5, 1.0, 2.0))
        shown, pixels = medium(rng, Modality.VIDEO, (rng.randint(3, 4), 4, 4), seconds)
        sample.media.append(shown), sample.pixels.append(pixels)
        frames = shown.grid[0] if video == "qwen3" else 1
        for frame in range(frames):
            sample.add([300 + frame, BEGIN])
            sample.add([VIDEO] * (shown.tokens(2) // frames), Modality.VIDEO)
            sample.add([STOP])
    sample.add(text(2, 6))
    for turn in range(turns):
        sample.add([*text(2, 5), END], sampled=True)
        if turn < turns - 1:
            sample.add(text(2, 4))
            if rng.random() < 0.5:
                image()
    sample.place()
    return sample


def world(rng: random.Random) -> list[Sample]:
    """2 to 4 conversations of one model."""
    video = rng.choice(("", "", "qwen2.5", "qwen3"))
    return [conversation(rng, video=video, turns=rng.randint(1, 3)) for _ in range(rng.randint(2, 4))]


def clone(samples: list[Sample]) -> list[Sample]:
    return copy.deepcopy(samples)


# ---- the same samples in each framework ----------------------------------------------------------------------------


def settings(**more: Any) -> ProcessorFingerprint:
    return ProcessorFingerprint("Qwen2VLProcessor", {"patch_size": 14, "merge_size": 2, "resample": 3, **more})


def as_vllm(samples: list[Sample]) -> MultimodalBatch:
    prompts = []
    for sample in samples:
        items: dict[str, list[Any]] = {}
        places: dict[str, list[Any]] = {}
        names = {
            Modality.IMAGE: ("image_grid_thw", "pixel_values"),
            Modality.VIDEO: ("video_grid_thw", "pixel_values_videos"),
        }
        for shown, pixels in zip(sample.media, sample.pixels, strict=True):
            grid, values = names[shown.modality]
            item = {grid: SimpleNamespace(data=torch.tensor(shown.grid)), values: SimpleNamespace(data=pixels)}
            item["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(shown.seconds))
            items.setdefault(shown.modality.name.lower(), []).append(item)
        for kind in (Modality.IMAGE, Modality.VIDEO):
            if kind in sample.kinds:
                is_embed = torch.tensor(sample.kinds) == kind
                places[kind.name.lower()] = [SimpleNamespace(offset=0, length=len(sample.ids), is_embed=is_embed)]
        prompts.append({"prompt_token_ids": sample.ids[: sample.prompt], "mm_kwargs": items, "mm_placeholders": places})
    return from_vllm(
        prompts,
        [s.ids[s.prompt :] for s in samples],
        scored=[s.sampled[s.prompt :] for s in samples],
        positions=[s.positions for s in samples if s.positions is not None],
    )


def _padded(samples: list[Sample], side: str) -> tuple[dict[str, Any], Tensor]:
    """A processor's output, and the scored tokens."""
    width = max(len(s.ids) for s in samples)

    def pad(row: list[int], fill: int = 0) -> list[int]:
        rest = [fill] * (width - len(row))
        return [*rest, *row] if side == "left" else [*row, *rest]

    attended = [s.attended or [True] * len(s.ids) for s in samples]
    positions = [s.positions if s.positions is not None else torch.zeros(3, len(s.ids)).long() for s in samples]
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([pad(s.ids, PAD) for s in samples]),
        "attention_mask": torch.tensor([pad([int(a) for a in row]) for row in attended]),
        "mm_token_type_ids": torch.tensor([pad(s.kinds) for s in samples]),
        "position_ids": torch.tensor([[pad(row) for row in p.tolist()] for p in positions]).transpose(0, 1),
        **media_inputs(samples),
    }
    return inputs, torch.tensor([pad([int(x) for x in s.sampled]) for s in samples]).bool()


def media_inputs(samples: list[Sample]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for kind, grid, pixels in (
        (Modality.IMAGE, "image_grid_thw", "pixel_values"),
        (Modality.VIDEO, "video_grid_thw", "pixel_values_videos"),
    ):
        mine = [(m, p) for s in samples for m, p in zip(s.media, s.pixels, strict=True) if m.modality == kind]
        if mine:
            inputs |= {grid: torch.tensor([m.grid for m, _ in mine]), pixels: torch.cat([p for _, p in mine])}
            if kind == Modality.VIDEO:
                inputs["second_per_grid_ts"] = [m.seconds for m, _ in mine]
    return inputs


def as_transformers(samples: list[Sample], side: str = "left") -> MultimodalBatch:
    inputs, scored = _padded(samples, side)
    return from_transformers(inputs, scored=scored, placeholder_ids=PLACEHOLDERS)


def as_trl(samples: list[Sample]) -> MultimodalBatch:
    """Prompts padded left, completions right; no positions, which the model computes."""
    prompts, completions = max(s.prompt for s in samples), max(len(s.ids) - s.prompt for s in samples)
    left = lambda row: [0] * (prompts - len(row)) + row
    right = lambda row: row + [0] * (completions - len(row))
    inputs = {
        "prompt_ids": torch.tensor([left(s.ids[: s.prompt]) for s in samples]),
        "prompt_mask": torch.tensor([left([1] * s.prompt) for s in samples]),
        "completion_ids": torch.tensor([right(s.ids[s.prompt :]) for s in samples]),
        "completion_mask": torch.tensor([right([1] * (len(s.ids) - s.prompt)) for s in samples]),
        "tool_mask": torch.tensor([right([int(x) for x in s.sampled[s.prompt :]]) for s in samples]),
        "mm_token_type_ids": torch.tensor([left(s.kinds[: s.prompt]) + right(s.kinds[s.prompt :]) for s in samples]),
        "num_images": [sum(m.modality == Modality.IMAGE for m in s.media) for s in samples],
        **media_inputs(samples),
    }
    return from_trl(inputs, placeholder_ids=PLACEHOLDERS)


def as_verl(samples: list[Sample]) -> MultimodalBatch:
    """Positions [B, 4, L]: text, then the three axes."""
    inputs, scored = _padded(samples, "left")
    text = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    first = min(s.prompt + inputs["input_ids"].shape[1] - len(s.ids) for s in samples)
    batch = {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "position_ids": torch.cat([text[None], inputs["position_ids"]]).transpose(0, 1),
        "response_mask": scored[:, first:].long(),
    }
    each = [media_inputs([s]) for s in samples]
    data = SimpleNamespace(batch=batch, non_tensor_batch={"multi_modal_inputs": each})
    return from_verl(data, placeholder_ids=PLACEHOLDERS)


TRAINERS = {
    "transformers, left": as_transformers,
    "transformers, right": lambda samples: as_transformers(samples, "right"),
    "trl": as_trl,
    "verl": as_verl,
}


def with_settings(batch: MultimodalBatch, fingerprint: ProcessorFingerprint) -> MultimodalBatch:
    return replace(batch, processor_fingerprint=fingerprint)
