"""Schedules of linear and its gradients: cuBLASLt without split-K, further Triton tiles, a Hopper kernel for few rows.

The anchor is kernels/triton/linear.py. One cuBLASLt algorithm serves a whole bucket of row counts, so that what was
certified is what runs. Sums over chunks are the anchor's folds, or beta = 1 chunk after chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import DGRAD_CHUNK, WGRAD_TOKENS
from rlkernel.kernels.certification import OpSpec, Run, Schedule
from rlkernel.kernels.cuda import cublaslt, driver
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.cuda.cublaslt import Algorithm
from rlkernel.kernels.cuda.linear_shapes import LinearShape, cut, max_rows
from rlkernel.kernels.samples import KINDS, NONFINITE
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton import common, linear_grad
from rlkernel.kernels.triton import linear as anchor
from rlkernel.kernels.triton.matrix import Tile

SPLIT_ROWS = 512  # most rows at which a head's input gradient keeps one fp32 partial sum per chunk
ANY = 1 << 40


class Offer(NamedTuple):
    """A Triton tile for products of least..most rows and narrow..wide columns; a tile may have several offers."""

    least: int
    most: int
    narrow: int
    wide: int
    tile: Tile


# One chain over K leaves few programs if n is small: narrow tiles with long blocks of K keep as many bytes in flight as
# shared memory holds. Above 64 rows a program reads as much of x as of the weight and is bound by the SM's load
# bandwidth: about 128 programs (4224 and 8448 are 132 times 32 and 64) with tiles as square as possible.
OFFERS = (
    Offer(1, 16, 1, 2048, Tile(16, 16, 512, 1, 4)),
    Offer(1, 16, 1, 2048, Tile(16, 8, 512, 1, 5)),
    Offer(1, 16, 1, 2048, Tile(16, 16, 256, 4, 7, tma=False)),
    Offer(1, 16, 2049, ANY, Tile(16, 32, 128, 4, 12, tma=False)),
    Offer(1, 16, 2049, ANY, Tile(16, 32, 256, 4, 5)),
    Offer(1, 16, 2049, ANY, Tile(16, 64, 256, 4, 5)),
    Offer(1, 16, 2049, ANY, Tile(16, 64, 128, 4, 5)),
    Offer(17, 128, 1, 2048, Tile(64, 16, 256, 4, 5)),
    Offer(17, 64, 2049, ANY, Tile(64, 32, 128, 4, 9)),
    Offer(65, 256, 1, 2048, Tile(64, 32, 128, 4, 9)),
    Offer(17, 64, 2049, ANY, Tile(64, 64, 128, 4, 7)),
    Offer(65, 128, 2049, 4224, Tile(64, 64, 128, 4, 7)),
    Offer(65, 128, 2049, 4224, Tile(128, 32, 128, 8, 5)),
    Offer(65, 128, 2049, 4224, Tile(128, 32, 64, 8, 11)),
    Offer(65, 128, 4225, 8448, Tile(128, 64, 64, 8, 9)),
    Offer(129, 192, 2049, 4224, Tile(128, 64, 64, 8, 9)),
    Offer(65, 256, 2049, ANY, Tile(64, 128, 64, 4, 9)),
)
# The input gradient of a head: each program computes one chunk of a tile, above SPLIT_ROWS all of them. Not offered
# above 4096 rows, where it is so close to cuBLASLt's algorithms that the GPU's temperature decides.
HEAD_OFFERS = (
    Offer(1, 16, 1, ANY, Tile(16, 64, 256, 4, 3)),
    Offer(1, 16, 1, ANY, Tile(16, 64, 128, 4, 6)),
    Offer(17, 64, 1, ANY, Tile(64, 64, 64, 4, 7)),
    Offer(65, 4096, 1, ANY, Tile(128, 128, 64, 8, 6)),
)


class AlgorithmOffer(NamedTuple):
    """A cuBLASLt algorithm for products of least..most rows and narrow..wide columns; a name may have several."""

    name: str
    which: int | Algorithm  # rank among the heuristic's answers, or an explicit algorithm
    forms: tuple[str, ...] = ("forward", "dgrad", "wgrad")
    least: int = 1
    most: int = ANY
    narrow: int = 1
    wide: int = ANY


def _explicit(
    features: int, tokens: int, cluster: str, custom: int, least: int, most: int, narrow: int, wide: int,
    swizzle: int = 0,
) -> AlgorithmOffer:  # fmt: skip
    which = Algorithm(
        cublaslt.HOPPER, cublaslt.TILES[features, tokens], cublaslt.STAGES, cublaslt.CLUSTERS[cluster], custom, swizzle
    )
    return AlgorithmOffer(f"{features}x{tokens}.{cluster}", which, ("forward", "dgrad"), least, most, narrow, wide)


def _cut_in(parts: int, features: int, cluster: str, custom: int, *span: int) -> list[AlgorithmOffer]:
    """One tile per bucket of rows in a span (least, most, narrow, wide): 1 / `parts` of the rows, rounded up to 8."""
    least, most, *widths = span
    return [
        _explicit(features, -(-high // (8 * parts)) * 8, cluster, custom, low + 1, high, *widths)
        for low, high in itertools.pairwise(shapes.BUCKETS)
        if least <= low + 1 and high <= most
    ]


# Where split-K is the heuristic's best answer, it returns few others. The explicit tiles below fill an H200's 132 SMs
# about once, two token tiles in a cluster share the weight, and a bucket's highest row count, at which schedules are
# timed, is a multiple of the tile. Custom options are those that the heuristic pairs with each cluster.
ALGORITHM_OFFERS = (
    *(AlgorithmOffer(str(rank), rank) for rank in range(cublaslt.RANKS)),
    _explicit(16, 64, "4x1", 0, 17, 64, 1, 2048),
    _explicit(32, 64, "4x1", 0, 17, 64, 1, 2048),
    _explicit(64, 16, "4x2", 3, 17, 32, 1, 2048, swizzle=2),
    *_cut_in(4, 64, "1x2", 3, 65, 256, 1, 2048),
    *_cut_in(8, 64, "1x2", 3, 65, 256, 1, 1024),
    *_cut_in(1, 64, "2x1", 1, 17, 64, 2049, 8448),
    *_cut_in(2, 64, "1x2", 3, 17, 256, 2049, 4224),
    *_cut_in(4, 128, "2x1", 1, 65, 256, 2049, 4224),
    *_cut_in(4, 128, "1x2", 3, 129, 256, 2049, 4224),
    _explicit(128, 64, "1x1", 0, 225, 256, 2049, 4224),
    *_cut_in(2, 128, "1x2", 3, 17, 256, 4225, 8448),
    _explicit(128, 128, "1x2", 3, 513, 2048, 1, 2048),
)


# ---- cuBLASLt ------------------------------------------------------------------------------------


def _in_pieces(s: LinearShape, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` (a, weight, the op's further arguments, out) for any number of rows, above `max_rows` in pieces. No bit
    changes, because rows are independent."""
    most = max_rows(s)
    if s.rows <= most and s.rows < shapes.BUCKETS[-1]:
        return run

    def pieces(a: Tensor, weight: Tensor, *more: Any) -> Tensor:
        m = a.shape[0]
        if m <= most:
            return run(a, weight, *more)
        out = torch.empty((m, s.n), dtype=s.out, device=a.device)
        for rows in cut(m, most):
            run(a[rows], weight, *more, out=out[rows])
        return out

    return pieces


def _placed(bias: Tensor) -> Tensor:
    """The bias, contiguous at a 16-byte address, as it was certified."""
    good = not bias.data_ptr() & 15 and bias.is_contiguous()
    return bias if good else bias.clone(memory_format=torch.contiguous_format)


def _product(s: LinearShape, which: int | Algorithm) -> tuple[Callable[..., Tensor], str]:
    """The forward or the input gradient, with the op's arguments; and the algorithm's description."""
    split, has_bias = s.chunks > 1, s.bias
    in_epilogue = has_bias and not split
    partial = torch.float32 if split else s.out
    span, b_by_n = s.k // s.chunks, s.form == "forward"
    chosen = cublaslt.plan(
        s.device, max_rows(s), s.n, span, s.chunks, s.k, s.weight[1], False, b_by_n, s.dtype, partial, in_epilogue,
        which,
    )  # fmt: skip
    launch, n, out_dtype = cublaslt.launcher(s.device, chosen), s.n, s.out

    def run(a: Tensor, weight: Tensor, *more: Any, out: Tensor | None = None) -> Tensor:
        m, a_at, weight_at, bias = a.shape[0], a.data_ptr(), weight.data_ptr(), more[0] if has_bias else None
        with common.on_device(a):
            if out is None:
                out = torch.empty((m, n), dtype=out_dtype, device=a.device)
            if (a_at | weight_at) & 15:
                return anchor.gemm(a, weight.t() if b_by_n else weight, out, bias=bias, chunks=s.chunks)
            target = torch.empty((s.chunks, m, n), dtype=partial, device=a.device) if split else out
            if bias is not None:
                bias = _placed(bias)
            added = bias.to(out_dtype) if in_epilogue and bias is not None else None
            launch(m, span, a_at, weight_at, None if added is None else added.data_ptr(), False, target)
            while target is not out:
                target = anchor.fold_partials(target, bias, out)
        return out

    return _in_pieces(s, run), chosen.algorithm


def _head(s: LinearShape, which: int | Algorithm) -> tuple[Callable[..., Tensor], str]:
    """The input gradient of a head, adding chunk after chunk to one fp32 sum; and the algorithm's description."""
    chosen = cublaslt.plan(
        s.device, max_rows(s), s.n, DGRAD_CHUNK, 1, s.k, s.n, False, False, s.dtype, torch.float32, False, which
    )  # fmt: skip
    launch, n, size = cublaslt.launcher(s.device, chosen), s.n, s.dtype.itemsize

    def run(dy: Tensor, weight: Tensor, *_: Any, out: Tensor | None = None) -> Tensor:
        m, a, b = dy.shape[0], dy.data_ptr(), weight.data_ptr()
        if (a | b) & 15:
            out = torch.empty((m, n), dtype=s.out, device=dy.device) if out is None else out
            return linear_grad.ascending(dy, weight, out, DGRAD_CHUNK)
        with common.on_device(dy):
            total = torch.empty((m, n), dtype=torch.float32, device=dy.device)
            for first in range(0, s.k, DGRAD_CHUNK):
                k = min(DGRAD_CHUNK, s.k - first)
                launch(m, k, a + first * size, b + first * n * size, None, first > 0, total)
            return total.to(s.out) if out is None else out.copy_(total)

    return _in_pieces(s, run), chosen.algorithm


def _wgrad(s: LinearShape, which: int | Algorithm) -> tuple[Callable[[Tensor, Tensor, Tensor, bool], None], str]:
    """The weight gradient, and the algorithm's description."""
    n, k = s.weight
    chosen = cublaslt.plan(s.device, n, k, s.rows, 1, n, k, True, False, s.dtype, s.out, False, which)
    launch = cublaslt.launcher(s.device, chosen)

    def run(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        dy_at, x_at = dy.data_ptr(), x.data_ptr()
        if (dy_at | x_at | grad.data_ptr()) & 15:
            return linear_grad.wgrad_(grad, dy, x, fresh)
        with common.on_device(dy):
            launch(n, dy.shape[0], dy_at, x_at, None, not fresh, grad)

    return run, chosen.algorithm


def _cublaslt_supports(s: LinearShape) -> bool:
    return (
        s.device >= 0
        and not common.IS_HIP
        and s.contiguous
        and s.rows > 0
        and s.dtype in (torch.bfloat16, torch.float16)
        and (s.out == torch.float32 or (s.out == s.dtype and s.fresh))
        and all(d % 8 == 0 for d in s.weight)
        and not (s.is_head and s.rows <= 64)  # one launch per chunk, each with too few rows
        and (s.form == "wgrad" or s.k % (8 * s.chunks) == 0)
    )


def _cublaslt(name: str, form: str) -> Schedule[LinearShape]:
    offers = [offer for offer in ALGORITHM_OFFERS if offer.name == name]
    which = offers[0].which

    def supports(s: LinearShape) -> bool:
        return (
            any(c.least <= s.rows <= c.most and c.narrow <= s.n <= c.wide for c in offers) and _cublaslt_supports(s)
            and (isinstance(which, int) or (s.chunks == 1 and driver.on_hopper(s.device)))
        )  # fmt: skip

    def bind(s: LinearShape) -> Run:
        make: Callable[..., tuple[Run, str]] = _wgrad if form == "wgrad" else _head if s.is_head else _product
        run, algorithm = make(s, which)
        run.note = f"; {algorithm}"  # type: ignore[attr-defined]
        return run

    return Schedule(f"cublaslt.{name}", bind, supports)


# ---- Triton tiles --------------------------------------------------------------------------------


def _tile(tile: Tile, dgrad: bool, head: bool = False) -> Schedule[LinearShape]:
    offers = [offer for offer in (HEAD_OFFERS if head else OFFERS) if offer.tile == tile]

    def supports(s: LinearShape) -> bool:
        return (
            s.device >= 0 and not common.IS_HIP and s.contiguous and s.chunks == 1 and s.dtype.itemsize == 2
            and s.is_head == head and any(o.least <= s.rows <= o.most and o.narrow <= s.n <= o.wide for o in offers)
        )  # fmt: skip

    def bind(s: LinearShape) -> Run:
        split = -(-s.k // DGRAD_CHUNK) if s.rows <= SPLIT_ROWS else 1

        def run(a: Tensor, weight: Tensor, *more: Any, out: Tensor | None = None) -> Tensor:
            if out is None:
                out = torch.empty((a.shape[0], s.n), dtype=s.out, device=a.device)
            own = None if (a.data_ptr() | weight.data_ptr()) & 15 else tile  # None: the anchor's
            if head:
                own = own and own._replace(split=split)
                return linear_grad.ascending(a, weight, out, DGRAD_CHUNK, tile=own)
            bias = _placed(more[0]) if s.bias else None
            return anchor.gemm(a, weight if dgrad else weight.t(), out, bias=bias, tile=own)

        return _in_pieces(s, run)

    return Schedule(f"triton.{'head.' * head}{tile.m}x{tile.n}x{tile.k}", bind, supports)


# ---- ops -----------------------------------------------------------------------------------------


def _schedules(form: str) -> tuple[Schedule[LinearShape], ...]:
    found = [_cublaslt(name, form) for name in dict.fromkeys(c.name for c in ALGORITHM_OFFERS if form in c.forms)]
    if form != "wgrad":
        found += [_tile(tile, form == "dgrad") for tile in dict.fromkeys(offer.tile for offer in OFFERS)]
    if form == "dgrad":
        found += [_tile(offer.tile, True, head=True) for offer in HEAD_OFFERS]
    return tuple(found)


def _op(
    name: str, form: str, run: Run, shape: Callable[..., LinearShape], call_key: Callable[..., Hashable],
    sample: Callable[..., Any], mutates: tuple[int, ...] = (),
) -> ScheduledOp[LinearShape]:  # fmt: skip
    return ScheduledOp(
        OpSpec(
            name, run, shape, shapes.rows_of, sample, _schedules(form), call_key, versions=cublaslt.versions,
            mutates=mutates, kinds=(*KINDS, NONFINITE),
        )
    )  # fmt: skip


linear = _op("linear", "forward", anchor.linear, shapes.linear_shape, shapes.linear_call, shapes.linear_sample)
linear_dgrad = _op(
    "linear_dgrad", "dgrad", anchor.linear_dgrad, shapes.dgrad_shape, shapes.dgrad_call, shapes.dgrad_sample
)
wgrad_chunk = _op(
    "linear_wgrad", "wgrad", linear_grad.wgrad_, shapes.wgrad_shape, shapes.wgrad_call, shapes.wgrad_sample, (0,)
)


def wgrad_(
    grad: Tensor,  # [N, K] fp32; where fresh also the dtype of dy
    dy: Tensor,  # [T, N]
    x: Tensor,  # [T, K]
    fresh: bool,
) -> None:
    """grad += dy^T x, chunks of WGRAD_TOKENS added ascending; `fresh` ignores the content of grad and rounds once."""
    tokens = dy.shape[0]
    if tokens <= WGRAD_TOKENS:
        wgrad_chunk(grad, dy, x, fresh)
        return
    total = grad if grad.dtype == torch.float32 else torch.empty_like(grad, dtype=torch.float32)
    for first in range(0, tokens, WGRAD_TOKENS):
        last = first + WGRAD_TOKENS
        wgrad_chunk(total, dy[first:last], x[first:last], fresh and first == 0)
    if total is not grad:
        grad.copy_(total)


def linear_wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    wgrad_(grad, dy, x, False)


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    grad = torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype, device=dy.device)
    wgrad_(grad, dy, x, True)
    return grad
