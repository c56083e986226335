"""The report: one file, nothing loaded, nothing executed, generated text escaped, the verdict in words."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlkernel.training.charts import Series, line_chart, number, ticks
from rlkernel.training.report import show, verdict, write_report

EVIL = "</code></td><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x00\n"
SUMMARY: dict[str, Any] = {
    "name": "run <1>",
    "algorithm": "grpo",
    "backend": "rlkernel",
    "contract": "rlk-2",
    "device": "cpu",
    "seed": 0,
    "model": "1 parameter",
    "threads": 2,
    "command": "cd 'a <b>' && python -m rlkernel.cli.main train grpo --config /r/config.yaml",
    "started": "2026-01-01T00:00:00+00:00",
    "environment": {"hardware": "a <cpu>", "driver": None, "versions": {"rlkernel": "0.1.0", "torch": "2"}},
    "seconds": 12.5,
    "steps": 2,
    "tokens": 30,
    "mismatch_tokens": 0,
    "exact_frac": 1.0,
    "max_abs_diff": 0.0,
    "heldout_before": 0.25,
    "heldout_after": 0.875,
    "probe": [{"step": 2, "tokens": 10, "mismatch_tokens": 4, "max_abs_diff": 3e-7, "exact_frac": 0.6, "max_ulps": 3}],
}


def folder_with(path: Path, **changes: Any) -> Path:
    (path / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    (path / "config.yaml").write_text("run:\n  output: </pre><script>\n")
    metrics = [
        {
            "step": i,
            "reward": i / 4,
            "loss": 1.0,
            "length": 3.0,
            "tokens": 15,
            "max_abs_diff": 0.0,
            "mismatch_tokens": 0,
        }
        | {"seconds": 1.0, "seconds_rollout": 0.5, "seconds_forward": 0.2}
        for i in (1, 2)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    texts = [{"prompt": EVIL, "completion": EVIL, "reward": 1.0}]
    evals = [{"step": i, "reward": r, "loss": r, "length": 3.0, "samples": texts} for i, r in ((0, 0.25), (2, 0.875))]
    (path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    token = {"id": 1, "text": EVIL, "logp": -1.0, "rollout": "bf800000", "training": "bf800001"}
    sample = {
        "step": 2,
        "prompt": [{"role": "user", "content": EVIL}],
        "completion": EVIL,
        "reward": 1.0,
        "advantage": 0.5,
    }
    (path / "samples.jsonl").write_text(json.dumps({**sample, "tokens": [token]}) + "\n")
    return path


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are balanced."""

    VOID = ("meta",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_is_one_closed_file(tmp_path: Path) -> None:
    html = write_report(folder_with(tmp_path)).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "img", "link", "iframe", "object", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "style"}
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert "://" not in html
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style is not None and "url(" not in style[1] and "@import" not in style[1]
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'" in html
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in style[1]
    # A scrolling region must be reachable with the keyboard and have a name.
    assert html.count('class="scroll" tabindex="0" role="region" aria-label="') == html.count('class="scroll"')


def test_generated_text_is_shown_and_never_markup(tmp_path: Path) -> None:
    html = write_report(folder_with(tmp_path)).read_text(encoding="utf-8")
    assert "<script" not in html and "<img" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "\u202e" not in html and "\x00" not in html and "⟨U+202E⟩" in html
    assert show("a\nb\x07") == "<code><bdi>a⏎\nb␇</bdi></code>"
    assert "1,500 more characters" in show("x" * 3000)


def test_the_report_has_every_part(tmp_path: Path) -> None:
    words = " ".join(Page(write_report(folder_with(tmp_path)).read_text(encoding="utf-8")).words)
    for part in (
        "Rollout and training agree to the last bit.",
        "rose from 0.25 to 0.875 in 12 s",
        "Reward",
        "Completion length",
        "Drift, on and off",
        "stock torch, control rollouts",
        "Held-out prompts, before and after",
        "differs",
        "Time per step",
        "contract rlk-2",
        "cd 'a <b>' && python -m rlkernel.cli.main train grpo --config /r/config.yaml",
        "Settings (config.yaml)",
    ):
        assert part in words, part


def test_the_report_of_runs_without_some_parts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, probe=[], heldout_before=None, heldout_after=None)
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    words = " ".join(Page(write_report(folder).read_text(encoding="utf-8")).words)
    assert "No data in this run." in words and "run.probe_rollouts=0" in words
    sft = folder_with(tmp_path, algorithm="sft")
    assert "Supervised training finished." in write_report(sft).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "kind", "headline", "words"),
    [
        ({}, "good", "Rollout and training agree to the last bit.", "All 30 tokens sampled in 2 steps"),
        ({"mismatch_tokens": 3, "max_abs_diff": 1e-6}, "bad", "Rollout and training disagree.", "3 of the 30 tokens"),
        ({"mismatch_tokens": 3, "backend": "torch"}, "plain", "drift apart", "(10 %)"),
        ({"tokens": 0}, "plain", "Nothing was compared.", "No completion token"),
        ({"heldout_after": 0.25}, "good", "agree", "stayed at 0.25"),
        ({"heldout_after": 0.1}, "good", "agree", "fell from 0.25 to 0.1"),
        ({"heldout_before": None}, "good", "agree", "independently."),
    ],
)
def test_the_verdict(changes: dict[str, Any], kind: str, headline: str, words: str) -> None:
    found, title, sentence = verdict({**SUMMARY, **changes})
    assert found == kind and headline in title and words in sentence


def test_charts_draw_what_is_finite() -> None:
    series = [Series("a<b", [(1, 0.5), (2, None), (3, float("nan")), (4, 1.5)], marks=True), Series("none", [])]
    svg = line_chart("k", "T", series, x_name="step", y_name="y")
    assert svg.count("<circle") == 2 and svg.count("<polyline") == 1 and "a&lt;b" in svg and "nan" not in svg.lower()
    assert "No data" in line_chart("k", "T", [Series("a", [])], x_name="step", y_name="y")
    flat = line_chart("k", "T", [Series("a", [(1, 0.0), (2, 0.0)])], x_name="step", y_name="y", low=0.0)
    assert "<polyline" in flat
    many = line_chart("k", "T", [Series("a", [(i, float(i)) for i in range(1000)])], x_name="step", y_name="y")
    assert many.count("<tr>") <= 42


def test_ticks_are_round_and_cover_the_data() -> None:
    for low, high in ((0.0, 1.0), (0.0, 4.7e-7), (-3.0, 12.0), (5.0, 5.0), (0.0, 0.0), (1.0, 1234.0)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high * (1 - 1e-9) and 2 <= len(found) <= 12
    assert (
        number(None) == number(float("nan")) == "–" and number(1234567) == "1,234,567" and number(0.123456) == "0.1235"
    )
