"""Runs with LoRA and 8-bit optimizer states: exact, resumed to the last bit, with an adapter that PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from training.tiny import parts_of, settings_of, trainer_of

from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.data.errors import InputError
from rlkernel.models import load_model, merge_adapters_
from rlkernel.models.lora import TARGETS
from rlkernel.training.config import Settings, resolve
from rlkernel.training.config.sections import Target
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

LORA = ("train.steps=3", "model.lora.rank=4", "model.lora.alpha=8", "optimizer.states=int8", "model.config={}")
ROLLOUTS = ("run.probe_rollouts=0", "loss.kl_coef=0.1", "train.minibatches=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model directory."""
    made = settings_of(tmp_path_factory.mktemp("base"), "train.steps=1", algorithm="sft")
    return run_training(made) / "model"


def settings(base: Path, folder: Path, *more: str, kind: str = "grpo") -> Settings:
    folder.mkdir(exist_ok=True)
    rollouts = ROLLOUTS if kind in ("grpo", "ppo") else ()
    return settings_of(folder, *LORA, f"model.path={base}", *rollouts, *more, algorithm=kind)


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    timed = ("seconds", "tokens_per_s", "memory_mib")
    rows = [
        {k: v for k, v in row.items() if not k.startswith(timed)} for row in read_jsonl(run / "metrics.jsonl")
    ]  # fmt: skip
    weights = load_file(run / "model" / "model.safetensors")
    return rows, {**weights, **load_file(run / "adapter" / "adapter_model.safetensors")}


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft", "dpo"])
def test_a_run_is_exact_and_resumes_to_the_last_bit(base: Path, tmp_path: Path, kind: str) -> None:
    whole = run_training(settings(base, tmp_path / "a", kind=kind))
    made = settings(base, tmp_path / "b", "train.save_every=1", "train.keep_last=9", kind=kind)
    run = run_training(made)
    saved = {file.name: load_file(file) for file in (run / "checkpoints" / "step-00000002").glob("*.safetensors")}
    assert ("reference.safetensors" in saved) == (kind == "dpo"), "the reference is the base; DPO saves its numbers"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert saved[name] and all("lora" in key for key in saved[name]), "the base stays in its own files"
    run_training(made, resume=run / "checkpoints" / "step-00000002")
    (rows, weights), (other_rows, other_weights) = outcome(run), outcome(whole)
    assert rows == other_rows and weights.keys() == other_weights.keys()
    for name, weight in other_weights.items():
        assert_bitwise(weights[name], weight, name)
    summary = json.loads((whole / "summary.json").read_text())
    assert "LoRA trains " in summary["model"]
    if kind in ("grpo", "ppo"):
        assert summary["exact_frac"] == 1.0 and summary["tokens"] > 50
        assert all(row["updates"] >= 2 and row["grad_norm"] > 0 for row in rows)
        assert rows[-1]["kl_ref"] > 0
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 4
    start = load_file(base / "model.safetensors")
    assert sum(not compare_bitwise(weights[name], start[name]).mismatches for name in start) == len(start) - 14


def test_a_changed_base_or_changed_settings_are_refused(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "base"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    made = settings(copy, tmp_path / "run", "train.save_every=3", kind="sft")
    run = run_training(made)
    with pytest.raises(InputError, match=r"optimizer\.states was 'int8', now 'fp32'; resume with the settings of"):
        run_training(settings(copy, tmp_path / "run", "optimizer.states=fp32", kind="sft"), resume=run)
    with pytest.raises(InputError, match=r"model\.lora\.rank was 4, now 2"):
        run_training(settings(copy, tmp_path / "run", "model.lora.rank=2", kind="sft"), resume=run)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(InputError, match=r"what model\.path names has changed since the checkpoint"):
        run_training(made, resume=run)


def test_merged_weights_follow_every_update(base: Path, tmp_path: Path) -> None:
    trainer, run = trainer_of(settings(base, tmp_path), tmp_path)
    with run:
        trainer.step(1)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    merge_adapters_(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        assert_bitwise(parameter.detach(), weights[name], name)
    first = load_model(base)
    for (name, mine), other in zip(trainer.reference.named_parameters(), first.parameters(), strict=True):
        assert_bitwise(mine.detach(), other.detach(), f"the reference's {name}")


def test_the_settings_name_every_target() -> None:
    assert get_args(Target) == TARGETS


def test_the_seed_draws_the_adapters(base: Path, tmp_path: Path) -> None:
    same, other = (parts_of(settings(base, tmp_path, f"run.seed={seed}"), tmp_path).model for seed in (0, 1))
    name = "layers.1.mlp.down_proj.adapters.down_proj.lora_A"
    a, b = (dict(model.named_parameters())[name].detach() for model in (same, other))
    assert float(a.abs().max()) <= 48**-0.5 and not a.equal(b)


@pytest.mark.parametrize(
    "words, message",
    [
        (["model.lora.rank=8"], r"model\.lora\.rank needs a trained model to adapt; set model\.path"),
        (["model.lora.rank=8", "model.path=m", "warmup.steps=3"], r"set warmup\.steps=0 with LoRA"),
        (["model.lora.targets=[c_proj]"], r"setting model\.lora\.targets\.0: input should be 'q_proj'"),
        (["model.lora.targets=[]"], r"setting model\.lora\.targets: list should have at least 1 item"),
        (["model.lora.dropout=0.1"], r"unknown setting 'model\.lora\.dropout'"),
        (["optimizer.states=int8", "optimizer.offload=true"], "8-bit states stay on the GPU"),
        (["optimizer.states=int4"], r"setting optimizer\.states: input should be 'fp32' or 'int8'"),
    ],
)
def test_bad_settings_are_errors(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve("grpo", overrides=["data.task=arithmetic", *words])


def test_a_reward_model_has_no_adapters() -> None:
    with pytest.raises(InputError, match=r"a reward model has no adapters; leave model\.lora\.rank out"):
        resolve("reward", overrides=["data.train=p.jsonl", "model.path=m", "model.lora.rank=8"])
