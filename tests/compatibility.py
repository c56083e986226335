"""Records the findings of integration tests as rows of the compatibility tables: stack, feature, verdict, numbers.

A row is part of its test's report (which pytest-xdist's workers send) and counts if the test passed.
`benchmarks/test_integrations.py` and `benchmarks/test_gpu.py` write the rows to result files. Every other run on a CPU
compares its rows with the file, so that the tables cannot become outdated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "cpu" / "integrations.json"
PROPERTY = "compatibility"
_rows: list[dict[str, Any]] = []
_stale: list[str] = []


class Compat:
    """The fixture `compat`: each call adds a row, after the assertion that it records.

    If there are counts, the verdict follows from them: "exact" means 0 differing of at least one. Rows of one stack and
    feature from several tests or parameters are summed.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item, self._test = item, item.name.split("[", 1)[0]

    def compared(self, stack: str, feature: str, differing: int, numbers: int) -> None:
        """`differing` of `numbers` compared values have different bits; the test asserts whether that is expected."""
        assert numbers > 0, f"{feature}: nothing was compared"
        self._add(stack, feature, "exact" if differing == 0 else "differs", differing=differing, numbers=numbers)

    def pairs(self, stack: str, found: Mapping[str, Any], features: Mapping[str, str]) -> None:
        """Rows of `found[name] == [differing, numbers]` for the names in `features`."""
        for name, feature in features.items():
            self.compared(stack, feature, *found[name])

    def bitwise(self, stack: str, feature: str, found: Tensor, expected: Tensor) -> None:
        """Raises AssertionError unless the tensors have the same bytes."""
        from rlkernel.contract import assert_bitwise

        assert_bitwise(found, expected, feature)
        self.compared(stack, feature, 0, expected.numel())

    def exact(self, stack: str, *features: str) -> None:
        """The test found all values equal, without counting them."""
        for feature in features:
            self._add(stack, feature, "exact")

    def close(self, stack: str, feature: str) -> None:
        """The values are equal within the test's tolerance."""
        self._add(stack, feature, "close")

    def refused(self, stack: str, feature: str, error: object, naming: str | None = None) -> None:
        """Raises AssertionError unless the error's text matches `naming`, by default the feature itself."""
        text = str(error)
        assert re.search(re.escape(feature) if naming is None else naming, text), text
        self._add(stack, feature, "refused")

    def audited(self, stack: str, feature: str, findings: Sequence[Any]) -> None:
        """The feature runs and a report lists it as not exact."""
        assert findings
        self._add(stack, feature, "reported")

    def _add(self, stack: str, feature: str, verdict: str, **counts: int) -> None:
        row = {"stack": stack, "feature": feature, "verdict": verdict, **counts, "test": self._test}
        self._item.user_properties.append((PROPERTY, row))


@pytest.fixture
def compat(request: pytest.FixtureRequest) -> Compat:
    return Compat(request.node)


def merged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per stack and feature, sorted by stack, with summed counts and a list of tests.

    Raises:
        ValueError: tests disagree about a verdict.
    """
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["stack"], row["feature"]
        total = out.setdefault(key, {"stack": key[0], "feature": key[1], "verdict": row["verdict"], "tests": []})
        if total["verdict"] != row["verdict"]:
            raise ValueError(f"{key}: {total['verdict']} in {total['tests']}, {row['verdict']} in {row['test']}")
        for name in ("differing", "numbers"):
            if name in row:
                total[name] = total.get(name, 0) + row[name]
        total["tests"] = sorted({*total["tests"], row["test"]})
    return sorted(out.values(), key=lambda row: (row["stack"], row["tests"], row["feature"]))


def stale(rows: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]], whole: bool) -> list[str]:
    """Differences between rows of a run and the file. `whole`: all tests ran, so the file may not have more rows."""

    def claims(of: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, str, str]]:
        return {(row["stack"], row["feature"], row["verdict"], test) for row in of for test in row["tests"]}

    found, known = claims(merged(rows)), claims(recorded)
    return [
        *(f"not in the table: {', '.join(claim)}" for claim in sorted(found - known)),
        *(f"no longer found: {', '.join(claim)}" for claim in sorted(known - found) if whole),
    ]


# ---- pytest's hooks ------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _rows.extend(row for name, row in report.user_properties if name == PROPERTY)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return  # the controller process has all reports
    target = os.environ.get("RLKERNEL_COMPATIBILITY")
    if target:
        Path(target).write_text(json.dumps(merged(_rows)))
    elif _rows and session.exitstatus == 0 and not torch.cuda.is_available():
        options = config.option
        whole = config.args == config.getini("testpaths") and options.markexpr in ("", "not gpu")
        chosen = ("keyword", "deselect", "ignore", "ignore_glob", "lf")  # "lf" needs pytest's cache plugin
        whole &= not any(getattr(options, name, None) for name in chosen)
        whole &= bool(os.environ.get("RLKERNEL_TEST_INTEGRATIONS"))
        recorded = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
        _stale.extend(stale(_rows, recorded, whole))
        if _stale:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _stale:
        terminalreporter.section("table of compatibility")
        for line in _stale:
            terminalreporter.line(line)
        terminalreporter.line("run `python benchmarks/test_integrations.py` and `make docs`, and commit the result")
