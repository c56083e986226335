"""The token strip, coloured by difference, and the largest differences. Texts are a model's output, so not trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate

from rlkernel_drift.report.markup import Child, Markup, number, plural, signed, tag, visible
from rlkernel_drift.report.sections.common import Section, fold, table
from rlkernel_drift.verdict import Token, Verdict

MAX_STRIP = 2000
MAX_SEQUENCES = 8
MAX_WORST = 50
_TEXT = 32
_OPEN = 2
_LEVELS = 5
_ROUND = (1.0, 2.0, 5.0)


def tokens(verdict: Verdict, data: dict[str, object], budget: float = 1.0) -> Section | None:
    """The section; None without tokens. Adds the script's part to `data`.

    Args:
        budget: share of `MAX_STRIP` that fits the page.
    """
    view = verdict.tokens
    if view is None or not (view.strip or view.worst):
        return None
    strips = sample(view.strip, max(8, int(MAX_STRIP * budget)))
    edges = levels(t for strip in (*strips, view.worst) for t in strip)
    shown = [token for strip in strips for token in strip]
    data["tokens"] = [_row(token) for token in shown]
    parts: list[Child] = [_words(verdict, strips), _legend(edges)]
    place = {(token.sequence, token.index): i for i, token in enumerate(shown)}
    starts = accumulate(map(len, strips), initial=0)
    drawn = [_strip(strip, edges, start) for strip, start in zip(strips, starts, strict=False)]
    parts += drawn[:_OPEN]
    if drawn[_OPEN:]:
        title = plural(len(drawn) - _OPEN, "more sequence")
        parts.append(tag("details", tag("summary", title), drawn[_OPEN:], class_="fold"))
    if view.worst:
        parts.append(_worst(view.worst, edges, place))
    note = f"{len(shown):,} shown" if shown else ""
    return Section("tokens", "Tokens", tag("div", parts), note)


def sample(strips: list[list[Token]], limit: int) -> list[list[Token]]:
    """Equal windows of the first sequences, each around its largest difference."""
    chosen = [strip for strip in strips if strip][:MAX_SEQUENCES]
    if sum(map(len, chosen)) <= limit:
        return chosen
    each = max(1, limit // len(chosen))
    return [_window(strip, each) for strip in chosen]


def _window(strip: list[Token], size: int) -> list[Token]:
    if len(strip) <= size:
        return strip
    worst = max(range(len(strip)), key=lambda i: abs(_finite(strip[i].difference) or 0.0))
    start = min(max(0, worst - size // 2), len(strip) - size)
    return strip[start : start + size]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def levels(shown: Iterable[Token]) -> list[float]:
    """Lower edges of the colour strengths above the faintest: 1, 2 and 5 times powers of ten, up to the largest."""
    sizes = sorted(abs(d) for t in shown if (d := _finite(t.difference)))
    if not sizes:
        return []
    # a quantile instead of the maximum, because one outlier would leave all other tokens pale
    top = sizes[min(len(sizes) - 1, int(0.995 * len(sizes)))]
    decade = math.floor(math.log10(top))
    below = [m * 10.0**e for e in range(decade - 2, decade + 1) for m in _ROUND if m * 10.0**e <= top]
    return below[1 - _LEVELS :]


def colour(token: Token, edges: list[float]) -> str:
    """Class of a token: not compared, equal, or a sign with a strength from 1 to 5."""
    d = _finite(token.difference)
    if d is None:
        return "m"
    if d == 0:
        return "z"
    return f"{'p' if d > 0 else 'n'}{1 + sum(abs(d) >= edge for edge in edges)}"


def _row(token: Token) -> list[object]:
    """The values that the script shows on the token's card."""
    return [token.sequence, token.index, token.position, token.id, *_values(token, 6), visible(token.span, 24)]


def _values(token: Token, digits: int) -> list[str]:
    """Rollout, train and their difference."""
    sides = [number(_finite(value), digits) for value in (token.rollout, token.train)]
    return [*sides, signed(_finite(token.difference))]


def _text(token: Token) -> str:
    return f"#{token.id}" if token.text is None else visible(token.text, _TEXT) or "∅"


def _spaces(text: str) -> str:
    """Outer spaces as dots, because they are invisible in a cell."""
    return re.sub("^ +| +$", lambda found: "·" * len(found[0]), text)


def _strip(strip: list[Token], edges: list[float], start: int) -> Markup:
    first, last = strip[0], strip[-1]
    pieces: list[Child] = []
    span = None
    for i, token in enumerate(strip):
        if token.span != span and token.span:
            pieces.append(tag("span", visible(token.span, 24), class_="span"))
        span = token.span
        redacted = " id" if token.text is None else ""
        pieces.append(tag("b", _text(token), class_=colour(token, edges) + redacted, id=f"t{start + i}"))
        if token.text is not None and token.text.endswith("\n"):
            pieces.append(tag("br"))
    title = f"Sequence {first.sequence}, tokens {first.index:,} to {last.index:,}"
    label = f"{title}. Arrow keys move, w goes to the next of the largest differences."
    body = tag("div", pieces, class_="strip", tabindex="0", role="group", aria_label=label, data_start=start, dir="ltr")
    return tag("div", tag("h3", title), body, class_="sequence")


def _legend(edges: list[float]) -> Markup | None:
    if not edges:
        return None
    steps = [f"< {number(edges[0], 2)}", *(f"≥ {number(edge, 2)}" for edge in edges)]
    scale = lambda sign: [tag("i", class_=f"swatch {sign}{i + 1}", title=step) for i, step in enumerate(steps)]
    return tag(
        "p",
        tag("span", "training finds it less likely ", list(reversed(scale("n")))),
        tag("i", class_="swatch z"),
        tag("span", scale("p"), " more likely"),
        tag("span", f"steps at |d| = {', '.join(number(edge, 2) for edge in edges)}", class_="steps"),
        tag("span", "grey: not compared", class_="steps"),
        class_="scale",
    )


def _words(verdict: Verdict, strips: list[list[Token]]) -> Markup:
    """How many of how many tokens are shown, and how they were chosen."""
    shown = sum(map(len, strips))
    given = sum(map(len, verdict.tokens.strip)) if verdict.tokens else 0
    side = verdict.rollout
    of = max(given, side.tokens if side else 0, verdict.statistics.tokens if verdict.statistics else 0)
    total = side.sequences if side else 0
    if shown >= of:
        return tag("p", f"All {plural(of, 'token')} of {plural(len(strips), 'sequence')}.", class_="lead")
    which = plural(len(strips), "sequence") + (f" of {total:,}" if total > len(strips) else "")
    words = f"A sample: {shown:,} of {plural(of, 'token')}, from {which}"
    return tag("p", f"{words}: those with the largest differences, cut to windows around them.", class_="lead")


def _worst(worst: list[Token], edges: list[float], place: dict[tuple[int, int], int]) -> Markup:
    columns = [("token", ""), ("sequence", "n"), ("index", "n"), ("id", "n"), ("rollout", "n"), ("train", "n")]
    columns += [("train - rollout", "n"), ("span", "")]
    rows = []
    for token in worst[:MAX_WORST]:
        here = place.get((token.sequence, token.index))
        words = tag("b", _spaces(_text(token)), class_=colour(token, edges))
        cell = words if here is None else tag("a", words, href=f"#t{here}", title="show in the strip")
        first = tag("span", cell, class_="tokens", dir="ltr")
        span = visible(token.span, 24)
        rows.append([first, f"{token.sequence:,}", f"{token.index:,}", str(token.id), *_values(token, 5), span])
    few = 10
    rest = fold(f"{len(rows) - few} more", table(columns, rows[few:], "worst")) if len(rows) > few else None
    return tag("div", tag("h3", "Largest differences"), table(columns, rows[:few], "worst"), rest)
