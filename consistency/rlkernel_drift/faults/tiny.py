"""Tiny models of three families with random weights, peaked enough that sampled tokens differ in probability."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import ReferenceModel

FAMILIES = ("qwen3", "llama", "qwen2")
VOCABULARY = 256
LAYERS = 4
BOS = 1


def tiny_model(family: str, seed: int, attention: str = "sdpa") -> Any:
    """A model of 0.2 million parameters in fp32.

    Args:
        family: one of `FAMILIES`. Qwen3 here ties its head to the embedding, the others do not.
    """
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise DriftError("planted faults need transformers: pip install 'rlkernel[drift]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attn_implementation": attention,
    }
    if family == "qwen3":
        settings["head_dim"] = 16
    config = getattr(transformers, f"{names[family]}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[family]}ForCausalLM")(config).eval()
        with torch.no_grad():
            embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            for name, p in model.named_parameters():
                if p.dim() == 1 and name.endswith("weight"):
                    p.mul_(1 + 0.1 * torch.randn_like(p))
                elif p.dim() == 1:
                    p.normal_(0, 0.05)
                elif ".layers." in name:
                    p.normal_(0, 0.12)
            embedding.normal_(0, 0.3)
            if head is not embedding:
                head.normal_(0, 0.3)
            # bfloat16 values, so that a copy in bfloat16 holds the same weights.
            for p in model.parameters():
                p.copy_(p.bfloat16().float())
    return model.requires_grad_(False)


def updated(model: Any, seed: int, size: float) -> Any:
    """The model after "one policy update": every tensor moved by noise of a share of its own spread."""
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in new.parameters():
            spread = float(p.std()) if p.numel() > 1 else 1.0
            step = torch.randn(p.shape, generator=generator) * spread * size
            p.copy_((p + step).bfloat16().float())
    return new


def reference(model: Any) -> ReferenceModel:
    """The model as a reference for scoring."""
    return ReferenceModel(model)
