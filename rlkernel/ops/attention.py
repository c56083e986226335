"""attention: causal, grouped-query, over packed sequences or a paged cache, with the same bits for a token either way.

Contract: orders.py, `attention`. Prefill, chunked prefill, paged decode and the training forward agree in each of the
two variants of the order: "split", the default, and "fa3", that of FlashAttention-3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.contract.orders import ATTENTION_BLOCK, ATTENTION_SPLIT
from rlkernel.kernels import cpu, cuda, reference, stock, triton
from rlkernel.kernels.cuda import attention_fa3
from rlkernel.ops.attention_variants import check_fa3_arguments, current_attention_variant
from rlkernel.ops.autograd import bump_versions, once_differentiable, refuse_gradient
from rlkernel.ops.checks import (
    check,
    check_flag,
    check_float,
    check_int,
    check_number,
    check_one_device,
    check_tensors,
    is_int,
    not_tensor,
)
from rlkernel.ops.define import define, gpu_kernel
from rlkernel.ops.shared_prefix import SharedPrefix, check_shared
from rlkernel.ops.stock_switch import is_stock

MAX_HEAD_DIM = 256
LONGEST = (1 << 31) - 1  # keys of a sequence: lengths are int32

# ---- ops -----------------------------------------------------------------------------------------


def _fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_fa3(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    t, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((h, t), dtype=torch.float32).t()


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, max_q, max_k, scale, *rest = inputs  # rest: window, split and causal, except in variant "fa3"
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    window, causal = (rest[0], rest[2]) if rest else (None, True)
    ctx.numbers = (max_q, max_k, scale, window, causal)
    ctx.without_gradient = (None,) * (len(inputs) - 3)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    dout = dout.to(q.dtype).contiguous()
    dq, dk, dv = _attention_backward(dout, q, k, v, out, lse.contiguous(), cu_q, cu_k, *ctx.numbers)
    return dq, dk, dv, *ctx.without_gradient


_attention_backward = define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int? window, bool causal=True) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    reference=lambda: reference.attention.attention_backward,
    cpu=lambda: cpu.attention.attention_backward,
    triton=lambda: triton.attention_backward.attention_backward,
)
_attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, int? window, int split, bool causal=True) -> (Tensor, Tensor)",
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.attention.attention,
    cpu=lambda: cpu.attention.attention,
    triton=lambda: triton.attention.attention,
    cuda=lambda: cuda.attention.attention,
)
_paged_attention = define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor seq_lens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int? window, int split) "
    "-> (Tensor, Tensor)",
    fake=_fake,
    reference=lambda: reference.attention.paged_attention,
    cpu=lambda: cpu.attention.paged_attention,
    triton=lambda: triton.attention.paged_attention,
    cuda=lambda: cuda.attention.paged_attention,
)
_attention_fa3 = define(
    "attention_fa3(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale) -> (Tensor, Tensor)",
    compute=attention_fa3.attention,
    fake=_fake_fa3,
    setup_context=_setup,
    backward=_backward,
)
_paged_attention_fa3 = define(
    "paged_attention_fa3(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor seq_lens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale) -> (Tensor, Tensor)",
    compute=attention_fa3.paged_attention,
    fake=_fake_fa3,
)


class _KnownAttention(torch.autograd.Function):
    """An attention call whose result is known: the forward computes nothing, the backward is that of `attention`.

    It saves the tensors that `attention` saves, in the same order, because activation checkpointing compares them.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        result = out.view_as(out), lse.view_as(lse)
        _setup(ctx, inputs, result)
        return result

    backward = staticmethod(
        once_differentiable("attention", lambda ctx, dout, dlse: (None, None, *_backward(ctx, dout, dlse)))
    )


_store_kv = define(
    "store_kv_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots) -> ()",
    fake=lambda k_cache, v_cache, k, v, slots: None,
    reference=lambda: reference.attention.store_kv_,
    cpu=lambda: cpu.attention.store_kv_,
    triton=lambda: triton.attention_pages.store_kv_,
)


def _scale(op: str, q: Tensor, scale: float | None) -> float:
    if scale is None:
        return max(1, q.shape[2]) ** -0.5
    return check_number(op, "scale", scale, "positive and finite in float32, 1e-38 to 1e38", 1e-38, 1e38)


def _longest(op: str, q: int, k: int) -> tuple[int, int]:
    if type(q) is int and type(k) is int and (torch.compiler.is_compiling() or (0 <= q <= LONGEST >= k >= 0)):
        return q, k
    expected = f"the longest sequence's tokens or more, at most {LONGEST}"
    q = check_int(op, "max_seqlen_q", q, expected, 0, LONGEST)
    return q, check_int(op, "max_seqlen_k", k, expected, 0, LONGEST)


def _check_heads(op: str, q: Tensor, heads_k: int, dim_k: int, window: int | None, split: int) -> None:
    _, h, d = q.shape
    check_float(op, "q", q)
    check(d == dim_k, lambda: f"{op}: q has head dim {d}, the keys {dim_k}; they must be equal")
    check(0 < d <= MAX_HEAD_DIM, lambda: f"{op}: head dim {d} is outside 1 to {MAX_HEAD_DIM}, the supported ones")
    check(
        heads_k > 0 and h % heads_k == 0,
        lambda: f"{op}: q has H={h} heads, not a multiple of the HK={heads_k} key-value heads",
    )
    if not (is_int(split) and (window is None or is_int(window))):
        raise TypeError(f"{op}: window={window!r}, split={split!r}; expected integers, or None for no window")
    check(window is None or window >= 1, lambda: f"{op}: window={window} must be at least 1 key, or None for no window")
    check(
        split >= ATTENTION_BLOCK and split % ATTENTION_BLOCK == 0,
        lambda: f"{op}: split={split} must be a positive multiple of {ATTENTION_BLOCK} keys",
    )


def _check_int32(op: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {t.dtype}; it must be int32")
        if name.startswith("cu_seqlens") and (t.dim() != 1 or t.numel() < 1):
            raise ValueError(f"{op}: {name} is {tuple(t.shape)}; it must be [B + 1], starting at 0")


def _check_dtypes(op: str, q: Tensor, of: str = "q", **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dtype != q.dtype:
            raise ValueError(f"{op}: {of} is {q.dtype}, {name} is {t.dtype}; cast one of them")


def _call_with_one_cu_seqlens(*args: Any) -> Any:
    """`_attention(*args)` for callers that passed cu_seqlens_q only, so that errors do not name cu_seqlens_k."""
    try:
        return _attention(*args)
    except ValueError as error:
        raise ValueError(str(error).replace("cu_seqlens_k", "cu_seqlens_q").replace(" S=", " T=")) from None


def attention(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [S, HK, D]
    v: Tensor,  # [S, HK, D]
    cu_seqlens_q: Tensor,  # [B+1] int32
    cu_seqlens_k: Tensor | None = None,  # [B+1] int32
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    split: int = ATTENTION_SPLIT,
    variant: str | None = None,
    result: tuple[Tensor, Tensor] | None = None,  # [T, H, D], [T, H] fp32
) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, H] fp32
    """Causal or bidirectional attention over packed sequences; packing changes no token's result.

    The queries of a sequence are its last tokens. Query head h reads key-value head h // (H // HK). Differentiable
    in q, k and v through `out`; the backward is deterministic.

    Args:
        q: [T, H, D], fp32, bf16 or fp16, D at most 256. Rows may be strided (a slice of a fused projection).
        k, v: [S, HK, D], dtype of q.
        cu_seqlens_q: [B+1] int32, first query of each sequence and T.
        cu_seqlens_k: [B+1] int32, the same for the keys and S; None if every query has a key of its own (S = T).
        max_seqlen_q, max_seqlen_k: longest sequence in queries and in keys, or any larger number; they size the
            launch and change no bit. max_seqlen_k defaults to max_seqlen_q if cu_seqlens_k is None.
        scale: factor of the scores, default D**-0.5.
        window: a query sees at most its last `window` keys, itself included; None for all.
        causal: False lets every query see all keys of its sequence, as in a vision encoder. It excludes `window` and
            always uses variant "split".
        split: keys per split, a multiple of 64. Part of the contract, because it changes the bits.
        variant: "split" or "fa3", which have different bits; None: that of the process (`set_attention_variant`).
        result: the result of an earlier identical call, for activation checkpointing: the forward computes nothing, and
            the backward is that of the earlier call. Stock ops ignore it.

    Returns:
        out [T, H, D] in the dtype of q, and the natural-log log-sum-exp of the scaled scores [T, H], fp32.

    Raises:
        ValueError: shapes, dtypes, window, scale or split do not fit; on a CPU also lengths that contradict the
            tensors. TypeError: lengths are not int32, q has another dtype, or an argument is not a tensor.
            VariantError: the variant does not run with these tensors on this machine, or the process is set to another.

    Source:
        FlashAttention-2, arXiv:2307.08691; splits of the keys as in Flash-Decoding; variant "fa3": arXiv:2407.08608.
    """
    if not (
        isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(cu_seqlens_q, Tensor)
    ):
        raise not_tensor("attention", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if not (cu_seqlens_k is None or isinstance(cu_seqlens_k, Tensor)):
        raise not_tensor("attention", cu_seqlens_k=cu_seqlens_k)
    check(q.dim() == 3, lambda: f"attention: q is {tuple(q.shape)}; it must be [T, H, D]")
    check(
        k.dim() == 3 and k.shape == v.shape,
        lambda: f"attention: k is {tuple(k.shape)}, v {tuple(v.shape)}; both must be [S, HK, D]",
    )
    scale = _scale("attention", q, scale)
    _check_heads("attention", q, k.shape[1], k.shape[2], window, split)
    _check_dtypes("attention", q, k=k, v=v)
    call = _attention
    if cu_seqlens_k is None:
        call = _call_with_one_cu_seqlens
        check(
            k.shape[0] == q.shape[0],
            lambda: f"attention: {q.shape[0]} queries and {k.shape[0]} keys; pass cu_seqlens_k where they differ",
        )
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    check(max_seqlen_k is not None, lambda: "attention: cu_seqlens_k is given without max_seqlen_k; pass both")
    assert max_seqlen_k is not None
    max_seqlen_q, max_seqlen_k = _longest("attention", max_seqlen_q, max_seqlen_k)
    _check_int32("attention", cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is not cu_seqlens_q:
        _check_int32("attention", cu_seqlens_k=cu_seqlens_k)
    check(
        cu_seqlens_q.shape == cu_seqlens_k.shape and cu_seqlens_q.dim() == 1,
        lambda: (
            f"attention: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k "
            f"{tuple(cu_seqlens_k.shape)}; both must be [B+1]"
        ),
    )
    check_flag("attention", "causal", causal)
    check(causal or window is None, lambda: f"attention: window={window} with causal=False; leave the window out")
    window = None if window is None else min(window, LONGEST)
    if is_stock():
        return stock.attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window, causal)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if result is not None:
        out, lse = result
        check(
            out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:2],
            lambda: (
                f"attention: result is {tuple(out.shape)} {out.dtype} and {tuple(lse.shape)}; expected what the call "
                f"with this q {tuple(q.shape)} {q.dtype} returned"
            ),
        )
        known: tuple[Tensor, Tensor] = _KnownAttention.apply(out, lse, q, k, v, *lengths, scale, window, split, causal)
        return known
    if causal and current_attention_variant(variant) == "fa3":
        check_fa3_arguments(window, split)
        return _attention_fa3(q, k, v, *lengths, scale)
    return call(q, k, v, *lengths, scale, window, split, causal)


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [pages, page, HK, D]
    v_cache: Tensor,  # [pages, page, HK, D]
    block_table: Tensor,  # [B, P] int32
    cu_seqlens_q: Tensor,  # [B+1] int32
    seq_lens_k: Tensor,  # [B] int32
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    window: int | None = None,
    split: int = ATTENTION_SPLIT,
    variant: str | None = None,
    out: Tensor | None = None,  # [T, H, D]
    shared: SharedPrefix | None = None,
) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, H] fp32
    """`attention` over a paged cache, for decode and chunked prefill: the same bits, no gradient.

    Args:
        q: [T, H, D], the new tokens of all sequences, packed; `store_kv_` has written their keys into the cache.
        k_cache, v_cache: [pages, page, HK, D], dtype of q, any page size. On GPUs also the two halves of a cache
            [pages, page, HK, 2 D]; caches with other strides are copied.
        block_table: [B, P] int32; key j of sequence b lies in page block_table[b, j // page] at j % page. Entries
            past the sequence's end are not read.
        cu_seqlens_q: [B+1] int32, first query of each sequence and T.
        seq_lens_k: [B] int32, keys of each sequence, the new tokens included.
        max_seqlen_q, max_seqlen_k, scale, window, split, variant: as in `attention`.
        out: contiguous [T, H, D], dtype of q, into which the result is written; not traceable. None: a new tensor.
        shared: groups of sequences with the same first keys, which GPUs then read once per group; it changes no bit.
            Requires one query per sequence, no window and variant "split"; not traceable.

    Returns:
        out [T, H, D] and the natural-log log-sum-exp [T, H], fp32.

    Raises:
        ValueError, TypeError, VariantError: as `attention`; on a CPU also a page outside the cache.
        RuntimeError: a tensor requires a gradient; call it under `torch.no_grad()`.

    Source:
        PagedAttention, arXiv:2309.06180.
    """
    op = "paged_attention"
    if not (
        isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
        and isinstance(block_table, Tensor) and isinstance(cu_seqlens_q, Tensor) and isinstance(seq_lens_k, Tensor)
        and (out is None or isinstance(out, Tensor))
    ):  # fmt: skip
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
        given |= {"cu_seqlens_q": cu_seqlens_q, "seq_lens_k": seq_lens_k}
        raise not_tensor(op, **given, **({} if out is None else {"out": out}))
    check(q.dim() == 3, lambda: f"{op}: q is {tuple(q.shape)}; it must be [T, H, D]")
    check(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.shape[1] > 0,
        lambda: (
            f"{op}: k_cache is {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}; "
            "both must be [pages, page, HK, D] with at least one token per page"
        ),
    )
    scale = _scale(op, q, scale)
    _check_heads(op, q, k_cache.shape[2], k_cache.shape[3], window, split)
    _check_dtypes(op, q, k_cache=k_cache, v_cache=v_cache)
    max_seqlen_q, max_seqlen_k = _longest(op, max_seqlen_q, max_seqlen_k)
    _check_int32(op, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seq_lens_k=seq_lens_k)
    if out is not None:
        _check_dtypes(op, q, out=out)
        check(
            out.shape == q.shape and out.is_contiguous(),
            lambda: f"{op}: out is {tuple(out.shape)}; it must be contiguous {tuple(q.shape)}, as q",
        )
    check(seq_lens_k.dim() == 1, lambda: f"{op}: seq_lens_k is {tuple(seq_lens_k.shape)}; it must be [B]")
    b = seq_lens_k.shape[0]
    check(
        cu_seqlens_q.shape == (b + 1,) and block_table.dim() == 2 and block_table.shape[0] == b,
        lambda: (
            f"{op}: seq_lens_k is [B={b}], so cu_seqlens_q must be [{b + 1}] and block_table [{b}, P]; they are "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(block_table.shape)}"
        ),
    )
    window = None if window is None else min(window, LONGEST)
    if is_stock():
        found = stock.paged_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens_k, scale, window)
        return found if out is None else (out.copy_(found[0]), found[1])
    if shared is not None:
        check_shared(op, shared, block_table, seq_lens_k, k_cache.shape[1])
        is_decode = max_seqlen_q == 1 and q.shape[0] == b and window is None
        check(
            is_decode and current_attention_variant(variant) == "split",
            lambda: f"{op}: shared needs one query per sequence, no window and the variant 'split'; leave it out",
        )
        if gpu_kernel(op, q.device.type) is not None:
            from rlkernel.kernels.triton.attention_shared import shared_paged_attention

            given = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens_k, *shared[:2])
            check_one_device(op, *given, *(() if out is None else (out,)))
            if torch.is_grad_enabled():
                refuse_gradient(op, ("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
            return shared_paged_attention(*given, *shared[2:], max_seqlen_k, scale, split, out=out)
    lengths = (block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k)
    if out is not None:  # written by a kernel that bypasses the dispatcher
        check_one_device(op, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens_k, out)
        if torch.is_grad_enabled():
            refuse_gradient(op, ("q", "k_cache", "v_cache", "out"), (q, k_cache, v_cache, out))
    if current_attention_variant(variant) == "fa3":
        check_fa3_arguments(window, split)
        if out is not None:
            o, lse = attention_fa3.paged_attention(q, k_cache, v_cache, *lengths, scale, out=out)
            bump_versions(o)
            return o, lse
        return _paged_attention_fa3(q, k_cache, v_cache, *lengths, scale)
    if out is None:
        return _paged_attention(q, k_cache, v_cache, *lengths, scale, window, split)
    if (kernel := gpu_kernel("paged_attention", q.device.type)) is not None:
        o, lse = kernel(q, k_cache, v_cache, *lengths, scale, window, split, out=out)
        bump_versions(o)
        return o, lse
    o, lse = _paged_attention(q, k_cache, v_cache, *lengths, scale, window, split)
    return out.copy_(o), lse


def attention_scratch_bytes(
    q: Tensor,  # [..., H, D]
    k: Tensor,  # [..., HK, D]
    *,
    tokens: int,
    sequences: int,
    longest: int,
) -> int:
    """Upper bound, in bytes, of the scratch memory that `paged_attention` allocates and that a cache must leave free.

    It does not count the copy of a cache whose strides the kernel cannot read.

    Args:
        q, k: tensors with the heads, dtype and device of the calls; the number of rows does not matter.
        tokens, sequences: the largest numbers of new tokens and of sequences per call.
        longest: the largest `max_seqlen_k`.
    """
    if q.device.type != "cuda" or gpu_kernel("paged_attention", "cuda") is None:
        return 0
    from rlkernel.kernels.triton.attention import scratch_bytes

    return scratch_bytes(q, k, tokens, sequences, longest)


def check_new_rows(op: str, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Raises the errors of `store_kv_` for keys, values and slots that do not fit a 4-dimensional cache."""
    check(
        k.shape == v.shape and k.dim() == 3 and k.shape[1:] == k_cache.shape[2:] and slots.shape == k.shape[:1],
        lambda: (
            f"{op}: k is {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}; with this cache "
            f"they must be [T, {k_cache.shape[2]}, {k_cache.shape[3]}] and [T]"
        ),
    )
    _check_dtypes(op, k_cache, "k_cache", v_cache=v_cache, k=k, v=v)
    check(slots.dtype == torch.int64, lambda: f"{op}: slots is {slots.dtype}; it must be int64", TypeError)


def store_kv_(
    k_cache: Tensor,  # [pages, page, HK, D]
    v_cache: Tensor,  # [pages, page, HK, D]
    k: Tensor,  # [T, HK, D]
    v: Tensor,  # [T, HK, D]
    slots: Tensor,  # [T] int64
) -> None:
    """Writes the keys and values of new tokens into the pages, in place.

    Args:
        k_cache, v_cache: [pages, page, HK, D], contiguous.
        k, v: [T, HK, D], dtype of the cache; rows may be strided.
        slots: [T] int64, page * page_size + offset of each token, all different. Tokens with a negative slot are
            skipped.

    Raises:
        ValueError: shapes or dtypes do not fit; on a CPU also a slot outside the cache. TypeError: slots is not int64,
            or an argument is not a tensor.
    """
    check_tensors("store_kv_", k_cache=k_cache, v_cache=v_cache, k=k, v=v, slots=slots)
    check(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous(),
        lambda: (
            f"store_kv_: k_cache is {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}; both must be "
            "contiguous [pages, page, HK, D]"
        ),
    )
    check_new_rows("store_kv_", k_cache, v_cache, k, v, slots)
    _store_kv(k_cache, v_cache, k.detach(), v.detach(), slots)
