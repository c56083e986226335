"""Completions without a reward: they leave the loss and their group's baseline, are counted, and stay exact."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from training.test_checkpoint_of_runs import assert_same
from training.tiny import settings_of, trainer_of, weights

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.training.advantages import advantages_of
from rlkernel.training.config import AdvantageSettings, Settings
from rlkernel.training.display import Display
from rlkernel.training.ppo import PPOTrainer
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

REWARD = """
import os

def digits(completions, completion_ids):
    print("judged", len(completion_ids[0]), "tokens")
    if sum(completion_ids[0]) % 5 == 0:
        raise ValueError("now and then")
    if sum(completion_ids[0]) % 11 == 0:
        os._exit(1)
    return [sum(c in "56789" for c in text) / 12 for text in completions]

def not_the_last_group(completions, trainer_state):
    global seen
    seen += 1
    if seen > KEPT:
        raise ValueError
    return [sum(c in "56789" for c in text) / 12 for text in completions]

seen, KEPT = 0, 8
"""


def run_settings(folder: Path, *words: str) -> Settings:
    folder.mkdir(exist_ok=True)
    (folder / "r.py").write_text(REWARD)
    reward = f"rewards=['{folder / 'r.py'}:digits']"
    more = ["train.steps=4", "rollout.prompts=4", "reward_pool.in_process=false", "run.probe_rollouts=0"]
    return settings_of(folder, reward, *more, *words)


def test_a_run_whose_reward_fails_now_and_then_counts_and_stays_exact(tmp_path: Path) -> None:
    screen = Console(record=True, quiet=False, width=100, file=(tmp_path / "screen").open("w"))
    folder = run_training(run_settings(tmp_path, "reward_pool.workers=2"), Display(screen))
    metrics, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    assert len(metrics) == 4
    totals: dict[str, int] = {}
    for row in metrics:
        assert row["exact_frac"] == 1.0 and row["mismatch_tokens"] == 0 and row["masked"] == 0
        assert row["tokens"] > 12 * 4, "the dropped completions are compared too"
        counts = {key.removeprefix("dropped/"): n for key, n in row.items() if key.startswith("dropped/")}
        assert row["dropped"] == sum(counts.values()) < 16
        totals = {reason: totals.get(reason, 0) + counts.get(reason, 0) for reason in {**totals, **counts}}
    assert totals["raised"] > 2 and totals["exited"] > 0 and len(totals) == 2
    assert json.loads((folder / "summary.json").read_text())["dropped"] == totals
    dropped = [row for row in samples if row["reward"] is None]
    assert dropped and all(row["dropped"] in totals and row["advantage"] == 0.0 and row["exact"] for row in dropped)
    assert "dropped completions" in (folder / "report.html").read_text()
    assert f"{sum(totals.values())} (" in screen.export_text()
    assert "judged 12 tokens\n" in (folder / "rewards.log").read_text()

    # The number of workers is no part of the result, and neither is an interruption.
    again = run_settings(tmp_path / "b", "reward_pool.workers=1", "train.save_every=1")
    resumed = run_training(again)
    assert_same(resumed, folder)
    run_training(again, resume=resumed / "checkpoints" / "step-00000003")
    assert_same(resumed, folder)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_the_update_is_that_of_a_step_without_the_dropped_group(tmp_path: Path, loss: str) -> None:
    found = []
    for prompts in (3, 2):
        folder = tmp_path / str(prompts)
        folder.mkdir()
        (folder / "r.py").write_text(REWARD)
        words = [f"rewards=['{folder / 'r.py'}:not_the_last_group']", f"rollout.prompts={prompts}", f"loss.type={loss}"]
        settings = settings_of(folder, *words, "engine.max_num_seqs=4")  # the groups finish one after another
        trainer, run = trainer_of(settings, folder)
        with run:
            metrics, _ = trainer.step(1)
        assert metrics["dropped"] == 4 * (prompts == 3) and metrics["exact_frac"] == 1.0 and metrics["updates"] == 1
        found.append((weights(trainer), metrics["reward"], metrics["loss"]))
    for name, weight in found[0][0].items():
        assert_bitwise(weight, found[1][0][name], name)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("words", [["ppo.whiten_rewards=true"], ["ppo.whiten_advantages=false", "kl.coef=0.1"]])
def test_ppo_leaves_dropped_completions_out(tmp_path: Path, words: list[str]) -> None:
    """The policy and the value model move as in a step without the group that was dropped."""
    found = []
    for prompts in (3, 2):
        folder = tmp_path / str(prompts)
        folder.mkdir()
        (folder / "r.py").write_text(REWARD)
        more = [f"rewards=['{folder / 'r.py'}:not_the_last_group']", f"rollout.prompts={prompts}", "loss.type=dapo"]
        settings = settings_of(folder, *more, *words, "engine.max_num_seqs=4", "train.epochs=1", algorithm="ppo")
        trainer, run = trainer_of(settings, folder)
        assert isinstance(trainer, PPOTrainer)
        with run:
            metrics, _ = trainer.step(1)
        assert metrics["dropped"] == 4 * (prompts == 3) and metrics["exact_frac"] == 1.0 and metrics["updates"] == 1
        found.append({**weights(trainer), **{f"value.{k}": v for k, v in trainer.value_model.state_dict().items()}})
    for name, weight in found[0].items():
        assert_bitwise(weight, found[1][name], name)


REWARDS = [0.5, None, 1.0, 0.0, None, None, None, 3.0, None, None, None, None, 2.0, 2.0, -1.0, 0.25]


@pytest.mark.parametrize("mode", ["group", "leave_one_out", "batch", "none"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_are_those_of_the_others_alone(mode: Any, normalize_std: bool) -> None:
    settings = AdvantageSettings(mode=mode, normalize_std=normalize_std)
    options: dict[str, Any] = {"mode": mode, "normalize_std": normalize_std, "eps": settings.eps}
    found = advantages_of(REWARDS, 4, settings).tolist()
    known = [r for r in REWARDS if r is not None]
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1))
    for start in range(0, 16, 4):
        kept = [i for i in range(start, start + 4) if REWARDS[i] is not None]
        assert all(found[i] == 0.0 for i in range(start, start + 4) if i not in kept)
        if not kept:
            continue
        group = torch.tensor([REWARDS[i] for i in kept], dtype=torch.float32)
        if mode == "batch":
            expected = (group.double() - group.double().mean()) / (std + settings.eps if normalize_std else 1)
            assert torch.allclose(torch.tensor([found[i] for i in kept]), expected.float(), rtol=1e-5, atol=1e-6)
        else:
            assert [found[i] for i in kept] == ops.group_advantages(group, len(kept), **options).tolist()
    whole = [0.0 if r is None else r for r in REWARDS]
    assert (
        advantages_of(whole, 4, settings).tolist() == ops.group_advantages(torch.tensor(whole), 4, **options).tolist()
    )
