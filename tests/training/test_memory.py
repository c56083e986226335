"""Memory of a run: micro-batches are halved when it runs out, the engine is sized by need and sleeps while training."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from training.tiny import parts_of, settings_of, trainer_of, weights

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import select
from rlkernel.training.batch import TokenBudget, Trajectory
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.parts import assemble, read_inputs
from rlkernel.training.rollout import Sampler, engine_sizes
from rlkernel.training.sft import SFT
from rlkernel.training.supervised import evaluate, update


class Failing:
    """Counts the calls of every op and raises out of memory at the n-th call of one, as often as asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, op: str = "", call: int = 0, times: int = 1):
        self.op, self.call, self.left = op, call, times
        self.calls: Counter[str] = Counter()
        self.choose = select.choose
        monkeypatch.setattr(select, "choose", self)

    def __call__(self, op: str, device: str) -> Any:
        self.calls[op] += 1
        if op == self.op and self.calls[op] >= self.call and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.choose(op, device)


def step_of(folder: Path, *overrides: str, algorithm: str = "grpo") -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(metrics, weights after the step, printed lines) of one step, whose micro-batches hold 100 tokens."""
    settings = settings_of(folder, "train.micro_batch_tokens=100", *overrides, algorithm=algorithm)
    trainer, run = trainer_of(settings, folder)
    with run, contextlib.redirect_stdout(io.StringIO()) as said:
        metrics, _ = trainer.step(1)
    found = weights(trainer)
    if algorithm == "ppo":
        found |= {f"value.{name}": p.detach().clone() for name, p in trainer.value_model.named_parameters()}
    return metrics, found, said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("op", "call", "times"),
    [
        ("linear_logprob", 1, 1),  # the first forward
        ("linear_logprob", 2, 1),  # the second one, after a complete micro-batch
        ("attention_backward", 1, 1),  # a backward that has written the head's gradient and some of a layer
        ("attention_backward", 4, 2),  # later, and again at half the size
    ],
)
@pytest.mark.parametrize("options", ["grpo train.epochs=1", "grpo train.epochs=2", "ppo train.minibatches=1"])
def test_halved_micro_batches_change_no_bit(
    op: str, call: int, times: int, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, *words = [*options.split(), "loss.old_policy=scored"]
    with monkeypatch.context() as patch:
        counted = Failing(patch)
        wanted, expected, said = step_of(tmp_path / "a", *words, algorithm=algorithm)
        assert counted.calls[op] >= call and not said, "the clean run reaches the call, and says nothing"
    failing = Failing(monkeypatch, op, call, times)
    metrics, found, said = step_of(tmp_path / "b", *words, algorithm=algorithm)
    assert failing.left == 0 and len(said) == times
    assert said[0] == "out of memory: micro-batches have 50 tokens now, not 100"
    assert metrics["exact_frac"] == 1 and metrics["updates"] == wanted["updates"] > 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(found[name], value, name)


@pytest.mark.parametrize("from_end", [0, 2])
def test_the_value_models_micro_batches_are_halved_too(
    from_end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value model's backward is the last one of a step."""
    with monkeypatch.context() as patch:
        counted = Failing(patch)
        _, expected, _ = step_of(tmp_path / "a", algorithm="ppo")
    last = counted.calls["attention_backward"]
    Failing(monkeypatch, "attention_backward", last - from_end)
    _, found, said = step_of(tmp_path / "b", algorithm="ppo")
    assert len(said) == 1
    for name, value in expected.items():
        assert_bitwise(found[name], value, name)


def test_an_item_alone_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, "linear_logprob", 1, times=100)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        step_of(tmp_path)


def test_supervised_updates_halve_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [Trajectory([3, 4], [5, 6, 7]), Trajectory([3], [4, 5]), Trajectory([5, 5], [6])]
    found = []
    for times in (0, 1):
        model = parts_of(settings_of(tmp_path), tmp_path).model
        optimizer = Optimizer(model, OptimizerSettings(lr=0.01), 1)
        objective, budget = SFT(model, "cpu"), TokenBudget(100)
        with monkeypatch.context() as patch:
            Failing(patch, "attention_backward", 2, times)
            update(objective, optimizer, examples, budget)
            Failing(patch, "linear_logprob", 1, times)
            loss = evaluate(objective, examples, budget)["loss"]
        assert budget.tokens == (3 if times else 100)
        found.append((loss, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_bitwise(b, a)


def test_the_engine_is_as_large_as_the_run_needs(tmp_path: Path) -> None:
    few = settings_of(tmp_path, "eval.rows=4")
    sizes = engine_sizes(parts_of(few, tmp_path / "few"))
    assert (sizes["max_num_seqs"], sizes["max_model_len"]) == (12, 64), "the task's prompts are made as the run goes"
    assert engine_sizes(parts_of(settings_of(tmp_path, "eval.rows=20"), tmp_path / "more"))["max_num_seqs"] == 20
    inputs = read_inputs(few)
    inputs.train = [{"prompt": "1+1="}, {"prompt": "11111+1="}]
    listed = engine_sizes(assemble(few, inputs, "cpu", tmp_path / "listed"))
    longest = max(len(row["prompt"]) for row in (*inputs.train, *inputs.heldout))
    assert listed["max_model_len"] == longest + 12 < 64
    named = settings_of(tmp_path, "engine.max_num_seqs=5", "engine.num_pages=77")
    given = engine_sizes(parts_of(named, tmp_path / "named"))
    assert (given["max_num_seqs"], given["num_pages"], "sleep" in given) == (5, 77, False)


@pytest.mark.parametrize("sleeps", [True, False])
def test_the_engine_sleeps_between_rollouts(sleeps: bool, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f"engine.sleep={str(sleeps).lower()}")
    parts = parts_of(settings, tmp_path)
    sampler = Sampler(parts)
    prompts = [next(parts.prompts) for _ in range(2)]
    found = []
    for _ in range(2):
        assert sampler.llm.is_asleep == sleeps
        found.append([one.trajectory for one in sampler.sample(prompts, settings.rollout, seed=1)])
        sampler.weights_updated()
    for a, b in zip(*found, strict=True):
        assert a.completion == b.completion
        assert_bitwise(a.logp, b.logp)
    assert sampler.memory.peak_mib() > 0
