"""Numbers for people: four digits, no zero where there is something, no hundred percent where something is missing."""

from __future__ import annotations

import math


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
    """A share in percent; only all is 100%, only none 0%."""
    if value is None:
        return "–"
    if value in (0, 1):
        return "100%" if value else "0%"
    text = f"{value:.2%}"
    return {"0.00%": "<0.01%", "100.00%": ">99.99%"}.get(text, text)


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count and its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
