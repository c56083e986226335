"""Offsets beyond 2^31 elements in Triton's interpreter: the last rows of tensors of several GiB have the right bits.

The tensors are untouched memory, which costs only addresses; only the first and last programs of a long grid axis run.
An offset that wraps at 32 bits leaves its tensor, which `memory_check` detects. Log-probabilities of given logits are
in `tests/gpu/test_logprob_gpu.py`.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_interpreter import run

pytest.importorskip("triton")

from kernels.interpreter_checks import whole

from rlkernel.contract import assert_bitwise

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter() -> None:
        run(__file__, MALLOC_PERTURB_="0")  # otherwise every new byte is written

else:
    import memory_check
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    from rlkernel.kernels.adamw import AdamwInputs
    from rlkernel.kernels.triton import (
        adamw,
        attention,
        attention_backward,
        attention_pages,
        attention_shared,
        embedding,
        linear,
        linear_grad,
        linear_logprob_backward,
        linear_logprob_rows,
        qk_norm_rope,
        rms_norm,
        rope,
        sample,
        swiglu,
    )

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
    FAR = 1 << 31
    LONG, ENDS = 160, 2  # longest axis that runs completely, and programs at either end of a longer one
    LAST = 4  # rows with values

    def ends(*numbers: int) -> object:
        """Replaces the interpreter's `range`, which also iterates over the axes of a grid."""
        if len(numbers) == 1 and numbers[0] > LONG:
            return (*builtins.range(ENDS), *builtins.range(numbers[0] - ENDS, numbers[0]))
        return builtins.range(*numbers)

    @pytest.fixture(autouse=True)
    def few_programs_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        try:
            torch.empty(9 << 30, dtype=torch.uint8)
        except RuntimeError as error:
            pytest.skip(f"needs tensors of 9 GiB, nearly all of them addresses alone: {error}")
        monkeypatch.setattr(interpreter, "range", ends, raising=False)
        # CPU tensors are passed to the kernel without a copy
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        monkeypatch.setattr(memory_check.Launch, "note", lambda *_: None)  # needs memory per byte

    def half(*shape: int) -> Tensor:
        return torch.randn(shape).half()

    def rows(*last: Tensor) -> list[Tensor]:
        """Tensors that end with the given rows and have as many rows each that all exceed 2^31 elements."""
        count = FAR // min(t[0].numel() for t in last) + len(last[0])
        far = [torch.empty(count, *t.shape[1:], dtype=t.dtype) for t in last]
        for whole, end in zip(far, last, strict=True):
            whole[-len(end) :] = end
        return far

    def same(op: Callable[..., Tensor | tuple[Tensor, ...]], *last: Tensor, what: str) -> None:
        """`op` of tensors that end with these rows has the bits of `op` of only these rows."""
        found, expected = op(*rows(*last)), op(*last)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else ((found, expected),)
        for i, (ours, alone) in enumerate(pairs):
            assert_bitwise(ours[-ENDS:], alone[-ENDS:], f"{what}, result {i}")

    @triton.jit
    def wrapping_kernel(x, out, C: tl.constexpr):
        at = tl.program_id(0) * C + tl.arange(0, C)
        tl.store(out + at, tl.load(x + at))

    def test_control_a_32_bit_offset_is_detected() -> None:
        (x,) = rows(half(LAST, 1024))
        with pytest.raises(memory_check.MemoryFault, match=r"wrapping_kernel.* in front of it"):
            wrapping_kernel[(len(x),)](x, torch.empty_like(x), C=1024)

    def test_rms_norm() -> None:
        x, r, dy, weight = half(LAST, 1024), half(LAST, 1024), half(LAST, 1024), half(1024)
        same(lambda x: rms_norm.rms_norm(x, weight, 1e-6), x, what="forward")
        same(lambda x, r: rms_norm.add_rms_norm(x, r, weight, 1e-6), x, r, what="with residual")
        same(lambda dy, dr, x: rms_norm.rms_norm_dgrad(dy, dr, x, weight, 1e-6), dy, r, x, what="input gradient")
        same(lambda dy, x: rms_norm.rms_norm_grad(dy, None, x, weight, 1e-6)[0], dy, x, what="both gradients")

    def test_swiglu() -> None:
        same(swiglu.swiglu, half(LAST, 2 * 512), what="forward")
        same(swiglu.swiglu_grad, half(LAST, 512), half(LAST, 2 * 512), what="gradient")

    def test_rope() -> None:
        """Far tokens, and far positions of the table."""
        (table,), norms = rows(torch.randn(LAST, 64)), (half(64), half(64))
        at = lambda q: torch.cat((torch.zeros(len(q) - LAST, dtype=torch.int64), len(table) - 1 - torch.arange(LAST)))
        q, k = half(LAST, 16, 64), half(LAST, 16, 64)
        same(lambda q, k: rope.rope(q, k, at(q), table, False), q, k, what="rope")
        same(lambda q, k: qk_norm_rope.qk_norm_rope(q, k, *norms, 1e-6, at(q), table), q, k, what="qk_norm_rope")

    def test_embedding() -> None:
        """Far rows of the weight, and of the result."""
        same(lambda w: embedding.embedding(torch.arange(len(w)), w), half(LAST, 1024), what="rows")

    def test_embedding_gradient() -> None:
        """Far rows of the gradient, of ids that come once and twice, from far tokens."""
        tokens, c = 256, FAR // 250 // 512 * 512
        ids = torch.arange(tokens)
        ids[-3:] = torch.tensor([298, 299, 299])
        dy, grad = torch.empty(tokens, c, dtype=torch.float16), torch.empty(300, c)
        dy[:, -8:], grad[298:, -8:] = whole(1, tokens, 8, dtype=torch.float16), 0.0
        embedding.embedding_wgrad_(grad, dy, ids)
        assert_bitwise(grad[298, -8:], dy[-3, -8:].float(), "once")
        assert_bitwise(grad[299, -8:], dy[-2:, -8:].float().sum(0), "twice")

    def test_linear() -> None:
        """Far rows of operands and results; integers, because tiles depend on the number of rows."""
        w, x = whole(2, 64, 64, dtype=torch.float16), whole(3, LAST, 64, dtype=torch.float16)
        same(lambda x: linear.linear(x, w, w[0], 1, 1, None), x, what="forward")
        same(lambda x: linear.linear(x, w.float(), None, 1, 1, None), x.float(), what="without TMA")
        same(lambda x: linear.linear(x, w, None, 4, 1, None), x, what="chunks")
        same(lambda dy: linear.linear_dgrad(dy, w, 1), x, what="input gradient")
        same(lambda a: linear_grad.ascending(a, w, torch.empty(len(a), 64), 16), x, what="ascending")

    def test_weight_gradient() -> None:
        """Far rows of the gradient, and a far chunk of tokens with few tokens."""
        dy, x = torch.zeros(16, FAR // 2048 + 64, dtype=torch.float16), whole(4, 16, 2048, dtype=torch.float16)
        dy[:, -4:] = whole(5, 16, 4, dtype=torch.float16)
        grad = torch.empty(dy.shape[1], 2048)
        grad[-4:, -16:] = 1.0
        linear_grad.wgrad_(grad, dy, x, False)
        assert_bitwise(grad[-4:, -16:], (dy[:, -4:].float().T @ x.float())[:, -16:] + 1, "weight gradient")

    def test_sums_of_chunks() -> None:
        """Partial sums far from the first, of a product, of chunks and of a bias' gradient."""
        parts = torch.empty(4, FAR // 2048 + LAST, 1024)
        parts[:, -1, -8:] = torch.arange(4.0)[:, None]
        for add in (
            lambda out: linear.fold_partials(parts, None, out),
            lambda out: linear_grad.ascend(parts, None, out),
        ):
            add(out := torch.empty(parts.shape[1:]))
            assert_bitwise(out[-1, -8:], torch.full((8,), 6.0), "partial sums")
        tokens, n = linear_grad.SUM_TOKENS * 200, FAR // (linear_grad.SUM_TOKENS * 200) + 130
        dy, sums = torch.empty(tokens, n, dtype=torch.float16), torch.empty(200, n)
        dy[-linear_grad.SUM_TOKENS :, -4:] = 1.0
        linear_grad.bias_grad_kernel[(triton.cdiv(n, 128), 200)](
            dy, sums, tokens, n, n, 1, TOKENS=linear_grad.SUM_TOKENS, BLOCK=128
        )
        assert_bitwise(sums[-1, -4:], torch.full((4,), float(linear_grad.SUM_TOKENS)), "bias")

    @pytest.mark.parametrize("kept", ("logits", "probs"))
    def test_what_linear_logprob_keeps(kept: str) -> None:
        """Far rows of [T, V]: logits or probabilities."""
        tokens, vocab, width = 8192, 1 << 19, 2048  # per program
        held = torch.empty(tokens, vocab, dtype=torch.float32 if kept == "logits" else torch.float16)
        held[-LAST:, :width] = torch.rand(LAST, width)

        def dz(held: Tensor) -> Tensor:
            n = len(held)
            out, order, ones = torch.empty(held.shape, dtype=torch.float16), torch.arange(n).int(), torch.ones(n)
            targets, stats = torch.zeros(n, dtype=torch.int64), torch.ones(n, 2)
            if kept == "logits":
                given = (held, targets, None, None, stats, ones, ones, ones, order, 0)
                linear_logprob_backward.logits_block(out, *given)
            else:
                tops = torch.ones(n, vocab // 128)
                linear_logprob_backward.probs_block(out, held, tops, targets, None, None, stats, ones, order, 0)
            return out[-1, :width]

        assert_bitwise(dz(held), dz(held[-LAST:].clone()), kept)

    def test_rows_of_linear_logprob() -> None:
        """Gathered hidden states and the scatter of their gradients."""
        hidden, back = half(LAST, 1024), torch.randn(LAST, 1024)
        order = lambda x: (torch.arange(len(x)) % linear_logprob_backward.WGRAD_TOKENS).int()
        out = lambda x: torch.empty(x.shape, dtype=torch.float16)
        far, totals = rows(hidden, back)
        found = linear_logprob_rows.gather(far, order(far), out(far), linear_logprob_backward.WGRAD_TOKENS)
        assert_bitwise(found[-ENDS:], hidden[-ENDS:], "gather")
        block = linear_logprob_backward.WGRAD_TOKENS
        linear_logprob_rows.scatter(totals, order(totals), to := out(totals), block)
        assert_bitwise(to[-ENDS:], back[-ENDS:].half(), "scatter")

    @pytest.mark.parametrize("filtered", (False, True))
    def test_sample(filtered: bool) -> None:
        def tokens(logits: Tensor) -> tuple[Tensor, ...]:
            ids, ones = torch.arange(len(logits)) - len(logits), torch.ones(len(logits))
            filters = (ones.int() * 50, ones * 0.9, ones * 0.01) if filtered else (None, None, None)
            return sample.sample(logits, ids, ids, ones, *filters, sample.FULL)[::2]

        same(tokens, torch.randn(LAST, 1024), what="tokens, logp")

    @pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=("TMA", "without"))
    def test_attention(dtype: torch.dtype) -> None:
        """The last sequences of a large batch, forward and backward, and slots of a cache."""
        lens, h, d = (20, 12), 16, 64
        last = [torch.randn(sum(lens), h, d).to(dtype) for _ in range(4)]

        def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            first = len(q) - sum(lens)
            at = torch.tensor([first, first + lens[0], len(q)], dtype=torch.int32)
            out, lse = attention.attention(q, k, v, at, at, max(lens), max(lens), d**-0.5, None, 2048)
            given = (dout, q, k, v, out, lse, at, at, max(lens), max(lens), d**-0.5, None)
            return (out, lse, *attention_backward.attention_backward(*given))

        same(gradients, *last, what="attention")

        def stored(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            caches = [torch.empty(-(-len(k) // 16), 16, h, d, dtype=k.dtype) for _ in range(2)]
            attention_pages.store_kv_(*caches, k, v, torch.arange(len(k)))
            return tuple(c.view(-1, h, d)[: len(k)] for c in caches)

        same(stored, *last[2:], what="cache")

    @pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=("TMA", "without"))
    def test_attention_of_a_long_sequence(dtype: torch.dtype) -> None:
        """The end of a long sequence, of which a window sees the last keys, as in a short sequence."""
        h, d, length, window = 16, 64, 192, 40
        last = [torch.randn(length, h, d).to(dtype) for _ in range(4)]

        def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            at, most = torch.tensor([0, len(q)], dtype=torch.int32), len(q)
            out, lse = attention.attention(q, k, v, at, at, most, most, d**-0.5, window, 2048)
            given = (dout, q, k, v, out, lse, at, at, most, most, d**-0.5, window)
            return (out, lse, *attention_backward.attention_backward(*given))

        far = rows(*last)
        assert (len(far[0]) - length) % 2048 == 0
        for i, (ours, alone) in enumerate(zip(gradients(*far), gradients(*last), strict=True)):
            assert_bitwise(ours[-ENDS:], alone[-ENDS:], f"result {i}")

    @pytest.mark.parametrize("far", ("pages", "tables"))
    def test_paged_attention(far: str) -> None:
        """Far pages of a cache, and far rows of block tables."""
        h, d, page, keys = 2, 64, 16, 60
        last, q = [half(4, page, h, d) for _ in range(2)], half(1, h, d)
        batch, pages = (1, FAR // (page * h * d) + 40) if far == "pages" else (300, 4)
        caches = [torch.empty(pages, page, h, d, dtype=torch.float16) for _ in range(2)]
        table = torch.empty(batch, 8 if batch == 1 else FAR // (batch - 1) + 5, dtype=torch.int32)
        for to, given in zip(caches, last, strict=True):
            to[-4:] = given
        table[[0, -1], :4] = torch.arange(pages - 4, pages).int()
        queries, lens = torch.empty(batch, h, d, dtype=torch.float16), torch.full((batch,), keys, dtype=torch.int32)
        queries[-1:] = q
        call = lambda q, caches, table, lens: attention.paged_attention(
            q, *caches, table, torch.arange(len(q) + 1).int(), lens, 1, keys, 0.1, None, 2048
        )
        found, alone = call(queries, caches, table, lens), call(q, last, torch.arange(4).int()[None], lens[:1])
        for ours, expected in zip(found, alone, strict=True):
            assert_bitwise(ours[-1:], expected, far)
        groups, lengths = torch.tensor([0, 1]).int(), torch.zeros(batch).int()
        shared = attention_shared.shared_paged_attention(
            queries, *caches, table, torch.arange(batch + 1).int(), lens, groups, lengths, 1, 64, keys, 0.1, 2048
        )
        for ours, expected in zip(shared, alone, strict=True):
            assert_bitwise(ours[-1:], expected, f"{far}, shared")
        if far == "pages":
            k, _ = attention_pages.gather_pages(*caches, table, lens, 64, d)
            assert_bitwise(k[:keys], last[0].view(-1, h, d)[:keys], "gathered")

    def test_pages_in_rows_far_apart() -> None:
        h, d, page, batch, capacity = 2, 64, 16, 200, 1 << 17
        k, table = half(4, page, h, d), torch.zeros(batch, capacity // page, dtype=torch.int32)
        lens = torch.full((batch,), page, dtype=torch.int32)
        gathered, _ = attention_pages.gather_pages(k, k, table, lens, capacity, d)
        assert_bitwise(gathered[-capacity:][:page], k[0], "the last sequence")

    def test_adamw() -> None:
        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            w, g, m, v = tensors
            adamw.adamw_(AdamwInputs([w], [g], [m], [v], [], None, 1e-3, 0.9, 0.99, 1e-8, 0.1, 3, True))
            return tensors

        same(step, *(torch.rand(4096, 1) for _ in range(4)), what="adamw")
