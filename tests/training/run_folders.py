"""Run folders with made-up contents, and a reader of HTML pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rlkernel.training.config import resolve, to_yaml

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


COMPARED = ("mismatch_tokens", "exact_frac", "max_abs_diff", "probe")


def folder_with(path: Path, *words: str, **changes: Any) -> Path:
    """A finished run of 2 steps in `path`; `words` change its settings, `changes` its summary."""
    path.mkdir(exist_ok=True)
    summary = {**SUMMARY, **changes}
    if summary["algorithm"] not in ("grpo", "ppo"):
        summary = {key: value for key, value in summary.items() if key not in COMPARED}
    (path / "summary.json").write_text(json.dumps(summary))
    settings = resolve(changes.get("algorithm", "grpo"), overrides=["train.steps=2", *words])
    settings.run.output = "</pre><script>"
    (path / "config.yaml").write_text(to_yaml(settings))
    metrics = [
        {
            "step": i,
            "contract": "rlk-2",
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


def append(file: Path, row: dict[str, Any]) -> None:
    """Adds one line to a log."""
    with open(file, "a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")
