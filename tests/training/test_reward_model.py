"""The reward model: the papers' loss, micro-batches without an effect, its files, and a run that learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training.test_dpo import CONFIG, PAIRS
from training.tiny import settings_of

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.data.errors import InputError
from rlkernel.models import Decoder, PackedBatch, ScalarModel
from rlkernel.training.batch import TokenBudget
from rlkernel.training.config import OptimizerSettings, RewardModelSettings, resolve
from rlkernel.training.display import Display
from rlkernel.training.model_reward import ModelReward, score_trajectories
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.pairs import sides
from rlkernel.training.reward_model import PairwiseReward, pairwise_loss
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training
from rlkernel.training.supervised import evaluate, update


def test_the_loss_of_the_papers() -> None:
    chosen, rejected = (torch.tensor(v, dtype=torch.float64) for v in ([2.0, -1.0, 30.0], [0.5, 1.0, -30.0]))
    expected = torch.log1p(torch.exp(rejected - chosen))
    torch.testing.assert_close(pairwise_loss(chosen, rejected), expected)
    torch.testing.assert_close(pairwise_loss(chosen, rejected, 1.0), torch.log1p(torch.exp(rejected + 1.0 - chosen)))
    torch.testing.assert_close(pairwise_loss(chosen, rejected, center=0.1), expected + 0.1 * (chosen + rejected) ** 2)


@pytest.mark.parametrize("center", [None, 0.05])
def test_it_learns_and_micro_batches_change_no_bit(center: float | None) -> None:
    def run(budget: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        model = ScalarModel.from_decoder(Decoder.from_config(CONFIG, seed=2, std=0.2))
        optimizer = Optimizer(model, OptimizerSettings(lr=0.003), 8)
        objective = PairwiseReward(model, RewardModelSettings(center_rewards_coefficient=center), "cpu")
        with torch.no_grad():
            scores = model.scores(PackedBatch.from_sequences([s.prompt + s.completion for s in sides(PAIRS)])).tolist()
        steps = [update(objective, optimizer, PAIRS, TokenBudget(budget))[0] for _ in range(8)]
        steps.append(evaluate(objective, PAIRS, TokenBudget(budget)))
        assert_bitwise(
            score_trajectories(model, sides(PAIRS), budget=TokenBudget(budget), device="cpu"),
            score_trajectories(model, sides(PAIRS), budget=TokenBudget(1000), device="cpu"),
            "scores",
        )
        expected = [
            math.log1p(math.exp(r + pair.margin - c)) + (center or 0.0) * (c + r) ** 2
            for pair, c, r in zip(PAIRS, scores[::2], scores[1::2], strict=True)
        ]
        assert math.isclose(steps[0]["loss"], sum(expected) / len(PAIRS), rel_tol=1e-9)
        assert steps[0]["min_reward"] == min(scores) and steps[0]["max_reward"] == max(scores)
        return steps, {key: parameter.detach().clone() for key, parameter in model.named_parameters()}

    (steps, weights), (others, other_weights) = run(1000), run(10)
    assert steps == others
    for key, weight in weights.items():
        assert_bitwise(weight, other_weights[key], key)
    assert steps[-1]["accuracy"] == 1.0 and steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    with ops.stock():  # the control
        plain = lambda: ScalarModel.from_decoder(Decoder.from_config(CONFIG, seed=2, std=0.2))
        objective = PairwiseReward(plain(), RewardModelSettings(), "cpu")
        assert evaluate(objective, PAIRS, TokenBudget(1000)) != evaluate(objective, PAIRS, TokenBudget(10))


def test_a_run_its_files_and_another_run_from_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.steps=12", "train.batch_size=32", "eval.every=6", "warmup.examples=256"]
    settings = settings_of(tmp_path, *words, "eval.rows=32", "optimizer.lr=0.003", algorithm="reward")
    folder = run_training(settings, Display())
    metrics, evals = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    assert {"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= metrics[0].keys()
    assert [row["step"] for row in evals] == [0, 6, 12]
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["pad_token_id"] is not None
    assert "Training of the reward model finished." in (folder / "report.html").read_text(encoding="utf-8")
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i), "margin": i} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model.path": str(folder / "model"), "data.train": str(tmp_path / "pairs.jsonl"), "run.device": "cpu"}
    words = ["train.steps=1", "train.batch_size=4", "data.heldout_rows=0", f"run.output={tmp_path}/second"]
    config["pad_token_id"] = config["eos_token_id"]
    (folder / "model" / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    second = run_training(resolve("reward", options=options, overrides=[*words, "optimizer.lr=1e-30"]))
    assert "transformers reads the value one token early" in capsys.readouterr().out
    reward = ModelReward(folder / "model", "cpu", 16384)
    texts = {"prompts": ["27+85=", "01+01="], "completions": ["211", "300"]}
    assert reward(**texts, completion_ids=[]) == [reward(["27+85="], ["211"])[0], reward(["01+01="], ["300"])[0]]
    with pytest.raises(InputError, match=r"reward model .*tokens, the model's context is 64"):
        reward(["1" * 60], ["1" * 9])
    words = ["train.steps=1", f"rewards=[{{model: {folder}/model, weight: 0.5}}]", f"run.output={tmp_path}/policy"]
    policy = run_training(settings_of(tmp_path, *words, "run.probe_rollouts=0", "reward_pool.in_process=false"))
    assert read_jsonl(policy / "metrics.jsonl")[0]["reward"] != 0.0
    first, again = (ScalarModel.load(place / "model").state_dict() for place in (folder, second))
    assert_bitwise(first["score.weight"], again["score.weight"], "the head is loaded, not drawn again")
