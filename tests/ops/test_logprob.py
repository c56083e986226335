"""logprob: accuracy, batch invariance, kept sets and temperatures, special rows."""

from __future__ import annotations

import math
from itertools import pairwise
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
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise

properties = settings(max_examples=20, deadline=None, derandomize=True)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


def ids(t: int, v: int, seed: int = 0) -> Tensor:
    return torch.randint(0, v, (t,), generator=torch.Generator().manual_seed(seed))


def some_kept(t: int, v: int, targets: Tensor | None, seed: int = 0) -> Tensor:
    """Bit mask that keeps about two thirds of each row, and the targets where given."""
    mask = torch.rand(t, v, generator=torch.Generator().manual_seed(seed)) < 0.67
    if targets is not None:
        mask[torch.arange(t), targets] = True
    return ops.pack_kept(mask)


def temperatures(t: int) -> Tensor:
    return torch.linspace(0.4, 1.9, t)


def exact(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, kept: Tensor | None = None) -> Any:
    """logp, entropy and lse by their definition, in fp64."""
    t = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    z = logits.double() / t
    if kept is not None:
        z = z.masked_fill(~ops.unpack_kept(kept, z.shape[1]), -math.inf)
    logp = torch.log_softmax(z, -1)
    plogp = logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)
    return logp.gather(1, targets[:, None])[:, 0], -plogp.sum(-1), torch.logsumexp(z, -1)


# ---- right


@by_dtype
@pytest.mark.parametrize("case", ("plain", "temperature", "temperatures", "kept", "both"))
@pytest.mark.parametrize("use", ("logp", "entropy", "logp and entropy"))
def test_accuracy(dtype: torch.dtype, case: str, use: str) -> None:
    t, v = 65, 300
    logits, y = 3 * rand(0, t, v, dtype=dtype), ids(t, v)
    options: dict[str, Any] = {}
    if case in ("temperature",):
        options["temperature"] = 0.7
    if case in ("temperatures", "both"):
        options["temperature"] = temperatures(t)
    if case in ("kept", "both"):
        options["kept"] = some_kept(t, v, y)

    def pick(out: Any) -> tuple[Tensor, ...]:
        return out[:2] if use == "logp and entropy" else (out[0 if use == "logp" else 1],)

    assert_right(
        lambda x: pick(ops.logprob(x, y, **options)),
        lambda x: pick(exact(x, y, **options)),
        (logits,),
        (rand(1, t), rand(2, t))[: 1 + (use == "logp and entropy")],
        f"{use}, {case}, {dtype}",
    )
    lse = ops.logprob(logits, y, **options).lse
    assert torch.allclose(lse.double(), exact(logits, y, **options)[2], rtol=2e-6)


@pytest.mark.parametrize("scale", (0.01, 1.0, 30.0))
def test_large_vocabulary(scale: float) -> None:
    logits, y = scale * rand(0, 3, 50_000), ids(3, 50_000)
    assert_right(lambda x: ops.logprob(x, y)[:2], lambda x: exact(x, y)[:2], (logits,), (rand(1, 3), rand(2, 3)), "50k")


@by_dtype
@pytest.mark.parametrize("v", (1, 31, 128, 129, 420, 5000))
@pytest.mark.parametrize("with_kept", (False, True), ids=("all", "kept"))
def test_reference_equals_cpp(dtype: torch.dtype, v: int, with_kept: bool) -> None:
    t = 7
    logits, y = 4 * rand(0, t, v, dtype=dtype), ids(t, v)
    kept = some_kept(t, v, None) if with_kept else None
    for temperature in (1.0, 0.7, temperatures(t)):

        def run(temperature: float | Tensor = temperature) -> list[Tensor]:
            grads = []
            for used in (slice(0, 1), slice(1, 2), slice(0, 2)):
                x = logits.clone().requires_grad_()
                out = ops.logprob(x, y, temperature=temperature, kept=kept)
                torch.autograd.backward(out[:2][used], (rand(1, t), rand(2, t))[used])
                grads.append(x.grad)
            return [*out, *grads]

        assert_reference_equal(run, f"logprob {dtype} V={v}")


def test_a_tile_is_summed_in_integer_units() -> None:
    # exp(-ln 2^24) is half a unit of 2^-23 and rounds to even, 0: the tile sums to exactly 1, and logp is exactly 0.
    logits = torch.full((1, 128), -24 * math.log(2) - 1e-3)
    logits[0, 5] = 0.0
    assert float(ops.logprob(logits, torch.tensor([5])).logp) == 0.0


# ---- invariant


def results(logits: Tensor, y: Tensor, temperature: Tensor, kept: Tensor | None) -> list[Tensor]:
    """logp, entropy and the gradient of the logits, under upstream gradients that depend on the row's target."""
    up = (y % 5 - 2).float(), (y % 3).float()
    return forward_backward(lambda x: ops.logprob(x, y, temperature=temperature, kept=kept)[:2], (logits,), up)


@properties
@given(st.integers(2, 30), st.integers(1, 400), st.booleans(), dtypes, seeds)
def test_row_alone_any_row_any_order(t: int, v: int, with_kept: bool, dtype: torch.dtype, seed: int) -> None:
    logits, y, temperature = 3 * rand(seed, t, v, dtype=dtype), ids(t, v, seed), temperatures(t)
    kept = some_kept(t, v, None, seed) if with_kept else None
    pick = lambda rows: [None if x is None else x[rows] for x in (logits, y, temperature, kept)]
    whole = results(logits, y, temperature, kept)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(seed))
    for rows in (order, order[:1], order[: t // 2]):
        for a, b in zip(results(*pick(rows)), whole, strict=True):
            assert_bitwise(a, b[rows], f"rows {rows.tolist()} of {t}")


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    logits, y = 3 * rand(0, 90, 300, dtype=dtype), ids(90, 300)
    run = lambda: results(logits, y, temperatures(90), some_kept(90, 300, None))
    for a, b in zip(with_threads(1, run), with_threads(2, run), strict=True):
        assert_bitwise(a, b, "1 against 2 threads")


def check_padded_vocabulary(t: int, v: int, more: int, seed: int) -> None:
    logits, y = 3 * rand(seed, t, v), ids(t, v, seed)
    wide = torch.cat((logits, rand(seed + 1, t, more)), -1)
    kept = ops.pack_kept(torch.arange(v + more).expand(t, -1) < v)
    for a, b in zip(ops.logprob(wide, y, kept=kept), ops.logprob(logits, y), strict=True):
        assert_bitwise(a, b, f"{v} entries and {more} dropped ones")


@properties
@given(st.integers(1, 9), st.integers(1, 400), st.integers(1, 200), seeds)
def test_dropped_entries_at_the_end_are_free(t: int, v: int, more: int, seed: int) -> None:
    check_padded_vocabulary(t, v, more, seed)


def test_dropped_entries_control() -> None:
    check_padded_vocabulary(64, 1000, 72, 0)
    with ops.stock():
        assert differs(lambda: check_padded_vocabulary(64, 1000, 72, 0))


@properties
@given(st.integers(1, 40), seeds)
def test_order_inside_a_tile_and_over_tiles_is_free(tiles: int, seed: int) -> None:
    logits = 3 * rand(seed, 6, tiles * 128)
    generator = torch.Generator().manual_seed(seed)
    order, over = torch.randperm(128, generator=generator), torch.randperm(tiles, generator=generator)
    shuffled = logits.unflatten(1, (tiles, 128))[:, over][:, :, order].flatten(1)
    a, b = (ops.logprob(x, torch.zeros(6, dtype=torch.int64)) for x in (logits, shuffled))
    assert_bitwise(a.lse, b.lse, "lse")
    assert_bitwise(a.entropy, b.entropy, "entropy")


def test_keeping_everything_and_temperature_one_change_nothing() -> None:
    logits, y = 3 * rand(0, 8, 200), ids(8, 200)
    full = ops.pack_kept(torch.ones(8, 200, dtype=torch.bool))
    assert bool((ops.unpack_kept(full | -(2**31), 200)).all())
    plain = results(logits, y, torch.ones(8), None)
    for options in ({"kept": full}, {"temperature": 1.0}, {"kept": torch.full_like(full, -1)}):
        out = ops.logprob(logits, y, **options)
        assert_bitwise(out.logp, plain[0], f"{options}")
        assert_bitwise(out.entropy, plain[1], f"{options}")


@pytest.mark.parametrize(
    "value,shown",
    (
        (1e-45, r"0, or so small that 1/T is not finite in fp32"),
        (0.0, r"0, or so small that 1/T is not finite in fp32"),
        (-2.0, r"-2\.0"),
        (math.inf, r"inf"),
    ),
)
def test_a_bad_temperature_among_others(value: float, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"logprob: temperature\[1\] is {shown}; it must be positive and finite"):
        ops.logprob(torch.randn(2, 8), torch.tensor([0, 1]), temperature=torch.tensor([1.0, value]))


def test_a_number_and_a_tensor_of_it_are_one_temperature() -> None:
    logits, y = 3 * rand(0, 8, 200), ids(8, 200)
    for a, b in zip(
        ops.logprob(logits, y, temperature=0.7),
        ops.logprob(logits, y, temperature=torch.full((8,), 0.7)),
        strict=True,
    ):
        assert_bitwise(a, b, "0.7")


# ---- special rows


def test_dropped_target() -> None:
    logits, y = rand(0, 3, 40), torch.tensor([3, 4, 5])
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, 4] = False
    kept = ops.pack_kept(mask)
    x = logits.clone().requires_grad_()
    out = ops.logprob(x, y, kept=kept)
    assert out.logp[1].item() == -math.inf and bool(out.logp[[0, 2]].isfinite().all())
    assert bool(out.entropy.isfinite().all()) and bool(out.lse.isfinite().all())
    torch.autograd.backward((out.logp, out.entropy), (torch.ones(3), torch.ones(3)))
    assert not x.grad[1].any() and bool(x.grad[0].any()) and bool(x.grad.isfinite().all())


def test_a_row_that_keeps_nothing() -> None:
    x = rand(0, 2, 40).requires_grad_()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0] = False
    out = ops.logprob(x, torch.tensor([1, 1]), kept=ops.pack_kept(mask))
    assert [o[0].item() for o in out] == [-math.inf, 0.0, -math.inf]
    torch.autograd.backward((out.logp, out.entropy), (torch.ones(2), torch.ones(2)))
    assert not x.grad[0].any() and bool(x.grad.isfinite().all())


def test_logits_of_minus_infinity_are_probabilities_of_zero() -> None:
    logits, y = rand(0, 2, 300), torch.tensor([0, 7])
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, [0, 7]], mask[0, 128:256] = True, False
    cut = logits.masked_fill(~mask, -math.inf).requires_grad_()
    a, b = ops.logprob(cut, y), ops.logprob(logits, y, kept=ops.pack_kept(mask))
    for x, z in zip(a, b, strict=True):
        assert_bitwise(x.detach(), z, "masked by -inf against dropped")
    torch.autograd.backward((a.logp, a.entropy), (torch.ones(2), torch.ones(2)))
    assert bool(cut.grad.isfinite().all())


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    logits, y = rand(0, 4, 200), ids(4, 200)
    clean = ops.logprob(logits, y)
    logits[2, 150] = value
    out = ops.logprob(logits, y)
    for a, b in zip(out, clean, strict=True):
        assert bool(a[2].isnan())
        assert_bitwise(a[[0, 1, 3]], b[[0, 1, 3]], "other rows")
    mask = torch.ones(4, 200, dtype=torch.bool)
    mask[2, 150] = False
    assert bool(ops.logprob(logits, y, kept=ops.pack_kept(mask)).logp[2].isfinite()), "dropped: it does not count"


def test_extreme_logits() -> None:
    out = ops.logprob(torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]]), torch.tensor([0, 1]))
    assert out.logp[0] == 0.0 and abs(float(out.logp[1]) + math.log(3)) < 1e-6
    assert abs(float(out.entropy[1]) - math.log(3)) < 1e-6
    far = torch.full((1, 256), -3e38)  # the second tile is infinitely far from the first
    far[0, :128] = 3e38
    out = ops.logprob(far, torch.tensor([0]))
    assert abs(float(out.logp) + math.log(128)) < 1e-6 and abs(float(out.entropy) - math.log(128)) < 1e-6


# ---- torch's machinery


def test_opcheck() -> None:
    op, grad = torch.ops.rlkernel.logprob.default, torch.ops.rlkernel.logprob_dgrad.default
    y, kept = ids(5, 70), some_kept(5, 70, None)
    torch.library.opcheck(op, (rand(0, 5, 70).requires_grad_(), y, None, None))
    torch.library.opcheck(op, (rand(0, 5, 70, dtype=torch.bfloat16).requires_grad_(), y, temperatures(5), kept))
    rows = op(rand(0, 5, 70), y, temperatures(5), kept)
    torch.library.opcheck(grad, (rand(0, 5, 70), y, temperatures(5), kept, rows[3], rows[1], rand(1, 5), None))
    torch.library.opcheck(grad, (rand(0, 5, 70), y, None, None, rows[3], rows[1], None, rand(1, 5)))


def test_compiles() -> None:
    y, kept, warm = ids(5, 70), some_kept(5, 70, None), temperatures(5)
    for options in ({}, {"temperature": 0.7}, {"temperature": warm, "kept": kept}):
        op = lambda x, options=options: ops.logprob(x, y, **options)[:2]
        assert_compiles(op, (rand(0, 5, 70),), (rand(1, 5), rand(2, 5)))
    assert_compiles(lambda x: ops.logprob(x, y).logp, (rand(0, 5, 70),), (rand(1, 5),))


def test_lse_is_not_differentiable_and_nothing_wanted_costs_nothing() -> None:
    x = rand(0, 4, 9).requires_grad_()
    out = ops.logprob(x, ids(4, 9))
    assert out.logp.requires_grad and out.entropy.requires_grad and not out.lse.requires_grad
    with torch.no_grad():
        assert not ops.logprob(x, ids(4, 9)).logp.requires_grad


def test_empty_batch_and_views() -> None:
    out = ops.logprob(torch.empty(0, 9), torch.empty(0, dtype=torch.int64))
    assert [tuple(o.shape) for o in out] == [(0,)] * 3
    x, y = rand(0, 9, 12), ids(12, 9)
    assert_bitwise(ops.logprob(x.t(), y).logp, ops.logprob(x.t().contiguous(), y).logp, "transposed logits")


# ---- kept sets


@properties
@given(st.integers(0, 6), st.integers(1, 140), seeds)
def test_kept_masks_round_trip(t: int, v: int, seed: int) -> None:
    mask = torch.rand(t, v, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept = ops.pack_kept(mask)
    assert kept.dtype == torch.int32 and kept.shape == (t, (v + 31) // 32)
    assert torch.equal(ops.unpack_kept(kept, v), mask)
    flat, offsets = ops.kept_to_ids(kept, v)
    assert [flat[a:b].tolist() for a, b in pairwise(offsets)] == [row.nonzero()[:, 0].tolist() for row in mask]
    assert_bitwise(ops.ids_to_kept(flat, offsets, v), kept, "ids back to a mask")


def test_kept_bit_order() -> None:
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, [0, 5, 31, 32]] = True
    assert ops.pack_kept(mask).tolist() == [[1 + 32 - 2**31, 1]]


# ---- bad input


@pytest.mark.parametrize(
    "options,error,message",
    (
        ({"logits": rand(0, 3)}, ValueError, r"logits is \(3,\); expected \[T, V\]"),
        ({"logits": torch.empty(3, 0)}, ValueError, "vocabulary of 0"),
        (
            {"logits": torch.empty(3, 2**23, device="meta")},
            ValueError,
            "vocabulary of 8388608 entries; expected 1 <= V",
        ),
        ({"targets": ids(4, 40)}, ValueError, r"targets is \(4,\).*expected \[T=3\] int64"),
        ({"targets": ids(3, 40).int()}, ValueError, "targets is .* torch.int32; expected"),
        ({"targets": torch.tensor([0, 40, 1])}, IndexError, r"targets\[1\] is 40; expected 0 <= targets < 40"),
        ({"targets": torch.tensor([0, 1, -100])}, IndexError, r"targets\[2\] is -100"),
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be positive"),
        ({"temperature": -1.0}, ValueError, "temperature=-1.0 must be positive"),
        ({"temperature": math.nan}, ValueError, "temperature=nan must be positive"),
        (
            {"temperature": torch.tensor([1.0, 0.0, 1.0])},
            ValueError,
            r"temperature\[1\] is 0, or .* positive and finite",
        ),
        ({"temperature": torch.tensor([1.0, 1.0, math.inf])}, ValueError, r"temperature\[2\] is inf; .* finite"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature is \(2,\).*\[T=3\] float32"),
        ({"temperature": torch.ones(3).double()}, ValueError, "temperature is .*float64"),
        (
            {"kept": torch.zeros(3, 1, dtype=torch.int32)},
            ValueError,
            r"kept is \(3, 1\).*\[T=3, ceil\(V/32\)=2\] int32",
        ),
        ({"kept": torch.ones(3, 40, dtype=torch.bool)}, ValueError, "kept is .* torch.bool; .*pack_kept"),
    ),
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": rand(0, 3, 40), "targets": ids(3, 40), **options}
    with pytest.raises(error, match=message):
        ops.logprob(arguments.pop("logits"), arguments.pop("targets"), **arguments)


@pytest.mark.parametrize(
    "call,message",
    (
        (lambda: ops.pack_kept(torch.ones(3, 4)), "pack_kept: mask is"),
        (lambda: ops.unpack_kept(torch.zeros(3, 2, dtype=torch.int32), 32), "unpack_kept: kept is"),
        (lambda: ops.ids_to_kept(torch.tensor([1]), torch.tensor([0, 2]), 9), "offsets must be"),
        (lambda: ops.ids_to_kept(torch.tensor([9]), torch.tensor([0, 1]), 9), "ids range from 9 to 9"),
    ),
)
def test_bad_kept(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(TypeError, match=r"logprob: logits is torch.float64; expected float32, .* cast it"):
        ops.logprob(rand(0, 2, 8).double(), ids(2, 8))
