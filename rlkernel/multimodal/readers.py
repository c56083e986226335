"""Readers of batches of transformers, TRL, verl and vLLM. None of them is imported: their objects are read by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from rlkernel.multimodal.build import Row, build_batch, kinds_of
from rlkernel.multimodal.schema import (
    TEMPORAL_AXES,
    Medium,
    Modality,
    MultimodalBatch,
    ProcessorFingerprint,
    digest_of_pixels,
    modality_of,
)

_FIELDS = {
    Modality.IMAGE: ("image_grid_thw", "pixel_values"),
    Modality.VIDEO: ("video_grid_thw", "pixel_values_videos"),
}
_PACKAGES = ("transformers", "pillow", "torchvision", "vllm")
_AXES = {1: ("text",), 3: TEMPORAL_AXES, 4: ("text", *TEMPORAL_AXES)}


def fingerprint_of(processor: Any, mm_processor_kwargs: Mapping[str, Any] | None = None) -> ProcessorFingerprint:
    """The fingerprint of a transformers processor or image processor.

    Args:
        mm_processor_kwargs: settings of the call, which replace those of the processor, as in vLLM.
    """
    named = [getattr(processor, name, None) for name in ("image_processor", "video_processor")]
    parts: list[Any] = [part for part in named if part is not None] or [processor]
    settings: dict[str, Any] = {}
    for part in parts:
        prefix = "video." if part is not parts[0] else ""
        settings |= {prefix + key: value for key, value in part.to_dict().items() if not key.endswith("_type")}
    settings = json.loads(json.dumps(settings | dict(mm_processor_kwargs or {}), default=str))  # as records have it
    size = settings.get("size") or {}
    template = getattr(processor, "chat_template", None)
    return ProcessorFingerprint(
        processor=type(processor).__name__,
        settings=settings,
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        min_pixels=settings.get("min_pixels") or size.get("shortest_edge"),
        max_pixels=settings.get("max_pixels") or size.get("longest_edge"),
        chat_template=hashlib.sha256(str(template).encode()).hexdigest() if template else "",
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def from_transformers(
    inputs: Mapping[str, Any],
    *,
    scored: Tensor | None = None,  # [B, L] bool
    sample_ids: Sequence[str] | None = None,
    num_images: Sequence[int] | None = None,
    num_videos: Sequence[int] | None = None,
    placeholder_ids: Mapping[Modality, int] | None = None,
    processor: Any = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> MultimodalBatch:
    """The batch of a processor's output, or of a model's inputs.

    Args:
        inputs: input_ids [B, L]; optional attention_mask, mm_token_type_ids, image_grid_thw, video_grid_thw,
            pixel_values, pixel_values_videos, second_per_grid_ts, position_ids [A, B, L].
        scored: tokens that the loss scores.
        num_images, num_videos: media of each sample; None: as many as the sample has placeholder runs.
        placeholder_ids: default those of `processor` (`image_token_id`, `video_token_id`).
        processor: for the fingerprint.

    Raises:
        ValueError: neither mm_token_type_ids nor placeholder ids are known, or pixels do not fit the grids.
    """
    ids = _rows(inputs["input_ids"])
    placeholders = dict(placeholder_ids or _placeholders_of(processor))
    kinds = inputs.get("mm_token_type_ids")
    if kinds is None and not placeholders and any(grid in inputs for grid, _ in _FIELDS.values()):
        raise ValueError(
            "from_transformers: inputs have media, and neither mm_token_type_ids nor placeholder_ids say which tokens "
            "are placeholders; pass placeholder_ids={Modality.IMAGE: image_token_id}, or the processor"
        )
    kinds = kinds_of(ids, placeholders) if kinds is None else _rows(kinds)
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if positions is not None:
        positions = torch.as_tensor(positions).cpu()
        positions = positions[None] if positions.dim() == 2 else positions
    media = _media(inputs)
    for name, counts in (("num_images", num_images), ("num_videos", num_videos)):
        if counts is not None and len(counts) != len(ids):
            raise ValueError(f"{name} has {len(counts)} numbers for {len(ids)} samples; give one each")
    dealt = _deal(media, kinds, {Modality.IMAGE: num_images, Modality.VIDEO: num_videos})
    rows = [
        Row(
            ids[b],
            kinds[b],
            dealt[b],
            None if mask is None else _rows(mask)[b].bool(),
            None if scored is None else scored[b].cpu().bool(),
            None if positions is None else positions[:, b],
        )
        for b in range(len(ids))
    ]
    return build_batch(
        rows,
        sample_ids=sample_ids,
        axes=_AXES[3 if positions is None else len(positions)],
        padding_side=_padding_side(mask),
        placeholder_ids=placeholders,
        **_processor_options(processor, mm_processor_kwargs),
    )


def from_trl(inputs: Mapping[str, Any], **options: Any) -> MultimodalBatch:
    """The batch of TRL's `GRPOTrainer._prepare_inputs`: prompt_ids, completion_ids, their masks, tool_mask, media.

    Args:
        options: as in `from_transformers`.
    """
    prompt, completion = _rows(inputs["prompt_ids"]), _rows(inputs["completion_ids"])
    mask = torch.cat([_rows(inputs["prompt_mask"]), _rows(inputs["completion_mask"])], 1)
    scored = _rows(inputs["completion_mask"]).bool()
    if inputs.get("tool_mask") is not None:
        scored = scored & _rows(inputs["tool_mask"]).bool()
    joined = {name: value for name, value in inputs.items() if value is not None}
    for name in ("pixel_values", "image_grid_thw"):  # TRL holds them as one tensor per sample between steps
        if isinstance(joined.get(name), (list, tuple)):
            joined[name] = torch.cat(list(joined[name]))
    joined |= {"input_ids": torch.cat([prompt, completion], 1), "attention_mask": mask}
    scored = torch.cat([torch.zeros_like(prompt, dtype=torch.bool), scored], 1)
    options.setdefault("num_images", inputs.get("num_images"))
    return from_transformers(joined, scored=scored, **options)


def from_verl(batch: Any, **options: Any) -> MultimodalBatch:
    """The batch of verl's `DataProto`: batch (input_ids, attention_mask, position_ids [B, A, L], response_mask) and
    non_tensor_batch["multi_modal_inputs"].

    Args:
        options: as in `from_transformers`.
    """
    tensors, others = batch.batch, batch.non_tensor_batch
    each = [dict(inputs or {}) for inputs in others.get("multi_modal_inputs", [])]
    inputs: dict[str, Any] = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    positions = tensors["position_ids"].cpu()
    inputs["position_ids"] = positions[None] if positions.dim() == 2 else positions.transpose(0, 1)
    for name in ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos", "second_per_grid_ts"):
        parts = [torch.as_tensor(part[name]) for part in each if part.get(name) is not None]
        if parts:
            inputs[name] = torch.cat(parts)
    for name, (grid, _) in (("num_images", _FIELDS[Modality.IMAGE]), ("num_videos", _FIELDS[Modality.VIDEO])):
        options.setdefault(name, [len(part[grid]) if part.get(grid) is not None else 0 for part in each] or None)
    response = _rows(tensors["response_mask"]).bool()
    scored = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
    scored[:, scored.shape[1] - response.shape[1] :] = response
    return from_transformers(inputs, scored=scored, **options)


def from_vllm(
    prompts: Sequence[Mapping[str, Any]],
    completions: Sequence[Sequence[int]],
    *,
    scored: Sequence[Sequence[bool]] | None = None,
    positions: Sequence[Tensor] | None = None,  # B x [3, L]
    sample_ids: Sequence[str] | None = None,
    processor: Any = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> MultimodalBatch:
    """The batch of vLLM's processed prompts (`MultiModalInput`) and sampled token ids.

    Args:
        prompts: one per completion: prompt_token_ids, mm_kwargs, mm_placeholders, as
            `llm.renderer.render_cmpl(prompts, skip_mm_cache=True)` returns them. A prompt without media needs only its
            token ids.
        scored: for each completion, whether a token was sampled; None means all.
        positions: of prompt and completion; None leaves them unknown.
        processor, mm_processor_kwargs: for the fingerprint, as in `fingerprint_of`.

    With `mm_device_do_normalize`, vLLM's default for Qwen2.5-VL, prompts hold raw pixels, which have no digest.

    Raises:
        ValueError: a medium is only in the engine's cache.
    """
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start = len(prompt["prompt_token_ids"])
        ids = torch.tensor([*prompt["prompt_token_ids"], *completion])
        kinds, mask = torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool)
        for name, ranges in prompt.get("mm_placeholders", {}).items():
            for place in ranges:
                run = kinds[place.offset : place.offset + place.length]
                run[slice(None) if place.is_embed is None else place.is_embed.bool()] = int(modality_of(name))
        mask[start:] = True if scored is None else torch.tensor(scored[i], dtype=torch.bool)
        items = [item for group in prompt.get("mm_kwargs", {}).values() for item in group]
        if None in items:
            raise ValueError(
                f"from_vllm: prompt {i} has media that only the engine's cache holds; read the output of "
                "llm.renderer.render_cmpl(prompts, skip_mm_cache=True)"
            )
        media = [medium for item in items for medium in _media(_item(item))]
        rows.append(Row(ids, kinds, media, None, mask, None if positions is None else positions[i]))
    options = _processor_options(processor, mm_processor_kwargs)
    return build_batch(rows, sample_ids=sample_ids, placeholder_ids=_placeholders_of(processor), **options)


# ---- parts ---------------------------------------------------------------------------------------------------------


def _rows(x: Any) -> Tensor:
    return torch.as_tensor(x).cpu()


def _processor_options(processor: Any, mm_processor_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of `build_batch` that a processor decides; none without one."""
    if processor is None:
        return {}
    fingerprint = fingerprint_of(processor, mm_processor_kwargs)
    return {"fingerprint": fingerprint, "merge_size": fingerprint.settings.get("merge_size", 2)}


def _placeholders_of(processor: Any) -> dict[Modality, int]:
    found = {kind: getattr(processor, f"{kind.name.lower()}_token_id", None) for kind in _FIELDS}
    return {kind: int(token) for kind, token in found.items() if token is not None}


def _padding_side(mask: Any) -> str:
    if mask is None or bool(_rows(mask).all()):
        return "none"
    return "left" if not bool(_rows(mask)[:, 0].all()) else "right"


def _item(item: Any) -> dict[str, Any]:
    """A `MultiModalKwargsItem` as one medium's inputs; its grid is [3], or [1, 3] in some versions."""
    values = {name: getattr(element, "data", element) for name, element in item.items()}
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        if values.get(name) is not None:
            values[name] = torch.as_tensor(values[name]).reshape(-1, *([3] if name.endswith("thw") else []))
    return values


def _media(inputs: Mapping[str, Any]) -> list[Medium]:
    """The media of a batch, by grid; their digests where there are pixels."""
    media = []
    for kind, (grid_name, pixel_name) in _FIELDS.items():
        if inputs.get(grid_name) is None:
            continue
        grids = [(int(t), int(h), int(w)) for t, h, w in torch.as_tensor(inputs[grid_name]).tolist()]
        pixels = inputs.get(pixel_name)
        digests = [""] * len(grids)
        if pixels is not None:
            rows = [t * h * w for t, h, w in grids]
            if sum(rows) != len(pixels):
                raise ValueError(
                    f"{pixel_name} has {len(pixels)} rows, and {grid_name} {grids} needs {sum(rows)}; "
                    "pass pixels and grids of one call of the processor"
                )
            if torch.as_tensor(pixels).is_floating_point():  # else vLLM normalises them on the device
                digests = [digest_of_pixels(part) for part in torch.as_tensor(pixels).split(rows)]
        seconds = inputs.get("second_per_grid_ts") if kind == Modality.VIDEO else None
        times: Iterable[Any] = [1.0] * len(grids) if seconds is None else torch.as_tensor(seconds).tolist()
        media += [Medium(kind, g, d, float(s)) for g, d, s in zip(grids, digests, times, strict=True)]
    return media


def _deal(
    media: Sequence[Medium], kinds: Tensor, counts: Mapping[Modality, Sequence[int] | None]
) -> list[list[Medium]]:
    """The media of each sample: by their counts, else by the placeholder runs; media that remain go to the last."""
    dealt: list[list[Medium]] = [[] for _ in range(len(kinds))]
    for kind in _FIELDS:
        mine = [m for m in media if m.modality == kind]
        is_kind = (kinds == kind).int()
        runs = (is_kind[:, :1].sum(1) + (is_kind.diff(dim=1) == 1).sum(1)).tolist()
        by_patch = sum(runs) > len(mine) and kind == Modality.VIDEO
        given = counts[kind]
        for b, sample in enumerate(dealt):
            if b == len(dealt) - 1:
                take = len(mine)
            elif given is not None:
                take = given[b]
            else:
                take, left = 0, runs[b]
                while take < len(mine) and left > 0:
                    left -= mine[take].grid[0] if by_patch else 1
                    take += 1
            sample += mine[:take]
            del mine[:take]
    return dealt
