"""Writes `report.html` from the files of a run folder: verdict in words, curves, drift, samples, settings.

The page needs no network and has no script; its policy allows only its own style sheet. Generated text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlkernel.training.charts import Series, line_chart, number, table
from rlkernel.training.run_folder import read_jsonl, write_text

SAMPLE_ROWS = 24
LONGEST_TEXT = 1500
Row = dict[str, Any]


def show(text: Any) -> str:
    """Generated text as HTML: escaped, with control and direction characters made visible, and cut if very long."""
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    rest = len(text) - LONGEST_TEXT
    visible = "".join(_visible(character) for character in text[:LONGEST_TEXT])
    tail = f" <em>… {rest:,} more characters</em>" if rest > 0 else ""
    return f"<code><bdi>{escape(visible)}</bdi></code>{tail}"


def _visible(character: str) -> str:
    if character in "\n\t":
        return {"\n": "⏎\n", "\t": "⇥\t"}[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    # category Cf has the characters that change the direction of text or have no width
    return f"⟨U+{code:04X}⟩" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co") else character


def verdict(summary: Row) -> tuple[str, str, str]:
    """(class, headline, sentence) of a run: "good", "bad" or "plain", from `summary.json`."""
    tokens, wrong = summary.get("tokens", 0), summary.get("mismatch_tokens", 0)
    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    name = "loss" if summary["algorithm"] == "sft" else "reward"
    learnt = ""
    if before is not None and after is not None:
        verb = "stayed at" if before == after else "rose from" if after > before else "fell from"
        change = number(after) if before == after else f"{number(before)} to {number(after)}"
        learnt = f" The held-out {name} {verb} {change} in {summary['seconds']:.0f} s."
    if summary["algorithm"] == "sft":
        return "plain", "Supervised training finished.", f"It trained on {tokens:,} completion tokens.{learnt}"
    if not tokens:
        return "plain", "Nothing was compared.", f"No completion token was sampled in this run.{learnt}"
    if wrong == 0:
        sentence = (
            f"All {tokens:,} tokens sampled in {summary['steps']:,} steps have the same log-probability, bit for bit, "
            f"in the rollout and in the training forward, which computed it independently.{learnt}"
        )
        return "good", "Rollout and training agree to the last bit.", sentence
    share = 100 * wrong / tokens
    sentence = (
        f"{wrong:,} of the {tokens:,} tokens sampled in {summary['steps']:,} steps ({share:.3g} %) have a different "
        f"log-probability in the training forward, by up to {number(summary.get('max_abs_diff'))} nats.{learnt}"
    )
    if summary["backend"] == "torch":
        return "plain", "On stock torch ops, rollout and training drift apart.", sentence
    return "bad", "Rollout and training disagree.", sentence


def _learning(metrics: list[Row], evals: list[Row], algorithm: str) -> str:
    def chart(key: str, field: str, title: str, y_name: str, low: float | None) -> str:
        lines = [
            Series("training, each step", [(m["step"], m.get(field)) for m in metrics], "muted"),
            Series("held out", [(e["step"], e[field]) for e in evals], "one", marks=True),
        ]
        return line_chart(key, title, lines, x_name="step", y_name=y_name, low=low)

    if algorithm == "sft":
        charts = chart("learning", "loss", "Loss", "mean loss per token (nats)", None)
    else:
        positive = all((m.get("reward") or 0) >= 0 for m in metrics)
        charts = chart("learning", "reward", "Reward", "mean reward", 0.0 if positive else None)
    if algorithm == "grpo":
        charts += chart("length", "length", "Completion length", "mean tokens per completion", 0.0)
    return f'<h2 id="learning">Learning</h2><div class="charts">{charts}</div>'


def _drift(metrics: list[Row], probe: list[Row], backend: str) -> str:
    on = [m for m in metrics if m.get("tokens")]
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
    else:
        text = "This run has no control rollouts (run.probe_rollouts=0). --backend torch runs the control arm."
    return f'<h2 id="drift">Drift, on and off</h2><p class="lead">{text}</p><div class="charts">{charts}</div>'


def _samples(samples: list[Row], evals: list[Row]) -> str:
    parts = ['<h2 id="samples">Samples</h2>']
    with_texts = [e for e in evals if e.get("samples")]
    if len(with_texts) >= 2:
        first, final = with_texts[0], with_texts[-1]
        rows = [
            [show(a["prompt"]), *(cell for s in (a, b) for cell in (show(s["completion"]), number(s["reward"])))]
            for a, b in list(zip(first["samples"], final["samples"], strict=True))[:SAMPLE_ROWS]
        ]
        head = ["prompt", "before", "reward", "after", "reward"]
        parts += ["<h3>Held-out prompts, before and after</h3>", table("Held-out samples", head, rows)]
    if samples:
        head = ["step", "prompt", "completion", "reward", "advantage"]
        rows = [
            [number(s["step"]), show(s["prompt"]), show(s["completion"]), number(s["reward"]), number(s["advantage"])]
            for s in samples[-SAMPLE_ROWS:]
        ]
        parts += ["<h3>Last training completions</h3>", table("Training samples", head, rows), _tokens(samples[-1])]
    return "".join(parts) if len(parts) > 1 else ""


def _tokens(sample: Row) -> str:
    rows = []
    for t in sample.get("tokens", [])[:64]:
        bits = [f"<code>{t[side]}</code>" for side in ("rollout", "training")]
        equal = "same" if t["rollout"] == t["training"] else "<strong>differs</strong>"
        rows.append([show(t["text"]), str(t["id"]), *bits, number(t["logp"]), equal])
    head = ["token", "id", "bits in the rollout", "bits in training", "log-probability", ""]
    caption = "Bits of one completion's log-probabilities"
    return f"<h3>One completion, token by token</h3>{table(caption, head, rows)}" if rows else ""


def _provenance(summary: Row, config: str) -> str:
    environment = summary["environment"]
    facts = [
        ("contract", summary["contract"]),
        ("backend", summary["backend"]),
        ("device", f"{summary['device']}, {environment['hardware']}"),
        ("threads", str(summary["threads"])),
        ("model", summary["model"]),
        ("seed", str(summary["seed"])),
        ("started", summary["started"]),
        *((name, version) for name, version in environment["versions"].items()),
    ]
    rows = [[escape(name), f"<code>{escape(str(value))}</code>"] for name, value in facts]
    return (
        '<h2 id="provenance">Reproduction</h2>'
        f'<p class="lead">Command: <code>{escape(summary["command"])}</code></p>'
        + table("Versions", ["what", "value"], rows)
        + f"<details><summary>Settings (config.yaml)</summary><pre>{escape(config)}</pre></details>"
    )


def _seconds(metrics: list[Row]) -> str:
    names = ("rollout", "reward", "score", "forward", "backward", "optimizer")
    sums = {name: sum(m.get(f"seconds_{name}") or 0.0 for m in metrics) for name in names}
    total = sum(m.get("seconds") or 0.0 for m in metrics)
    if not total:
        return ""
    sums["other"] = max(0.0, total - sum(sums.values()))
    ms = 1000 / len(metrics)
    rows = [[name, f"{ms * value:.1f}", f"{100 * value / total:.0f} %"] for name, value in sums.items() if value]
    return '<h2 id="time">Time per step</h2>' + table("Time per step", ["part", "ms per step", "share"], rows)


def render(folder: Path) -> str:
    """The report of a run folder as HTML."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    metrics, evals = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    kind, headline, sentence = verdict(summary)
    sft = summary["algorithm"] == "sft"
    name = "loss" if sft else "reward"
    fields = {f"held-out {name} before": "heldout_before", f"held-out {name} after": "heldout_after"}
    fields |= {} if sft else {"exact fraction": "exact_frac", "mismatching tokens": "mismatch_tokens"}
    values = {label: summary.get(field) for label, field in (fields | {"completion tokens": "tokens"}).items()}
    if summary.get("dropped"):
        values["dropped completions"] = sum(summary["dropped"].values())
    values["seconds"] = round(summary["seconds"], 1)
    figures = "".join(f"<div><dt>{label}</dt><dd>{number(value)}</dd></div>" for label, value in values.items())
    style = (files("rlkernel.training") / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    body = [
        _learning(metrics, evals, summary["algorithm"]),
        "" if sft else _drift(metrics, summary.get("probe", []), summary["backend"]),
        _samples(read_jsonl(folder / "samples.jsonl"), evals),
        _seconds(metrics),
        _provenance(summary, config),
    ]
    title = f"{summary['name']}: {headline}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#learning">Skip to the curves</a>\n'
        f"<header><h1>{escape(summary['name'])}</h1>"
        f'<p class="verdict {kind}">{escape(headline)}</p><p class="lead">{escape(sentence)}</p>'
        f'<dl class="figures">{figures}</dl></header>\n'
        f"<main>{''.join(body)}</main>\n"
        f"<footer><p>rlkernel {escape(summary['environment']['versions'].get('rlkernel', ''))}, contract "
        f"{escape(summary['contract'])}.</p></footer>\n</body>\n</html>\n"
    )


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder from its files; returns the path.

    Raises:
        InputError: it cannot be written.
    """
    path = folder / "report.html"
    write_text(path, render(folder))
    return path
