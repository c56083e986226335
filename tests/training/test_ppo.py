"""The PPO step: advantages by the formulas in fp64, exact tokens, neutral to micro-batches, resumed bit for bit."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.op_checks import rand
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from training.tiny import parts_of, settings_of, trainer_of

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.data.errors import InputError
from rlkernel.models import Decoder, ScalarModel, save_model
from rlkernel.training.batch import pack_trajectories
from rlkernel.training.checkpoint import find
from rlkernel.training.config import Settings
from rlkernel.training.display import Display
from rlkernel.training.ppo import PPOTrainer, explained_variance, value_loss
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

QUICK = ("train.epochs=2", "value.lr=0.01", "rollout.prompts=12", "rollout.group_size=1")


def ppo_settings(folder: Path, *overrides: str) -> Settings:
    folder.mkdir(exist_ok=True)
    return settings_of(folder, *QUICK, *overrides, algorithm="ppo")


def train(folder: Path, *overrides: str, steps: int = 2) -> tuple[PPOTrainer, list[dict[str, Any]]]:
    settings = ppo_settings(folder, *overrides)
    trainer, run = trainer_of(settings, folder)
    assert isinstance(trainer, PPOTrainer)
    with run, ops.stock(settings.run.backend == "torch"):
        rows = [trainer.step(step)[0] for step in range(1, steps + 1)]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
    return trainer, rows


def both(trainer: PPOTrainer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": parameter.detach()
        for name, model in (("policy", trainer.model), ("value", trainer.value_model))
        for key, parameter in model.named_parameters()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert_bitwise(weight, other[name], name)


# ---- the formulas


@pytest.mark.parametrize("clip", (0.2, None))
def test_the_value_loss(clip: float | None) -> None:
    values, old, returns = (rand(i, 200) for i in range(3))
    ours = values.clone().requires_grad_()
    value_loss(ours, old, returns, clip).sum().backward()
    v, o, r = (x.double() for x in (values, old, returns))
    v.requires_grad_()
    limited = v if clip is None else o + (v - o).clamp(-clip, clip)
    exact = 0.5 * torch.max((v - r) ** 2, (limited - r) ** 2)
    exact.sum().backward()
    assert torch.allclose(value_loss(values, old, returns, clip).double(), exact.detach(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.grad.double(), v.grad, rtol=1e-5, atol=1e-6)
    assert (clip is not None) == bool((ours.grad == 0).any()), "a clipped value has no gradient"


def test_advantages_and_returns_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rollout's log-probabilities, the reference's, the values and the rewards, in fp64."""
    words = ("ppo.gamma=0.9", "ppo.lam=0.8", "ppo.whiten_rewards=true", "kl.coef=0.3", "kl.controller=adaptive")
    trainer, run = trainer_of(ppo_settings(tmp_path, *words, "kl.target=0.01", "kl.horizon=100"), tmp_path)
    kept: list[Any] = []
    learn, seen = trainer.learn, []
    monkeypatch.setattr(
        trainer, "learn", lambda graded, *rest: (kept.append(copy.deepcopy(graded)), learn(graded, *rest))[1]
    )
    judge = trainer.judge
    monkeypatch.setattr(trainer, "judge", lambda *a: (found := judge(*a), seen.append(found[1]))[0])
    with run:
        rows = [trainer.step(1)[0], trainer.step(2)[0]]
    assert rows[0]["kl_coef"] == 0.3 and rows[0]["kl_reward"] == 0.0 and rows[1]["kl_reward"] != 0.0
    coef = 0.3 * (1 - 0.2 * 12 / 100)  # the first step's KL was 0
    assert rows[1]["kl_coef"] == pytest.approx(coef)
    graded, rewards = kept[1], np.array(seen[0] + seen[1])
    scores = (np.array(seen[1]) - rewards.mean()) / rewards.std(ddof=1)
    advantages = []
    for one, score in zip(graded, scores, strict=True):
        logp, ref, value = (x.double() for x in (one.trajectory.logp, one.ref_logp, one.values))
        reward = -coef * (logp - ref)
        reward[-1] += score
        after, advantage, mine = 0.0, 0.0, []
        for t in reversed(range(len(reward))):
            advantage = float(reward[t] + 0.9 * after - value[t]) + 0.9 * 0.8 * advantage
            after = float(value[t])
            mine.insert(0, advantage)
        assert np.allclose(one.returns.numpy(), np.array(mine) + value.numpy(), rtol=1e-4, atol=1e-6)
        advantages.append(np.array(mine))
    pool = np.concatenate(advantages)
    for one, mine in zip(graded, advantages, strict=True):
        assert np.allclose(one.advantages.numpy(), (mine - pool.mean()) / pool.std(ddof=1), rtol=1e-4, atol=1e-5)
    assert explained_variance(graded) == pytest.approx(rows[1]["value_explained"])


def test_the_gradient_of_the_value_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mean over the step's tokens, against plain autograd on stock torch."""
    words = ("train.epochs=1", "value.clip=null", "train.micro_batch_tokens=40", "rollout.mask_truncated=true")
    trainer, run = trainer_of(ppo_settings(tmp_path, *words), tmp_path)
    torch.nn.init.normal_(trainer.value_model.score.weight, generator=torch.Generator().manual_seed(1))
    plain, kept = copy.deepcopy(trainer.value_model), []
    for parameter in plain.parameters():
        parameter.main_grad = None  # type: ignore[attr-defined]
    learn = trainer.learn
    monkeypatch.setattr(trainer, "learn", lambda graded, *rest: (kept.extend(graded), learn(graded, *rest))[1])
    monkeypatch.setattr(trainer.value_optimizer, "step", trainer.optimizer.step)
    with run:
        trainer.step(1)
    used = [one for one in kept if one.in_loss]
    assert 0 < len(used) < len(kept)
    with ops.stock():
        packed = pack_trajectories([one.trajectory for one in used], "cpu")
        errors = plain.values(packed.batch)[packed.rows] - torch.cat([one.returns for one in used])
        (0.5 * errors.square().mean()).backward()
    trainer.value_model.fold_main_grads()
    for (name, mine), theirs in zip(trainer.value_model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None and theirs.grad.abs().max() > 0, name
        assert torch.allclose(mine.main_grad, theirs.grad, rtol=1e-3, atol=1e-5), name  # type: ignore[attr-defined]


# ---- exact, neutral


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.minibatches=3", "rollout.temperature=0.7", "rollout.top_k=7"],
        ["train.epochs=1", "kl.coef=0", "rollout.mask_truncated=true", "model.dtype=bfloat16"],
        [
            "rollout.prompts=3",
            "rollout.group_size=4",
            "train.gradient_checkpointing=true",
            "rollout.overlong_buffer=0.5",
        ],
    ],
    ids=" ".join,
)
def test_every_token_is_exact(tmp_path: Path, overrides: list[str]) -> None:
    _, rows = train(tmp_path, *overrides)
    for row in rows:
        assert (row["exact_frac"], row["mismatch_tokens"]) == (1.0, 0) and row["tokens"] > 0
        assert row["updates"] > 0 and row["value_grad_norm"] > 0


def test_the_control_arm_drifts(tmp_path: Path) -> None:
    _, rows = train(tmp_path, "run.backend=torch", "rollout.prompts=30", "rollout.max_tokens=20")
    assert sum(row["mismatch_tokens"] for row in rows) > 0


def test_micro_batches_and_the_engines_shape_change_no_bit(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", "ppo.whiten_rewards=true")
    cut = ("train.micro_batch_tokens=25", "engine.max_num_seqs=2", "engine.max_num_batched_tokens=3")
    pieces, _ = train(tmp_path / "b", "ppo.whiten_rewards=true", *cut)
    assert_same(both(whole), both(pieces))
    other, _ = train(tmp_path / "c", "ppo.whiten_rewards=false")
    assert any(not torch.equal(a, b) for a, b in zip(both(whole).values(), both(other).values(), strict=True))


# ---- learns


def test_the_reward_rises_and_a_strong_kl_prevents_it(tmp_path: Path) -> None:
    """The built-in task's prompts and a reward for digits above 4, from random weights."""
    words = ("rollout.prompts=24", "train.epochs=4", "optimizer.lr=0.003", "value.lr=0.003")
    _, rows = train(tmp_path / "a", *words, steps=15)
    assert rows[0]["reward"] < 0.3 and rows[-1]["reward"] > 0.5
    assert all(row["exact_frac"] == 1.0 for row in rows)
    _, held = train(tmp_path / "b", *words, "kl.coef=5", steps=15)
    assert held[-1]["reward"] < 0.35 and held[-1]["kl_reward"] < 0.2 * rows[-1]["kl_reward"]


# ---- checkpoints


def everything(run: Path) -> dict[str, Tensor]:
    folder = find(run)
    return {
        f"{file.stem}.{name}": tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Both models, both optimizers, the KL controller and the running moments; without one of them, it does not."""
    words = ("train.steps=4", "train.save_every=2", "ppo.whiten_rewards=true", "kl.controller=adaptive")
    words = (*words, "kl.horizon=50", "run.probe_rollouts=0")
    expected = run_training(ppo_settings(tmp_path / "whole", *words), Display(Console(quiet=True)))
    settings = ppo_settings(tmp_path / "resumed", *words)
    resumed = run_training(settings, Display(Console(quiet=True)))
    folder = resumed / "checkpoints" / "step-00000002"
    state = json.loads((folder / "state.json").read_text())
    assert state["reward_moments"]["count"] == 24 and state["kl_coef"] != 0.05

    def finish(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        run_training(settings, Display(Console(quiet=True)), resume=folder)
        rows = read_jsonl(resumed / "metrics.jsonl")
        timed = ("seconds", "tokens_per_s", "memory_mib")
        return everything(resumed), [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]

    tensors, rows = finish(folder)
    wanted = everything(expected)
    assert {name.split(".")[0] for name in wanted} == {
        "model",
        "optimizer",
        "reference",
        "value_model",
        "value_optimizer",
    }
    assert_same(tensors, wanted)
    logged = read_jsonl(expected / "metrics.jsonl")
    assert rows == [{name: row[name] for name in mine} for mine, row in zip(rows, logged, strict=True)]


def test_state_of_the_controllers_is_restored(tmp_path: Path) -> None:
    """The control: other moments or another coefficient give other weights."""
    found = []
    for change in ("", "kl_coef", "reward_moments"):
        trainer, _ = train(tmp_path / f"a{change}", "ppo.whiten_rewards=true", steps=1)
        made = copy.deepcopy(trainer.checkpoint(1))
        if change == "kl_coef":
            made.state["kl_coef"] += 1.0
        elif change:
            made.state[change]["mean"] += 1.0
        again, run = trainer_of(ppo_settings(tmp_path / f"b{change}", "ppo.whiten_rewards=true"), tmp_path)
        again.restore(made)
        with run:
            again.step(2)
        assert isinstance(again, PPOTrainer)
        found.append(both(again))
    for other in found[1:]:
        assert any(not torch.equal(a, b) for a, b in zip(found[0].values(), other.values(), strict=True))


# ---- the value model's directory


def test_a_value_model_from_a_directory(tmp_path: Path) -> None:
    settings = ppo_settings(tmp_path / "run")
    policy = parts_of(settings, tmp_path).model
    save_model(ScalarModel.from_decoder(policy, seed=3), tmp_path / "value")
    trainer, _ = train(tmp_path / "a", f"value.path={tmp_path / 'value'}", steps=0)
    assert trainer.value_model.score.weight.abs().max() > 0, "a head of its own"
    fresh, _ = train(tmp_path / "b", steps=0)
    assert fresh.value_model.score.weight.abs().max() == 0
    with pytest.raises(InputError, match=r"value\.path=.*: "):
        train(tmp_path / "c", f"value.path={tmp_path / 'absent'}", steps=0)
    small = Decoder.from_config(policy.config.__class__(**{**vars(policy.config), "vocab_size": 9}))
    save_model(ScalarModel.from_decoder(small), tmp_path / "small")
    with pytest.raises(InputError, match=r"value\.path=.*small has 9 tokens .* name a model that reads the policy's"):
        train(tmp_path / "d", f"value.path={tmp_path / 'small'}", steps=0)
