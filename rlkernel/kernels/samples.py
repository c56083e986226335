"""Random and adversarial values on which certification compares schedules with their anchor."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "wide", "cancel", "zeros", "denormal")
NONFINITE = "nonfinite"  # an additional kind, for ops whose result is defined for it
SCALES = (1.0, 0.37, 0.02)  # softmax scales of attention's samples, times D**-0.5
ROW_SORTS = 6  # sorts of rows within one sample of `values`


def values(
    kind: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator, second: bool = False,
    narrow: bool = False,
) -> Tensor:  # fmt: skip  # [rows, k]
    """Random values of a kind, one of `KINDS` or NONFINITE, for an operand [rows, k] of a product over k.

    - wide: evenly distributed exponents.
    - cancel: with an operand drawn with `second`, partial sums grow large, by a different power of two in each row, and
      cancel half a row later, so that rounding before the cancellation shows in the result.
    - zeros: zeros of both signs, and entire rows of -0.
    - denormal: the first operand holds denormal numbers of its dtype.
    - nonfinite: single rows with sums that overflow, with infinities, or with a NaN; some rows of the `second` operand
      have an infinity, which meets a zero in some rows of the first.

    wide and cancel use the full range of the dtype, unless `narrow` keeps products below 2^20. Fewer than ROW_SORTS
    rows get a random selection of the kind's rows.

    Raises:
        ValueError: the kind is unknown.
    """
    half_precision = dtype == torch.float16
    if rows < ROW_SORTS and not second and kind in ("zeros", NONFINITE):
        chosen = torch.randperm(ROW_SORTS, device=generator.device, generator=generator)[:rows]
        return values(kind, ROW_SORTS, k, dtype, generator)[chosen]
    x = torch.randn(rows, k, dtype=dtype, device=generator.device, generator=generator)
    if kind == "wide":
        low, high = (-4, 4) if narrow else (-13, 4) if half_precision else (-30, 30)  # fp16 results stay below 2^16
        powers = torch.randint(low, high + 1, (rows, k), dtype=torch.int8, device=x.device, generator=generator)
        x *= torch.exp2(powers.to(dtype))
    elif kind == "cancel":
        half = k // 2
        if second:
            x[:, half : 2 * half] = x[:, :half]
        else:
            low, high = (6, 6) if narrow else (8, 13) if half_precision else (10, 18)
            powers = torch.randint(low, high + 1, (rows, 1), dtype=torch.int8, device=x.device, generator=generator)
            for first in (1, 2):  # every third column stays small and is what remains of the sum
                x[:, first:half:3] *= torch.exp2(powers.to(dtype))
                x[:, half + first : 2 * half : 3] = -x[:, first:half:3]
    elif kind == "zeros":
        x *= torch.rand(rows, k, dtype=dtype, device=x.device, generator=generator) > 0.6
        if second:
            x[::3].abs_()
        else:
            x[::3] = -0.0  # its products with a positive row are -0, so the sign of the initial sum shows
    elif kind == "denormal":
        if not second:
            x *= 2.0 ** (-17 if half_precision else -128)
    elif kind == NONFINITE:
        infinity, place = float("inf"), k // 3
        if second:
            x[1::64, place] = infinity
        else:
            x[0::64] *= 2.0 ** (13 if half_precision else 124)
            x[1::64, k // 2], x[2::64, k // 2], x[3::64, k // 2] = infinity, -infinity, float("nan")
            x[4::64, 0], x[4::64, k - 1] = infinity, -infinity
            x[5::64, place] = 0.0
    elif kind != "normal":
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join((*KINDS, NONFINITE))}")
    return x


def finite(kind: str) -> str:
    """The kind for an operand that must stay finite, because only some implementations multiply it by zeros of the
    other operand."""
    return "normal" if kind == NONFINITE else kind
