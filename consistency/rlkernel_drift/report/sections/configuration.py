"""What differs between the two sides, and what both said about themselves."""

from __future__ import annotations

from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.sections.common import Section, clip, more, scalar, table
from rlkernel_drift.verdict import Difference, Scalar, Side, Verdict

_KINDS = {"numerics": "changes numbers", "version": "version", "other": "other"}
_ROWS = 120


def configuration(verdict: Verdict) -> Section | None:
    """The section; None where a side said nothing."""
    sides = [side for side in (verdict.rollout, verdict.train) if side is not None]
    if not verdict.differences and not (len(sides) == 2 and all(_settings(side) for side in sides)):
        return None
    parts: list[Child] = []
    head = [("setting", ""), ("rollout", ""), ("train", ""), ("kind", "")]
    if verdict.differences:
        shown = verdict.differences[:_ROWS]
        parts.append(table(head, [_row(d) for d in shown], "differences"))
        parts.append(more(len(shown), len(verdict.differences), "differences"))
    else:
        parts.append(tag("p", "No setting, version or device that both sides recorded differs.", class_="aside"))
    same = _same(verdict)
    if same:
        rows = [
            tag("tr", tag("th", clip(key, 80), scope="row"), tag("td", scalar(value))) for key, value in same[:_ROWS]
        ]
        title = f"Equal on both sides ({len(same)})"
        parts.append(tag("details", tag("summary", title), table([("setting", ""), ("both", "")], rows, "same")))
    count = sum(d.weight == "numerics" for d in verdict.differences)
    note = f"{len(verdict.differences)} differ, {count} of them change numbers" if verdict.differences else ""
    return Section("configuration", "Configuration", tag("div", parts), note)


def _row(difference: Difference) -> Markup:
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
