"""Errors of inputs; each reason has a stable name for scripts and tests."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """The reason for which a capsule is refused."""

    MISSING = "file-missing"
    SYMLINK = "symlink"
    PATH = "path-traversal"
    NOT_REGULAR = "not-a-regular-file"
    TOO_LARGE = "file-too-large"
    TRUNCATED = "file-truncated"
    DIGEST = "digest-mismatch"
    JSON = "json-malformed"
    JSON_DEPTH = "json-too-deep"
    JSON_SIZE = "json-too-large"
    FORMAT = "format-unknown"
    MANIFEST = "manifest-invalid"
    HEADER_SIZE = "header-too-large"
    HEADER = "header-malformed"
    DTYPE = "dtype-unknown"
    SHAPE = "shape-invalid"
    OFFSETS_RANGE = "offsets-out-of-range"
    OFFSETS_OVERLAP = "offsets-overlap"
    OFFSETS_GAP = "offsets-leave-a-gap"
    COUNT = "too-many"
    TENSOR_MISSING = "tensor-missing"
    TENSOR_UNKNOWN = "tensor-unknown"
    VALUE = "value-out-of-range"


class DriftError(Exception):
    """An input or a request that cannot be used; exit status 2."""


class CapsuleError(DriftError):
    """A refused capsule.

    Attributes:
        refusal: the reason's stable name; reason: the rest of the message.
    """

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(f"{refusal.value}: {message}")
        self.refusal, self.reason = refusal, message


class UnknownInputError(DriftError):
    """A path that is not a capsule, run folder, model directory or metrics file."""
