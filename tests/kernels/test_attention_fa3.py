"""Attention variant fa3 with fake libraries: certification, refusals, stored verdicts, and loading the library."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.fake_fa3 import SHAPE, Change, fake, install
from torch import Tensor

from rlkernel.cli import doctor
from rlkernel.kernels import certification, samples, scheduled_op, verdicts
from rlkernel.kernels.cuda import attention_fa3, fa3_library
from rlkernel.kernels.cuda.fa3_library import Library
from rlkernel.kernels.errors import VariantError
from rlkernel.ops import report


def test_an_exact_library_is_certified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, tmp_path)
    assert attention_fa3.require(SHAPE) is library
    found = attention_fa3.verdict(SHAPE)
    (trial,) = found.trials
    calls = len(list(attention_fa3.calls())) * len(samples.KINDS)
    assert trial.certified and trial.first is None and calls > 100
    assert trial.elements > 1000 and f"{calls} calls equal" in trial.reason

    file = next((tmp_path / "schedules").glob("*.json"))
    content = json.loads(file.read_text())
    kept = content["data"]
    assert content["format"] == verdicts.FORMAT and kept["identity"]["shape"] == SHAPE.describe()
    assert kept["identity"]["flash_attention_3"] == "fake 1" and kept["seed"] == found.seed
    monkeypatch.setattr(attention_fa3, "certify", lambda *_: pytest.fail("certified again"))
    attention_fa3.forget()
    assert attention_fa3.require(SHAPE) is library and attention_fa3.verdict(SHAPE) == found
    assert scheduled_op.report(torch.device("cpu")) == [], "a variant is not a schedule"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda paged, longest, batch: 1 + paged / 64, "from pages"),
        (lambda paged, longest, batch: 1 + (longest <= 2) / 64, "prefixes of 1"),
        (lambda paged, longest, batch: 1 + (batch == 1) / 64, "alone dense"),
        (lambda paged, longest, batch: 1 + (batch > 50) / 64, "decode of every position"),
        (lambda paged, longest, batch: 1 + (longest > 100) / 64, "launched for 128"),
    ],
    ids=["paging", "longest query", "batch of one", "large batch", "launch size"],
)
def test_a_library_that_depends_on_its_use_is_refused(
    change: Change, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, fake(change))
    (trial,) = attention_fa3.verdict(SHAPE).trials
    differing, calls = map(int, re.findall(r"\d+", trial.reason))
    assert not trial.certified and 0 < differing < calls
    first = trial.first
    assert first is not None and where in first["kind"] and first["actual"] != first["expected"]
    sequence, position, head, *_ = first["index"]
    assert 0 <= position < attention_fa3.LENGTHS[sequence] and head < SHAPE.heads
    with pytest.raises(VariantError, match=r"refused for .*'D': 8.* calls differ from the dense one; first: .* dense "):
        attention_fa3.require(SHAPE)
    attention_fa3.forget()
    with pytest.raises(VariantError, match="is refused"):  # read from the file
        attention_fa3.require(SHAPE)


def test_the_lse_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = fake()

    def paged(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = exact.paged(*args)
        return out, lse.nextafter(torch.tensor(torch.inf))

    install(monkeypatch, tmp_path, Library(exact.dense, paged, {}, "cpu"))
    first = attention_fa3.verdict(SHAPE).trials[0].first
    assert first is not None and first["result"] == 1 and len(first["index"]) == 3


def test_a_library_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = fake()

    def paged(*args: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such kernel")

    install(monkeypatch, tmp_path, Library(exact.dense, paged, {}, "cpu"))
    with pytest.raises(VariantError, match=r"raised in .* from pages.*: RuntimeError: no such kernel"):
        attention_fa3.require(SHAPE)


def test_a_broken_verdict_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    attention_fa3.require(SHAPE)
    file = next((tmp_path / "schedules").glob("*.json"))
    whole = file.read_text()
    for text in (
        "{",
        json.dumps({"format": verdicts.FORMAT}),
        whole.replace('"certified": true', '"certified": false'),
    ):
        file.write_text(text)
        attention_fa3.forget()
        with pytest.warns(RuntimeWarning, match="ignoring the unreadable verdict"):
            attention_fa3.require(SHAPE)
        kept = json.loads(file.read_text())["data"]
        assert kept["trials"][0]["certified"] is True


def test_another_build_of_the_library_voids_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    attention_fa3.require(SHAPE)
    wrong = fake(lambda paged, longest, batch: 1 + paged / 64)
    attention_fa3.forget()
    monkeypatch.setattr(fa3_library, "find", lambda: Library(wrong.dense, wrong.paged, {"binary": "2"}, "cpu"))
    with pytest.raises(VariantError, match="is refused"):
        attention_fa3.require(SHAPE)


def test_what_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(VariantError, match="takes bfloat16 and float16, not float32; cast the model"):
        attention_fa3.require(SHAPE._replace(dtype=torch.float32))
    with monkeypatch.context() as m:
        m.setattr(certification, "capturing", lambda device: True)
        with pytest.raises(VariantError, match="fell into a CUDA graph capture"):
            attention_fa3.require(SHAPE)
    for_cuda = Library(fake().dense, fake().paged, {})
    install(monkeypatch, tmp_path, for_cuda)
    with pytest.raises(VariantError, match="runs on cuda, the tensors are on cpu; use variant 'split' there"):
        attention_fa3.require(SHAPE)
    install(monkeypatch, tmp_path, "vllm: no module vllm")
    with pytest.raises(VariantError, match=r"not importable \(vllm: no module vllm\)"):
        attention_fa3.require(SHAPE)


# ---- loading -------------------------------------------------------------------------------------


def pair(q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    return q, torch.zeros(q.shape[1], q.shape[0])


def modules(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Makes only these of the modules that the library search tries importable."""
    for name in ("vllm", "flash_attn_interface", "flash_attn_3"):
        for part in [part for part in sys.modules if part.startswith(f"{name}.")]:  # another test may have imported it
            monkeypatch.delitem(sys.modules, part)
        monkeypatch.setitem(sys.modules, name, None)
    for name, module in found.items():
        parts = name.split("__")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[0]))
        monkeypatch.setitem(sys.modules, ".".join(parts), module)
    monkeypatch.setattr(fa3_library.metadata, "version", lambda package: "1.2")


def use_both(library: Library) -> None:
    q = torch.randn(3, 2, 8)
    lens = torch.tensor([0, 3], dtype=torch.int32)
    library.dense(q, q, q, lens, lens, 3, 4, 0.5)
    library.paged(q, q[None], q[None], lens[None], lens, lens[1:], 3, 4, 0.5)


def test_vllms_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        seen.append(given)
        return pair(q)

    interface = types.SimpleNamespace(FA3_AVAILABLE=True, flash_attn_varlen_func=varlen)
    modules(monkeypatch, vllm__vllm_flash_attn__flash_attn_interface=interface)
    library = fa3_library.find.__wrapped__()
    assert not isinstance(library, str) and library.versions == {"flash_attention_3": "vllm 1.2"}
    assert library.device == "cuda"
    use_both(library)
    for given in seen:
        assert given["causal"] and given["num_splits"] == 1 and given["fa_version"] == 3
        assert given["softmax_scale"] == 0.5 and (given["max_seqlen_q"], given["max_seqlen_k"]) == (3, 4)
    assert "cu_seqlens_k" in seen[0] and "block_table" in seen[1] and "seqused_k" in seen[1]

    interface.FA3_AVAILABLE, interface.FA3_UNAVAILABLE_REASON = False, "undefined symbol"
    assert "undefined symbol" in fa3_library.find.__wrapped__()


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn_3__flash_attn_interface"])
def test_the_package_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
               num_splits=1, return_attn_probs=False):  # fmt: skip
        seen.append({"splits": num_splits, "causal": causal, "probs": return_attn_probs, "scale": softmax_scale})
        return (*pair(q), None)

    def cached(q, k, v, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None,
               causal=False, num_splits=0, return_softmax_lse=False):  # fmt: skip
        seen.append({"splits": num_splits, "causal": causal, "probs": return_softmax_lse, "scale": softmax_scale})
        return (*pair(q), None)

    interface = types.SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_with_kvcache=cached)
    modules(monkeypatch, **{name: interface})
    library = fa3_library.find.__wrapped__()
    assert not isinstance(library, str) and library.versions["flash_attention_3"] == "flash_attn_3 1.2"
    use_both(library)
    assert seen == 2 * [{"splits": 1, "causal": True, "probs": True, "scale": 0.5}]

    interface.flash_attn_with_kvcache = lambda q, k, v, cache_seqlens=None: q
    interface.flash_attn_with_kvcache.__name__ = "flash_attn_with_kvcache"
    assert "flash_attn_with_kvcache has no num_splits, page_table" in fa3_library.find.__wrapped__()


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch)
    found = fa3_library.find.__wrapped__()
    assert isinstance(found, str) and found.startswith("vllm: no module vllm") and "; flash_attn_3: no module" in found


# ---- doctor --------------------------------------------------------------------------------------


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_head_dim = fake()

    def paged(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = by_head_dim.paged(q, *args)
        return (out + 1 if q.shape[2] == 64 else out), lse

    install(monkeypatch, tmp_path, Library(by_head_dim.dense, paged, {}, "cpu"))
    monkeypatch.setattr(report, "_HEADS", ((64, 2, 1), (16, 2, 1)))
    monkeypatch.setattr(samples, "KINDS", ("normal",))
    found = json.loads(json.dumps(doctor.examine("cpu")))["attention_fa3"]
    assert found["unavailable"] is None
    assert [(row["shape"]["D"], row["certified"]) for row in found["rows"]] == [(64, False), (16, True)]
    refused, certified = doctor._fa3_lines(found)
    assert refused.startswith("attention variant fa3 D=64, H=2, HK=1, dtype=bfloat16, page=16: refused; ")
    assert "calls differ from the dense one; normal values, " in refused and "differ" in refused
    assert certified.startswith("attention variant fa3 D=16") and ": certified; " in certified

    install(monkeypatch, tmp_path, "vllm: no module vllm")
    assert "not importable" in doctor.examine("cpu")["attention_fa3"]["unavailable"]
