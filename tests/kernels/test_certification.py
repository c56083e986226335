"""Certification without a GPU: fake schedules of a product on the CPU, right and wrong ones, and their verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import (
    WRONG,
    K,
    Shape,
    anchor,
    arguments,
    built,
    chain,
    counted,
    equal,
    raises,
    slow,
    spec,
    split_k,
)
from torch import Tensor

from rlkernel.kernels import build, certification, samples, scheduled_op
from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.errors import LaunchError
from rlkernel.kernels.samples import values
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.verdicts import ANCHOR, FORMAT, _sha256

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda run: run.__name__)
def test_a_wrong_schedule_is_refused_with_the_first_differing_element(wrong: Callable[..., Tensor]) -> None:
    op = ScheduledOp(spec(wrong, equal))
    x, w = arguments()
    verdict = op.verdict(x, w)
    assert verdict is not None
    refused, right = verdict.trials
    assert not refused.certified and right.certified and refused.ms is None
    first = refused.first
    assert first is not None and first["kind"] in samples.KINDS and first["rows"] in (2, 6)
    assert len(first["index"]) == 2 and first["actual"] != first["expected"]
    assert 0 < first["mismatches"] <= first["elements"] == first["rows"] * 5
    assert op.chosen(x, w) == "fake.equal"
    assert torch.equal(op(x, w), anchor(x, w))


def to_largest(x: Tensor, w: Tensor) -> Tensor:
    return torch.nan_to_num(anchor(x, w), nan=float("nan"))


def nan_to_zero(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(anchor(x, w).isnan(), 0.0, anchor(x, w))


def other_nan(x: Tensor, w: Tensor) -> Tensor:
    y = anchor(x, w)
    return torch.where(y.isnan(), torch.tensor(-0x200001, dtype=torch.int32).view(torch.float32), y)


def test_infinities_and_nans_are_compared_but_not_nan_payloads() -> None:
    kinds = (*samples.KINDS, samples.NONFINITE)
    verdict = ScheduledOp(spec(to_largest, nan_to_zero, other_nan, equal, kinds=kinds)).verdict(*arguments())
    assert verdict is not None and verdict.kinds == list(kinds)
    assert [trial.certified for trial in verdict.trials] == [False, False, True, True]
    assert all(trial.first["kind"] == samples.NONFINITE for trial in verdict.trials[:2] if trial.first)
    finite = ScheduledOp(spec(to_largest)).verdict(*arguments(n=7))
    assert finite is not None and finite.trials[0].certified, "only families with NONFINITE compare infinities"


def test_the_evidence_is_reproducible() -> None:
    op = ScheduledOp(spec(split_k))
    x, w = arguments()
    first = op.verdict(x, w)
    assert first is not None
    again, _ = certification.certify(op.spec, op.spec.shape(x, w), first.seed)
    assert again.trials[0].first == first.trials[0].first is not None


def test_the_fastest_equal_one_is_chosen_and_the_anchor_where_none_is_faster() -> None:
    x, w = arguments()
    assert ScheduledOp(spec(slow, equal)).chosen(x, w) == "fake.equal"
    assert ScheduledOp(spec(slow, split_k)).chosen(x, w) == ANCHOR


def test_a_schedule_that_raises_is_refused_with_its_message() -> None:
    op = ScheduledOp(spec(raises, equal))
    verdict = op.verdict(*arguments())
    assert verdict is not None and "no kernel image" in verdict.trials[0].reason and not verdict.trials[0].certified
    assert op.chosen(*arguments()) == "fake.equal"


def test_an_algorithm_that_a_library_lacks_is_refused_without_a_warning() -> None:
    tried: list[Any] = []

    def bind(key: Any) -> Callable[..., Tensor]:
        tried.append(key)
        raise RuntimeError("cuBLASLt: cublasLtMatmulAlgoCheck failed with status 15")

    made = spec(equal)
    made = replace(made, schedules=(Schedule("fake.unknown", bind), *made.schedules))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op = ScheduledOp(made)
            assert op.chosen(*arguments()) == "fake.equal"
            with scheduled_op.strict():
                op(*arguments())
        trial = op.verdicts()[0].trials[0]
        assert not trial.certified and trial.reason.startswith("not offered here: ") and "status 15" in trial.reason
    assert len(tried) == 1, "the stored verdict records it"


def test_verdicts_are_kept_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    x, w = arguments()
    ScheduledOp(spec(equal, anchor=counted(calls)))(x, w)
    certified = len(calls)
    assert certified == 2 * len(samples.KINDS)
    op = ScheduledOp(spec(equal, anchor=counted(calls)))
    op(x, w)
    assert len(calls) == certified, "the file of the first op served the second"
    op(*arguments(m=9))
    assert len(calls) == certified, "the same bucket of rows"
    op(*arguments(n=6))
    other_shape = len(calls)
    assert other_shape > certified
    ScheduledOp(spec(equal, anchor=counted(calls), versions=lambda: {"cublaslt": "2"}))(x, w)
    other_version = len(calls)
    assert other_version > other_shape
    monkeypatch.setattr(certification, "source_digest", lambda: "another")
    ScheduledOp(spec(equal, anchor=counted(calls)))(x, w)
    assert len(calls) > other_version


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "", "cut": lambda text: text[:-9], "list": lambda text: "[]",
    "no data": lambda text: f'{{"format": {FORMAT}}}',
    "changed": lambda text: text.replace('"certified": true', '"certified": false'),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_corrupt_file_is_ignored_with_a_warning(cache: Path, damage: Callable[[str], str]) -> None:
    x, w = arguments()
    ScheduledOp(spec(equal))(x, w)
    (path,) = cache.glob("*.json")
    whole = path.read_text()
    path.write_text(damage(whole))
    del scheduled_op._ops["fake"]
    with pytest.warns(RuntimeWarning, match="unreadable verdict"):
        assert not [row for row in scheduled_op.report(torch.device("cpu")) if row["op"] == "fake"]
    with pytest.warns(RuntimeWarning, match="unreadable verdict"):
        assert ScheduledOp(spec(equal)).chosen(x, w) == "fake.equal"
    assert json.loads(path.read_text()).keys() == json.loads(whole).keys()
    assert not list(cache.glob("*.tmp"))


def test_users_that_share_a_cache_read_each_others_verdicts(cache: Path) -> None:
    before = os.umask(0o022)
    try:
        ScheduledOp(spec(equal))(*arguments())
    finally:
        os.umask(before)
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_of_another_format_or_identity_is_ignored(cache: Path) -> None:
    x, w = arguments()
    ScheduledOp(spec(split_k))(x, w)
    (path,) = cache.glob("*.json")
    data = json.loads(path.read_text())["data"]
    data["trials"][0].update(certified=True, ms=0.0, least=1 << 14)
    other = {**data, "identity": {**data["identity"], "driver": "another"}}
    for format, content in ((0, data), (FORMAT, other)):
        path.write_text(json.dumps({"format": format, "sha256": _sha256(content), "data": content}))
        with pytest.warns(RuntimeWarning, match="its name does not match") if format else contextlib.nullcontext():
            assert ScheduledOp(spec(split_k)).chosen(x, w) == ANCHOR


def test_a_full_disk_costs_a_warning_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="could not keep a verdict in .*No space left"):
        assert ScheduledOp(spec(equal)).chosen(*arguments()) == "fake.equal"
    assert list(cache.iterdir()) == []


def test_installing_a_compiler_voids_the_verdict() -> None:
    missing, calls = [True], []
    versions = lambda: {"compiler": "none" if missing[0] else "1"}
    offer = lambda: ScheduledOp(replace(spec(anchor=counted(calls), versions=versions), schedules=(built(missing),)))
    x, w = arguments()
    made = []
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"runs without fake\.built: not offered here: .*no compiler"):
            assert offer().chosen(x, w) == ANCHOR
        made.append(len(calls))
    assert made[0] == made[1], "the stored verdict is used without a compiler"
    missing[0] = False
    assert offer().chosen(x, w) == "fake.built"


@pytest.mark.parametrize("error", (LaunchError, torch.OutOfMemoryError))
def test_nothing_is_kept_if_a_schedule_cannot_be_loaded(error: type[Exception], cache: Path) -> None:
    full = [True]

    def bind(key: Any) -> Callable[..., Tensor]:
        if full[0]:
            raise error("cuModuleLoadData failed: out of memory (2)")
        return equal

    offer = lambda: ScheduledOp(replace(spec(), schedules=(Schedule("fake.loaded", bind),)))
    x, w = arguments()
    with pytest.warns(RuntimeWarning, match=r"runs its anchor, certification failed: .*out of memory"):
        assert offer().chosen(x, w) == ANCHOR
    assert not cache.exists()
    full[0] = False
    assert offer().chosen(x, w) == "fake.loaded"


def test_a_verdict_is_void_if_the_schedule_has_another_note() -> None:
    algorithm = ["; algorithm 1"]

    def bind(key: Any) -> Callable[..., Tensor]:
        run = lambda x, w: equal(x, w)
        run.note = algorithm[0]  # type: ignore[attr-defined]
        return run

    calls: list[int] = []
    offer = lambda: ScheduledOp(replace(spec(anchor=counted(calls)), schedules=(Schedule("fake.ranked", bind),)))
    x, w = arguments()
    offer()(x, w)
    certified = len(calls)
    offer()(x, w)
    assert len(calls) == certified, "the same algorithm: the stored verdict is used"
    algorithm[0] = "; algorithm 2"
    offer()(x, w)
    assert len(calls) > certified, "another algorithm under the same name is certified anew"


def product_and_sum(x: Tensor, w: Tensor, grad: Tensor, flat: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns two results and None; adds to `grad`, and fills `flat` unless it is None."""
    grad += chain(x.t(), torch.ones(1, x.shape[0]), range(x.shape[0]))[:, 0]
    if flat is not None:
        flat.fill_(2)
    return chain(x, w, range(K)), None, x.sum(0)


def many_results(run: Callable[..., Any], name: str = "many.run") -> OpSpec[Shape]:
    grad = lambda m, kind, g: values(kind, 1, K, torch.float32, g)[0]
    return OpSpec(
        "many", product_and_sum, lambda x, w, grad, flat: Shape(x.shape[0] > 1, (5, K), torch.float32),
        lambda s: [2, 6],
        lambda s, m, kind, g: (values(kind, m, K, torch.float32, g), values(kind, 5, K, torch.float32, g),
                                 grad(m, kind, g), None),
        [Schedule(name, lambda key: run)], mutates=(2, 3),
    )  # fmt: skip


@pytest.fixture
def mode() -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Reads torch's deterministic mode: (on, only warns). The mode is off afterwards."""
    yield lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    torch.use_deterministic_algorithms(False)


def puts(x: Tensor, w: Tensor) -> Tensor:
    """Calls an op that raises in torch's deterministic mode."""
    y = equal(x, w)
    return y.put_(torch.tensor([0]), y[0, :1].clone())


@pytest.mark.filterwarnings("ignore:put_ does not have:UserWarning")
def test_torchs_deterministic_mode_does_not_stop_certification(mode: Callable[[], tuple[bool, bool]]) -> None:
    plain = spec(puts)
    seen = set()

    def sample(key: Any, m: int, kind: str, g: torch.Generator) -> tuple[Tensor, ...]:
        seen.add(mode())
        x, w = plain.sample(key, m, kind, g)
        return x.put_(torch.tensor([0]), x[0, :1].clone()), w

    made = replace(plain, sample=sample)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        puts(*arguments())
    op = ScheduledOp(made)
    verdict = op.verdict(*arguments())
    assert verdict is not None and verdict.trials[0].certified and not op.failures()
    assert seen == {(True, True)}, "the mode stays on and only warns, because other threads see it"
    assert mode() == (True, False)
    for before in ((False, False), (True, True)):
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        certification.certify(made, made.shape(*arguments()))
        assert mode() == before

    def fails(*_: Any) -> Any:
        raise ValueError("no sample")

    torch.use_deterministic_algorithms(True)
    with pytest.raises(ValueError, match="no sample"):
        certification.certify(replace(made, sample=fails), made.shape(*arguments()))
    assert mode() == (True, False)


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
            assert trial.elements == len(samples.KINDS) * ((2 * 5 + K + K) + (6 * 5 + K + K))
        return trial.first

    assert run("equal", lambda y, none, total, grad: (y, none, total)) is None
    second = run("second", lambda y, none, total, grad: (y, none, total + 1))
    assert second is not None and second["result"] == 1 and len(second["index"]) == 1
    in_place = run("in place", lambda y, none, total, grad: (grad.add_(1), (y, none, total))[1])
    assert in_place is not None and in_place["result"] == 2
    fewer = run("fewer", lambda y, none, total, grad: y)
    assert fewer is not None and fewer["actual"].count("torch.float32") == 2


def test_an_op_in_place_leaves_its_sample_to_the_next_candidate() -> None:
    grad = torch.randn(K)
    before = grad.clone()
    op = ScheduledOp(many_results(product_and_sum))
    assert op.verdict(torch.randn(3, K), torch.randn(5, K), grad, None)
    assert torch.equal(grad, before), "certification runs on its own data"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", (*samples.KINDS, samples.NONFINITE))
def test_values_are_what_their_kind_says(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = values(kind, 7, 512, dtype, g), values(kind, 5, 512, dtype, g, second=True)
    assert x.dtype == w.dtype == dtype
    if kind == samples.NONFINITE:
        w = values(kind, 64, 512, dtype, g, second=True)
        y = (x.float() @ w.float().T).to(dtype)
        plain = y[:, 2:]
        assert x[0].isfinite().all() and plain[0].isinf().any() and plain[0].isfinite().any(), "overflow"
        assert plain[1:3].isinf().all() and plain[3].isnan().all() and plain[4].isnan().any() and plain[4].isinf().any()
        assert plain[5:].isfinite().all() and y[5, 1].isnan() and y[6, 1].isinf(), "zero times infinity"
        assert torch.equal(values(samples.finite(kind), 2, 9, dtype, g).isfinite(), torch.ones(2, 9).bool())
        return
    assert x.isfinite().all() and w.isfinite().all()
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
    assert b"/nowhere/libcublasLt.so.13" in library.rlk_lt_error() and library.rlk_lt_status() == 0


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_CUDA_HEADERS", ("no_such_header.h",))
    with pytest.raises(build.BuildError, match=r"no_such_header\.h.*set CUDA_HOME"):
        build.cuda_includes(tmp_path / "lib" / "libcublasLt.so.13")
