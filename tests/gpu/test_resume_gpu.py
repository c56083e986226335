"""A resumed run on a GPU equals an uninterrupted one: weights, metrics, samples, evaluations, byte for byte.

Able to fail: with one second moment changed, the weights differ.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training.test_checkpoint_of_runs import assert_same
from training.tiny import settings_of

from rlkernel.training import checkpoint
from rlkernel.training.config import Settings
from rlkernel.training.session import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPU = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
STEPS = ("run.device=cuda", "train.steps=6", "optimizer.lr=0.001", "loss.kl_coef=0.1", "train.minibatches=2",
         "eval.every=2", "warmup.steps=2", "warmup.examples=32", "warmup.batch_size=8")  # fmt: skip


@pytest.mark.parametrize("algorithm", ("grpo", "ppo"))
def test_a_resumed_run_equals_an_uninterrupted_one(
    algorithm: str, tmp_path: Path, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(folder: str) -> Settings:
        (tmp_path / folder).mkdir()
        return settings_of(
            tmp_path / folder, "train.save_every=2", "train.keep_last=9", *STEPS, algorithm=algorithm, **GPU
        )

    whole = run_training(settings("whole"))
    cut = tmp_path / "cut" / "run"
    made = settings("cut")
    shutil.copytree(whole, cut)
    assert_same(run_training(made, resume=cut / "checkpoints" / "step-00000002"), whole)

    load = checkpoint.load

    def changed(path: Path) -> checkpoint.Checkpoint:
        found = load(path)
        moment = next(t for name, t in found.tensors["optimizer"].items() if name.endswith("exp_avg_sq"))
        moment += 1e-3
        return found

    monkeypatch.setattr(checkpoint, "load", changed)
    run_training(made, resume=cut / "checkpoints" / "step-00000002")
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (cut, whole))
    assert any(not torch.equal(weights[name], others[name]) for name in weights)
    record(
        cases=1, elements=sum(weight.numel() for weight in weights.values()), mismatches=0, model=f"tiny {algorithm}"
    )
