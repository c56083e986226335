"""Parts that several sections share: bounded text, icons, facts, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlkernel_drift.knowledge import CAUSES
from rlkernel_drift.report.markup import Child, Markup, number, tag, visible
from rlkernel_drift.verdict import Scalar, Thread

TEXT = 600
SHORT = 120


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: its anchor.
        title: for heading and navigation.
        note: small text after the heading.
    """

    key: str
    title: str
    body: Markup
    note: str = ""

    def markup(self) -> Markup:
        """The section with its heading."""
        heading = tag("h2", self.title, tag("small", self.note) if self.note else None)
        return tag("section", heading, self.body, id=self.key, aria_label=self.title)


def clip(text: str, limit: int = TEXT) -> str:
    """Text from an input, bounded."""
    return visible(text, limit) if len(text) > limit else text


def prose(text: str, limit: int = TEXT) -> Markup:
    """Sentences that mark code with backticks."""
    parts = visible(text, limit).split("`")
    if len(parts) % 2 == 0:
        return tag("span", clip(text, limit))
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
    """A sign in the current colour, drawn so that it does not depend on a font."""
    return tag("svg", tag("path", d=_ICONS[name]), viewBox="0 0 16 16", class_="icon", aria_hidden="true")


def scalar(value: Scalar | list[Scalar]) -> str:
    """A setting or a value of evidence as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        words = ", ".join(scalar(item) for item in value[:8])
        return words + (f" … ({len(value)})" if len(value) > 8 else "")
    return number(value) if isinstance(value, float) else visible(str(value), SHORT)


def title_of(cause: str) -> str:
    """The title of a cause."""
    known = CAUSES.get(cause)
    return known.title if known else cause.replace("-", " ")


def link(thread: Thread) -> Markup:
    """A place where a cause was seen; only https addresses become links."""
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


def facts(pairs: Iterable[tuple[str, Child]], class_: str = "facts") -> Markup:
    """Names and values."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_=class_)


def settings(values: Mapping[str, Scalar | list[Scalar]]) -> Markup | None:
    """The first twelve named values, for evidence and parameters."""
    shown = list(values.items())[:12]
    return facts((visible(key, 60).replace("_", " "), scalar(value)) for key, value in shown) if shown else None


def table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Iterable[Child]], class_: str, row_class: Sequence[str] = ()
) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of each row is its header.

    Args:
        columns: (title, class of the cells) pairs.
        row_class: a class for each row; default none.
    """
    head = [tag("th", title, class_=name or None, scope="col") for title, name in columns]
    body = []
    for i, row in enumerate(rows):
        first, *rest = row
        cells = [tag("td", cell, class_=name or None) for cell, (_, name) in zip(rest, columns[1:], strict=True)]
        body.append(tag("tr", tag("th", first, scope="row"), cells, class_=row_class[i] or None if row_class else None))
    inner = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), class_=class_)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {columns[0][0]}")


def fold(title: str, *children: Child) -> Markup:
    """Content that opens at a click."""
    return tag("details", tag("summary", title), *children)


def more(shown: int, of: int, what: str) -> Markup | None:
    """A sentence about what was left out."""
    if shown >= of:
        return None
    return tag("p", f"Showing {shown:,} of {of:,} {what}; the JSON of the verdict has all.", class_="aside")
