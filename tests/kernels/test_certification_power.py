"""Certification of small shape classes refuses other orders of addition, on a model of the tensor cores' chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.fake_schedules import milliseconds

from rlkernel.kernels import certification, clock
from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.cuda.linear_shapes import LinearShape
from rlkernel.kernels.samples import KINDS, NONFINITE

GROUP = 16  # products that are added to the sum at once


def chain(x: Tensor, w: Tensor, group: int = GROUP) -> Tensor:
    total = torch.zeros(len(x), len(w))
    for a, b in zip(x.double().split(group, 1), w.double().split(group, 1), strict=True):
        total = (total.double() + a @ b.T).float()
    return total


def whole(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return chain(x, w).to(x.dtype)


def split_k(x: Tensor, w: Tensor, parts: int) -> Tensor:
    step = x.shape[1] // parts
    total, *others = (chain(a, b) for a, b in zip(x.split(step, 1), w.split(step, 1), strict=True))
    for other in others:
        total = total + other
    return total.to(x.dtype)


PLANTS: dict[str, Callable[..., Tensor]] = {
    "split-K 2": lambda x, w, *rest: split_k(x, w, 2),
    "split-K 4": lambda x, w, *rest: split_k(x, w, 4),
    "K reversed": lambda x, w, *rest: whole(x.flip(1), w.flip(1)),
    "groups of 8": lambda x, w, *rest: chain(x, w, GROUP // 2).to(x.dtype),
}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    yield


def spec(**runs: Callable[..., Tensor]) -> OpSpec[LinearShape]:
    schedules = [Schedule(name, lambda s, run=run: run) for name, run in runs.items()]
    sample = shapes.linear_sample
    return OpSpec("linear", whole, shapes.linear_shape, shapes.rows_of, sample, schedules, kinds=(*KINDS, NONFINITE))


def one_row(n: int, k: int, dtype: torch.dtype) -> LinearShape:
    return LinearShape(-1, 1, torch.Size((n, k)), dtype, None, False, 1, True, "forward")


CLASSES = [
    (8, 64, torch.bfloat16), (16, 256, torch.bfloat16), (8, 64, torch.float16), (8, 512, torch.float16),
    (64, 256, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("n, k, dtype", CLASSES, ids=str)
def test_other_orders_are_refused_in_classes_of_a_few_elements(n: int, k: int, dtype: torch.dtype) -> None:
    verdict, bound = certification.certify(spec(**PLANTS), one_row(n, k, dtype), 0)
    assert not bound and [trial.certified for trial in verdict.trials] == [False] * len(PLANTS)
    assert all(trial.first is not None and trial.first["mismatches"] > 0 for trial in verdict.trials)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_an_order_shows_in_a_fifth_of_the_elements_that_cancel(dtype: torch.dtype) -> None:
    """So a class of n elements per kind misses it with a probability of at most about 0.8^n."""
    x, w, *_ = shapes.linear_sample(one_row(8, 64, dtype), 512, "cancel", torch.Generator().manual_seed(0))
    expected = whole(x, w)
    for name, run in PLANTS.items():
        assert (run(x, w) != expected).float().mean() > 0.18, name


@pytest.mark.parametrize("n, samples", ((8, 513), (64, 256), (4, 1024)), ids=str)
def test_samples_are_repeated_until_enough_was_compared(n: int, samples: int) -> None:
    calls = []
    few = dataclasses.replace(
        spec(equal=lambda x, w, *rest: (calls.append(1), whole(x, w))[1]), kinds=("cancel", NONFINITE)
    )
    verdict, bound = certification.certify(few, one_row(n, 16, torch.bfloat16), 0)
    (trial,) = verdict.trials
    assert list(bound) == ["equal"] and trial.least == n * samples >= certification.MIN_ELEMENTS
    assert trial.elements == 2 * trial.least and f"at least {trial.least} of a kind" in trial.reason
    assert len(calls) == 2 * trial.least // n


def test_a_class_without_elements_is_not_certified() -> None:
    empty = dataclasses.replace(spec(equal=whole), anchor=lambda x, w, *rest: whole(x, w)[:0], kinds=("normal",))
    empty = dataclasses.replace(empty, schedules=[Schedule("equal", lambda key: empty.anchor)])
    verdict, bound = certification.certify(empty, one_row(8, 16, torch.bfloat16), 0)
    assert not bound and verdict.trials[0].reason == "compared in 0 elements of a kind of values; 4096 are needed"


def test_a_schedule_that_is_wrong_only_in_a_later_sample_is_refused_with_the_element() -> None:
    calls = []

    def late(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        y = whole(x, w)
        if len(calls) == 300:
            y[0, 5] += 1
        return y

    verdict, bound = certification.certify(spec(late=late, right=whole), one_row(8, 16, torch.bfloat16), 0)
    refused, right = verdict.trials
    assert list(bound) == ["right"] and right.certified and refused.least == 0
    assert refused.first is not None and refused.first["index"] == [0, 5] and refused.first["mismatches"] == 1


def test_evidence_does_not_depend_on_what_else_is_refused() -> None:
    first = []
    for runs in ({"reversed": PLANTS["K reversed"]}, {"right": whole, "reversed": PLANTS["K reversed"]}):
        verdict, _ = certification.certify(spec(**runs), one_row(8, 32, torch.bfloat16), 3)
        first.append(verdict.trials[-1].first)
    assert first[0] == first[1] is not None
