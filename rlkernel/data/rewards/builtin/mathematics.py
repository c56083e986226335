"""A reward for mathematical answers, compared by value with the library math-verify."""

from __future__ import annotations

import re
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.data.rewards.builtin.text import last_boxed, text_of

try:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
    from sympy import FiniteSet
except ImportError as error:
    raise InputError(
        f'reward math: the library math-verify is missing ({error}); pip install "rlkernel[math]"'
    ) from None


_JOINS = re.compile(r"\\(?:vee|lor|wedge|land|cup|to|(?:long)?rightarrow|implies|iff)(?![a-z])", re.IGNORECASE)
"""Symbols between two answers; math-verify would read the last one only."""


def math(completions: list[Any], answer: list[Any]) -> list[float]:
    r"""1 if the completion's answer has the value of the column `answer`, else 0.

    The completion's answer is its last `\boxed{...}`; without one, what math-verify finds in the text. `answer` is
    LaTeX or plain text, such as `\frac{1}{2}` or `1/2`.

    Raises:
        ValueError: an `answer` of the data is not mathematics.
        TimeoutError: math-verify took more than 5 seconds, so the completion has no verdict.
    """
    try:
        return [float(_equal(text_of(c), str(want))) for c, want in zip(completions, answer, strict=True)]
    except TimeoutException as error:
        raise TimeoutError(f"math-verify: {str(error)[:200]}") from None


def _equal(text: str, want: str) -> bool:
    gold = _parsed(last_boxed(want) or want)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {want!r}")
    found = last_boxed(text)
    answer = parse(text, raise_on_error=True) if found is None else _parsed(found)
    if found is not None and _JOINS.search(found) and not _JOINS.search(want):
        return False
    if answer and isinstance(answer[0], FiniteSet) and len(answer[0]) > 1 and not isinstance(gold[0], FiniteSet):
        return False  # several guesses, such as `x=2, x=4`
    return bool(verify(gold, answer, raise_on_error=True))


def _parsed(expression: str) -> list[Any]:
    return parse(f"\\boxed{{{expression}}}", raise_on_error=True)
