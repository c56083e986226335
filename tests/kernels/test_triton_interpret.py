"""linear, embedding and the row-wise kernels in Triton's interpreter: accurate, and independent of tiles and grids.

The interpreter is chosen by an environment variable when a kernel is defined, so this file runs its tests in a
subprocess. Matrix products there are numpy's, in numpy's order, so tests that compare bits use exact sums or one
non-zero term per chunk, and compare only the order of chunks, tiles and tokens. The interpreter truncates bf16, so it
is not tested here.
"""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
from torch import Tensor
from triton_interpreter import run

pytest.importorskip("triton")

from kernels.interpreter_checks import by_dtype, close, whole
from ops.op_checks import rand

from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import EMBEDDING_WINDOW, SUM_TOKENS

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter() -> None:
        run(__file__)

else:
    import triton
    import triton.language as tl

    from rlkernel.kernels.reference import arith
    from rlkernel.kernels.reference import gae as gae_reference
    from rlkernel.kernels.reference import group_advantages as group_advantages_reference
    from rlkernel.kernels.reference import linear as linear_reference
    from rlkernel.kernels.reference import rms_norm as rms_norm_reference
    from rlkernel.kernels.reference import rope as rope_reference
    from rlkernel.kernels.reference import swiglu as swiglu_reference
    from rlkernel.kernels.symmetric_memory import BYTES, CONTROL_BYTES, Workspace
    from rlkernel.kernels.triton import (
        all_reduce,
        common,
        embedding,
        gae,
        group_advantages,
        linear,
        linear_grad,
        qk_norm_rope,
        rms_norm,
        rope,
        swiglu,
    )
    from rlkernel.kernels.triton.linear import gemm
    from rlkernel.kernels.triton.matrix import Tile

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
    TILES = (Tile(16, 32, 16, 4, 2, tma=False), Tile(32, 16, 32, 4, 2), Tile(64, 64, 64, 4, 2))

    # ---- linear ---------------------------------------------------------------------------------

    @by_dtype
    @pytest.mark.parametrize(
        "m,n,k,chunks", ((1, 40, 48, 1), (33, 70, 64, 4), (5, 16, 256, 8), (3, 16, 288, 16), (37, 1, 64, 1))
    )
    def test_linear(m: int, n: int, k: int, chunks: int, dtype: torch.dtype) -> None:
        x, w, b = rand(0, m, k, dtype=dtype), rand(1, n, k, dtype=dtype), rand(2, n, dtype=dtype)
        for out in (None, torch.float32):
            y = linear.linear(x, w, b, chunks, 1, out)
            close(y, linear_reference.linear(x, w, b, chunks, 1, out), "linear", dtype)
        assert_bitwise(linear.linear(x.t().contiguous().t(), w, b, chunks, 1, out), y, "strided x")
        dy = rand(3, m, n, dtype=dtype)
        close(linear.linear_dgrad(dy, w, 1), linear_reference.linear_dgrad(dy, w, 1), "input gradient")
        ours, reference = rand(4, n, k), rand(4, n, k)
        linear_grad.linear_wgrad_(ours, dy, x)
        linear_reference.linear_wgrad_(reference, dy, x)
        close(ours, reference, "weight gradient", dtype)
        ours, reference = rand(5, n), rand(5, n)
        linear_grad.bias_grad_(ours, dy)
        linear_reference.bias_grad_(reference, dy)
        close(ours, reference, "bias gradient")

    @by_dtype
    @pytest.mark.parametrize("chunks", (1, 4, 16))
    def test_linear_in_every_tile(chunks: int, dtype: torch.dtype) -> None:
        x, w, b = whole(0, 37, 192, dtype=dtype), whole(1, 40, 192, dtype=dtype), whole(2, 40, dtype=dtype)
        exact = (x.double() @ w.double().t() + b.double()).float()
        for tile in TILES:
            for split in {max(1, chunks // 8), chunks}:
                out = torch.empty(37, 40)
                gemm(x, w.t(), out, bias=b, chunks=chunks, tile=tile._replace(split=split))
                assert_bitwise(out, exact, f"{tile}, {split} splits")

    @by_dtype
    @pytest.mark.parametrize("m,chunks", ((70, 2), (130, 1), (130, 8)))
    def test_linear_of_many_rows(m: int, chunks: int, dtype: torch.dtype) -> None:
        x, w, dy = (whole(i, *shape, dtype=dtype) for i, shape in enumerate(((m, 64), (20, 64), (m, 20))))
        exact = x.double() @ w.double().t()
        assert_bitwise(linear.linear(x, w, None, chunks, 1, torch.float32), exact.float(), "linear")
        assert_bitwise(linear.linear_dgrad(dy, w, 1), (dy.double() @ w.double()).to(dtype), "input gradient")
        assert_bitwise(linear_grad.linear_wgrad(x, dy), (x.double().t() @ dy.double()).to(dtype), "weight gradient")

    @pytest.mark.parametrize("chunks", (2, 4, 8, 16))
    def test_chunks_are_added_in_a_balanced_tree(chunks: int) -> None:
        span = 48
        x = torch.zeros(3, chunks * span)
        x[:, 5::span] = rand(0, 3, chunks) * torch.exp2(rand(1, 3, chunks) * 8)
        w = rand(2, 20, chunks * span)
        expected = linear_reference.linear(x, w, None, chunks, 1, None)
        for split in {max(1, chunks // 8), chunks // 2, chunks}:
            out = gemm(x, w.t(), torch.empty(3, 20), chunks=chunks, tile=Tile(16, 32, 32, 4, 2, split))
            assert_bitwise(out, expected, f"{split} splits")
        if chunks > 2:
            fold = torch.zeros(3, 20)
            for k in range(5, chunks * span, span):
                fold = fold + x[:, k : k + 1] * w[:, k]
            with pytest.raises(AssertionError):
                assert_bitwise(fold, expected, "control: a left fold")

    @by_dtype
    def test_chain_continues_from_its_start(dtype: torch.dtype) -> None:
        a, b = whole(0, 20, 96, dtype=dtype), whole(1, 96, 40, dtype=dtype)
        running = torch.empty(20, 40)
        gemm(a[:, :32], b[:32], running)
        gemm(a[:, 32:], b[32:], running, start=running)
        assert_bitwise(running, (a.double() @ b.double()).float(), "a chain in two parts")

    @by_dtype
    def test_weight_gradient_adds_chunks_of_tokens_ascending(dtype: torch.dtype) -> None:
        chunk, tokens = 64, 2 * 64 + 37
        dy, x = torch.zeros(tokens, 24, dtype=dtype), rand(1, tokens, 16, dtype=dtype)
        places = (3, 64 + 9, 2 * 64 + 30)
        for i, token in enumerate(places):
            dy[token] = rand(2 + i, 24, dtype=dtype) * 30.0**i
        start = rand(9, 24, 16)
        new, expected = torch.full((24, 16), -0.0), start
        for token in places:
            part = dy[token].float()[:, None] * x[token].float()
            new, expected = new + part, expected + part
        splits = (None, *(tile._replace(split=split) for tile in TILES for split in (1, 3)))
        for tile, parts in itertools.product(splits, ([0, tokens], [0, chunk, tokens])):
            grad = start.clone()
            for first, last in itertools.pairwise(parts):
                dy_part, x_part = dy[first:last], x[first:last]
                split = tile and tile._replace(split=min(tile.split, triton.cdiv(last - first, chunk)))
                linear_grad.ascending(dy_part.t(), x_part, grad, chunk, start=grad, tile=split)
            assert_bitwise(grad, expected, f"{tile}, parts {parts}")
        for fresh, out in ((True, new), (False, expected)):
            grad = torch.full((16, 24), float("nan")).t() if fresh else start.t().contiguous().t()
            linear_grad.wgrad_(grad, dy, x, fresh, chunk)
            assert_bitwise(grad, out, f"strided main_grad, fresh {fresh}")
        rounded = torch.full((24, 16), float("nan"), dtype=dtype)
        linear_grad.wgrad_(rounded, dy, x, True, chunk)
        assert_bitwise(rounded, new.to(dtype), "one rounding")
        with pytest.raises(AssertionError):
            total = start
            for token in reversed(places):
                total = total + dy[token].float()[:, None] * x[token].float()
            assert_bitwise(total, expected, "control: chunks descending")

    def test_a_fresh_gradient_is_the_first_chain() -> None:
        grad = torch.full((16, 8), float("nan"))
        linear_grad.wgrad_(grad, torch.zeros(0, 16), torch.zeros(0, 8), True)
        assert_bitwise(grad, torch.zeros(16, 8), "no tokens")
        linear_grad.wgrad_(grad, torch.zeros(0, 16), torch.zeros(0, 8), False)
        assert_bitwise(grad, torch.zeros(16, 8), "no tokens, continued")
        dy, x = whole(0, 50, 16), whole(1, 50, 8)
        assert_bitwise(linear_grad.linear_wgrad(dy, x), dy.t() @ x, "the op")

    @by_dtype
    def test_input_gradient_of_a_head_adds_chunks_ascending(dtype: torch.dtype) -> None:
        span, n = 48, 4 * 48 + 32
        dy, w = torch.zeros(20, n, dtype=dtype), rand(1, n, 40, dtype=dtype)
        for i, first in enumerate(range(0, n, span)):
            dy[:, first + 7] = rand(2 + i, 20, dtype=dtype) * 10.0 ** (i - 2)
        expected = torch.full((20, 40), -0.0)
        for first in range(0, n, span):
            expected = expected + dy[:, first + 7 : first + 8].float() * w[first + 7].float()
        for tile in (None, *(tile._replace(k=16, split=split) for tile in TILES for split in (1, 5))):
            for out in (dtype, torch.float32):
                dx = linear_grad.ascending(dy, w, torch.empty(20, 40, dtype=out), span, tile=tile)
                assert_bitwise(dx, expected.to(out), f"{tile}, {out}")
        running = torch.full((20, 40), float("nan"))
        for first in range(0, n, span):
            linear_grad.add_dgrad_(running, dy[:, first : first + span], w[first : first + span], first == 0, span)
        assert_bitwise(running, expected, "chunk by chunk")
        running = torch.full((20, 40), float("nan"))
        for first in range(0, n, 3 * span):
            linear_grad.add_dgrad_(
                running, dy[:, first : first + 3 * span], w[first : first + 3 * span], first == 0, span
            )
        assert_bitwise(running, expected, "three chunks, then two of which one is shorter")

    def test_only_a_large_n_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "DGRAD_WHOLE", 64)
        monkeypatch.setattr(linear, "DGRAD_CHUNK", 32)
        dy, w = torch.zeros(2, 80), rand(1, 80, 16)
        dy[:, (0, 31, 32, 63, 79)] = rand(2, 2, 5) * torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
        parts = [linear.gemm(dy[:, i : i + 32], w[i : i + 32], torch.empty(2, 16)) for i in range(0, 80, 32)]
        assert_bitwise(linear.linear_dgrad(dy, w, 1), (parts[0] + parts[1]) + parts[2], "three chunks")
        whole = linear.gemm(dy[:, :64], w[:64], torch.empty(2, 16))
        assert_bitwise(linear.linear_dgrad(dy[:, :64], w[:64], 1), whole, "one chain")

    def test_bias_gradient_order() -> None:
        tokens = SUM_TOKENS + 30
        dy, start = rand(0, tokens, 40) * 100, rand(1, 40)
        expected = start.clone()
        for first in range(0, tokens, SUM_TOKENS):
            chunk = torch.zeros(40)
            for row in dy[first : first + SUM_TOKENS]:
                chunk = chunk + row
            expected = expected + chunk
        linear_grad.bias_grad_(start, dy)
        assert_bitwise(start, expected, "bias gradient")

    # ---- embedding, rms_norm, rope, swiglu ------------------------------------------------------

    def windowed(grad: Tensor, dy: Tensor, ids: Tensor, size: int = EMBEDDING_WINDOW) -> Tensor:
        """The GPU's order: an id's occurrences are added ascending inside a window of tokens, windows ascending."""
        for first in range(0, len(ids), size):
            part: dict[int, Tensor] = {}
            for i, row in zip(ids[first : first + size].tolist(), dy[first : first + size].float(), strict=True):
                part[i] = part[i] + row if i in part else row
            for i, row in part.items():
                grad[i] += row
        return grad

    @by_dtype
    def test_embedding(dtype: torch.dtype) -> None:
        ids = torch.tensor([3, 1, 3, 3, 0, 3, 3, 3, 3, 3, 3, 3, 3, 1, 9])
        dy, ours = rand(0, 15, 600, dtype=dtype), rand(1, 10, 600)
        reference = windowed(ours.clone(), dy, ids)
        for c in (600, 1300, 5):  # one block per row, several, and several short rows per program
            weight = rand(2, 10, c, dtype=dtype)
            assert_bitwise(embedding.embedding(ids, weight), weight[ids], f"rows of {c}")
            assert_bitwise(embedding.embedding(ids[::2], weight.t().contiguous().t()), weight[ids[::2]], "strided")
        assert embedding.embedding(ids[:0], weight).shape == (0, 5)
        for unknown in (-1, 10, 1 << 33):  # an assertion on a GPU; no read here
            found = embedding.embedding(ids.clone().index_fill_(0, torch.tensor([7]), unknown), weight)
            assert_bitwise(found[:7], weight[ids[:7]], "rows in front of an id outside the vocabulary")
        strided = ours.clone()
        embedding.embedding_wgrad_(ours, dy, ids)
        assert_bitwise(ours, reference, "gradient")
        embedding.embedding_wgrad_(strided, dy.t().contiguous().t(), ids)
        assert_bitwise(strided, reference, "strided gradient")
        ids[:6] = torch.tensor([0, 1, 2, 3, 5, 5])
        few = embedding.embedding_wgrad(dy[:6], ids[:6], 10)  # the last program has a run and ends past the last place
        assert_bitwise(few, windowed(torch.zeros(10, 600), dy[:6], ids[:6]).to(dtype), "few tokens")
        expected = windowed(torch.zeros(10, 600), dy, ids).to(dtype)
        assert_bitwise(embedding.embedding_wgrad(dy, ids, 10), expected, "rounded once")

    @pytest.mark.parametrize("high", (1, 3, 100))
    def test_embedding_by_windows(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """With high = 1 and 3, ids are hot, so window_sums_kernel computes their sums."""
        tokens, cut = 140, 64
        monkeypatch.setattr(embedding, "EMBEDDING_WINDOW", 16)
        ids = torch.randint(0, high, (tokens,), generator=torch.Generator().manual_seed(high))
        dy, ours = rand(0, tokens, 8), rand(1, high, 8)
        reference, parts = windowed(ours.clone(), dy, ids, 16), ours.clone()
        embedding.embedding_wgrad_(ours, dy, ids)
        assert_bitwise(ours, reference, "gradient")
        for piece in (slice(0, cut), slice(cut, None)):
            embedding.embedding_wgrad_(parts, dy[piece], ids[piece])
        assert_bitwise(parts, reference, "micro-batches cut at a window's border")

    @pytest.mark.parametrize("high", (1, 3, 100))
    def test_embedding_adds_nothing_to_negative_zeros(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sums of only -0 stay -0 for all windows, micro-batches and masked places of an unrolled loop."""
        tokens = 140
        monkeypatch.setattr(embedding, "EMBEDDING_WINDOW", 16)
        ids = torch.randint(0, high, (tokens,), generator=torch.Generator().manual_seed(high))
        whole_, parts = torch.full((high, 8), -0.0), torch.full((high, 8), -0.0)
        dy = torch.full((tokens, 8), -0.0)
        embedding.embedding_wgrad_(whole_, dy, ids)
        for piece in (slice(0, 64), slice(64, None)):
            embedding.embedding_wgrad_(parts, dy[piece], ids[piece])
        for found in (whole_, parts):
            assert_bitwise(found, torch.full((high, 8), -0.0), "gradient")

    @by_dtype
    @pytest.mark.parametrize("c", (40, 128, 1100))
    def test_rms_norm(c: int, dtype: torch.dtype) -> None:
        x, r = rand(0, 9, c, dtype=dtype), rand(1, 9, c, dtype=dtype)
        w = rand(3, c, dtype=dtype)
        close(rms_norm.rms_norm(x, w, 1e-6), rms_norm_reference.rms_norm(x, w, 1e-6), "y")
        y, total = rms_norm.add_rms_norm(x, r, w, 1e-6)
        for ours, reference in zip((y, total), rms_norm_reference.add_rms_norm(x, r, w, 1e-6), strict=True):
            close(ours, reference, "y, r")
        assert_bitwise(rms_norm.rms_norm(total, w, 1e-6), y, "norm of the sum")
        alone = torch.cat([rms_norm.rms_norm(total[i : i + 1], w, 1e-6) for i in range(9)])
        assert_bitwise(alone, y, "rows alone")

    def zeros_of_both_signs(*shape: int, seed: int) -> torch.Tensor:
        """Random numbers, two thirds of them zeros."""
        x = rand(seed, *shape)
        return x * (rand(seed + 1, *shape) > 0.4)

    def test_signs_of_zeros() -> None:
        """The negative of +0 is -0, but the difference 0 - 0 is +0."""
        x, dy, w = zeros_of_both_signs(9, 40, seed=0), zeros_of_both_signs(9, 40, seed=2), rand(4, 40)
        x[:3], dy[3:6] = x[:3] * 0.0, dy[3:6] * 0.0
        ours = rms_norm.rms_norm_dgrad(dy, None, x, w, 1e-6)
        pairs = [(ours, rms_norm_reference.rms_norm_dgrad(dy, None, x, w, 1e-6))]
        q, k = zeros_of_both_signs(3, 6, 24, seed=5), zeros_of_both_signs(3, 2, 24, seed=7)
        table = zeros_of_both_signs(8, 24, seed=9)
        for inverse in (False, True):
            given = (q, k, torch.tensor([0, 5, 2]), table, inverse)
            pairs += zip(rope.rope(*given), rope_reference.rope(*given), strict=True)
        for found, expected in pairs:
            zero = expected == 0
            assert (found == 0)[zero].all() and expected[zero].signbit().any() and not expected[zero].signbit().all()
            assert torch.equal(found[zero].signbit(), expected[zero].signbit())

    @pytest.mark.parametrize(("c", "dtype"), ((40, torch.float32), (130, torch.float16)))
    def test_rms_norm_gradients(c: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        # small, because the interpreter evaluates a tree node by node; it truncates to bf16
        tile = rms_norm._tile
        monkeypatch.setattr(rms_norm, "_tile", lambda c, size: (2, 4, tile(c, size)[2]))
        x, r, dy = (rand(i, 9, c, dtype=dtype) for i in range(3))
        w, grad, reference = rand(3, c, dtype=dtype), rand(4, c), rand(4, c)
        plain = rms_norm.rms_norm_dgrad(dy, None, x, w, 1e-6)
        close(plain, rms_norm_reference.rms_norm_dgrad(dy, None, x, w, 1e-6), "input gradient")
        dx = rms_norm.rms_norm_grad_(grad, dy, r, x, w, 1e-6)
        close(dx, rms_norm_reference.rms_norm_grad_(reference, dy, r, x, w, 1e-6), "input gradient with dr")
        close(grad, reference, "weight gradient", dtype)
        again, dw = rms_norm.rms_norm_grad(dy, r, x, w, 1e-6)
        assert_bitwise(again, dx, "input gradient")
        rms_norm.rms_norm_grad_(grad.zero_(), dy, r, x, w, 1e-6)
        assert_bitwise(dw, grad.to(dtype), "weight gradient, rounded once")
        of_zero_eps = (m.rms_norm_grad(dy, None, x, w, 0.0)[1] for m in (rms_norm, rms_norm_reference))
        close(*of_zero_eps, "weight gradient with eps = 0", dtype)

    @pytest.mark.parametrize("chunks", (2, 3))
    def test_rms_norm_weight_gradient_by_chunks(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # a program adds two leaves of the batch and one of a piece; five of the last chunk's eight leaves have rows
        chunk = 256
        rows = (chunks - 1) * chunk + 140
        monkeypatch.setattr(rms_norm, "WGRAD_TOKENS", chunk)
        tile = rms_norm._tile
        monkeypatch.setattr(rms_norm, "_tile", lambda c, size: (16, 2, tile(c, size)[2]))
        assert [rms_norm.leaves(t, 8) for t in (rows, chunk)] == [(4, 4), (8, 0)]
        x, dy, w = rand(0, rows, 8), rand(1, rows, 8), rand(3, 8)
        grad, parts = rand(2, 8), rand(2, 8)
        rms_norm.rms_norm_grad_(grad, dy, None, x, w, 1e-6)
        for first in range(0, rows, chunk):
            piece = slice(first, first + chunk)
            rms_norm.rms_norm_grad_(parts, dy[piece], None, x[piece], w, 1e-6)
        assert_bitwise(parts, grad, "micro-batches cut at a chunk's border")
        fresh = rms_norm.rms_norm_grad(dy, None, x, w, 1e-6)[1]
        rms_norm.rms_norm_grad_(grad.zero_(), dy, None, x, w, 1e-6)
        assert_bitwise(fresh, grad, "from zero")

    @by_dtype
    @pytest.mark.parametrize("inverse", (False, True))
    @pytest.mark.parametrize("h,hk,d,groups", ((6, 2, 24, 1), (33, 3, 96, 4), (32, 1, 128, 2), (40, 5, 128, 4)))
    def test_rope(h: int, hk: int, d: int, groups: int, inverse: bool, dtype: torch.dtype) -> None:
        assert rope._tile(h, hk, d)["GROUPS"] == groups
        packed = rand(0, 3, h + hk + 1, d, dtype=dtype)  # queries and keys as views of one projection
        q, k = packed[:, :h], packed[:, h : h + hk]
        positions, table = torch.tensor([0, 5, 2]), rand(1, 8, d)
        ours = rope.rope(q, k, positions, table, inverse)
        for o, r in zip(ours, rope_reference.rope(q, k, positions, table, inverse), strict=True):
            close(o, r, "rope")

    @pytest.mark.parametrize("d", (24, 32))
    def test_positions_outside_the_table_do_not_leave_it(d: int) -> None:
        """A GPU cannot raise, so such a token uses the first or the last row."""
        whole_table = torch.full((8192 + 8 * d,), torch.nan)
        table = whole_table[4096 : 4096 + 8 * d].view(8, d).copy_(rand(1, 8, d))
        q, k, w = rand(0, 6, 4, d), rand(2, 6, 2, d), rand(3, d)
        outside = torch.tensor([-1, 8, 3, 9, -(2**40), 2**40])
        inside = torch.tensor([0, 7, 3, 7, 0, 7])
        plain = lambda positions: rope.rope(q, k, positions, table, False)
        normed = lambda positions: qk_norm_rope.qk_norm_rope(q, k, w, w, 0.1, positions, table)
        for op in (plain, normed):
            for a, b in zip(op(outside), op(inside), strict=True):
                assert_bitwise(a, b, "outside and inside")

    def test_far_heads_and_rows_are_copied() -> None:
        """Offsets inside a token and inside a tile of rows have 32 bits."""
        near, far = (torch.empty_strided((2, 4, 8), s, device="meta") for s in ((8, 1 << 28, 1), (8, 1 << 29, 1)))
        assert rope.unit_stride_heads(near) is near and rope.unit_stride_heads(far).is_contiguous()
        near, far = (torch.empty_strided((2, 4, 8), (s, 8, 1), device="meta") for s in (1 << 23, 1 << 24))
        assert common.contiguous_heads(near) is near and common.contiguous_heads(far).is_contiguous()

    @by_dtype
    @pytest.mark.parametrize("d", (24, 32))
    def test_qk_norm_rope(d: int, dtype: torch.dtype) -> None:
        packed = rand(0, 3, 9, d, dtype=dtype)
        q, k, wq, wk = packed[:, :6], packed[:, 6:8], rand(2, d, dtype=dtype), rand(3, d, dtype=dtype)
        positions, table = torch.tensor([0, 5, 2]), rand(1, 8, d)
        ours = qk_norm_rope.qk_norm_rope(q, k, wq, wk, 1e-6, positions, table)
        normed = (rms_norm.rms_norm(x.reshape(-1, d), w, 1e-6).view(x.shape) for x, w in ((q, wq), (k, wk)))
        for o, r in zip(ours, rope.rope(*normed, positions, table, False), strict=True):
            assert_bitwise(o, r, "fused and separate")

    @by_dtype
    @pytest.mark.parametrize("halves", (False, True), ids=("separate", "halves"))
    def test_qk_norm_rope_store(halves: bool, dtype: torch.dtype) -> None:
        packed = rand(0, 5, 12, 32, dtype=dtype)
        (q, k, v), wq, wk = packed.split((6, 3, 3), 1), rand(2, 32, dtype=dtype), rand(3, 32, dtype=dtype)
        given = (wq, wk, 1e-6, torch.tensor([0, 5, 2, 2, 7]), rand(1, 8, 32))
        slots = torch.tensor([9, -1, 0, 15, 16])  # one padded, one past the cache
        cache = rand(4, 4, 4, 3, 64, dtype=dtype)
        keys, values = cache.split(32, 3) if halves else (x.contiguous() for x in cache.split(32, 3))
        wanted = keys.clone(), values.clone()
        q_wanted, k_wanted = qk_norm_rope.qk_norm_rope(q, k, *given)
        for x, new in zip(wanted, (k_wanted, v), strict=True):
            x.view(16, 3, 32)[slots[[0, 2, 3]]] = new[[0, 2, 3]]
        ours = qk_norm_rope.qk_norm_rope_store(q, k, v, *given, keys, values, slots)
        for o, r in zip((ours, keys, values), (q_wanted, *wanted), strict=True):
            assert_bitwise(o, r, "stored and separate")

    @by_dtype
    def test_swiglu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        gate_up, dy = rand(0, 4, 2200, dtype=dtype) * 4, rand(1, 4, 1100, dtype=dtype)
        gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.0])
        close(swiglu.swiglu(gate_up), swiglu_reference.swiglu(gate_up), "swiglu")
        close(swiglu.swiglu_grad(dy, gate_up), swiglu_reference.swiglu_grad(dy, gate_up), "swiglu_grad")
        kept = swiglu.swiglu(gate_up)
        monkeypatch.setattr(swiglu, "L2_RESIDENT_BYTES", 0)
        assert_bitwise(swiglu.swiglu(gate_up), kept, "an output that does not stay in the cache")

    # ---- group_advantages, gae, scalar arithmetic -----------------------------------------------

    @pytest.mark.parametrize("mode", ("group", "leave_one_out", "batch", "none"))
    @pytest.mark.parametrize("groups,size", ((3, 8), (4, 1), (2, 40), (3, 300)))
    def test_group_advantages(groups: int, size: int, mode: str) -> None:
        rewards = rand(size, groups * size)
        for x in (rewards, torch.where(rewards > 0, 0.0, -0.0), torch.full_like(rewards, 0.7)):
            for normalize in (True, False):
                args = x, size, mode, normalize, 1e-4
                reference = group_advantages_reference.group_advantages(*args)
                assert_bitwise(group_advantages.group_advantages(*args), reference, f"{mode} {groups}x{size}")

    def test_gae() -> None:
        """The interpreter's fma rounds twice; with halves and small integers no order rounds at all."""
        rewards, values = rand(0, 90), rand(1, 90)
        cu = torch.tensor([0, 1, 1, 17, 50, 90], dtype=torch.int32)
        for ours, expected in zip(*(m.gae(rewards, values, cu, 0.9, 0.8) for m in (gae, gae_reference)), strict=True):
            close(ours, expected, "gae")
        exact = whole(2, 90, dtype=torch.float32), whole(3, 90, dtype=torch.float32), cu, 1.0, 1.0
        for ours, expected in zip(gae.gae(*exact), gae_reference.gae(*exact), strict=True):
            assert_bitwise(ours, expected, "gae of integers")
        outside = torch.tensor([-3, 40, 95], dtype=torch.int32)  # no access outside the vectors
        assert gae.gae(rewards, values, outside, 0.9, 0.8)[0].isfinite().all()
        uncovered = torch.tensor([0, 40, 80], dtype=torch.int32)
        assert gae.gae(rewards, values, uncovered, 0.9, 0.8)[1].isnan().nonzero().flatten().tolist() == [*range(80, 90)]

    @triton.jit
    def scalar_kernel(x, two, log, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(two + i, common.exp2(tl.load(x + i)))
        tl.store(log + i, common.log2(tl.abs(tl.load(x + i))))

    def test_scalar_arithmetic() -> None:
        x = torch.cat((rand(0, 59) * 20, torch.tensor([0.0, torch.inf, torch.nan, 1.0, 2.0])))
        two, log = torch.empty(64), torch.empty(64)
        scalar_kernel[(1,)](x, two, log, SIZE=64)
        close(two, arith.exp2(x), "exp2")
        close(log, arith.log2(x.abs()), "log2")

    # ---- all_reduce -----------------------------------------------------------------------------

    def tree(parts: Tensor) -> Tensor:
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        return parts[0]

    @pytest.mark.parametrize("ranks", (1, 2, 4, 8))
    def test_add_ranks(ranks: int) -> None:
        parts, bias = rand(0, ranks, 1500), rand(1, 70)
        found = all_reduce.add_ranks(parts, bias, torch.float32, 70, 210)
        assert_bitwise(found, tree(parts) + bias[(210 + torch.arange(1500)) % 70], f"{ranks} ranks")
        assert_bitwise(all_reduce.add_ranks(parts, None, torch.float32, 70, 0), tree(parts), f"{ranks} ranks, no bias")

    @pytest.mark.parametrize("ranks", (2, 4, 8))
    def test_all_reduce_in_symmetric_memory(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last rank's kernels in four calls; of the other ranks the test writes data, results and flags.

        Calls differ in size and in the number of steps, one takes two pieces, and call numbers exceed 32 bits.
        """
        programs, piece, width, rank = 4, 1 << 16, 70, ranks - 1
        for name, value in (("PROGRAMS", programs), ("CAPACITY", piece), ("ONE_SHOT_BYTES", 1 << 14), ("BLOCK", 256)):
            monkeypatch.setattr(all_reduce, name, value)
        buffers = torch.zeros(ranks, BYTES // 4 + 4)[:, :-4]  # with gaps in between
        words = buffers[:, : CONTROL_BYTES // 4].view(torch.int64)
        counters, flags = words[:, :programs], words[:, programs : programs * (1 + 2 * ranks)]
        flags = flags.view(ranks, 2, programs, ranks)
        halves = buffers[:, CONTROL_BYTES // 4 :][:, :piece].view(ranks, 2, 2, piece // 4)
        call = (1 << 31) - 2
        counters.fill_(call)
        flags.fill_(call)
        rows = list(buffers)  # the memory checker forgets addresses of tensors that are gone
        workspace = Workspace(buffers[rank], torch.tensor([row.data_ptr() for row in rows]), rank)
        for size in (width * 5, width * 300, width * 7, width * 200):
            parts, bias = rand(size, ranks, size), rand(1, width)
            expected = tree(parts) + bias[torch.arange(size) % width]
            pieces, sent = [range(i, min(i + piece // 4, size)) for i in range(0, size, piece // 4)], []
            arrived, signalled = flags[rank].clone(), flags.clone()
            for number, at in enumerate(pieces, call + 1):
                two_shots = (ranks - 1) * 4 * len(at) > all_reduce.ONE_SHOT_BYTES
                part = 16 * -(-len(at) // (16 * ranks)) if two_shots else len(at)
                running = min(programs, -(-part // ((1 + two_shots) * all_reduce.BLOCK)))
                data, results = halves[:, number % 2].unbind(1)
                tail = part * ranks - len(at) if two_shots else 0
                padded = torch.nn.functional.pad(parts[:, at.start : at.stop], (0, tail))
                to = padded.view(ranks, -1, part).expand(ranks, ranks, part)  # [from, to, part]
                data[rank, : part * ranks] = to[:, rank].flatten()
                data[rank, rank * part :][:part] = float("nan")  # the kernel writes its own
                if two_shots:
                    results[rank, : len(at)] = expected[at.start : at.stop]
                    results[rank, rank * part : len(at)] = float("nan")
                arrived[: 1 + two_shots, :running, :rank] = number
                signalled[:, : 1 + two_shots, :running, rank] = number
                sent.append((data, results, to, part, two_shots, at))
            late = threading.Timer(0.2, flags[rank, ..., :rank].copy_, (arrived[..., :rank],))
            late.start()
            found = all_reduce.all_reduce(parts[rank], bias, torch.float32, width, workspace)
            assert not late.is_alive(), "the kernel has not waited"
            assert_bitwise(found, expected, f"{ranks} ranks, {size} elements")
            call += len(pieces)
            signalled[rank, ..., :rank] = arrived[..., :rank]
            assert_bitwise(flags, signalled, "flags")
            assert_bitwise(counters[rank], torch.full_like(counters[rank], call), "counters")
            for data, results, to, part, two_shots, at in sent:
                for other in range(rank):
                    wanted = to[rank, other][: len(at) - other * part if two_shots else part]
                    assert_bitwise(data[other, rank * part :][: len(wanted)], wanted, f"data sent to {other}")
                    if two_shots:
                        there, own = results[other, rank * part : len(at)], expected[at.start + rank * part : at.stop]
                        assert_bitwise(there, own, f"sums sent to {other}")
