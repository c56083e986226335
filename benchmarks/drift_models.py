"""Tiny trained language models of several families, in which `drift_cases.py` plants faults.

They are trained for a few hundred steps on text from a phrase book, so that their logits depend on the context.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

VOCABULARY, BOS, EOS, SEPARATOR, PAD = 192, 1, 2, 3, 0
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 12.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "intermediate_size": 64,
        },
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2", {}),
}


def text(rng: random.Random, length: int, book: list[list[int]]) -> list[int]:
    """Phrases of the book; each sentence repeats its first phrase at its end, so that long contexts matter."""
    ids = [BOS]
    while len(ids) < length:
        phrases = [rng.choice(book) for _ in range(rng.randint(2, 4))]
        for phrase in [*phrases, phrases[0]]:
            ids += [rng.randrange(8, VOCABULARY) if rng.random() < 0.06 else token for token in phrase]
        ids.append(SEPARATOR)
    return ids[:length]


def phrase_book() -> list[list[int]]:
    """The phrases of all texts."""
    rng = random.Random(7)
    return [[rng.randrange(8, VOCABULARY) for _ in range(rng.randint(2, 5))] for _ in range(48)]


def trained(folder: Path, family: str, steps: int = 300) -> Path:
    """The directory of a trained model, made at the first call."""
    import transformers

    path = folder / family
    if (path / "config.json").is_file():
        return path
    name, settings = FAMILIES[family]
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    rng, book = random.Random(family), phrase_book()
    for _ in range(steps):
        ids = torch.tensor([text(rng, 72, book) for _ in range(12)])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():  # bfloat16 values, so that a copy in bfloat16 holds the same weights
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    print(f"{family}: loss {float(loss):.2f}", flush=True)
    model.eval().save_pretrained(path)
    return path


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for each in FAMILIES:
        trained(Path(sys.argv[1]), each)
