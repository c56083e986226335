"""JSON as strangers send it: size and depth checked first; duplicate keys, NaN, infinities and huge numbers refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rlkernel_drift.capsule.limits import DEFAULT_LIMITS, Limits
from rlkernel_drift.errors import CapsuleError, Refusal

# Possessive, and an unterminated string reaches to the end: a match never fails, so the scan is linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[{\]}]")
_DIGITS = 40


def parse_json(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value of a JSON text.

    Args:
        data: UTF-8 bytes; where: names the text in errors.

    Raises:
        CapsuleError: too large, too deep, malformed, a key twice, NaN or Infinity, a number of absurd length or beyond
            fp64.
    """
    if len(data) > limits.json_bytes:
        raise CapsuleError(Refusal.JSON_SIZE, f"{where} has {len(data)} bytes; at most {limits.json_bytes} are read")
    _check_depth(data, where, limits.json_depth)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_short(int),
            parse_float=_short(float),
        )
    except (ValueError, RecursionError) as error:
        raise CapsuleError(Refusal.JSON, f"{where}: {error}") from None


def _check_depth(data: bytes, where: str, limit: int) -> None:
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise CapsuleError(Refusal.JSON_DEPTH, f"{where} nests deeper than {limit} levels")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:80]!r} stands twice in one object")
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _short(kind: Any) -> Any:
    def convert(text: str) -> Any:
        if len(text) > _DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        value = kind(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is beyond the range of numbers")
        return value

    return convert
