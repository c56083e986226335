"""Configurations: read as transformers reads them, written so that it reads them back, refused where not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, LLAMA3_ROPE, SMALL, build, save

from rlkernel.models import FAMILIES, PRESETS, ConfigError, Decoder, ModelConfig, Rope, load_config, load_model, preset
from rlkernel.models.config import from_hf, to_hf
from rlkernel.models.rope_table import inverse_frequencies, rope_table

BASE: dict[str, Any] = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def same_as_hf(config: ModelConfig, hf: Any) -> None:
    """Compares every number that transformers computes with."""
    assert config.model_type == hf.model_type
    assert config.num_layers == hf.num_hidden_layers and config.num_heads == hf.num_attention_heads
    assert config.num_kv_heads == hf.num_key_value_heads and config.vocab_size == hf.vocab_size
    assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert config.hidden_size == hf.hidden_size and config.intermediate_size == hf.intermediate_size
    assert config.max_position_embeddings == hf.max_position_embeddings and config.rms_norm_eps == hf.rms_norm_eps
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.attention_bias == getattr(hf, "attention_bias", False)
    rope = hf.rope_parameters
    assert (config.rope.type, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert config.rope.factor == rope.get("factor", 1.0)
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    assert config.windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    eos = hf.eos_token_id
    assert config.eos_token_id == (() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))
    assert config.bos_token_id == hf.bos_token_id and config.pad_token_id == hf.pad_token_id


@pytest.mark.parametrize("case", CASES)
def test_reads_and_writes_as_transformers(case: str, tmp_path: Path) -> None:
    build(case).config.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    same_as_hf(config, transformers.AutoConfig.from_pretrained(tmp_path))
    assert from_hf(to_hf(config)) == config
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    same_as_hf(config, transformers.AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """A config.json may leave out whatever equals the default of transformers' class."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    same_as_hf(load_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = preset(name)
    assert from_hf(to_hf(config)) == config
    small = preset(name, num_layers=1, vocab_size=200000, dtype=torch.float32)
    assert small.num_layers == len(small.windows) == 1 and small.hidden_size == config.hidden_size


def test_preset_sizes() -> None:
    def parameters(name: str) -> float:
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(preset(name, max_position_embeddings=16)).parameters()) / 1e9

    assert parameters("qwen3-0.6b") == pytest.approx(0.596, abs=1e-3)
    assert parameters("qwen3-8b") == pytest.approx(8.191, abs=1e-3)
    assert parameters("qwen2.5-0.5b") == pytest.approx(0.494, abs=1e-3)
    assert parameters("llama3-8b") == pytest.approx(8.030, abs=1e-3)
    assert parameters("mistral-7b") == pytest.approx(7.242, abs=1e-3)


def test_old_rope_keys() -> None:
    """`rope_theta` and `rope_scaling`, as transformers 4 wrote them; `type` for `rope_type` is older still."""
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf(old).rope == Rope(5e5, "linear", 2.0)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert from_hf({**BASE, "rope_theta": 10000.0, "rope_scaling": scaling}).rope.low_freq_factor == 1.0
    assert from_hf({**BASE, "rope_theta": 1e6, "rope_scaling": None}).rope == Rope(1e6)


def test_end_tokens_of_generation_config(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.6}')
    config = load_config(tmp_path)
    assert config.eos_token_id == (5, 6) and config.generation["temperature"] == 0.6


def test_unknown_keys_travel() -> None:
    config = from_hf({**BASE, "my_note": {"a": 1}, "auto_map": {"AutoModel": "evil.py"}})
    assert to_hf(config)["my_note"] == {"a": 1} and "auto_map" not in to_hf(config)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported; supported: qwen3, qwen2, llama, mistral"),
    "no family": ({"model_type": None}, "model_type None"),
    "unhashable family": ({"model_type": ["qwen3"]}, "model_type"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
    "experts": ({"num_experts": 8}, "num_experts=8: mixture-of-experts"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "mlp bias": ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
    "bias": ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True does not exist in mistral"),
    "no bias": ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=False does not exist in qwen2"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    "llama3 keys": ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is None"),
    "two ropes": (
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        },
        "remove the wrong one",
    ),
    "rope per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "rope no object": ({"rope_scaling": 3}, "rope_scaling is 3"),
    "window in llama": ({"model_type": "llama", "layer_types": ["sliding_attention"] * 3}, "no sliding window"),
    "window off": ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
    "layer types": ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
    "mixed mistral": (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "one window for all layers",
    ),
    "heads": ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
    "odd head": ({"head_dim": 15}, "head_dim is 15"),
    "text size": ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
    "zero layers": ({"num_hidden_layers": 0}, "num_layers is 0"),
    "eos": ({"eos_token_id": 96}, "eos_token_id is (.*)below vocab_size=96"),
    "eos text": ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    "eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": None, **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path)
    assert "config.json" in str(caught.value)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        load_config(tmp_path)
    for text, message in (("{", "cannot be read as JSON"), ("[]", "holds a JSON list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path)
    with pytest.raises(ConfigError, match="unknown preset 'gpt-5'"):
        preset("gpt-5")


def test_tp_leaves(tmp_path: Path) -> None:
    """A property of the run: it chooses the tree of o_proj and down_proj, and must divide their K."""
    save("qwen3", tmp_path)
    model = load_model(tmp_path, tp_leaves=4)
    assert [model.layers[0].self_attn.o_proj.chunks, model.layers[0].mlp.down_proj.chunks] == [4, 4]
    with pytest.raises(ConfigError, match="tp_leaves is 3"):
        ModelConfig("qwen3", 32, 16, 32, 1, 2, tp_leaves=3)
    with pytest.raises(ConfigError, match="tp_leaves is 8"):
        ModelConfig("qwen3", 32, 16, 36, 1, 2, tp_leaves=8)


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama3-rope", "llama-linear-rope"])
def test_rope_table_is_that_of_transformers(case: str) -> None:
    hf = build(case)
    config = from_hf(hf.config.to_dict())
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    assert torch.equal(frequencies, hf.model.rotary_emb.inv_freq)
    table = rope_table(config)
    assert table.shape == (config.max_position_embeddings, config.head_dim) and table.dtype == torch.float32
    positions = torch.arange(config.max_position_embeddings)[None]
    cos, sin = hf.model.rotary_emb(torch.zeros(1), positions)
    theirs = torch.cat((cos[0, :, : config.head_dim // 2], sin[0, :, : config.head_dim // 2]), dim=1)
    assert (table - theirs).abs().max() <= 1.2e-7  # one last bit of a value near 1
