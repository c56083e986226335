"""ModelConfig: a decoder's architecture, read from and written to a Hugging Face `config.json`.

A feature that `decoder.py` does not compute is an error that names key and file, because a model that loads must
compute what its authors meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rlkernel.data.tokenizer import local_directory, mistaken, no_directory
from rlkernel.models.families import FAMILIES, PRESETS, Family

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Keys that ModelConfig represents; all others of a config.json are kept in `extra`.
_OWN_KEYS = frozenset(
    {
        *("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "_attn_implementation"),
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "attention_dropout", "mlp_bias"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rms_norm_eps", "hidden_act"),
        *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    }
)
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class ConfigError(ValueError):
    """A configuration that cannot be computed; the message names the file, the key, and what to do."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: `default`, `linear` (positions divided) or `llama3` (low frequencies divided).

    Attributes:
        theta: base of the frequencies.
        factor: divisor of all frequencies (linear) or of the low ones (llama3).
        low_freq_factor, high_freq_factor: limits of the llama3 blend, in wavelengths per original context.
        original_max_position_embeddings: context length before scaling, llama3 only.
    """

    theta: float = 10000.0
    type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder.

    Attributes:
        model_type: a key of `families.FAMILIES`; it determines q/k norm and qkv bias.
        num_kv_heads: 0 means `num_heads`.
        head_dim: 0 means `hidden_size / num_heads`.
        attention_bias: biases on q, k, v and o (llama, qwen3).
        windows: sliding window of each layer in keys, including the token itself; None is full attention; () is full
            attention in every layer.
        eos_token_id: the ids that end a sequence; those of `generation_config.json` if it has any.
        dtype: dtype of the parameters.
        tp_leaves: chunks of K in the row-parallel layers (o_proj, down_proj): 1, 2, 4 or 8. It changes the bits, so it
            must be equal in rollout and training, and at least the tensor-parallel size.
        extra: other keys of `config.json`, written back on export.
        generation: `generation_config.json`, written back on export.

    Raises:
        ConfigError: a value is out of range, or the family does not have the feature.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: torch.dtype = torch.float32
    tp_leaves: int = 1
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    generation: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0 and self.num_heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if isinstance(self.eos_token_id, int):
            object.__setattr__(self, "eos_token_id", (self.eos_token_id,))
        _check(self)

    @property
    def family(self) -> Family:
        """The row of `families.FAMILIES` for `model_type`."""
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether the fused query, key and value projection has a bias."""
        return self.family.qkv_bias or self.attention_bias


def _check(config: ModelConfig) -> None:
    def need(condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"ModelConfig.{name} is {getattr(config, name)!r}; it must be {rule}")

    need(config.model_type in FAMILIES, "model_type", f"one of {', '.join(FAMILIES)}")
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_layers", "num_heads", "num_kv_heads", "head_dim"),
    ):
        need(getattr(config, name) > 0, name, "positive")
    need(config.num_heads % config.num_kv_heads == 0, "num_kv_heads", f"a divisor of num_heads={config.num_heads}")
    need(config.head_dim % 2 == 0, "head_dim", "even, because rope rotates pairs of channels")
    need(math.isfinite(config.rms_norm_eps) and config.rms_norm_eps > 0, "rms_norm_eps", "positive")
    need(config.dtype in DTYPES.values(), "dtype", f"one of {', '.join(DTYPES)}")
    rows = (config.num_heads * config.head_dim, config.intermediate_size)
    need(
        config.tp_leaves in (1, 2, 4, 8) and all(k % config.tp_leaves == 0 for k in rows),
        "tp_leaves",
        f"1, 2, 4 or 8 and divide num_heads * head_dim={rows[0]} and intermediate_size={rows[1]}",
    )
    family = config.family
    need(family.bias_option or not config.attention_bias, "attention_bias", f"False in {config.model_type}")
    need(len(config.windows) == config.num_layers, "windows", f"one entry per layer ({config.num_layers})")
    sizes_used = {w for w in config.windows if w is not None}
    need(all(w > 0 for w in sizes_used) and len(sizes_used) <= 1, "windows", "None or one positive size for all layers")
    need(family.window != "none" or not sizes_used, "windows", f"empty: {config.model_type} has no sliding window")
    need(
        family.window != "all" or len(set(config.windows)) == 1,
        "windows",
        f"equal in all layers: {config.model_type} has one window for all",
    )
    below = f"below vocab_size={config.vocab_size}"
    for name in ("bos_token_id", "pad_token_id"):
        value = getattr(config, name)
        need(value is None or value < config.vocab_size, name, below)
    need(all(0 <= i < config.vocab_size for i in config.eos_token_id), "eos_token_id", below)
    rope = config.rope
    need(rope.type in ("default", "linear", "llama3"), "rope", "of type default, linear or llama3")
    need(rope.theta > 0 and rope.factor >= 1, "rope", "with a positive theta and a factor of at least 1")
    ordered = rope.type != "llama3" or rope.high_freq_factor > rope.low_freq_factor
    need(ordered, "rope", "with high_freq_factor above low_freq_factor")


class _Reader:
    """Typed look-ups in one config.json, with the family's defaults; every error names file and key."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.values, self.defaults, self.where = values, defaults, where

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.defaults.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}; expected an integer")
        return value

    def number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}; expected a number")
        return float(value)

    def token(self, key: str) -> int | None:
        value = self.get(key)
        return None if value is None or (isinstance(value, int) and value < 0) else self.integer(key)

    def tokens(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.fail(f"{key} is {value!r}; expected an integer or a list of integers")
        return tuple(ids)


_MADE_BY = {
    "ForCausalLM": "`rlkernel train grpo`, `sft` or `dpo`",
    "ForSequenceClassification": "`rlkernel train reward`",
}


def _refuse_unsupported(read: _Reader, kind: str) -> None:
    """Raises for every feature that changes the result and that the decoder does not compute."""
    get = read.get
    if get("quantization_config") is not None:
        method = get("quantization_config")
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise read.fail(f"quantization_config ({method}) is not supported; use the unquantised checkpoint")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (get(key) or 0) > 1:
            raise read.fail(f"{key}={get(key)}: mixture-of-experts layers are not supported; use a dense model")
    if get("hidden_act") not in (None, "silu"):
        raise read.fail(f"hidden_act={get('hidden_act')!r} is not supported; the MLP computes silu(gate) * up")
    if get("mlp_bias"):
        raise read.fail("mlp_bias=true is not supported; no released model of the supported families uses it")
    if get("attention_dropout"):
        raise read.fail(f"attention_dropout={get('attention_dropout')} is not supported; set it to 0.0")
    if get("is_encoder_decoder") or get("add_cross_attention"):
        raise read.fail("encoder-decoder models are not supported; use a causal language model")
    architectures = get("architectures")
    if architectures and not any(str(name).endswith(kind) for name in architectures):
        raise read.fail(
            f"architectures is {architectures}; expected one ending in {kind}, as {_MADE_BY[kind]} saves it"
        )


def _read_rope(read: _Reader) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier); the newer key wins."""
    new, old = read.get("rope_parameters"), read.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise read.fail(f"{key} is {value!r}; expected an object or null")
    rope = dict(new or old or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if new and old and any(new.get(key, value) != value for key, value in old.items() if key != "type"):
        raise read.fail(f"rope_parameters is {new} but rope_scaling is {old}; remove the wrong one")
    if "full_attention" in rope or "sliding_attention" in rope:
        raise read.fail("rope_parameters per layer type are not supported; expected one set for all layers")
    if kind not in ("default", "linear", "llama3"):
        raise read.fail(f"rope type {kind!r} is not supported; expected default, linear or llama3")
    partial = rope.get("partial_rotary_factor", read.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise read.fail(f"partial_rotary_factor={partial} is not supported; rope rotates all of head_dim")
    theta = read.number(rope, "rope_theta", read.number(read.values, "rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    factor = read.number(rope, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = rope.get("original_max_position_embeddings") or read.integer("max_position_embeddings")
    low, high = read.number(rope, "low_freq_factor"), read.number(rope, "high_freq_factor")
    return Rope(theta, "llama3", factor, low, high, int(original))


def _read_windows(read: _Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, by the rules of transformers' configuration classes."""
    types = read.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if types is not None and (not isinstance(types, list) or len(types) != layers or not set(types) <= known):
        raise read.fail(f"layer_types is {types}; expected one of {sorted(known)} for each of {layers} layers")
    size = None if read.get("sliding_window") is None else read.integer("sliding_window")
    if family.window == "none":
        if types is not None and set(types) != {"full_attention"}:
            raise read.fail(f"layer_types has sliding_attention, but {family.model_type} has no sliding window")
        return (None,) * layers
    if family.window == "all":
        if types is not None and set(types) != {"full_attention" if size is None else "sliding_attention"}:
            raise read.fail("layer_types mixes types or contradicts sliding_window; expected one window for all layers")
        return (size,) * layers
    size = size if read.get("use_sliding_window") else None
    if types is None:
        full = read.integer("max_window_layers")
        return tuple(size if i >= full else None for i in range(layers))
    if "sliding_attention" in types and size is None:
        raise read.fail("layer_types has sliding_attention, but use_sliding_window is false or sliding_window is null")
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _read_dtype(read: _Reader) -> torch.dtype:
    name = read.get("dtype") or read.get("torch_dtype") or "float32"
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise read.fail(f"dtype {name!r} is not supported; expected one of {', '.join(DTYPES)}")
    return DTYPES[short]


def from_hf(
    values: Mapping[str, Any],
    where: str = "config.json",
    generation: Mapping[str, Any] | None = None,
    kind: str = "ForCausalLM",
) -> ModelConfig:
    """ModelConfig of a parsed Hugging Face `config.json`.

    Args:
        values: the file's object.
        where: name of the file, for errors.
        generation: the parsed `generation_config.json`, if there is one.
        kind: ending of the architectures that are accepted.

    Raises:
        ConfigError: `model_type` or a feature is not supported, or a value is malformed.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    read = _Reader(values, family.defaults, where)
    _refuse_unsupported(read, kind)
    layers = read.integer("num_hidden_layers")
    heads = read.integer("num_attention_heads")
    if not family.bias_option and read.get("attention_bias") not in (None, family.qkv_bias):
        raise read.fail(f"attention_bias={read.get('attention_bias')} does not exist in {model_type}; remove the key")
    own = generation or {}
    eos = _Reader(own, {}, f"generation_config.json of {where}").tokens("eos_token_id") or read.tokens("eos_token_id")
    try:
        return ModelConfig(
            model_type=family.model_type,
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", read.integer("hidden_size") // max(heads, 1)),
            max_position_embeddings=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number({"rms_norm_eps": read.get("rms_norm_eps")}, "rms_norm_eps"),
            rope=_read_rope(read),
            tie_word_embeddings=bool(read.get("tie_word_embeddings")),
            attention_bias=bool(read.get("attention_bias")) and family.bias_option,
            windows=_read_windows(read, family, layers),
            bos_token_id=read.token("bos_token_id"),
            eos_token_id=eos,
            pad_token_id=read.token("pad_token_id"),
            dtype=_read_dtype(read),
            extra={key: value for key, value in values.items() if key not in _OWN_KEYS and key != "rlkernel_contract"},
            generation=dict(own),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None


def to_hf(config: ModelConfig, kind: str = "ForCausalLM") -> dict[str, Any]:
    """The complete `config.json` object of a configuration, for transformers 4 and 5.

    Rope is written twice, as `rope_parameters` (5) and as `rope_theta` with `rope_scaling` (4 and other engines).
    """
    rope = config.rope
    keys = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_KEYS}[rope.type]
    scaling = {"rope_type": rope.type, **{key: getattr(rope, key) for key in keys}}
    out: dict[str, Any] = {
        **config.extra,
        "model_type": config.model_type,
        "architectures": [config.family.architecture.replace("ForCausalLM", kind)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        "rope_scaling": scaling if keys else None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": token_ids(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype_name(config.dtype),
        "dtype": dtype_name(config.dtype),
    }
    if config.family.bias_option:
        out["attention_bias"] = config.attention_bias
    windowed = [i for i, window in enumerate(config.windows) if window is not None]
    size = config.windows[windowed[0]] if windowed else None
    if config.family.window == "all":
        out["sliding_window"] = size
    if config.family.window == "layers":
        out["use_sliding_window"] = bool(windowed)
        out["sliding_window"] = size
        out["max_window_layers"] = windowed[0] if windowed else config.num_layers
        out["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return out


def token_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as Hugging Face writes them: null, one integer, or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16` or `float16`."""
    return str(dtype).removeprefix("torch.")


def load_config(path: str | Path, kind: str = "ForCausalLM") -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` if present, of a Hugging Face directory.

    Raises:
        ConfigError: the directory or file is missing or malformed, or as `from_hf`.
    """
    directory = local_directory(path)
    if not directory.is_dir():
        raise ConfigError(no_directory(path))
    file = directory / "config.json"
    if not file.is_file():
        hint = mistaken(directory) or "expected a Hugging Face model directory with config.json"
        raise ConfigError(f"{file} does not exist; {hint}")
    generation = directory / "generation_config.json"
    return from_hf(read_json(file), str(file), read_json(generation) if generation.is_file() else None, kind)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ConfigError: the file is not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a JSON {type(value).__name__}; expected an object")
    return value


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Configuration with the shapes of a released model.

    Args:
        name: a key of `families.PRESETS`: qwen3-0.6b, qwen3-8b, qwen2.5-0.5b, llama3-8b, mistral-7b.
        overrides: fields of `ModelConfig` to replace (`num_layers=2` for a short test, `dtype=torch.float32`). The
            number of windows follows `num_layers`.

    Raises:
        ConfigError: unknown name, or the overrides do not fit.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    config = from_hf(PRESETS[name], f"preset {name}")
    layers = overrides.get("num_layers", config.num_layers)
    overrides.setdefault("windows", (config.windows * layers)[:layers])
    return replace(config, **overrides)
