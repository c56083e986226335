"""Run folders of `rlkernel train` (metrics.jsonl, samples.jsonl) and of captured steps (`capture.trl_run`).

Captured steps are capsules in `step-000012/rollout` and `step-000012/train`; the last step is compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlkernel_drift.capsule import Capsule, Manifest, Sampling, build_capsule, is_capsule, read_capsule
from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs.metrics import Metrics, collect, flatten, json_lines


def is_run_folder(path: Path) -> bool:
    """Whether a path is a run folder."""
    return (path / "metrics.jsonl").is_file() and ((path / "config.yaml").is_file() or bool(_steps(path)))


def is_pair(path: Path) -> bool:
    """Whether a path holds a capsule of each side."""
    return is_capsule(path / "rollout") and is_capsule(path / "train")


def _steps(path: Path) -> list[Path]:
    return [step for step in step_folders(path) if is_pair(step)]


def step_folders(path: Path) -> list[Path]:
    """Folders of captured steps, also incomplete ones, in the order of their numbers."""
    named = [(found, step) for step in path.glob("step-*") if (found := re.fullmatch(r"step-(\d{1,18})", step.name))]
    return [step for found, step in sorted(named, key=lambda item: (int(item[0][1]), item[1].name))]


def read_run_metrics(path: Path) -> Metrics:
    """The comparisons that the run logged, one row per step."""
    rows, cut = _lines(path / "metrics.jsonl")
    metrics = collect(path / "metrics.jsonl", [(place, flatten(row)) for place, row in rows])
    metrics.cut = cut
    return metrics


def read_run_folder(path: Path, side: Literal["rollout", "train"]) -> Capsule | None:
    """One side of the tokens that the run saved; None if it saved none.

    Raises:
        DriftError: a line is not in the trainer's format.
    """
    steps = _steps(path)
    if steps:
        last = step_folders(path)[-1]
        if last != steps[-1]:
            lost = [name for name in ("rollout", "train") if not is_capsule(last / name)]
            raise DriftError(
                f"{last} has no capsule {' and '.join(lost)}, because the run was stopped while writing. Remove "
                f"the folder, or name {steps[-1]}"
            )
        return read_capsule(steps[-1] / side)
    file = path / "samples.jsonl"
    rows = [row for _, row in _lines(file)[0]] if file.is_file() else []
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
            ranks=_ranks(path, [int(row["step"]) for row in rows]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DriftError(f"{file} is not in the format of `rlkernel train`: {error!r}") from None


def _ranks(path: Path, steps: list[int]) -> list[int] | None:
    """The rank of each row: `rlkernel train` deals prompts to ranks in turn, and saves the first ones of a step."""
    facts = path / "run.json"
    count = json.loads(facts.read_text(encoding="utf-8")).get("ranks", 1) if facts.is_file() else 1
    if count == 1:
        return None
    seen: Counter[int] = Counter()
    ranks = []
    for step in steps:
        ranks.append(seen[step] % count)
        seen[step] += 1
    return ranks


def _contract(path: Path) -> str | None:
    rows, _ = _lines(path / "metrics.jsonl")
    return str(rows[-1][1]["contract"]) if rows and rows[-1][1].get("contract") else None


def _value(bits: str) -> float:
    return float(np.frombuffer(bytes.fromhex(bits), ">f4")[0])


def _lines(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    try:
        rows, cut = json_lines(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DriftError(f"{path} cannot be read: {error}") from None
    for place, row in rows:
        if not isinstance(row, dict):
            raise DriftError(f"{path}, {place} is not a JSON object")
    return rows, cut
