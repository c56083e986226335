"""Tiny random models of each family, built and saved by transformers: the other side of every comparison here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THETA = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": THETA}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 24}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
}


def build(case: str, seed: int = 0) -> Any:
    """A transformers model in fp32 whose weights are large enough that every part of it matters."""
    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(draw * 1.3 * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(draw * 0.2 + (0.0 if key.endswith("bias") else 1.0))
    return model


def save(case: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Saves the model of `case` to `directory` by transformers itself."""
    build(case).to(dtype).save_pretrained(directory, **options)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a directory."""
    from safetensors.torch import load_file

    out: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        out |= load_file(file)
    return out
