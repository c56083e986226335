"""policy_loss: accurate against fp64 autograd in every form, invariant to packing, exact for masked tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_reference_equal, differs, rand, with_threads
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.kernels.policy_loss import KL_TYPES, LOSS_TYPES

properties = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)
LEVELS = ("token", "sequence")
NORMALIZED_BY_TOKENS = ("bnpo", "dapo", "cispo")


class Batch:
    """Random packed log-probabilities of sequences of the given lengths, seeded per sequence."""

    def __init__(self, sizes: list[int], seed: int = 0, masked: bool = True, spread: float = 0.3) -> None:
        self.sizes, self.seeds = sizes, [seed * 1000 + i for i in range(len(sizes))]
        self.masked, self.spread = masked, spread
        self.fill()

    def fill(self) -> None:
        rows = [self.sequence(n, seed) for n, seed in zip(self.sizes, self.seeds, strict=True)]
        joined = [torch.cat(column) for column in zip(*rows, strict=True)]
        self.logp, self.old_logp, self.ref_logp, self.rollout_logp, self.entropy, self.per_token, mask = joined
        self.mask = mask > -0.8 if self.masked else None
        self.advantages = torch.stack([rand(seed + 500, 1)[0] for seed in self.seeds])
        self.cu_seqlens = ops.pack([row[0] for row in rows]).cu_seqlens

    def sequence(self, n: int, seed: int) -> list[Tensor]:
        noise = rand(seed, 7, n)
        logp = -noise[0].abs()
        old = logp + self.spread * noise[1]
        return [logp, old, logp + self.spread * noise[2], old + 0.1 * noise[3], noise[4].abs(), noise[5], noise[6]]

    def reordered(self, order: list[int]) -> Batch:
        other = object.__new__(Batch)
        other.sizes, other.seeds = [self.sizes[i] for i in order], [self.seeds[i] for i in order]
        other.masked, other.spread = self.masked, self.spread
        other.fill()
        return other

    def slices(self) -> list[slice]:
        borders = self.cu_seqlens.tolist()
        return [slice(a, b) for a, b in pairwise(borders)]

    def counted(self) -> int:
        return len(self.logp) if self.mask is None else int(self.mask.sum())

    def run(self, upstream: float = 1.0, per_token: bool = False, **options: Any) -> dict[str, Tensor]:
        """Loss, gradients of logp and entropy, and statistics of `ops.policy_loss` with every optional input."""
        logp, entropy = self.logp.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        inputs = {
            "mask": self.mask,
            "ref_logp": self.ref_logp,
            "entropy": entropy,
            "rollout_logp": self.rollout_logp,
            "max_completion_length": 50,
        }
        advantages = self.per_token if per_token else self.advantages
        out = ops.policy_loss(logp, self.old_logp, advantages, self.cu_seqlens, **{**inputs, **options})
        (out.loss * upstream).backward()
        dentropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
        return {"loss": out.loss.detach(), "dlogp": logp.grad, "dentropy": dentropy, **out.stats}


def truth(
    batch: Batch,
    *,
    loss_type: str = "grpo",
    ratio_level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    entropy_coef: float = 0.0,
    tis_cap: float | None = None,
    per_token: bool = False,
    normalizer: float | None = None,
) -> dict[str, Tensor]:
    """The published formulas, one sequence at a time, in fp64 with autograd."""
    logp, entropy = (x.double().requires_grad_() for x in (batch.logp, batch.entropy))
    total = torch.zeros((), dtype=torch.float64)
    seen: dict[str, list[Tensor]] = {}
    tokens = 0
    for i, where in enumerate(batch.slices()):
        on = torch.ones(batch.sizes[i], dtype=torch.bool) if batch.mask is None else batch.mask[where]
        n = int(on.sum())
        tokens += n
        if n == 0:
            continue
        lp, h = logp[where][on], entropy[where][on]
        old, ref, rollout = (x[where][on].double() for x in (batch.old_logp, batch.ref_logp, batch.rollout_logp))
        a = batch.per_token[where][on].double() if per_token else batch.advantages[i].double().expand(n)
        delta = lp - old
        r = (delta.mean().expand(n) if ratio_level == "sequence" or loss_type == "gspo" else delta).exp()
        clipped = r.clamp(1 - clip_low, 1 + clip_high)
        if loss_type == "cispo":
            term = -clipped.detach() * a * lp
        elif loss_type == "reinforce":
            term = -a * lp
        else:
            # TRL's two-sided form: the unclipped branch is bounded by delta = clip_dual.
            bounded = r if clip_dual is None else r.clamp(max=clip_dual)
            term = -torch.min(bounded * a, clipped * a)
        w = (old - rollout).exp()
        if tis_cap is not None:
            term = term * w.clamp(max=tis_cap)
        ratio_ref = (ref - lp).exp()
        kl = {"k1": lp - ref, "k2": (lp - ref) ** 2 / 2, "k3": ratio_ref - (ref - lp) - 1}[kl_type]
        term = term + kl_coef * kl - entropy_coef * h
        total = total + (term.mean() if loss_type in ("grpo", "gspo") else term.sum())
        k3 = delta.exp() - 1 - delta
        drift = (lp - rollout).abs()
        named = {"ratio": r, "k1": -delta, "k3": k3, "kl": kl, "h": h, "w": w, "drift": drift}
        for name, x in named.items():
            seen.setdefault(name, []).append(x.detach())
    count = len(batch.sizes)
    divisor = {"dr_grpo": count * 50}.get(loss_type, tokens if loss_type in NORMALIZED_BY_TOKENS else count)
    loss = total / (normalizer or max(1, divisor))
    if tokens:
        loss.backward()
    zero = torch.zeros_like(logp)
    out = {
        "loss": loss.detach(),
        "dlogp": zero if logp.grad is None else logp.grad,
        "dentropy": zero if entropy.grad is None else entropy.grad,
    }
    if tokens:
        s = {name: torch.cat(x) for name, x in seen.items()}
        out |= {"ratio_mean": s["ratio"].mean(), "ratio_min": s["ratio"].min(), "ratio_max": s["ratio"].max()}
        out |= {"kl_old_k1": s["k1"].mean(), "kl_old_k3": s["k3"].mean(), "kl_ref": s["kl"].mean()}
        out |= {"entropy": s["h"].mean(), "drift_mean": s["drift"].mean(), "drift_max": s["drift"].max()}
        if tis_cap is not None:
            out |= {"tis_mean": s["w"].clamp(max=tis_cap).mean()}
            out |= {"tis_fraction": (s["w"] > tis_cap).double().mean()}
    return out


def assert_matches(batch: Batch, **options: Any) -> None:
    ours, exact = batch.run(**options), truth(batch, **options)
    with ops.stock():
        base = batch.run(**options)
    for name, value in exact.items():
        assert_accurate(ours[name], value, base[name], f"{name} of {options}", dtype=torch.float32)
    assert int(ours["tokens"]) == batch.counted()
    for name in ("tokens", "sequences", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"):
        assert_bitwise(ours[name], base[name], f"{name} of {options}")


# ---- right


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_accuracy(loss_type: str, ratio_level: str) -> None:
    batch = Batch([7, 0, 30, 1, 12], seed=1)
    form = {"loss_type": loss_type, "ratio_level": ratio_level}
    dual = {} if loss_type in ("cispo", "reinforce") else {"clip_dual": 1.6}
    assert_matches(batch, **form)
    for kl_type in KL_TYPES:
        assert_matches(batch, **form, clip_high=0.28, kl_coef=0.1, kl_type=kl_type)
    extras = {"kl_coef": 0.05, "entropy_coef": 0.01, "tis_cap": 1.05, "clip_low": 0.1, "clip_high": 0.3}
    assert_matches(batch, **form, **extras, **dual, per_token=True)
    assert_matches(batch, **form, **extras, normalizer=37.0)
    assert_matches(Batch([4, 9], seed=2, masked=False, spread=1.0), **form, **dual, clip_low=math.inf)


@pytest.mark.parametrize("ratio_level", LEVELS)
def test_accuracy_across_segments(ratio_level: str) -> None:
    batch = Batch([1023, 1024, 1025, 2500], seed=3, spread=0.1)
    assert_matches(batch, loss_type="dapo", ratio_level=ratio_level, kl_coef=0.1, entropy_coef=0.1)
    assert_matches(batch, loss_type="grpo", ratio_level=ratio_level, tis_cap=1.1)


def test_values_by_hand() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5, -1.5])
    old = logp - torch.tensor([0.5, 0.0, -0.5, 1.0])
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    e = math.e
    a = torch.tensor([2.0, -1.0])

    def loss(**options: Any) -> float:
        return float(ops.policy_loss(logp, old, a, cu, **options).loss)

    # ratios e^0.5 (clipped to 1.2), 1 | e^-0.5 (clipped to 0.8), e (unclipped: A < 0)
    assert loss() == pytest.approx(((-2.4 - 2.0) / 2 + (0.8 + e) / 2) / 2)
    assert loss(clip_high=0.3) == pytest.approx(((-2.6 - 2.0) / 2 + (0.8 + e) / 2) / 2)
    assert loss(clip_dual=2.0) == pytest.approx(((-2.4 - 2.0) / 2 + (0.8 + 2.0) / 2) / 2)
    assert loss(loss_type="bnpo") == pytest.approx((-2.4 - 2.0 + 0.8 + e) / 4)
    assert loss(loss_type="dapo", normalizer=8) == pytest.approx((-2.4 - 2.0 + 0.8 + e) / 8)
    assert loss(loss_type="dr_grpo", max_completion_length=10) == pytest.approx((-2.4 - 2.0 + 0.8 + e) / 20)
    assert loss(loss_type="reinforce") == pytest.approx((-2 * -3.0 + -2.0) / 2)
    assert loss(loss_type="gspo") == pytest.approx((-2.4 + e**0.25) / 2)
    weights = (1.2, 1.0, 0.8, 1.2)
    terms = [-w * x * float(lp) for w, x, lp in zip(weights, (2, 2, -1, -1), logp, strict=True)]
    assert loss(loss_type="cispo") == pytest.approx(sum(terms) / 4)
    stats = ops.policy_loss(logp, old, a, cu, clip_dual=2.0, rollout_logp=old + 0.25, tis_cap=0.5).stats
    assert float(stats["clip_fraction_high"]) == float(stats["clip_fraction_low"]) == 0.25
    assert float(stats["clip_fraction_dual"]) == 0.25
    assert float(stats["tis_mean"]) == 0.5 and float(stats["tis_fraction"]) == 1.0
    assert float(stats["ratio_max"]) == pytest.approx(e) and float(stats["drift_max"]) == pytest.approx(0.75)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_gradient_is_the_policy_gradient(loss_type: str) -> None:
    """With old_logp = logp every ratio is exactly 1, so the gradient of every form is -A times its weight."""
    batch = Batch([5, 9, 2], seed=4, masked=False)
    logp = batch.logp.clone().requires_grad_()
    out = ops.policy_loss(
        logp, None, batch.advantages, batch.cu_seqlens, loss_type=loss_type, max_completion_length=9, normalizer=1
    )
    out.loss.backward()
    assert float(out.stats["ratio_min"]) == float(out.stats["ratio_max"]) == 1.0
    assert float(out.stats["kl_old_k3"]) == 0.0 == float(out.stats["clip_fraction_high"])
    for i, where in enumerate(batch.slices()):
        share = batch.sizes[i] if loss_type in ("grpo", "gspo") else 1
        assert torch.allclose(logp.grad[where], -batch.advantages[i].expand(batch.sizes[i]) / share, rtol=1e-6)


def test_small_kl_is_not_lost_to_cancellation() -> None:
    d = torch.tensor([1e-4, -3e-4, 1e-3])
    logp = torch.full((3,), -1.0)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    step = ((logp - d) - logp).double()
    stats = ops.policy_loss(logp, logp - d, torch.zeros(1), cu, ref_logp=logp - d).stats
    assert float(stats["kl_ref"]) == pytest.approx(float((torch.expm1(step) - step).mean()), rel=1e-5)
    assert float(stats["kl_old_k3"]) == pytest.approx(float((torch.expm1(-step) + step).mean()), rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_reference_equals_cpp(loss_type: str, ratio_level: str) -> None:
    batch = Batch([17, 0, 1030, 2], seed=5)
    dual = {} if loss_type in ("cispo", "reinforce") else {"clip_dual": 1.4}
    for kl_type in KL_TYPES:
        options = {"kl_type": kl_type, "kl_coef": 0.1, "entropy_coef": 0.02, "tis_cap": 1.1, **dual}
        form = {"loss_type": loss_type, "ratio_level": ratio_level}
        assert_reference_equal(
            lambda form=form, options=options: list(batch.run(**form, **options).values()), str(form)
        )
    assert_reference_equal(lambda: list(batch.run(loss_type=loss_type, per_token=True).values()), "plain")


# ---- invariant


def check_position(batch: Batch, order: list[int], **options: Any) -> None:
    """With a fixed normalizer, gradients of a sequence depend on neither its position nor the other sequences."""
    whole = batch.run(normalizer=64.0, **options)
    other = batch.reordered(order)
    moved = other.run(normalizer=64.0, **options)
    here, there = batch.slices(), other.slices()
    for place, i in enumerate(order):
        for name in ("dlogp", "dentropy"):
            assert_bitwise(moved[name][there[place]], whole[name][here[i]], f"{name} of sequence {i} at {place}")


@properties
@given(lengths, st.data(), st.sampled_from(LOSS_TYPES), st.sampled_from(LEVELS), seeds)
def test_packing_order_is_free(sizes: list[int], data: Any, loss_type: str, ratio_level: str, seed: int) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    keep = data.draw(st.integers(1, len(sizes)))
    options = {"loss_type": loss_type, "ratio_level": ratio_level, "kl_coef": 0.1, "entropy_coef": 0.1, "tis_cap": 1.1}
    check_position(Batch(sizes, seed), order[:keep], **options)


def check_loss_alone(sizes: list[int], which: int, seed: int, **options: Any) -> None:
    """The loss of one sequence alone equals the loss of a batch in which only that sequence counts."""
    batch = Batch(sizes, seed)
    alone = batch.reordered([which]).run(normalizer=7.0, **options)
    where = batch.slices()[which]
    only = torch.zeros(len(batch.logp), dtype=torch.bool)
    only[where] = batch.mask[where]
    batch.mask = only
    assert_bitwise(batch.run(normalizer=7.0, **options)["loss"], alone["loss"], f"loss of sequence {which}")


@properties
@given(lengths, st.integers(0, 5), st.sampled_from(LOSS_TYPES), st.sampled_from(LEVELS), seeds)
def test_loss_of_a_sequence_is_its_own(sizes: list[int], which: int, loss_type: str, level: str, seed: int) -> None:
    check_loss_alone(sizes, which % len(sizes), seed, loss_type=loss_type, ratio_level=level)


def test_loss_control() -> None:
    failed = []
    for which, seed in ((1, 6), (2, 7), (3, 8), (1, 9)):
        run = lambda which=which, seed=seed: check_loss_alone([611, 1900, 307, 1501], which, seed, loss_type="dapo")
        run()
        with ops.stock():
            failed.append(differs(run))
    assert any(failed)


def full_denominator(batch: Batch, loss_type: str) -> float:
    """The `normalizer` under which micro-batches add up to the batch."""
    if loss_type == "dr_grpo":
        return 50.0 * len(batch.sizes)
    return float(max(1, batch.counted()) if loss_type in NORMALIZED_BY_TOKENS else len(batch.sizes))


@properties
@given(lengths, st.integers(1, 5), st.sampled_from(LOSS_TYPES), st.sampled_from(LEVELS), seeds)
def test_micro_batches_add_up(sizes: list[int], cut: int, loss_type: str, level: str, seed: int) -> None:
    batch = Batch(sizes, seed)
    options = {"loss_type": loss_type, "ratio_level": level, "kl_coef": 0.1, "entropy_coef": 0.1}
    whole = batch.run(**options)
    indices = list(range(len(sizes)))
    parts = [batch.reordered(p) for p in (indices[: cut % len(sizes)], indices[cut % len(sizes) :]) if p]
    normalizer = torch.tensor(full_denominator(batch, loss_type))
    runs = [part.run(normalizer=normalizer, **options) for part in parts]
    assert_accurate(
        sum(r["loss"].double() for r in runs), truth(batch, **options)["loss"], whole["loss"], dtype=torch.float32
    )
    for name in ("dlogp", "dentropy"):
        assert_bitwise(torch.cat([r[name] for r in runs]), whole[name], f"{name} over micro-batches of {loss_type}")


def test_threads_are_free() -> None:
    batch = Batch([300, 1, 1100, 20, 7], seed=7)
    for level in LEVELS:
        run = lambda level=level: batch.run(ratio_level=level, kl_coef=0.1)
        one, two = with_threads(1, run), with_threads(2, run)
        for name in one:
            assert_bitwise(two[name], one[name], f"{name}, 1 against 2 threads")


# ---- masks


@properties
@given(lengths, st.sampled_from(LOSS_TYPES), st.sampled_from(LEVELS), seeds)
def test_masked_tokens_contribute_nothing(sizes: list[int], loss_type: str, level: str, seed: int) -> None:
    options = {"loss_type": loss_type, "ratio_level": level, "kl_coef": 0.1, "entropy_coef": 0.1, "tis_cap": 1.2}
    batch = Batch(sizes, seed)
    clean = batch.run(per_token=True, **options)
    junk = (math.nan, -math.inf, math.inf, 1e30)
    for i, x in enumerate(
        (batch.logp, batch.old_logp, batch.ref_logp, batch.rollout_logp, batch.entropy, batch.per_token)
    ):
        x[~batch.mask] = junk[i % len(junk)]
    dirty = batch.run(per_token=True, **options)
    for name in clean:
        assert_bitwise(dirty[name], clean[name], f"{name} with junk under the mask")
    assert not dirty["dlogp"][~batch.mask].any() and not dirty["dentropy"][~batch.mask].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("sizes", ([4, 0, 3], [0], []))
def test_nothing_counted_is_zero(loss_type: str, sizes: list[int]) -> None:
    batch = Batch(sizes or [1], seed=8)
    if not sizes:
        batch.cu_seqlens, batch.advantages = torch.zeros(1, dtype=torch.int32), torch.zeros(0)
        for name in ("logp", "old_logp", "ref_logp", "rollout_logp", "entropy", "per_token", "mask"):
            setattr(batch, name, getattr(batch, name)[:0])
    batch.mask = torch.zeros(len(batch.logp), dtype=torch.bool)
    batch.logp.fill_(math.nan)
    for normalizer in (None, 5.0, torch.tensor(0.0)):
        out = batch.run(loss_type=loss_type, tis_cap=1.0, kl_coef=0.1, entropy_coef=0.1, normalizer=normalizer)
        for name, value in out.items():
            assert not value.any(), f"{name} is {value}"


def test_all_ones_mask_equals_no_mask() -> None:
    batch = Batch([5, 40], seed=9, masked=False)
    plain = batch.run()
    batch.mask = torch.ones(45, dtype=torch.bool)
    for name, value in batch.run().items():
        assert_bitwise(value, plain[name], name)


def test_counted_nan_is_not_hidden() -> None:
    batch = Batch([5, 4], seed=10, masked=False)
    batch.logp[2] = math.nan
    out = batch.run()
    for name in ("loss", "ratio_min", "ratio_max", "ratio_mean", "drift_max"):
        assert math.isnan(out[name]), name
    assert bool(torch.isfinite(out["dlogp"][5:]).all())


# ---- gradients


CONSTANTS = ("old_logp", "advantages", "ref_logp", "rollout_logp", "normalizer")


def with_all_constants() -> tuple[dict[str, Any], Tensor]:
    """Arguments of a call with an entropy."""
    batch = Batch([6, 3], seed=11)
    logp, entropy = batch.logp.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    names = ("old_logp", "advantages", "cu_seqlens", "ref_logp", "rollout_logp")
    given = {"logp": logp, "entropy": entropy, **{name: getattr(batch, name) for name in names}}
    return {**given, "normalizer": torch.tensor(2.0), "kl_coef": 0.1, "tis_cap": 1.1}, entropy


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_ask_for_a_gradient_are_refused(name: str) -> None:
    """Their gradient would silently be missing; without grad mode the call is valid."""
    given, _ = with_all_constants()
    expected = ops.policy_loss(**given).loss
    given[name] = given[name].clone().requires_grad_()
    for backend in (False, True):
        with ops.stock(backend), pytest.raises(RuntimeError, match=rf"policy_loss: {name} requires a .*\.detach\(\)"):
            ops.policy_loss(**given)
    with torch.no_grad():
        assert_bitwise(ops.policy_loss(**given).loss, expected.detach(), "without gradients")


def test_constants_may_be_anything_under_compile() -> None:
    given, _ = with_all_constants()
    torch.compiler.reset()
    fn = torch.compile(lambda **given: ops.policy_loss(**given).loss, fullgraph=True, backend="aot_eager")
    expected = ops.policy_loss(**given).loss
    assert_bitwise(fn(**given), expected, "compiled")
    given["old_logp"] = given["old_logp"].clone().requires_grad_()
    with pytest.raises(Exception, match="policy_loss: old_logp requires a gradient"):
        fn(**given)
    with torch.no_grad():
        assert_bitwise(fn(**given), expected.detach(), "compiled, without gradients")


def test_entropy_and_statistics_get_no_gradient_and_upstream_scales() -> None:
    batch = Batch([6, 3], seed=11)
    given, entropy = with_all_constants()
    out = ops.policy_loss(**given)
    assert not any(value.requires_grad for value in out.stats.values())
    out.loss.backward()
    assert entropy.grad is None  # entropy_coef is 0, so the entropy's backward is skipped
    assert_bitwise(batch.run(upstream=4.0)["dlogp"], batch.run()["dlogp"] * 4.0, "scaled upstream gradient")


@pytest.mark.parametrize("upstream", (1.0, 4.0))
def test_a_graph_that_is_kept_gives_the_same_gradients_again(upstream: float) -> None:
    """Backward returns its buffer, scaled in place; a second pass must not see that."""
    batch = Batch([6, 3], seed=13)
    logp, entropy = batch.logp.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    out = ops.policy_loss(logp, batch.old_logp, batch.advantages, batch.cu_seqlens, entropy=entropy, entropy_coef=0.1)
    loss = out.loss * upstream
    first = torch.autograd.grad(loss, (logp, entropy), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    for retain in (True, False):
        again = torch.autograd.grad(loss, (logp, entropy), retain_graph=retain)
        for a, b in zip(again, kept, strict=True):
            assert_bitwise(a, b, "a later backward pass of the same graph")


@pytest.mark.parametrize("what", ("borders", "borders and advantages", "all"))
def test_compiles_with_dynamic_shapes(what: str) -> None:
    """Dynamo evaluates `in` to False if a length is symbolic."""
    torch.compiler.reset()
    run = lambda logp, old, advantages, cu: ops.policy_loss(logp, old, advantages, cu).loss
    fn = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True if what == "all" else None)
    for borders in ([0, 2, 5], [0, 1, 3, 7]):
        cu, tokens = torch.tensor(borders, dtype=torch.int32), borders[-1]
        for count in (len(borders) - 1, tokens)[: 1 if "and" in what else 2]:
            logp, advantages = (rand(i, n) for i, n in enumerate((tokens, count)))
            if what == "borders":
                torch._dynamo.maybe_mark_dynamic(cu, 0)
            elif what != "all":
                torch._dynamo.mark_dynamic(cu, 0)
                torch._dynamo.mark_dynamic(advantages, 0)
            x, y = (logp.clone().requires_grad_() for _ in range(2))
            found, expected = fn(x, logp - 0.1, advantages, cu), run(y, logp - 0.1, advantages, cu)
            assert_bitwise(found, expected, f"compiled, {what}")
            found.backward()
            expected.backward()
            assert_bitwise(x.grad, y.grad, f"compiled gradient, {what}")


def test_opcheck_and_compile() -> None:
    batch = Batch([6, 0, 3], seed=12)
    logp, entropy = batch.logp.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    op = torch.ops.rlkernel.policy_loss.default
    rest = (batch.old_logp, batch.advantages, batch.cu_seqlens)
    tail = ("grpo", False, 0.2, 0.2, None, 0.1, "k3", 0.1, 1.1, None)
    inputs = (batch.mask, batch.ref_logp, entropy, batch.rollout_logp, torch.tensor(3.0))
    torch.library.opcheck(op, (logp, *rest, *inputs, *tail))
    plain = ("gspo", True, 0.2, 0.2, 2.0, 0.0, "k3", 0.0, None, 3.0)
    torch.library.opcheck(op, (logp, *rest, None, None, entropy, None, None, *plain))
    gradients = torch.ones(9), torch.ones(9), torch.ones(()), torch.full((), 2.0)
    torch.library.opcheck(torch.ops.rlkernel.policy_loss_scale_.default, gradients)

    torch.compiler.reset()
    fn = torch.compile(ops.policy_loss, fullgraph=True, backend="aot_eager")
    x, y = batch.logp.clone().requires_grad_(), batch.logp.clone().requires_grad_()
    options = {"mask": batch.mask, "entropy": batch.entropy, "loss_type": "dapo", "normalizer": 9.0}
    traced = fn(x, *rest, **options)
    eager = ops.policy_loss(y, *rest, **options)
    traced.loss.backward()
    eager.loss.backward()
    assert_bitwise(x.grad, y.grad, "compiled gradient")
    for name, value in eager.stats.items():
        assert_bitwise(traced.stats[name], value, f"compiled {name}")
    for coef in (0.1, 0.2):  # the second value makes the number symbolic
        options = {"ref_logp": batch.ref_logp, "entropy": batch.entropy, "kl_coef": coef, "entropy_coef": coef}
        assert_bitwise(fn(x, *rest, **options).loss, ops.policy_loss(y, *rest, **options).loss, f"compiled, {coef}")


# ---- bad input


@pytest.mark.parametrize(
    "change,message",
    (
        ({"loss_type": "ppo"}, "loss_type='ppo' is unknown; expected one of grpo"),
        ({"ratio_level": "word"}, "ratio_level='word'"),
        ({"kl_type": "k4"}, "kl_type='k4'"),
        ({"logp": torch.zeros(2, 3)}, "pack the completions first"),
        ({"old_logp": torch.zeros(4)}, r"old_logp is \(4,\), expected \(5,\)"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask is \(4,\)"),
        ({"advantages": torch.zeros(3)}, r"advantages is \(3,\), expected \[B\]=\[2\] or \[T\]=\[5\]"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs ref_logp"),
        ({"kl_coef": 1e39}, r"kl_coef=1e\+39 must be finite in float32"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan must be finite"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 needs entropy"),
        ({"tis_cap": 2.0}, "needs rollout_logp"),
        ({"tis_cap": 0.0, "rollout_logp": torch.zeros(5)}, "tis_cap=0.0 must be positive"),
        ({"clip_dual": 1.1}, "clip_dual=1.1 must exceed 1"),
        ({"clip_dual": 3.0, "loss_type": "cispo"}, "cispo has no dual clip"),
        ({"loss_type": "dr_grpo"}, "dr_grpo needs max_completion_length"),
        ({"normalizer": 0.0}, "normalizer=0.0 must be positive"),
        ({"normalizer": torch.ones(2)}, "normalizer is"),
        ({"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)}, "end at T=5"),
        ({"cu_seqlens": torch.tensor([0, 6, 5], dtype=torch.int32)}, "never decrease"),
    ),
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logp": torch.zeros(5),
        "old_logp": torch.zeros(5),
        "advantages": torch.zeros(2),
        "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        ops.policy_loss(**{**arguments, **change})


@pytest.mark.parametrize(
    "length,error",
    (("a", TypeError), (5.5, TypeError), (True, TypeError), (math.inf, TypeError), (math.nan, TypeError),
     (0, ValueError), (-3, ValueError), (1 << 31, ValueError)),
)  # fmt: skip
@pytest.mark.parametrize("loss_type", ("dr_grpo", "grpo"))
def test_max_completion_length_is_a_count_of_tokens(loss_type: str, length: Any, error: type[Exception]) -> None:
    batch = Batch([6, 3])
    run = lambda n: batch.run(loss_type=loss_type, max_completion_length=n)["loss"]
    with pytest.raises(error, match=rf"policy_loss: max_completion_length={length!r} .*whole number of tokens from 1"):
        run(length)
    assert_bitwise(run(numpy.int64(7)), run(7), "a whole number of numpy's")


@pytest.mark.parametrize("loss_type", ("dr_grpo", "grpo"))
def test_max_completion_length_is_checked_under_compile(loss_type: str) -> None:
    """As a constant, and as a symbol after calls with other lengths."""
    batch = Batch([6, 3])
    options = (batch.logp, batch.old_logp, batch.advantages, batch.cu_seqlens)
    run = lambda n: ops.policy_loss(*options, loss_type=loss_type, max_completion_length=n).loss
    for first in ((), (7, 8)):
        for length in (0, -3, 1 << 40):
            torch.compiler.reset()
            fn = torch.compile(run, backend="aot_eager")
            for n in first:
                assert_bitwise(fn(n), run(n), f"compiled, {n} tokens")
            with pytest.raises(ValueError, match=f"policy_loss: max_completion_length={length} must be a whole number"):
                fn(length)


@pytest.mark.parametrize("name", ("logp", "old_logp", "advantages", "ref_logp", "entropy", "rollout_logp"))
def test_lower_precision_is_refused(name: str) -> None:
    arguments = {"logp": torch.zeros(5), "old_logp": torch.zeros(5), "advantages": torch.zeros(2)}
    arguments[name] = torch.zeros(2 if name == "advantages" else 5, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=f"{name} is torch.bfloat16, expected torch.float32"):
        ops.policy_loss(**arguments, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"cu_seqlens is torch.int64, expected torch.int32"):
        ops.policy_loss(torch.zeros(2), None, torch.zeros(1), torch.tensor([0, 2]))
