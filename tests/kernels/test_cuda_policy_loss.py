"""policy_loss's schedules without a GPU: shape classes, samples, the choice, and what the kernels are given."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import Launches, classes_of, milliseconds
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import clock, implementations, schedule
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import policy_loss as cuda
from rlkernel.kernels.cuda import policy_loss_sm90
from rlkernel.kernels.errors import BuildError
from rlkernel.kernels.policy_loss import LOSS_TYPES, PolicyLossInputs
from rlkernel.kernels.reference import policy_loss as reference
from rlkernel.kernels.samples import KINDS
from rlkernel.kernels.schedule import ScheduledOp, UncertifiedError
from rlkernel.kernels.triton import policy_loss as anchor
from rlkernel.kernels.verdicts import ANCHOR

SHAPE = cuda.PolicyLossShape(-1, True, True, True, 1 << 18, 1 << 10)


def call(tokens: int = 1 << 17, batch: int = 128, **more: Any) -> tuple[PolicyLossInputs]:
    """Arguments whose tensors have sizes but no storage of that size."""
    empty = lambda n: torch.empty(1).expand(n)
    given = {
        **dict.fromkeys(PolicyLossInputs._fields), "logp": empty(tokens), "old_logp": empty(tokens),
        "advantages": empty(batch), "cu_seqlens": empty(batch + 1), "mask": empty(tokens),
        "loss_type": "grpo", "sequence_ratio": False,
        "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_type": "k3", "entropy_coef": 0.0, **more,
    }  # fmt: skip
    return (PolicyLossInputs(**given),)


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("mean", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_of_its_class(kind: str, mean: bool, masked: bool) -> None:
    shape = SHAPE._replace(masked=masked, mean=mean)
    few, more, many = cuda.rows_of(shape)
    for tokens in (few, more, many):
        given = cuda.sample(shape, tokens, kind, torch.Generator().manual_seed(0))
        logp, _, advantages, borders, mask, *_ = given[0]
        assert (len(logp), int(borders[0]), int(borders[-1])) == (tokens, 0, tokens)
        sizes = borders.diff()
        assert bool((sizes >= 0).all()) and int(sizes.max()) > 1024 and bool((sizes % 4 != 0).any())
        assert bool((advantages == 0).any()) and bool((advantages < 0).any()) and bool((advantages > 0).any())
        assert bool(logp.isnan().any()) == (masked or kind == "wide")
        loss, *_, stats, _ = reference.policy_loss(*given)
        finite = bool(loss.isfinite()) and bool(stats[:3].isfinite().all())
        assert finite == (kind != "wide"), "finite sums, which reveal a wrong order"
        if mask is not None:
            counted = torch.cat((torch.zeros(1), mask.cumsum(0)))[borders.long()].diff()
            assert bool((counted == 0).any()) and bool((counted > 0).any())
    assert cuda.shape_of(*given) == shape and tokens % 16, "TMA may not load the last tokens"
    assert 0 in cuda.RAGGED and max(cuda.RAGGED) > 2048, "empty sequences and sequences of several segments"
    turn = 1024 * max(setting.warps for setting in policy_loss_sm90.TEAMS)
    assert max(cuda.RAGGED) > 2 * turn, "a team needs a third round"


@pytest.mark.parametrize("mean", (False, True))
def test_samples_are_of_every_form_of_their_class(mean: bool) -> None:
    shape = SHAPE._replace(mean=mean)
    named = ("grpo", "gspo") if mean else ("bnpo", "dr_grpo", "dapo")
    for loss_type in named:
        given = call(loss_type=loss_type)
        assert cuda.shape_of(*given) == shape, "the sample belongs to its class"
    assert {cuda.shape_of(*call(loss_type=x)) for x in set(LOSS_TYPES) - set(named)}.isdisjoint({shape})
    found, bounds = set(), set()
    for kind in KINDS:
        for tokens in cuda.rows_of(shape)[:2] + [1 << 17]:
            (given,) = cuda.sample(shape, tokens, kind, torch.Generator().manual_seed(0))
            way = (given.normalizer is not None) + 2 * (given.divisor is not None)
            if kind != "wide":  # its sums are NaN
                found.add((given.loss_type, way))
                bounds.add((given.clip_low, given.clip_high))
    assert bounds == set(cuda.CLIPS) and {0.0, math.inf} < {bound for pair in bounds for bound in pair}
    assert found == set(itertools.product(named, (0, 1, 2)))
    (first,) = cuda.sample(shape, 1 << 17, KINDS[0], torch.Generator())
    assert (first.loss_type, first.normalizer, first.divisor) == ("grpo" if mean else "dapo", None, None), (
        "the timed sample"
    )
    assert (first.clip_low, first.clip_high) == (0.2, 0.28)


@pytest.mark.parametrize("chip", ((9, 0), (8, 0), (10, 0)))
def test_who_is_offered_what(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)

    def names(**more: Any) -> list[str]:
        key = SHAPE._replace(**{"device": 0, **more})
        return [s.name for s in cuda.policy_loss.family.schedules if s.supports(key)]

    everything = [s.name for s in cuda.policy_loss.family.schedules] if chip == (9, 0) else []
    assert names(length=1 << 12) == names(length=1 << 14) == everything
    assert names() == names(masked=False) == names(mean=False) == [x for x in everything if "team" not in x]
    assert names(device=-1) == names(plain=False) == []


def test_what_is_plain() -> None:
    shape = cuda.shape_of
    assert shape(*call()) == SHAPE and shape(*call(mask=None)) == SHAPE._replace(masked=False)
    for loss_type in ("bnpo", "dr_grpo", "dapo"):
        assert shape(*call(loss_type=loss_type)) == SHAPE._replace(mean=False)
    assert shape(*call(normalizer=torch.ones(()), divisor=2.0)) == SHAPE
    vector = torch.zeros(1)
    others: tuple[dict[str, Any], ...] = (
        *({name: vector} for name in ("ref_logp", "entropy", "rollout_logp")),
        {"sequence_ratio": True}, {"clip_dual": 3.0}, {"tis_cap": 2.0}, {"loss_type": "cispo"},
        {"loss_type": "reinforce"}, {"tokens": 1 << 16}, {"batch": 0}, {"batch": 65537}, {"tokens": (1 << 30) + 1},
        {"advantages": torch.empty(1).expand(1 << 17)},
    )  # fmt: skip
    for more in others:
        assert shape(*call(**more)) == cuda.PolicyLossShape(-1, False, False, False, 0, 0), more
    sizes = {(1 << 16) + 1: 18, 1 << 18: 18, (1 << 18) + 1: 20, 1 << 20: 20, 3 << 20: 22, 1 << 24: 24, 1 << 30: 24}
    for tokens, power in sizes.items():
        assert shape(*call(tokens=tokens)).tokens == 1 << power
    lengths = {65536: 256, 257: 1024, 128: 1024, 127: 4096, 32: 4096, 31: 16384, 1: 16384}
    for batch, length in lengths.items():
        assert shape(*call(batch=batch)).length == length


def test_a_warm_call_is_known_by_its_class() -> None:
    vector = torch.zeros(1)
    given = [call(tokens, batch, mask=mask, loss_type=loss_type)
             for tokens in (9, 1 << 17, 1 << 20) for batch in (1, 128, 70000) for mask in (None, vector)
             for loss_type in ("grpo", "dapo", "cispo")]  # fmt: skip
    given += [call(**{name: vector}) for name in ("ref_logp", "entropy", "rollout_logp", "advantages")]
    given += [call(clip_dual=3.0), call(tis_cap=2.0), call(sequence_ratio=True), call(1 << 17, 1 << 17)]
    assert len(classes_of(cuda.policy_loss.family, given)) > 4


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the op on a CPU with the reference as its anchor."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(schedule, "_ops", dict(schedule._ops))
    monkeypatch.setattr(cuda, "rows_of", lambda key: [sum(cuda.RAGGED), 2 * sum(cuda.RAGGED), (1 << 16) + 1])

    def make(*schedules: Schedule) -> ScheduledOp:
        family = dataclasses.replace(
            cuda.policy_loss.family, anchor=reference.policy_loss, rows=cuda.rows_of, schedules=schedules
        )
        return ScheduledOp(family)

    return make


def wrong(*given: Any) -> tuple[Tensor, ...]:
    """A wrong kernel: one token gets another token's gradient."""
    out = reference.policy_loss(*given)
    out[1][-1] += 1
    return out


def test_the_kernel_is_chosen_where_it_is_equal(op: Any) -> None:
    def unbuilt(key: Any) -> Any:
        raise BuildError("policy_loss_sm90.cu needs NVRTC")

    given = cuda.sample(SHAPE, (1 << 16) + 1, "normal", torch.Generator().manual_seed(2))
    good, bad = (
        Schedule("hopper.a", lambda key: lambda *x: reference.policy_loss(*x)),
        Schedule("hopper.b", lambda key: wrong),
    )
    made = op(bad, good)
    with schedule.strict():
        assert_bitwise(made.call(*given)[1], reference.policy_loss(*given)[1], "dlogp")
    assert made.chosen(*given) == "hopper.a"
    first = made.verdict(*given).trials[0].first
    assert first["result"] == 1 and first["index"] == [sum(cuda.RAGGED) - 1], "the gradient of the last token"
    rows = {row["schedule"]: row for row in schedule.report(torch.device("cpu")) if row["op"] == "policy_loss"}
    assert rows["hopper.a"]["chosen"] and not rows["hopper.b"]["certified"]
    assert rows["hopper.a"]["shape"] == {
        "plain": True, "masked": True, "mean": True, "tokens": 1 << 18, "length": 1 << 10,
    }  # fmt: skip
    with schedule.without("hopper"):
        assert made.chosen(*given) == ANCHOR
    made = op(Schedule("hopper.c", unbuilt))
    with pytest.warns(RuntimeWarning, match=r"policy_loss .* runs without hopper\.c: .*needs NVRTC"):
        made.call(*given)
    with schedule.strict(), pytest.raises(UncertifiedError, match=r"policy_loss .*needs NVRTC"):
        made.call(*given)


PLANTS: dict[str, Callable[[PolicyLossInputs], bool]] = {
    "tensor": lambda given: given.normalizer is not None,
    "number": lambda given: given.divisor is not None,
    "type": lambda given: given.loss_type not in ("grpo", "dapo"),
    "bounds": lambda given: given.clip_low != 0.2,
    "no upper bound": lambda given: given.clip_high == math.inf,
    "no lower bound": lambda given: given.clip_low == math.inf,
    "type, number": lambda given: given.loss_type not in ("grpo", "dapo") and given.divisor is not None,
    "type, tensor": lambda given: given.loss_type not in ("grpo", "dapo") and given.normalizer is not None,
}


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("mean", (False, True))
@pytest.mark.parametrize("plant", PLANTS)
def test_a_loss_that_is_wrong_for_one_form_is_refused(plant: str, mean: bool, masked: bool, op: Any) -> None:
    """Every denominator and loss type of a class occurs in a sample."""

    def planted(given: PolicyLossInputs) -> tuple[Tensor, ...]:
        out = reference.policy_loss(given)
        return (out[0] * 2, *out[1:]) if PLANTS[plant](given) else out

    made = op(Schedule("planted", lambda key: planted))
    (trial,) = made.verdict_of(SHAPE._replace(mean=mean, masked=masked)).trials
    assert not trial.certified and trial.first["result"] == 0


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("which", ("fits", "unaligned", "team"))
def test_what_the_kernels_are_given(which: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    same = contextlib.nullcontext()
    monkeypatch.setattr(policy_loss_sm90.common, "on_device", lambda t: same)
    load = lambda device, source, entry, shared, **variant: Launches(ran, entry)
    monkeypatch.setattr(policy_loss_sm90, "load", load)
    monkeypatch.setattr(anchor, "policy_loss", lambda *given: ran.append("anchor"))
    setting = policy_loss_sm90.TEAMS[0] if which == "team" else policy_loss_sm90.Setting(12, 2, 1024)
    run = policy_loss_sm90.launcher(0, masked, setting)
    first = 1 if which == "unaligned" else 16
    storage = [torch.zeros(320) for _ in range(2)]
    logp, old_logp = (x[first : first + 300] for x in storage)
    mask = torch.ones(320, dtype=torch.bool)[first : first + 300] if masked else None
    advantages, borders = torch.ones(6)[::2], torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    tensors = (logp, old_logp, advantages, borders, mask, None, None, None, None)
    found = run(PolicyLossInputs(*tensors, "dapo", False, 0.2, 0.3, None, 0.0, "k3", 0.0, None, None))
    if which == "unaligned":
        assert ran == ["anchor"]
        return
    assert [tuple(t.shape) for t in found] == [(), (300,), (0,), (), (14,), (6,)]
    (_, blocks, threads, arguments, how), (_, *second) = ran
    if which == "team":  # one block per sequence, then one cluster
        assert (blocks, threads, how) == (3, 64, {}) and second == [8, 128, arguments, {"pdl": True}]
    else:
        assert (blocks, threads, how) == (128, 384, {}) and second == [1, 128, arguments, {"pdl": True}]
    passed = {name: getattr(arguments, name) for name, _ in arguments._fields_}
    for name, t in {"logp": logp, "old_logp": old_logp, "borders": borders, "mask": mask, "loss": found[0],
                    "dlogp": found[1], "scale": found[3], "stats": found[4], "totals": found[5]}.items():  # fmt: skip
        assert passed[name] == (None if t is None else t.data_ptr()), name
    assert passed["advantages"] != advantages.data_ptr(), "a contiguous copy"
    assert (passed["tokens"], passed["batch"], passed["mean"], passed["by_tokens"]) == (300, 3, 0, 1)
    assert (passed["divide_by"], passed["divisor"]) == ((0, 300.0) if masked else (1, 300.0))
    assert passed["low"] == pytest.approx(0.8) and passed["high"] == pytest.approx(1.3)


def test_shared_memory_holds_what_the_source_lays_out() -> None:
    for setting in policy_loss_sm90.TEAMS:
        for masked in (False, True):
            held = policy_loss_sm90.shared_bytes(setting, masked, 300)
            assert held == setting.warps * (8 * 1024 + 32 + 1040 * masked + 8) <= 227 << 10
    for setting in policy_loss_sm90.SETTINGS:
        most = policy_loss_sm90.shared_bytes(setting, True, policy_loss_sm90.MOST_SEQUENCES)
        assert most <= 227 << 10 and setting.warps <= 32 and 1024 % setting.piece == setting.piece % 128 == 0
        for masked in (False, True):
            held = setting.warps * setting.stages
            expected = held * (8 * setting.piece + 32 + 1040 * masked + 8 + 20) + 32 + 3 * 16
            assert policy_loss_sm90.shared_bytes(setting, masked, 300) == expected


def test_the_scaling_is_the_anchors() -> None:
    import rlkernel.ops  # noqa: F401, declares them

    assert implementations.functions("cuda").get("policy_loss") is cuda.policy_loss.call
    assert implementations.functions("cuda").get("policy_loss_scale_") is None
