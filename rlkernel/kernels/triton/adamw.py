"""adamw_ and grad_norm on GPUs: one launch for hundreds of tensors, through a table of their addresses.

A program finds its tensor by a binary search over the tensors' first blocks. AdamW is elementwise; grad_norm adds
segments of a fixed size, whose lanes form a tree of neighbours. Both have the bits of the CPU.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
from rlkernel.kernels.adamw import AdamwInputs, coefficients
from rlkernel.kernels.triton.common import on_device, options

BLOCK, WARPS = 1024, 8
"""adamw_: elements and warps per program. Longer programs have fewer loads in flight near their end."""
ROWS, NORM_WARPS = 8, 4
"""grad_norm: rows of SEGMENT elements in flight at a time, and warps."""
LEVELS = SEGMENT.bit_length() - 1

FIRST, SIZE, GRAD, MASTER, MEAN, SQUARE, PARAM = (tl.constexpr(row) for row in range(7))
"""Rows of adamw_'s table: first block and number of elements of each tensor, then addresses."""
SLOT = tl.constexpr(3)
"""Row of grad_norm's table with the slot of a tensor's first partial sum; FIRST, SIZE and GRAD as in adamw_'s."""


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def tensor_of_block(table, COUNT, block):
    """Index of the tensor that a block belongs to: the last one whose first block is not after it."""
    low, high = 0, COUNT
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle) <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def address(table, COUNT, row, tensor, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer of a tensor from a row of the table; ALIGNED lets the compiler vectorise its accesses."""
    pointer = tl.load(table + row * COUNT + tensor).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def update(
    grad, master, mean, square, param, at, inside, s, weight, beta2, fresh, inverse_root, eps, rate, decay,
    NEAR_MEAN: tl.constexpr, ZERO_GRAD: tl.constexpr, HAS_PARAM: tl.constexpr,
):  # fmt: skip
    """AdamW of the elements `at`; all of them exist if `inside` is None."""
    g = tl.load(grad + at, mask=inside).to(tl.float32) * s
    w = tl.load(master + at, mask=inside)
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    like = tl.zeros_like(g)
    m = tl.fma(like + weight, g - m, m) if NEAR_MEAN else tl.fma(like + weight, m - g, g)
    v = tl.fma(fresh * g, g, beta2 * v)
    step = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), like + inverse_root, like + eps))
    w = w - tl.fma(like + rate, step, decay * w)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, w, mask=inside)
    if HAS_PARAM:
        tl.store(param + at, w.to(param.dtype.element_ty), mask=inside)
    if ZERO_GRAD:
        tl.store(grad + at, like.to(grad.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["COUNT"])
def adamw_kernel(
    table,  # [7, COUNT] int64
    scale,  # [1] fp32
    COUNT,
    weight,
    beta2,
    fresh,
    inverse_root,
    eps,
    rate,
    decay,
    NEAR_MEAN: tl.constexpr,
    ZERO_GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_PARAM: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    PARAM_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    i = tensor_of_block(table, COUNT, block)
    begin = (block - tl.load(table + FIRST * COUNT + i)) * BLOCK
    left = tl.load(table + SIZE * COUNT + i) - begin
    grad = address(table, COUNT, GRAD, i, GRAD_TYPE, ALIGNED) + begin
    master = address(table, COUNT, MASTER, i, tl.float32, ALIGNED) + begin
    mean = address(table, COUNT, MEAN, i, tl.float32, ALIGNED) + begin
    square = address(table, COUNT, SQUARE, i, tl.float32, ALIGNED) + begin
    param = address(table, COUNT, PARAM, i, PARAM_TYPE, ALIGNED) + begin if HAS_PARAM else master
    s = 1.0
    if HAS_SCALE:
        s = tl.load(scale)
    at = tl.arange(0, BLOCK)
    if tl.abs(s) < float("inf"):
        if left >= BLOCK:  # unmasked loads are vectorised
            update(
                grad, master, mean, square, param, at, None, s, weight, beta2, fresh, inverse_root, eps, rate, decay,
                NEAR_MEAN, ZERO_GRAD, HAS_PARAM,
            )  # fmt: skip
        else:
            update(
                grad, master, mean, square, param, at, at < left, s, weight, beta2, fresh, inverse_root, eps, rate,
                decay, NEAR_MEAN, ZERO_GRAD, HAS_PARAM,
            )  # fmt: skip
    elif ZERO_GRAD:
        tl.store(grad + at, tl.zeros((BLOCK,), grad.dtype.element_ty), mask=at < left)


@triton.jit
def fold(x, LEVELS: tl.constexpr):
    """Sum of x [2^LEVELS] as a tree of neighbours; only pairs are added, so neither layout nor num_warps changes a bit.

    Neighbours mostly lie in one thread or warp; folding in halves would send every lane through shared memory.
    """
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (1 << (LEVELS - 1 - level), 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=["COUNT"])
def squares_kernel(
    table,  # [4, COUNT] int64
    partials,  # out, fp64
    COUNT,
    GRAD_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Sum of squares of one segment: lane j adds the elements j, j + LANES, ... ascending."""
    block = tl.program_id(0)
    i = tensor_of_block(table, COUNT, block)
    segment = block - tl.load(table + FIRST * COUNT + i)
    left = tl.load(table + SIZE * COUNT + i) - segment * SEGMENT
    slot = tl.load(table + SLOT * COUNT + i) + segment
    grad = address(table, COUNT, GRAD, i, GRAD_TYPE, ALIGNED) + segment * SEGMENT
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    if left >= SEGMENT:
        for start in range(0, SEGMENT, ROWS * LANES):
            for row in tl.static_range(ROWS):
                g = tl.load(grad + start + row * LANES + lane).to(tl.float32).to(tl.float64)
                total = tl.fma(g, g, total)
    else:
        for start in range(0, left.to(tl.int32), LANES):
            g = tl.load(grad + start + lane, mask=start + lane < left, other=0.0).to(tl.float32).to(tl.float64)
            total = tl.fma(g, g, total)
    tl.store(partials + slot, fold(total, LEVELS))


@triton.jit
def lane_sum(x, count, LANES: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of x [count] fp64, as inside a segment."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    for start in tl.range(0, count, LANES, loop_unroll_factor=4):  # the loads of four rows are in flight at once
        total += tl.load(x + start + lane, mask=start + lane < count, other=0.0)
    return fold(total, LEVELS)


@triton.jit
def tensors_kernel(
    offsets,  # [tensors + 1] int64: first partial sum of each
    partials,
    squares,  # out [tensors] fp64
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    i = tl.program_id(0)
    begin = tl.load(offsets + i)
    count = (tl.load(offsets + i + 1) - begin).to(tl.int32)
    tl.store(squares + i, lane_sum(partials + begin, count, LANES, LEVELS))


@triton.jit(do_not_specialize=["COUNT"])
def norm_kernel(
    squares,  # [COUNT] fp64
    loss_scale,  # [1] fp32
    norm,  # out [1] fp64
    scale,  # out [1] fp32
    COUNT,
    max_norm,
    HAS_LOSS_SCALE: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    divisor = tl.full((), 1.0, tl.float64)
    if HAS_LOSS_SCALE:
        divisor = tl.load(loss_scale).to(tl.float64)
    limit = tl.full((), 0.0, tl.float64) + max_norm
    n = tl.sqrt(lane_sum(squares, COUNT, LANES, LEVELS)) / divisor
    factor = tl.where(n > limit, limit / n, 1.0)
    tl.store(norm, n)
    tl.store(scale, tl.where(tl.abs(n) < float("inf"), (factor / divisor).to(tl.float32), float("nan")))


# ---- launchers -------------------------------------------------------------------------------------------------------

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_TABLES = 64
"""Sets of tensors whose tables are cached on the devices; the least recently used set is evicted."""


class Launch(NamedTuple):
    """One launch: table on the device, number of tensors and of blocks, index of the first tensor, alignment."""

    table: Tensor
    count: int
    blocks: int
    first: int
    aligned: bool


_cache: OrderedDict[tuple[object, ...], dict[int, tuple[Launch, ...]]] = OrderedDict()
_captured: dict[int, tuple[Launch, ...]] = {}
_lock = threading.Lock()


def cached_launches(device: torch.device, key: tuple[object, ...], build: Callable[[], tuple[Launch, ...]]) -> Any:
    """`build()`, cached by stream and key.

    A table is read on the stream that uploaded it, so no synchronisation is needed. Under capture the table must
    already exist, because the graph would replay the upload from freed host memory; captured tables are never evicted.

    Raises:
        RuntimeError: the key is new and the stream is being captured.
    """
    with _lock:
        streams = _cache.setdefault(key, {})
        _cache.move_to_end(key)
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                if not streams:
                    raise RuntimeError(
                        "adamw_, grad_norm: these tensors are new, and their table of addresses cannot be uploaded "
                        "under CUDA graph capture; call once with the same tensors before"
                    )
                table = next(iter(streams.values()))
                _captured[id(table)] = table
                return table
            stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in streams:
            streams[stream] = build()
            while len(_cache) > MAX_TABLES:
                _cache.popitem(last=False)
        return streams[stream]


def make_launch(
    device: torch.device,
    indices: list[int],
    sizes: Sequence[int],
    length: int,
    addresses: Sequence[Sequence[int]],
    *more: Sequence[int],
) -> Launch:
    """The launch for the tensors at `indices`, in blocks of `length` elements; `more`: more table rows."""
    own = [sizes[i] for i in indices]
    *first, blocks = block_offsets(own, length)
    table = upload([first, own, *([row[i] for i in indices] for row in (*addresses, *more))], device)
    aligned = not any(row[i] % 16 for row in addresses for i in indices)
    return Launch(table, len(indices), blocks, indices[0], aligned)


def upload(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`rows` as int64 [len(rows), n] on the device."""
    host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def block_offsets(sizes: Sequence[int], length: int) -> list[int]:
    """First block of each tensor for blocks of `length` elements, then the number of all blocks."""
    return list(itertools.accumulate((-(-n // length) for n in sizes), initial=0))


def groups_by_dtype(*lists: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of the tensors, grouped by their dtypes; empty tensors are left out."""
    found: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, row in enumerate(zip(*lists, strict=True)):
        if row[0].numel():
            found.setdefault(tuple(t.dtype for t in row), []).append(i)
    return iter(found.values())


def adamw_(x: AdamwInputs) -> None:
    """One AdamW step in place, one launch per combination of dtypes and alignment; see `ops.adamw_`."""
    near_mean, *numbers = coefficients(x)
    params = x.params or x.masters
    lists = [x.grads, x.masters, x.exp_avgs, x.exp_avg_sqs, *([x.params] if x.params else [])]
    addresses = tuple([tuple([t.data_ptr() for t in tensors]) for tensors in lists])
    sizes = tuple([t.numel() for t in x.masters])
    device = x.masters[0].device

    def build() -> tuple[Launch, ...]:
        groups = groups_by_dtype(x.grads, params)
        return tuple(make_launch(device, indices, sizes, BLOCK, addresses) for indices in groups)

    with on_device(x.masters[0]):
        key = (device, BLOCK, sizes, addresses, tuple([t.dtype for t in (*x.grads, *x.params)]))
        for each in cached_launches(device, key, build):
            adamw_kernel[(each.blocks,)](
                each.table, x.scale, each.count, *numbers, NEAR_MEAN=near_mean, ZERO_GRAD=x.zero_grad,
                HAS_SCALE=x.scale is not None, HAS_PARAM=bool(x.params), GRAD_TYPE=TYPES[x.grads[each.first].dtype],
                PARAM_TYPE=TYPES[params[each.first].dtype], ALIGNED=each.aligned, BLOCK=BLOCK,
                num_warps=WARPS, **options(),
            )  # fmt: skip


def grad_norm(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(norm [] fp64, scale [] fp32, sums of squares [tensors] fp64); see `ops.grad_norm`."""
    device = grads[0].device
    addresses = tuple([t.data_ptr() for t in grads])
    sizes = tuple([t.numel() for t in grads])

    def build() -> tuple[Launch, ...]:
        slots = block_offsets(sizes, NORM_SEGMENT)
        offsets = Launch(upload([slots], device), len(sizes), slots[-1], 0, True)
        groups = groups_by_dtype(grads)
        return offsets, *(make_launch(device, group, sizes, NORM_SEGMENT, (addresses,), slots) for group in groups)

    with on_device(grads[0]):
        key = (device, NORM_SEGMENT, sizes, addresses, tuple([t.dtype for t in grads]))
        offsets, *segments = cached_launches(device, key, build)
        partials = torch.empty(offsets.blocks, dtype=torch.float64, device=device)
        squares = torch.empty(offsets.count, dtype=torch.float64, device=device)
        norm = torch.empty((), dtype=torch.float64, device=device)
        scale = torch.empty((), dtype=torch.float32, device=device)
        fixed = {"LANES": SEGMENT, "LEVELS": LEVELS, "num_warps": NORM_WARPS, **options()}
        for each in segments:
            squares_kernel[(each.blocks,)](
                each.table, partials, each.count, GRAD_TYPE=TYPES[grads[each.first].dtype], ALIGNED=each.aligned,
                SEGMENT=NORM_SEGMENT, ROWS=ROWS, **fixed,
            )  # fmt: skip
        tensors_kernel[(offsets.count,)](offsets.table, partials, squares, **fixed)
        norm_kernel[(1,)](
            squares, loss_scale, norm, scale, offsets.count, float("inf") if max_norm is None else max_norm,
            HAS_LOSS_SCALE=loss_scale is not None, **fixed,
        )  # fmt: skip
    return norm, scale, squares
