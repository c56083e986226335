"""Dispatch of certified schedules without a GPU: strict mode, switches, capture, failures in a call, the report."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
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
    family,
    raises,
    slow,
    split_k,
)
from torch import Tensor

from rlkernel.kernels import certification, schedule
from rlkernel.kernels.certification import Family, First, Instead, Run, Runs, Schedule, Warm
from rlkernel.kernels.errors import FinishedError, LaunchError
from rlkernel.kernels.schedule import ScheduledOp, UncertifiedError
from rlkernel.kernels.verdicts import ANCHOR

pytestmark = pytest.mark.usefixtures("cache")


def test_strict_names_op_shape_and_reason() -> None:
    x, w = arguments()
    op = ScheduledOp(family(equal, unavailable=lambda: "no compiler"))
    assert torch.equal(op(x, w), anchor(x, w))
    with schedule.strict(), pytest.raises(UncertifiedError, match=r"fake.*'weight': \(5, 64\).*no compiler"):
        op(x, w)
    assert torch.equal(op(x, w), anchor(x, w)), "strict ends with its block"
    good = ScheduledOp(family(equal))
    with schedule.strict():
        assert torch.equal(good(x, w), anchor(x, w))


def test_a_class_that_cannot_be_certified_runs_its_anchor_and_raises_in_strict_mode() -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    op = ScheduledOp(Family(**{**family(equal).__dict__, "sample": full}))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match="runs its anchor, certification failed: OutOfMemoryError"):
        assert torch.equal(op(x, w), anchor(x, w))
    assert op.failures() and op.chosen(x, w) == ANCHOR
    with schedule.strict(), pytest.raises(UncertifiedError, match="out of memory"):
        op(x, w)


def test_nothing_is_certified_under_graph_capture(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    x, w = arguments()
    op = ScheduledOp(family(equal))
    capturing = True
    monkeypatch.setattr(certification, "capturing", lambda device: capturing)
    with pytest.warns(RuntimeWarning, match="graph capture"):
        assert torch.equal(op(x, w), anchor(x, w))
    assert not cache.exists()
    with schedule.strict(), pytest.raises(UncertifiedError, match="graph capture"):
        op(x, w)
    capturing = False
    assert op.chosen(x, w) == "fake.equal"
    capturing = True
    assert op.chosen(x, w) == "fake.equal", "settled before, used inside"


def test_a_capture_that_meets_a_class_first_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, w), (_, other) = arguments(), arguments(n=6)
    op = ScheduledOp(family(equal))
    monkeypatch.setattr(certification, "capturing", lambda device: True)
    for weight in (w, other):
        with pytest.warns(RuntimeWarning, match=rf"fake.*{len(weight)}, 64.*runs its anchor.*graph capture"):
            op(x, weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(x, weight)
    assert not op.failures(), "it may be certified yet"
    monkeypatch.setattr(certification, "capturing", lambda device: False)
    assert op.chosen(x, w) == "fake.equal"


def test_a_class_of_calls_to_come_is_settled_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op cannot know at the first call, or under capture, must not decide what a capture records."""
    made = family(equal)
    most = True

    def key(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        return (*made.key(x, w), most)

    op = ScheduledOp(replace(made, key=key, beside=lambda x, w: [(*made.key(x, w), not most)]))
    x, w = arguments()
    op(x, w)
    assert len(op.verdicts()) == 2
    monkeypatch.setattr(certification, "capturing", lambda device: True)
    most = False
    assert op.chosen(x, w) == "fake.equal"
    cold = ScheduledOp(op.family)
    with pytest.warns(RuntimeWarning, match="graph capture") as told:
        cold(x, w)
    assert len(told) == 1 and not cold.verdicts(), "nothing beside it either"


@pytest.mark.parametrize("known", (True, False))
def test_certification_ends_no_capture_of_another_thread(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does is a matter of its own thread: CUDA's capture mode says so, until it is done or has failed."""
    modes: list[int] = [0]

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
            if not known:
                return 3
            before, modes[0] = modes[0], mode._obj.value
            mode._obj.value = before
            return 0

    seen: list[int] = []

    def sees(x: Tensor, w: Tensor) -> Tensor:
        seen.append(modes[0])
        return anchor(x, w)

    monkeypatch.setattr(certification.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(schedule, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(certification, "capturing", lambda device: False)
    monkeypatch.setattr(certification, "identity", lambda *_: {"op": "fake", "shape": {}})
    monkeypatch.setattr(schedule, "identity", lambda *_: {"op": "fake", "shape": {}})
    cpu = torch.device("cpu")
    judged = [torch.device("cuda", 0)]
    op = ScheduledOp(replace(family(sees), device=lambda key: judged[0]))

    def certify(*given: Any) -> Any:
        judged[0] = cpu
        return real(*given)

    real = certification.certify
    monkeypatch.setattr(certification, "certify", certify)
    x, w = arguments()
    op(x, w)
    assert set(seen[:-1]) == {certification.THREAD_LOCAL if known else 0} and len(seen) > 4 and modes == [0]
    assert seen[-1] == 0, "the call itself"
    judged[0] = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="broken"), certification.beside_captures(judged[0]):
        assert modes == [certification.THREAD_LOCAL if known else 0]
        raise ValueError("broken")
    assert modes == [0]


def test_schedules_are_switched_off_and_on_again() -> None:
    x, w = arguments()
    op = ScheduledOp(family(equal, slow))
    y = op(x, w)
    for names in ((), ("fake",), ("fake.equal",)):
        with schedule.without(*names):
            assert op.chosen(x, w) == ANCHOR
            assert torch.equal(op(x, w), y)
    assert op.chosen(x, w) == "fake.equal"


def test_a_name_that_no_schedule_has_switches_nothing_off_in_silence() -> None:
    op = ScheduledOp(family(equal))
    x, w = arguments()
    for names in (("fake.eqal",), ("fake", "cublastl")):
        said = f"no op has a schedule or group '{names[-1]}'; there are .*cublaslt, .*fake"
        with pytest.raises(ValueError, match=said), schedule.without(*names):
            pass
    with pytest.raises(TypeError, match="as strings, not 3"), schedule.without(3):  # type: ignore[arg-type]
        pass
    assert op.chosen(x, w) == "fake.equal"


def test_schedules_of_ops_that_are_not_loaded_are_known() -> None:
    """`linear` on a CPU loads none of them."""
    program = "from rlkernel.kernels import schedule\nwith schedule.without('cublaslt', 'hopper', 'rows.16'): pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    files = Path(schedule.__file__).parent.glob("cuda/*.py")
    assert {path.stem for path in files if "ScheduledOp(" in path.read_text()} == set(schedule._MODULES)


def test_without_triton_any_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(schedule, "import_module", missing)
    with schedule.without("anything"):
        pass


@pytest.mark.parametrize("on", ("no", 1, None, ()))
def test_strict_mode_is_a_bool(on: Any) -> None:
    with pytest.raises(TypeError, match="True or False"), schedule.strict(on):
        pass
    with pytest.raises(TypeError, match="True or False"):
        schedule.set_strict(on)


def shapes(asked: list[int]) -> Warm:
    """A `warm` that decides by both shapes and counts its calls."""

    def warm(runs: Runs, first: First, instead: Instead) -> Run:
        def call(x: Tensor, w: Tensor) -> Any:
            asked.append(1)
            run = runs.get((x.shape, w.shape)) or first((x.shape, w.shape), x, w)
            try:
                return run(x, w)
            except Exception as error:
                return instead(error, run, x, w)

        return call

    return warm


def test_a_call_is_decided_once_by_what_the_family_says() -> None:
    asked: list[int] = []
    classes: list[int] = []
    base = family(equal)

    def key(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        classes.append(1)
        return base.key(x, w)

    op = ScheduledOp(replace(base, key=key, warm=shapes(asked)))
    x, w = arguments()
    for _ in range(3):
        op.call(x, w)
    assert len(asked) == 3 and len(classes) == 1
    op(*arguments(m=4))
    assert len(classes) == 2, "another row count of the same class"
    with schedule.without():
        op.call(x, w)
    assert len(classes) == 3, "switching decides anew"
    with schedule.strict():
        op.call(x, w)
    assert len(classes) == 4, "so does strict mode"


def test_a_call_under_capture_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "capturing", lambda device: True)
    op = ScheduledOp(replace(family(equal), warm=shapes([])))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match="graph capture"):
        assert torch.equal(op.call(x, w), anchor(x, w)) and not op._runs
    monkeypatch.setattr(certification, "capturing", lambda device: False)
    op.call(x, w)
    assert list(op._runs.values()) == [equal]


def test_an_op_does_not_remember_calls_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MOST_CALLS", 4)
    op = ScheduledOp(replace(family(equal), warm=shapes([])))
    for m in range(2, 12):
        x, w = arguments(m)
        assert torch.equal(op(x, w), anchor(x, w)) and len(op._runs) <= 4


def test_the_report_leaves_out_what_another_library_was_asked(cache: Path) -> None:
    x, w = arguments()
    for version in ("1", "2"):
        ScheduledOp(family(equal, versions=lambda version=version: {"cublaslt": version}))(x, w)
    assert len(list(cache.glob("*.json"))) == 2
    shown = lambda: [row["schedule"] for row in schedule.report(torch.device("cpu")) if row["op"] == "fake"]
    assert shown() == [ANCHOR, "fake.equal"], "that of version 2"
    ScheduledOp(family(equal, versions=lambda: {"cublaslt": "3"}))
    assert shown() == []
    ScheduledOp(family(equal, versions=lambda: {"cublaslt": "1"}, unavailable=lambda: "no compiler"))
    assert shown() == [], "what cannot be asked runs its anchor"
    ScheduledOp(family(equal, slow, versions=lambda: {"cublaslt": "1"}))
    assert shown() == [], "a schedule more"
    del schedule._ops["fake"]
    assert len(shown()) == 4, "of an op that is not loaded only the machine is known"


def test_the_report_shows_every_schedule() -> None:
    op = ScheduledOp(family(split_k, equal))
    op(*arguments())
    rows = [row for row in schedule.report(torch.device("cpu")) if row["op"] == "fake"]
    assert [(row["schedule"], row["certified"], row["chosen"]) for row in rows] == [
        (ANCHOR, True, False), ("fake.split_k", False, False), ("fake.equal", True, True),
    ]  # fmt: skip
    assert rows[1]["first"]["index"] and rows[2]["speed"] > 1
    json.dumps(rows)


def test_what_another_thread_adds_stops_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class or an op that comes while they are listed: described, it adds itself."""
    made = family(unavailable=lambda: "no compiler")
    op: Any = None

    def describe(key: Any) -> dict[str, Any]:
        op._bound.setdefault((*key, "more"), {})
        op._failed.setdefault((*key, "more"), "why")
        return made.describe(key)

    op = ScheduledOp(replace(made, describe=describe))
    for classes in (op._bound, op._failed):
        classes[True, (5, 64), torch.float32] = (classes is op._failed and "why") or {}
    assert op.unsupported() and op.failures()

    class Adds:
        def clear(self) -> None:
            schedule._ops.setdefault("more", op)

    op._runs = Adds()
    with schedule.without():
        assert "more" in schedule._ops


@pytest.mark.filterwarnings("ignore:rlkernel:RuntimeWarning")
def test_strict_refuses_what_could_not_be_built() -> None:
    x, w = arguments()
    for runs in ((), (equal,), (split_k,)):
        made = family(*runs)
        op = ScheduledOp(replace(made, schedules=(built([True]), *made.schedules)))
        assert torch.equal(op(x, w), anchor(x, w))
        with schedule.strict(), pytest.raises(UncertifiedError, match=r"fake\.built.*no compiler"):
            op(x, w)
    with schedule.strict():
        with pytest.raises(UncertifiedError, match="no kernel image"):
            ScheduledOp(family(raises))(x, w)
        assert torch.equal(ScheduledOp(family(raises, equal))(x, w), anchor(x, w)), "one is certified"
        assert torch.equal(ScheduledOp(family(split_k))(x, w), anchor(x, w)), "a verdict"


def test_a_class_that_no_schedule_computes_needs_no_compiler() -> None:
    x, w = arguments()
    made = family(unavailable=lambda: "no compiler")
    op = ScheduledOp(replace(made, schedules=(Schedule("fake.none", lambda key: equal, lambda key: False),)))
    with schedule.strict():
        assert torch.equal(op(x, w), anchor(x, w))
    assert op.unsupported() and not op.failures()


def fails_at_nine(error: type[Exception]) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        if len(x) == 9:
            raise error("status 13 at 9 rows")
        return equal(x, w)

    return run


@pytest.mark.parametrize("warm", (None, shapes([])), ids=("by key", "by shape"))
def test_a_certified_schedule_that_fails_gives_way_to_the_anchor(warm: Any) -> None:
    op = ScheduledOp(replace(family(fails_at_nine(LaunchError)), warm=warm))
    (x, w), (nine, _) = arguments(), arguments(m=9)
    assert torch.equal(op.call(x, w), anchor(x, w)) and op.chosen(x, w) != ANCHOR
    with pytest.warns(RuntimeWarning, match=r"fake.*'weight': \(5, 64\).*fake\.run.*status 13 at 9 rows"):
        assert torch.equal(op.call(nine, w), anchor(nine, w))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (nine, x):
            assert torch.equal(op.call(rows, w), anchor(rows, w)), "told once"
    assert op.chosen(x, w) == ANCHOR and "status 13" in op.failures()[0][1]
    shown = {row["schedule"]: row["chosen"] for row in schedule.report(torch.device("cpu")) if row["op"] == "fake"}
    assert shown == {ANCHOR: True, "fake.run": False}
    with schedule.strict(), pytest.raises(UncertifiedError, match="status 13"):
        op.call(x, w)
    op.forget(verdicts=True)
    assert [row["chosen"] for row in schedule.report(torch.device("cpu")) if row["op"] == "fake"] == [False, True]
    with schedule.strict(), pytest.raises(UncertifiedError, match="status 13"):
        op.call(nine, w)


def test_a_call_that_the_anchor_has_finished_is_told_and_not_made_again() -> None:
    op, (x, w) = ScheduledOp(family(equal)), arguments()
    assert torch.equal(op.call(x, w), anchor(x, w))
    full, failed = FinishedError("cuLaunchKernel failed: out of memory (2)"), FinishedError("status 13")
    with pytest.warns(RuntimeWarning, match=r"fake.*'weight': \(5, 64\).*met FinishedError: .*out of memory") as told:
        assert op._instead(full, equal, x, w) is None and op._instead(full, equal, x, w) is None
    assert len(told) == 1 and op.chosen(x, w) == "fake.equal" and not op.failures(), "no fault of the schedule's"
    with pytest.warns(RuntimeWarning, match=r"fake.*runs its anchor: .*status 13"):
        assert op._instead(failed, equal, x, w) is None
    assert op.chosen(x, w) == ANCHOR


def test_a_finished_call_raises_in_no_mode() -> None:
    x, w = arguments()
    for error in (FinishedError("status 13"), FinishedError("cuLaunchKernel failed: out of memory (2)")):
        op = ScheduledOp(family(equal))
        op(x, w)
        with schedule.strict(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert op._instead(error, equal, x, w) is None
            if op.failures():
                with pytest.raises(UncertifiedError, match="status 13"):
                    op(x, w)
        assert bool(op.failures()) == ("13" in str(error))


def add(x: Tensor, w: Tensor, grad: Tensor) -> None:
    grad += anchor(x, w)


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("said", ("cuLaunchKernel failed: out of memory (2)", "the resource allocation failed (3)"))
def test_a_launch_without_memory_is_the_anchors_in_that_call(said: str, strict: bool) -> None:
    """Raised, it would have a caller add again what calls before this one have added."""
    met: list[Exception] = []

    def meets(x: Tensor, w: Tensor, grad: Tensor) -> None:
        if met:
            raise met[0]
        add(x, w, grad)

    made = family()
    op = ScheduledOp(
        replace(
            made, anchor=add, mutates=(2,), schedules=(Schedule("fake.meets", lambda key: meets),),
            key=lambda x, w, grad: made.key(x, w),
            sample=lambda key, m, kind, g: (*made.sample(key, m, "normal", g), torch.ones(m, key[1][0])),
        )
    )  # fmt: skip
    (x, w), grad = arguments(), torch.zeros(3, 5)
    op(x, w, grad)
    met.append(LaunchError(said))
    with schedule.strict(strict), warnings.catch_warnings():
        warnings.simplefilter("error")
        op(x, w, grad)
    assert torch.equal(grad, 2 * anchor(x, w)) and not op.failures()
    op.forget()
    with pytest.warns(RuntimeWarning, match="fake.meets met LaunchError") as told:
        op(x, w, grad)
        op(x, w, grad)
    assert len(told) == 1 and op.chosen(x, w, grad) == "fake.meets"
    met[0] = LaunchError(f"{said}; the graph capture of its stream is broken")
    with pytest.raises(LaunchError, match="broken"):
        op(x, w, grad)
    assert torch.equal(grad, 4 * anchor(x, w))


@pytest.mark.parametrize("when", ("before", "during", "gone"))
def test_sources_that_an_update_has_replaced_certify_nothing(when: str, cache: Path, tmp_path: Path) -> None:
    """What runs is the old code: its verdict must not lie under the new one's hash."""
    source = tmp_path / "kernels.py"
    source.write_text("old")
    judged: list[int] = []

    def updates(x: Tensor, w: Tensor) -> Tensor:
        judged.append(1)
        if when == "during":
            source.write_text("new")
        return equal(x, w)

    op = ScheduledOp(family(updates, sources=(source,)))
    if when == "before":
        source.write_text("new")
    elif when == "gone":
        source.unlink()
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match=r"fake.*runs its anchor, kernels\.py changed since .*restart it"):
        assert torch.equal(op(x, w), anchor(x, w))
    assert op.chosen(x, w) == ANCHOR and not list(cache.glob("*.json")) and bool(judged) == (when == "during")
    with schedule.strict(), pytest.raises(UncertifiedError, match=r"kernels\.py changed"):
        op(x, w)
    if when == "before":
        source.write_text("old")
        op.forget()
        assert op.chosen(x, w) == "fake.updates"


@pytest.mark.parametrize("error", (LaunchError, torch.OutOfMemoryError))
def test_a_schedule_that_cannot_be_loaded_keeps_its_verdict(error: type[Exception], cache: Path) -> None:
    full: list[bool] = []

    def bind(key: Any) -> Callable[..., Tensor]:
        if full:
            raise error("cuModuleLoadData failed: out of memory (2)")
        return equal

    offer = lambda: ScheduledOp(replace(family(), schedules=(Schedule("fake.loaded", bind),)))
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


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize(
    "error",
    (
        LaunchError("cuLaunchKernel failed: operation failed due to a previous error during capture (901)"),
        LaunchError("cuLaunchKernel failed: operation not permitted when stream is capturing (900)"),
        LaunchError("cuBLASLt failed: ... (status 13); the graph capture of its stream is broken"),
        RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ),
    ids=str,
)  # fmt: skip
def test_what_a_call_met_is_the_callers_and_switches_nothing_off(error: Exception, strict: bool) -> None:
    met: list[Exception] = []

    def meets(x: Tensor, w: Tensor) -> Tensor:
        if met:
            raise met[0]
        return equal(x, w)

    op = ScheduledOp(family(meets))
    x, w = arguments()
    with schedule.strict(strict), warnings.catch_warnings():
        warnings.simplefilter("error")
        op(x, w)
        met.append(error)
        with pytest.raises(type(error)) as raised:
            op(x, w)
        assert raised.value is error
        met.clear()
        assert torch.equal(op(x, w), anchor(x, w))
        assert op.chosen(x, w) == "fake.meets" and not op.failures()


def test_what_the_anchor_raises_or_a_schedule_that_has_begun_to_write_is_the_callers() -> None:
    x, w = arguments(m=9)
    with schedule.without(), pytest.raises(ValueError, match="no kernel image"):
        op = ScheduledOp(family(equal))
        op.family.__dict__["anchor"] = raises
        op._instead(ValueError("no kernel image"), raises, x, w)
    with pytest.raises(torch.OutOfMemoryError):
        ScheduledOp(family(fails_at_nine(torch.OutOfMemoryError)))(x, w)
    writes = replace(family(fails_at_nine(ValueError)), mutates=(0,))
    with pytest.raises(ValueError, match="status 13"):
        ScheduledOp(writes)(x, w)
    assert not ScheduledOp(writes).failures()


def test_a_switch_in_another_thread_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    op = ScheduledOp(family(equal))
    x, w = arguments()
    settle = op._settle
    switched, ends = threading.Event(), threading.Event()

    def switch() -> None:
        with schedule.without():
            switched.set()
            ends.wait(10)

    other = threading.Thread(target=switch)

    def between(key: Any) -> Any:
        found = settle(key)
        if not other.is_alive() and not switched.is_set():
            other.start()  # waits for the lock until the answer is stored, then clears it
            switched.wait(0.2)
        return found

    monkeypatch.setattr(op, "_settle", between)
    op(x, w)
    assert switched.wait(10)
    try:
        assert op._runs == {}, "decided before the switch"
    finally:
        ends.set()
        other.join()
