"""The forwards of Qwen2.5-VL's and Qwen3-VL's encoder and of the model that puts its features into the text.

The arithmetic is `rlkernel.models.vision`; transformers keeps the processor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from rlkernel.models.vision import MediaError, encode
from rlkernel_transformers.calls import entry
from rlkernel_transformers.forwards import causal_lm_forward, rounded, used
from rlkernel_transformers.media import MEDIA, prepare_multimodal
from rlkernel_transformers.packing import CallError, Deepstack, PackedCall


@dataclass
class Encoded(ModelOutput):
    """Output of the encoder, with transformers' names; `last_hidden_state`, before the merger, is never read."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    deepstack_features: list[Tensor] | None = None


@entry
def vision_forward(
    self: Any, hidden_states: Tensor, grid_thw: Tensor, rlkernel_dtype: torch.dtype | None = None, **kwargs: Any
) -> Encoded:
    """Features of images or videos as `pooler_output` [M, C], and `deepstack_features` if the encoder has them."""
    dtype = rlkernel_dtype or self.patch_embed.proj.weight.dtype

    def parameter(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        found: Tensor = rounded(used(self.get_submodule(owner), leaf), dtype)
        return found

    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thw.tolist()]
    features = encode(self._rlkernel.vision, parameter, hidden_states.to(dtype), grids)
    return Encoded(pooler_output=features.merged, deepstack_features=list(features.deepstack))


@entry
def multimodal_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The decoder's output for text with the features of its media: `decoder_forward` after the encoder."""
    media = {name: kwargs.pop(name) for name in MEDIA if name in kwargs}
    packed = kwargs.pop("rlkernel_packed", None)
    is_packed = packed is not None
    if not is_packed:
        given = (
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            None,
            kwargs,
            media,
        )
        packed = prepare_multimodal(self, *given)
    if any(media.get(name) is not None for name in ("pixel_values", "pixel_values_videos")):
        assert input_ids is not None
        embeds, deepstack = _embed(self, packed, input_ids, media)
        packed = replace(packed, deepstack=deepstack)
        kwargs |= {"rlkernel_embeds": embeds}
    out = self.language_model(
        input_ids=input_ids, inputs_embeds=inputs_embeds, rlkernel_packed=packed, **{**kwargs, "return_dict": True}
    )
    if is_packed:
        return out
    out.last_hidden_state = packed.scatter(out.last_hidden_state)
    return out


def multimodal_lm_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    pixel_values: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    mm_token_type_ids: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> Any:
    """`causal_lm_forward` with the media by name, because `generate` reads their names from the signature."""
    media = {name: value for name, value in locals().items() if name in MEDIA and value is not None}
    return causal_lm_forward(
        self,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        labels=labels,
        use_cache=use_cache,
        logits_to_keep=logits_to_keep,
        **media,
        **kwargs,
    )


def _embed(self: Any, packed: PackedCall, input_ids: Tensor, media: dict[str, Any]) -> tuple[Tensor, Deepstack | None]:
    """Embeddings [T, C] with the features of images and videos in place of their tokens, and the deepstack features."""
    ids = packed.gather(input_ids)
    x = self.language_model.embed_tokens(ids)
    x = x if packed.dtype is None else x.to(packed.dtype)
    kinds = media.get("mm_token_type_ids")  # a sampled placeholder is text
    places: list[Tensor] = []
    levels: list[list[Tensor]] = []
    for number, kind, pixels, grid, token in (
        (1, "image", media.get("pixel_values"), media.get("image_grid_thw"), self.config.image_token_id),
        (2, "video", media.get("pixel_values_videos"), media.get("video_grid_thw"), self.config.video_token_id),
    ):
        if pixels is None:
            continue
        if grid is None:
            raise CallError(f"{kind} pixel values are given without {kind}_grid_thw; pass both, of one processor call")
        encoded = self.visual(pixels, grid_thw=grid, rlkernel_dtype=packed.dtype)
        shown = input_ids == token if kinds is None else kinds == number
        place = torch.nonzero(packed.gather(shown))[:, 0]
        if place.numel() != encoded.pooler_output.shape[0]:
            rows = shown.sum(1).tolist()
            raise MediaError(
                f"the {grid.shape[0]} {kind} grids give {encoded.pooler_output.shape[0]} features, and the rows have "
                f"{rows} {kind} placeholder tokens (id {token}), {place.numel()} of them not masked; "
                "expand each placeholder once, by the same processor"
            )
        x = x.index_copy(0, place, encoded.pooler_output)
        places.append(place)
        levels.append(encoded.deepstack_features)
    joined = [torch.cat(level) for level in zip(*levels, strict=True)]
    return x, Deepstack(torch.cat(places), joined) if joined else None
