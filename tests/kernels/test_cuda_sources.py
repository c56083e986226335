"""Every op finds a function, and every verdict depends on the sources of all kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from rlkernel.kernels import build, select, verdicts


def test_every_op_finds_a_function() -> None:
    import rlkernel.ops  # noqa: F401  (declares the ops)

    for op in select.declared():
        found = {name: select._find(op, name) for name in ("certified", "triton")}
        assert any(found.values()), f"{op} has no kernel for CUDA"
        for name, fn in found.items():
            assert fn is None or callable(fn), f"{op}: {name} gives {fn}"


def test_the_digest_covers_kernels_orders_and_cuda_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(verdicts.__file__).parent
    kernels, contract, csrc = tmp_path / "kernels", tmp_path / "contract", tmp_path / "csrc"
    shutil.copytree(package, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(package.parent / "contract", contract, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(build.source_dir() / "cuda", csrc / "cuda")
    digest = verdicts.source_digest.__wrapped__
    whole = digest()
    monkeypatch.setattr(verdicts, "__file__", str(kernels / "verdicts.py"))
    monkeypatch.setattr(build, "source_dir", lambda: csrc)
    assert digest() == whole, "wherever it is installed"
    for path in (kernels / "triton" / "linear.py", contract / "orders.py", csrc / "cuda" / "sm90.cuh"):
        text = path.read_text()
        path.write_text(text + " ")
        assert digest() != whole, path.name
        path.write_text(text)
    assert digest() == whole
