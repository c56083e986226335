"""One page that compares runs: final figures, settings that differ, and the curves of all runs in the same charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.training.config import leaves
from rlkernel.training.pages.charts import Series, number, table
from rlkernel.training.pages.curves import LEARNING, Curve, curves_of, drawable
from rlkernel.training.pages.page import code, page
from rlkernel.training.pages.report import chart_grid, main_figures
from rlkernel.training.run_folder import write_text
from rlkernel.training.runs import Row, Run, read_run

MOST_RUNS = 8


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Writes the page; returns its path.

    Raises:
        InputError: a folder holds no run, there are fewer than 2 or more than 8, or the page cannot be written.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise InputError(f"compare: got {len(folders)} runs; name 2 to {MOST_RUNS} run folders")
    write_text(output, render([read_run(folder) for folder in folders]))
    return output


def render(runs: Sequence[Run]) -> str:
    """The comparison as HTML."""
    names = _names(runs)
    keys = "".join(
        f'<li><span class="key s{i}"></span>{escape(name)} <span class="status {run.status}">{run.status}</span></li>'
        for i, (name, run) in enumerate(zip(names, runs, strict=True), 1)
    )
    header = f'<h1>Comparison of {len(runs)} runs</h1><ul class="legend runs">{keys}</ul>'
    body = [_figures(runs, names), _differences(runs, names), _curves(runs, names)]
    contracts = ", ".join(sorted({str(run.summary["contract"]) for run in runs}))
    return page(
        f"Comparison of {', '.join(names)}", header, body, f"rlkernel, contract {escape(contracts)}.", wide=True
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names, or their paths where two are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _figures(runs: Sequence[Run], names: Sequence[str]) -> str:
    facts = [
        {
            "algorithm": run.summary["algorithm"],
            "backend": run.summary["backend"],
            "model": run.summary["model"],
            "device": run.summary["device"],
            "contract": run.summary["contract"],
            "started": (run.summary["started"] or "–")[:19].replace("T", " "),
            **main_figures(run),
            "largest difference (nats)": number(run.summary.get("max_abs_diff")),
            "peak memory (MiB)": number(round(max((r.get("memory_mib") or 0.0 for r in run.metrics), default=0.0))),
        }
        for run in runs
    ]
    rows = [[escape(key), *(escape(str(f.get(key, "–"))) for f in facts)] for key in _union(facts)]
    return "<h2>Figures</h2>" + table("Figures of the runs", ["", *names], rows)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    flat = [dict(leaves(run.settings)) for run in runs]
    keys = [key for key in _union(flat) if key != "run.output" and any(f.get(key) != flat[0].get(key) for f in flat)]
    rows = [[code(key), *(code(f.get(key)) for f in flat)] for key in keys]
    if not rows:
        return '<h2>Settings that differ</h2><p class="lead">None, except the run folder.</p>'
    return "<h2>Settings that differ</h2>" + table("Settings that differ", ["setting", *names], rows)


def _union(dicts: Sequence[Row]) -> list[str]:
    """All keys in the order of their first occurrence."""
    return list(dict.fromkeys(key for one in dicts for key in one))


def _curves(runs: Sequence[Run], names: Sequence[str]) -> str:
    logs = [drawable(run.metrics, run.summary["algorithm"]) for run in runs]
    evals = [drawable(run.evals, run.summary["algorithm"]) for run in runs]
    curves, _ = curves_of([*logs, *evals])
    heldout: dict[str, str] = {}
    split = []  # one chart per metric, because the lines of a chart are the runs
    for curve in curves:
        for metric, label in curve.lines.items():
            title = label if len(curve.lines) == 1 or label.startswith("pass@") else f"{curve.title}: {label}"
            if any(metric in row for log in evals for row in log):
                key = f"eval/{metric}"
                heldout[key] = metric
                split.append(
                    Curve(f"Held-out {title[0].lower()}{title[1:]}", curve.unit, LEARNING, {key: ""}, curve.low)
                )
            if any(metric in row for log in logs for row in log):
                split.append(Curve(title, curve.unit, curve.section, {metric: ""}, curve.low))

    def lines(curve: Curve) -> list[Series]:
        (metric,) = curve.lines
        rows, key = (evals, heldout[metric]) if metric in heldout else (logs, metric)
        found = []
        for i, (name, log) in enumerate(zip(names, rows, strict=True), 1):
            points: list[tuple[Any, Any]] = [(row["step"], row[key]) for row in log if key in row]
            if points:
                found.append(Series(name, points, f"s{i}", marks=metric in heldout))
        return found

    return chart_grid(split, lines)
