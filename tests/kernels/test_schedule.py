"""Certified schedules without a GPU: fake schedules of a product on the CPU, right and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkernel.kernels import build, certification, clock, schedule
from rlkernel.kernels.certification import Family, First, Instead, Run, Runs, Schedule, Warm, values
from rlkernel.kernels.errors import BuildError, LaunchError
from rlkernel.kernels.schedule import ScheduledOp, UncertifiedError
from rlkernel.kernels.verdicts import ANCHOR

K = 64


def chain(x: Tensor, w: Tensor, ks: range, start: Tensor | None = None) -> Tensor:
    total = torch.zeros(x.shape[0], w.shape[0]) if start is None else start
    for k in ks:
        total = total + x[:, k : k + 1].float() * w[:, k].float()
    return total


def anchor(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def equal(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def slow(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def other_k_order(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K - 1, -1, -1)).to(x.dtype)


def split_k(x: Tensor, w: Tensor) -> Tensor:
    return (chain(x, w, range(K // 2)) + chain(x, w, range(K // 2, K))).to(x.dtype)


def tf32(x: Tensor, w: Tensor) -> Tensor:
    cut = lambda t: (t.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return chain(cut(x), cut(w), range(K)).to(x.dtype)


def low_precision_sum(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    for k in range(K):
        total = (total.float() + x[:, k : k + 1].float() * w[:, k].float()).bfloat16()
    return total.to(x.dtype)


def other_layout(x: Tensor, w: Tensor) -> Tensor:
    """A row's sum over four lanes, added across at the end: what another distribution over warps does."""
    lanes = [chain(x, w, range(lane, K, 4)) for lane in range(4)]
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])).to(x.dtype)


def two_roundings(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(torch.bfloat16).to(x.dtype)


def no_negative_zero(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K), torch.full((x.shape[0], w.shape[0]), -0.0)).to(x.dtype)


def flushes_denormals(x: Tensor, w: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    return chain(torch.where(x.abs() < tiny, 0 * x, x), w, range(K)).to(x.dtype)


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError("no kernel image")


def writes_nothing(x: Tensor, w: Tensor) -> Tensor:
    return torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype)


def row_dependent(x: Tensor, w: Tensor) -> Tensor:
    return (split_k if x.shape[0] > 4 else equal)(x, w)


WRONG = (
    other_k_order, split_k, tf32, low_precision_sum, other_layout, two_roundings, no_negative_zero, flushes_denormals,
    writes_nothing, row_dependent,
)  # fmt: skip


def family(*runs: Callable[..., Tensor], anchor: Callable[..., Tensor] = anchor, **fields: Any) -> Family:
    return Family(
        "fake", anchor, lambda x, w: (x.shape[0] > 1, tuple(w.shape), x.dtype),
        lambda key: {"M": int(key[0]), "weight": key[1], "dtype": str(key[2])}, lambda key: torch.device("cpu"),
        lambda key: [2, 6] if key[0] else [1],
        lambda key, m, kind, g: (values(kind, m, K, key[2], g), values(kind, key[1][0], K, key[2], g, second=True)),
        [Schedule(f"fake.{run.__name__}", lambda key, run=run: run) for run in runs], **fields,
    )  # fmt: skip


def arguments(m: int = 3, n: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(m, K).to(dtype), torch.randn(n, K).to(dtype)


def milliseconds(candidates: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """In place of a clock, which a busy machine bends: an equal schedule wins, one called slow loses to the anchor."""
    return {name: 2.0 if name == ANCHOR else 4.0 if "slow" in name else 1.0 for name in candidates}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    before = dict(schedule._ops)
    yield tmp_path / "schedules"
    schedule._ops.clear()
    schedule._ops.update(before)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda run: run.__name__)
def test_a_wrong_schedule_is_refused_with_the_first_differing_element(wrong: Callable[..., Tensor]) -> None:
    op = ScheduledOp(family(wrong, equal))
    x, w = arguments()
    verdict = op.verdict(x, w)
    assert verdict is not None
    refused, right = verdict.trials
    assert not refused.certified and right.certified and refused.ms is None
    first = refused.first
    assert first is not None and first["kind"] in certification.KINDS and first["rows"] in (2, 6)
    assert len(first["index"]) == 2 and first["actual"] != first["expected"]
    assert 0 < first["mismatches"] <= first["elements"] == first["rows"] * 5
    assert op.chosen(x, w) == "fake.equal"
    assert torch.equal(op(x, w), anchor(x, w))


def test_the_evidence_is_reproducible() -> None:
    op = ScheduledOp(family(split_k))
    x, w = arguments()
    first = op.verdict(x, w)
    assert first is not None
    again, _ = certification.certify(op.family, op.family.key(x, w), first.seed)
    assert again.trials[0].first == first.trials[0].first is not None


def test_the_fastest_equal_one_is_chosen_and_the_anchor_where_none_is_faster() -> None:
    x, w = arguments()
    assert ScheduledOp(family(slow, equal)).chosen(x, w) == "fake.equal"
    assert ScheduledOp(family(slow, split_k)).chosen(x, w) == ANCHOR


def test_a_schedule_that_raises_is_refused_with_its_words() -> None:
    op = ScheduledOp(family(raises, equal))
    verdict = op.verdict(*arguments())
    assert verdict is not None and "no kernel image" in verdict.trials[0].reason and not verdict.trials[0].certified
    assert op.chosen(*arguments()) == "fake.equal"


def counted(calls: list[int]) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return anchor(x, w)

    return run


def test_verdicts_are_kept_by_key() -> None:
    calls: list[int] = []
    x, w = arguments()
    ScheduledOp(family(equal, anchor=counted(calls)))(x, w)
    certified = len(calls)
    assert certified == 2 * len(certification.KINDS)
    op = ScheduledOp(family(equal, anchor=counted(calls)))
    op(x, w)
    assert len(calls) == certified, "the file of the first op served the second"
    op(*arguments(m=9))
    assert len(calls) == certified, "the same bucket of rows"
    op(*arguments(n=6))
    other_shape = len(calls)
    assert other_shape > certified
    ScheduledOp(family(equal, anchor=counted(calls), versions=lambda: {"cublaslt": "2"}))(x, w)
    other_version = len(calls)
    assert other_version > other_shape
    ScheduledOp(family(equal, anchor=counted(calls), sources=(Path(__file__),)))(x, w)
    assert len(calls) > other_version


@pytest.mark.parametrize("text", ("", "{", "[]", '{"format": 2}', '{"format": 2, "identity": 3, "trials": [{}]}'))
def test_a_corrupt_file_is_ignored_with_a_warning(cache: Path, text: str) -> None:
    x, w = arguments()
    ScheduledOp(family(equal))(x, w)
    (path,) = cache.glob("*.json")
    whole = path.read_text()
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="unreadable verdict"):
        assert ScheduledOp(family(equal)).chosen(x, w) == "fake.equal"
    assert json.loads(path.read_text()).keys() == json.loads(whole).keys()
    assert not list(cache.glob("*.tmp"))


def test_a_file_of_another_format_or_identity_is_not_believed(cache: Path) -> None:
    x, w = arguments()
    ScheduledOp(family(split_k))(x, w)
    (path,) = cache.glob("*.json")
    data = json.loads(path.read_text())
    data["trials"][0].update(certified=True, ms=0.0)
    for change in ({"format": 0}, {"identity": {**data["identity"], "driver": "another"}}):
        path.write_text(json.dumps({**data, **change}))
        assert ScheduledOp(family(split_k)).chosen(x, w) == ANCHOR


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
    assert torch.equal(op(x, w), anchor(x, w))
    assert not cache.exists()
    with schedule.strict(), pytest.raises(UncertifiedError, match="graph capture"):
        op(x, w)
    capturing = False
    assert op.chosen(x, w) == "fake.equal"
    capturing = True
    assert op.chosen(x, w) == "fake.equal", "settled before, used inside"


def test_schedules_are_switched_off_and_on_again() -> None:
    x, w = arguments()
    op = ScheduledOp(family(equal, slow))
    y = op(x, w)
    for names in ((), ("fake",), ("fake.equal",)):
        with schedule.without(*names):
            assert op.chosen(x, w) == ANCHOR
            assert torch.equal(op(x, w), y)
    assert op.chosen(x, w) == "fake.equal"


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


def product_and_sum(x: Tensor, w: Tensor, grad: Tensor, flat: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns two results and no third, writes one of its two buffers where there are two."""
    grad += chain(x.t(), torch.ones(1, x.shape[0]), range(x.shape[0]))[:, 0]
    if flat is not None:
        flat.fill_(2)
    return chain(x, w, range(K)), None, x.sum(0)


def many_results(run: Callable[..., Any], name: str = "many.run") -> Family:
    grad = lambda m, kind, g: values(kind, 1, K, torch.float32, g)[0]
    return Family(
        "many", product_and_sum, lambda x, w, grad, flat: (x.shape[0] > 1,), lambda key: {"M": int(key[0])},
        lambda key: torch.device("cpu"), lambda key: [2, 6],
        lambda key, m, kind, g: (values(kind, m, K, torch.float32, g), values(kind, 5, K, torch.float32, g),
                                 grad(m, kind, g), None),
        [Schedule(name, lambda key: run)], mutates=(2, 3),
    )  # fmt: skip


def test_every_result_is_compared_also_those_in_place() -> None:
    def run(name: str, change: Callable[..., Any]) -> dict[str, Any] | None:
        def changed(x: Tensor, w: Tensor, grad: Tensor, flat: Tensor | None) -> Any:
            y, none, total = product_and_sum(x, w, grad, flat)
            return change(y, none, total, grad)

        op = ScheduledOp(many_results(changed, name))
        verdict = op.verdict(torch.randn(3, K), torch.randn(5, K), torch.randn(K), None)
        assert verdict is not None
        (trial,) = verdict.trials
        assert trial.certified == (trial.first is None)
        if trial.certified:
            assert trial.elements == len(certification.KINDS) * ((2 * 5 + K + K) + (6 * 5 + K + K))
        return trial.first

    assert run("equal", lambda y, none, total, grad: (y, none, total)) is None
    second = run("second", lambda y, none, total, grad: (y, none, total + 1))
    assert second is not None and second["result"] == 1 and len(second["index"]) == 1
    in_place = run("in place", lambda y, none, total, grad: (grad.add_(1), (y, none, total))[1])
    assert in_place is not None and in_place["result"] == 2
    fewer = run("fewer", lambda y, none, total, grad: y)
    assert fewer is not None and fewer["actual"] == "2 results"


def test_an_op_in_place_leaves_its_sample_to_the_next_candidate() -> None:
    grad = torch.randn(K)
    before = grad.clone()
    op = ScheduledOp(many_results(product_and_sum))
    assert op.verdict(torch.randn(3, K), torch.randn(5, K), grad, None)
    assert torch.equal(grad, before), "certification runs on data of its own"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", certification.KINDS)
def test_values_are_what_their_kind_says(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = values(kind, 7, 512, dtype, g), values(kind, 5, 512, dtype, g, second=True)
    assert x.dtype == w.dtype == dtype and x.isfinite().all() and w.isfinite().all()
    if kind == "wide":
        assert x.abs().max() / x[x != 0].abs().min() > 2**6
    if kind == "cancel":
        partial, total = (x[:, :256].double() @ w[:, :256].double().T), x.double() @ w.double().T
        assert partial.abs().median() > 4 * total.abs().median()
    if kind == "zeros":
        assert (x[0] == 0).all() and (w[0] >= 0).all() and (x == 0).float().mean() > 0.5
        assert (torch.signbit(x) & (x == 0)).any() and (~torch.signbit(x) & (x == 0)).any()
    if kind == "denormal":
        assert (x != 0).any() and (x.abs() < torch.finfo(dtype).tiny).float().mean() > 0.5


def test_the_bridge_to_cublaslt_compiles_against_the_headers() -> None:
    try:
        includes = build.cuda_includes()
    except build.BuildError as error:
        pytest.skip(str(error))
    import ctypes

    library = ctypes.CDLL(str(build.build_cublaslt(includes)))
    library.rlk_lt_error.restype = ctypes.c_char_p
    assert library.rlk_lt_open(b"/nowhere/libcublasLt.so.13") == 1
    assert b"/nowhere/libcublasLt.so.13" in library.rlk_lt_error()


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_CUDA_HEADERS", ("no_such_header.h",))
    with pytest.raises(build.BuildError, match=r"no_such_header\.h.*set CUDA_HOME"):
        build.cuda_includes(tmp_path / "lib" / "libcublasLt.so.13")


def built(missing: list[bool], runs: Callable[..., Tensor] = equal) -> Schedule:
    """A schedule that wants a compiler while `missing` says so."""

    def bind(key: Any) -> Callable[..., Tensor]:
        if missing[0]:
            raise BuildError("no compiler")
        return runs

    return Schedule("fake.built", bind)


def test_a_refusal_that_may_pass_is_tried_again_alone(cache: Path) -> None:
    missing, calls = [True], []
    compared: list[int] = []
    other = Schedule("fake.slow", lambda key: lambda x, w: (compared.append(1), slow(x, w))[1])
    offer = lambda: ScheduledOp(replace(family(anchor=counted(calls)), schedules=(built(missing), other)))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match=r"fake.*runs without fake\.built: .*no compiler"):
        assert offer().chosen(x, w) == ANCHOR
    assert len(list(cache.glob("*.json"))) == 1, "the other trials are kept"
    made = len(calls), len(compared)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert offer().chosen(x, w) == ANCHOR
    assert (len(calls), len(compared)) == made, "nothing is compared where there is still no compiler"
    missing[0] = False
    op = offer()
    assert op.chosen(x, w) == "fake.built" and len(compared) == made[1], "the other keeps its verdict"
    assert [trial.name for trial in op.verdicts()[0].trials if trial.certified] == ["fake.built", "fake.slow"]
    made = len(calls), len(compared)
    assert offer().chosen(x, w) == "fake.built" and (len(calls), len(compared)) == made


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
    import warnings

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


def test_a_verdict_is_void_where_the_schedule_is_another_one() -> None:
    algorithm = ["; algorithm 1"]

    def bind(key: Any) -> Callable[..., Tensor]:
        run = lambda x, w: equal(x, w)
        run.note = algorithm[0]  # type: ignore[attr-defined]
        return run

    calls: list[int] = []
    offer = lambda: ScheduledOp(replace(family(anchor=counted(calls)), schedules=(Schedule("fake.ranked", bind),)))
    x, w = arguments()
    offer()(x, w)
    certified = len(calls)
    offer()(x, w)
    assert len(calls) == certified, "the same algorithm: the file serves"
    algorithm[0] = "; algorithm 2"
    offer()(x, w)
    assert len(calls) > certified, "another algorithm under the same name is certified anew"
