"""Reads run folders: finished, stopped, failed, killed or still running."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlkernel.data.errors import InputError
from rlkernel.training.run_folder import CONFIG, FACTS, SUMMARY, is_locked, read_jsonl

SAMPLE_BYTES = 4 << 20
_SCORES = {"sft": ("loss", "loss"), "dpo": ("accuracy", "rewards/accuracies"), "reward": ("accuracy", "accuracy")}
Row = dict[str, Any]
Status = Literal["finished", "stopped", "failed", "killed", "running"]


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say.

    Attributes:
        status: finished; stopped by a signal after a checkpoint; failed with an error; killed without a chance to write
            a summary; or running.
        settings: nested, as in config.yaml.
        config: text of config.yaml.
        summary: `summary.json`, or the same totals computed from the logs if the run did not write it.
        metrics, evals: all rows.
        samples: the last rows.
    """

    folder: Path
    status: Status
    settings: Row
    config: str
    summary: Row
    metrics: list[Row]
    evals: list[Row]
    samples: list[Row]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.absolute().name

    @property
    def planned(self) -> int:
        """Number of steps of the complete run."""
        return int(self.settings["train"]["steps"])

    @property
    def score(self) -> str:
        """What the held-out figures are: reward, loss or accuracy."""
        return score_of(self.summary["algorithm"])[0]

    @property
    def exact(self) -> bool:
        """Whether the run compares rollout and training."""
        return "mismatch_tokens" in self.summary


class NoRunError(InputError):
    """A folder is not that of a run."""


def read_run(folder: Path) -> Run:
    """Reads a run folder in any state.

    Raises:
        InputError: it is not a run folder, or it has no settings yet.
    """
    try:
        config = (folder / CONFIG).read_text(encoding="utf-8")
        settings = yaml.safe_load(config)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        settings = None
    sections = ("train", "run", "model")
    known = isinstance(settings, dict) and "algorithm" in settings
    if not known or not all(isinstance(settings.get(name), dict) for name in sections):
        raise NoRunError(f"{folder} is not a run folder: it has no {CONFIG} with the settings of a run")
    if not isinstance(settings["train"].get("steps"), int):
        raise InputError(f"{folder / CONFIG}: train.steps is {settings['train'].get('steps')!r}; expected a number")
    metrics, evals = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    samples = read_jsonl(folder / "samples.jsonl", SAMPLE_BYTES)
    facts, summary = _read_object(folder / FACTS), _read_object(folder / SUMMARY)
    # A run that was resumed after it had stopped has the summary of its earlier part.
    complete = bool(summary) and facts.get("started", summary.get("started")) == summary.get("started")
    status: Status
    if complete:
        status = "finished" if summary["steps"] >= settings["train"]["steps"] else "stopped"
    else:
        status = "failed" if "error" in facts else "running" if is_locked(folder) else "killed"
        summary = _totals(folder, settings, facts, metrics, evals)
    return Run(folder, status, settings, config, summary, metrics, evals, samples)


def find_runs(place: Path) -> tuple[list[Run], list[str]]:
    """(all runs below a folder, or the folder's own, by time of their start; why others cannot be read)."""
    if not place.is_dir():
        raise InputError(f"runs: {place} is not a folder; give one that holds run folders")
    runs, damaged, folders = list[Run](), list[str](), [place]
    while folders:
        folder = folders.pop()
        try:
            runs.append(read_run(folder))
        except NoRunError:
            folders += [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except InputError as error:
            damaged.append(str(error))
    return sorted(runs, key=lambda run: (run.summary.get("started") or "", str(run.folder))), damaged


def score_of(algorithm: str) -> tuple[str, str]:
    """What the held-out figures of an algorithm are called, and their field in `eval.jsonl`."""
    return _SCORES.get(algorithm, ("reward", "reward"))


def _read_object(path: Path) -> Row:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _totals(folder: Path, settings: Row, facts: Row, metrics: list[Row], evals: list[Row]) -> Row:
    """The summary of a run that has not written it."""
    algorithm = settings["algorithm"]
    score = score_of(algorithm)[1]
    path = settings["model"]["path"]
    summary = {
        "name": folder.absolute().name,
        "algorithm": algorithm,
        "backend": settings["run"]["backend"],
        "contract": metrics[-1]["contract"] if metrics else None,
        "device": settings["run"]["device"],
        "seed": settings["run"]["seed"],
        "model": path or f"from scratch for {settings['data']['task']}",
        "threads": None,
        "command": None,
        "started": None,
        "environment": {"hardware": None, "versions": {}},
        **facts,
        "steps": metrics[-1]["step"] if metrics else 0,
        "tokens": sum(row.get("tokens") or 0 for row in metrics),
        "heldout_before": evals[0].get(score) if evals else None,
        "heldout_after": evals[-1].get(score) if evals else None,
        "seconds": math.fsum(row.get("seconds") or 0.0 for row in metrics),
    }
    if any("mismatch_tokens" in row for row in metrics):
        wrong = sum(row.get("mismatch_tokens") or 0 for row in metrics)
        summary |= {
            "mismatch_tokens": wrong,
            "exact_frac": 1 - wrong / max(1, summary["tokens"]),
            "max_abs_diff": max(row.get("max_abs_diff") or 0.0 for row in metrics),
            "probe": _probe(folder / "checkpoints"),
        }
    return summary


def _probe(checkpoints: Path) -> list[Row]:
    """Results of the control rollouts up to the newest checkpoint."""
    try:
        newest = (checkpoints / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return []
    found: list[Row] = _read_object(checkpoints / newest / "state.json").get("progress", {}).get("probe", [])
    return found
