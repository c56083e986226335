"""attention backward on GPUs: dq owned by a program per query tile, dk and dv by a program per key tile; no atomics.

Contract: orders.py, `attention`. Scores are computed again from the saved log-sum-exp. dq is one chain over the keys
ascending, dk and dv one chain over the packed (position, head of the group) rows ascending, from the sequence's first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import (
    LOG2E,
    aligned,
    exp2,
    family,
    next_power_of_2,
    on_device,
    options,
    rows_of_heads,
)

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["ROWS"])
def delta_kernel(dout, out, delta, ROWS, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta [ROWS] = sum over d of dout * out, fp32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    inside = (row < ROWS)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    x = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(x * y, 1), mask=row < ROWS)


@triton.jit
def load_tile(base, stride, row, limit, column, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows [BLOCK, BLOCK_D] of a sequence; zeros from row `limit` on."""
    at = base + row[:, None].to(tl.int64) * stride + column[None, :]
    if MASKED:
        return tl.load(at, mask=(row < limit)[:, None] & (column < D)[None, :], other=0.0)
    if column.shape[0] != D:
        return tl.load(at, mask=(column < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def dq_block(dq, q, dout, top, delta, k, v, first, keys, position, window, k_stride, v_stride, column, scale_log2e,
             D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    at = first + tl.arange(0, BLOCK_N)
    x = load_tile(k, k_stride, at, keys, column, D, MASKED)
    p = exp2(tl.fma(tl.dot(q, tl.trans(x), input_precision="ieee"), scale_log2e, -top[:, None]))
    if MASKED:
        seen = at[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (at[None, :] > (position - window)[:, None])
        p = tl.where(seen, p, 0.0)
    y = load_tile(v, v_stride, at, keys, column, D, MASKED)
    ds = p * (tl.dot(dout, tl.trans(y), input_precision="ieee") - delta[:, None])
    return tl.dot(ds.to(x.dtype), x, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["window"])
def dq_kernel(
    dout,  # [T, H, D]
    q,  # [T, H, D]
    k,  # [S, HK, D]
    v,
    lse,  # [T, H]
    delta,  # [T, H]
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]
    dq,  # [T, H, D]
    q_stride,
    k_stride,
    v_stride,
    window,
    scale_log2e,
    scale,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_first = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - q_first
    k_first = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - k_first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    if tile * BLOCK_M >= queries * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    inside = token < queries
    past = keys - queries
    position = past + token
    first_position = past + tile * BLOCK_M // GROUP
    stop = min(keys, past + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    if HAS_WINDOW:
        start = max(0, first_position - window + 1) // BLOCK_N * BLOCK_N
        middle = start
    else:
        start = 0
        middle = min(stop, (first_position + 1) // BLOCK_N * BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    both = inside[:, None] & (column < D)[None, :]
    q += tl.cast(q_first, tl.int64) * q_stride + head * (GROUP * D)
    x = tl.load(q + token[:, None].to(tl.int64) * q_stride + (row % GROUP * D)[:, None] + column[None, :], mask=both,
                other=0.0)  # fmt: skip
    at = (tl.cast(q_first, tl.int64) + token) * (HK * GROUP) + head * GROUP + row % GROUP
    dy = tl.load(dout + (at * D)[:, None] + column[None, :], mask=both, other=0.0)
    top = tl.load(lse + at, mask=inside, other=0.0) * LOG2E
    d = tl.load(delta + at, mask=inside, other=0.0)
    k += tl.cast(k_first, tl.int64) * k_stride + head * D
    v += tl.cast(k_first, tl.int64) * v_stride + head * D
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in tl.range(start, middle, BLOCK_N):
        total = dq_block(total, x, dy, top, d, k, v, first, keys, position, window, k_stride, v_stride, column,
                         scale_log2e, D, BLOCK_N, HAS_WINDOW, False)  # fmt: skip
    for first in tl.range(middle, stop, BLOCK_N):
        total = dq_block(total, x, dy, top, d, k, v, first, keys, position, window, k_stride, v_stride, column,
                         scale_log2e, D, BLOCK_N, HAS_WINDOW, True)  # fmt: skip
    tl.store(dq + (at * D)[:, None] + column[None, :], (total * scale).to(dq.dtype.element_ty), mask=both)


@triton.jit
def dkv_block(dk, dv, k, v, q, dout, lse, delta, first, rows, past, at, window, q_stride, column, scale_log2e,
              HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    row = first + tl.arange(0, BLOCK_N)
    token = row // GROUP
    inside = row < rows
    q_at = token.to(tl.int64) * q_stride + row % GROUP * D
    to = token.to(tl.int64) * (HK * GROUP) + row % GROUP
    both = inside[:, None] & (column < D)[None, :]
    x = tl.load(q + q_at[:, None] + column[None, :], mask=both, other=0.0)
    top = tl.load(lse + to, mask=inside, other=float("inf")) * LOG2E  # a row past the end has probability 0
    p = exp2(tl.fma(tl.dot(k, tl.trans(x), input_precision="ieee"), scale_log2e, -top[None, :]))
    if MASKED:
        position = past + token
        seen = at[:, None] <= position[None, :]
        if HAS_WINDOW:
            seen = seen & (at[:, None] > (position - window)[None, :])
        p = tl.where(seen, p, 0.0)
    dy = tl.load(dout + (to * D)[:, None] + column[None, :], mask=both, other=0.0)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
    d = tl.load(delta + to, mask=inside, other=0.0)
    ds = p * (tl.dot(v, tl.trans(dy), input_precision="ieee") - d[None, :])
    dk = tl.dot(ds.to(x.dtype), x, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["window"])
def dkv_kernel(
    dout,  # [T, H, D]
    q,  # [T, H, D]
    k,  # [S, HK, D]
    v,
    lse,  # [T, H]
    delta,  # [T, H]
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]
    dk,  # [S, HK, D]
    dv,
    q_stride,
    k_stride,
    v_stride,
    window,
    scale_log2e,
    scale,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_first = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - q_first
    k_first = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - k_first
    begin = tl.program_id(0) * BLOCK_M
    if begin >= keys:
        return
    past = keys - queries
    rows = queries * GROUP
    at = begin + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    k += tl.cast(k_first, tl.int64) * k_stride + head * D
    v += tl.cast(k_first, tl.int64) * v_stride + head * D
    x = load_tile(k, k_stride, at, keys, column, D, True)
    y = load_tile(v, v_stride, at, keys, column, D, True)
    q += tl.cast(q_first, tl.int64) * q_stride + head * (GROUP * D)
    row = tl.cast(q_first, tl.int64) * (HK * GROUP) + head * GROUP
    dout += row * D
    lse += row
    delta += row
    # Row tiles lie at multiples of BLOCK_N from the sequence's first query, whatever the key tile: the chain's groups
    # of 16 rows then never move.
    start = max(0, begin - past) * GROUP // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        stop = min(rows, (begin + BLOCK_M - 1 + window - past) * GROUP)
        middle = max(start, stop)
    else:
        stop = rows
        middle = max(start, min(stop, tl.cdiv(max(0, begin + BLOCK_M - 1 - past) * GROUP, BLOCK_N) * BLOCK_N))
    total_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total_v = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in tl.range(start, middle, BLOCK_N):
        total_k, total_v = dkv_block(total_k, total_v, x, y, q, dout, lse, delta, first, rows, past, at, window,
                                     q_stride, column, scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW,
                                     True)  # fmt: skip
    for first in tl.range(middle, stop, BLOCK_N):
        total_k, total_v = dkv_block(total_k, total_v, x, y, q, dout, lse, delta, first, rows, past, at, window,
                                     q_stride, column, scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW,
                                     False)  # fmt: skip
    both = (at < keys)[:, None] & (column < D)[None, :]
    to = ((tl.cast(k_first, tl.int64) + at) * (HK * D) + head * D)[:, None] + column[None, :]
    tl.store(dk + to, (total_k * scale).to(dk.dtype.element_ty), mask=both)
    tl.store(dv + to, total_v.to(dv.dtype.element_ty), mask=both)


# ---- tiles and launcher --------------------------------------------------------------------------


def backward_tiles(d: int, element_size: int, family: str) -> tuple[dict[str, int], dict[str, int]]:
    """Launch shapes of (dq, dkv): BLOCK_M rows or keys that a program owns, BLOCK_N it walks over at a time.

    Every shape gives the same bits, as all products are chains.
    """
    dq, dkv = (128, 64, 8, 2), (128, 64, 8, 2)
    if element_size == 4:
        dq = dkv = (16, 16, 4, 1)
    elif family == "amd":
        dq, dkv = (64, 32, 4, 2), (64, 32, 4, 1)
    elif d > 128:
        dq, dkv = (64, 64, 4, 1), (64, 32, 8, 1)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return dict(zip(names, dq, strict=True)), dict(zip(names, dkv, strict=True))


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    tiles: tuple[dict[str, int], dict[str, int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out = aligned(dout), aligned(out)
    q, k, v = rows_of_heads(q), rows_of_heads(k), rows_of_heads(v)
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    (t, h, d), hk = q.shape, k.shape[1]
    group, batch = h // hk, cu_q.shape[0] - 1
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if k.shape[0] == 0:
        return dq, dk, dv
    delta = torch.empty(t, h, dtype=torch.float32, device=q.device)
    block_d = next_power_of_2(d, 16)
    shape: dict[str, Any] = {"HK": hk, "GROUP": group, "D": d, "BLOCK_D": block_d, "HAS_WINDOW": window is not None}
    numbers = (q.stride(0), k.stride(0), v.stride(0), window or 0, scale * LOG2E.value, scale)
    for_dq, for_dkv = tiles or backward_tiles(d, q.element_size(), family(q))
    with on_device(q):
        if t > 0:
            delta_kernel[(triton.cdiv(t * h, 32),)](
                dout, out, delta, t * h, D=d, BLOCK_D=block_d, BLOCK_M=32, num_warps=4, **options()
            )
            dq_kernel[(triton.cdiv(max_seqlen_q * group, for_dq["BLOCK_M"]), hk, batch)](
                dout, q, k, v, lse, delta, cu_q, cu_k, dq, *numbers, **shape, **for_dq, **options(matmul=True)
            )
        dkv_kernel[(triton.cdiv(max_seqlen_k, for_dkv["BLOCK_M"]), hk, batch)](
            dout, q, k, v, lse, delta, cu_q, cu_k, dk, dv, *numbers, **shape, **for_dkv, **options(matmul=True)
        )
    return dq, dk, dv


# ---- ahead of time -------------------------------------------------------------------------------


AMD = ("gfx942", "gfx90a")


def _variant(name: str, kernel: Any, kind: str, d: int, launch: dict[str, int], window: bool, main: bool,
             targets: tuple[str, ...]) -> Variant:  # fmt: skip
    tensors = ("dout", "q", "k", "v", "dq", "dk", "dv")
    types = {n: f"*{kind}:16" for n in tensors if n in kernel.arg_names}
    types |= {
        "lse": "*fp32:16", "delta": "*fp32:16", "cu_q": "*i32:16", "cu_k": "*i32:16", "q_stride": "i32:16",
        "k_stride": "i32:16", "v_stride": "i32:16", "window": "i32", "scale_log2e": "fp32", "scale": "fp32",
    }  # fmt: skip
    constants = {"HK": 8, "GROUP": 2, "D": d, "BLOCK_D": next_power_of_2(d, 16), "HAS_WINDOW": window}
    constants |= {n: launch[n] for n in ("BLOCK_M", "BLOCK_N")}
    launched = (launch["num_warps"], launch["num_stages"])
    return Variant(name, kernel, types, constants, *launched, matmul=True, main=main, targets=targets)


def _variants(
    kind: str, d: int, targets: tuple[str, ...], window: bool = False, main: bool = True
) -> tuple[Variant, ...]:
    for_dq, for_dkv = backward_tiles(d, 4 if kind == "fp32" else 2, "amd" if targets == AMD else "hopper")
    label = f"{kind} d{d}{' window' if window else ''}"
    return (
        _variant(f"attention dq {label}", dq_kernel, kind, d, for_dq, window, main, targets),
        _variant(f"attention dkv {label}", dkv_kernel, kind, d, for_dkv, window, main, targets),
    )


AOT: tuple[Variant, ...] = (
    Variant(
        "attention delta", delta_kernel,
        {"dout": "*bf16:16", "out": "*bf16:16", "delta": "*fp32:16", "ROWS": "i32"},
        {"D": 128, "BLOCK_D": 128, "BLOCK_M": 32},
    ),
    *_variants("bf16", 128, targets=("sm_90", "sm_100")),
    *_variants("bf16", 128, targets=("sm_80",), main=False),
    *_variants("bf16", 128, targets=AMD),
    *_variants("bf16", 64, targets=("sm_90",)),
    *_variants("fp16", 128, window=True, targets=("sm_90",)),
    *_variants("bf16", 256, targets=("sm_90",), main=False),
    *_variants("fp32", 64, targets=("sm_80", "sm_90"), main=False),
    *_variants("fp32", 64, targets=AMD, main=False),
)  # fmt: skip
