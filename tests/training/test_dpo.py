"""DPO: the papers' formulas, the gradient of a plain model, micro-batches without an effect, and a run that learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from training.tiny import settings_of

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.data.errors import InputError
from rlkernel.models import Decoder, ModelConfig
from rlkernel.training.batch import TokenBudget, Trajectory
from rlkernel.training.config import DPOSettings, OptimizerSettings, resolve
from rlkernel.training.display import Display
from rlkernel.training.dpo import DPO, ipo_loss, pair_logps, sigmoid_loss
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.pairs import Pair, sums_of
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training
from rlkernel.training.supervised import evaluate, update

CONFIG = ModelConfig("qwen2", 12, 64, 48, 2, 2, 1, 32, max_position_embeddings=32)
PAIRS = [
    Pair(Trajectory([1, 2], [3, 4, 1]), Trajectory([1, 2], [5]), 0.5),
    Pair(Trajectory([2], [5, 6]), Trajectory([2], [6, 6, 6, 1]), 0.0),
    Pair(Trajectory([3, 3, 3, 7], [6, 1]), Trajectory([3, 3, 3, 7], [1, 1, 9]), 1.5),
    Pair(Trajectory([8], [1]), Trajectory([8], [2]), 0.0),
]
SETTINGS = {
    "sigmoid": DPOSettings(beta=0.3),
    "smoothed": DPOSettings(beta=0.3, label_smoothing=0.2),
    "ipo": DPOSettings(beta=0.3, loss="ipo"),
}


def with_reference(model: Decoder) -> list[Pair]:
    logps = pair_logps(model, PAIRS, "cpu").tolist()
    return [replace(pair, reference=(chosen, rejected)) for pair, (chosen, rejected) in zip(PAIRS, logps, strict=True)]


def test_the_losses_of_the_papers() -> None:
    chosen = torch.tensor([-1.5, 2.0, 0.0, 40.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.5, -1.0, 0.0, -40.0], dtype=torch.float64, requires_grad=True)
    x = 0.3 * (chosen - rejected).detach()
    loss = sigmoid_loss(chosen, rejected, 0.3)
    torch.testing.assert_close(loss.detach(), torch.log1p(torch.exp(-x)))
    loss.sum().backward()
    weight = -0.3 * torch.sigmoid(-x)  # Rafailov et al., below equation 7: beta times sigmoid(r_rejected - r_chosen)
    torch.testing.assert_close(chosen.grad, weight)
    torch.testing.assert_close(rejected.grad, -weight)
    smoothed = sigmoid_loss(chosen, rejected, 0.3, 0.2).detach()
    torch.testing.assert_close(smoothed, 0.8 * torch.log1p(torch.exp(-x)) + 0.2 * torch.log1p(torch.exp(x)))
    best = torch.tensor(math.log(0.8 / 0.2) / 0.3, dtype=torch.float64, requires_grad=True)
    sigmoid_loss(best, torch.zeros_like(best), 0.3, 0.2).backward()  # Mitchell: minimal where sigmoid(x) = 1 - e
    assert best.grad is not None and abs(float(best.grad)) < 1e-12
    torch.testing.assert_close(ipo_loss(chosen, rejected, 0.3).detach(), (x / 0.3 - 1 / 0.6) ** 2)


def test_sums_are_exact_and_their_gradient_is_one_number_per_part() -> None:
    values = torch.tensor([1e8, 1.0, -1e8, 0.1, 0.2, 3.0], requires_grad=True)
    sums = sums_of(values, [3, 2, 1])
    assert sums.tolist() == [1.0, values[3:5].detach().double().sum().item(), 3.0]
    (sums * torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 1.0, 10.0, 10.0, 100.0]


def plain_logp(model: Decoder, one: Trajectory) -> Tensor:
    """The sum of a completion's log-probabilities on stock ops, in fp64 from the logits on."""
    from rlkernel.models import PackedBatch

    logits = model.logits(model(PackedBatch.from_sequences([(one.prompt + one.completion)[:-1]]))).double()
    rows = log_softmax(logits[len(one.prompt) - 1 :], -1)
    return rows[torch.arange(len(one.completion)), torch.tensor(one.completion)].sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_of_a_plain_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[name]
    pairs = with_reference(Decoder.from_config(CONFIG, seed=1, std=0.2))
    model, plain = (Decoder.from_config(CONFIG, seed=2, std=0.2) for _ in range(2))
    with ops.stock():
        losses = []
        for pair in pairs:
            h = [plain_logp(plain, pair.chosen), plain_logp(plain, pair.rejected)]
            h = [logp - reference for logp, reference in zip(h, pair.reference, strict=True)]
            if name == "ipo":
                h = [h[0] / len(pair.chosen.completion), h[1] / len(pair.rejected.completion)]
            x = h[0] - h[1]
            e = settings.label_smoothing
            sigmoid = -(1 - e) * torch.sigmoid(0.3 * x).log() - e * torch.sigmoid(-0.3 * x).log()
            losses.append((x - 1 / 0.6) ** 2 if name == "ipo" else sigmoid)
        expected = torch.stack(losses).mean()
        expected.backward()
    optimizer = Optimizer(model, OptimizerSettings(), 1)
    monkeypatch.setattr(optimizer, "step", lambda: None)
    found, _ = update(DPO(model, settings, "cpu"), optimizer, pairs, TokenBudget(1000))
    assert math.isclose(found["loss"], float(expected.detach()), rel_tol=1e-5)
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        scale = float(theirs.grad.abs().max())
        assert torch.allclose(mine.main_grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale), key  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_learns_and_micro_batches_change_no_bit(name: str) -> None:
    def run(budget: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        model = Decoder.from_config(CONFIG, seed=2, std=0.2)
        pairs = with_reference(model)
        optimizer = Optimizer(model, OptimizerSettings(lr=0.003), 12)
        objective = DPO(model, SETTINGS[name], "cpu")
        steps = [update(objective, optimizer, pairs, TokenBudget(budget))[0] for _ in range(12)]
        steps.append(evaluate(objective, pairs, TokenBudget(budget)))
        return steps, {key: parameter.detach().clone() for key, parameter in model.named_parameters()}

    (steps, weights), (others, other_weights) = run(1000), run(8)
    assert steps == others
    for key, weight in weights.items():
        assert_bitwise(weight, other_weights[key], key)
    assert steps[0]["rewards/accuracies"] == 0.0 and steps[0]["rewards/margins"] == 0.0
    assert steps[-1]["rewards/accuracies"] == 1.0 and steps[-1]["loss"] < steps[0]["loss"]
    with ops.stock():  # the control
        assert any(not torch.equal(a, b) for a, b in zip(run(1000)[1].values(), run(8)[1].values(), strict=True))


def test_a_run_on_the_built_in_task(tmp_path: Path) -> None:
    words = ["train.steps=8", "train.batch_size=32", "eval.every=4", "warmup.examples=256", "warmup.steps=2"]
    words += ["warmup.batch_size=8", "eval.rows=32", "optimizer.lr=0.001"]
    settings = settings_of(tmp_path, *words, algorithm="dpo")
    folder = run_training(settings, Display())
    evals, metrics = read_jsonl(folder / "eval.jsonl"), read_jsonl(folder / "metrics.jsonl")
    names = ("chosen", "rejected", "accuracies", "margins")
    assert {f"rewards/{name}" for name in names} | {"logps/chosen", "logps/rejected", "loss"} <= metrics[0].keys()
    assert math.isclose(metrics[0]["loss"], math.log(2)), "policy and reference are equal"
    assert [row["step"] for row in evals] == [0, 4, 8] and metrics[-1]["loss"] < metrics[0]["loss"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["heldout_before"] == 0.0 and summary["heldout_after"] == evals[-1]["rewards/accuracies"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "DPO finished." in page and "The held-out accuracy rose from" in page
    assert (folder / "model" / "model.safetensors").exists()


def test_a_file_of_preferences(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "train.steps=1", "warmup.examples=8", "eval.rows=8", algorithm="dpo")
    model = run_training(settings) / "model"
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model.path": str(model), "data.train": str(tmp_path / "pairs.jsonl"), "run.device": "cpu"}
    words = ["train.steps=2", "train.batch_size=4", "data.heldout_rows=3", f"run.output={tmp_path}/second"]
    folder = run_training(resolve("dpo", options=options, overrides=words))
    assert [row["rows"] for row in read_jsonl(folder / "eval.jsonl")] == [3, 3]
    with pytest.raises(InputError, match=r"label_smoothing belongs to dpo\.loss=sigmoid"):
        resolve("dpo", overrides=["dpo.loss=ipo", "dpo.label_smoothing=0.1"])
