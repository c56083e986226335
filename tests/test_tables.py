"""Tables of the documentation: what they say of records, and which figures are reached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import figures
import results_io
import sources
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
    assert "pytest at abc1234: 3 passed, 1 failed, 1 skipped." in text
    reasons = ["tests.gpu.test_a::test_b[at 2: 3]: needs two GPUs", "tests.gpu.test_a::test_c: needs two GPUs"]
    text = tables.sums(result(tmp_path, "test_gpu", rows, pytest=counts, skipped=reasons))
    assert "1 skipped (needs two GPUs)." in text
    unknown = result(tmp_path, "test_gpu", rows, pytest=counts, commit=None)
    assert "pytest: 3 passed" in tables.sums(unknown)


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
        (["x.py", "y.cu", "z.h"], "(`x.py`, `y.cu` and `z.h` have changed since)"),
        ([f"{i}.py" for i in range(9)], "(9 of the sources have changed since)"),
    ):
        monkeypatch.setattr(tables, "changed_since", lambda sha, names=names: names)
        assert f"`old` {said}, " in tables._made_with(data)


@pytest.mark.parametrize("share,reached", (((0.86, 0.9), "yes"), ((0.86, 0.84), "no"), ((0.9, None), "no")))
def test_a_figure_is_reached_in_every_case_or_not(tmp_path: Path, share: tuple[float, float], reached: str) -> None:
    assert line(tmp_path, "rope")["reached"] == "" and line(tmp_path, "rope")["measured"] == "not measured"
    result(tmp_path, "bench_memory_bound", [{"op": "rope", "share_of_roofline": s} for s in share])
    assert line(tmp_path, "rope")["reached"] == reached


def test_what_more_tokens_add_is_a_figure_of_its_own(tmp_path: Path) -> None:
    """The two largest of three sizes, whose every byte takes as long, behind 4 us that both have."""
    at = lambda tokens, ms, floor: {
        "op": "rope", "shape": [tokens, 8], "ours_ms": ms, "share_of_roofline": floor / ms
    }  # fmt: skip
    rows = [at(100, 0.9, 0.01), at(4000, 0.044, 0.036), at(8000, 0.084, 0.072)]
    other = {**at(8000, 0.084, 0.072), "op": "rope fwd+bwd"}  # of one size
    result(tmp_path, "bench_memory_bound", [*rows[::-1], other])
    found = line(tmp_path, "rope, what more tokens add")
    assert found["measured"] == "0.9; 4.0 to 4.0 us do not grow with them" and found["reached"] == "yes"
    rows[1:] = at(4000, 0.044, 0.036), at(8000, 0.09, 0.072)
    result(tmp_path, "bench_memory_bound", rows)
    assert line(tmp_path, "rope, what more tokens add")["reached"] == "no"


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


def test_the_largest_shape_has_a_line_of_its_own(tmp_path: Path) -> None:
    cases = (([8, 4], 0.7), ([16, 4], 0.9), ([16, 4], 0.86), ([32, 1], 0.6))
    rows = [{"op": "rope", "shape": n, "share_of_roofline": s} for n, s in cases]
    result(tmp_path, "bench_memory_bound", rows)
    found = line(tmp_path, "rope, 16 x 4 (the largest)")
    assert (found["measured"], found["reached"], line(tmp_path, "rope")["reached"]) == ("0.9, 0.86", "yes", "no")


def test_policy_loss_is_judged_by_all_its_cases_beside_the_largest(tmp_path: Path) -> None:
    assert line(tmp_path, "policy_loss")["measured"] == "not measured"
    cases = [(2048, 0.002), (1 << 24, 0.9), (131_072, 0.18)]
    rows = [{"op": "policy_loss fwd+bwd", "shape": [n], "share_of_roofline": s} for n, s in cases]
    result(tmp_path, "bench_memory_bound", rows)
    assert line(tmp_path, "policy_loss")["measured"] == "0.002, 0.9, 0.18"
    assert line(tmp_path, "policy_loss")["reached"] == "no"
    assert line(tmp_path, "policy_loss, 16,777,216 tokens (the largest)")["reached"] == "yes"
    result(tmp_path, "bench_memory_bound", rows[1:2])
    assert line(tmp_path, "policy_loss")["reached"] == "yes"


def test_figures_take_times_of_the_right_rows(tmp_path: Path) -> None:
    row = {"op": "linear_logprob fwd+bwd", "anchor": "TRL 1.16.0 chunked", "ours_ms": 8.0, "anchor_ms": 10.0,
           "shape": [1 << 15, 1 << 12, 1 << 17], "peak_gib": 2.5}  # fmt: skip
    rows = [
        {**row, "ours": "rlkernel"},
        {**row, "ours": "rlkernel", "anchor": "Liger 0.8.5", "anchor_ms": 1.0},
        {**row, "ours": "rlkernel", "op": "linear_logprob fwd+bwd, 50% prompts", "ours_ms": 80.0},
        {**row, "ours": "rlkernel, main_grad", "peak_gib": 1.6},
    ]
    result(tmp_path, "bench_linear_logprob", rows)
    found = line(tmp_path, "linear_logprob, forward + backward")
    assert (found["measured"], found["reached"]) == ("0.8", "yes")
    found = line(tmp_path, "linear_logprob, forward + backward, memory beside inputs and gradients")
    assert (found["measured"], found["reached"]) == ("1.25 GiB", "yes")
    assert line(tmp_path, "the same with main_grad, memory beside inputs and main_grad")["reached"] == "no"
    assert line(tmp_path, "the same, bf16 probabilities kept")["measured"] == "not measured"


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
