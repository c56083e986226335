"""What several sections share: bounded text, findings, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlkernel_drift.knowledge import CAUSES
from rlkernel_drift.report.markup import Child, Markup, number, tag, visible
from rlkernel_drift.verdict import Finding, Scalar, Thread

TEXT = 600
SHORT = 120


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: its anchor; title: for heading and navigation; note: beside the heading.
    """

    key: str
    title: str
    body: Markup
    note: str = ""

    def markup(self) -> Markup:
        """The section with its heading."""
        heading = tag("h2", self.title, tag("small", self.note) if self.note else None)
        return tag("section", heading, self.body, id=self.key, aria_label=self.title)


def clip(text: str, limit: int = TEXT) -> Markup:
    """Text of a stranger, bounded."""
    return tag("span", visible(text, limit)) if len(text) > limit else tag("span", text)


def prose(text: str, limit: int = TEXT) -> Markup:
    """Sentences in which backticks stand around code."""
    parts = visible(text, limit).split("`")
    if len(parts) % 2 == 0:
        return clip(text, limit)
    return tag("span", [tag("code", part) if i % 2 else part for i, part in enumerate(parts)])


_ICONS = {
    "check": "M4 8.5l2.8 2.8L12 5.6",
    "cross": "M5 5l6 6M11 5l-6 6",
    "unequal": "M4 6.2h8M4 9.8h8M10 3.6l-4 8.8",
    "swap": "M4 6h7.5M9.3 3.8L11.5 6 9.3 8.2M12 10.4H4.5M6.7 8.2L4.5 10.4l2.2 2.2",
    "question": "M6 6.1a2 2 0 1 1 2.9 1.8c-.6.3-.9.7-.9 1.3M8 11.6v.1",
    "bang": "M8 4.2v4.6M8 11.6v.1",
    "dash": "M5.2 8h5.6",
    "dot": "M8 8v.1",
}


def icon(name: str) -> Markup:
    """A sign in the current colour, the same with every font."""
    return tag("svg", tag("path", d=_ICONS[name]), viewBox="0 0 16 16", class_="icon", aria_hidden="true")


def scalar(value: Scalar | list[Scalar]) -> str:
    """A setting or a number of evidence."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        words = ", ".join(scalar(item) for item in value[:8])
        return words + (f" … ({len(value)})" if len(value) > 8 else "")
    return number(value) if isinstance(value, float) else visible(str(value), SHORT)


def title_of(cause: str) -> str:
    """A cause in words."""
    known = CAUSES.get(cause)
    return known.title if known else cause.replace("-", " ")


def link(thread: Thread) -> Markup:
    """Where a cause was seen; only https addresses become links."""
    name = visible(thread.name, 80)
    if not thread.url.startswith("https://") or any(c in thread.url for c in "\"'<>\\ "):
        return tag("span", name)
    return tag(
        "a", name, href=visible(thread.url, 300), rel="noopener noreferrer", title=visible(thread.seen, 200) or None
    )


def threads(found: Sequence[Thread]) -> Markup | None:
    """The places where a cause was seen."""
    if not found:
        return None
    items = [tag("li", link(t), tag("span", ": ", visible(t.seen, 160)) if t.seen else None) for t in found[:6]]
    return tag("div", tag("b", "Seen in"), tag("ul", items), class_="seen")


def evidence(finding: Finding) -> Markup | None:
    """The numbers behind a finding, by name."""
    if not finding.evidence:
        return None
    pairs = [
        tag("div", tag("dt", visible(key, 60).replace("_", " ")), tag("dd", scalar(value)))
        for key, value in list(finding.evidence.items())[:12]
    ]
    return tag("dl", pairs, class_="facts")


def table(head: Sequence[tuple[str, str]], rows: Iterable[Child], class_: str = "") -> Markup:
    """A table that scrolls by itself where it is too wide.

    Args:
        head: (title, class of the column) pairs; an empty title is for screen readers alone.
    """
    cells = [tag("th", title, class_=name or None, scope="col") for title, name in head]
    body = tag("table", tag("thead", tag("tr", cells)), tag("tbody", rows), class_=class_ or None)
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {head[0][0] or class_}")


def more(shown: int, of: int, what: str) -> Markup | None:
    """Says what was left out."""
    if shown >= of:
        return None
    return tag("p", f"Showing {shown:,} of {of:,} {what}; the JSON of the verdict has all.", class_="aside")
