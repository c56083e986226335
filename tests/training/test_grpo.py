"""The GRPO step: exact under every setting, independent of micro-batches and threads, able to fail, and never NaN."""

from __future__ import annotations

import copy
import errno
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from training.tiny import settings_of, trainer_of, weights

from rlkernel import ops
from rlkernel.contract import MismatchError, assert_bitwise
from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Reward, Rewards
from rlkernel.training.batch import Trajectory, pack_trajectories
from rlkernel.training.display import Display
from rlkernel.training.grpo import GRPOTrainer
from rlkernel.training.media import Prompt
from rlkernel.training.optimizer import Update
from rlkernel.training.policy_metrics import known
from rlkernel.training.rollout import Completion, Judging
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

STEPS = 2


def train(
    folder: Path, *overrides: str, steps: int = STEPS, **config: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(metrics of each step, final weights) of a tiny run."""
    folder.mkdir(exist_ok=True)
    settings = settings_of(folder, *overrides, **config)
    trainer, run = trainer_of(settings, folder)
    with run, ops.stock(settings.run.backend == "torch"):
        metrics = [trainer.step(step)[0] for step in range(1, steps + 1)]
    for row in metrics:
        assert all(math.isfinite(value) for value in row.values()), row
    return metrics, weights(trainer)


def assert_same_weights(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in a:
        assert_bitwise(a[name], b[name], name)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rollout.temperature=0.7", "rollout.top_k=7"],
        ["rollout.top_p=0.8", "rollout.min_p=0.02", 'rollout.stop=["7"]'],
        ["loss.type=dapo", "loss.clip_high=0.28", "rollout.mask_truncated=true", "loss.clip_dual=3"],
        ["loss.type=gspo", "train.minibatches=3", "train.epochs=2"],
        ["loss.type=cispo", "loss.entropy_coef=0.01", "loss.kl_coef=0.1", "train.micro_batch_tokens=30"],
        ["loss.type=dr_grpo", "advantages.normalize_std=false", "loss.kl_coef=0.1", "loss.kl_type=k1"],
        ["loss.type=bnpo", "loss.old_policy=scored", "loss.tis_cap=2", "train.epochs=2", "loss.clip_low=null"],
        ["loss.type=reinforce", "advantages.mode=leave_one_out", "loss.old_policy=scored", "loss.tis_cap=2"],
        ["rollout.group_size=1", "rollout.prompts=6", "advantages.mode=none", "loss.type=reinforce"],
        ["rollout.group_size=1", "rollout.prompts=6", "method=reinforce++", "train.epochs=2"],
        ["method=rloo", "kl.controller=adaptive"],
        ["method=dapo", "rollout.overlong_buffer=0.5"],
        ["advantages.mode=batch", "model.dtype=bfloat16", "train.gradient_checkpointing=true"],
        [
            "engine.max_num_seqs=3",
            "engine.max_num_batched_tokens=5",
            "engine.prefix_caching=false",
            "model.tp_leaves=2",
        ],
    ],
    ids=lambda words: " ".join(words) or "default",
)
def test_every_token_is_exact(tmp_path: Path, overrides: list[str]) -> None:
    metrics, _ = train(tmp_path, *overrides)
    for row in metrics:
        assert (row["exact_frac"], row["mismatch_tokens"], row["max_abs_diff"]) == (1.0, 0, 0.0)
        assert row["tokens"] > 0
    assert any(row["updates"] for row in metrics) and any(row["grad_norm"] > 0 for row in metrics)


@pytest.mark.parametrize("tied", [False, True])
def test_micro_batches_and_the_engines_shape_change_no_bit(tmp_path: Path, tied: bool) -> None:
    words = ("loss.entropy_coef=0.01", "loss.kl_coef=0.05")
    _, whole = train(tmp_path / "a", *words, tie_word_embeddings=tied)
    _, cut = train(
        tmp_path / "b",
        *words,
        "train.micro_batch_tokens=25",
        "engine.max_num_seqs=2",
        "engine.page_size=2",
        "engine.max_num_batched_tokens=3",
        tie_word_embeddings=tied,
    )
    assert_same_weights(whole, cut)


@pytest.mark.parametrize(("loss", "share"), [("grpo", "sequence"), ("dapo", "token"), ("dr_grpo", "constant")])
def test_the_gradient_is_the_policy_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, share: str
) -> None:
    """On fresh samples every ratio is 1, so the gradient is that of the advantage-weighted log-probabilities."""
    settings = settings_of(tmp_path, f"loss.type={loss}", "train.micro_batch_tokens=40", "rollout.temperature=0.8")
    trainer, run = trainer_of(settings, tmp_path)
    plain = copy.deepcopy(trainer.model)
    for parameter in plain.parameters():
        parameter.main_grad = None  # type: ignore[attr-defined]
    kept: dict[str, Any] = {}
    sample, advantages = trainer.sampler.sample, ops.group_advantages
    monkeypatch.setattr(trainer.sampler, "sample", lambda *a: kept.setdefault("completions", sample(*a)))
    monkeypatch.setattr(
        "rlkernel.training.grpo.ops.group_advantages", lambda *a, **k: kept.setdefault("a", advantages(*a, **k))
    )
    monkeypatch.setattr(trainer.optimizer, "step", lambda: Update(0.0, 0.0))
    with run:
        trainer.step(1)
    trainer.model.fold_main_grads()
    samples = [completion.trajectory for completion in kept["completions"]]
    total = sum(len(one.completion) for one in samples)
    objective = torch.zeros(())
    with ops.stock():
        for one, advantage in zip(samples, kept["a"].tolist(), strict=True):
            logits = plain.logits(plain(pack_trajectories([one], "cpu").batch))[len(one.prompt) - 1 :] / 0.8
            logp = logits.log_softmax(-1)[torch.arange(len(one.completion)), torch.tensor(one.completion)]
            length = {"sequence": len(one.completion) * len(samples), "token": total, "constant": 12 * len(samples)}[
                share
            ]
            objective = objective - advantage * logp.sum() / length
        objective.backward()
    for (name, mine), theirs in zip(trainer.model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None and theirs.grad.abs().max() > 0, name
        assert torch.allclose(mine.main_grad, theirs.grad, rtol=1e-3, atol=1e-5), name  # type: ignore[attr-defined]


def test_the_run_is_fixed_by_its_seed_and_not_by_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    first, one = train(tmp_path / "a")
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        second, two = train(tmp_path / "b")
    finally:
        torch.set_num_threads(threads)
    assert_same_weights(one, two)
    timeless = [
        {k: v for k, v in row.items() if "second" not in k and k not in ("memory_mib", "tokens_per_s")} for row in first
    ]
    assert all(second[i][key] == value for i, row in enumerate(timeless) for key, value in row.items())
    _, other = train(tmp_path / "c", "run.seed=1")
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_single_ulp_stops_a_strict_run_before_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, run = trainer_of(settings_of(tmp_path), tmp_path)
    before = weights(trainer)
    sample = trainer.sampler.sample

    def nudged(*arguments: Any) -> Any:
        completions = sample(*arguments)
        logp = completions[5].trajectory.logp
        logp[1] = torch.nextafter(logp[1], torch.tensor(-100.0))
        return completions

    monkeypatch.setattr(trainer.sampler, "sample", nudged)
    with run, pytest.raises(MismatchError) as caught:
        trainer.step(1)
    message = str(caught.value)
    assert "step 1: 1 of " in message and "completion 5, token 1 of " in message and "1 ulps apart" in message
    assert_same_weights(before, weights(trainer))


def test_without_strict_mode_mismatches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = trainer_of(settings_of(tmp_path, "run.strict=false"), tmp_path)
    sample = trainer.sampler.sample

    def nudged(*arguments: Any) -> Any:
        completions = sample(*arguments)
        completions[0].trajectory.logp[0] += 0.25
        return completions

    monkeypatch.setattr(trainer.sampler, "sample", nudged)
    with run:
        metrics, exact = trainer.step(1)
    assert (
        metrics["mismatch_tokens"] == 1 and metrics["exact_frac"] < 1 and metrics["max_abs_diff"] == pytest.approx(0.25)
    )
    assert "completion 0, token 0" in exact.first
    first = read_jsonl(run.folder / "samples.jsonl")[0]
    assert not first["exact"] and first["tokens"][0]["rollout"] != first["tokens"][0]["training"]


def test_stale_keys_and_values_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that sleeps drops its keys and values in any case.
    words = ("rollout.prompts=1", "run.strict=false", "engine.page_size=1", "optimizer.lr=0.1", "engine.sleep=false")
    settings = settings_of(tmp_path, *words)
    trainer, run = trainer_of(settings, tmp_path)
    row = next(trainer.parts.prompts)
    trainer.parts.prompts = iter([row] * 4)
    with run:
        trainer.step(1)
        assert trainer.step(2)[0]["mismatch_tokens"] == 0
        monkeypatch.setattr(trainer.sampler, "weights_updated", lambda: None)
        assert trainer.step(3)[0]["mismatch_tokens"] > 0


def test_the_control_arm_drifts(tmp_path: Path) -> None:
    metrics, _ = train(
        tmp_path, "run.backend=torch", "rollout.prompts=8", hidden_size=128, intermediate_size=256, head_dim=32
    )
    assert sum(row["mismatch_tokens"] for row in metrics) > 0
    assert all(row["exact_frac"] < 1 and 0 < row["max_abs_diff"] < 1e-2 for row in metrics)


def test_the_probe_shows_drift_and_leaves_the_run_exact(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "rollout.prompts=8", hidden_size=128, intermediate_size=256, head_dim=32)
    trainer, run = trainer_of(settings, tmp_path)
    with run:
        trainer.step(1)
        before = weights(trainer)
        assert trainer.probe(1)["mismatch_tokens"] > 0
        assert_same_weights(before, weights(trainer))
        assert trainer.step(2)[0]["exact_frac"] == 1.0


def test_a_tracked_kl_is_shown_and_changes_nothing(tmp_path: Path) -> None:
    plain, a = train(tmp_path / "a")
    tracked, b = train(tmp_path / "b", "loss.track_kl=true")
    assert_same_weights(a, b)
    assert "kl_ref" not in plain[0]
    assert tracked[0]["kl_ref"] == 0.0 and tracked[1]["kl_ref"] > 0.0


def test_probes_change_nothing_of_the_run(tmp_path: Path) -> None:
    found = []
    for count in (0, 2):
        settings = settings_of(tmp_path / str(count), f"run.probe_rollouts={count}", "run.save=false")
        folder = run_training(settings, Display(Console(quiet=True)))
        summary = json.loads((folder / "summary.json").read_text())
        assert [row["step"] for row in summary["probe"]] == [1, 2][:count]
        found.append([(row["reward"], row["loss"]) for row in read_jsonl(folder / "metrics.jsonl")])
    assert found[0] == found[1]


@pytest.mark.parametrize("answer", ["[1.0] * len(completions)", "[0.0] * len(completions)"])
def test_equal_rewards_leave_the_weights_alone(tmp_path: Path, answer: str) -> None:
    (tmp_path / "r.py").write_text(f"def f(completions, **_):\n    return {answer}\n")
    words = [f"rewards=[{tmp_path / 'r.py'}:f]", "optimizer.weight_decay=0.1"]
    trainer, run = trainer_of(settings_of(tmp_path, *words), tmp_path)
    before = weights(trainer)
    with run:
        metrics, _ = trainer.step(1)
    assert metrics["updates"] == 0 and metrics["groups_all_equal"] == 1.0 and metrics["loss"] == 0.0
    assert metrics["exact_frac"] == 1.0 and all(math.isfinite(value) for value in metrics.values())
    assert_same_weights(before, weights(trainer))


def test_all_tokens_masked_leave_the_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, loss in enumerate(("grpo", "bnpo", "dr_grpo")):
        words = ["rollout.mask_truncated=true", "loss.kl_coef=0.1", f"loss.type={loss}"]
        trainer, run = trainer_of(settings_of(tmp_path / str(number), *words), tmp_path)
        before = weights(trainer)
        sample = trainer.sampler.sample
        cut = lambda *a, sample=sample: [replace(completion, truncated=True) for completion in sample(*a)]
        monkeypatch.setattr(trainer.sampler, "sample", cut)
        with run:
            metrics, _ = trainer.step(1)
        assert metrics["updates"] == 0 and metrics["masked"] == 12 and metrics["loss"] == 0.0
        assert all(math.isfinite(value) for value in metrics.values()) and metrics["exact_frac"] == 1.0
        assert_same_weights(before, weights(trainer))


def test_masked_completions_do_not_move_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked completion's advantage does not matter: the update equals that of a run in which it is zero."""
    found = []
    for folder, masked in (("a", True), ("b", False)):
        settings = settings_of(tmp_path / folder, f"rollout.mask_truncated={str(masked).lower()}", "loss.type=grpo")
        trainer, run = trainer_of(settings, tmp_path)
        sample = trainer.sampler.sample
        cut = lambda *a, sample=sample: [replace(c, truncated=i == 5) for i, c in enumerate(sample(*a))]
        monkeypatch.setattr(trainer.sampler, "sample", cut)
        if not masked:
            advantages = ops.group_advantages
            zeroed = lambda *a, of=advantages, **k: of(*a, **k) * (torch.arange(12) != 5)
            monkeypatch.setattr("rlkernel.training.grpo.ops.group_advantages", zeroed)
        with run:
            trainer.step(1)
        found.append(weights(trainer))
    assert_same_weights(*found)


def test_advantages_of_reinforce_plus_plus(tmp_path: Path) -> None:
    """Of each token: the rewards to come with the KL inside, whitened over the batch (arXiv:2501.03262), in fp64."""
    trainer, run = trainer_of(settings_of(tmp_path, "method=reinforce++", "kl.coef=0.3", "run.strict=false"), tmp_path)
    with run:
        graded = trainer.rollout(1)
        rewards = trainer.judge(graded)[1]
        trainer.score(graded, 1)
    assert isinstance(trainer, GRPOTrainer) and len(set(rewards)) > 1
    for i, one in enumerate(graded):
        assert not one.kl.any(), "the first policy"
        one.ref_logp = known(one.ref_logp) - 0.1 * i
    returns = []
    for one, reward in zip(graded, rewards, strict=True):
        kl = (known(one.trajectory.logp).double() - known(one.ref_logp).double()).numpy()
        returns.append(reward - 0.3 * kl[::-1].cumsum()[::-1])
    pool = np.concatenate(returns)
    for mine, exact in zip(trainer.advantages(graded, rewards), returns, strict=True):
        assert np.allclose(mine.numpy(), (exact - pool.mean()) / pool.std(ddof=1), rtol=1e-4, atol=1e-5)


def test_a_constraint_subtracts_the_advantages_of_a_cost(tmp_path: Path) -> None:
    """Advantages and multiplier by the formulas in fp64; a checkpoint holds the multiplier."""
    (tmp_path / "r.py").write_text(
        "def cost(completions, **_):\n    return [float(len(set(x))) for x in completions]\n"
    )
    cost = f"{{function: '{tmp_path / 'r.py'}:cost', weight: 0}}"
    words = (f"rewards=[training.tiny:digits, {cost}]", "constraint.cost=cost", "constraint.limit=2.5")
    words = (*words, "constraint.multiplier_lr=0.5", "constraint.multiplier=0.75", "rollout.group_size=4")
    trainer, run = trainer_of(settings_of(tmp_path, *words), tmp_path)
    assert isinstance(trainer, GRPOTrainer)
    with run:
        graded = trainer.rollout(1)
        scores, rewards = trainer.judge(graded)
        for one, advantages in zip(graded, trainer.advantages(graded, rewards), strict=True):
            one.advantages = advantages
        metrics = trainer.constrain(graded, scores)
        saved = trainer.checkpoint(1)

    def normalised(values: Any) -> Any:
        groups = np.asarray(values, np.float64).reshape(-1, 4)
        return (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)

    costs = scores.parts["cost"]
    expected = (normalised(rewards) - 0.75 * normalised(costs)) / 1.75
    assert np.allclose([float(one.advantages) for one in graded], expected.ravel(), rtol=1e-5, atol=1e-6)
    mean = float(np.mean(np.asarray(costs, np.float64)))
    assert metrics == {"cost": pytest.approx(mean), "multiplier": 0.75}
    assert saved.state["multiplier"] == pytest.approx(0.75 + 0.5 * (mean - 2.5)) != 0.75
    before = [float(one.advantages) for one in graded]
    scores.parts["cost"] = [None] * len(graded)
    assert trainer.constrain(graded, scores) == {"multiplier": pytest.approx(saved.state["multiplier"])}
    assert [float(one.advantages) for one in graded] == before
    trainer.multiplier = torch.tensor(0.0)
    trainer.restore(saved)
    assert float(trainer.multiplier) == saved.state["multiplier"]
    for changed, message in (("constraint.cost=digits", "its weight is 1.0"), ("constraint.cost=a", "none of rewards")):
        with pytest.raises(InputError, match=message):
            settings_of(tmp_path, *words, changed)


def test_the_penalty_of_long_completions_moves_the_weights(tmp_path: Path) -> None:
    """In a task without other rewards, only the penalty separates the completions of a group."""
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    found = []
    for buffer in (0.0, 1.0):
        words = (f"rewards=[{tmp_path / 'r.py'}:f]", f"rollout.overlong_buffer={buffer}", "rollout.prompts=8")
        metrics, _ = train(tmp_path / str(buffer), *words, steps=1)
        found.append(metrics[0]["updates"])
        assert metrics[0]["reward"] == 1.0, "the metric is the functions' reward"
    assert found == [0, 1]


def test_a_failing_reward_names_itself(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [float('nan')] * len(completions)\n")
    trainer, run = trainer_of(settings_of(tmp_path, f"rewards=[{tmp_path / 'r.py'}:f]"), tmp_path)
    with run, pytest.raises(InputError, match="reward f: value 0 is nan"):
        trainer.step(1)


def test_several_rewards_are_weighed_and_shown(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def a(completions, **_):\n    return [1.0] * len(completions)\n"
        "def b(completions, answer, **_):\n    return [None] + [float(len(x)) for x in answer[1:]]\n"
    )
    file = tmp_path / "r.py"
    words = [f"rewards=[{{function: '{file}:a', weight: 2}}, {{function: '{file}:b', name: size, unit: batch}}]"]
    trainer, run = trainer_of(settings_of(tmp_path, *words), tmp_path)
    with run:
        metrics, _ = trainer.step(1)
    assert metrics["reward_a"] == 1.0 and metrics["reward_size"] == 3.0
    assert metrics["reward"] == pytest.approx((12 * 2 + 11 * 3) / 12)


def test_a_reward_cannot_change_the_data(tmp_path: Path) -> None:
    def joins(prompts: Any, completions: Any, tags: Any) -> list[float]:
        seen.extend(len(prompt) for prompt in prompts)
        for prompt, completion, tag in zip(prompts, completions, tags, strict=True):
            prompt += completion
            tag.clear()
        return [1.0] * len(prompts)

    seen: list[int] = []
    row = {"prompt": [{"role": "user", "content": "x"}], "tags": ["a"]}
    group = [
        Completion(Prompt(row, [1]), Trajectory([1], [2]), "y", [{"role": "assistant", "content": "y"}], False)
    ] * 2
    for _ in range(2):
        judging = Judging(Rewards([Reward("joins", joins)]))
        judging.add(0, group)
        assert judging.scores().total == [1.0, 1.0]
    assert seen == [1] * 4 and row == {"prompt": [{"role": "user", "content": "x"}], "tags": ["a"]}


def test_what_rewards_log_is_kept(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def f(completions, trainer_state, log_metric, log_extra, **_):\n"
        "    log_metric('step', trainer_state.global_step + trainer_state.max_steps)\n"
        "    log_extra('parsed', [text[:1] for text in completions])\n"
        "    return [1.0] * len(completions)\n"
    )
    trainer, run = trainer_of(settings_of(tmp_path, f"rewards=[{tmp_path / 'r.py'}:f]"), tmp_path)
    with run:
        assert trainer.step(2)[0]["logged/step"] == 3.0
    for row in read_jsonl(run.folder / "samples.jsonl"):
        assert row["extra"] == {"parsed": row["completion"][:1]}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_of_nans_stops_before_anything_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    words = ["rewards=[training.tiny:digits]"]
    trainer, run = trainer_of(settings_of(tmp_path, *words), tmp_path)
    if device == "cpu":
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(math.nan)
    else:  # where the sampler does not refuse such logits, and its log-probabilities are NaN
        generate = trainer.sampler.llm.generate

        def silent(prompts: Any, params: Any, on_finished: Any) -> Any:
            def spoilt(i: int, output: Any) -> None:
                output.outputs[0].logprobs_tensor[0] = math.nan
                on_finished(i, output)

            return generate(prompts, params, spoilt)

        monkeypatch.setattr(trainer.sampler.llm, "generate", silent)
    with run, pytest.raises(FloatingPointError, match="the model computes logits that are NaN or infinite; start from"):
        trainer.step(1)


def test_a_full_disk_at_the_end_costs_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rlkernel.models.checkpoint.save_file", full)
    with pytest.raises(InputError, match=r"model is lost: .*\(No space left on device\).*stay in .*run") as caught:
        run_training(settings_of(tmp_path, "run.probe_rollouts=0"), Display(Console(quiet=True)))
    assert "\n" not in str(caught.value)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"summary.json", "report.html", "metrics.jsonl"} <= names and not any("model" in name for name in names)

    # A report that cannot be written costs no model.
    monkeypatch.undo()
    monkeypatch.setattr("rlkernel.training.pages.report.render", full)
    with pytest.raises(OSError):
        run_training(settings_of(tmp_path, "run.probe_rollouts=0"), Display(Console(quiet=True)))
    assert (tmp_path / "run-2" / "model" / "model.safetensors").exists()


def test_a_disk_that_is_too_small_is_noted_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("rlkernel.training.session.shutil.disk_usage", lambda _: usage._replace(free=1000))
    out = io.StringIO()
    run_training(
        settings_of(tmp_path, "train.steps=1", "run.probe_rollouts=0"), Display(Console(file=out, soft_wrap=True))
    )
    assert "has 1,000 free; free some space before the run ends" in out.getvalue()


def test_what_a_step_leaves_in_the_folder(tmp_path: Path) -> None:
    trainer, run = trainer_of(settings_of(tmp_path, "run.samples=2"), tmp_path)
    with run:
        metrics, _ = trainer.step(1)
        run.log(1, metrics)
    rows = read_jsonl(run.folder / "samples.jsonl")
    assert len(rows) == 2 and all(row["exact"] for row in rows)
    token = rows[0]["tokens"][0]
    assert token["rollout"] == token["training"] and len(token["rollout"]) == 8
    line = json.loads((run.folder / "metrics.jsonl").read_text())
    for key in ("contract", "exact_frac", "mismatch_tokens", "max_abs_diff", "reward", "seconds_rollout", "memory_mib"):
        assert key in line
