"""The package as users install it: light imports, a wheel with its sources; result files and tables."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules after running `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"triton", "transformers", "tokenizers", "pydantic", "rich", "jinja2", "numpy"}


def test_import_adds_nothing_heavy() -> None:
    assert not loaded_by("import rlkernel") & {"torch", *HEAVY}


def test_ops_import_only_torch() -> None:
    before = loaded_by("import torch")
    assert not (loaded_by("import rlkernel.ops") - before) & (HEAVY - {"numpy"})


def test_help_imports_no_torch() -> None:
    code = "from rlkernel.cli.main import build_parser\nbuild_parser().format_help()"
    assert not loaded_by(code) & {"torch", *HEAVY}


def test_wheel_contains_sources_and_types(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a copy, because a build writes to the source tree
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    for name in ("rlkernel", "csrc", "consistency", "integrations"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"rlkernel/py.typed", "rlkernel/contract/tolerances.json", "rlkernel/_csrc/cpu/gemm.h"} <= names
    sources = {p.relative_to(ROOT / "csrc").as_posix() for p in (ROOT / "csrc").glob("*/*")}
    assert {f"rlkernel/_csrc/{s}" for s in sources} <= names
    for folder in (ROOT, ROOT / "consistency", ROOT / "integrations"):
        modules = {p.relative_to(folder).as_posix() for p in folder.glob("rlkernel*/**/*.py")}
        assert modules <= names
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    found = zipfile.ZipFile(wheel).read(entry_points)
    assert b"rlkernel = rlkernel_vllm:register" in found and b"rlkernel = rlkernel_verl.plugin" in found


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_records_notice_changed_kernels(benchmarks: None, tmp_path: Path) -> None:
    """Both kernel_sha, which a record carries, and git's comparison with the record's commit."""
    from results_io import commit, has_current_kernels, kernel_sha

    kernels, contract = tmp_path / "rlkernel" / "kernels", tmp_path / "rlkernel" / "contract"
    for path in (
        kernels / "kernel.py",
        contract / "other.py",
        tmp_path / "csrc" / "k.cpp",
        tmp_path / "rlkernel/ops/op.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("CHUNK = 1\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    recorded, sha = commit(tmp_path), kernel_sha(tmp_path)
    for path, changes in (
        (contract / "other.py", False), (kernels / "__pycache__" / "kernel.pyc", False), (kernels / "kernel.py", True)
    ):  # fmt: skip
        path.parent.mkdir(exist_ok=True)
        path.write_text("CHUNK = 2\n")
        has_current_kernels.cache_clear()
        assert has_current_kernels(recorded, tmp_path) is not changes, path.name
        assert (kernel_sha(tmp_path) != sha) == changes, path.name
    assert not has_current_kernels("0" * 40, tmp_path) and not has_current_kernels(None, tmp_path)


def test_result_file_has_the_promised_fields(benchmarks: None, tmp_path: Path) -> None:
    from results_io import write_result

    path = write_result("probe", [{"test": "t", "cases": 1, "tokens": 2, "mismatches": 0}], out=tmp_path)
    data = json.loads(path.read_text())
    fields = {"name", "command", "commit", "kernel_sha", "date", "hardware", "driver", "versions", "contract", "rows"}
    assert fields <= set(data)
    assert data["contract"] == "rlk-2"


def test_no_test_is_in_the_root_of_the_integration_tests() -> None:
    """pytest puts a test's folder on the path, so `tests/integrations/vllm` would be imported as vLLM."""
    assert not list((ROOT / "tests" / "integrations").glob("*.py"))


def test_the_contract_names_the_ops_with_schedules() -> None:
    cuda = {path.stem for path in (ROOT / "rlkernel" / "kernels" / "cuda").glob("*.py")}
    ops = {path.stem for path in (ROOT / "docs" / "ops").glob("*.md")}
    (sentence,) = re.findall(r"to the last bit\. ([^.]*) have some", (ROOT / "docs" / "contract.md").read_text())
    assert set(re.findall(r"`(\w+)`", sentence)) == cuda & ops


def test_tables_are_filled_from_results(benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tables
    from results_io import write_result

    write_result("probe", [{"op": "linear", "shape": [1, 2], "ratio": 0.51234}], out=tmp_path / "r")
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "r")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    text = "a\n<!-- table: */probe.json -->\nreplaced\n<!-- /table -->\nb\n"
    filled = tables.render(text)
    assert "| linear | 1 x 2 | 0.5123 |" in filled and "replaced" not in filled
    assert tables.render(filled) == filled
