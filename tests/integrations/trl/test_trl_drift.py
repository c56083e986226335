"""Capsules of TRL runs: rlkernel's are aligned bit for bit, TRL's own with other rollout values drift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.tiny_model import make_model
from trl_side import history, make_trainer

from rlkernel_drift.capsule import read_capsule
from rlkernel_drift.capture.trl_run import record
from rlkernel_drift.cli.main import main
from rlkernel_drift.errors import DriftError
from rlkernel_drift.verdict import Verdict


def judged(*inputs: Path, options: tuple[str, ...] = ()) -> tuple[int, Verdict]:
    out = inputs[0] / "verdict.json"
    code = main(["compare", *map(str, inputs), *options, "--json", str(out)])
    return code, Verdict.model_validate_json(out.read_text())


def test_our_run_is_aligned(tmp_path: Path) -> None:
    trainer = make_trainer("GRPO", make_model(tmp_path / "model", head_dim=32), engine=True, top_p=0.9, max_steps=3)
    record(trainer, tmp_path / "run", every=2)
    trainer.train()
    assert len(history(trainer)) == 3
    steps = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert steps == ["step-000000", "step-000002"]
    train = read_capsule(tmp_path / "run" / steps[1] / "train")
    assert train.sequences == 4 and train.manifest.weights is not None and train.manifest.weights.version == 2
    assert train.manifest.sampling.top_p == 0.9 and train.manifest.vocabulary
    code, verdict = judged(tmp_path / "run")
    assert code == 0 and verdict.profile == "bitwise"
    assert verdict.statistics is not None and verdict.statistics.equal == 1
    assert verdict.statistics.tokens == train.mask.sum() > 0
    assert next(trend.metric for trend in verdict.trends) == "tokens.mean"
    assert judged(tmp_path / "run" / "step-000000")[0] == 0


def test_a_stock_run_with_other_numbers_drifts(tmp_path: Path) -> None:
    import trl

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Values that no model computed, with a top-p that TRL's forward ignores."""
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * len(ids), "logprobs": [[-0.5] * 3] * len(ids)}

    model = make_model(tmp_path / "model", head_dim=32)
    trainer = make_trainer("GRPO", model, False, package=trl, max_steps=1, top_p=0.9, trainer={"rollout_func": rollout})
    record(trainer, tmp_path / "run", text=False)
    trainer.train()
    code, verdict = judged(tmp_path / "run")
    assert code == 4 and "top-p" in verdict.headline
    assert verdict.rollout is not None and verdict.rollout.weights_version is None
    assert verdict.train is not None and verdict.train.weights_version == 0
    code, verdict = judged(tmp_path / "run", options=("--keep-going",))
    assert verdict.statistics is not None and verdict.statistics.mean > 0.1 and verdict.statistics.tokens == 12
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["sampling/sampling_logp_difference/mean"] == pytest.approx(verdict.statistics.mean)
    assert not read_capsule(tmp_path / "run" / "step-000000" / "train").manifest.vocabulary


def test_other_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DriftError, match="_compute_loss"):
        record(object(), tmp_path)
