"""group_advantages on GPUs: one kernel from rewards to advantages, a few groups per program.

Contract: docs/ops/group_advantages.md, with the bits of `kernels/reference/group_advantages.py`: rows are shifted by
their first reward and summed in LANES lanes, which are folded in halves; division and sqrt are correctly rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.reference.group_advantages import LANES
from rlkernel.kernels.triton.common import cdiv, on_device, options

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def fold_lanes(x):
    """Sums [ROWS, 1] of the rows of x [ROWS, 2^n], folded in halves."""
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1)
    return x


@triton.jit
def row_total(rewards, begin, first, mean, here, G, SQUARES: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr):
    """Sum over each row of reward - first, or of (reward - first - mean)^2 if SQUARES; all [ROWS, 1]."""
    j = tl.arange(0, LANES)[None, :]
    total = tl.load(rewards + begin + j, mask=here & (j < G), other=0.0) - first
    total = tl.where(j < G, (total - mean) * (total - mean) if SQUARES else total, 0.0)
    for start in range(LANES, G, LANES * UNROLL):
        values = ()
        for u in tl.static_range(UNROLL):  # issues all loads before the first addition
            at = start + u * LANES + j
            values = values + (tl.load(rewards + begin + at, mask=here & (at < G), other=0.0),)
        for u in tl.static_range(UNROLL):
            x = values[u] - first
            if SQUARES:
                x = (x - mean) * (x - mean)
            # lanes past the end add 0, which changes no lane: the first number of each row is +0
            total += tl.where(start + u * LANES + j < G, x, 0.0)
    return fold_lanes(total)


@triton.jit
def over(x, count):
    """x / max(1, count), correctly rounded."""
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + tl.maximum(count, 1).to(tl.float32))


@triton.jit
def deviation(rewards, begin, first, mean, here, G, LANES: tl.constexpr, UNROLL: tl.constexpr):
    """Sample standard deviation [ROWS, 1] of each row; 0 if G is 1."""
    return tl.sqrt_rn(over(row_total(rewards, begin, first, mean, here, G, True, LANES, UNROLL), G - 1))


@triton.jit(do_not_specialize=["B"])
def deviation_kernel(rewards, spread, B, LANES: tl.constexpr, UNROLL: tl.constexpr):
    """spread [] = sample standard deviation of rewards [B]."""
    zero = tl.zeros((1, 1), tl.int64)
    here = zero == 0
    first = tl.load(rewards + zero)
    mean = over(row_total(rewards, zero, first, first, here, B, False, LANES, UNROLL), B)
    tl.store(spread + zero, deviation(rewards, zero, first, mean, here, B, LANES, UNROLL))


@triton.jit(do_not_specialize=["N", "G"])
def group_advantages_kernel(
    rewards,  # [N * G]
    spread,  # []: standard deviation of the batch
    out,  # [N * G]
    N,
    G,
    eps,
    LEAVE_ONE_OUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    here = row < N
    begin = row.to(tl.int64) * G
    first = tl.load(rewards + begin, mask=here, other=0.0)
    total = row_total(rewards, begin, first, first, here, G, False, LANES, UNROLL)
    mean = over(total, G)
    divisor = mean
    if NORMALIZE:
        if spread is None:
            divisor = deviation(rewards, begin, first, mean, here, G, LANES, UNROLL) + eps
        else:
            divisor = tl.zeros((ROWS, 1), tl.float32) + (tl.load(spread) + eps)
    for start in range(0, G, LANES):
        at = start + tl.arange(0, LANES)[None, :]
        inside = here & (at < G)
        x = tl.load(rewards + begin + at, mask=inside, other=0.0) - first
        if LEAVE_ONE_OUT:
            x = x - over(total - x, G - 1)
        else:
            x = x - mean
        if NORMALIZE:
            x = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
        tl.store(out + begin + at, x, mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

_TILE, _LONG = {"LANES": LANES, "UNROLL": 8}, {"LANES": LANES, "UNROLL": 32}


def group_advantages(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    """Advantages like rewards [N * G] fp32. Rewards are not checked, because that would synchronise; NaN stays NaN."""
    if mode == "none" or rewards.numel() == 0:
        return rewards.clone()
    rewards = rewards.contiguous()
    out = torch.empty_like(rewards)
    groups = rewards.shape[0] // group_size
    leave_one_out, rows = mode == "leave_one_out", 2
    normalize = normalize_std and not leave_one_out
    spread = rewards.new_empty(()) if normalize and mode == "batch" else None
    with on_device(rewards):
        if spread is not None:
            deviation_kernel[(1,)](rewards, spread, rewards.shape[0], num_warps=1, **_LONG, **options())
        group_advantages_kernel[(cdiv(groups, rows),)](
            rewards, spread, out, groups, group_size, eps, LEAVE_ONE_OUT=leave_one_out, NORMALIZE=normalize,
            ROWS=rows, num_warps=1, **_TILE, **options(),
        )  # fmt: skip
    return out
