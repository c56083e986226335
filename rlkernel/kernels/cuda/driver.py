"""Compiles csrc/cuda/*.cu with NVRTC (in torch's wheels) or nvcc, caches the cubins, and launches through the driver.

Macros choose the variant of a source. The sources do not link against torch; tensors are passed as addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.errors import BuildError, LaunchError

FLAGS = ("-fmad=false", "-std=c++17")  # no contraction: sources write fma explicitly where the contract has one

# ---- compiler ------------------------------------------------------------------------------------


def _nvrtc_files() -> list[str]:
    """Candidates for NVRTC: the library that torch has loaded, then those in NVIDIA's wheels, CUDA's folder and the
    loader's search path, of which those of torch's CUDA version come first."""
    folders = [p for entry in map(Path, sys.path) for p in sorted(entry.glob("nvidia/*/lib"))]
    folders += [Path(root) / "lib64" for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    files = [str(p) for f in folders for p in sorted(f.glob("libnvrtc.so.*")) if "builtins" not in p.name]
    files += ["libnvrtc.so.13", "libnvrtc.so.12"]
    own = f".so.{(torch.version.cuda or '').partition('.')[0]}"
    files.sort(key=lambda name: not f"{name}.".partition("libnvrtc")[2].startswith(f"{own}."))
    found = build.loaded("libnvrtc.so")
    return [*([str(found)] if found else []), *files]


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The first NVRTC that loads and reports its version."""
    for name in _nvrtc_files():
        try:
            library = ctypes.CDLL(name)
            _nvrtc_version(library)
        except (OSError, AttributeError, BuildError):
            continue
        return library
    return None


def _nvrtc_call(library: ctypes.CDLL, name: str, *args: Any) -> None:
    code = getattr(library, name)(*args)
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        text = library.nvrtcGetErrorString(code) or b"unknown error"
        raise BuildError(f"{name} failed: {text.decode(errors='replace')} ({code})")


def _nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc_call(library, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"NVRTC {major.value}.{minor.value}"


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home) / "bin") if home else None) or shutil.which("nvcc")


@functools.cache
def compiler() -> str:
    """Name and version of the compiler ("NVRTC 13.0", or nvcc's version line); "none" without one."""
    library, nvcc = _nvrtc(), _nvcc()
    if library is not None:
        return _nvrtc_version(library)
    if nvcc is not None:
        with contextlib.suppress(BuildError):  # compile_cuda raises it
            lines = _run_nvcc(nvcc, "--version").stdout.strip().splitlines()
            return f"nvcc {lines[-1] if lines else ''}"
    return "none"


def versions() -> dict[str, str]:
    """Versions of this module that a verdict depends on."""
    return {"cuda compiler": compiler()}


def _run_nvcc(nvcc: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([nvcc, *arguments], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{nvcc} does not start: {error.strerror}; correct PATH or CUDA_HOME") from error


def _headers(source: Path) -> list[Path]:
    return sorted(source.parent.glob("*.cuh"))


def _with_nvrtc(library: ctypes.CDLL, source: Path, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers = _headers(source)
    texts = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
    names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
    call = functools.partial(_nvrtc_call, library)
    text, name = source.read_bytes(), source.name.encode()
    call("nvrtcCreateProgram", ctypes.byref(program), text, name, len(headers), texts, names)
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        if library.nvrtcCompileProgram(program, len(options), flags):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            raise BuildError(f"NVRTC could not compile {source}:\n{log.value.decode(errors='replace')[-4000:]}")
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        if size.value == 0 or library.nvrtcGetCUBIN(program, cubin):
            raise BuildError(f"NVRTC gave no machine code for {source}; is its version older than the GPU?")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _with_nvcc(nvcc: str, source: Path, arch: str, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.cubin"
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        done = _run_nvcc(nvcc, "-cubin", target, *options, "-o", str(out), str(source))
        if done.returncode != 0:
            raise BuildError(f"nvcc could not compile {source}:\n{(done.stdout + done.stderr)[-4000:]}")
        return out.read_bytes()


def compile_cuda(source: Path, arch: str, macros: Mapping[str, int]) -> bytes:
    """Compiles `source` to a cubin for an architecture ("90a") with `macros` defined.

    Cached on disk, under a hash of the source, the compiler and its options.

    Raises:
        BuildError: there is neither NVRTC nor nvcc, or the source does not compile; the message has the log.
    """
    options = [*FLAGS, *(f"-D{name}={int(value)}" for name, value in sorted(macros.items()))]
    text = b"\0".join(path.read_bytes() for path in (source, *_headers(source)))
    made_of = build.digest(text + "\0".join((compiler(), arch, *options)).encode())
    name = f"{source.stem}-{arch}-{made_of}.cubin"
    with contextlib.suppress(OSError, BuildError):
        return (build.cache_dir() / "cuda" / name).read_bytes()
    library, nvcc = _nvrtc(), _nvcc()
    if library is not None:
        cubin = _with_nvrtc(library, source, [f"--gpu-architecture=sm_{arch}", *options])
    elif nvcc is not None:
        cubin = _with_nvcc(nvcc, source, arch, options)
    else:
        raise BuildError(f"{source.name} needs NVRTC (pip install nvidia-cuda-nvrtc) or nvcc; neither was found")
    with contextlib.suppress(OSError, BuildError):  # without a writable cache every process compiles
        build.put(build.cache_dir() / "cuda" / name, cubin)
    return cubin


# ---- device --------------------------------------------------------------------------------------


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_hopper(device: int) -> bool:
    """Whether the device of this index (below 0: the CPU) runs sm_90a code."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


# ---- driver --------------------------------------------------------------------------------------


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _text(code: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({code})"


def _call(name: str, *args: Any) -> None:
    code = getattr(_cuda(), name)(*args)
    if code:
        raise LaunchError(f"{name} failed: {_text(code)}")


_thread = threading.local()


class Kernel:
    """One kernel of a cubin on the device that is current when it is created and launched.

    Attributes:
        code: digest of the machine code.

    Raises:
        LaunchError: the driver refuses; the message names the driver call.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared = shared_bytes
        self.code = build.digest(cubin)
        _call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        most_dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call("cuFuncSetAttribute", self._function, most_dynamic_shared, shared_bytes)

    def __call__(self, blocks: int, threads: int, *args: Any) -> None:
        """Launches on the current stream; `args` are ctypes values in the kernel's order."""
        if not getattr(_thread, "has_context", False):
            context = ctypes.c_void_p()
            _call("cuCtxGetCurrent", ctypes.byref(context))
            if not context:  # a new thread: a torch call makes the device's context current
                torch.zeros(1, device="cuda")
            _thread.has_context = True
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
        _call("cuLaunchKernel", self._function, blocks, 1, 1, threads, 1, 1, self._shared, stream, pointers, None)


@functools.cache
def load(device: int, source: str, entry: str, shared_bytes: int, **macros: int) -> Kernel:
    """The kernel `entry` of csrc/cuda/`source`, compiled for sm_90a and loaded on a device.

    Args:
        shared_bytes: the most dynamic shared memory that a launch asks for.
        macros: the variant of the source.

    Raises:
        BuildError: there is no compiler, or the source does not compile.
        LaunchError: the driver cannot load it.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the device's context
        return Kernel(compile_cuda(build.source_dir() / "cuda" / source, "90a", macros), entry, shared_bytes)


def note_code(run: Callable[..., Any], *kernels: Kernel) -> Any:
    """Sets `run.note` to the digests of its kernels, so that a verdict becomes void if a compiler makes other code."""
    named: Any = run
    named.note = f"; machine code {' '.join(kernel.code for kernel in kernels)}"
    return named


class TensorMap(ctypes.Structure):
    """`CUtensorMap`: the TMA descriptor of a matrix."""

    _align_ = 64
    _fields_ = (("opaque", ctypes.c_ubyte * 128),)


_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}


def tensor_map(x: Tensor, rows: int, columns: int, line: int = 128) -> TensorMap:
    """TMA descriptor of x [n, k], contiguous in k, for boxes of [rows, columns] with a swizzle of `line` bytes.

    Raises:
        LaunchError: the driver refuses, because the address or row stride is not a multiple of 16 bytes or a box is too
            large.
    """
    lane = 16 // x.element_size()
    stride = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // lane) * lane  # one row: any multiple of 16 bytes
    return _encode(x.data_ptr(), x.dtype, x.shape, stride, rows, columns, line)


@functools.lru_cache(maxsize=1024)  # the addresses of weights and of the allocator's blocks recur
def _encode(
    address: int, dtype: torch.dtype, shape: torch.Size, stride: int, rows: int, columns: int, line: int
) -> TensorMap:
    place = ctypes.create_string_buffer(256)  # ctypes honours _align_ from Python 3.13 on
    made = TensorMap.from_address((ctypes.addressof(place) + 63) // 64 * 64)
    made._keep = place
    _call(
        "cuTensorMapEncodeTiled", ctypes.byref(made), _MAP_TYPES[dtype], 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(stride * dtype.itemsize),
        (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1),
        0,  # not interleaved
        _SWIZZLES[line],
        3,  # L2 promotion to 256 bytes
        0,  # elements outside are zero
    )  # fmt: skip
    return made
