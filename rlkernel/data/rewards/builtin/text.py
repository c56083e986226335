"""Rewards on the text or the length of a completion: exact match, boxed answer, format, length."""

from __future__ import annotations

import re
from typing import Any

from rlkernel.data.errors import InputError

_SPACING = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right|quad|qquad)(?![A-Za-z])|\$")
"""What LaTeX shows as space or not at all."""


def text_of(completion: Any) -> str:
    """The text of a completion: its own, or its last message's for a chat prompt."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_match(
    completions: list[Any], answer: list[Any], *, ignore_case: bool = False, **columns: list[Any]
) -> list[float]:
    """1 if the completion equals the column `answer`, without the white space around both; else 0.

    Args:
        ignore_case: compare without regard to upper and lower case.
    """

    def shape(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return [float(shape(text_of(c)) == shape(str(want))) for c, want in zip(completions, answer, strict=True)]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`; None if there is none or its braces do not close."""
    starts = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not starts:
        return None
    start = starts[-1].end()
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":  # an escaped brace is text
            i += 1
        elif text[i] in "{}":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i]
        i += 1
    return None


def boxed(completions: list[Any], answer: list[Any]) -> list[float]:
    r"""1 if the completion's last `\boxed{...}` holds the text of the column `answer`, spacing aside; else 0."""

    def shape(text: str) -> str:
        return _SPACING.sub("", text)

    def right(completion: Any, want: Any) -> bool:
        found, wanted = last_boxed(text_of(completion)), last_boxed(str(want)) or str(want)
        return found is not None and shape(found) == shape(wanted)

    return [float(right(c, want)) for c, want in zip(completions, answer, strict=True)]


def format(completions: list[Any], *, pattern: str) -> list[float]:
    """1 if the regular expression `pattern` matches the whole completion, where `.` matches line ends too; else 0.

    Raises:
        InputError: the pattern is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(f"pattern {pattern!r} is not a regular expression ({error})") from None
    return [float(compiled.fullmatch(text_of(c)) is not None) for c in completions]


def length(
    completion_ids: list[list[int]],
    *,
    target: int | None = None,
    limit: int | None = None,
    buffer: int = 0,
) -> list[float]:
    """A reward for the number of tokens, end-of-sequence token included; give `target` or `limit`.

    Args:
        target: 1 at this length, falling linearly to 0 at length 0 and at twice the target.
        limit: 0 up to `limit - buffer` tokens, falling linearly to -1 at `limit`, and -1 above.
        buffer: see `limit`.

    Raises:
        InputError: both or none is given, or a number is out of range.

    Source:
        `limit` is the soft overlong punishment of DAPO, arXiv:2503.14476, equation 13.
    """
    if (target is None) == (limit is None):
        raise InputError(
            "give one of the options target and limit, and not both, such as {function: length, options: {target: 200}}"
        )
    counts = [len(ids) for ids in completion_ids]
    if target is not None:
        if target < 1:
            raise InputError(f"target is {target}; expected at least 1 token")
        return [max(0.0, 1 - abs(count - target) / target) for count in counts]
    assert limit is not None
    if not 0 <= buffer <= limit:
        raise InputError(f"buffer is {buffer}; expected 0 to limit={limit}")
    return [0.0 if n <= limit - buffer else -1.0 if n >= limit else (limit - buffer - n) / buffer for n in counts]
