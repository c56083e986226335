"""Vision-language models as data: families, the vision encoder's shape, and the text model's, from a `config.json`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import ConfigError, ModelConfig, from_hf


@dataclass(frozen=True)
class VisionFamily:
    """One architecture.

    Attributes:
        model_type, architecture: names in `config.json` and of the class in transformers.
        text: model_type of the text model in `families.FAMILIES`.
        norm: "rms", or "layer" with a bias.
        mlp: "swiglu", or "gelu" with the tanh approximation.
        merger_norm, merger_linears: names in the merger.
        windows: attention in windows, except in the layers of `fullatt_block_indexes`.
        learned_positions: a table of position embeddings, interpolated to each grid and added to the patches.
        interleaved: mrope takes its axes in turn from neighbouring frequencies, not in sections.
        stored: prefixes of the text model's and the encoder's names in a checkpoint.
    """

    model_type: str
    architecture: str
    text: str
    norm: Literal["rms", "layer"]
    mlp: Literal["swiglu", "gelu"]
    merger_norm: str
    merger_linears: tuple[str, str]
    windows: bool = False
    learned_positions: bool = False
    interleaved: bool = False
    stored: tuple[str, str] = ("model.language_model.", "model.visual.")


VISION_FAMILIES: dict[str, VisionFamily] = {
    family.model_type: family
    for family in (
        VisionFamily(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            text="qwen2",
            norm="rms",
            mlp="swiglu",
            merger_norm="ln_q",
            merger_linears=("mlp.0", "mlp.2"),
            windows=True,
            stored=("model.", "visual."),
        ),
        VisionFamily(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            text="qwen3",
            norm="layer",
            mlp="gelu",
            merger_norm="norm",
            merger_linears=("linear_fc1", "linear_fc2"),
            learned_positions=True,
            interleaved=True,
        ),
    )
}

NORM_EPS = 1e-6  # of all norms in both families' encoders
THETA = 10000.0  # of the encoders' rope
TEXT_PREFIX, VISION_PREFIX = "model.language_model.", "model.visual."  # of names in a model of transformers


@dataclass(frozen=True)
class VisionConfig:
    """Shape of a vision encoder.

    Attributes:
        model_type: a key of `VISION_FAMILIES`.
        out_hidden_size: channels of the features, those of the text model.
        merge_size: the merger joins merge_size x merge_size patches into one feature.
        window_size: side of an attention window in pixels; 0: no windows.
        full_attention: layers with attention over the whole frame, if there are windows.
        num_positions: rows of the table of learned positions, a square; 0: none.
        deepstack: layers whose output is added to the first layers of the text model, in this order.

    Raises:
        ConfigError: a value is out of range, or the family does not have the feature.
    """

    model_type: str
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    in_channels: int = 3
    temporal_patch_size: int = 2
    merge_size: int = 2
    window_size: int = 0
    full_attention: tuple[int, ...] = ()
    num_positions: int = 0
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def need(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ConfigError(f"VisionConfig.{name} is {getattr(self, name)!r}; it must be {rule}")

        need(self.model_type in VISION_FAMILIES, "model_type", f"one of {', '.join(VISION_FAMILIES)}")
        for name in (
            *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size"),
            *("in_channels", "temporal_patch_size", "merge_size"),
        ):
            value = getattr(self, name)
            need(isinstance(value, int) and value > 0, name, "a positive integer")
        need(
            self.hidden_size % (4 * self.num_heads) == 0, "hidden_size", "a multiple of 4 num_heads, for rope by 2 axes"
        )
        need(
            not self.family.windows or self.window_size >= self.merge_size * self.patch_size, "window_size", "a window"
        )
        side = int(self.num_positions**0.5)
        need(
            self.family.learned_positions == (side > 0) and side * side == self.num_positions,
            "num_positions",
            "a square",
        )
        need(all(0 <= i < self.depth for i in self.deepstack), "deepstack", f"layers below depth={self.depth}")

    @property
    def family(self) -> VisionFamily:
        """The row of `VISION_FAMILIES` for `model_type`."""
        return VISION_FAMILIES[self.model_type]

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_elements(self) -> int:
        """Values of a patch: channels, frames, rows and columns, in this order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its name in a checkpoint, after the family's prefix."""
        c, f, family = self.hidden_size, self.intermediate_size, self.family
        biased = family.norm == "layer"
        patch = (c, self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)
        out: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": patch}

        def linear(name: str, n: int, k: int) -> None:
            out.update({f"{name}.weight": (n, k), f"{name}.bias": (n,)})

        def norm(name: str, width: int) -> None:
            out.update({f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if biased else {}))

        if family.learned_positions:
            out.update({"patch_embed.proj.bias": (c,), "pos_embed.weight": (self.num_positions, c)})
        for i in range(self.depth):
            norm(f"blocks.{i}.norm1", c)
            norm(f"blocks.{i}.norm2", c)
            linear(f"blocks.{i}.attn.qkv", 3 * c, c)
            linear(f"blocks.{i}.attn.proj", c, c)
            up, down = (
                (("gate_proj", "up_proj"), "down_proj") if family.mlp == "swiglu" else (("linear_fc1",), "linear_fc2")
            )
            for name in up:
                linear(f"blocks.{i}.mlp.{name}", f, c)
            linear(f"blocks.{i}.mlp.{down}", c, f)
        merged = c * self.merge_size**2
        for name, width in (
            ("merger", c),
            *((f"deepstack_merger_list.{i}", merged) for i in range(len(self.deepstack))),
        ):
            first, second = family.merger_linears
            norm(f"{name}.{family.merger_norm}", width)
            linear(f"{name}.{first}", merged, merged)
            linear(f"{name}.{second}", self.out_hidden_size, merged)
        return out


@dataclass(frozen=True)
class MultimodalConfig:
    """A vision-language model.

    Attributes:
        text: the text model.
        axes: axis of the position (time, height, width) that turns each pair of channels: mrope.
        image_token_id, video_token_id: placeholders, one for each feature.
        hf: the `config.json` that it was read from.
    """

    text: ModelConfig
    vision: VisionConfig
    axes: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    hf: dict[str, Any] = field(default_factory=dict, hash=False)


def axes_of_pairs(sections: tuple[int, ...], interleaved: bool) -> tuple[int, ...]:  # D/2 axes
    """The position's axis that turns each pair of channels.

    In sections (Qwen2.5-VL) the first sections[0] pairs turn by time, the next by height, the last by width.
    Interleaved (Qwen3-VL) pairs turn by time, height and width in turn while height and width have pairs left, and the
    others by time.
    """
    if not interleaved:
        return tuple(axis for axis, n in enumerate(sections) for _ in range(n))
    return tuple(j % 3 if j < 3 * sections[j % 3] else 0 for j in range(sum(sections)))


def from_hf_multimodal(values: Mapping[str, Any], where: str = "config.json") -> MultimodalConfig:
    """MultimodalConfig of a parsed Hugging Face `config.json` with a `vision_config`.

    Raises:
        ConfigError: `model_type` or a feature is not supported, or a value is malformed.
    """
    family = VISION_FAMILIES.get(str(values.get("model_type")))
    if family is None:
        known = ", ".join(VISION_FAMILIES)
        raise ConfigError(f"{where}: model_type {values.get('model_type')!r} is not supported; supported: {known}")
    if not isinstance(values.get("vision_config"), Mapping):
        raise ConfigError(f"{where}: vision_config is missing; expected the config.json of a vision-language model")
    vision = dict(values["vision_config"])
    given = values.get("text_config")  # released Qwen2.5-VL models have its keys outside
    text = dict({key: value for key, value in values.items() if key != "vision_config"} if given is None else given)
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    sections = tuple(rope.pop("mrope_section", ()))
    interleaved = bool(rope.pop("mrope_interleaved", family.interleaved))
    if rope.get("rope_type", rope.get("type")) == "mrope":
        rope["rope_type"] = "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", text.get("rope_theta", 1000000.0))
    dtype = text.get("dtype") or values.get("dtype") or values.get("torch_dtype")
    text |= {"model_type": family.text, "rope_parameters": rope, "rope_scaling": None, "dtype": dtype}
    text["architectures"] = [family.text.capitalize() + "ForCausalLM"]
    tied = values.get("tie_word_embeddings")
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") if tied is None else tied)
    decoder = dataclasses.replace(from_hf(text, f"text_config of {where}"), extra={})
    if len(sections) != 3 or 2 * sum(sections) != decoder.head_dim:
        raise ConfigError(
            f"{where}: mrope_section is {list(sections)}; expected three numbers that add up to half of "
            f"head_dim={decoder.head_dim}"
        )
    act = vision.get("hidden_act")
    if act not in (None, "silu" if family.mlp == "swiglu" else "gelu_pytorch_tanh"):
        raise ConfigError(f"vision_config of {where}: hidden_act={act!r} is not supported in {family.model_type}")
    try:
        encoder = VisionConfig(
            model_type=family.model_type,
            window_size=vision.get("window_size", 112) if family.windows else 0,
            full_attention=tuple(vision.get("fullatt_block_indexes", ())),
            num_positions=vision.get("num_position_embeddings", 2304) if family.learned_positions else 0,
            deepstack=tuple(vision.get("deepstack_visual_indexes", ())) if family.learned_positions else (),
            merge_size=vision.get("spatial_merge_size", 2),
            **{key: vision[key] for key in _VISION_KEYS if key in vision},
        )
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"vision_config of {where}: {error}") from None
    if encoder.out_hidden_size != decoder.hidden_size:
        raise ConfigError(
            f"{where}: out_hidden_size is {encoder.out_hidden_size} and the text model's hidden_size "
            f"{decoder.hidden_size}; they must be equal"
        )
    for name in ("image_token_id", "video_token_id"):
        if not isinstance(values.get(name), int):
            raise ConfigError(f"{where}: {name} is {values.get(name)!r}; expected the id of the placeholder token")
    return MultimodalConfig(
        text=decoder,
        vision=encoder,
        axes=axes_of_pairs(sections, interleaved),
        image_token_id=values["image_token_id"],
        video_token_id=values["video_token_id"],
        hf=dict(values),
    )


_VISION_KEYS = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size", "in_channels"),
    "temporal_patch_size",
)


def hf_names(config: MultimodalConfig) -> set[str]:
    """Names of the weights in a model of transformers, of a tied head only the embedding's."""
    text = {re.sub(r"^model\.", TEXT_PREFIX, part.name) for part in hf_layout(config.text)}
    return text | {VISION_PREFIX + name for name in config.vision.layout()}
