"""Where the numbers are from, and the command that makes them again."""

from __future__ import annotations

import shlex

from rlkernel_drift.report.markup import Child, Markup, tag, visible
from rlkernel_drift.report.sections.common import Section, scalar, table
from rlkernel_drift.verdict import Scalar, Side, Verdict

_COMMAND = 4000


def provenance(verdict: Verdict) -> Section:
    """The section."""
    parts: list[Child] = []
    if verdict.command:
        parts += [tag("h3", "To make this report's verdict again"), command(verdict.command)]
    sides = [side for side in (verdict.rollout, verdict.train) if side is not None]
    names = ["rollout"] * (verdict.rollout is not None) + ["train"] * (verdict.train is not None)
    rows = []
    for label, values in _rows(sides):
        if any(value not in (None, "", "–") for value in values):
            cells = [tag("td", value if isinstance(value, str) else scalar(value), class_="code") for value in values]
            rows.append(tag("tr", tag("th", label, scope="row"), cells))
    if rows:
        parts.append(table([("side", ""), *((name, "") for name in names)], rows, "sides"))
    for name, side in zip(names, sides, strict=True):
        if side.command:
            parts += [
                tag("h3", f"Command that the {name} side recorded"),
                tag("pre", visible(shlex.join(side.command), _COMMAND)),
            ]
    parts.append(
        tag(
            "p",
            f"Verdict format {verdict.schema_id[:60]}, written by {verdict.tool[:80] or 'an unnamed tool'}.",
            class_="aside",
        )
    )
    return Section("provenance", "Provenance", tag("div", parts))


def command(words: list[str]) -> Markup:
    """A command to copy; without the button where it holds what a terminal would obey and a reader not see."""
    line = shlex.join(words)
    safe = len(line) <= _COMMAND and visible(line) == line
    button = tag("button", "Copy", type="button", class_="copy js", data_copy="command")
    warning = tag(
        "p",
        "Not offered for copying: it holds characters that a terminal obeys or hides, or is too long.",
        class_="aside",
    )
    block = tag("pre", visible(line, _COMMAND), id="command", tabindex="0")
    return tag("div", block, button if safe else warning, class_="command")


def _rows(sides: list[Side]) -> list[tuple[str, list[Scalar]]]:
    names = ("label", "kind", "engine", "model", "stream", "contract", "step", "weights_version", "tokens", "sequences")
    rows: list[tuple[str, list[Scalar]]] = []
    for name in names:
        values = [getattr(side, name) for side in sides]
        cells: list[Scalar] = [
            f"{v:,}"
            if isinstance(v, int) and name in ("tokens", "sequences")
            else visible(str(v), 160)
            if v is not None
            else None
            for v in values
        ]
        rows.append((name.replace("_", " "), cells))
    for name in ("sampling", "versions", "hardware"):
        rows.append(
            (name, [visible(", ".join(f"{k} {scalar(v)}" for k, v in getattr(s, name).items()), 400) for s in sides])
        )
    return rows
