"""Where the numbers are from: how both sides were configured, and the command that makes the verdict again."""

from __future__ import annotations

import shlex

from rlkernel_drift.report.markup import Child, Markup, tag, visible
from rlkernel_drift.report.sections.common import Section, clip, more, scalar, table
from rlkernel_drift.verdict import Difference, Scalar, Side, Verdict

_KINDS = {"numerics": "changes numbers", "version": "version", "other": "other"}
_SETTINGS = 120


def configuration(verdict: Verdict) -> Section | None:
    """The section; None where a side said nothing."""
    sides = [side for side in (verdict.rollout, verdict.train) if side is not None]
    if not verdict.differences and not (len(sides) == 2 and all(_settings(side) for side in sides)):
        return None
    parts: list[Child] = []
    head = [("setting", ""), ("rollout", ""), ("train", ""), ("kind", "")]
    if verdict.differences:
        shown = verdict.differences[:_SETTINGS]
        parts.append(table(head, [_difference(d) for d in shown], "differences"))
        parts.append(more(len(shown), len(verdict.differences), "differences"))
    else:
        parts.append(tag("p", "No setting, version or device that both sides recorded differs.", class_="aside"))
    same = _same(verdict)
    if same:
        rows = [
            tag("tr", tag("th", clip(key, 80), scope="row"), tag("td", scalar(value)))
            for key, value in same[:_SETTINGS]
        ]
        title = f"Equal on both sides ({len(same)})"
        parts.append(tag("details", tag("summary", title), table([("setting", ""), ("both", "")], rows, "same")))
    count = sum(d.weight == "numerics" for d in verdict.differences)
    note = f"{len(verdict.differences)} differ, {count} of them change numbers" if verdict.differences else ""
    return Section("configuration", "Configuration", tag("div", parts), note)


def _difference(difference: Difference) -> Markup:
    return tag(
        "tr",
        tag("th", clip(difference.key, 80), scope="row"),
        tag("td", scalar(difference.rollout), class_="code"),
        tag("td", scalar(difference.train), class_="code"),
        tag("td", _KINDS[difference.weight], class_="kind"),
        class_=difference.weight,
    )


def _settings(side: Side) -> dict[str, Scalar]:
    return {**side.config, **side.versions, **side.hardware}


def _same(verdict: Verdict) -> list[tuple[str, Scalar]]:
    if verdict.rollout is None or verdict.train is None:
        return []
    left, right = _settings(verdict.rollout), _settings(verdict.train)
    return sorted((key, value) for key, value in left.items() if key in right and right[key] == value)


_COMMAND = 4000


def provenance(verdict: Verdict) -> Section:
    """The section."""
    parts: list[Child] = []
    if verdict.command:
        parts += [tag("h3", "To make this report's verdict again"), command(verdict.command)]
    sides = [side for side in (verdict.rollout, verdict.train) if side is not None]
    names = ["rollout"] * (verdict.rollout is not None) + ["train"] * (verdict.train is not None)
    rows = []
    for label, values in _facts(sides):
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


def _facts(sides: list[Side]) -> list[tuple[str, list[Scalar]]]:
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
