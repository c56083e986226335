"""Multi-turn runs on CUDA: the sampled tokens of all turns have the training forward's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training.test_turns import example

from rlkernel.training.config import resolve
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_turns_are_exact_and_resume_to_the_same_bits(
    algorithm: str, tmp_path: Path, record: Callable[..., None]
) -> None:
    (tmp_path / "retry.py").write_text(example())
    words = [f"rewards=['{tmp_path / 'retry.py'}:last_try']", f"rollout.environment={tmp_path / 'retry.py'}:again"]
    words += ["rollout.max_turns=3", "rollout.max_tokens=16", "train.steps=6", "train.save_every=3"]
    options = {"run.device": "cuda", "run.output": str(tmp_path / "run"), "data.task": "arithmetic"}
    folder = run_training(resolve(algorithm, options=options, overrides=words))
    steps = read_jsonl(folder / "metrics.jsonl")
    tokens, mismatches = (sum(row[name] for row in steps) for name in ("tokens", "mismatch_tokens"))
    record(cases=len(steps), tokens=tokens, mismatches=mismatches, model=f"embedded {algorithm}", dtype="bfloat16")
    assert len(steps) == 6 and all(row["exact_frac"] == 1.0 and row["turns"] > 1 for row in steps)
    assert all(row["grad_norm"] > 0 for row in steps)

    weights = (folder / "model" / "model.safetensors").read_bytes()
    settings = resolve(algorithm, file=folder / "config.yaml")
    run_training(settings, resume=folder / "checkpoints" / "step-00000003")
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
