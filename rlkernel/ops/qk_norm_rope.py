"""qk_norm_rope: `rms_norm` of every query and key head, then `rope`, in one pass. Rollout only: it has no gradient.

Contract: orders.py, `rms_norm` and `rope`; the bits of the two ops one after the other.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rlkernel.ops._library import check, define, is_stock
from rlkernel.ops.rms_norm import rms_norm
from rlkernel.ops.rope import rope

_qk_norm_rope = define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, Tensor cos_sin) "
    "-> (Tensor, Tensor)",
    "qk_norm_rope",
    fake=lambda q, k, q_weight, k_weight, eps, positions, cos_sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


def _misfit(name: str, weight: Tensor, q: Tensor) -> str:
    return f"qk_norm_rope: {name} is {tuple(weight.shape)} {weight.dtype}; expected [D={q.shape[2]}] {q.dtype}"


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
        ValueError: shapes or dtypes do not fit; the message names the argument.
        IndexError: a position outside the table (CPU).
    """
    check(q.dim() == 3, lambda: f"qk_norm_rope: q is {tuple(q.shape)}; expected [T, H, D]")
    t, _, d = q.shape
    check(
        k.dim() == 3 and k.shape[0] == t and k.shape[2] == d and k.dtype == q.dtype,
        lambda: f"qk_norm_rope: k is {tuple(k.shape)} {k.dtype}; expected [T={t}, HK, D={d}] {q.dtype} to fit q",
    )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check(
            weight.shape == (d,) and weight.dtype == q.dtype,
            partial(_misfit, name, weight, q),
        )
    check(
        positions.shape == (t,) and cos_sin.dim() == 2 and cos_sin.shape[1] == d and d % 2 == 0,
        lambda: (
            f"qk_norm_rope: positions is {tuple(positions.shape)}, cos_sin {tuple(cos_sin.shape)}; expected [T={t}] "
            f"and [P, D={d}] with D even"
        ),
    )
    if is_stock():
        return rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), positions, cos_sin)
    return _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos_sin)
