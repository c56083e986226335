"""The HTML report of a verdict: one file that needs no network. `figure` draws the PNG.

The page's content policy allows its own style and script, by hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from rlkernel_drift.report.markup import Markup, raw, tag, visible
from rlkernel_drift.report.sections.common import Section
from rlkernel_drift.report.sections.findings import consequences, diagnosis, gates
from rlkernel_drift.report.sections.measurements import distribution, layers, metrics, trends
from rlkernel_drift.report.sections.provenance import configuration, provenance
from rlkernel_drift.report.sections.summary import LOOK, summary
from rlkernel_drift.report.sections.tokens import tokens
from rlkernel_drift.verdict import Verdict

MAX_BYTES = 2_000_000


def write_html(verdict: Verdict) -> str:
    """The report of a verdict; the same verdict gives the same text.

    Every list is bounded. Findings and the token strip shrink further where the page would exceed `MAX_BYTES`.
    """
    budget = 1.0
    while True:
        page = _page(verdict, budget)
        if len(page.encode("utf-8")) <= MAX_BYTES or budget < 0.01:
            return page
        budget /= 2


def _page(verdict: Verdict, budget: float) -> str:
    data: dict[str, object] = {}
    parts = [
        gates(verdict, budget),
        diagnosis(verdict),
        metrics(verdict),
        consequences(verdict),
        tokens(verdict, data, budget),
        layers(verdict, data),
        distribution(verdict),
        trends(verdict),
        configuration(verdict),
        provenance(verdict),
    ]
    sections = [part for part in parts if part is not None]
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    look, _, words = LOOK[verdict.status]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        raw('<meta http-equiv="Content-Security-Policy" content="', policy, '">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", ": ".join(part for part in (words, _sides(verdict)) if part)),
        raw("<style>", style, "</style>"),
    )
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        _bar(verdict, sections),
        tag("main", summary(verdict), [section.markup() for section in sections]),
        tag("div", id="card", role="tooltip", hidden=True),
        raw('<script type="application/json" id="data">', _json(data), "</script>"),
        raw("<script>", script, "</script>"),
    )
    return raw("<!doctype html>\n", tag("html", head, body, lang="en", data_status=look), "\n")


def _bar(verdict: Verdict, sections: list[Section]) -> Markup:
    """The side bar: name, sides, links to the sections, theme button."""
    links = [("verdict", "Verdict"), *((section.key, section.title) for section in sections)]
    items = [tag("li", tag("a", title, href=f"#{key}")) for key, title in links]
    name = tag("p", tag("b", "rlkernel-drift"), tag("span", _sides(verdict)), class_="name")
    button = tag("button", "Theme: system", type="button", id="theme", class_="js")
    return tag("div", name, tag("nav", tag("ul", items), aria_label="Sections"), button, class_="side")


def _sides(verdict: Verdict) -> str:
    labels = [visible(side.label, 60) for side in (verdict.rollout, verdict.train) if side is not None]
    return " against ".join(dict.fromkeys(labels)) if labels else ""


def _json(data: dict[str, object]) -> str:
    """ASCII JSON without `<`, `>` and `&`, so that it cannot end its script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
