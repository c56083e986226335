"""Reads and writes safetensors with numpy. Files are not trusted: each byte must belong to exactly one tensor.

Tensors in bfloat16 and float8, which numpy lacks, are kept as bit patterns with the name of their dtype.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


# ---- JSON ------------------------------------------------------------------------------------------------------------


Array = NDArray[Any]

# name in the file -> numpy dtype that holds the bits
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_OF_NUMPY = {dtype: name for name, dtype in reversed(DTYPES.items()) if name not in ("BF16", "F8_E4M3", "F8_E5M2")}


@dataclass(frozen=True)
class Tensor:
    """An array and the dtype of its bits.

    Attributes:
        values: the array; for BF16 the unsigned 16-bit patterns.
        dtype: name of the dtype in safetensors.
    """

    values: Array
    dtype: str

    @classmethod
    def of(cls, values: Any) -> Tensor:
        """A numpy array, in little-endian byte order."""
        array = np.ascontiguousarray(values)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype not in _OF_NUMPY:
            raise TypeError(f"numpy dtype {array.dtype} has no safetensors name")
        return cls(array, _OF_NUMPY[array.dtype])

    @classmethod
    def bfloat16(cls, values: Any) -> Tensor:
        """fp32 values rounded to bfloat16, ties to even."""
        return cls(round_bfloat16(np.asarray(values, np.float32)), "BF16")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.values.shape

    def float32(self) -> Array:
        """The values in fp32; exact for every dtype of at most 32 bits."""
        if self.dtype == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


def round_bfloat16(values: Array) -> Array:
    """Bit patterns of fp32 values rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file; the same tensors give the same bytes."""
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.values.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.values).tobytes())


def read_bytes(path: Path, limit: int, what: str) -> bytes:
    """Content of a regular file of at most `limit` bytes; symbolic links are refused.

    Args:
        what: description of the file in errors.

    Raises:
        CapsuleError: the file is missing, a link, not a regular file, or too large.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise CapsuleError(Refusal.MISSING, f"{path.name}, {what}, does not exist") from None
    except OSError as error:
        if path.is_symlink():
            raise CapsuleError(Refusal.SYMLINK, f"{path.name} is a symbolic link; copy the file itself") from None
        raise CapsuleError(Refusal.NOT_REGULAR, f"{path.name} cannot be opened: {error.strerror}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CapsuleError(Refusal.NOT_REGULAR, f"{path.name} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if status.st_size > limit:
            raise CapsuleError(Refusal.TOO_LARGE, f"{path.name} has {status.st_size} bytes; at most {limit} are read")
        return file.read(status.st_size)


def parse_tensors(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> dict[str, Tensor]:
    """Tensors of the bytes of a safetensors file, as views of them.

    Raises:
        CapsuleError: the header does not describe the bytes exactly.
    """
    if len(data) < 8:
        raise CapsuleError(Refusal.TRUNCATED, f"{where} has {len(data)} bytes; a safetensors file has at least 8")
    size = int.from_bytes(data[:8], "little")
    if size > limits.header_bytes:
        raise CapsuleError(Refusal.HEADER_SIZE, f"{where}: header of {size} bytes; at most {limits.header_bytes}")
    if 8 + size > len(data):
        raise CapsuleError(Refusal.TRUNCATED, f"{where}: header of {size} bytes in a file of {len(data)}")
    header = parse_json(data[8 : 8 + size], f"{where}: header", limits)
    body = memoryview(data)[8 + size :]
    entries = list(_entries(header, where, limits))
    _check_layout(entries, len(body), where)
    return {
        e.name: Tensor(np.frombuffer(body[e.begin : e.end], DTYPES[e.dtype]).reshape(e.shape), e.dtype) for e in entries
    }


def _entries(header: Any, where: str, limits: Limits) -> Iterable[_Entry]:
    if not isinstance(header, dict):
        raise CapsuleError(Refusal.HEADER, f"{where}: the header is {type(header).__name__}; expected an object")
    if len(header) > limits.tensors:
        raise CapsuleError(Refusal.COUNT, f"{where}: {len(header)} tensors; at most {limits.tensors}")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        this = f"{where}: {name[:80]!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CapsuleError(Refusal.HEADER, f"{this} must have dtype, shape and data_offsets, nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CapsuleError(Refusal.DTYPE, f"{this} has dtype {str(dtype)[:40]!r}")
        if not _counts(shape) or len(shape) > limits.dims:
            raise CapsuleError(Refusal.SHAPE, f"{this} has shape {str(shape)[:80]}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CapsuleError(Refusal.OFFSETS_RANGE, f"{this} has offsets {str(offsets)[:80]}")
        # numpy refuses a shape such as (0, 2**62), although it has no elements
        if math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize > limits.file_bytes:
            raise CapsuleError(Refusal.SHAPE, f"{this} has shape {str(shape)[:80]}, too large")
        expected, held = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
        if expected != held:
            message = f"{this} of shape {shape} {dtype} needs {expected} bytes; its offsets hold {held}"
            raise CapsuleError(Refusal.SHAPE, message)
        yield _Entry(name, dtype, tuple(shape), *offsets)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_layout(entries: list[_Entry], size: int, where: str) -> None:
    at = 0
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        this = f"{where}: {entry.name[:80]!r}"
        if entry.end > size:
            raise CapsuleError(Refusal.OFFSETS_RANGE, f"{this} ends at byte {entry.end} of {size}")
        if entry.begin < at:
            raise CapsuleError(Refusal.OFFSETS_OVERLAP, f"{this} begins at {entry.begin}, inside another")
        if entry.begin > at:
            raise CapsuleError(Refusal.OFFSETS_GAP, f"{where}: bytes {at} to {entry.begin} belong to no tensor")
        at = entry.end
    if at != size:
        raise CapsuleError(Refusal.OFFSETS_GAP, f"{where}: bytes {at} to {size} belong to no tensor")
