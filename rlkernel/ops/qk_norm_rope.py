"""qk_norm_rope: `rms_norm` of every query and key head, then `rope`, in one pass. It has no gradient: for rollout only.

Contract: orders.py, `rms_norm` and `rope`; its bits are those of the two ops called in sequence.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, triton
from rlkernel.ops.attention import check_new_rows, store_kv_
from rlkernel.ops.autograd import bump_versions, refuse_gradient
from rlkernel.ops.checks import check, check_float, check_one_device, check_tensors
from rlkernel.ops.define import define, gpu_kernel
from rlkernel.ops.rms_norm import check_eps, rms_norm
from rlkernel.ops.rope import check_table, rope
from rlkernel.ops.stock_switch import is_stock

_qk_norm_rope = define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, Tensor cos_sin) "
    "-> (Tensor, Tensor)",
    fake=lambda q, k, q_weight, k_weight, eps, positions, cos_sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
    reference=lambda: reference.qk_norm_rope.qk_norm_rope,
    cpu=lambda: cpu.qk_norm_rope.qk_norm_rope,
    triton=lambda: triton.qk_norm_rope.qk_norm_rope,
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
    """eps as a float; raises if an argument does not fit."""
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
        q, k: [T, H, D] and [T, HK, D], fp32, bf16 or fp16, one dtype; may be slices of a fused projection.
        q_weight, k_weight: [D], dtype of q.
        eps: as in `rms_norm`.
        positions, cos_sin: as in `rope`.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the argument. TypeError: another dtype, or not a
            tensor.
        IndexError: a position outside the table (CPU). RuntimeError: a tensor requires a gradient; call it under
            `torch.no_grad()`, or call the two ops.
    """
    eps = _check("qk_norm_rope", q, k, q_weight, k_weight, eps, positions, cos_sin)
    if is_stock():
        return rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), positions, cos_sin)
    return _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin)


def _check_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    check_tensors("qk_norm_rope_store", k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    is_paged = k_cache.dim() == 4
    (pages, page, _, _), (page_stride, slot_stride, _, element_stride) = (
        (k_cache.shape, k_cache.stride()) if is_paged else ((0,) * 4,) * 2
    )
    check(
        is_paged
        and k_cache.shape == v_cache.shape
        and k_cache.stride() == v_cache.stride()
        and (page_stride == page * slot_stride or pages == 1)
        and element_stride == 1,
        lambda: (
            f"qk_norm_rope_store: k_cache is {tuple(k_cache.shape)} with strides {k_cache.stride()}, v_cache "
            f"{tuple(v_cache.shape)} with {v_cache.stride()}; expected one shape [pages, page, HK, D] with contiguous "
            "pages and a contiguous D"
        ),
    )
    check_new_rows("qk_norm_rope_store", k_cache, v_cache, k, v, slots)


def qk_norm_rope_is_fused(device: torch.device, head_dim: int) -> bool:
    """Whether one kernel computes `qk_norm_rope_store`; it also takes the halves of a cache [pages, page, HK, 2 D].

    False on CPUs, in `stock()` blocks and for head dims that are not a power of two.
    """
    if is_stock() or gpu_kernel("qk_norm_rope", device.type) is None:
        return False
    from rlkernel.kernels.triton.qk_norm_rope import computes

    return computes(head_dim)


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
    """`qk_norm_rope`, with k' and v written as `store_kv_` writes them, in one kernel on GPUs. It cannot be traced.

    Args:
        q, k, q_weight, k_weight, eps, positions, cos_sin: as in `qk_norm_rope`.
        v: [T, HK, D], dtype of k.
        k_cache, v_cache: [pages, page, HK, D], contiguous; if `qk_norm_rope_is_fused`, they may be the two halves of a
            cache [pages, page, HK, 2 D].
        slots: [T] int64, as in `store_kv_`.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as in `qk_norm_rope` and `store_kv_`.
    """
    op = "qk_norm_rope_store"
    eps = _check(op, q, k, q_weight, k_weight, eps, positions, cos_sin)
    _check_cache(k, v, k_cache, v_cache, slots)
    check_one_device(op, q, k, v, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, slots)
    if torch.is_grad_enabled() and not is_stock():
        names = ("q", "k", "v", "q_weight", "k_weight", "cos_sin", "k_cache", "v_cache")
        refuse_gradient(op, names, (q, k, v, q_weight, k_weight, cos_sin, k_cache, v_cache))
    if qk_norm_rope_is_fused(q.device, q.shape[2]):
        from rlkernel.kernels.triton import qk_norm_rope as triton

        q = triton.qk_norm_rope_store(q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slots)
        bump_versions(k_cache, v_cache)
        return q
    q, k = qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin)
    store_kv_(k_cache, v_cache, k, v, slots)
    return q
