"""`rlkernel train grpo data.task=shapes`: exact in each step, images encoded once per group; the control differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.tiny import parts_of, trainer_of

from rlkernel import ops
from rlkernel.data.errors import InputError
from rlkernel.models.vision_decoder import VisionDecoder
from rlkernel.training.config import resolve

WORDS = [
    *("data.task=shapes", "rollout.prompts=6", "rollout.group_size=4", "train.micro_batch_tokens=256"),
    *("eval.rows=4", "run.device=cpu", "train.steps=2"),
]


def run(folder: Path, *words: str) -> tuple[list[dict[str, Any]], Any]:
    folder.mkdir(exist_ok=True)
    settings = resolve("grpo", options={"run.output": str(folder / "run")}, overrides=[*WORDS, *words])
    trainer, opened = trainer_of(settings, folder)
    with opened, ops.stock(settings.run.backend == "torch"):
        return [trainer.step(step)[0] for step in (1, 2)], trainer


def test_every_step_is_exact(tmp_path: Path) -> None:
    rows, trainer = run(tmp_path / "a")
    model = trainer.model
    assert isinstance(model, VisionDecoder) and sum(p.numel() for p in model.parameters()) < 4_000_000
    for row in rows:
        assert row["exact_frac"] == 1.0 and row["tokens"] > 24
    # per step: 6 images in the rollout, and again with gradients, in as many micro-batches as hold their groups
    assert 2 * 12 <= model.media.stats.computed <= 2 * 18
    stock, _ = run(tmp_path / "b", "run.backend=torch")
    assert any(row["exact_frac"] < 1 for row in stock)


def test_several_updates_and_a_reference_policy(tmp_path: Path) -> None:
    """Scoring before the updates, and a frozen copy of the encoder."""
    rows, _ = run(tmp_path / "a", "train.minibatches=2", "loss.kl_coef=0.1")
    assert all(row["exact_frac"] == 1.0 for row in rows) and rows[1]["kl_ref"] > 0


@pytest.mark.parametrize(
    ("algorithm", "words", "named"),
    (
        ("ppo", [], "rlkernel train ppo"),
        ("grpo", ["model.tp_leaves=2"], "model.tp_leaves"),
    ),
)
def test_what_images_do_not_have_is_refused(tmp_path: Path, algorithm: str, words: list[str], named: str) -> None:
    given = [word for word in WORDS if algorithm == "grpo" or "micro" not in word]
    settings = resolve(algorithm, options={"run.output": str(tmp_path / "run")}, overrides=[*given, *words])
    with pytest.raises(InputError, match=f"{named} with a vision-language model is not supported"):
        parts_of(settings, tmp_path)
