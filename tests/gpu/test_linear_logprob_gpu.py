"""linear_logprob on a GPU: accurate against fp64 computed on the GPU, the same bits in any batch, tile, block and
schedule; the backward has the anchor's bits with and without the `dense` hint.

Control: test_logprob_gpu.py shows that log-probabilities of the stock head depend on the batch.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu.gpu_checks import DEVICE, Compared, Record, data
from gpu.logprob_checks import by_filter, finite, logprob_truth, scored, settings
from ops.op_checks import assert_right, by_dtype, forward_backward
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import VOCAB_TILE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@by_dtype
@by_filter
def test_linear_logprob_is_logprob_of_linear(filtered: bool, dtype: torch.dtype, record: Record) -> None:
    v, c = 9 * VOCAB_TILE + 44, 256
    seen = Compared()
    for tokens in (1, 2, 16, 33, 64, 600):
        x, w = data(0, tokens, c, dtype=dtype), data(1, v, c, dtype=dtype) / 4
        targets, temperature, kept = scored(tokens, v)
        options = settings(filtered, temperature, kept)
        fused = lambda x, w, y=targets, o=options: ops.linear_logprob(x, w, y, **o)[:2]
        plain = lambda x, w, y=targets, o=options: ops.logprob(ops.linear(x, w, out_dtype=torch.float32), y, **o)[:2]
        upstream = (data(2, tokens), data(3, tokens))
        for zeros in (
            False,
            True,
        ):  # tokens without a gradient: a run at an odd place, and every third of the last quarter
            if zeros:
                for up in upstream:
                    up[tokens // 5 : tokens // 2], up[3 * tokens // 4 :: 3] = 0.0, 0.0
            ours, expected = (forward_backward(op, (x, w), upstream) for op in (fused, plain))
            what = f"{tokens} tokens, zeros {zeros}"
            seen.rows(ours[:3], expected[:3], f"{what}: logp, entropy, dhidden")
            seen.whole(ours[3:], expected[3:], f"{what}: dweight")
    record(**vars(seen))


@by_dtype
@by_filter
def test_linear_logprob_accuracy(filtered: bool, dtype: torch.dtype) -> None:
    v, c = 5 * VOCAB_TILE + 44, 64
    x, w, g, h = data(0, 90, c, dtype=dtype), data(1, v, c, dtype=dtype) / 8, data(2, 90), data(3, 90)
    targets, temperature, kept = scored(90, v)
    if filtered:
        g[1] = h[1] = 0.0
    options = settings(filtered, temperature, kept)
    assert_right(
        lambda x, w: finite(ops.linear_logprob(x, w, targets, **options)),
        lambda x, w: logprob_truth(x @ w.t(), targets, options.get("temperature"), options.get("kept")),
        (x, w),
        (g, h),
        "linear_logprob",
    )


@by_dtype
def test_linear_logprob_in_every_tile_and_block(
    dtype: torch.dtype, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkernel.kernels.triton import linear_logprob, linear_logprob_backward
    from rlkernel.kernels.triton.matrix import Tile

    v, c, tokens = 9 * VOCAB_TILE + 44, 256, 600
    x, w = data(0, tokens, c, dtype=dtype), data(1, v, c, dtype=dtype) / 4
    targets, temperature, kept = scored(tokens, v)
    rest = (x, w, targets, 1.0 / temperature, kept)
    expected, seen = linear_logprob.forward(*rest), Compared()
    tiles = [(16, 128, 32, 4, 2), (32, 128, 16, 8, 2), (64, 128, 16, 8, 2)]
    if dtype != torch.float32:
        tiles += [(64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 256, 32, 8, 2), (128, 256, 32, 8, 2)]
    for tile, tma in itertools.product(tiles, (False, True)):
        seen.rows(linear_logprob.forward(*rest, tile=Tile(*tile, tma=tma)), expected, f"{tile}, tma {tma}")
    _, entropy, _, stats = expected
    gradients = []
    monkeypatch.setattr(linear_logprob_backward, "LOGPROB_DGRAD_CHUNK", 256)
    for entries in (1 << 24, 2 * 256 * tokens, 1):
        monkeypatch.setattr(linear_logprob_backward, "DZ_ENTRIES", entries)
        upstream = (data(2, tokens), data(3, tokens), None, None, None)
        grad = torch.ones(v, c, device=DEVICE)
        dx, _ = linear_logprob.linear_logprob_grad_(grad, *rest, stats, entropy, *upstream, False, True, True)
        gradients.append((dx, grad))
    for dx, grad in gradients[1:]:
        seen.rows(dx, gradients[0][0], "input gradient in other blocks")
        seen.whole(grad, gradients[0][1], "weight gradient in other blocks")
    record(**vars(seen))


@pytest.mark.parametrize("temperature,filtered,entropy_gradient", ((False, False, False), (True, True, True)))
def test_linear_logprob_schedules_equal_the_anchor(
    temperature: bool, filtered: bool, entropy_gradient: bool, record: Record
) -> None:
    """With a run of tokens that have no gradient, as prompts have."""
    from rlkernel.kernels import select

    tokens, v, c = 1500, 9001 * 8, 520
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets, warm, kept = scored(tokens, v)
    inverse, mask = 1.0 / warm if temperature else None, kept if filtered else None
    g, seen = data(2, tokens), Compared()
    g[100:900] = 0.0
    h = 0.1 * g if entropy_gradient else None
    raw = torch.ops.rlkernel

    def run(keep: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Results with one row per token, and the gradients of the weight."""
        op = raw.linear_logprob_probs if keep else raw.linear_logprob
        rows = op(x, w, targets, inverse, mask, False)
        kept_outputs = (*rows[4:], None, None)[:2]
        rest = (x, w, targets, inverse, mask, rows[3], rows[1], g, None if keep else h, *kept_outputs, None)
        main = torch.ones(v, c, device=DEVICE)
        dx, _ = raw.linear_logprob_grad_(main, *rest, False, True, True)
        new_dx, dw = raw.linear_logprob_grad_(None, *rest, False, True, True)
        return [*rows, dx, new_dx], [main, dw]

    for keep in (False, True):
        ours = run(keep)
        with select.use("triton"):
            anchor = run(keep)
        seen.rows(ours[0], anchor[0], f"keep {keep}")
        seen.whole(ours[1], anchor[1], f"keep {keep}, gradients of the weight")
    record(**vars(seen))


@pytest.mark.parametrize("filtered", (False, True))
def test_linear_logprob_with_kept_logits(filtered: bool, record: Record) -> None:
    """No bit depends on kept logits, or on cuBLASLt's products, which `dense` allows."""
    from rlkernel.kernels import select

    tokens, v, c = 2100, 3 * 8192 + 1000, 520
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets, warm, kept = scored(tokens, v)
    inverse, mask = (1.0 / warm, kept) if filtered else (None, None)
    g, seen = data(2, tokens), Compared()
    g[100:900] = 0.0
    g[1000:1700:2] = 0.0  # single tokens
    h = 0.1 * g if filtered else None
    raw = torch.ops.rlkernel

    def run(width: int, dense: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Results with one row per token, and the gradients of the weight."""
        if width:
            *rows, logits = raw.linear_logprob_logits(x, w, targets, inverse, mask, width, dense)
        else:
            rows, logits = raw.linear_logprob(x, w, targets, inverse, mask, dense), None
        rest = (x, w, targets, inverse, mask, rows[3], rows[1], g, h, None, None, logits)
        main = torch.ones(v, c, device=DEVICE)
        dx, _ = raw.linear_logprob_grad_(main, *rest, dense, True, True)
        new_dx, dw = raw.linear_logprob_grad_(None, *rest, dense, True, True)
        return [*rows, dx, new_dx], [main, dw]

    def check(found: tuple[list[Tensor], list[Tensor]], what: str) -> None:
        seen.rows(found[0], expected[0], what)
        seen.whole(found[1], expected[1], f"{what}, gradients of the weight")

    widths = (0, 256, 384, 8192 + 512, 26112)  # 384 ends inside a tile of Hopper's kernel
    with select.use("triton"):
        expected = run(0)
        check(run(8192 + 512), "Triton, kept logits")
    for dense, width in itertools.product((False, True), widths):
        check(run(width, dense), f"dense {dense}, width {width}")
    record(**vars(seen))


@pytest.mark.parametrize("main", (False, True))
def test_linear_logprob_of_several_blocks_of_tokens(main: bool, record: Record) -> None:
    from rlkernel.kernels import select

    tokens, v, c = 8192 + 700, 2 * 8192 + 1000, 256
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets, g, seen = torch.arange(tokens, device=DEVICE) * 83 % v, data(2, tokens), Compared()
    g[::3], g[1::5], g[5000:6000] = 0.0, 0.0, 0.0
    _, entropy, _, stats = torch.ops.rlkernel.linear_logprob(x, w, targets, None, None, False)
    rest = (x, w, targets, None, None, stats, entropy, g, None, None, None, None)

    def run(dense: bool) -> list[Tensor]:
        grad = torch.ones(v, c, device=DEVICE) if main else None
        dx, dw = torch.ops.rlkernel.linear_logprob_grad_(grad, *rest, dense, True, True)
        return [dx, dw if grad is None else grad]

    with select.use("triton"):
        expected = run(False)
    for dense in (False, True):
        found = run(dense)
        seen.rows(found[:1], expected[:1], f"input gradient, dense {dense}")
        seen.whole(found[1:], expected[1:], f"weight gradient, dense {dense}")
    record(**vars(seen))


def test_linear_logprob_without_any_gradient(record: Record) -> None:
    """The backward adds +0 to main_grad, which turns a -0 there into +0."""
    from rlkernel.kernels import select

    tokens, v, c = 600, 8192, 512
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets = torch.arange(tokens, device=DEVICE)

    def run() -> list[Tensor]:
        leaf, weight = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
        weight.main_grad = torch.full((v, c), -0.0, device=DEVICE)  # type: ignore[attr-defined]
        (ops.linear_logprob(leaf, weight, targets).logp * torch.zeros(tokens, device=DEVICE)).sum().backward()
        assert leaf.grad is not None
        return [weight.main_grad, leaf.grad]  # type: ignore[attr-defined]

    seen = Compared()
    with select.use("triton"):
        expected = run()
    found = run()
    seen.whole(found[0], expected[0], "main_grad")
    seen.rows(found[1], expected[1], "input gradient")
    record(**vars(seen))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_linear_logprob_ignores_hidden_states_without_a_gradient(dtype: torch.dtype, record: Record) -> None:
    """NaN and infinities in tokens without a gradient, in whole groups and between other tokens, change nothing."""
    from rlkernel.kernels import select

    tokens, v, c = 1100, 9000, 512
    clean, w, g = data(0, tokens, c, dtype=dtype), data(1, v, c, dtype=dtype) / 4, data(2, tokens)
    targets = torch.arange(tokens, device=DEVICE)
    g[100:333], g[700::7] = 0.0, 0.0
    bad = clean.clone()
    bad[g == 0] = torch.nan
    bad[200:300] = torch.inf

    def run(x: Tensor) -> list[Tensor]:
        leaf, weight = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
        torch.autograd.backward(ops.linear_logprob(leaf, weight, targets).logp, g)
        assert leaf.grad is not None and weight.grad is not None
        return [leaf.grad, weight.grad]

    seen = Compared()
    with select.use("triton"):
        expected = run(clean)
        anchor = run(bad)
    for how, found in (("the anchor", anchor), ("schedules", run(bad))):
        seen.rows(found[0], expected[0], f"{how}: input gradient")
        seen.whole(found[1], expected[1], f"{how}: weight gradient")
    record(**vars(seen))


@pytest.mark.parametrize("v", (70000, 70001))
def test_linear_logprob_of_wide_blocks_and_an_odd_vocabulary(v: int) -> None:
    """dweight splits blocks wider than those it was compared at; 70,001 is not a multiple of 8."""
    from rlkernel.kernels import select
    from rlkernel.kernels.cuda import linear_logprob_shapes as shapes

    tokens, c = 150, 2048
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets = torch.arange(tokens, device=DEVICE) * 467 % v
    _, entropy, _, stats = torch.ops.rlkernel.linear_logprob(x, w, targets, None, None, False)
    rest = (x, w, targets, None, None, stats, entropy, data(2, tokens), None, None, None, None)

    def run(dense: bool) -> list[Tensor]:
        main, grad_ = torch.ones(v, c, device=DEVICE), torch.ops.rlkernel.linear_logprob_grad_
        dx, _ = grad_(main, *rest, dense, True, True)
        return [dx, main, *grad_(None, *rest, dense, True, True)]

    with select.use("triton"):
        expected = run(False)
    for dense in (False, True):
        row = -(-v // VOCAB_TILE) * VOCAB_TILE * dense
        s = shapes.GradShape(0, c, torch.bfloat16, torch.float32, True, False, row, aligned=v % 8 == 0)
        assert max(n for _, n in shapes.compared(s)) < v
        for i, (o, e) in enumerate(zip(run(dense), expected, strict=True)):
            assert_bitwise(o, e, f"dense {dense}, tensor {i}")


@pytest.mark.parametrize(("tokens", "c"), ((410, 1024), (700, 1024), (1300, 1024), (410, 4096), (90, 8192)))
def test_linear_logprob_of_few_tokens(tokens: int, c: int, record: Record) -> None:
    """Chunks of the vocabulary run in parallel; clusters of tokens have no gradient."""
    from rlkernel.kernels import select
    from rlkernel.kernels.triton.linear_logprob_backward import parallel_chunks

    v = 7 * 8192 + 1000
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets, g, seen = torch.arange(tokens, device=DEVICE) * 83 % v, data(2, tokens), Compared()
    g[tokens // 4 :][:256] = 0.0
    g[::3] = 0.0
    _, entropy, _, stats = torch.ops.rlkernel.linear_logprob(x, w, targets, None, None, False)
    rest = (x, w, targets, None, None, stats, entropy, g, None, None, None, None)
    with select.use("triton"):
        expected, _ = torch.ops.rlkernel.linear_logprob_grad_(None, *rest, False, True, False)
    assert parallel_chunks(tokens, c) > 1
    for dense in (False, True):
        dx, _ = torch.ops.rlkernel.linear_logprob_grad_(None, *rest, dense, True, False)
        seen.rows([dx], [expected], f"dense {dense}")
    record(**vars(seen))


@pytest.mark.parametrize("tokens", (1, 8193))
def test_linear_logprob_with_a_block_of_one_row(tokens: int, record: Record) -> None:
    """The last block of the backward has one row, and the last chunk of the vocabulary an odd width."""
    from rlkernel.kernels import select

    v, c = 50257, 256
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    targets = torch.arange(tokens, device=DEVICE) * 7 % v

    def run() -> list[Tensor]:
        hidden, weight = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
        logp = ops.linear_logprob(hidden, weight, targets).logp
        logp.sum().backward()
        return [logp.detach(), hidden.grad, weight.grad]

    ours, seen = run(), Compared()
    with select.use("triton"):
        anchor = run()
    seen.rows(ours[:2], anchor[:2], "logp and its gradient")
    seen.whole(ours[2:], anchor[2:], "gradient of the weight")
    record(**vars(seen))


def test_linear_logprob_in_a_new_thread_and_with_repeated_rows() -> None:
    """A new thread has no CUDA context yet; rows that share memory run the anchor."""
    import threading

    x, w = data(0, 300, 256, dtype=torch.bfloat16), data(1, 1000, 256, dtype=torch.bfloat16)
    targets = torch.randint(0, 1000, (300,), device=DEVICE)
    expected = ops.linear_logprob(x, w, targets).logp
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(ops.linear_logprob(x, w, targets).logp))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_bitwise(found[0], expected, "another thread")
    rows = x[:1].expand(300, -1)
    whole = ops.linear_logprob(rows.contiguous(), w, targets).logp
    assert_bitwise(ops.linear_logprob(rows, w, targets).logp, whole, "one row, repeated by its stride")


def test_linear_logprob_memory_is_bounded() -> None:
    tokens, v, c = 8192, 65536, 1024  # logits are kept from 768 channels on
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16)
    leaf, weight = x.requires_grad_(), w.requires_grad_()
    weight.main_grad = torch.zeros(v, c, device=DEVICE)
    targets = torch.randint(0, v, (tokens,), device=DEVICE)

    def run(kept: int) -> None:
        out = ops.linear_logprob(leaf, weight, targets, keep_bytes=kept)
        (out.logp.sum() + out.entropy.sum()).backward()

    for kept in (0, 512 << 20):
        run(kept)  # certifies
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(kept)
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        limit = kept + (400 << 20)
        assert used < limit, f"{used >> 20} MiB for logits of {(tokens * v * 4) >> 20} MiB, {kept >> 20} MiB kept"


def test_rows_equals_selecting_hidden_states(record: Record) -> None:
    """`rows` gives the bits of a call with only these hidden states; its backward may use cuBLASLt."""
    tokens, v, c = 3000, 9001, 520
    x, w = data(0, tokens, c, dtype=torch.bfloat16), data(1, v, c, dtype=torch.bfloat16) / 4
    rows = torch.arange(tokens, device=DEVICE)[torch.arange(tokens, device=DEVICE) % 3 != 0]
    targets, g, seen = rows * 7 % v, data(2, len(rows)), Compared()

    def run(hidden: Tensor, **given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        leaf, weight = hidden.clone().requires_grad_(True), w.clone().requires_grad_(True)
        out = ops.linear_logprob(leaf, weight, targets, **given)
        torch.autograd.backward(out.logp, g)
        assert leaf.grad is not None and weight.grad is not None
        assert given == {} or not leaf.grad[::3].any()
        return [*(t.detach() for t in out), leaf.grad if given == {} else leaf.grad[rows]], [weight.grad]

    ours, expected = run(x, rows=rows), run(x[rows])
    seen.rows(ours[0], expected[0], "results and input gradient")
    seen.whole(ours[1], expected[1], "weight gradient")
    record(**vars(seen))
