"""JSON as strangers send it, and the limits that hold for everything they send.

Size and depth are checked before anything is allocated; duplicate keys, NaN, infinities and huge numbers are refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from rlkernel_drift.errors import CapsuleError, Refusal


@dataclass(frozen=True)
class Limits:
    """Largest sizes that are read.

    Attributes:
        file_bytes: of one tensor file.
        header_bytes: of the JSON header of a tensor file.
        json_bytes, json_depth: of the manifest, and nesting of any JSON.
        tensors: in one file.
        dims: of one tensor.
        tokens: of all sequences.
        string: characters of one string.
    """

    file_bytes: int = 4 << 30
    header_bytes: int = 16 << 20
    json_bytes: int = 64 << 20
    json_depth: int = 16
    tensors: int = 65536
    dims: int = 8
    tokens: int = 1 << 28
    string: int = 1 << 16


DEFAULT_LIMITS = Limits()


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
