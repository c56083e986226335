"""Bounds that a reader holds before it allocates anything. A capsule comes from strangers."""

from __future__ import annotations

from dataclasses import dataclass


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
