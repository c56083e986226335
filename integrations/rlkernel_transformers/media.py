"""The media of a call: their arguments, and the positions of several axes that follow from their grids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel.models.mrope import mrope_table
from rlkernel.multimodal import Modality, from_transformers, mrope_positions
from rlkernel.multimodal.build import kinds_of
from rlkernel_transformers import support
from rlkernel_transformers.calls import Score, prepare, shape_of
from rlkernel_transformers.packing import CallError, PackedCall, Rope

MEDIA = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    *("mm_token_type_ids", "second_per_grid_ts"),
)
"""Arguments of a call that describe its media."""


def prepare_call(
    model: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
    score: Score | None,
    kwargs: dict[str, Any],
    media: dict[str, Any],
) -> PackedCall:
    """`calls.prepare` of a causal language model, with the positions of its media.

    `position_ids` of three dimensions are [3, B, L], or [4, B, L] with the positions in each packed sequence first.
    """
    decoder = support.decoder_of(model)
    if decoder is model.model:
        return prepare(
            decoder, input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, score, kwargs
        )
    return prepare_multimodal(
        model.model,
        input_ids,
        inputs_embeds,
        attention_mask,
        position_ids,
        past_key_values,
        use_cache,
        score,
        kwargs,
        media,
    )


def prepare_multimodal(
    model: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
    score: Score | None,
    kwargs: dict[str, Any],
    media: dict[str, Any],
) -> PackedCall:
    shape = shape_of(input_ids, inputs_embeds)
    if past_key_values is None or past_key_values.get_seq_length() == 0:  # else a call before had the pixels
        _check_given(_kinds(model, input_ids, media), media)
    has_media = any(media.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
    if has_media and input_ids is None:
        raise CallError(
            "pixel values with inputs_embeds: pass input_ids, whose placeholder tokens the features replace"
        )
    types = media.get("mm_token_type_ids")
    if has_media and types is not None and tuple(types.shape) != shape:
        raise CallError(
            f"mm_token_type_ids are {tuple(types.shape)}, and the call has {shape} tokens; append a 0 for each token "
            "that follows the processor's output"
        )
    if has_media and position_ids is None and kwargs.get("cu_seq_lens_q") is not None:
        raise CallError(
            "packed rows with media have no position_ids; pass [3, 1, T] from get_rope_index of each sequence"
        )
    axes = position_ids if position_ids is not None and position_ids.dim() == 3 else None
    if axes is not None:
        position_ids = axes[0] if axes.shape[0] == 4 else None
        axes = (axes[1:] if axes.shape[0] == 4 else axes).expand(3, *shape)
    elif position_ids is None:
        axes = _positions(model, input_ids, inputs_embeds, attention_mask, past_key_values, media)
    packed = prepare(
        model.language_model,
        input_ids,
        inputs_embeds,
        attention_mask,
        position_ids,
        past_key_values,
        use_cache,
        score,
        kwargs,
    )
    if axes is None:
        return packed
    settings = model._rlkernel
    positions = packed.gather(axes.permute(1, 2, 0)).t()  # [3, T]
    table = mrope_table(settings.cos_sin, positions, settings.axes)
    rows = torch.arange(table.shape[0], device=table.device)
    return replace(packed, rope=Rope(rows, table))


def _kinds(model: Any, input_ids: Tensor | None, media: dict[str, Any]) -> Tensor | None:  # [B, L]
    """Modality of each token, as the processor marked it, else by its id; None for embeddings."""
    given: Tensor | None = media.get("mm_token_type_ids")
    if given is not None or input_ids is None:
        return given
    config = model.config
    return kinds_of(input_ids, {Modality.IMAGE: config.image_token_id, Modality.VIDEO: config.video_token_id})


def _check_given(kinds: Tensor | None, media: dict[str, Any]) -> None:
    """Raises CallError for placeholders or grids without pixels: their tokens would be the placeholder's embedding."""
    for number, kind, pixels in ((1, "image", "pixel_values"), (2, "video", "pixel_values_videos")):
        if media.get(pixels) is not None:
            continue
        marked = [] if kinds is None else torch.nonzero(kinds == number)[:1].tolist()
        found = f"{kind}_grid_thw is given" if media.get(f"{kind}_grid_thw") is not None else None
        for row, token in marked:
            found = f"row {row}, token {token} is the first of the {kind} placeholders"
        if found is not None:
            raise CallError(
                f"{found}, and the call has no {pixels}; pass the processor's output, or drop the {kind}s. For a "
                "placeholder id that was sampled, pass mm_token_type_ids with a 0"
            )


def _positions(
    model: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, mask: Any, past: Any, media: dict[str, Any]
) -> Tensor | None:  # [3, B, L]
    """Positions by `rope_index`, or continued from a call before; None: those of text."""
    given = {name: media.get(name) for name in ("image_grid_thw", "video_grid_thw", "mm_token_type_ids")}
    if media.get("second_per_grid_ts") is not None:  # Qwen2.5-VL's alone
        given["second_per_grid_ts"] = media["second_per_grid_ts"]
    given["mm_token_type_ids"] = _kinds(model, input_ids, media)  # without it transformers counts media as text
    shaped = inputs_embeds if input_ids is None else input_ids.unsqueeze(-1)  # only its shape and device are read
    found: Tensor | None = model.compute_3d_position_ids(
        input_ids=input_ids, inputs_embeds=shaped, attention_mask=mask, past_key_values=past, **given
    )
    return found


def rope_index(
    self: Any,
    input_ids: Tensor,  # [B, L]
    mm_token_type_ids: Tensor,  # [B, L]
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # [3, B, L], [B, 1]
    """Positions by `rlkernel.multimodal.mrope_positions`, in place of transformers' `get_rope_index`.

    They are vLLM's. transformers 5 continues after a video at max(h, w) even if the time axis is longer, so the tokens
    after a Qwen2.5-VL video would have other positions in training than in a rollout.
    """
    given = {
        "input_ids": input_ids,
        "mm_token_type_ids": mm_token_type_ids,
        "image_grid_thw": image_grid_thw,
        "video_grid_thw": video_grid_thw,
        "second_per_grid_ts": second_per_grid_ts,
        "attention_mask": attention_mask,
    }
    vision = self.config.vision_config
    batch = from_transformers({name: value for name, value in given.items() if value is not None})
    if batch.attention_mask is not None:
        raise CallError("attention_mask is zero between two tokens of a row with media; move the padding to a side")
    batch = replace(batch, merge_size=vision.spatial_merge_size)
    packed = mrope_positions(batch, tokens_per_second=getattr(vision, "tokens_per_second", 1.0))
    keep = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions = torch.zeros((3, *input_ids.shape), dtype=torch.int64)
    positions[:, keep.cpu()] = packed
    lengths = keep.sum(1).cpu()
    ends = [int(row.amax()) + 1 if row.numel() else 0 for row in packed.split(lengths.tolist(), dim=1)]  # masked: 0
    deltas = torch.tensor(ends) - lengths
    return positions.to(input_ids.device), deltas[:, None].to(input_ids.device)
