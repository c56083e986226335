"""Fingerprints: digests of weights under their Hugging Face names, 64-bit hashes of rows of operator outputs."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule.manifest import WeightFingerprint
from rlkernel_drift.capsule.tensor_file import Array, Tensor, round_bfloat16

if TYPE_CHECKING:
    import torch

_PART = 1 << 20
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# an odd multiplier is a bijection of an element's bits, and the wrapping integer sum does not depend on the order
_STEP, _START = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def digest(data: bytes | memoryview) -> str:
    """128 bits of BLAKE2b, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def weight_fingerprint(tensor: Tensor) -> WeightFingerprint:
    """Fingerprint of one weight as it is stored."""
    own = digest(np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8).data)
    bf16, norm = None, None
    if tensor.dtype in ("F32", "F16", "BF16"):
        flat = tensor.values.reshape(-1)
        parts = (Tensor(flat[i : i + _PART], tensor.dtype).float32() for i in range(0, flat.size, _PART))
        norm = math.sqrt(math.fsum(float(np.dot(part, part)) for part in parts))
        bf16 = own if tensor.dtype == "BF16" else digest(round_bfloat16(tensor.float32()).tobytes())
        norm = norm if math.isfinite(norm) else None
    return WeightFingerprint(dtype=tensor.dtype, shape=list(tensor.shape), digest=own, bf16=bf16, norm=norm)


def row_fingerprints(values: Array) -> NDArray[np.int64]:  # [T, width] -> [T]
    """64-bit hash of the bits of each row in wrapping integers; `row_fingerprints_torch` returns the same bits."""
    bits = np.ascontiguousarray(values).view(_BITS[values.dtype.itemsize]).astype(np.uint64)
    with np.errstate(over="ignore"):
        multipliers = _multipliers(values.shape[1])
        mixed = (bits + np.uint64(1)) * multipliers
        mixed = mixed ^ (mixed >> np.uint64(29))
        return (mixed * multipliers).sum(1, dtype=np.uint64).view(np.int64)


def _multipliers(width: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return (np.arange(width, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(_START)) | np.uint64(1)


def multipliers_torch(width: int, device: torch.device | str) -> torch.Tensor:
    """[width] int64 multipliers of the hash; call this before a CUDA graph is captured."""
    import torch

    return torch.from_numpy(_multipliers(width).view(np.int64).copy()).to(device)


def row_fingerprints_torch(
    values: torch.Tensor, multipliers: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The hash of `row_fingerprints` on the device, without synchronisation, so it can run in a CUDA graph.

    Args:
        values: [T, width] of any floating dtype.
        multipliers: those of `multipliers_torch`.
        out: [T] int64, written in place.
    """
    import torch

    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = values.element_size()
    bits = values.contiguous().view(views[size]).to(torch.int64)
    if size in (2, 4):
        bits = bits & ((1 << (8 * size)) - 1)
    mixed = (bits + 1) * multipliers
    # torch shifts int64 arithmetically; the mask makes it the logical shift of numpy
    mixed = mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
    result = (mixed * multipliers).sum(-1)
    if out is None:
        return result
    out.copy_(result)
    return out
