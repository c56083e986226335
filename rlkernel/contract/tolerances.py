"""The tolerance table per dtype, and the accuracy rule of the tests of all ops.

As in FlashAttention's tests, the error of an op against fp64 may be at most twice that of plain torch in the same
dtype, plus a small multiple of the largest value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Row of `tolerances.json`: factor of the baseline's error; grains relative to the largest true value."""

    factor: float
    grain: float
    grain_cross: float


def _load() -> dict[torch.dtype, Tolerance]:
    table = json.loads((files("rlkernel.contract") / "tolerances.json").read_text())
    return {getattr(torch, name): Tolerance(**row) for name, row in table.items() if name != "comment"}


TOLERANCES: dict[torch.dtype, Tolerance] = _load()


def assert_accurate(
    out: Tensor, truth: Tensor, baseline: Tensor | None, what: str = "output", dtype: torch.dtype | None = None
) -> None:
    """Raises AssertionError unless `out` is as close to the fp64 `truth` as the table requires.

    Args:
        out: result under test, any shape.
        truth: fp64 (or fp32) values of the same shape.
        baseline: result of plain torch in the same dtype, or None to use only the table's cross-device grain.
        what: name printed in the error.
        dtype: row of the table, default `out.dtype`; the input dtype if an fp32 result comes from bf16 inputs.
    """
    tolerance = TOLERANCES[dtype or out.dtype]
    ref = truth.detach().double().cpu()
    value = out.detach().double().cpu()
    if value.shape != ref.shape:
        raise AssertionError(f"{what}: shape {tuple(value.shape)}, expected {tuple(ref.shape)}")
    finite = torch.isfinite(ref)
    same = torch.isfinite(value) & finite | (value == ref) | (torch.isnan(value) & torch.isnan(ref))
    if not bool(same.all()):
        raise AssertionError(f"{what}: non-finite elements differ from the truth")
    if not bool(finite.any()):
        return
    worst = float((value - ref).abs()[finite].max())
    scale = float(ref[finite].abs().max())
    if baseline is None:
        limit = tolerance.grain_cross * scale
    else:
        limit = tolerance.factor * float((baseline.detach().double().cpu() - ref).abs()[finite].max())
        limit += tolerance.grain * scale
    if not worst <= limit:
        raise AssertionError(f"{what}: error {worst:.3g} exceeds {limit:.3g} (largest value {scale:.3g})")
