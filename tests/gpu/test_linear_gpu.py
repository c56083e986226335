"""linear and its gradients on a GPU: close to fp64, the same bits in any batch and tile, the CPU's bits in fp32.

Control: stock linear depends on the batch. Certification of schedules is tested in test_schedule_gpu.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.gpu_checks import DEVICE, Compared, Record, assert_rows_alone, data
from ops.op_checks import assert_right, by_dtype, differs, rand

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE, WGRAD_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {"qkv": (4096, 1024, 1), "down": (1024, 3072, 8), "o": (1024, 2048, 2), "odd": (72, 200, 1)}
by_shape = pytest.mark.parametrize("n,k,chunks", SHAPES.values(), ids=SHAPES)


@by_dtype
@pytest.mark.parametrize("m", (1, 33, 300))
@pytest.mark.parametrize("n,k,chunks", ((96, 512, 4), (200, 72, 1), (1, 512, 8)))
def test_linear_accuracy(m: int, n: int, k: int, chunks: int, dtype: torch.dtype) -> None:
    x, w, b, dy = (data(i, *shape, dtype=dtype) for i, shape in enumerate(((m, k), (n, k), (n,), (m, n))))
    op = lambda x, w, b: ops.linear(x, w, b, chunks=chunks, dgrad_chunks=math.gcd(chunks, n))
    assert_right(op, F.linear, (x, w, b), (dy,), f"linear {m}x{n}x{k}")


@by_dtype
@by_shape
def test_rows_do_not_depend_on_the_batch(n: int, k: int, chunks: int, dtype: torch.dtype, record: Record) -> None:
    x, w, b = data(0, 1100, k, dtype=dtype), data(1, n, k, dtype=dtype), data(2, n, dtype=dtype)
    seen = assert_rows_alone(lambda x: ops.linear(x, w, b, chunks=chunks), (x,), "linear")
    seen += assert_rows_alone(lambda x: ops.linear(x, w, chunks=chunks, out_dtype=torch.float32), (x,), "fp32 result")
    dy = data(3, 1100, n, dtype=dtype)
    seen += assert_rows_alone(lambda dy: torch.ops.rlkernel.linear_dgrad(dy, w, chunks), (dy,), "input gradient")
    record(**vars(seen))


def test_control_stock_linear_depends_on_the_batch() -> None:
    """cuBLAS chooses split-K by M."""
    x, w = data(0, 1100, 12288, dtype=torch.bfloat16), data(1, 4096, 12288, dtype=torch.bfloat16)
    with ops.stock():
        assert differs(lambda: assert_rows_alone(lambda x: ops.linear(x, w), (x,), "stock linear"))


def offered() -> list[Any]:
    """Triton tiles for more than 64 rows."""
    pytest.importorskip("triton")
    from rlkernel.kernels.cuda.linear import OFFERS

    return [pytest.param(o, id=f"{o.tile.m}x{o.tile.n}x{o.tile.k}, {o.narrow}") for o in OFFERS if o.most > 64]


@pytest.mark.parametrize("offer", offered())
def test_triton_tiles_equal_the_anchor(offer: Any, record: Record) -> None:
    """Certification would refuse a tile with other bits silently, and only speed would be lost."""
    from rlkernel.kernels.triton.linear import gemm

    n, k, bf16 = max(offer.narrow - 1, 512) + 24, 3072, torch.bfloat16
    rows, seen = {max(offer.least, 65), offer.most - 7, offer.most}, Compared()
    for m in rows:
        x, w, dy = data(0, m, k, dtype=bf16), data(1, n, k, dtype=bf16), data(2, m, k, dtype=bf16)
        for a, b in ((x, w.t()), (dy, w.t().contiguous())):  # forward and input gradient
            new = lambda m=m: torch.empty(m, n, dtype=bf16, device=DEVICE)
            seen.rows(gemm(a, b, new(), tile=offer.tile), gemm(a, b, new()), f"{offer.tile}, {m} rows")
    record(**vars(seen))


def explicit_algorithms() -> list[Any]:
    """cuBLASLt algorithms that are named by their settings, not by their place in the heuristic's list."""
    pytest.importorskip("triton")
    from rlkernel.kernels.cuda.linear import ALGORITHM_OFFERS

    found = [offer for offer in ALGORITHM_OFFERS if not isinstance(offer.which, int)]
    return [pytest.param(c, id=f"{c.name}, {c.least} to {c.most} by {c.narrow}") for c in found]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0),
    reason="offered on sm_90 only",
)
@pytest.mark.parametrize("offer", explicit_algorithms())
def test_explicit_cublaslt_algorithms_equal_the_anchor(offer: Any, record: Record) -> None:
    """Certification would refuse an algorithm with other bits silently. One that this cuBLASLt lacks is skipped."""
    from rlkernel.kernels import build
    from rlkernel.kernels.cuda import linear as cuda
    from rlkernel.kernels.cuda import linear_shapes as shapes

    build.cublaslt_library()
    rows, bf16, seen = {offer.least, offer.most - 7, offer.most}, torch.bfloat16, Compared()
    for form, k in (("forward", 1544), ("dgrad", 1544), ("head", DGRAD_WHOLE + 16)):
        forward, n = form == "forward", 136 if form == "head" else max(offer.narrow - 1, 512) + 24
        size = torch.Size((n, k) if forward else (k, n))
        s = shapes.LinearShape(0, offer.most, size, bf16, None, False, 1, True, form.replace("head", "dgrad"))
        assert s.is_head == (form == "head")
        if s.is_head and offer.most <= 64:
            continue
        w = data(1, *size, dtype=bf16)
        try:
            run, algorithm = (cuda._head if s.is_head else cuda._product)(s, offer.which)
        except RuntimeError as error:
            pytest.skip(f"this cuBLASLt does not have it for {form}: {error}")
        op = cuda.linear if forward else cuda.linear_dgrad
        for m in rows:
            a = data(0, m, k, dtype=bf16)
            rest = (None, 1, 1, None) if forward else (1,)
            seen.rows(run(a, w), op.spec.anchor(a, w, *rest), f"{form}, {m} rows, {algorithm}")
    record(**vars(seen))


@by_dtype
@pytest.mark.parametrize("chunks", (1, 2, 8, 16))
def test_linear_in_every_tile(chunks: int, dtype: torch.dtype, record: Record) -> None:
    from rlkernel.kernels.triton.linear import gemm
    from rlkernel.kernels.triton.matrix import Tile

    m, n, k = 200, 300, 1024
    x, w, b = data(0, m, k, dtype=dtype), data(1, n, k, dtype=dtype), data(2, n, dtype=dtype)
    new = lambda: torch.empty(m, n, dtype=torch.float32, device=DEVICE)
    expected, seen = gemm(x, w.t(), new(), bias=b, chunks=chunks), Compared()
    wide = (
        ()
        if dtype == torch.float32 or chunks > 1
        else ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 256, 32, 4, 2))
    )
    small = ((16, 32, 16, 2, 2), (16, 64, 32, 4, 3), (32, 64, 64, 4, 2), (64, 64, 32, 4, 3), (64, 32, 16, 8, 2))
    splits = {max(1, chunks // 8), chunks}
    tiles = [Tile(*t, split, tma) for t in (*small, *wide) for split in splits for tma in (False, True)]
    for tile in tiles:
        seen.rows(gemm(x, w.t(), new(), bias=b, chunks=chunks, tile=tile), expected, f"{tile}")
    fresh = x.t().contiguous().t()
    seen.rows(gemm(fresh, w.t().contiguous(), new(), bias=b, chunks=chunks), expected, "other strides")
    half = k // 2
    if chunks == 1:
        running = gemm(x[:, :half], w[:, :half].t(), new())
        gemm(x[:, half:], w[:, half:].t(), running, bias=b, start=running)
        seen.rows(running, expected, "a chain in two parts")
    record(**vars(seen))


@by_dtype
def test_weight_gradient_in_every_tile(dtype: torch.dtype, record: Record) -> None:
    from rlkernel.kernels.triton.linear_grad import ascending
    from rlkernel.kernels.triton.matrix import Tile

    chunk = 256
    tokens = 3 * chunk + 77
    dy, x, start = data(0, tokens, 136, dtype=dtype), data(1, tokens, 200, dtype=dtype), data(2, 136, 200)
    expected, seen = ascending(dy.t(), x, start.clone(), chunk, start=start), Compared()
    tiles = [(16, 32, 16, 2, 2), (32, 64, 32, 4, 3), (64, 64, 64, 4, 2), (64, 128, 16, 8, 2)]
    if dtype != torch.float32:
        tiles.append((128, 128, 64, 8, 3))
    for tile, tma, split in itertools.product(tiles, (False, True), (1, 4)):
        grad = start.clone()
        ascending(dy.t(), x, grad, chunk, start=grad, tile=Tile(*tile, split=split, tma=tma))
        seen.whole(grad, expected, f"{tile}, tma {tma}, split {split}")
    grad = start.clone()
    for piece in (slice(0, chunk), slice(chunk, 3 * chunk), slice(3 * chunk, None)):
        ascending(dy[piece].t(), x[piece], grad, chunk, start=grad)
    seen.whole(grad, expected, "micro-batches")
    assert_accurate(expected, start.double() + dy.double().t() @ x.double(), start + dy.t().float() @ x.float())
    record(**vars(seen))


@by_dtype
def test_weight_gradient_of_the_op(dtype: torch.dtype, record: Record) -> None:
    """main_grad continued in micro-batches, and without main_grad the fp32 sum rounded once."""
    tokens = WGRAD_TOKENS + 77
    dy, x = data(0, tokens, 136, dtype=dtype), data(1, tokens, 200, dtype=dtype)
    raw = torch.ops.rlkernel
    new = torch.zeros(136, 200, device=DEVICE)
    raw.linear_wgrad_(new, dy, x)
    parts = torch.zeros(136, 200, device=DEVICE)
    for piece in (slice(0, WGRAD_TOKENS), slice(WGRAD_TOKENS, None)):
        raw.linear_wgrad_(parts, dy[piece], x[piece])
    seen = Compared()
    seen.whole(parts, new, "micro-batches")
    seen.whole(raw.linear_wgrad(dy, x), new.to(dtype), "one rounding, two chunks")
    first = torch.zeros(136, 200, device=DEVICE)
    raw.linear_wgrad_(first, dy[:WGRAD_TOKENS], x[:WGRAD_TOKENS])
    seen.whole(raw.linear_wgrad(dy[:WGRAD_TOKENS], x[:WGRAD_TOKENS]), first.to(dtype), "one rounding, one chunk")
    seen.whole(raw.linear_wgrad(dy[:0], x[:0]), torch.zeros(136, 200, dtype=dtype), "no tokens")
    record(**vars(seen))


@by_dtype
def test_input_gradient_of_a_head(dtype: torch.dtype, record: Record) -> None:
    from rlkernel.kernels.triton.linear import gemm
    from rlkernel.kernels.triton.linear_grad import ascending
    from rlkernel.kernels.triton.matrix import Tile

    n, k = DGRAD_WHOLE + DGRAD_CHUNK + 128, 72
    dy, w = data(0, 70, n, dtype=dtype), data(1, n, k, dtype=dtype) / 16
    total = None
    for first in range(0, n, DGRAD_CHUNK):
        piece = slice(first, first + DGRAD_CHUNK)
        part = gemm(dy[:, piece], w[piece], torch.empty(70, k, device=DEVICE))
        total = part if total is None else total + part
    assert total is not None
    dx = torch.ops.rlkernel.linear_dgrad(dy, w, 1)
    seen = Compared()
    seen.rows(dx, total.to(dtype), "chunks added ascending")
    seen += assert_rows_alone(lambda dy: torch.ops.rlkernel.linear_dgrad(dy, w, 1), (dy,), "input gradient of a head")
    chunks = -(-n // DGRAD_CHUNK)
    for tile, split in itertools.product(((16, 32, 16, 2, 2), (64, 64, 32, 4, 3)), (1, chunks)):
        ours = ascending(dy, w, torch.empty_like(dx), DGRAD_CHUNK, tile=Tile(*tile, split=split))
        seen.rows(ours, dx, f"{tile}, split {split}")
    record(**vars(seen))


@pytest.mark.skipif(torch.version.hip is not None, reason="AMD has fp32 matrix instructions")
@pytest.mark.parametrize("chunks", (1, 4))
def test_fp32_linear_equals_the_cpu(chunks: int) -> None:
    """NVIDIA GPUs have no fp32 matrix instruction, so the chain is the CPU's: one fma per step."""
    x, w, b = rand(0, 70, 328), rand(1, 90, 328), rand(2, 90)
    y = ops.linear(x.to(DEVICE), w.to(DEVICE), b.to(DEVICE), chunks=chunks)
    assert_bitwise(y, ops.linear(x, w, b, chunks=chunks), "GPU against CPU")
