"""The report: one file, nothing loaded, nothing executed, generated text escaped, the verdict in words."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from training.run_folders import Page, append, folder_with

from rlkernel.training.pages.charts import MOST_POINTS, Series, line_chart, number, running_mean, ticks
from rlkernel.training.pages.page import show
from rlkernel.training.pages.report import verdict, write_report
from rlkernel.training.runs import read_run


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
    none = {"probe": [], "heldout_before": None, "heldout_after": None}
    folder = folder_with(tmp_path, "run.probe_rollouts=0", **none)
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    words = " ".join(Page(write_report(folder).read_text(encoding="utf-8")).words)
    assert "No data in this run." in words and "run.probe_rollouts=0" in words


def titles(folder: Path) -> list[str]:
    """Headings of the charts."""
    html = write_report(folder).read_text(encoding="utf-8")
    return re.findall(r'<figure class="chart"><h3>(.*?)</h3>', html)


def test_every_metric_has_a_curve(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    for step, update in ((1, 1), (2, 0)):
        known = {"entropy": 0.5, "grad_norm": 1.5 * update, "lr": 1e-3 * update, "updates": update, "kl_ref": 0.1}
        named = {"reward_format": 0.5, "reward_answer": step / 2, "logged/words": float(step), "a new metric": -step}
        append(folder / "metrics.jsonl", {"step": step, **known, **named, "clip_fraction_low": 0.0, "masked": 0})
    append(folder / "eval.jsonl", {"step": 2, "reward": 0.5, "pass@1": 0.5, "pass@4": 0.75})
    found = titles(folder)
    for title in ("Reward", "Reward format", "Reward answer", "pass@k", "Loss", "Entropy", "Gradient norm",
                  "Learning rate", "KL to the reference", "words", "a new metric"):  # fmt: skip
        assert title in found, title
    html = write_report(folder).read_text(encoding="utf-8")
    assert (
        "Constant in this run: clip_fraction_low = 0, masked = 0, seconds = 1, tokens = 15." in html
        and "Clipped tokens" not in found
    )
    assert "pass@4 after" in html
    rates = html[html.index("<h3>Learning rate</h3>") :]
    assert (
        "<td>0.001</td>" in rates[: rates.index("</figure>")] and "<td>0</td>" not in rates[: rates.index("</figure>")]
    )


def test_the_page_of_supervised_and_preference_training(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, algorithm="sft")
    (folder / "samples.jsonl").unlink()
    append(folder / "samples.jsonl", {"step": 0, "prompt": "2+2=", "completion": "4<eos>"})
    for name in ("metrics", "eval"):
        append(folder / f"{name}.jsonl", {"step": 2, "loss": 0.5, "lr": 1e-3, "grad_norm": 2.0, "tokens_per_s": 10.0})
    assert {"Loss", "Perplexity", "Learning rate", "Gradient norm", "Throughput"} <= set(titles(folder))
    html = write_report(folder).read_text(encoding="utf-8")
    assert (
        "Supervised training finished." in html and "Examples that were trained on" in html and "4&lt;eos&gt;" in html
    )
    assert "Drift" not in html and "<td>1.649</td>" in html, "exp(0.5)"
    for step in (1, 2):
        row = {"rewards/accuracies": 0.5, "rewards/margins": step, "rewards/chosen": step, "rewards/rejected": -step}
        append(folder / "metrics.jsonl", {"step": step, **row, "value_loss": 0.1})
    assert {"Reward accuracy", "Reward margin", "Implicit rewards", "Value loss"} <= set(titles(folder))


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
def test_the_verdict(tmp_path: Path, changes: dict[str, Any], kind: str, headline: str, words: str) -> None:
    found, title, sentence = verdict(read_run(folder_with(tmp_path, **changes)))
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
    peaks = Series("a", [(i, float(i in (5000, 7003)) - float(i == 9001)) for i in range(10000)])
    assert len(peaks.drawn()) <= MOST_POINTS + 2, "a long run does not make a page of many megabytes"
    assert [x for x, y in peaks.drawn() if y] == [5000, 7003, 9001] and peaks.drawn()[-1] == (9999, 0.0)
    assert running_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_ticks_are_round_and_cover_the_data() -> None:
    for low, high in ((0.0, 1.0), (0.0, 4.7e-7), (-3.0, 12.0), (5.0, 5.0), (0.0, 0.0), (1.0, 1234.0)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high * (1 - 1e-9) and 2 <= len(found) <= 12
    assert (
        number(None) == number(float("nan")) == "–" and number(1234567) == "1,234,567" and number(0.123456) == "0.1235"
    )
