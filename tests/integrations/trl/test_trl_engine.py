"""rlkernel's engine under GRPO and RLOO, the default without vLLM: settings, tools, evaluations, limits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from trl_side import PROMPTS, history, make_trainer, weights_hash

import rlkernel_trl
from rlkernel_trl import ExactnessLostError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


def assert_exact(rows: list[dict[str, float]], steps: int, prefix: str = "") -> None:
    assert len(rows) == steps
    for row in rows:
        assert row[f"{prefix}rlkernel/exact_frac"] == 1.0 and row[f"{prefix}rlkernel/mismatch_tokens"] == 0
        assert row[f"{prefix}rlkernel/fallbacks"] == 0


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("GRPO", {"beta": 0.04}),
        ("RLOO", {"beta": 0.04}),
        ("RLOO", {"top_p": 0.9, "num_iterations": 2}),
        ("RLOO", {"mask_truncated_completions": True, "gradient_accumulation_steps": 2}),
        ("RLOO", {"bf16": False, "temperature": 0.7, "top_k": 20}),
        ("GRPO", {"use_transformers_continuous_batching": True, "cast_lm_head_to_fp32": True}),
    ],
    ids=str,
)
def test_it_samples_by_default(
    model: Path, algorithm: str, changes: dict[str, Any], compat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(algorithm, model, max_steps=4, **changes)
    trainer.train()
    compared = [row for row in history(trainer) if "rlkernel/exact_frac" in row]
    assert compared  # truncated completions are masked, and later iterations are not compared
    masked = {"mask_truncated_completions", "num_iterations"} & changes.keys()
    assert_exact(compared, len(compared) if masked else 4)
    if algorithm == "RLOO" and not masked:
        assert [row["rlkernel/old_logps_skipped"] for row in compared] == [0, 0, 1, 1]
    for name in ("use_transformers_continuous_batching", "cast_lm_head_to_fp32"):
        assert (f"{name} ignored" in caplog.text or f"{name} is ignored" in caplog.text) == (name in changes)
        assert getattr(trainer.args, name, False) == changes.get(name, False)
    compat.exact("TRL", f"engine by default: {algorithm}, {', '.join(f'{k}={v}' for k, v in changes.items())}")


def test_the_default_is_what_rollout_func_is(model: Path) -> None:
    found = []
    for engine in (False, True):
        trainer = make_trainer("GRPO", model, engine=engine)
        trainer.train()
        found.append(weights_hash(trainer.model))
    assert found[0] == found[1]


def test_the_engine_shares_the_weights(model: Path) -> None:
    trainer = make_trainer("GRPO", model, engine=True, max_steps=1)
    trainer.train()
    ours = dict(trainer.rollout_func.llm.model.named_parameters())
    theirs = dict(trainer.model.named_parameters())
    gate = theirs["model.layers.1.mlp.gate_proj.weight"]
    assert ours["layers.1.mlp.gate_up_proj.weight"].data_ptr() == gate.data_ptr()
    assert ours["embed_tokens.weight"].data_ptr() == theirs["model.embed_tokens.weight"].data_ptr()
    assert gate.dtype == torch.bfloat16


def test_rloo_resumes(model: Path, tmp_path: Path, compat: Any) -> None:
    """Seeds derive from step and index, so a resumed run samples the same tokens."""
    saving = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = make_trainer("RLOO", model, max_steps=4, **saving)
    whole.train()
    again = make_trainer("RLOO", model, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights_hash(whole.model) == weights_hash(again.model)
    compat.exact("TRL", "engine by default: weights of a resumed RLOO run")


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_chats_and_evaluation(model: Path, algorithm: str, compat: Any) -> None:
    """Chat prompts use the tokenizer's template, as in TRL; an evaluation has its own group size."""
    from datasets import Dataset

    chats = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    seen: list[Any] = []

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        seen.append(completions)
        return [len(chat[0]["content"]) / 10 for chat in completions]

    trainer = make_trainer(
        algorithm,
        model,
        max_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        generation_kwargs={"max_new_tokens": 5, "do_sample": True},
        trainer={
            "train_dataset": Dataset.from_list(chats * 4),
            "eval_dataset": Dataset.from_list(chats),
            "reward_funcs": reward,
        },
    )
    trainer.train()
    assert_exact(history(trainer), 2)
    evaluated = [row for row in trainer.state.log_history if "eval_rlkernel/exact_frac" in row]
    assert_exact(evaluated, 2, "eval_")
    assert all(row["completions/max_length"] <= 5 for row in history(trainer))
    assert all(chat[0]["role"] == "assistant" for chats in seen for chat in chats)
    compat.exact("TRL", f"engine by default: {algorithm}, chats and evaluation")


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("own", [False, True])
def test_tools(model: Path, own: bool, top_p: float, monkeypatch: pytest.MonkeyPatch, compat: Any) -> None:
    """Turns after a tool's answer are sampled and compared too; the tool's tokens are masked."""
    import transformers
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        return "red"

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.response_schema = {}
    turns: list[int] = []

    def parse(tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        """Every second completion of a generation calls the tool; completions after its answer do not."""
        turns.append(len(ids))
        message: dict[str, Any] = {"role": "assistant", "content": "a"}
        if len(turns) % 6 in (1, 3):  # 4 completions, then 2 after the tool
            message["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "b"}}}]
        return message

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    given: dict[str, Any] = {"tools": [weather], "processing_class": tokenizer}
    given["train_dataset"] = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS])
    given["reward_funcs"] = lambda completions, **_: [float(i % 3) for i in range(len(completions))]
    if own:  # wraps ours: TRL calls the trainer for turns after a tool's answer
        ours = rlkernel_trl.rollout_func()
        given["rollout_func"] = lambda prompts, trainer: ours(prompts, trainer)
    short = {"max_completion_length": 40, "generation_kwargs": {"max_tokens": 6, "ignore_eos": True}}
    trainer = make_trainer("GRPO", model, max_steps=2, top_p=top_p, trainer=given, **short)
    trainer.train()
    assert_exact(history(trainer), 2)
    assert len(turns) == 12 and all(row["tools/call_frequency"] == 0.5 for row in history(trainer))
    assert all(math.isfinite(row["grad_norm"]) for row in history(trainer))
    if not own:
        compat.exact("TRL", f"engine by default: tools, top_p={top_p}")


def test_generation_kwargs_reach_the_engine(model: Path) -> None:
    """The engine gets lengths and stops; unsupported names are refused, strict or not."""
    trainer = make_trainer("GRPO", model, engine=True, max_steps=1, generation_kwargs={"max_tokens": 3, "stop": "zzz"})
    trainer.train()
    assert_exact(history(trainer), 1)
    assert history(trainer)[0]["completions/max_length"] == 3
    every = list(range(320))
    for changes, longest in (
        ({"stop_token_ids": every}, 1),
        ({"ignore_eos": True, "max_tokens": 5}, 5),
        ({"ignore_eos": True, "max_new_tokens": 4}, 4),
        ({"stop": ["a", "e", "i", "o", "u", "n", "r", "l", " "]}, 12),
        ({"stop_strings": ["a", "e", "i", "o", "u", "n", "r", "l", " "]}, 12),
    ):
        trainer.args.generation_kwargs = changes
        lengths = [len(ids) for ids in trainer.rollout_func(["name a colour"] * 4, trainer)["completion_ids"]]
        stops = "stop" in changes or "stop_strings" in changes
        assert max(lengths) <= longest and (not stops or min(lengths) < 12), (changes, lengths)
        assert "ignore_eos" not in changes or lengths == [longest] * 4
    wrong: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"do_sample": False}},
        {"generation_kwargs": {"num_beams": 2, "top_k": 5}},
        *({"generation_kwargs": {name: 1}} for name in ("presence_penalty", "truncate_prompt_tokens", "seed", "n")),
    ]
    for changes in wrong:
        name = next(iter(changes.get("generation_kwargs", changes)))
        with pytest.raises(ExactnessLostError, match=f"{name}.* rlkernel's engine"):
            make_trainer("GRPO", model, engine=True, rl_kernel_strict=False, **changes)


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_what_the_engine_lacks(model: Path, algorithm: str, compat: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An unsupported default engine is an error, or, without strict mode, transformers' generate samples uncompared."""
    with pytest.raises(ExactnessLostError) as raised:
        make_trainer(algorithm, model, repetition_penalty=1.1)
    compat.refused("TRL", f"engine by default: {algorithm}, repetition_penalty=1.1", raised.value, "leave it out, or")
    trainer = make_trainer(algorithm, model, repetition_penalty=1.1, rl_kernel_strict=False, max_steps=1)
    assert "sample inexactly with transformers' generate" in caplog.text
    trainer.train()
    assert "rlkernel/exact_frac" not in history(trainer)[0]
    assert "no sampled token was compared" in caplog.text


def test_ends_are_those_of_trl(model: Path) -> None:
    """The model's generation configuration may name further ids that end a completion."""
    trainer = make_trainer("RLOO", model, max_steps=1, max_completion_length=40)
    trainer.eos_token_ids = list(range(100, 320))
    ids, _ = trainer._rl_kernel.engine.sample([[5, 6, 7]] * 4, trainer)
    assert all(row[-1] >= 100 and all(token < 100 for token in row[:-1]) for row in ids if len(row) < 40)
    trainer.eos_token_ids = [319]
    trainer.model.config.eos_token_id = list(range(320))
    assert max(map(len, trainer._rl_kernel.engine.sample([[5, 6, 7]] * 4, trainer)[0])) > 1


def test_the_cache_fits_beside_the_training(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of GPU memory, less before AdamW's state exists; recreated for a sequence that does not fit."""
    from rlkernel_trl import rollout

    trainer = make_trainer("GRPO", model, max_completion_length=8, vllm_gpu_memory_utilization=0.25)
    weights = sum(p.numel() for p in trainer.model.parameters())
    gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)  # 1 MiB is cached
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 << 20)
    for free, expected in ((1 << 30, 256 << 20), (100 << 20, ((100 << 20) - 12 * weights) // 2), (12 * weights, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free - (1 << 20), 1 << 30))
        assert rollout._cache_bytes(trainer, gpu) == expected
    trainer.create_optimizer()
    trainer.optimizer.state[next(trainer.model.parameters())] = {"step": 1}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (99 << 20, 1 << 30))
    assert rollout._cache_bytes(trainer, gpu) == 50 << 20

    monkeypatch.setattr(rollout, "_cache_bytes", lambda trainer, decoder: 0)
    engine = trainer._rl_kernel.engine
    engine.sample([[5] * 20] * 2, trainer)
    first = engine.llm
    assert first.num_pages == 2
    engine.sample([[5] * 24] * 2, trainer)
    assert engine.llm is first
    ids, logprobs = engine.sample([[5] * 90], trainer)
    assert engine.llm is not first and engine.llm.num_pages == 7 and len(ids[0]) == len(logprobs[0]) == 8
    assert engine.llm.model is first.model
