"""DPO and the reward model against TRL's own trainers: the loss, the metrics and every gradient of one batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from torch import Tensor
from trl_side import PAIRS, PROMPTS, make_trainer

from rlkernel.data.tokenizer import Tokenizer
from rlkernel.models import Backbone, ScalarModel, load_model, save_model
from rlkernel.models.checkpoint import hf_layout
from rlkernel.training.config import DPOSettings, OptimizerSettings, RewardModelSettings
from rlkernel.training.dpo import DPO, pair_logps
from rlkernel.training.encoding import Encoder
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.pairs import Pair
from rlkernel.training.reward_model import PairwiseReward
from rlkernel.training.supervised import update

ROWS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, (chosen, rejected) in zip(PROMPTS, PAIRS, strict=True)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(reference model, policy), whose weights differ a little."""
    reference = make_model(tmp_path_factory.mktemp("reference"))
    model = load_model(reference)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return reference, save_model(model, tmp_path_factory.mktemp("policy") / "model", tokenizer_dir=reference)


def theirs(trainer: Any) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """(loss, metrics, gradients) of TRL's trainer on all its rows."""
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(trainer.train_dataset))])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return float(loss.detach()), metrics, {n: p.grad for n, p in trainer.model.named_parameters()}


def ours(objective: Any, pairs: list[Pair]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, gradients by their names in transformers) of the same rows."""
    optimizer = Optimizer(objective.model, OptimizerSettings(), 1)
    optimizer.step = lambda: objective.model.fold_main_grads()  # type: ignore[assignment,method-assign,return-value]
    metrics, _ = update(objective, optimizer, pairs, 40)
    model: Backbone = objective.model
    parameters = dict(model.named_parameters())
    layout = hf_layout(model.config, model.head)
    return metrics, {p.name: parameters[p.parameter].main_grad.narrow(0, p.start, p.rows) for p in layout}  # type: ignore[attr-defined]


def pairs_of(folder: Path, model: Backbone, rows: list[dict[str, Any]]) -> list[Pair]:
    encoder = Encoder(model.config, Tokenizer(folder), max_tokens=0)
    return [Pair(*encoder.preference(row)) for row in rows]


def assert_equal(mine: tuple[dict[str, float], dict[str, Tensor]], other: tuple[Any, ...]) -> None:
    (metrics, gradients), (loss, their_metrics, their_gradients) = mine, other
    assert math.isclose(metrics.pop("loss"), loss, rel_tol=1e-4)
    for name, value in metrics.items():
        assert math.isclose(value, their_metrics[name], rel_tol=1e-3, abs_tol=1e-4), name
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=2e-3, atol=2e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (DPOSettings(beta=0.2), {}),
        (DPOSettings(beta=0.2, loss="ipo"), {"loss_type": ["ipo"]}),
        # TRL smooths labels in `aot`, which with one pair has nothing to sort and is conservative DPO.
        (DPOSettings(beta=0.2, label_smoothing=0.1), {"loss_type": ["aot"], "label_smoothing": 0.1}),
    ],
)
def test_dpo(folders: tuple[Path, Path], settings: DPOSettings, changes: dict[str, Any]) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    reference, policy = folders
    rows = ROWS[1:2] if settings.label_smoothing else ROWS
    extra = {"train_dataset": Dataset.from_list(rows), "ref_model": AutoModelForCausalLM.from_pretrained(reference)}
    trainer = make_trainer("DPO", policy, package=trl, trainer=extra, beta=0.2, bf16=False, **changes)
    model = load_model(policy)
    pairs = pairs_of(policy, model, rows)
    with torch.no_grad():
        logps = pair_logps(load_model(reference), pairs, "cpu").tolist()
    pairs = [replace(pair, reference=(c, r)) for pair, (c, r) in zip(pairs, logps, strict=True)]
    mine = ours(DPO(model, settings, "cpu"), pairs)
    assert abs(mine[0]["rewards/margins"]) > 0.01, "the models differ"
    assert_equal(mine, theirs(trainer))


@pytest.mark.parametrize("center", [None, 0.1])
def test_reward_model(folders: tuple[Path, Path], tmp_path: Path, center: float | None) -> None:
    """TRL trains the directory that we saved."""
    import trl
    from datasets import Dataset

    model = ScalarModel.from_decoder(load_model(folders[0]), seed=5)
    saved = save_model(model, tmp_path / "reward", tokenizer_dir=folders[0])
    rows = [{**row, "margin": 0.5 * i} for i, row in enumerate(ROWS)]
    extra = {"train_dataset": Dataset.from_list(rows)}
    trainer = make_trainer(
        "Reward", saved, package=trl, trainer=extra, center_rewards_coefficient=center, bf16=False, disable_dropout=True
    )
    pairs = [replace(pair, margin=0.5 * i) for i, pair in enumerate(pairs_of(saved, model, rows))]
    objective = PairwiseReward(model, RewardModelSettings(center_rewards_coefficient=center), "cpu")
    assert_equal(ours(objective, pairs), theirs(trainer))
