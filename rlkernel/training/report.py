"""Writes `report.html`, one file that opens without network: verdict in words, curves, drift, samples, settings.

It reads what the run left in its folder and nothing else, so it can be written again at any time. No script runs in
it; its content policy allows its own style sheet alone. All generated text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlkernel.training.charts import Series, line_chart, number
from rlkernel.training.run_folder import read_jsonl, write_text

SAMPLE_ROWS = 24
LONGEST_TEXT = 1500
Row = dict[str, Any]


def show(text: Any) -> str:
    """Generated text as HTML: escaped, control and direction characters made visible, cut where very long."""
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
    # Cf holds the characters that turn the direction of text or have no width; they would disguise a sample.
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
        return "plain", "Supervised training finished.", f"{tokens:,} completion tokens were learnt from.{learnt}"
    if not tokens:
        return "plain", "Nothing was compared.", f"No completion token was sampled in this run.{learnt}"
    if wrong == 0:
        sentence = (
            f"All {tokens:,} tokens sampled in {summary['steps']:,} steps have one log-probability, the same 32 bits, "
            f"in the rollout and in the training forward, which computed it independently.{learnt}"
        )
        return "good", "Rollout and training agree to the last bit.", sentence
    share = 100 * wrong / tokens
    sentence = (
        f"{wrong:,} of the {tokens:,} tokens sampled in {summary['steps']:,} steps ({share:.3g} %) have another "
        f"log-probability in the training forward, by up to {number(summary.get('max_abs_diff'))} nats.{learnt}"
    )
    if summary["backend"] == "torch":
        return "plain", "On stock torch ops, rollout and training drift apart.", sentence
    return "bad", "Rollout and training disagree.", sentence


def _figures(pairs: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{items}</dl>'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A scrollable table; the cells are HTML already."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _learning(metrics: list[Row], evals: list[Row], algorithm: str) -> str:
    name = "loss" if algorithm == "sft" else "reward"
    charts = [
        line_chart(
            "learning",
            f"{name.capitalize()}",
            [
                Series("training, each step", [(m["step"], m.get(name)) for m in metrics], "muted"),
                Series("held out", [(e["step"], e[name]) for e in evals], "one", marks=True),
            ],
            x_name="step",
            y_name=f"mean {name}" + (" per token (nats)" if name == "loss" else ""),
            low=0.0 if name == "reward" and all((m.get(name) or 0) >= 0 for m in metrics) else None,
        )
    ]
    if algorithm == "grpo":
        charts.append(
            line_chart(
                "length",
                "Completion length",
                [
                    Series("training, each step", [(m["step"], m.get("length")) for m in metrics], "muted"),
                    Series("held out", [(e["step"], e["length"]) for e in evals], "one", marks=True),
                ],
                x_name="step",
                y_name="mean tokens a completion",
                low=0.0,
            )
        )
    return f'<h2 id="learning">What it learnt</h2><div class="charts">{"".join(charts)}</div>'


def _drift(metrics: list[Row], probe: list[Row], backend: str) -> str:
    on = [m for m in metrics if m.get("tokens")]
    first = ("rlkernel, each step", "one") if backend == "rlkernel" else ("stock torch, each step", "two")
    charts = []
    for key, field, title, unit in (
        ("difference", "max_abs_diff", "Largest difference", "nats between rollout and training forward"),
        ("mismatches", "mismatch_tokens", "Tokens that differ", "sampled tokens with other bits, a step"),
    ):
        lines = [Series(first[0], [(m["step"], m[field]) for m in on], first[1])]
        if probe:
            points = [(row["step"], row[field]) for row in probe]
            lines.append(Series("stock torch, control rollouts", points, "two", marks=True))
        charts.append(line_chart(key, title, lines, x_name="step", y_name=unit, low=0.0))
    if backend == "torch":
        text = "This is the control arm: the same run with every op on stock torch. Its drift is what rlkernel removes."
    elif probe:
        text = (
            "The control: after some steps the same prompts were sampled and scored again, with the same weights and "
            "every op on stock torch. These rollouts were measured only; nothing was learnt from them."
        )
    else:
        text = "No control rollouts were asked for (run.probe_rollouts=0); --backend torch runs the whole control arm."
    return f'<h2 id="drift">Drift, on and off</h2><p class="lead">{text}</p><div class="charts">{"".join(charts)}</div>'


def _samples(samples: list[Row], evals: list[Row]) -> str:
    parts = ['<h2 id="samples">Samples</h2>']
    with_texts = [e for e in evals if e.get("samples")]
    if len(with_texts) >= 2:
        first, final = with_texts[0], with_texts[-1]
        rows = [
            [show(a["prompt"]), show(a["completion"]), number(a["reward"]), show(b["completion"]), number(b["reward"])]
            for a, b in list(zip(first["samples"], final["samples"], strict=True))[:SAMPLE_ROWS]
        ]
        head = ["prompt", "before", "reward", "after", "reward"]
        parts += ["<h3>Held-out prompts, before and after</h3>", _table("Held-out samples", head, rows)]
    if samples:
        head = ["step", "prompt", "completion", "reward", "advantage"]
        rows = [
            [number(s["step"]), show(s["prompt"]), show(s["completion"]), number(s["reward"]), number(s["advantage"])]
            for s in samples[-SAMPLE_ROWS:]
        ]
        parts += ["<h3>Last training completions</h3>", _table("Training samples", head, rows)]
        parts.append(_tokens(samples[-1]))
    return "".join(parts) if len(parts) > 1 else ""


def _tokens(sample: Row) -> str:
    rows = [
        [
            show(t["text"]),
            str(t["id"]),
            f"<code>{t['rollout']}</code>",
            f"<code>{t['training']}</code>",
            number(t["logp"]),
        ]
        + (["same"] if t["rollout"] == t["training"] else ["<strong>differs</strong>"])
        for t in sample.get("tokens", [])[:64]
    ]
    if not rows:
        return ""
    head = ["token", "id", "bits in the rollout", "bits in training", "log-probability", ""]
    return "<h3>One completion, token by token</h3>" + _table("Bits of one completion's log-probabilities", head, rows)


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
        '<h2 id="provenance">How to run it again</h2>'
        f'<p class="lead">Command: <code>{escape(summary["command"])}</code></p>'
        + _table("Versions", ["what", "value"], rows)
        + f"<details><summary>Settings (config.yaml)</summary><pre>{escape(config)}</pre></details>"
    )


def _seconds(metrics: list[Row]) -> str:
    names = ("rollout", "reward", "score", "forward", "backward", "optimizer")
    sums = {name: sum(m.get(f"seconds_{name}") or 0.0 for m in metrics) for name in names}
    total = sum(m.get("seconds") or 0.0 for m in metrics)
    if not total:
        return ""
    sums["other"] = max(0.0, total - sum(sums.values()))
    rows = [
        [escape(name), f"{1000 * value / len(metrics):.1f}", f"{100 * value / total:.0f} %"]
        for name, value in sums.items()
        if value
    ]
    return '<h2 id="time">Where a step\'s time goes</h2>' + _table("Time a step", ["part", "ms a step", "share"], rows)


def render(folder: Path) -> str:
    """The report of a run folder as HTML."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    metrics, evals = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    kind, headline, sentence = verdict(summary)
    sft = summary["algorithm"] == "sft"
    figures = [
        ("held-out loss before" if sft else "held-out reward before", number(summary.get("heldout_before"))),
        ("held-out loss after" if sft else "held-out reward after", number(summary.get("heldout_after"))),
        ("completion tokens", number(summary.get("tokens"))),
        ("seconds", number(round(summary["seconds"], 1))),
    ]
    if not sft:
        figures[2:2] = [
            ("exact fraction", number(summary.get("exact_frac"))),
            ("mismatching tokens", number(summary.get("mismatch_tokens"))),
        ]
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
        f"{_figures(figures)}</header>\n"
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
