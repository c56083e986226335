"""HTML elements and formatted numbers. Plain strings are not trusted: they are escaped, hidden characters spelled out.

Inline styles and event handlers are refused, because the page's policy would drop them silently.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable

_MAX_MARKS = 2
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_NAMED = {"\n": "↵", "\t": "⇥"}
_VOID = frozenset({"meta", "link", "br", "col"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = object
"""Markup, text, a number, an iterable of these, or None or False for nothing."""


def visible(text: str, limit: int | None = None) -> str:
    """Text in which controls, direction marks, blanks and surrogates are spelled out as code points.

    Args:
        limit: characters of the result, beyond which an ellipsis stands for the rest.
    """
    parts: list[str] = []
    marks = size = 0
    for character in text:
        part = _NAMED.get(character) or character
        category = unicodedata.category(character)
        if category[0] == "M":
            marks += 1
            if marks > _MAX_MARKS:
                part = _code_point(character)
            elif not parts:
                part = "◌" + character
        else:
            marks = 0
            hidden = category[0] in "CZ" or character in _BLANK
            if hidden and character != " " and part == character:
                part = _code_point(character)
        if limit is not None and size + len(part) > limit:
            parts.append("…")
            break
        parts.append(part)
        size += len(part)
    return "".join(parts)


def _code_point(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"


def escape(text: str) -> Markup:
    """Text as HTML, for content and for quoted attributes."""
    return Markup(html.escape(visible(text)))


def raw(*parts: object) -> Markup:
    """The parts joined; only for markup and constants of this package."""
    return Markup("".join(str(part) for part in parts))


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """One element.

    Args:
        attributes: `class_` is class; underscores become hyphens; True has no value; None and False are left out.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if key == "style" or key.lower().startswith("on"):
            raise ValueError(f"attribute {key}: the policy of the page forbids it; use a class")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            text = _short(value) if isinstance(value, float) else str(value)
            words.append(f'{key}="{escape(text)}"')
    if name in _VOID:
        return Markup(f"<{' '.join(words)}>")
    return Markup(f"<{' '.join(words)}>{_child(children)}</{name}>")


def _short(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _child(child: Child) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (str, int, float)):
        return escape(str(child))
    if isinstance(child, Iterable):
        return "".join(map(_child, child))
    raise TypeError(f"{type(child).__name__} cannot be a child of an element")


def number(value: float | None, digits: int = 4) -> str:
    """A value with a few significant digits; an en dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        if float(value).is_integer():
            return f"{int(value):,}"
        text = f"{value:.{digits}g}"
        return text if "e" not in text else f"{value:,.0f}"
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def signed(value: float | None) -> str:
    """A value with its sign."""
    return f"+{number(value)}" if value is not None and value > 0 else number(value)


def share(value: float | None) -> str:
    """A share in percent, never rounded to 0% or 100%."""
    if value is None:
        return "–"
    if value in (0, 1):
        return "100%" if value else "0%"
    text = f"{value:.2%}"
    return {"0.00%": "<0.01%", "100.00%": ">99.99%"}.get(text, text)


def fraction(step: float) -> str:
    """The step of a lattice, as 1/32 below one."""
    return f"1/{round(1 / step)}" if 0 < step < 1 else number(step)


def plural(count: int, one: str) -> str:
    """A count and its noun."""
    return f"{count:,} {one if count == 1 else one + 's'}"
