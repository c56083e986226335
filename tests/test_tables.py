"""The generated tables of the documentation, and the targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import figures
import tables

ENVIRONMENT = {
    "versions": {},
    "hardware": "h",
    "contract": "c",
    "kernel_sha": "s",
    "commit": "abc1234",
    "date": "2026-01-01",
    "command": "x",
}


def result(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**ENVIRONMENT, **more, "rows": rows}))
    return path


def test_wide_table_has_a_column_an_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    one = {"op": "T", "shape": [8], "ours": "a", "ours_ms": 1.5, "peak_gib": 0.25, "note": None}
    rows = [
        {**one, "baseline": "b", "baseline_ms": 3.0, "baseline_peak_gib": None},
        {**one, "baseline": "c", "baseline_ms": None, "baseline_peak_gib": None, "note": "c: out of memory: 9 GiB"},
    ]
    text = tables.wide(result(tmp_path, "r", rows, notes=["d is not installed"]))
    assert "| op | shape | a, ms | b, ms | c, ms |" in text
    assert "| T | 8 | 1.5, 0.25 GiB | 3 | out of memory |" in text and "Left out: d is not installed." in text


def test_a_table_names_what_never_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = [{"tool": "memcheck", "what": "linear", "errors": 0}]
    text = tables.table(result(tmp_path, "sanitize", rows, passed=False, not_launched=["linear:cublaslt.3"]))
    assert "Not passed; never launched: linear:cublaslt.3." in text
    assert "launched" not in tables.table(result(tmp_path, "sanitize", rows, passed=True, not_launched=[]))


def test_sums_separate_controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    row = {"test": "test_a", "cases": 2, "tokens": 10, "mismatches": 0, "max_abs_diff": 0.0}
    control = {**row, "test": "test_control_differs", "mismatches": 9, "max_abs_diff": 0.5}
    rows = [row, {**row, "test": "test_b"}, control]
    counts = {"tests": 5, "failures": 1, "errors": 0, "skipped": 1}
    text = tables.sums(result(tmp_path, "test_gpu", rows, pytest=counts))
    assert (
        "| rlkernel | 2 | 4 | 20 | 0 | 0 | 0 |" in text and "| control: stock ops | 1 | 2 | 10 | 0 | 9 | 0.5 |" in text
    )
    assert "3 tests passed, 1 failed, 1 skipped. h, , contract c, commit `abc1234`" in text
    reasons = ["tests.gpu.test_a::test_b[at 2: 3]: needs two GPUs", "tests.gpu.test_a::test_c: needs two GPUs"]
    text = tables.sums(result(tmp_path, "test_gpu", rows, pytest=counts, skipped=reasons))
    assert "1 skipped (needs two GPUs)." in text
    unknown = result(tmp_path, "test_gpu", rows, pytest=counts, commit=None)
    assert "unknown commit (older kernels)" in tables.sums(unknown)


def test_sums_count_what_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that belong to no token are summed separately, and refused schedules do not count as equal."""
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


def test_targets_name_the_commit_of_each_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "has_current_kernels", lambda commit: commit == "def5678")
    of = {"linear": ("abc1234", "01"), "attention": ("def5678", "02"), "linear_logprob": ("abc1234", "01")}
    for name, (commit, day) in of.items():
        result(tmp_path, f"bench_{name}", [], commit=commit, date=f"2026-01-{day}")
    result(tmp_path, "bench_memory_bound", [{"op": "rope", "share_of_roofline": 0.9}], commit=None)
    *_, first, _, second, _, third, _ = tables.reach(tmp_path).split("\n")
    assert "commit `abc1234` (older kernels), 2026-01-01: `bench_linear`, `bench_linear_logprob`" in first
    assert second.endswith("commit `def5678`, 2026-01-02: `bench_attention`")
    assert third.endswith("unknown commit (older kernels), 2026-01-01: `bench_memory_bound`")


@pytest.mark.parametrize("share,reached", (((0.86, 0.9), "yes"), ((0.86, 0.84), "no"), ((0.9, None), "no")))
def test_a_target_is_reached_only_if_every_case_reaches_it(
    tmp_path: Path, share: tuple[float, float], reached: str
) -> None:
    assert line(tmp_path, "rope")["reached"] == "" and line(tmp_path, "rope")["cases"] == ""
    result(tmp_path, "bench_memory_bound", [{"op": "rope", "share_of_roofline": s} for s in share])
    assert line(tmp_path, "rope")["reached"] == reached


def test_incremental_bytes_have_their_own_target(tmp_path: Path) -> None:
    """Uses the two largest of three sizes, which have a fixed cost of 4 us and a constant bandwidth."""
    at = lambda tokens, ms, floor: {
        "op": "rope", "shape": [tokens, 8], "ours_ms": ms, "share_of_roofline": floor / ms
    }  # fmt: skip
    rows = [at(100, 0.9, 0.01), at(4000, 0.044, 0.036), at(8000, 0.084, 0.072)]
    other = {**at(8000, 0.084, 0.072), "op": "rope fwd+bwd"}  # of one size
    result(tmp_path, "bench_memory_bound", [*rows[::-1], other])
    found = line(tmp_path, "rope, incremental bytes")
    assert found["least"] == found["most"] == "0.9" and found["reached"] == "yes"
    rows[1:] = at(4000, 0.044, 0.036), at(8000, 0.09, 0.072)
    result(tmp_path, "bench_memory_bound", rows)
    assert line(tmp_path, "rope, incremental bytes")["reached"] == "no"


def test_a_value_just_below_the_target_is_not_rounded_up_to_it() -> None:
    rows = lambda values: [{"v": v} for v in values]
    line = lambda *values: figures._line("op", "", figures.at_least(0.85, ""), rows(values), lambda row: row["v"])
    assert line(0.84951)["least"] == "0.8495" and line(0.84951)["reached"] == "no"
    assert line(0.85049)["least"] == "0.85" and line(0.85049)["reached"] == "yes"
    some = line(0.84951, 0.9, 0.88, 0.9, None)
    assert (some["least"], some["most"], some["cases"]) == ("0.8495", "0.9", "3/5")


def test_a_target_shows_the_copys_value(tmp_path: Path) -> None:
    shares = ((0.9, 0.95), (0.6, 0.7), (0.8, 0.9), (0.7, 0.8))
    rows = [{"op": "rope", "share_of_roofline": a, "copy_share_of_roofline": b} for a, b in shares]
    result(tmp_path, "bench_memory_bound", [*rows, {"op": "logprob", "ours_ms": 0.34, "copy_ms": 0.3}])
    assert line(tmp_path, "rope")["copy"] == "0.7 to 0.95" and line(tmp_path, "rope")["reached"] == "no"
    assert line(tmp_path, "logprob, 4096 x 151936")["copy"] == "0.3 ms"


def test_the_largest_shape_has_its_own_line(tmp_path: Path) -> None:
    cases = (([8, 4], 0.7), ([16, 4], 0.9), ([16, 4], 0.86), ([32, 1], 0.6))
    rows = [{"op": "rope", "shape": n, "share_of_roofline": s} for n, s in cases]
    result(tmp_path, "bench_memory_bound", rows)
    found = line(tmp_path, "rope, 16 x 4 (largest shape)")
    assert (found["least"], found["most"], found["reached"]) == ("0.86", "0.9", "yes")
    assert line(tmp_path, "rope")["reached"] == "no"


def test_policy_loss_has_lines_for_all_cases_and_for_the_largest(tmp_path: Path) -> None:
    assert line(tmp_path, "policy_loss")["cases"] == ""
    cases = [(2048, 0.002), (1 << 24, 0.9), (131_072, 0.18)]
    rows = [{"op": "policy_loss fwd+bwd", "shape": [n], "share_of_roofline": s} for n, s in cases]
    result(tmp_path, "bench_memory_bound", rows)
    assert line(tmp_path, "policy_loss")["cases"] == "1/3"
    assert line(tmp_path, "policy_loss")["reached"] == "no"
    assert line(tmp_path, "policy_loss, 16,777,216 tokens (largest shape)")["reached"] == "yes"
    result(tmp_path, "bench_memory_bound", rows[1:2])
    assert line(tmp_path, "policy_loss")["reached"] == "yes"


def test_figures_take_times_of_the_right_rows(tmp_path: Path) -> None:
    row = {"op": "linear_logprob fwd+bwd", "baseline": "TRL 1.16.0 chunked", "ours_ms": 8.0, "baseline_ms": 10.0,
           "shape": [1 << 15, 1 << 12, 1 << 17], "peak_gib": 2.5}  # fmt: skip
    rows = [
        {**row, "ours": "rlkernel"},
        {**row, "ours": "rlkernel", "baseline": "Liger 0.8.5", "baseline_ms": 1.0},
        {**row, "ours": "rlkernel", "op": "linear_logprob fwd+bwd, 50% prompts", "ours_ms": 80.0},
        {**row, "ours": "rlkernel, main_grad", "peak_gib": 1.6},
    ]
    result(tmp_path, "bench_linear_logprob", rows)
    found = line(tmp_path, "linear_logprob, forward + backward")
    assert (found["least"], found["cases"], found["reached"]) == ("0.8", "1/1", "yes")
    found = line(tmp_path, "linear_logprob, memory beyond inputs and gradients")
    assert (found["most"], found["reached"]) == ("1.25", "yes")
    assert line(tmp_path, "linear_logprob, main_grad, memory beyond inputs and main_grad")["reached"] == "no"
    assert line(tmp_path, "linear_logprob, keep_probs, forward + backward")["cases"] == ""


def test_the_anchor_of_attention_has_its_own_target(tmp_path: Path) -> None:
    row = {"op": "attention forward", "baseline": "FlashAttention-3"}
    rows = [
        {**row, "ours": "certified: hopper.skip", "ratio": 0.83},
        {**row, "ours": "triton", "ratio": 0.58},
        {**row, "ours": "triton", "ratio": 0.61},
        {**row, "op": "attention", "ours": "triton", "ratio": 0.99},  # an old record, which does not say what ran
    ]
    result(tmp_path, "bench_attention", rows)
    found = line(tmp_path, "attention forward, Triton anchor")
    assert (found["least"], found["most"], found["reached"]) == ("0.58", "0.61", "no")
    found = line(tmp_path, "attention forward, certified schedule")
    assert (found["least"], found["reached"]) == ("0.83", "yes")
    result(tmp_path, "bench_attention", rows[3:])
    assert line(tmp_path, "attention forward, Triton anchor")["cases"] == ""
