"""Real vLLM inside TRL: 20 steps of GRPO with a difference of exactly 0, and the control, which differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.tiny_model import make_model
from pages import first_lines
from trl_side import vllm_runs

from rlkernel_drift.compare import compare

STEPS = 20
NAMES = {
    "vespo": "loss vespo, importance sampling truncated",
    "gspo": "importance ratio of sequences, KL",
    "filters": "temperature, top-p, top-k, min-p",
    "iterations": "two updates a generation",
    "accumulation": "gradient accumulation and checkpointing",
    "fp32": "fp32 weights",
    "rechecks": "forward for old log-probabilities run again",
    "rloo": "RLOO, KL",
    "whole": "a run with checkpoints",
    "resumed": "a run resumed from a checkpoint",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


def run(model: Path, algorithm: str = "GRPO", **changes: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "model": str(model), "use_vllm": True, **changes}


def assert_exact(result: dict[str, Any], steps: int) -> None:
    assert result["error"] is None, result["error"]
    compared = [row for row in result["history"] if "rlkernel/exact_frac" in row]
    assert len(compared) == steps
    for row in compared:
        assert row["sampling/sampling_logp_difference/max"] == 0
        assert row["rlkernel/exact_frac"] == 1.0 and row["rlkernel/mismatch_tokens"] == 0
        assert row["rlkernel/drift_max"] == 0 and row["rlkernel/fallbacks"] == 0


@pytest.mark.slow
def test_twenty_steps_and_the_control(model: Path, tmp_path: Path, compat: Any) -> None:
    kept = {name: str(tmp_path / name) for name in ("on", "off")}
    on, off = vllm_runs(
        [
            run(model, max_steps=STEPS, capsules=kept["on"]),
            run(model, flag=False, max_steps=STEPS, capsules=kept["off"]),
        ]
    )
    assert_exact(on, STEPS)
    assert sum(row["grad_norm"] > 0 for row in on["history"]) > STEPS / 2
    skipped = [row["rlkernel/old_logps_skipped"] for row in on["history"]]
    assert skipped == [0.0, 0.0] + [1.0] * (STEPS - 2)
    assert off["error"] is None, off["error"]
    drift = [row["sampling/sampling_logp_difference/max"] for row in off["history"]]
    assert len(drift) == STEPS and all(d > 0 for d in drift)
    assert "rlkernel/exact_frac" not in off["history"][0]
    # The same from the capsules of step 10: aligned, and drift of the size that TRL logged.
    verdicts = {name: compare(path, profile="bitwise") for name, path in kept.items()}
    assert verdicts["on"].exit_code == 0 and verdicts["off"].exit_code == 1
    found = verdicts["off"].statistics
    assert found is not None and found.tokens > 0 and found.maximum == pytest.approx(drift[10], rel=1e-4)
    assert verdicts["off"].train is not None and verdicts["off"].train.weights_version == 10
    assert verdicts["off"].rollout is not None and verdicts["off"].rollout.weights_version is None
    compat.exact("TRL", f"vLLM colocate: GRPO, {STEPS} steps", "TRL's forward for old log-probabilities skipped")
    compat.compared("TRL", "control: flag off, steps with a difference", len(drift), len(drift))


@pytest.mark.slow
def test_settings(model: Path, tmp_path: Path, compat: Any) -> None:
    """Other losses, filters, several updates per generation, accumulation, fp32, RLOO; and a resumed run."""
    saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    runs = {
        "vespo": run(model, loss_type="vespo", vllm_importance_sampling_mode="token_truncate"),
        "gspo": run(model, loss_type="grpo", importance_sampling_level="sequence", beta=0.04),
        "filters": run(model, temperature=0.8, top_p=0.8, top_k=40, min_p=0.01, rl_kernel_check_steps=1),
        "iterations": run(model, num_iterations=2, max_steps=4, rl_kernel_check_steps=1),
        "accumulation": run(model, gradient_accumulation_steps=2, gradient_checkpointing=True),
        "fp32": run(model, bf16=False),
        "rechecks": run(model, max_steps=5, rl_kernel_check_steps=1, rl_kernel_recheck_every=2),
        "rloo": run(model, "RLOO", beta=0.02),
        "whole": run(model, **saved),
        "resumed": run(model, max_steps=4, resume=str(tmp_path / "checkpoint-2")),
    }
    short = f'output_dir="{tmp_path / "page"}", max_steps=1, max_completion_length=8, logging_steps=1, report_to="none"'
    lines = {"page": first_lines("trl", model, **{'output_dir="out"': short})}
    *found, page = vllm_runs([*runs.values(), lines])
    assert_exact(page, 1)
    results = dict(zip(runs, found, strict=True))
    for name, result in results.items():
        steps = {"iterations": 2, "rechecks": 5, "whole": 4, "resumed": 4}.get(name, 3)
        assert_exact(result, steps)
        compat.exact("TRL", f"vLLM colocate: {NAMES[name]}")
    skipped = [row["rlkernel/old_logps_skipped"] for row in results["rechecks"]["history"]]
    assert skipped == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert results["whole"]["weights"] == results["resumed"]["weights"]
