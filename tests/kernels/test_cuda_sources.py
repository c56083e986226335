"""What a verdict hangs on: the sources of every op with schedules."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from rlkernel.kernels import cuda, schedule, select
from rlkernel.kernels.schedule import ScheduledOp

ROOT = Path(cuda.__file__).resolve().parents[3]
# They compile what others define, or are hashed with every verdict.
NO_PART = {"aot.py", "build.py", "errors.py", "schedule.py", "verdicts.py", "certification.py", "clock.py",
           "__init__.py"}  # fmt: skip


def ops() -> list[ScheduledOp]:
    """Of every module in kernels/cuda."""
    for found in pkgutil.iter_modules(cuda.__path__, cuda.__name__ + "."):
        importlib.import_module(found.name)
    return list(schedule.scheduled_ops())


def test_every_op_finds_a_function() -> None:
    import rlkernel.ops  # noqa: F401  (declares the ops)

    for op in select.declared():
        found = {name: select._find(op, name) for name in ("certified", "triton")}
        assert any(found.values()), f"{op} has no kernel for CUDA"
        for name, fn in found.items():
            assert fn is None or callable(fn), f"{op}: {name} gives {fn}"


def imported(path: Path) -> set[Path]:
    """Modules of rlkernel that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlkernel"):
            base = ROOT.joinpath(*str(node.module).split("."))
            places = (base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names))
            found |= {place for place in places if place.is_file()}
    return found


def reached(start: set[Path]) -> set[Path]:
    """These files and what they import, directly or not, of the folders of kernels and of the orders' constants."""
    kernels = ROOT / "rlkernel" / "kernels"
    found, new = set(), start
    while new:
        found |= new
        new = {p for source in new for p in imported(source) if kernels in p.parents and p.name not in NO_PART} - found
    return found


@pytest.mark.parametrize("op", ops(), ids=lambda op: op.family.op)
def test_a_verdict_hangs_on_every_file_of_its_kernels(op: ScheduledOp) -> None:
    named = {path.resolve() for path in op.family.sources}
    assert all(path.is_file() for path in named) and len(named) == len(op.family.sources)
    where = {op.family.key, op.family.sample, op.family.rows, getattr(op.family.anchor, "func", op.family.anchor)}
    begun = {Path(importlib.import_module(f.__module__).__file__ or "").resolve() for f in where}
    missing = reached(begun | {path for path in named if path.suffix == ".py"}) - named
    assert not missing, f"{op.family.op}: {sorted(path.name for path in missing)}"
    assert any(path.name == "orders.py" for path in named), "the constants of its orders"
    headers = {p for source in named if source.suffix == ".cu" for p in source.parent.glob("*.cuh")}
    assert headers <= named
