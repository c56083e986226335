"""The comparison as users call it: outputs, command line, pytest fixture."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from drift_cases import capsule, causes, printed

from rlkernel_drift.capsule import (
    Manifest,
    build_capsule,
    write_capsule,
)
from rlkernel_drift.cli.compare import read_floor
from rlkernel_drift.cli.main import build_parser, main
from rlkernel_drift.cli.planted import DEMOS
from rlkernel_drift.compare import compare
from rlkernel_drift.errors import DriftError
from rlkernel_drift.output import write_junit, write_markdown
from rlkernel_drift.profiles import PROFILES, load_profile
from rlkernel_drift.verdict import Status, Verdict, json_schema

pytest_plugins = ["rlkernel_drift.pytest_plugin"]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    evil = {str(i): "</script><img src=x onerror=alert(1)>|`\x1b[2J" for i in range(100)}
    write_capsule(capsule(vocabulary=evil), tmp_path / "rollout")
    write_capsule(capsule("train", noise=0.3), tmp_path / "train")
    return str(tmp_path / "rollout"), str(tmp_path / "train")


def test_command_line(folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"v.{name}") for name in ("json", "markdown", "junit")}
    assert main(["compare", *folders, *(x for n, f in files.items() for x in (f"--{n}", f))]) == 1
    out = capsys.readouterr().out
    assert "Drift" in out and "\x1b[2J" not in out
    verdict = Verdict.model_validate_json(Path(files["json"]).read_text())
    assert verdict.exit_code == 1 and verdict.command[:2] == ["rlkernel-drift", "compare"]
    assert json.loads(Path(files["json"]).read_text())["schema"] == "rlkernel.verdict/1"
    text = Path(files["markdown"]).read_text()
    assert len(text.splitlines()) < 60 and "<img" not in text
    suite = ElementTree.parse(files["junit"]).getroot()
    assert suite.get("failures") == "1" and len(suite.findall("testcase")) == 8
    assert main(["compare", folders[0], folders[0]]) == 3
    assert main(["assert", folders[0], folders[0], "--profile", "bitwise"]) == 3


def test_assert_is_silent_where_aligned(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    write_capsule(capsule("train"), Path(folders[1]).parent / "quiet")
    quiet = str(Path(folders[1]).parent / "quiet")
    assert main(["assert", folders[0], quiet]) == 0 and capsys.readouterr().out == ""
    assert main(["assert", *folders]) == 1 and "Drift" in capsys.readouterr().out


def test_one_side_is_not_a_pair(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assert", folders[0]]) == 2 and "one side only" in capsys.readouterr().err
    assert main(["assert", str(Path(folders[0]).parent)]) == 1
    with pytest.raises(DriftError, match="one side only"):
        compare(capsule())
    both, noisy = capsule(), capsule("train", noise=0.3)
    both = dataclasses.replace(both, logprobs={**both.logprobs, **noisy.logprobs})
    assert compare(both).exit_code == 1


def test_unusable_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "v.json"
    assert main(["compare", str(tmp_path / "none"), "--json", str(out)]) == 2
    assert Verdict.model_validate_json(out.read_text()).status == Status.UNUSABLE
    assert main(["compare", str(tmp_path)]) == 2
    assert "neither a capsule" in " ".join(capsys.readouterr().err.split())
    assert main(["compare", str(tmp_path), "--profile", "strict"]) == 2


@pytest.mark.parametrize("name", [[], ["temprature"]])
def test_demo_lists_its_names(name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *name]) == 2
    error = capsys.readouterr().err
    assert all(known in error for known in DEMOS) and all(repr(word) in error for word in name)


def test_schema_and_outputs_of_every_status() -> None:
    assert json_schema()["title"] == "Verdict"
    verdict = compare(capsule(), capsule("train", noise=0.3))
    ElementTree.fromstring(write_junit(verdict).split("\n", 1)[1])
    assert "| mean" in write_markdown(verdict)


def test_profiles_from_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[threshold]]\nmetric = "tokens.k3"\nat_most = 1e-9\n')
    assert compare(capsule(), capsule("train", noise=0.01), profile=str(file)).exit_code == 1
    for text, error in (
        ('[[threshold]]\nmetric = "tokens.k4"\nat_most = 1\n', "k4"),
        ("threshold = []", "threshold"),
        ("[[", "mine.toml"),
        ('[[threshold]]\nmetric = "tokens.mean"\nat_most = nan\n', "threshold.0.at_most.*finite"),
        ('[[threshold]]\nmetric = "tokens.mean"\nat_least = -inf\n', "threshold.0.at_least.*finite"),
        ('[[threshold]]\nmetric = "tokens.mean"\n', "threshold.0: .*at_most or at_least"),
        ('[[threshold]]\nmetric = "tokens.bias"\nat_most = 0.01\n', "threshold.0: .*both sides.*sequences.bias"),
        ('[[threshold]]\nmetric = "tokens.mean"\nat_least = 0.5\nat_most = 0.01\n', "0.5 is above at_most 0.01"),
        ("surprise = 1", "threshold|surprise"),
    ):
        file.write_text(text)
        with pytest.raises(DriftError, match=error):
            load_profile(str(file))


def test_a_missing_statistic_does_not_pass(tmp_path: Path) -> None:
    file, metrics = tmp_path / "two.toml", tmp_path / "m.jsonl"
    names = ("tokens.k3", "tokens.p99")
    file.write_text("".join(f'[[threshold]]\nmetric = "{name}"\nat_most = 0.1\n' for name in names))
    metrics.write_text("".join(json.dumps({"step": i, "rollout_corr/k3_kl": 1e-4}) + "\n" for i in range(9)))
    verdict = compare(str(metrics), profile=str(file))
    assert verdict.exit_code == 3 and "99% of |d|" in verdict.headline
    assert compare(capsule(), capsule("train"), profile=str(file)).exit_code == 0


def test_fixture(assert_aligned: Any) -> None:
    assert assert_aligned(capsule(), capsule("train")).exit_code == 0
    with pytest.raises(pytest.fail.Exception, match="Drift"):
        assert_aligned(capsule(), capsule("train", noise=0.3))
    one = capsule()
    with pytest.raises(pytest.fail.Exception, match="Inconclusive"):
        assert_aligned(one, one)
    with pytest.raises(pytest.fail.Exception, match="unusable input: nowhere does not exist"):
        assert_aligned("nowhere", capsule("train"))


def test_an_unexpected_error_is_not_drift(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("index 7\nis too large")

    monkeypatch.setattr("rlkernel_drift.compare.compare_sources", broken)
    assert main(["compare", *folders]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkernel-drift: unexpected IndexError: index 7 (") and error.count("\n") == 1
    assert "--traceback" in error and "RLKERNEL_DRIFT_TRACEBACK=1" in error
    assert main(["compare", *folders, "--traceback"]) == 2 and "in broken" in capsys.readouterr().err
    monkeypatch.setenv("RLKERNEL_DRIFT_TRACEBACK", "1")
    assert main(["compare", *folders]) == 2 and "in broken" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_closed_pipe_changes_no_exit_code(folders: tuple[str, str], tmp_path: Path, options: Any) -> None:
    out, err = tmp_path / "v.md", tmp_path / "err"
    read, write = os.pipe()
    os.close(read)
    with open(err, "w") as errors:
        command = [sys.executable, "-m", "rlkernel_drift", "compare", *folders, "--markdown", str(out), *options]
        path = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run(command, stdout=write, stderr=errors, env={**os.environ, "PYTHONPATH": path})
    os.close(write)
    assert (done.returncode, err.read_text()) == (1, "") and out.is_file()


def test_paths_that_are_not_utf8(folders: tuple[str, str], tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.rename(folders[0], name)
    assert main(["compare", name, folders[1], "--json", name + ".json"]) == 1
    assert json.loads(Path(name + ".json").read_text())["rollout"]["label"] == "\\udcff"
    assert main(["compare", name + "no", "--json", name + ".json"]) == 2


@pytest.mark.parametrize(
    "option", [["--clip", "5", "-3"], ["--tis-cap", "nan"], ["--sequence-cap", "0"], ["--gspo-clip", "0", "inf"]]
)
def test_impossible_caps_and_clips(folders: tuple[str, str], option: Any, capsys: Any) -> None:
    assert main(["compare", *folders, *option]) == 2 and option[0] in capsys.readouterr().err


def test_advice_is_given_once() -> None:
    profile = PROFILES["miles"].model_copy(
        update={"threshold": [*PROFILES["miles"].threshold, *PROFILES["prime-rl"].threshold]}
    )
    verdict = compare(capsule(), capsule("train", noise=0.6), profile=profile)
    assert causes(verdict, "statistics") == ["drift", "drift"]
    assert write_markdown(verdict).count("rlkernel-drift diagnose") == 1
    assert printed(verdict).count("rlkernel-drift diagnose") == 1


def test_labels_leave_markdown_tables_alone() -> None:
    rows = [line for line in write_markdown(compare(capsule(), capsule("train", noise=0.3))).splitlines()]
    start = rows.index("| metric | value | threshold | ratio |")
    assert {line.count("|") for line in rows[start:] if line.startswith("|")} == {5}


def test_help_can_be_formatted() -> None:
    build_parser().format_help()


def test_a_hundred_thousand_tokens_in_two_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [rng.integers(0, 1000, 500).tolist() for _ in range(200)]
    logprobs = [-rng.exponential(1.0, 500).astype(np.float32) for _ in range(200)]
    for name, stream in (("rollout", "recorded.processed"), ("train", "train.processed")):
        rows = [v + rng.normal(0, 0.01, 500).astype(np.float32) for v in logprobs]
        side = build_capsule(Manifest(side=name), [[1, 2]] * 200, completions, {stream: rows})  # type: ignore[arg-type]
        write_capsule(side, tmp_path / name)
    start = time.perf_counter()
    assert main(["compare", str(tmp_path / "rollout"), str(tmp_path / "train")]) == 0
    assert time.perf_counter() - start < 10


def test_outputs_are_all_written_or_none(folders: tuple[str, str], tmp_path: Path, capsys: Any) -> None:
    good = tmp_path / "good.json"
    for bad in (str(tmp_path / "missing" / "x.html"), str(tmp_path)):
        assert main(["compare", *folders, "--json", str(good), "--html", bad]) == 2
        seen = capsys.readouterr()
        assert not good.exists() and seen.out == "" and "cannot write" in seen.err
    good.write_text("kept")
    assert main(["compare", *folders, "--json", str(good)]) == 1
    assert json.loads(good.read_text())["exit_code"] == 1 and not list(tmp_path.glob(".rlkernel-drift-*"))


def test_closed_streams_change_no_exit_code(tmp_path: Path) -> None:
    for options in (["inspect", str(tmp_path / "nope")], ["compare", str(tmp_path / "nope")]):
        child = subprocess.Popen(
            [sys.executable, "-m", "rlkernel_drift", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        child.stderr.close()
        assert child.wait() == 2


@pytest.mark.parametrize(
    "options",
    [
        ["power", "--seeds", "0", "--healthy", "0"],
        ["power", "--jobs", "0"],
        ["power", "--seeds", "-1"],
        ["capture", "--engine", "hf", "--model", "m", "--out", "c", "--max-mib", "0"],
    ],
)
def test_counts_that_leave_nothing_are_refused(options: list[str]) -> None:
    try:
        assert main(options) == 2
    except SystemExit as stopped:  # argparse refuses it
        assert stopped.code == 2


@pytest.mark.parametrize("text", ['{"mean": -1, "p99": 1, "maximum": 1}', "[", '{"mean": 1e999}', "\xff"])
def test_a_bad_floor_is_refused_in_one_line(tmp_path: Path, text: str, folders: tuple[str, str]) -> None:
    file = tmp_path / "floor.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(DriftError, match="not a noise floor") as caught:
        read_floor(str(file))
    assert "\n" not in str(caught.value) and "pydantic" not in str(caught.value)
    assert main(["assert", *folders, "--floor", str(file)]) == 2
