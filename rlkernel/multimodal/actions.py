"""Structured actions of browser and mobile agents: JSON is checked before any reward or loss reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlkernel.multimodal.screen import Screen, box_problem, point_problem

ACTIONS: dict[str, tuple[str, ...]] = {
    "click": ("point",),
    "double_click": ("point",),
    "long_press": ("point",),
    "select": ("box",),
    "drag": ("point", "to"),
    "scroll": ("point", "direction"),
    "type": ("text",),
    "key": ("text",),
    "open": ("text",),
    "wait": (),
    "back": (),
    "done": (),
}
"""Names of actions and the fields that each needs; more fields are allowed."""
_SHOWN = 120


class Action(NamedTuple):
    """An action that was checked.

    Attributes:
        name: a key of the table of actions.
        fields: the rest of the JSON object.
        point: (x, y), if the action has one.
        box: (left, top, right, bottom), if it has one.
    """

    name: str
    fields: dict[str, Any]
    point: tuple[float, float] | None = None
    box: tuple[float, float, float, float] | None = None


def parse_action(
    text: str,
    screen: Screen,
    system: str,
    *,
    where: str = "action",
    actions: Mapping[str, Sequence[str]] = ACTIONS,
) -> Action:
    """Reads an action such as `{"action": "click", "point": [40, 25]}`.

    Args:
        text: one JSON object with `action`, and the fields of that action. `point` and `to` are [x, y], `box` is
            [left, top, right, bottom], `text` and `direction` are strings.
        screen, system: size in pixels and coordinate system, as in `screen`.
        where: begins the message of an error, such as "sample 'a', turn 3".
        actions: allowed names and the fields that each needs.

    Raises:
        ValueError: it does not parse, a field is missing or of another type, or coordinates lie outside the screen.
            The message quotes the text.
    """

    def refuse(problem: str, remedy: str) -> ValueError:
        quoted = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return ValueError(f"{where}: {problem} in {quoted!r}; {remedy}")

    try:
        value = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 18 else float(digits))
    except (ValueError, RecursionError) as error:
        raise refuse(f"JSON does not parse ({error})", "reward it as a failure, or sample it again") from None
    if not isinstance(value, dict) or not isinstance(value.get("action"), str):
        raise refuse("no object with a string 'action'", 'expected {"action": NAME, ...}')
    name = value.pop("action")
    if name not in actions:
        raise refuse(f"unknown action {name!r}", f"expected one of {', '.join(actions)}")
    for field in actions[name]:
        if field not in value:
            raise refuse(f"{name!r} lacks {field!r}", f"it needs {', '.join(actions[name])}")
    for field, size in (("point", 2), ("to", 2), ("box", 4)):
        if field in value:
            numbers = value[field]
            if not isinstance(numbers, list) or not all(type(v) in (int, float) for v in numbers):
                raise refuse(f"{field} is {numbers!r}", f"expected a list of {size} numbers")
            problem = (box_problem if size == 4 else point_problem)(numbers, screen, system)
            if problem is not None:
                raise refuse(problem.partition("; ")[0], problem.partition("; ")[2] or "check the coordinate system")
            value[field] = tuple(numbers)
    for field in ("text", "direction"):
        if field in value and not isinstance(value[field], str):
            raise refuse(f"{field} is {value[field]!r}", "expected a string")
    return Action(name, value, value.get("point"), value.get("box"))
