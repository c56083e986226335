"""linear_logprob: the bits of logprob(linear(...)) both ways, invariance, masked tokens, memory."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    DTYPES,
    assert_compiles,
    assert_reference_equal,
    assert_right,
    by_dtype,
    differs,
    forward_backward,
    rand,
    with_threads,
)
from test_logprob import exact, ids, some_kept, temperatures
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels import select

properties = settings(max_examples=20, deadline=None, derandomize=True)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


def head(v: int, c: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return (rand(seed, v, c) * (3 * c**-0.5)).to(dtype)


def two_steps(hidden: Tensor, weight: Tensor, y: Tensor, **options: Any) -> ops.LogProb:
    return ops.logprob(ops.linear(hidden, weight, out_dtype=torch.float32), y, **options)


# ---- right


@by_dtype
@pytest.mark.parametrize("case", ("plain", "temperature", "kept", "both"))
@pytest.mark.parametrize("use", ("logp", "entropy", "logp and entropy"))
def test_accuracy(dtype: torch.dtype, case: str, use: str) -> None:
    t, v, c = 19, 300, 48
    hidden, weight, y = rand(0, t, c, dtype=dtype), head(v, c, dtype=dtype), ids(t, v)
    options: dict[str, Any] = {}
    if case in ("temperature", "both"):
        options["temperature"] = temperatures(t)
    if case in ("kept", "both"):
        options["kept"] = some_kept(t, v, y)

    def pick(out: Any) -> tuple[Tensor, ...]:
        return out[:2] if use == "logp and entropy" else (out[0 if use == "logp" else 1],)

    assert_right(
        lambda h, w: pick(ops.linear_logprob(h, w, y, **options)),
        lambda h, w: pick(exact(h @ w.t(), y, **options)),
        (hidden, weight),
        (rand(1, t), rand(2, t))[: 1 + (use == "logp and entropy")],
        f"{use}, {case}, {dtype}",
    )


@by_dtype
@pytest.mark.parametrize("t,v,c", ((1, 1, 3), (5, 140, 20), (14, 260, 9)))
def test_reference_equals_cpp(dtype: torch.dtype, t: int, v: int, c: int) -> None:
    hidden, weight, y, kept = rand(0, t, c, dtype=dtype), head(v, c, dtype=dtype), ids(t, v), some_kept(t, v, None)
    up = (ids(t, 3, 1) - 1).float(), ids(t, 2, 2).float()  # some rows have no upstream gradient

    def run() -> list[Tensor]:
        op = lambda h, w: ops.linear_logprob(h, w, y, temperature=temperatures(t), kept=kept)[:2]
        return forward_backward(op, (hidden, weight), up)

    assert_reference_equal(run, f"linear_logprob {dtype} {(t, v, c)}")


# ---- the same bits as logprob of linear


def check_two_steps(t: int, v: int, c: int, with_kept: bool, dtype: torch.dtype, seed: int) -> None:
    hidden, weight, y = rand(seed, t, c, dtype=dtype), head(v, c, seed + 1, dtype), ids(t, v, seed)
    options = {"temperature": temperatures(t), "kept": some_kept(t, v, None, seed) if with_kept else None}
    up = rand(seed + 2, t), rand(seed + 3, t)
    fused = forward_backward(lambda h, w: ops.linear_logprob(h, w, y, **options)[:2], (hidden, weight), up)
    separate = forward_backward(lambda h, w: two_steps(h, w, y, **options)[:2], (hidden, weight), up)
    for name, a, b in zip(("logp", "entropy", "dhidden", "dweight"), fused, separate, strict=True):
        assert_bitwise(a, b, f"{name} of linear_logprob against logprob(linear)")
    lse = ops.linear_logprob(hidden, weight, y, **options).lse
    assert_bitwise(lse, two_steps(hidden, weight, y, **options).lse, "lse")


@properties
@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 70), st.booleans(), dtypes, seeds)
def test_equals_logprob_of_linear(t: int, v: int, c: int, with_kept: bool, dtype: torch.dtype, seed: int) -> None:
    check_two_steps(t, v, c, with_kept, dtype, seed)


def test_equals_logprob_of_linear_over_many_blocks() -> None:
    check_two_steps(1100, 2100, 8, True, torch.float32, 0)  # blocks of 512 rows and 1024 vocabulary entries
    check_two_steps(1100, 70, 8, False, torch.bfloat16, 1)


def check_decode(t: int, v: int, c: int) -> None:
    hidden, weight, y = rand(0, t, c), head(v, c), ids(t, v)
    steps = torch.cat([two_steps(hidden[i : i + 1], weight, y[i : i + 1]).logp for i in range(t)])
    assert_bitwise(steps, ops.linear_logprob(hidden, weight, y).logp, "token by token against the whole batch")


def test_equals_logprob_of_linear_token_by_token() -> None:
    check_decode(40, 512, 256)
    with ops.stock():
        assert differs(lambda: check_decode(40, 512, 256))


# ---- invariant


def results(hidden: Tensor, weight: Tensor, y: Tensor, temperature: Tensor, kept: Tensor | None) -> list[Tensor]:
    """logp, entropy and dhidden, under upstream gradients that depend on the row's target."""
    up = (y % 5 - 2).float(), (y % 3).float()
    op = lambda h, w: ops.linear_logprob(h, w, y, temperature=temperature, kept=kept)[:2]
    return forward_backward(op, (hidden, weight), up)[:3]


def check_rows(t: int, v: int, c: int, with_kept: bool, dtype: torch.dtype, seed: int) -> None:
    hidden, weight, y = rand(seed, t, c, dtype=dtype), head(v, c, seed + 1, dtype), ids(t, v, seed)
    temperature, kept = temperatures(t), some_kept(t, v, None, seed) if with_kept else None
    whole = results(hidden, weight, y, temperature, kept)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(seed))
    for rows in (order, order[:1], order[: t // 2]):
        some = results(hidden[rows], weight, y[rows], temperature[rows], None if kept is None else kept[rows])
        for name, a, b in zip(("logp", "entropy", "dhidden"), some, whole, strict=True):
            assert_bitwise(a, b[rows], f"{name} of rows {rows.tolist()[:4]}... of {t}")


@properties
@given(st.integers(2, 40), st.integers(1, 300), st.integers(1, 60), st.booleans(), dtypes, seeds)
def test_row_alone_any_row_any_order(t: int, v: int, c: int, with_kept: bool, dtype: torch.dtype, seed: int) -> None:
    check_rows(t, v, c, with_kept, dtype, seed)


def test_rows_control() -> None:
    check_rows(256, 512, 256, False, torch.float32, 0)
    with ops.stock():
        assert differs(lambda: check_rows(256, 512, 256, False, torch.float32, 0))


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    hidden, weight, y = rand(0, 90, 40, dtype=dtype), head(300, 40, dtype=dtype), ids(90, 300)
    op = lambda h, w: ops.linear_logprob(h, w, y, temperature=temperatures(90))[:2]
    run = lambda: forward_backward(op, (hidden, weight), (rand(1, 90), rand(2, 90)))
    for a, b in zip(with_threads(1, run), with_threads(2, run), strict=True):
        assert_bitwise(a, b, "1 against 2 threads")


def weight_gradient(hidden: Tensor, weight: Tensor, y: Tensor, up: Tensor, pieces: list[int]) -> Tensor:
    """main_grad after one backward per piece; stock torch accumulates in fp32, as frameworks do."""
    weight = weight.clone().requires_grad_()
    total = torch.zeros(weight.shape)
    for h, t, g in zip(hidden.split(pieces), y.split(pieces), up.split(pieces), strict=True):
        weight.grad, weight.main_grad = None, total
        out = ops.linear_logprob(h, weight, t)
        torch.autograd.backward((out.logp, out.entropy), (g[:, 0], g[:, 1]))
        if weight.grad is not None:
            total += weight.grad
    return total


def check_micro_batches(pieces: list[int], v: int, c: int, dtype: torch.dtype, seed: int) -> None:
    t = sum(pieces)
    hidden, weight, y = rand(seed, t, c, dtype=dtype), head(v, c, seed + 1, dtype), ids(t, v, seed)
    up = rand(seed + 2, t, 2) * (ids(t, 3, seed) > 0)[:, None]
    whole = weight_gradient(hidden, weight, y, up, [t])
    assert_bitwise(weight_gradient(hidden, weight, y, up, pieces), whole, f"weight gradient over {pieces}")


@properties
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 200), st.integers(1, 40), dtypes, seeds)
def test_micro_batch_split(pieces: list[int], v: int, c: int, dtype: torch.dtype, seed: int) -> None:
    check_micro_batches(pieces, v, c, dtype, seed)


def test_micro_batch_control() -> None:
    check_micro_batches([16, 40, 8], 200, 48, torch.float32, 0)
    with ops.stock():
        assert differs(lambda: check_micro_batches([16, 40, 8], 200, 48, torch.float32, 0))


# ---- masked tokens


@by_dtype
def test_tokens_without_gradient_are_left_out(dtype: torch.dtype) -> None:
    t, v, c = 30, 150, 20
    hidden, weight, y = rand(0, t, c, dtype=dtype), head(v, c, dtype=dtype), ids(t, v)
    used = ids(t, 3, 5) == 0
    op = lambda y: lambda h, w: ops.linear_logprob(h, w, y)[:2]
    up = rand(1, t) * used, rand(2, t) * used
    _, _, dh, dw = forward_backward(op(y), (hidden, weight), up)
    _, _, dh_used, dw_used = forward_backward(op(y[used]), (hidden[used], weight), (up[0][used], up[1][used]))
    assert_bitwise(dh[used], dh_used, "dhidden of used tokens")
    assert_bitwise(dw, dw_used, "dweight")
    assert not dh[~used].any()
    hidden[~used] = math.nan
    _, _, dh_nan, dw_nan = forward_backward(op(y), (hidden, weight), up)
    assert_bitwise(dw_nan, dw, "dweight with hidden states of NaN in unused tokens")
    assert_bitwise(dh_nan, dh, "dhidden with them")


def test_dropped_target() -> None:
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, 4] = False
    op = lambda h, w: ops.linear_logprob(h, w, torch.tensor([3, 4, 5]), kept=ops.pack_kept(mask))[:2]
    logp, entropy, dh, dw = forward_backward(op, (rand(0, 3, 8), head(40, 8)), (torch.ones(3), torch.ones(3)))
    assert logp[1] == -math.inf and bool(entropy.isfinite().all()) and bool(dw.isfinite().all())
    assert not dh[1].any() and bool(dh[[0, 2]].any())


# ---- kept probabilities


def kept_case(t: int, v: int, c: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    y = ids(t, v)
    options = {"temperature": temperatures(t), "kept": some_kept(t, v, y)}
    return [rand(0, t, c, dtype=dtype), head(v, c, dtype=dtype), y], options


@pytest.mark.parametrize("implementation", ("cpu", "reference"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_kept_probabilities(dtype: torch.dtype, implementation: str) -> None:
    """logp, entropy and lse keep their bits; the gradients' error is within twice that of plain torch."""
    (hidden, weight, y), options = kept_case(70, 300, 48, dtype)
    up = (rand(1, 70), torch.zeros(70))
    with select.use(implementation):
        run = lambda keep, h, w: forward_backward(
            lambda h, w: ops.linear_logprob(h, w, y, keep_probs=keep, **options)[:1], (h, w), up[:1]
        )
        logp, dh, dw = run(True, hidden, weight)
        _, exact_dh, exact_dw = run(False, hidden.float(), weight.float())
        assert_bitwise(logp, run(False, hidden, weight)[0], "logp")
    with ops.stock():
        _, stock_dh, stock_dw = run(False, hidden, weight)
    for name, got, want, stock in (("dh", dh, exact_dh, stock_dh), ("dw", dw, exact_dw, stock_dw)):
        limit = 2 * (stock.float() - want).abs().max() + 1e-6
        assert (got.float() - want).abs().max() <= limit, name


def test_kept_probabilities_reference_equals_cpp_and_rows_stand_alone() -> None:
    (hidden, weight, y), options = kept_case(9, 300, 16, torch.bfloat16)
    run = lambda rows: forward_backward(
        lambda h, w: ops.linear_logprob(
            h, w, y[rows], temperature=options["temperature"][rows], kept=options["kept"][rows], keep_probs=True
        )[:1],
        (hidden[rows], weight),
        (rand(1, 9)[rows],),
    )
    whole = run(slice(None))
    with select.use("reference"):
        for a, b in zip(run(slice(None)), whole, strict=True):
            assert_bitwise(a, b, "reference against C++")
    for t in range(9):
        alone = run(slice(t, t + 1))
        assert_bitwise(alone[1], whole[1][t : t + 1], "dhidden of a row alone")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t,v,c", ((1, 1, 3), (12, 129, 8), (9, 300, 4)))
def test_kept_probabilities_reference_equals_cpp_at_borders(t: int, v: int, c: int, dtype: torch.dtype) -> None:
    """Tile boundaries, rows without a gradient, infinities and NaN; one of the gradients at a time."""
    (hidden, weight, y), options = kept_case(t, v, c, dtype)
    hidden[t // 2, 0], hidden[t - 1] = math.inf, math.nan
    up = torch.where(torch.arange(t) % 3 == 0, 0.0, rand(1, t))
    for extra in ({}, options):
        for wanted in ((True, True), (True, False), (False, True)):

            def run(extra: Any = extra, wanted: Any = wanted) -> list[Tensor]:
                h, w = (x.clone().requires_grad_(needs) for x, needs in zip((hidden, weight), wanted, strict=True))
                out = ops.linear_logprob(h, w, y, keep_probs=True, **extra)
                out.logp.backward(up)
                return [x.detach().nan_to_num(7.0) for x in (*out, h.grad, w.grad) if x is not None]

            found = run()
            with select.use("reference"):
                for i, (a, b) in enumerate(zip(found, run(), strict=True)):
                    assert_bitwise(a, b, f"result {i}, {wanted}, {sorted(extra)}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_probabilities_of_micro_batches(dtype: torch.dtype) -> None:
    """No bit depends on blocks of tokens and of the vocabulary, or on a split with main_grad."""
    (hidden, weight, y), options = kept_case(1100, 1030, 5, dtype)
    up = rand(1, 1100)

    def run(*sizes: int) -> list[Tensor]:
        w, found, at = torch.nn.Parameter(weight), [], 0
        w.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        for size in sizes:
            rows = slice(at, at + size)
            h, at = hidden[rows].clone().requires_grad_(), at + size
            extra = {name: x[rows] for name, x in options.items()}
            out = ops.linear_logprob(h, w, y[rows], keep_probs=True, **extra)
            out.logp.backward(up[rows])
            found.append([x.detach() for x in (*out, h.grad)])
        return [*map(torch.cat, zip(*found, strict=True)), w.main_grad]  # type: ignore[attr-defined]

    for i, (a, b) in enumerate(zip(run(1100), run(3, 500, 597), strict=True)):
        assert_bitwise(a, b, f"result {i}")


def test_kept_probabilities_are_all_that_is_kept() -> None:
    """Forward and backward hold no other tensor [T, V]."""
    t, v = 1024, 8192
    hidden, weight, y = rand(0, t, 8).requires_grad_(), head(v, 8).requires_grad_(), ids(t, v)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.linear_logprob(hidden, weight, y, keep_probs=True).logp.sum().backward()
    taken = sum(max(0, e.self_cpu_memory_usage) for e in profile.events())
    assert 4 * t * v <= taken < 1.2 * 4 * t * v


def test_kept_probabilities_give_way_to_an_entropy_gradient() -> None:
    (hidden, weight, y), options = kept_case(9, 300, 16, torch.bfloat16)
    run = lambda keep: forward_backward(
        lambda h, w: ops.linear_logprob(h, w, y, keep_probs=keep, **options)[:2],
        (hidden, weight),
        (rand(1, 9), rand(2, 9)),
    )
    for a, b in zip(run(True), run(False), strict=True):
        assert_bitwise(a, b, "with an entropy gradient")
    with torch.no_grad():
        assert_bitwise(
            ops.linear_logprob(hidden, weight, y, keep_probs=True).logp, ops.linear_logprob(hidden, weight, y).logp, ""
        )


# ---- kept logits


@pytest.mark.parametrize("implementation", ("cpu", "reference"))
@pytest.mark.parametrize("width", (128, 512))
def test_kept_logits_change_no_bit(width: int, implementation: str) -> None:
    """The rows and gradients are the plain op's; the logits are those of linear, scaled, -inf where dropped."""
    (hidden, weight, y), options = kept_case(9, 300, 16, torch.float32)
    inverse, kept, up = 1.0 / options["temperature"], options["kept"], (rand(1, 9), rand(2, 9))
    r = torch.ops.rlkernel
    with select.use(implementation):
        some = forward_backward(
            lambda h, w: r.linear_logprob_logits(h, w, y, inverse, kept, width, False)[:2], (hidden, weight), up
        )
        for a, b in zip(
            some,
            forward_backward(lambda h, w: r.linear_logprob(h, w, y, inverse, kept, False)[:2], (hidden, weight), up),
            strict=True,
        ):
            assert_bitwise(a, b, f"{width} entries kept")
        logits = r.linear_logprob_logits(hidden, weight, y, inverse, kept, width, False)[4]
        z = ops.linear(hidden, weight, out_dtype=torch.float32) * inverse[:, None]
    bits = (kept[:, torch.arange(300) >> 5] >> (torch.arange(300) & 31)) & 1
    expected = torch.full((9, width), -math.inf)
    expected[:, : min(width, 300)] = torch.where(bits != 0, z, -math.inf)[:, :width]
    assert_bitwise(logits, expected, "logits")


def test_kept_width() -> None:
    from rlkernel.ops.linear_logprob import saved_width

    assert saved_width(8192, 4096, 151936, 1 << 30) == 32768
    assert saved_width(100, 4096, 151936, 1 << 40) == 152064  # everything, in whole pairs of tiles
    assert saved_width(8192, 4096, 151936, math.inf) == 152064
    widths = [saved_width(8192, 4096, 151936, keep) for keep in (1e9, 10**9)]
    assert widths == [30464] * 2 and all(isinstance(width, int) for width in widths)
    assert (
        saved_width(8192, 4096, 151936, 0) == saved_width(8192, 64, 151936, 1 << 30) == saved_width(0, 4096, 9, 1) == 0
    )


# ---- torch's machinery


def test_only_the_wanted_gradients_are_computed() -> None:
    hidden, weight, y = rand(0, 4, 8), head(9, 8).requires_grad_(), ids(4, 9)
    ops.linear_logprob(hidden, weight, y).logp.sum().backward()
    assert hidden.grad is None and weight.grad is not None
    both = weight.grad
    frozen, hidden = weight.detach(), hidden.requires_grad_()
    ops.linear_logprob(hidden, frozen, y).logp.sum().backward()
    assert hidden.grad is not None and frozen.grad is None
    hidden.grad, weight.grad = None, None
    ops.linear_logprob(hidden, weight, y).logp.sum().backward()
    assert_bitwise(weight.grad, both, "dweight with and without dhidden")


@by_dtype
def test_rows_equal_a_call_with_these_tokens(dtype: torch.dtype) -> None:
    """Bits of forward and backward are those of a call with the rows' hidden states; others have a gradient of zero."""
    hidden, weight, rows = rand(0, 9, 20, dtype=dtype), head(140, 20, dtype=dtype), torch.tensor([7, 1, 2, 8])
    y, up = ids(4, 140), (rand(1, 4), rand(2, 4))
    for options in ({}, {"temperature": temperatures(4), "kept": some_kept(4, 140, y)}, {"keep_probs": True}):
        op = lambda h, w, options=options: ops.linear_logprob(h, w, y, **options)[:2]
        of_rows = lambda h, w, options=options: ops.linear_logprob(h, w, y, rows=rows, **options)[:2]
        *found, dx, dw = forward_backward(of_rows, (hidden, weight), up)
        *expected, dx_rows, dw_rows = forward_backward(op, (hidden[rows], weight), up)
        for a, b in zip((*found, dx[rows], dw), (*expected, dx_rows, dw_rows), strict=True):
            assert_bitwise(a, b, f"rows, {options.keys()}")
        assert not dx[[0, 3, 4, 5, 6]].any()
    assert_compiles(lambda h, w: ops.linear_logprob(h, w, y, rows=rows)[:2], (hidden, weight), up)


@pytest.mark.parametrize("rows", (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32), [1]))
def test_rows_that_are_not_an_index_are_refused(rows: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="rows is"):
        ops.linear_logprob(rand(0, 3, 4), head(7, 4), ids(1, 7), rows=rows)


def test_opcheck() -> None:
    r = torch.ops.rlkernel
    y, kept, warm = ids(5, 70), some_kept(5, 70, None), temperatures(5)
    hidden, weight = rand(0, 5, 8), head(70, 8)
    torch.library.opcheck(
        r.linear_logprob.default, (hidden.requires_grad_(), weight.requires_grad_(), y, None, None, True)
    )
    hidden, weight = hidden.detach(), weight.detach()
    torch.library.opcheck(r.linear_logprob.default, (hidden.bfloat16(), weight.bfloat16(), y, warm, kept, False))
    rows = r.linear_logprob(hidden, weight, y, warm, kept, False)
    for grad, *rest in (
        (torch.zeros(70, 8), True, True, True),
        (torch.zeros(70, 8), False, False, True),
        (None, *[True] * 3),
    ):
        arguments = (grad, hidden, weight, y, warm, kept, rows[3], rows[1], rand(1, 5), None, None, None, None, *rest)
        torch.library.opcheck(r.linear_logprob_grad_.default, arguments)
    torch.library.opcheck(r.linear_logprob_probs.default, (hidden.requires_grad_(), weight, y, warm, kept, False))
    torch.library.opcheck(r.linear_logprob_logits.default, (hidden, weight, y, warm, kept, 128, False))


def test_compiles() -> None:
    y, kept, warm = ids(5, 70), some_kept(5, 70, None), temperatures(5)
    for options in ({}, {"temperature": 0.7}, {"temperature": warm, "kept": kept}):
        op = lambda h, w, options=options: ops.linear_logprob(h, w, y, **options)[:2]
        assert_compiles(op, (rand(0, 5, 8), head(70, 8)), (rand(1, 5), rand(2, 5)))


def test_empty_batch_and_views() -> None:
    op = lambda h, w: ops.linear_logprob(h, w, torch.empty(0, dtype=torch.int64))[:2]
    logp, _, dh, dw = forward_backward(op, (rand(0, 0, 8), head(9, 8)), (rand(0, 0), rand(0, 0)))
    assert logp.shape == (0,) and dh.shape == (0, 8) and not dw.any()
    hidden, weight, y = rand(0, 8, 6), head(8, 9), ids(6, 9)
    run = lambda h, w: forward_backward(lambda h, w: ops.linear_logprob(h, w, y)[:2], (h, w), (rand(1, 6), rand(2, 6)))
    for a, b in zip(run(hidden.t(), weight.t()), run(hidden.t().contiguous(), weight.t().contiguous()), strict=True):
        assert_bitwise(a, b, "transposed hidden and weight")


MEMORY = """
import resource, torch
from rlkernel import ops
t, v, c = 2048, 16384, 16                 # [T, V] in fp32 would be 128 MiB
h, w = torch.randn(t, c).requires_grad_(), torch.randn(v, c).requires_grad_()
y = torch.randint(0, v, (t,))
ops.linear_logprob(h[:8], w, y[:8]).logp.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = ops.linear_logprob(h, w, y)
(out.logp.sum() + out.entropy.sum()).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_is_bounded() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40, f"{done.stdout.strip()} MiB more"


# ---- bad input


@pytest.mark.parametrize(
    "options,error,message",
    (
        ({"hidden": rand(0, 3, 6)}, ValueError, r"hidden is \(3, 6\), weight \(40, 8\)"),
        ({"hidden": rand(0, 3, 1, 8)}, ValueError, r"hidden is \(3, 1, 8\)"),
        ({"hidden": rand(0, 3, 8, dtype=torch.bfloat16)}, ValueError, "cast one of them"),
        ({"weight": torch.empty(0, 8)}, ValueError, "vocabulary of 0"),
        ({"targets": ids(4, 40)}, ValueError, r"targets is \(4,\)"),
        ({"targets": torch.tensor([0, 40, 1])}, IndexError, r"linear_logprob: targets\[1\] is 40"),
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be positive"),
        ({"temperature": torch.tensor([1.0, -2.0, 1.0])}, ValueError, r"linear_logprob: temperature\[1\] is -2"),
        ({"kept": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, r"kept is \(3, 1\)"),
        ({"keep_bytes": -1}, ValueError, "keep_bytes=-1 must be an integer of at least 0, or inf"),
        ({"keep_bytes": 256.5}, ValueError, "keep_bytes=256.5 must be an integer of at least 0, or inf"),
        ({"keep_bytes": math.nan}, ValueError, "keep_bytes=nan must be an integer"),
    ),
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"hidden": rand(0, 3, 8), "weight": head(40, 8), "targets": ids(3, 40), **options}
    with pytest.raises(error, match=message):
        ops.linear_logprob(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("targets"), **arguments)
