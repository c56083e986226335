"""The data formats and rewards of TRL's own trainer tests, with the flag."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from transformers import AutoTokenizer
from trl_side import history, letters, rows, settings

import rlkernel_trl

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


def chat(row: dict[str, str]) -> dict[str, Any]:
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return {"messages": turns + turns}


def tokens(row: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
    return {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}


SFT: dict[str, dict[str, Any]] = {
    "loss on the assistant's tokens": {"assistant_only_loss": True},
    "loss on prompt and completion": {"completion_only_loss": False},
    "a stream": {},
    "packed and cut": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "a formatting function": {"completion_only_loss": False},
    "tokens and labels": {},
}


@pytest.mark.parametrize("case", SFT)
def test_sft_data(model: Path, case: str) -> None:
    """Two steps with the flag have the losses and gradient norms of two without it."""
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    extra: dict[str, Any] = {"processing_class": tokenizer}
    data: Any = Dataset.from_list(rows("SFT"))
    columns = data.column_names
    if case == "loss on the assistant's tokens":
        data = data.map(chat, remove_columns=columns)
    elif case == "a stream":
        data = data.to_iterable_dataset()
    elif case == "a formatting function":
        extra["formatting_func"] = lambda row: f"{row['prompt']} red{row['completion']}"
    elif case == "tokens and labels":
        data = data.map(tokens, fn_kwargs={"tokenizer": tokenizer}, remove_columns=columns)
    found = []
    for flag in (True, False):
        args = rlkernel_trl.SFTConfig(**settings("SFT", flag, bf16=False, max_steps=2, **SFT[case]))
        trainer = rlkernel_trl.SFTTrainer(model=str(model), args=args, train_dataset=data, **extra)
        trainer.train()
        found.append([[row[name] for name in ("loss", "grad_norm")] for row in history(trainer)])
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-4, atol=1e-6)


async def later(completions: list[str], **columns: Any) -> list[float | None]:
    """An asynchronous reward that is None for some completions."""
    await asyncio.sleep(0)
    return [None if len(text) % 5 == 0 else len(text) / 10 for text in completions]


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_rewards": "batch", "delta": 2.0, "num_iterations": 2, "stream": True},
        {"scale_rewards": False, "beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2},
        {"multi_objective_aggregation": "normalize_then_sum", "loss_type": "dr_grpo"},
    ],
    ids=str,
)
def test_grpo_rewards(model: Path, changes: dict[str, Any]) -> None:
    """Two reward functions with weights, one of them asynchronous; every sampled token is compared."""
    from datasets import Dataset

    changes = dict(changes)
    data = Dataset.from_list(rows("GRPO"))
    train = data.to_iterable_dataset() if changes.pop("stream", False) else data
    trainer = rlkernel_trl.GRPOTrainer(
        model=str(model),
        reward_funcs=[letters, later],
        args=rlkernel_trl.GRPOConfig(**settings("GRPO", True, reward_weights=[0.7, 0.3], max_steps=4, **changes)),
        train_dataset=train,
        rollout_func=rlkernel_trl.rollout_func(),
    )
    trainer.train()
    compared = [row for row in history(trainer) if "rlkernel/exact_frac" in row]
    assert compared and all(row["rlkernel/exact_frac"] == 1.0 and row["rlkernel/fallbacks"] == 0 for row in compared)
    rewards = [row["reward"] for row in history(trainer) if "reward" in row]
    assert rewards and all(map(math.isfinite, rewards))
