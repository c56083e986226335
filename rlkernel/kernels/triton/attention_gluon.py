"""attention forward of long prefill on Hopper in Gluon: a TMA producer warp, two consumer warp groups of 64 rows each.

Same arithmetic and order as `attention.py`; only the synchronisation differs. The softmax of a warp group overlaps its
own product with V and the products of the other group, so the tensor cores rarely wait.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel.contract.orders import ATTENTION_BLOCK
from rlkernel.kernels.triton.attention_splits import merge_splits, normalised
from rlkernel.kernels.triton.common import LN2, LOG2E, cdiv, exp2, on_device, options

NEGATIVE_INFINITY = gl.constexpr(float("-inf"))
KEYS = gl.constexpr(ATTENTION_BLOCK)
ROWS = gl.constexpr(64)  # per warp group, as in a wgmma
BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# setmaxnreg: 240 registers per thread of both consumer groups and 24 of the producer, of 504 for the three
REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


# ---- kernels -------------------------------------------------------------------------------------


@gluon.jit
def tma_load(k_box, v_box, k_tiles, v_tiles, k_full, v_full, k_free, v_free, first, column, stop, STAGES: gl.constexpr,
          BYTES: gl.constexpr):  # fmt: skip
    """Producer: loads the keys and values [0, stop) of a sequence into the tiles that both groups have released."""
    for at in range(0, stop, KEYS):
        i = at // KEYS
        slot = i % STAGES
        phase = i // STAGES % 2
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), BYTES)
        tma.async_copy_global_to_shared(k_box, [first + at, column], k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), BYTES)
        tma.async_copy_global_to_shared(v_box, [first + at, column], v_full.index(slot), v_tiles.index(slot))


@gluon.jit
def mask_scores(raw, first, position, S: gl.constexpr):
    """Scores of the keys [first, first + KEYS), -inf where the causal mask hides a key from a row."""
    at = first + gl.arange(0, KEYS, gl.SliceLayout(0, S))
    return gl.where(at[None, :] <= position[:, None], raw, NEGATIVE_INFINITY)


@gluon.jit
def softmax(raw, m, l, scale_log2e):
    """(p, factor of the running sums, m, l) of one block: `add_block` of `attention.py`."""
    top = gl.maximum(m, gl.max(raw, 1) * scale_log2e)
    now = gl.where(top == NEGATIVE_INFINITY, 0.0, top)
    p = exp2(gl.fma(raw, scale_log2e, -now[:, None]))
    factor = exp2(m - now)
    return p, factor, top, gl.fma(l, factor, gl.sum(p, 1))


@gluon.jit
def clear(values, first, keys, cleared, CLEARS: gl.constexpr):
    """Sets values past the sequence's end to 0, because memory there may hold infinities and 0 * inf is NaN.

    A program has at most one such tile. One group (CLEARS) clears it, the other one waits. The waiting group holds this
    tile and the one before, fewer than STAGES, so the producer does not wait for it.
    """
    if not CLEARS:
        mbarrier.wait(cleared, 0)
        return
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for j in gl.static_range(KEYS // 16):  # 16 rows at a time, to fit in the registers
        part = values.slice(16 * j, 16)
        x = part.load(B)
        at = first + 16 * j + gl.arange(0, 16, gl.SliceLayout(1, B))
        part.store(gl.where((at < keys)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    mbarrier.arrive(cleared, count=1)


@gluon.jit
def attend_split(q, k_tiles, v_tiles, k_full, v_full, k_free, v_free, cleared, begin, stop, unmasked, keys, position,
                 scale_log2e, CLEARS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """(o, log2-sum-exp) of the keys [begin, stop), normalised; the causal mask hides no key below `unmasked`."""
    D: gl.constexpr = q.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    none = gl.zeros((ROWS, KEYS), gl.float32, S)
    m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros((ROWS, D), gl.float32, A)
    i = begin // KEYS
    slot = i % STAGES
    mbarrier.wait(k_full.index(slot), i // STAGES % 2)
    raw = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(0, deps=[raw])
    mbarrier.arrive(k_free.index(slot), count=1)
    if begin >= unmasked:
        raw = mask_scores(raw, begin, position, S)
    p, factor, m, l = softmax(raw, m, l, scale_log2e)
    x = gl.convert_layout(p.to(q.dtype), P)
    mbarrier.wait(v_full.index(slot), i // STAGES % 2)
    if begin + KEYS > keys:
        clear(v_tiles.index(slot), begin, keys, cleared, CLEARS)
    for at in range(begin + KEYS, stop, KEYS):
        i = at // KEYS
        slot = i % STAGES
        back = (i - 1) % STAGES
        mbarrier.wait(k_full.index(slot), i // STAGES % 2)
        raw = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        sums = warpgroup_mma(x, v_tiles.index(back), acc, is_async=True)
        raw = warpgroup_mma_wait(1, deps=[raw])
        mbarrier.arrive(k_free.index(slot), count=1)
        if at >= unmasked:
            raw = mask_scores(raw, at, position, S)
        p, factor, m, l = softmax(raw, m, l, scale_log2e)
        # This mbarrier wait keeps the compiler from moving the wait for the sums ahead of the softmax.
        mbarrier.wait(v_full.index(slot), i // STAGES % 2)
        if at + KEYS > keys:
            clear(v_tiles.index(slot), at, keys, cleared, CLEARS)
        acc = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(v_free.index(back), count=1)
        x = gl.convert_layout(p.to(q.dtype), P)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, A))[:, None]
    last = ((stop + KEYS - 1) // KEYS - 1) % STAGES
    sums = warpgroup_mma(x, v_tiles.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(v_free.index(last), count=1)
    return normalised(acc, gl.convert_layout(m, gl.SliceLayout(1, A)), gl.convert_layout(l, gl.SliceLayout(1, A)))


@gluon.jit
def rows_of_tile(q, q_tile, first, k_tiles, v_tiles, k_full, v_full, k_free, v_free, cleared, out, lse, q_first,
                 queries, keys, q_stride, stop, SPLIT, scale_log2e, head, CLEARS: gl.constexpr, HK: gl.constexpr,
                 GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Consumer: the rows [first, first + ROWS) of a sequence, from the loads of the queries to the epilogue."""
    D: gl.constexpr = q_tile.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    offset = keys - queries
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, B))
    token = row // GROUP
    column = gl.arange(0, D, gl.SliceLayout(0, B))
    from_q = token[:, None].to(gl.int64) * q_stride + (row % GROUP * D)[:, None] + column[None, :]
    q_tile.store(gl.load(q + from_q, mask=(token < queries)[:, None], other=0.0))
    fence_async_shared()
    position = offset + (first + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    unmasked = (offset + first // GROUP + 1) // KEYS * KEYS
    o = gl.zeros((ROWS, D), gl.float32, A)
    top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, A))
    for begin in range(0, stop, SPLIT):
        o_split, top_split = attend_split(
            q_tile, k_tiles, v_tiles, k_full, v_full, k_free, v_free, cleared, begin, gl.minimum(begin + SPLIT, stop),
            unmasked, keys, position, scale_log2e, CLEARS, STAGES,
        )  # fmt: skip
        if begin == 0:  # merging with an empty split would change nothing
            o = o_split
            top = top_split
        else:
            o, top = merge_splits(o, top, o_split, top_split)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, A))
    token = row // GROUP
    inside = token < queries
    to = (q_first.to(gl.int64) + token) * (HK * GROUP) + head * GROUP + row % GROUP
    column = gl.arange(0, D, gl.SliceLayout(0, A))
    gl.store(lse + to, top * LN2, mask=inside)
    gl.store(out + (to * D)[:, None] + column[None, :], o.to(out.dtype.element_ty), mask=inside[:, None])


@gluon.jit(do_not_specialize=["T"])
def prefill_kernel(
    q,  # [T, H, D]
    k_box,  # TMA descriptors of k and v as [S, HK * D]
    v_box,
    cu_q,  # [B + 1]
    lens,  # cumulative keys [B + 1], or keys [B] with HAS_CAPACITY
    out,  # [T, H, D]
    lse,  # [T, H] natural log
    T,
    q_stride,
    COLUMNS,  # with HAS_CAPACITY: sequences start at multiples of COLUMNS keys
    SPLIT,
    scale_log2e,
    HK: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_CAPACITY: gl.constexpr,
    STAGES: gl.constexpr,
):
    gl.static_assert(BLOCK_M == 2 * ROWS)
    head = gl.program_id(1)
    sequence = gl.program_id(2)
    q_first = gl.load(cu_q + sequence)
    q_last = gl.load(cu_q + sequence + 1)
    # A GPU cannot raise, so a sequence outside q counts as empty. TMA never reads outside the keys' tensor.
    queries = gl.where((q_first < 0) | (q_last < 0) | (q_last > T), 0, q_last - q_first)
    if HAS_CAPACITY:
        k_first = sequence * COLUMNS
        keys = gl.minimum(gl.load(lens + sequence), COLUMNS)  # longer only if `max_seqlen_k` is too small
    else:
        k_first = gl.load(lens + sequence)
        keys = gl.load(lens + sequence + 1) - k_first
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the tiles with most keys first
    stop = gl.minimum(keys, keys - queries + (first + BLOCK_M - 1) // GROUP + 1)  # the rows see keys in [0, stop)
    stop = gl.where(first < queries * GROUP, stop, 0)
    q += q_first.to(gl.int64) * q_stride + head * (GROUP * D)
    dtype: gl.constexpr = q.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], BOX)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], BOX)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], BOX)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(cleared, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (rows_of_tile, (q, q_tiles.index(0), first, k_tiles, v_tiles, k_full, v_full, k_free, v_free, cleared, out,
                            lse, q_first, queries, keys, q_stride, stop, SPLIT, scale_log2e, head, True, HK, GROUP,
                            STAGES)),
            (rows_of_tile, (q, q_tiles.index(1), first + ROWS, k_tiles, v_tiles, k_full, v_full, k_free, v_free,
                            cleared, out, lse, q_first, queries, keys, q_stride, stop, SPLIT, scale_log2e, head, False,
                            HK, GROUP, STAGES)),
            (tma_load, (k_box, v_box, k_tiles, v_tiles, k_full, v_full, k_free, v_free, k_first, head * D, stop, STAGES,
                     KEYS * D * 2)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# ---- launcher ------------------------------------------------------------------------------------

BLOCK_M, STAGES = 128, 4


def prefill(
    q: Tensor, boxes: tuple[Any, Any], hk: int, cu_q: Tensor, lens: Tensor, max_q: int, scale: float, split: int,
    capacity: int, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Writes `out` and `lse`; arguments as in `attention._forward`, `boxes` are its descriptors of k and v."""
    h, d = q.shape[1:]
    k_box, v_box = (TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, BOX) for x in boxes)
    with on_device(q):
        prefill_kernel[(cdiv(max_q * (h // hk), BLOCK_M), hk, cu_q.shape[0] - 1)](
            q, k_box, v_box, cu_q, lens, out, lse, q.shape[0], q.stride(0), capacity, split, scale * LOG2E.value,
            HK=hk, GROUP=h // hk, D=d, BLOCK_M=BLOCK_M, HAS_CAPACITY=capacity > 0, STAGES=STAGES,
            num_warps=4, **options(matmul=True),
        )  # fmt: skip
