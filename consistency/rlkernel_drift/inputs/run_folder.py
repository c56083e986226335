"""Run folders: of `rlkernel train` (metrics.jsonl, samples.jsonl with the bits of both sides), and of captured steps.

A folder of captured steps holds `step-000012/rollout` and `step-000012/train`, capsules, and metrics.jsonl; see
`capture.trl_run`. The last step stands for the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlkernel_drift.capsule import Capsule, Manifest, Sampling, build_capsule, is_capsule, read_capsule
from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs.metrics import Metrics, collect, flatten


def is_run_folder(path: Path) -> bool:
    """Whether a path is a run folder."""
    return (path / "metrics.jsonl").is_file() and ((path / "config.yaml").is_file() or bool(_steps(path)))


def is_pair(path: Path) -> bool:
    """Whether a path holds a capsule of each side."""
    return is_capsule(path / "rollout") and is_capsule(path / "train")


def _steps(path: Path) -> list[Path]:
    return [step for step in sorted(path.glob("step-*")) if is_pair(step)]


def read_run_metrics(path: Path) -> Metrics:
    """The run's own comparisons, a row a step."""
    return collect(path / "metrics.jsonl", [flatten(row) for row in _lines(path / "metrics.jsonl")])


def read_run_folder(path: Path, side: Literal["rollout", "train"]) -> Capsule | None:
    """One side of the tokens that the run kept; None where it kept none.

    Raises:
        DriftError: a line that is not what the trainer writes.
    """
    steps = _steps(path)
    if steps:
        return read_capsule(steps[-1] / side)
    file = path / "samples.jsonl"
    rows = _lines(file) if file.is_file() else []
    if not rows:
        return None
    import yaml

    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")) or {}
        rollout = config.get("rollout", {})
        stream = f"{'recorded' if side == 'rollout' else 'train'}.processed"
        key = "rollout" if side == "rollout" else "training"
        return build_capsule(
            Manifest(
                side=side,
                engine="rlkernel",
                contract=_contract(path),
                sampling=Sampling(
                    temperature=float(rollout.get("temperature", 1.0)),
                    top_k=int(rollout.get("top_k", 0)),
                    top_p=float(rollout.get("top_p", 1.0)),
                    min_p=float(rollout.get("min_p", 0.0)),
                ),
                config={"backend": str(config.get("run", {}).get("backend", ""))},
                vocabulary={str(t["id"]): str(t["text"])[:512] for row in rows for t in row["tokens"]},
            ),
            [[] for _ in rows],
            [[int(token["id"]) for token in row["tokens"]] for row in rows],
            {stream: [[_value(token[key]) for token in row["tokens"]] for row in rows]},
            sequence_ids=list(range(len(rows))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DriftError(f"{file} is not what `rlkernel train` writes: {error!r}") from None


def _contract(path: Path) -> str | None:
    rows = _lines(path / "metrics.jsonl")
    return str(rows[-1]["contract"]) if rows and rows[-1].get("contract") else None


def _value(bits: str) -> float:
    return float(np.frombuffer(bytes.fromhex(bits), ">f4")[0])


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DriftError(f"{path} cannot be read: {error}") from None
