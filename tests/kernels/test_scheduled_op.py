"""Dispatch of certified schedules without a GPU: strict mode, switches, capture, failures in a call, the report."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import (
    anchor,
    arguments,
    built,
    equal,
    raises,
    slow,
    spec,
    split_k,
)
from torch import Tensor

from rlkernel.kernels import certification, scheduled_op
from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.errors import LaunchError
from rlkernel.kernels.scheduled_op import ScheduledOp, UncertifiedError
from rlkernel.kernels.select import functions
from rlkernel.kernels.verdicts import ANCHOR

pytestmark = pytest.mark.usefixtures("cache")


def test_strict_names_op_shape_and_reason() -> None:
    x, w = arguments()
    op = ScheduledOp(replace(spec(), schedules=(built([True]),)))
    with pytest.warns(RuntimeWarning, match=r"runs without fake\.built: .*no compiler"):
        assert torch.equal(op(x, w), anchor(x, w))
    with scheduled_op.strict(), pytest.raises(UncertifiedError, match=r"fake.*'weight': \(5, 64\).*no compiler"):
        op(x, w)
    assert torch.equal(op(x, w), anchor(x, w)), "strict ends with its block"
    good = ScheduledOp(spec(equal))
    with scheduled_op.strict():
        assert torch.equal(good(x, w), anchor(x, w))


def test_a_class_that_cannot_be_certified_runs_its_anchor_and_raises_in_strict_mode() -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    op = ScheduledOp(OpSpec(**{**spec(equal).__dict__, "sample": full}))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match="runs its anchor, certification failed: OutOfMemoryError"):
        assert torch.equal(op(x, w), anchor(x, w))
    assert op.failures() and op.chosen(x, w) == ANCHOR
    with scheduled_op.strict(), pytest.raises(UncertifiedError, match="out of memory"):
        op(x, w)


def test_nothing_is_certified_under_graph_capture(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    x, w = arguments()
    op = ScheduledOp(spec(equal))
    capturing = True
    monkeypatch.setattr(certification, "capturing", lambda device: capturing)
    with pytest.warns(RuntimeWarning, match="graph capture"):
        assert torch.equal(op(x, w), anchor(x, w))
    assert not cache.exists()
    with scheduled_op.strict(), pytest.raises(UncertifiedError, match="graph capture"):
        op(x, w)
    capturing = False
    assert op.chosen(x, w) == "fake.equal"
    capturing = True
    assert op.chosen(x, w) == "fake.equal", "decided before the capture, used inside it"


def test_a_first_call_in_a_capture_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, w), (_, other) = arguments(), arguments(n=6)
    op = ScheduledOp(spec(equal))
    monkeypatch.setattr(certification, "capturing", lambda device: True)
    for weight in (w, other):
        with pytest.warns(RuntimeWarning, match=rf"fake.*{len(weight)}, 64.*runs its anchor.*graph capture"):
            op(x, weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(x, weight)
    assert not op.failures(), "the class can still be certified"
    monkeypatch.setattr(certification, "capturing", lambda device: False)
    assert op.chosen(x, w) == "fake.equal"


def test_schedules_are_switched_off_and_on_again() -> None:
    x, w = arguments()
    op = ScheduledOp(spec(equal, slow))
    y = op(x, w)
    for names in ((), ("fake",), ("fake.equal",)):
        with scheduled_op.without(*names):
            assert op.chosen(x, w) == ANCHOR
            assert torch.equal(op(x, w), y)
    assert op.chosen(x, w) == "fake.equal"


def test_an_unknown_schedule_name_is_an_error() -> None:
    functions("cuda")  # loads every op with schedules
    op = ScheduledOp(spec(equal))
    x, w = arguments()
    for names in (("fake.eqal",), ("fake", "cublastl")):
        message = f"no op has a schedule or group '{names[-1]}'; there are .*cublaslt, .*fake"
        with pytest.raises(ValueError, match=message), scheduled_op.without(*names):
            pass
    with pytest.raises(TypeError, match="as strings, not \\(3,\\)"), scheduled_op.without(3):  # type: ignore[arg-type]
        pass
    assert op.chosen(x, w) == "fake.equal"


@pytest.mark.parametrize("on", ("no", 1, None, ()))
def test_strict_mode_is_a_bool(on: Any) -> None:
    with pytest.raises(TypeError, match="True or False"), scheduled_op.strict(on):
        pass
    with pytest.raises(TypeError, match="True or False"):
        scheduled_op.set_strict(on)


def test_a_call_is_decided_once_per_call_key() -> None:
    asked: list[int] = []
    classes: list[int] = []
    base = spec(equal)

    def shape(x: Tensor, w: Tensor) -> Any:
        classes.append(1)
        return base.shape(x, w)

    def call_key(x: Tensor, w: Tensor) -> Any:
        asked.append(1)
        return x.shape, w.shape

    op = ScheduledOp(replace(base, shape=shape, call_key=call_key))
    x, w = arguments()
    for _ in range(3):
        op(x, w)
    assert len(asked) == 3 and len(classes) == 1
    op(*arguments(m=4))
    assert len(classes) == 2, "another row count of the same class"
    with scheduled_op.without():
        op(x, w)
    assert len(classes) == 3, "a switch makes the op decide again"
    with scheduled_op.strict():
        op(x, w)
    assert len(classes) == 4, "so does strict mode"


def test_a_call_under_capture_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "capturing", lambda device: True)
    op = ScheduledOp(replace(spec(equal), call_key=lambda x, w: (x.shape, w.shape)))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match="graph capture"):
        assert torch.equal(op(x, w), anchor(x, w)) and not op._runs
    monkeypatch.setattr(certification, "capturing", lambda device: False)
    op(x, w)
    assert list(op._runs.values()) == [equal]


def test_an_op_does_not_remember_calls_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled_op, "MAX_CALLS", 4)
    op = ScheduledOp(replace(spec(equal), call_key=lambda x, w: (x.shape, w.shape)))
    for m in range(2, 12):
        x, w = arguments(m)
        assert torch.equal(op(x, w), anchor(x, w)) and len(op._runs) <= 4


def test_the_report_omits_verdicts_of_another_library_version(cache: Path) -> None:
    x, w = arguments()
    for version in ("1", "2"):
        ScheduledOp(spec(equal, versions=lambda version=version: {"cublaslt": version}))(x, w)
    assert len(list(cache.glob("*.json"))) == 2
    shown = lambda: [row["schedule"] for row in scheduled_op.report(torch.device("cpu")) if row["op"] == "fake"]
    assert shown() == [ANCHOR, "fake.equal"], "the verdict of version 2"
    ScheduledOp(spec(equal, versions=lambda: {"cublaslt": "3"}))
    assert shown() == []
    ScheduledOp(spec(equal, slow, versions=lambda: {"cublaslt": "1"}))
    assert shown() == [], "the op has another schedule"


def test_the_report_shows_every_schedule() -> None:
    op = ScheduledOp(spec(split_k, equal))
    op(*arguments())
    rows = [row for row in scheduled_op.report(torch.device("cpu")) if row["op"] == "fake"]
    assert [(row["schedule"], row["certified"], row["chosen"]) for row in rows] == [
        (ANCHOR, True, False), ("fake.split_k", False, False), ("fake.equal", True, True),
    ]  # fmt: skip
    assert rows[1]["first"]["index"] and rows[2]["speed"] > 1
    json.dumps(rows)


@pytest.mark.filterwarnings("ignore:rlkernel:RuntimeWarning")
def test_strict_refuses_what_could_not_be_built() -> None:
    x, w = arguments()
    for runs in ((), (equal,), (split_k,)):
        made = spec(*runs)
        op = ScheduledOp(replace(made, schedules=(built([True]), *made.schedules)))
        assert torch.equal(op(x, w), anchor(x, w))
        with scheduled_op.strict(), pytest.raises(UncertifiedError, match=r"fake\.built.*no compiler"):
            op(x, w)
    with scheduled_op.strict():
        for refused in (raises, split_k):
            assert torch.equal(ScheduledOp(spec(refused))(x, w), anchor(x, w)), "a refusal is a verdict"


def test_a_class_that_no_schedule_computes_needs_no_compiler() -> None:
    x, w = arguments()
    op = ScheduledOp(replace(spec(), schedules=(Schedule("fake.none", lambda s: equal, lambda s: False),)))
    with scheduled_op.strict():
        assert torch.equal(op(x, w), anchor(x, w))
    assert op.unsupported() and not op.failures()


@pytest.mark.parametrize("error", (LaunchError, torch.OutOfMemoryError))
def test_a_schedule_that_cannot_be_loaded_keeps_its_verdict(error: type[Exception], cache: Path) -> None:
    full: list[bool] = []

    def bind(key: Any) -> Callable[..., Tensor]:
        if full:
            raise error("cuModuleLoadData failed: out of memory (2)")
        return equal

    offer = lambda: ScheduledOp(replace(spec(), schedules=(Schedule("fake.loaded", bind),)))
    x, w = arguments()
    assert offer().chosen(x, w) == "fake.loaded"
    (path,) = cache.glob("*.json")
    kept = path.read_text()
    full.append(True)
    with pytest.warns(RuntimeWarning, match="runs its anchor, certification failed: .*out of memory"):
        assert offer().chosen(x, w) == ANCHOR
    assert path.read_text() == kept
    full.clear()
    assert offer().chosen(x, w) == "fake.loaded" and path.read_text() == kept


def fails_with(error: list[Exception]) -> Callable[..., Tensor]:
    """A schedule that is equal until there is an error to raise."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        if error:
            raise error[0]
        return equal(x, w)

    return run


def test_the_anchor_computes_a_call_if_a_schedule_gets_no_memory() -> None:
    error: list[Exception] = []
    op, (x, w) = ScheduledOp(spec(fails_with(error))), arguments()
    op(x, w)
    error.append(torch.OutOfMemoryError("CUDA out of memory"))
    with scheduled_op.strict(), pytest.warns(RuntimeWarning, match=r"fake.*\(5, 64\).*memory was refused") as warned:
        assert torch.equal(op(x, w), anchor(x, w)) and torch.equal(op(x, w), anchor(x, w))
    assert len(warned) == 1 and not op.failures()
    error.clear()
    assert op.chosen(x, w) == "fake.run"
    with scheduled_op.without(), pytest.raises(torch.OutOfMemoryError):
        full = ScheduledOp(spec(equal, anchor=fails_with([torch.OutOfMemoryError("CUDA out of memory")])))
        full(x, w)


@pytest.mark.parametrize("error", (LaunchError("status 13"), ValueError("no kernel image")), ids=str)
def test_any_other_error_of_a_certified_schedule_is_the_callers(error: Exception) -> None:
    met: list[Exception] = []
    op, (x, w) = ScheduledOp(spec(fails_with(met))), arguments()
    op(x, w)
    met.append(error)
    with pytest.raises(type(error)) as raised:
        op(x, w)
    assert raised.value is error
    met.clear()
    assert torch.equal(op(x, w), anchor(x, w)) and op.chosen(x, w) == "fake.run"


def test_a_switch_in_another_thread_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    op = ScheduledOp(spec(equal))
    x, w = arguments()
    settle = op._class_of
    switched, ends = threading.Event(), threading.Event()

    def switch() -> None:
        with scheduled_op.without():
            switched.set()
            ends.wait(10)

    other = threading.Thread(target=switch)

    def between(key: Any) -> Any:
        found = settle(key)
        if not other.is_alive() and not switched.is_set():
            other.start()  # waits for the lock until the answer is stored, then clears it
            switched.wait(0.2)
        return found

    monkeypatch.setattr(op, "_class_of", between)
    op(x, w)
    assert switched.wait(10)
    try:
        assert op._runs == {}, "decided before the switch"
    finally:
        ends.set()
        other.join()
