"""Every op finds a function, and every verdict depends on the sources of all kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from rlkernel.kernels import build, select, verdicts
from rlkernel.kernels.select import functions


def test_every_op_has_a_function_in_every_folder() -> None:
    import rlkernel.ops  # noqa: F401  (registers the ops)

    ops = set(select.declared())
    assert ops == {str(op) for op in dir(torch.ops.rlkernel) if op in ops} and len(ops) > 30
    for folder in ("reference", "cpu", "triton"):
        assert set(functions(folder)) == ops, folder
    assert set(functions("cuda")) < ops
    for op, found in select._declared.items():
        for folder, get in found.items():  # `lambda: folder.module.op`
            assert (get.__code__.co_names[0], get.__code__.co_names[-1]) == (folder, op)


def test_folders_import_their_modules_at_first_use() -> None:
    from rlkernel.kernels import triton
    from rlkernel.kernels.triton import swiglu

    assert triton.swiglu is swiglu
    with pytest.raises(AttributeError, match=r"module 'rlkernel\.kernels\.triton' has no attribute 'swigloo'"):
        _ = triton.swigloo


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
