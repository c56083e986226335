"""sample: distribution, noise, filters, and tokens that depend only on seed and position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_reference_equal, differs, rand, with_threads
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels.reference.sample import gumbel, hashes, mix

properties = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)

FILTERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "all": ("top_k", "top_p", "min_p"),
}
by_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())


def settings_of(b: int, filters: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    """A temperature (some greedy) and the named filters (some off) for b rows."""
    g = torch.Generator().manual_seed(seed)
    uniform = lambda low, high: low + (high - low) * torch.rand(b, generator=g)
    every = {
        "temperature": torch.where(uniform(0, 1) < 0.15, 0.0, uniform(0.3, 2.0)),
        "top_k": torch.randint(0, 20, (b,), generator=g, dtype=torch.int32),
        "top_p": torch.where(uniform(0, 1) < 0.2, 1.0, uniform(0.05, 1.0)),
        "min_p": torch.where(uniform(0, 1) < 0.2, 0.0, uniform(0.0, 0.4)),
    }
    return {name: every[name] for name in ("temperature", *filters)}


def keys(b: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (b,), generator=g), torch.randint(0, 2**40, (b,), generator=g)


def kept_rows(out: ops.Sample, v: int) -> list[list[int]]:
    assert out.kept is not None
    return [row.nonzero()[:, 0].tolist() for row in ops.unpack_kept(out.kept, v)]


def draw(logits: list[float], draws: int, **options: float) -> ops.Sample:
    """`draws` samples of one row of logits, at as many positions."""
    rows = torch.tensor(logits).expand(draws, -1).contiguous()
    columns = {
        name: torch.full((draws,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in {"temperature": 1.0, **options}.items()
    }
    return ops.sample(rows, torch.full((draws,), 7), torch.arange(draws), return_kept=True, **columns)


# ---- the distribution


def check_frequencies(counts: Tensor, p: Tensor) -> None:
    """Chi-square of counts against probabilities; the limit is five standard deviations."""
    n, free = int(counts.sum()), int((p > 0).sum()) - 1
    assert not counts[p == 0].any()
    chi2 = float(((counts - n * p) ** 2 / (n * p))[p > 0].sum())
    assert chi2 < free + 5 * math.sqrt(2 * free), f"chi-square {chi2:.1f} with {free} degrees of freedom"


@pytest.mark.parametrize("temperature", (0.5, 1.0, 1.7))
def test_frequencies(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, 0.3, -3.0, 1.5]
    out = draw(logits, 40_000, temperature=temperature)
    p = torch.softmax(torch.tensor(logits).double() / temperature, -1)
    check_frequencies(torch.bincount(out.tokens, minlength=7), p)


def test_frequencies_over_seeds() -> None:
    n, v = 40_000, 16
    logits = rand(0, 1, v).expand(n, -1).contiguous()
    out = ops.sample(logits, torch.arange(n), torch.full((n,), 3), temperature=torch.ones(n))
    check_frequencies(torch.bincount(out.tokens, minlength=v), torch.softmax(logits[0].double(), -1))


@pytest.mark.parametrize("options", ({"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}), ids=str)
def test_frequencies_over_the_kept_set(options: dict[str, float]) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, 0.3, -3.0, 1.5]
    out = draw(logits, 20_000, **options)
    inside = ops.unpack_kept(out.kept[:1], 7)[0]
    assert 2 <= int(inside.sum()) < 7
    p = torch.softmax(torch.tensor(logits).double().masked_fill(~inside, -math.inf), -1)
    check_frequencies(torch.bincount(out.tokens, minlength=7), p)
    assert torch.allclose(out.logp.double(), p.log()[out.tokens], atol=1e-6)


def test_consecutive_draws_are_independent() -> None:
    tokens = draw([0.0] * 4, 40_000).tokens
    check_frequencies(torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16), torch.full((16,), 1 / 16))


# ---- the noise


def test_hash_bits_are_even_over_tokens_positions_and_seeds() -> None:
    one = torch.ones(1, dtype=torch.int64)
    many = torch.arange(16384)
    streams = {
        "tokens": hashes(one, one, 16384)[0],
        "positions": hashes(one.expand(16384), many, 1)[:, 0],
        "seeds": hashes(many, one.expand(16384), 1)[:, 0],
        "high seeds": hashes(many << 32, one.expand(16384), 1)[:, 0],
    }
    for name, h in streams.items():
        assert h.min() >= 0 and h.max() < 2**32
        bits = (h[:, None] >> torch.arange(32)) & 1
        assert float((bits.double().mean(0) - 0.5).abs().max()) < 5 * 0.5 / 128, name
        for byte in range(4):
            counts = torch.bincount((h >> (8 * byte)) & 255, minlength=256)
            check_frequencies(counts, torch.full((256,), 1 / 256))
        pairs = torch.bincount((h[:-1] >> 28) * 16 + (h[1:] >> 28), minlength=256)
        check_frequencies(pairs, torch.full((256,), 1 / 256))


def test_one_input_bit_flips_half_of_the_output() -> None:
    n = 2000
    seed, position = keys(n)
    base = hashes(seed, position, 1)[:, 0]
    ones = lambda x: ((x[:, None] >> torch.arange(32)) & 1).double().mean(0)
    for bit in range(64):
        for other in ((seed ^ (1 << bit if bit < 63 else -(2**63)), position), (seed, position ^ (1 << min(bit, 62)))):
            flips = ones(base ^ hashes(*other, 1)[:, 0])
            assert float((flips - 0.5).abs().max()) < 6 * 0.5 / math.sqrt(n), f"bit {bit}"
    words = torch.randint(0, 2**32, (n,), generator=torch.Generator().manual_seed(1))
    for bit in range(32):
        flips = ones(mix(words) ^ mix(words ^ (1 << bit)))
        assert float((flips - 0.5).abs().max()) < 0.1, f"mix, bit {bit}"


def test_gumbel_is_finite_and_accurate_at_both_ends() -> None:
    edges = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1])
    h = torch.cat((edges, torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))))
    high = h >= 2**31
    # In fp64 the upper half goes through log1p of 1 - u as well.
    away = (torch.where(high, 2**32 - 1 - h, h).double() + 0.5) / 2**32
    exact = -torch.log(-torch.where(high, torch.log1p(-away), torch.log(away)))
    g = gumbel(h)
    assert bool(g.isfinite().all())
    assert float((g.double() - exact).abs().max()) < 4e-6
    assert 22.8 < float(g.max()) < 23 and -3.2 < float(g.min()) < -3.1


def test_the_noise_is_the_one_of_the_contract() -> None:
    # Fixed numbers: a change of any bit here is a change of the contract's id.
    seed, position = torch.tensor([0, 12345, -1]), torch.tensor([0, 17, 2**33])
    assert hashes(seed, position, 3).tolist() == [
        [2328397681, 544484506, 91852055],
        [174707612, 2097501006, 3519715442],
        [1533340354, 1875752359, 3089632022],
    ]
    out = ops.sample(rand(0, 3, 5000), seed, position, temperature=torch.tensor([1.0, 0.8, 2.0]))
    assert out.tokens.tolist() == [2285, 1317, 614]


# ---- filters


def test_top_k_keeps_k_and_the_ties_with_the_last() -> None:
    logits = [1.0, 3.0, 2.0, 2.0, 0.0, 3.0]
    for k, kept in ((1, [1, 5]), (2, [1, 5]), (3, [1, 2, 3, 5]), (4, [1, 2, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert kept_rows(draw(logits, 1, top_k=k), 6) == [kept]
    for k in (0, 6, 100):
        assert kept_rows(draw(logits, 1, top_k=k), 6) == [list(range(6))]


def test_top_p_keeps_the_smallest_sufficient_set_and_ties() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.15, 0.1]).log().tolist()
    for p, kept in ((0.01, [1]), (0.49, [1]), (0.52, [1, 2, 3]), (0.79, [1, 2, 3]), (0.82, [0, 1, 2, 3, 4])):
        assert kept_rows(draw(logits, 1, top_p=p), 5) == [kept]
    assert kept_rows(draw([*logits, -60.0], 1, top_p=1.0), 6) == [list(range(6))], "1 is off"


def test_min_p_is_relative_to_the_largest() -> None:
    logits = torch.tensor([0.1, 0.5, 0.2, 0.2]).log().tolist()
    for p, kept in ((0.0, [0, 1, 2, 3]), (0.19, [0, 1, 2, 3]), (0.21, [1, 2, 3]), (0.41, [1]), (1.0, [1])):
        assert kept_rows(draw(logits, 1, min_p=p), 4) == [kept]


def test_top_p_is_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept_rows(draw(logits, 1, top_p=0.65), 4) == [[0, 1]]
    assert kept_rows(draw(logits, 1, top_k=2, top_p=0.55), 4) == [[0]], "0.4 of 0.7"
    assert kept_rows(draw(logits, 1, top_k=3, top_p=0.65, min_p=0.8), 4) == [[0]], "0.3 is less than 0.8 of 0.4"


def test_filters_come_after_the_temperature() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log().tolist()
    assert kept_rows(draw(logits, 1, top_p=0.65), 3) == [[0, 1]]
    assert kept_rows(draw(logits, 1, top_p=0.65, temperature=0.5), 3) == [[0]]


@properties
@given(st.integers(1, 12), st.integers(2, 300), seeds)
def test_filters_against_sorting_in_fp64(b: int, v: int, seed: int) -> None:
    logits, options = 2 * rand(seed, b, v), settings_of(b, FILTERS["all"], seed)
    out = ops.sample(logits, *keys(b, seed), return_kept=True, **options)
    got = ops.unpack_kept(out.kept, v)
    for i in range(b):
        t, k, p, m = (float(options[name][i]) for name in ("temperature", "top_k", "top_p", "min_p"))
        if t == 0:
            assert bool(got[i].all())
            continue
        order = (logits[i].double() / t).argsort(descending=True)
        share = torch.softmax((logits[i].double() / t)[order][: int(k) or v], -1)
        before = share.cumsum(-1) - share
        certain = torch.minimum((before - p).abs(), (share / share[0] - m).abs()) > 1e-6  # not at a threshold
        expected = (before < p) & (share >= m * share[0])
        assert torch.equal(got[i][order][: len(share)][certain], expected[certain])
        assert not bool(got[i][order][len(share) :].any())


def test_greedy_takes_the_first_largest_and_ignores_filters() -> None:
    logits = rand(0, 4, 300)
    logits[0, [7, 200]] = 9.0
    logits[1, [130, 131]] = 9.0
    out = ops.sample(
        logits,
        *keys(4),
        temperature=torch.zeros(4),
        top_k=torch.full((4,), 2, dtype=torch.int32),
        top_p=torch.full((4,), 0.1),
        return_kept=True,
    )
    assert out.tokens.tolist()[:2] == [7, 130]
    assert torch.equal(logits.gather(1, out.tokens[:, None])[:, 0], logits.amax(-1))
    assert bool(ops.unpack_kept(out.kept, 300).all())
    assert_bitwise(out.logp, ops.logprob(logits, out.tokens).logp, "logp at temperature 1")


@by_filter
def test_logp_is_logprob_over_the_kept_set(filters: tuple[str, ...]) -> None:
    b, v = 40, 300
    logits, options = 2 * rand(0, b, v), settings_of(b, filters)
    out = ops.sample(logits, *keys(b), return_kept=True, return_full=True, **options)
    assert (out.kept is None) == (not filters)
    temperature = torch.where(options["temperature"] > 0, options["temperature"], 1.0)
    again = ops.logprob(logits, out.tokens, temperature=temperature, kept=out.kept)
    assert_bitwise(out.logp, again.logp, "logp")
    assert_bitwise(out.full_logp, ops.logprob(logits, out.tokens, temperature=temperature).logp, "over all tokens")
    half = [ops.sample(x, *keys(b), **options) for x in (logits.bfloat16(), logits.bfloat16().float())]
    assert_bitwise(half[0].tokens, half[1].tokens, "tokens of bf16 logits")
    assert_bitwise(half[0].logp, half[1].logp, "logp of bf16 logits")
    assert bool(out.logp.isfinite().all())
    assert ops.sample(logits, *keys(b), **options).kept is None
    hidden, weight = rand(1, b, 16), rand(2, v, 16)
    out = ops.sample(ops.linear(hidden, weight), *keys(b), return_kept=True, **options)
    fused = ops.linear_logprob(hidden, weight, out.tokens, temperature=temperature, kept=out.kept)
    assert_bitwise(out.logp, fused.logp, "rollout's logp against the trainer's")


# ---- invariant


@by_filter
@pytest.mark.parametrize("v", (1, 5, 130, 700))
def test_reference_equals_cpp(filters: tuple[str, ...], v: int) -> None:
    b = 25
    logits = 3 * rand(0, b, v)
    logits[:, ::3] = logits[:, ::3].round()  # ties
    options = settings_of(b, filters)
    out = lambda: ops.sample(logits, *keys(b), return_kept=True, return_full=True, **options)
    run = lambda: [x for x in out() if x is not None]
    assert_reference_equal(run, f"sample V={v} {filters}")


@properties
@given(st.integers(2, 40), st.integers(1, 300), st.sampled_from(list(FILTERS.values())), seeds)
def test_row_alone_any_row_any_order(b: int, v: int, filters: tuple[str, ...], seed: int) -> None:
    logits, options, key = 2 * rand(seed, b, v), settings_of(b, filters, seed), keys(b, seed)
    whole = ops.sample(logits, *key, return_kept=True, **options)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    for rows in (order, order[:1], order[: b // 2]):
        some = ops.sample(
            logits[rows], *(k[rows] for k in key), return_kept=True, **{n: x[rows] for n, x in options.items()}
        )
        for name, x, y in zip(ops.Sample._fields, some, whole, strict=True):
            if x is not None and y is not None:
                assert_bitwise(x, y[rows], f"{name} of rows {rows.tolist()[:4]}... of {b}")


def test_row_alone_control() -> None:
    def check() -> None:
        logits, key = rand(0, 30, 50), keys(30)
        torch.manual_seed(0)
        whole = ops.sample(logits, *key, temperature=torch.ones(30))
        torch.manual_seed(0)
        alone = ops.sample(logits[9:10], key[0][9:10], key[1][9:10], temperature=torch.ones(1))
        assert_bitwise(alone.tokens, whole.tokens[9:10], "token of row 9")

    check()
    with ops.stock():
        assert differs(check)


def test_threads_are_free() -> None:
    logits, options = 2 * rand(0, 60, 300), settings_of(60, FILTERS["all"])
    run = lambda: ops.sample(logits, *keys(60), return_kept=True, return_full=True, **options)
    for a, b in zip(with_threads(1, run), with_threads(2, run), strict=True):
        assert_bitwise(a, b, "1 against 2 threads")


def test_dropped_entries_at_the_end_are_free() -> None:
    logits, options = 2 * rand(0, 30, 300), settings_of(30, FILTERS["none"])
    wide = torch.cat((logits, torch.full((30, 77), -math.inf)), -1)
    a, b = (ops.sample(x, *keys(30), **options) for x in (logits, wide))
    assert_bitwise(a.tokens, b.tokens, "tokens of a padded vocabulary")
    assert_bitwise(a.logp, b.logp, "logp of a padded vocabulary")


def test_ties_go_to_the_lowest_id() -> None:
    out = ops.sample(torch.zeros(1, 300), torch.tensor([1]), torch.tensor([1]), temperature=torch.zeros(1))
    assert out.tokens.tolist() == [0]


# ---- the control arm


@by_filter
def test_stock_keeps_the_same_tokens(filters: tuple[str, ...]) -> None:
    logits, options = rand(0, 40, 60), settings_of(40, filters)
    with ops.stock():
        out = ops.sample(logits, *keys(40), return_kept=True, **options)
    ours = ops.sample(logits, *keys(40), return_kept=True, **options)
    assert (out.kept is None) == (ours.kept is None)
    if ours.kept is not None:
        assert torch.equal(ops.unpack_kept(out.kept, 60), ops.unpack_kept(ours.kept, 60))
    greedy = options["temperature"] == 0
    assert torch.equal(out.tokens[greedy], ours.tokens[greedy])
    temperature = torch.where(greedy, 1.0, options["temperature"])
    again = ops.logprob(logits, out.tokens, temperature=temperature, kept=out.kept).logp
    assert torch.allclose(out.logp, again, atol=1e-5)


# ---- torch's machinery


@by_filter
def test_opcheck(filters: tuple[str, ...]) -> None:
    options = settings_of(4, filters)
    columns = (options["temperature"], *(options.get(name) for name in ("top_k", "top_p", "min_p")))
    torch.library.opcheck(torch.ops.rlkernel.sample.default, (rand(0, 4, 40), *keys(4), *columns, 2))


def test_compiles() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ops.sample, fullgraph=True, backend="aot_eager")
    for filters in (FILTERS["none"], FILTERS["all"]):
        logits, options = rand(0, 6, 40), settings_of(6, filters)
        ours = ops.sample(logits, *keys(6), return_kept=True, **options)
        for a, b in zip(compiled(logits, *keys(6), return_kept=True, **options), ours, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_bitwise(a, b, "compiled against eager")


def test_no_gradient_and_empty_batch() -> None:
    logits = rand(0, 2, 9).requires_grad_()
    assert not ops.sample(logits, *keys(2), temperature=torch.ones(2)).logp.requires_grad
    none = torch.empty(0, dtype=torch.int64)
    out = ops.sample(torch.empty(0, 9), none, none, temperature=torch.empty(0), top_p=torch.empty(0), return_kept=True)
    assert out.tokens.shape == (0,) and out.logp.shape == (0,) and out.kept.shape == (0, 1)


# ---- bad input


def _with(value: float) -> Tensor:
    logits = rand(0, 3, 40)
    logits[1, 5] = value
    return logits


@pytest.mark.parametrize(
    "options,message",
    (
        ({"logits": rand(0, 40)}, r"logits is \(40,\); expected \[B, V\]"),
        ({"logits": torch.empty(3, 0)}, "vocabulary of 0"),
        ({"logits": _with(math.nan)}, "row 1 of logits"),
        ({"logits": _with(math.inf)}, "row 1 of logits"),
        ({"logits": torch.full((3, 40), -math.inf)}, "row 0 of logits"),
        ({"temperature": torch.tensor([1.0, -0.5, 1.0])}, r"temperature\[1\] is -0.5; expected >= 0"),
        ({"temperature": torch.tensor([1.0, 1.0, math.nan])}, r"temperature\[2\] is nan; expected >= 0"),
        ({"temperature": torch.ones(2)}, r"temperature is \(2,\).*expected \[B=3\] torch.float32"),
        ({"temperature": torch.tensor([1.0, 1.0, 1e-42])}, "row 2 of logits, divided by its temperature"),
        ({"seeds": torch.ones(3)}, r"seeds is \(3,\) torch.float32; expected \[B=3\] torch.int64"),
        ({"positions": torch.ones(4, dtype=torch.int64)}, r"positions is \(4,\)"),
        ({"top_k": torch.tensor([1, 2, -1], dtype=torch.int32)}, r"top_k\[2\] is -1; expected >= 0"),
        ({"top_k": torch.tensor([1, 2, 3])}, "top_k is .*int64; expected .*int32"),
        ({"top_p": torch.tensor([0.0, 1.0, 1.0])}, r"top_p\[0\] is 0.0; expected in \(0, 1\]"),
        ({"top_p": torch.tensor([1.0, 1.5, 1.0])}, r"top_p\[1\] is 1.5"),
        ({"top_p": torch.tensor([1.0, math.nan, 1.0])}, r"top_p\[1\] is nan"),
        ({"min_p": torch.tensor([0.0, 0.0, 1.25])}, r"min_p\[2\] is 1.25; expected in \[0, 1\]"),
    ),
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    seed, position = keys(3)
    arguments = {
        "logits": rand(0, 3, 40),
        "seeds": seed,
        "positions": position,
        "temperature": torch.ones(3),
        **options,
    }
    with pytest.raises(ValueError, match=message):
        ops.sample(**arguments)
