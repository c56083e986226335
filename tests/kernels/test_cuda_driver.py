"""The CUDA sources compile for Hopper with wgmma and TMA and without spills; errors show the compiler's log."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkernel.kernels import build
from rlkernel.kernels.cuda import cublaslt, driver
from rlkernel.kernels.errors import BuildError, LaunchError

SOURCE = build.source_dir() / "cuda" / "linear_logprob_sm90.cu"
needs_compiler = pytest.mark.skipif(
    driver._nvrtc() is None and driver._nvcc() is None, reason="needs NVRTC (nvidia-cuda-nvrtc) or nvcc"
)


def tool(name: str, *arguments: str) -> str:
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


@needs_compiler
@pytest.mark.parametrize("which", range(5), ids=("statistics", "dz", "probabilities", "dhidden", "dweight"))
@pytest.mark.parametrize("extra", (False, True), ids=("plain", "extra"))
def test_linear_logprob_compiles(which: int, extra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkernel.kernels.cuda import linear_logprob_sm90

    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    macros = linear_logprob_sm90.macros(linear_logprob_sm90.Pass(which), extra, extra, extra)
    cubin = driver.compile_cuda(SOURCE, "90a", macros)
    kept = list((tmp_path / "cuda").iterdir())
    assert [p.read_bytes() for p in kept] == [cubin]
    assert driver.compile_cuda(SOURCE, "90a", macros) == cubin
    sass = tool("cuobjdump", "-sass", str(kept[0]))
    assert re.search(r"HGMMA\.64x256x16\.F32\.BF16", sass) and "UTMALDG" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass), "spills"
    fused = len(re.findall(r"\bFFMA\b", sass))
    assert fused == 0 or extra, f"{fused} fused multiply-adds where the contract has none"
    assert not re.search(r"MEMBAR\.\w+\.GPU.*\n(.*\n){0,4}.*SYNCS\.ARRIVE", sass), "a barrier of GPU scope"


@needs_compiler
@pytest.mark.parametrize("skip", (False, True), ids=("all", "skip"))
@pytest.mark.parametrize("half,padded", ((False, False), (True, False), (False, True)), ids=("bf16", "fp16", "padded"))
@pytest.mark.parametrize("d", (64, 128))
def test_attention_prefill_compiles(
    d: int, half: bool, padded: bool, skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkernel.kernels.cuda import attention_prefill_sm90

    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    macros = attention_prefill_sm90.macros(d, half, padded, skip)
    driver.compile_cuda(build.source_dir() / "cuda" / attention_prefill_sm90.SOURCE, "90a", macros)
    (kept,) = (tmp_path / "cuda").iterdir()
    assert attention_prefill_sm90.shared_bytes(d) <= 227 << 10
    sass = tool("cuobjdump", "-sass", str(kept))
    assert not re.search(r"\b(STL|LDL)\b", sass), "spills"
    assert "UTMALDG.2D" in sass and bool(re.search(r"HGMMA\.64x\d+x16\.F32\.BF16", sass)) != half
    # setmaxnreg: the math warpgroups get 232 registers, the producers keep 40.
    assert re.search(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP0, 0xe8", sass) and "USETMAXREG.DEALLOC.CTAPOOL 0x28" in sass
    step = re.findall(r"HGMMA\.64x(64|128)|(DEPBAR)\.LE gsb0, (0x[01])|(MUFU\.EX2)", sass)
    words = re.sub(r"\b(64|128)(?: \1)+\b", r"\1", " ".join(map("".join, step)))
    # Most of the softmax overlaps the previous block's product, and both products of a block are issued together.
    products = "64 128" if d == 128 else "64"
    assert re.search(rf"(MUFU\.EX2 ){{20,}}DEPBAR0x0 (MUFU\.EX2 )*{products} DEPBAR0x1", words), words


@needs_compiler
def test_a_header_is_part_of_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    source, header = tmp_path / "fill.cu", tmp_path / "value.cuh"
    source.write_text('#include "value.cuh"\nextern "C" __global__ void fill(int* x) { *x = VALUE; }\n')
    header.write_text("#define VALUE 7\n")
    first = driver.compile_cuda(source, "90a", {})
    header.write_text("#define VALUE 8\n")
    assert driver.compile_cuda(source, "90a", {}) != first


def test_machine_code_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    compiled: list[int] = []
    monkeypatch.setattr(driver, "_nvrtc", lambda: None)
    monkeypatch.setattr(driver, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(driver, "compiler", lambda: "nvcc 13")
    monkeypatch.setattr(driver, "_with_nvcc", lambda *_: (compiled.append(1), b"machine code")[1])
    for _ in range(2):
        assert driver.compile_cuda(SOURCE, "90a", {"PASS": 0}) == b"machine code"
    assert len(compiled) == 1


@needs_compiler
def test_an_error_shows_the_compilers_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    bad = tmp_path / "bad.cu"
    bad.write_text('extern "C" __global__ void f() { undeclared(); }')
    with pytest.raises(BuildError, match=r"bad\.cu[\s\S]*undeclared"):
        driver.compile_cuda(bad, "90a", {})
    assert not (tmp_path / "cuda").exists()


class Nvrtc:
    """An NVRTC whose call `fails` does so."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        return lambda *_: int(name == self.fails)


@pytest.mark.parametrize("name", ("nvrtcCreateProgram", "nvrtcGetProgramLogSize", "nvrtcGetCUBINSize"))
def test_an_error_of_nvrtc_names_its_call(name: str) -> None:
    library: Any = Nvrtc(name)
    if name == "nvrtcGetProgramLogSize":
        library.nvrtcCompileProgram = lambda *_: 6

    def string(code: int) -> bytes:
        return b"out of memory"

    library.nvrtcGetErrorString = string
    with pytest.raises(BuildError, match=rf"{name} failed: out of memory \(1\)"):
        driver._with_nvrtc(library, SOURCE, [])


def test_nvrtc_without_machine_code_is_an_error() -> None:
    library: Any = Nvrtc("none")
    with pytest.raises(BuildError, match="gave no machine code"):
        driver._with_nvrtc(library, SOURCE, [])


def test_the_nvrtc_of_torch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "nvidia" / name / "lib" for name in ("cu13", "cuda_nvrtc")]
    for folder, version in zip(folders, (13, 12), strict=True):
        folder.mkdir(parents=True)
        (folder / f"libnvrtc.so.{version}").touch()
    monkeypatch.setattr(driver.sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    here: list[Path | None] = [None]
    monkeypatch.setattr(build, "loaded", lambda name: here[0])
    wheels = [str(folder / f"libnvrtc.so.{version}") for folder, version in zip(folders, (13, 12), strict=True)]
    for version, first, last in (("12.8", wheels[1], wheels[0]), ("13.0", *wheels), (None, *wheels)):
        monkeypatch.setattr(torch.version, "cuda", version)
        files = driver._nvrtc_files()
        assert files.index(first) < files.index(last) and files[0] == first, version
    here[0] = Path("/torch/libnvrtc.so.12")
    assert driver._nvrtc_files()[0] == "/torch/libnvrtc.so.12"
    loads: list[str] = []

    def load(name: str) -> Any:
        loads.append(name)
        return Nvrtc("nvrtcVersion" if len(loads) == 1 else "none")

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    found = driver._nvrtc.__wrapped__()
    assert found is not None and len(loads) == 2, "a library that reports no version is skipped"


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(driver, "_nvrtc", lambda: None)
    monkeypatch.setattr(driver, "_nvcc", lambda: None)
    with pytest.raises(BuildError, match="nvidia-cuda-nvrtc"):
        driver.compile_cuda(SOURCE, "90a", {"PASS": 0})


def test_rows_of_a_tensor_map_are_a_multiple_of_16_bytes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one row only its address matters; with several the stride does."""
    monkeypatch.setattr(driver, "_encode", lambda address, dtype, shape, stride, *rest: stride)
    block = torch.zeros(3, 512, dtype=torch.bfloat16)
    assert driver.tensor_map(block[:1, :337], 64, 64) == 344
    assert driver.tensor_map(block[:1, :336], 64, 64) == 336
    assert driver.tensor_map(block[:, :337], 64, 64) == 512


@pytest.mark.parametrize(
    "status,message,refused",
    ((15, "not supported (status 15)", True), (3, "allocation failed (status 3)", False), (0, "splits K", True)),
)
def test_a_transient_cublaslt_error_does_not_refuse_an_algorithm(
    status: int, message: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process tries again."""
    monkeypatch.setattr(cublaslt, "unavailable", lambda: None)
    results = {
        "rlk_lt_error": f"cublasLtMatmulAlgoCheck: {message}".encode(),
        "rlk_lt_status": status,
        "rlk_lt_plan": None,
    }
    monkeypatch.setattr(cublaslt, "_function", lambda name, *_: lambda *_: results[name])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(RuntimeError, match=re.escape(message)) as error:
        cublaslt.plan(0, 1, 64, 64, 1, 64, 64, False, False, torch.bfloat16, torch.bfloat16, False, 3)
    assert isinstance(error.value, LaunchError) != refused
