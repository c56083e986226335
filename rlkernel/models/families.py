"""The model families as data: their differences are rows of a table, not branches in the decoder.

A row holds the family's optional parts and the defaults of `config.json`, which transformers omits when it writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: its name in `config.json`.
        architecture: name of its class in transformers.
        qk_norm: RMSNorm over the head dimension of queries and keys, before rope.
        qkv_bias: query, key and value projections always have a bias.
        bias_option: `attention_bias` in `config.json` adds biases to all four attention projections.
        window: where a sliding window applies: "layers" (per layer, `layer_types`), "all" or "none".
        defaults: values of keys that `config.json` may omit.
    """

    model_type: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    bias_option: bool = False
    window: Literal["none", "all", "layers"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            qk_norm=True,
            bias_option=True,
            window="layers",
            defaults={**_QWEN, "head_dim": 128},
        ),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="layers", defaults=_QWEN),
        Family(
            "llama",
            "LlamaForCausalLM",
            bias_option=True,
            defaults={
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            window="all",
            defaults={
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "sliding_window": 4096,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
    )
}

# model_type of related families that are not supported, and why.
MISSING: dict[str, str] = {
    "gemma": "its gelu MLP and its norm of weight 1 + w have no op",
    "gemma2": "its gelu MLP, its norm of weight 1 + w and the soft-capping of scores and logits have no op",
    "gemma3": "its gelu MLP and its norm of weight 1 + w have no op",
    "gemma3_text": "its gelu MLP and its norm of weight 1 + w have no op",
    "qwen3_moe": "mixture-of-experts layers have no op",
    "mixtral": "mixture-of-experts layers have no op",
    "deepseek_v2": "multi-head latent attention (MLA) has no op",
    "deepseek_v3": "multi-head latent attention (MLA) has no op",
}

# config.json of released models, for tests and benchmarks with random weights.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "torch_dtype": "bfloat16",
    },
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
}
