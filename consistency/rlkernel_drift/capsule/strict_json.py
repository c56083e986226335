"""Parses JSON that is not trusted, and defines the size limits of all inputs that are not trusted.

Size and depth are checked before parsing; duplicate keys, NaN, infinities and very long numbers are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rlkernel_drift.errors import CapsuleError, Refusal


@dataclass(frozen=True)
class Limits:
    """Largest sizes that are read.

    Attributes:
        file_bytes: of a tensor file.
        header_bytes: of the JSON header of a tensor file.
        json_bytes: of other JSON.
        json_depth: levels of nesting of any JSON.
        tensors: in a file.
        dims: of a tensor.
        tokens: of all sequences of a capsule.
    """

    file_bytes: int = 4 << 30
    header_bytes: int = 16 << 20
    json_bytes: int = 64 << 20
    json_depth: int = 16
    tensors: int = 65536
    dims: int = 8
    tokens: int = 1 << 28


DEFAULT_LIMITS = Limits()


# possessive, and an unterminated string extends to the end: no match backtracks, so the scan takes linear time
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[{\]}]")
_DIGITS = 40


def parse_json(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value of a JSON text.

    Args:
        data: UTF-8 bytes.
        where: name of the text in errors.

    Raises:
        CapsuleError: too large, too deep, malformed, duplicate keys, NaN or Infinity, very long numbers or beyond fp64.
    """
    if len(data) > limits.json_bytes:
        raise CapsuleError(Refusal.JSON_SIZE, f"{where} has {len(data)} bytes; at most {limits.json_bytes} are read")
    _check_depth(data, where, limits.json_depth)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_constant=_bounded,
            parse_int=lambda text: int(_bounded(text)),
            parse_float=lambda text: float(_bounded(text)),
        )
    except (ValueError, RecursionError) as error:
        raise CapsuleError(Refusal.JSON, f"{where}: {error}") from None


def _check_depth(data: bytes, where: str, limit: int) -> None:
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise CapsuleError(Refusal.JSON_DEPTH, f"{where} nests deeper than {limit} levels")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of `json.loads` that raises ValueError for duplicate keys."""
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0][:80]!r} occurs twice")
    return result


def _bounded(text: str) -> str:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return text
