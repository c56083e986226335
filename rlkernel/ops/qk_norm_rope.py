"""qk_norm_rope: `rms_norm` of every query and key head, then `rope`, in one pass. Rollout only: it has no gradient.

Contract: orders.py, `rms_norm` and `rope`; the bits of the two ops one after the other.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlkernel.kernels import select
from rlkernel.ops._library import (
    check,
    check_devices,
    check_float,
    check_tensors,
    define,
    is_stock,
    refuse_gradient,
    wrote,
)
from rlkernel.ops.attention import check_new_rows, store_kv_
from rlkernel.ops.rms_norm import check_eps, rms_norm
from rlkernel.ops.rope import check_table, rope

_qk_norm_rope = define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, Tensor cos_sin) "
    "-> (Tensor, Tensor)",
    "qk_norm_rope",
    fake=lambda q, k, q_weight, k_weight, eps, positions, cos_sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


def _misfit(op: str, name: str, weight: Tensor, q: Tensor) -> str:
    return f"{op}: {name} is {tuple(weight.shape)} {weight.dtype}; expected [D={q.shape[2]}] {q.dtype}"


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
) -> float:
    """eps as a float; raises where an argument does not fit."""
    check_tensors(op, q=q, k=k, q_weight=q_weight, k_weight=k_weight, positions=positions, cos_sin=cos_sin)
    eps = check_eps(op, eps)
    check(q.dim() == 3, lambda: f"{op}: q is {tuple(q.shape)}; expected [T, H, D]")
    t, _, d = q.shape
    check(
        k.dim() == 3 and k.shape[0] == t and k.shape[2] == d and k.dtype == q.dtype,
        lambda: f"{op}: k is {tuple(k.shape)} {k.dtype}; expected [T={t}, HK, D={d}] {q.dtype} to fit q",
    )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check(
            weight.shape == (d,) and weight.dtype == q.dtype,
            partial(_misfit, op, name, weight, q),
        )
    check_table(op, positions, cos_sin, t, d)
    check_float(op, "q", q)
    return eps


def qk_norm_rope(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, HK, D]
    q_weight: Tensor,  # [D]
    k_weight: Tensor,  # [D]
    eps: float,
    positions: Tensor,  # [T] int64
    cos_sin: Tensor,  # [P, D] fp32
) -> tuple[Tensor, Tensor]:  # q' [T, H, D], k' [T, HK, D]
    """`rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), positions, cos_sin)`, without a gradient.

    Args:
        q, k: [T, H, D] and [T, HK, D], one dtype; slices of a fused projection pass as they are.
        q_weight, k_weight: [D], dtype of q.
        eps, positions, cos_sin: as in the two ops.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the argument. TypeError: another dtype, or no tensor.
        IndexError: a position outside the table (CPU). RuntimeError: a tensor asks for a gradient; call it under
            `torch.no_grad()`, or the two ops.
    """
    eps = _check("qk_norm_rope", q, k, q_weight, k_weight, eps, positions, cos_sin)
    if is_stock():
        return rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), positions, cos_sin)
    return _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin)


def _check_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    check_tensors("qk_norm_rope_store", k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    four = k_cache.dim() == 4
    (pages, page, _, _), (block, slot, _, element) = (k_cache.shape, k_cache.stride()) if four else ((0,) * 4,) * 2
    check(
        four
        and k_cache.shape == v_cache.shape
        and k_cache.stride() == v_cache.stride()
        and (block == page * slot or pages == 1)
        and element == 1,
        lambda: (
            f"qk_norm_rope_store: k_cache is {tuple(k_cache.shape)} with strides {k_cache.stride()}, v_cache "
            f"{tuple(v_cache.shape)} with {v_cache.stride()}; expected one shape [pages, page, HK, D], pages in a row, "
            "D dense"
        ),
    )
    check_new_rows("qk_norm_rope_store", k_cache, v_cache, k, v, slots)


def qk_norm_rope_store(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, HK, D]
    v: Tensor,  # [T, HK, D]
    q_weight: Tensor,  # [D]
    k_weight: Tensor,  # [D]
    eps: float,
    positions: Tensor,  # [T] int64
    cos_sin: Tensor,  # [P, D] fp32
    k_cache: Tensor,  # [pages, page, HK, D]
    v_cache: Tensor,  # [pages, page, HK, D]
    slots: Tensor,  # [T] int64
) -> Tensor:  # q' [T, H, D]
    """`qk_norm_rope`, with k' and v written as `store_kv_` writes them: one kernel on GPUs. Not under tracing.

    Args:
        q, k, v, q_weight, k_weight, eps, positions, cos_sin: as in `qk_norm_rope`; v as k.
        k_cache, v_cache: [pages, page, HK, D], contiguous; where the one kernel runs (GPUs, D a power of two) also the
            two halves of a cache [pages, page, HK, 2 D].
        slots: [T] int64, as in `store_kv_`.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as in the two ops.
    """
    op = "qk_norm_rope_store"
    eps = _check(op, q, k, q_weight, k_weight, eps, positions, cos_sin)
    _check_cache(k, v, k_cache, v_cache, slots)
    check_devices(op, q, k, v, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, slots)
    if torch.is_grad_enabled() and not is_stock():
        names = ("q", "k", "v", "q_weight", "k_weight", "cos_sin", "k_cache", "v_cache")
        refuse_gradient(op, names, (q, k, v, q_weight, k_weight, cos_sin, k_cache, v_cache))
    if not is_stock() and select.choose("qk_norm_rope", q.device.type).implementation == "triton":
        from rlkernel.kernels.triton import qk_norm_rope as triton

        if triton.computes(q.shape[2]):
            q = triton.qk_norm_rope_store(q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slots)
            wrote(k_cache, v_cache)
            return q
    q, k = qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin)
    store_kv_(k_cache, v_cache, k, v, slots)
    return q
