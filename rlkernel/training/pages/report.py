"""Writes `report.html` from the files of a run folder: verdict in words, curves, drift, samples, settings."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from rlkernel.data.errors import InputError
from rlkernel.training.pages.charts import LARGE, SMALL, Series, line_chart, number, running_mean, table
from rlkernel.training.pages.curves import LEARNING, Curve, curves_of, drawable
from rlkernel.training.pages.page import code, figures, page, show
from rlkernel.training.run_folder import FACTS, RunFolder, to_json, write_text
from rlkernel.training.runs import Row, Run, read_run

SAMPLE_ROWS = 24
SMOOTHED = 30  # windows of the running mean in a chart
_FINISHED = {
    "sft": "Supervised training finished.",
    "dpo": "DPO finished.",
    "reward": "Training of the reward model finished.",
}


def verdict(run: Run) -> tuple[str, str, str]:
    """(class, headline, sentence) of a run: "good", "bad" or "plain"."""
    summary = run.summary
    tokens, steps = summary.get("tokens", 0), summary["steps"]
    learnt = _learnt(run)
    if not run.exact:
        headline = _FINISHED.get(summary["algorithm"], "Training finished.")
        if run.status != "finished":
            headline = f"{summary['algorithm'].upper()}: {steps:,} of {run.planned:,} steps."
        return "plain", headline, f"It trained on {tokens:,} completion tokens in {steps:,} steps.{learnt}"
    if not tokens:
        return "plain", "Nothing was compared.", f"No completion token was sampled in this run.{learnt}"
    wrong = summary["mismatch_tokens"]
    if wrong == 0:
        sentence = (
            f"All {tokens:,} tokens sampled in {steps:,} steps have the same log-probability, bit for bit, "
            f"in the rollout and in the training forward, which computed it independently.{learnt}"
        )
        return "good", "Rollout and training agree to the last bit.", sentence
    share = 100 * wrong / tokens
    sentence = (
        f"{wrong:,} of the {tokens:,} tokens sampled in {steps:,} steps ({share:.3g} %) have a different "
        f"log-probability in the training forward, by up to {number(summary.get('max_abs_diff'))} nats.{learnt}"
    )
    if summary["backend"] == "torch":
        return "plain", "On stock torch ops, rollout and training drift apart.", sentence
    return "bad", "Rollout and training disagree.", sentence


def _learnt(run: Run) -> str:
    before, after = run.summary.get("heldout_before"), run.summary.get("heldout_after")
    if before is None or after is None:
        return ""
    verb = "stayed at" if before == after else "rose from" if after > before else "fell from"
    change = number(after) if before == after else f"{number(before)} to {number(after)}"
    return f" The held-out {run.score} {verb} {change} in {run.summary['seconds']:.0f} s."


def notice(run: Run) -> str:
    """What a run that did not finish has to say; empty for a finished one."""
    step, planned = run.summary["steps"], run.planned
    resume = f"rlkernel train {run.summary['algorithm']} --resume {shlex.quote(str(run.folder))}"
    has_checkpoint = (run.folder / "checkpoints" / "latest").exists()
    remedy = f"Continue from the newest checkpoint: <code>{escape(resume)}</code>" if has_checkpoint else (
        "It has no checkpoint to continue from (train.save_every)."
    )  # fmt: skip
    if run.status == "finished":
        return ""
    if run.status == "running":
        return f"The run is in progress: step {step:,} of {planned:,} when this page was written."
    if run.status == "stopped":
        return f"The run was stopped by a signal after step {step:,} of {planned:,}. {remedy}"
    if run.status == "failed":
        return f"The run failed after step {step:,} of {planned:,}: {show(run.summary['error'])} {remedy}"
    return (
        f"The run is incomplete: its process was killed after step {step:,} of {planned:,}, before it could write its "
        f"summary. The figures below are computed from its logs. {remedy}"
    )


def chart_grid(curves: Sequence[Curve], lines_of: Callable[[Curve], list[Series]], prefix: str = "c") -> str:
    """Sections of charts.

    Args:
        lines_of: the series of a curve.
        prefix: of the ids, different for each grid of a page.
    """
    parts, key = [], 0
    for section, group in groupby(curves, key=lambda curve: curve.section):
        size, kind = (LARGE, "charts") if section == LEARNING else (SMALL, "charts small")
        charts = ""
        for curve in group:
            key += 1
            lines = lines_of(curve)
            charts += line_chart(
                f"{prefix}{key}",
                curve.title,
                lines,
                x_name="step",
                y_name=curve.unit,
                low=_low(curve, lines),
                size=size,
            )
        parts.append(f'<h2>{section}</h2><div class="{kind}">{charts}</div>')
    return "".join(parts)


def _low(curve: Curve, lines: Sequence[Series]) -> float | None:
    if "reward" in curve.lines and all(y >= 0 for line in lines for _, y in line.finite):
        return 0.0
    return curve.low


def _curves(run: Run) -> tuple[str, str]:
    """(charts of the first section, all others) as HTML."""
    metrics = drawable(run.metrics, run.summary["algorithm"])
    evals = drawable(run.evals, run.summary["algorithm"])
    curves, constant = curves_of([metrics, evals])

    def lines(curve: Curve) -> list[Series]:
        found = []
        for i, (name, label) in enumerate(curve.lines.items(), 1):
            trained = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
            heldout = [(row["step"], row[name]) for row in evals if row.get(name) is not None]
            if len(curve.lines) > 1:
                other = ", held out" if trained else ""
                found += [Series(label, trained, f"s{i}")] if trained else []
                found += [Series(f"{label}{other}", heldout, f"s{i}", marks=True)] if heldout else []
                continue
            window = len(trained) // SMOOTHED
            is_smoothed = curve.section == LEARNING and window >= 3
            if trained:
                found.append(Series("training, each step", trained, "muted" if heldout or is_smoothed else "one"))
            if is_smoothed:
                found.append(Series(f"training, mean of {window} steps", running_mean(trained, window), "one"))
            if heldout:
                found.append(Series("held out", heldout, "two" if is_smoothed else "one", marks=True))
        return found

    if not curves:
        return '<h2>Learning</h2><p class="lead">No data in this run.</p>', ""
    note = ", ".join(f"{escape(name)} = {number(value)}" for name, value in constant.items())
    constants = f'<p class="unit">Constant in this run: {note}.</p>' if note else ""
    first = [curve for curve in curves if curve.section == LEARNING]
    rest = curves[len(first) :]
    return chart_grid(first, lines), chart_grid(rest, lines, "d") + constants


def _drift(run: Run) -> str:
    probe, backend = run.summary.get("probe", []), run.summary["backend"]
    on = [m for m in run.metrics if m.get("tokens")]
    first = ("rlkernel, each step", "one") if backend == "rlkernel" else ("stock torch, each step", "two")
    charts = ""
    for key, field, title, unit in (
        ("difference", "max_abs_diff", "Largest difference", "nats between rollout and training forward"),
        ("mismatches", "mismatch_tokens", "Tokens that differ", "sampled tokens with different bits per step"),
    ):
        lines = [Series(first[0], [(m["step"], m[field]) for m in on], first[1])]
        if probe:
            points = [(row["step"], row[field]) for row in probe]
            lines.append(Series("stock torch, control rollouts", points, "two", marks=True))
        charts += line_chart(key, title, lines, x_name="step", y_name=unit, low=0.0)
    if backend == "torch":
        text = "This is the control arm: the same run with every op on stock torch. Its drift is what rlkernel removes."
    elif probe:
        text = (
            "The control: after some steps the same prompts were sampled and scored again, with the same weights and "
            "every op on stock torch. These rollouts were only measured, not trained on."
        )
    elif run.settings["run"]["probe_rollouts"]:
        text = "The results of the control rollouts are added when the run ends or is stopped."
    else:
        text = "This run has no control rollouts (run.probe_rollouts=0). --backend torch runs the control arm."
    return f'<h2 id="drift">Drift, on and off</h2><p class="lead">{text}</p><div class="charts">{charts}</div>'


def _samples(run: Run) -> str:
    parts = ['<h2 id="samples">Samples</h2>']
    with_texts = [e for e in run.evals if e.get("samples")]
    if len(with_texts) >= 2:
        first, final = with_texts[0], with_texts[-1]
        rows = [
            [show(a["prompt"]), *(cell for s in (a, b) for cell in (_turns(s["completion"]), number(s["reward"])))]
            for a, b in list(zip(first["samples"], final["samples"], strict=True))[:SAMPLE_ROWS]
        ]
        head = ["prompt", "before", "reward", "after", "reward"]
        parts += ["<h3>Held-out prompts, before and after</h3>", table("Held-out samples", head, rows)]
    samples = run.samples[-SAMPLE_ROWS:]
    if samples:
        is_graded = "reward" in samples[-1]
        texts = [name for name in ("prompt", "completion", "chosen", "rejected") if name in samples[-1]]
        fields = [name for name in ("step", "reward", "advantage") if name in samples[-1]] if is_graded else []
        extra = list(dict.fromkeys(name for s in samples for name in s.get("extra", {})))
        rows = [
            [
                *(_turns(s[name]) if name == "completion" else show(s[name]) for name in texts),
                *(number(s[name]) for name in fields),
                *(show(s.get("extra", {}).get(name, "")) for name in extra),
            ]
            for s in samples
        ]
        title = "Last training completions" if is_graded else "Examples that were trained on"
        parts += [f"<h3>{title}</h3>", table(title, [*texts, *fields, *extra], rows)]
        parts.append(_tokens(samples[-1]))
    return "".join(parts) if len(parts) > 1 else ""


def _turns(completion: str | list[Row]) -> str:
    """A completion as HTML; observations of an environment begin with their role."""
    if isinstance(completion, str):
        return show(completion)
    role = lambda message: "" if message["role"] == "assistant" else f"<em>{escape(message['role'])}:</em> "
    return "<br>".join(role(message) + show(message["content"]) for message in completion)


def _tokens(sample: Row) -> str:
    rows = []
    for t in sample.get("tokens", []):
        bits = [f"<code>{t[side]}</code>" for side in ("rollout", "training")]
        equal = "same" if t["rollout"] == t["training"] else "<strong>differs</strong>"
        rows.append([show(t["text"]), str(t["id"]), *bits, number(t["logp"]), equal])
    head = ["token", "id", "bits in the rollout", "bits in training", "log-probability", ""]
    caption = "Bits of one completion's log-probabilities"
    return f"<h3>One completion, token by token</h3>{table(caption, head, rows)}" if rows else ""


def _provenance(run: Run) -> str:
    summary = run.summary
    environment = summary["environment"]
    facts = [
        ("contract", summary["contract"]),
        ("backend", summary["backend"]),
        ("device", ", ".join(str(part) for part in (summary["device"], environment["hardware"]) if part)),
        ("threads", summary["threads"]),
        ("model", summary["model"]),
        ("seed", summary["seed"]),
        ("started", summary["started"]),
        *environment["versions"].items(),
    ]
    rows = [[escape(name), code(value)] for name, value in facts]
    command = f'<p class="lead">Command: {code(summary["command"])}</p>' if summary["command"] else ""
    return (
        f'<h2 id="provenance">Reproduction</h2>{command}'
        + table("Versions", ["what", "value"], rows)
        + f"<details><summary>Settings (config.yaml)</summary><pre>{escape(run.config)}</pre></details>"
    )


def _seconds(metrics: list[Row]) -> str:
    names = ("rollout", "reward", "score", "forward", "backward", "optimizer")
    sums = {name: sum(m.get(f"seconds_{name}") or 0.0 for m in metrics) for name in names}
    total = sum(m.get("seconds") or 0.0 for m in metrics)
    if not any(sums.values()):
        return ""
    sums["other"] = max(0.0, total - sum(sums.values()))
    ms = 1000 / len(metrics)
    rows = [[name, f"{ms * value:.1f}", f"{100 * value / total:.0f} %"] for name, value in sums.items() if value]
    return '<h2 id="time">Time per step</h2>' + table("Time per step", ["part", "ms per step", "share"], rows)


def main_figures(run: Run) -> dict[str, str]:
    """The figures in the boxes at the top, and in the comparison of runs."""
    summary, score = run.summary, run.score
    values: dict[str, str] = {
        f"held-out {score} before": number(summary.get("heldout_before")),
        f"held-out {score} after": number(summary.get("heldout_after")),
    }
    for name in run.evals[-1] if run.evals else ():
        if name.startswith("pass@"):
            values[f"{name} after"] = number(run.evals[-1][name])
    if run.exact:
        values["exact fraction"] = number(summary["exact_frac"])
        values["mismatching tokens"] = number(summary["mismatch_tokens"])
    if summary.get("dropped"):
        values["dropped completions"] = number(sum(summary["dropped"].values()))
    speeds = [row["tokens_per_s"] for row in run.metrics if row.get("tokens_per_s")]
    values["steps"] = f"{summary['steps']:,}/{run.planned:,}"
    values["tokens"] = number(summary.get("tokens"))
    values["tokens/s"] = number(round(sorted(speeds)[len(speeds) // 2])) if speeds else "–"
    values["seconds"] = number(round(summary["seconds"], 1))
    return values


def render(folder: Path) -> str:
    """The report of a run folder as HTML."""
    run = read_run(folder)
    kind, headline, sentence = verdict(run)
    message = notice(run)
    header = (
        f'<h1>{escape(run.name)} <span class="status {run.status}">{run.status}</span></h1>'
        f'<p class="verdict {kind}">{escape(headline)}</p><p class="lead">{escape(sentence)}</p>'
        + (f'<p class="notice {run.status}">{message}</p>' if message else "")
        + figures(main_figures(run))
    )
    learning, rest = _curves(run)
    drift = _drift(run) if run.exact else ""
    body = [learning, drift, rest, _seconds(run.metrics), _samples(run), _provenance(run)]
    version = run.summary["environment"]["versions"].get("rlkernel", "")
    footer = f"rlkernel {escape(version)}, contract {escape(str(run.summary['contract'] or '–'))}."
    return page(f"{run.name}: {headline}", header, body, footer)


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder from its files, in any state of the run; returns the path.

    Raises:
        InputError: it is not a run folder, or the page cannot be written.
    """
    path = folder / "report.html"
    write_text(path, render(folder))
    return path


@contextlib.contextmanager
def reported(run: RunFolder, facts: Row) -> Iterator[None]:
    """Keeps the report of a run up to date inside the block, also if the run fails.

    Args:
        facts: what `summary.json` says about the start of the run; written to `run.json`, for the report of a run that
            does not write a summary. If the block raises an error, it is added as `error`.
    """
    folder = run.folder.absolute()
    write_text(folder / FACTS, to_json(facts, indent=1) + "\n")

    def refresh() -> None:
        with contextlib.suppress(Exception):  # the report at the end of the run raises it
            write_report(folder)

    run.refresh = refresh
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(InputError):  # the failure that ended the run is the one to report
            if read_run(folder).status not in ("finished", "stopped"):
                message = " ".join(f"{type(error).__name__}: {error}".split())
                write_text(folder / FACTS, to_json({**facts, "error": message}, indent=1) + "\n")
                write_report(folder)
        raise
