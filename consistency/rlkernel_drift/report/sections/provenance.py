"""Sections with the origin of the numbers: the configuration of both sides, and the command of the verdict."""

from __future__ import annotations

import shlex

from rlkernel_drift.report.markup import Child, Markup, tag, visible
from rlkernel_drift.report.sections.common import Section, clip, fold, more, scalar, table
from rlkernel_drift.verdict import Scalar, Side, Verdict

_KINDS = {"numerics": "changes numbers", "version": "version", "other": "other"}
_SETTINGS = 120
_COMMAND = 4000


def configuration(verdict: Verdict) -> Section | None:
    """The section; None where a side recorded nothing."""
    left, right = ({} if side is None else _settings(side) for side in (verdict.rollout, verdict.train))
    if not verdict.differences and not (left and right):
        return None
    parts: list[Child] = []
    if verdict.differences:
        shown = verdict.differences[:_SETTINGS]
        columns = [("setting", ""), ("rollout", "code"), ("train", "code"), ("kind", "kind")]
        rows = [[clip(d.key, 80), scalar(d.rollout), scalar(d.train), _KINDS[d.weight]] for d in shown]
        parts.append(table(columns, rows, "differences", [d.weight for d in shown]))
        parts.append(more(len(shown), len(verdict.differences), "differences"))
    else:
        parts.append(tag("p", "No setting, version or device that both sides recorded differs.", class_="aside"))
    same = sorted((key, value) for key, value in left.items() if key in right and right[key] == value)
    if same:
        rows = [[clip(key, 80), scalar(value)] for key, value in same[:_SETTINGS]]
        parts.append(fold(f"Equal on both sides ({len(same)})", table([("setting", ""), ("both", "")], rows, "same")))
    count = sum(d.weight == "numerics" for d in verdict.differences)
    note = f"{len(verdict.differences)} differ, {count} of them change numbers" if verdict.differences else ""
    return Section("configuration", "Configuration", tag("div", parts), note)


def _settings(side: Side) -> dict[str, Scalar]:
    return {**side.config, **side.versions, **side.hardware}


def provenance(verdict: Verdict) -> Section:
    """The section."""
    parts: list[Child] = []
    if verdict.command:
        parts += [tag("h3", "Command of this verdict"), command(verdict.command)]
    sides = {"rollout": verdict.rollout, "train": verdict.train}
    given = {name: side for name, side in sides.items() if side is not None}
    rows = [[name, *values] for name, values in _facts(list(given.values())) if set(values) - {"", "–"}]
    if rows:
        parts.append(table([("side", ""), *((name, "code") for name in given)], rows, "sides"))
    for name, side in given.items():
        if side.command:
            parts.append(tag("h3", f"Command that the {name} side recorded"))
            parts.append(tag("pre", visible(shlex.join(side.command), _COMMAND)))
    tool = verdict.tool[:80] or "an unnamed tool"
    parts.append(tag("p", f"Verdict format {verdict.schema_id[:60]}, written by {tool}.", class_="aside"))
    return Section("provenance", "Provenance", tag("div", parts))


def command(words: list[str]) -> Markup:
    """A command to copy; without the button where it contains characters that a reader would not see."""
    line = shlex.join(words)
    block = tag("pre", visible(line, _COMMAND), id="command", tabindex="0")
    if len(line) <= _COMMAND and visible(line) == line:
        button = tag("button", "Copy", type="button", class_="copy js", data_copy="command")
        return tag("div", block, button, class_="command")
    why = "No copy button: the command has control or invisible characters, or is too long."
    return tag("div", block, tag("p", why, class_="aside"), class_="command")


def _facts(sides: list[Side]) -> list[tuple[str, list[str]]]:
    """(name, its value for each side) pairs."""
    rows = []
    for name in ("label", "kind", "engine", "model", "stream", "contract", "step", "weights_version"):
        values = [getattr(side, name) for side in sides]
        rows.append((name.replace("_", " "), ["–" if v is None else visible(str(v), 160) for v in values]))
    for name in ("tokens", "sequences"):
        rows.append((name, [f"{getattr(side, name):,}" for side in sides]))
    for name in ("sampling", "versions", "hardware"):
        values = [", ".join(f"{key} {scalar(v)}" for key, v in getattr(side, name).items()) for side in sides]
        rows.append((name, [visible(text, 400) for text in values]))
    return rows
