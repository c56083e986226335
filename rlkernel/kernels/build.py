"""Builds the C++ sources of `csrc/` with ninja on first use, and loads the result.

A library's name contains a hash of sources, flags, compiler, torch and architecture, so a stale one is never loaded.
A build takes seconds, because no source includes torch's headers. The bridge to cuBLASLt needs CUDA's, but not nvcc.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rlkernel.kernels.errors import BuildError, NoCompilerError

_BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # sources write fma explicitly where the contract has one
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-uninitialized",  # GCC 12's AVX-512 intrinsics start from undefined registers and warn when inlined
    "-Wno-maybe-uninitialized",
)
# What cublasLt.h includes, directly or not; wheels spread these over several folders.
_CUDA_HEADERS = ("cublasLt.h", "driver_types.h", "cuda_fp16.h", "library_types.h", "crt/host_defines.h", "nv/target")


def source_dir() -> Path:
    """Directory of the C++/CUDA sources: `rlkernel/_csrc` in a wheel, `csrc` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_csrc", package.parent / "csrc"):
        if (candidate / "cpu").is_dir():
            return candidate
    raise BuildError(f"rlkernel's C++ sources are missing: neither {package / '_csrc'} nor {package.parent / 'csrc'}")


NO_CACHE = "there is no home or working directory for the cache; set RLKERNEL_CACHE to the absolute path of a folder"


def cache_dir() -> Path:
    """Where builds and certification verdicts live: `$RLKERNEL_CACHE`, else `~/.cache/rlkernel`.

    Raises:
        BuildError: the user has no home directory, or a relative path has no working directory.
    """
    root = os.environ.get("RLKERNEL_CACHE")
    try:
        if root:
            return _absolute(Path(root).expanduser())
        return _absolute(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "rlkernel"
    except (RuntimeError, OSError) as error:
        raise BuildError(NO_CACHE) from error


@functools.cache  # so that a relative folder stays the same when the process changes its working directory
def _absolute(folder: Path) -> Path:
    return folder.absolute()


def digest(content: bytes) -> str:
    """First 16 hex digits of the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()[:16]


def put(path: Path, content: bytes) -> None:
    """Writes a file atomically and honours the umask; creates its folder.

    Raises:
        OSError: the file cannot be written; no part of it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with open(new, "xb") as file:
            file.write(content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def compiler() -> str | None:
    """Command of the C++ compiler: `$CXX` (which may contain options), else g++, else clang++, else None.

    Raises:
        BuildError: `$CXX` names a program that does not exist, or lacks a quote; it is never ignored.
    """
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']!r}: {error}; correct or unset CXX") from error
    if asked:
        if shutil.which(asked[0]) is None:
            raise BuildError(f"CXX={os.environ['CXX']!r}: {asked[0]!r} is not a program here; correct or unset CXX")
        return shlex.join(asked)
    return next((found for found in map(shutil.which, ("g++", "clang++")) if found), None)


def _ninja() -> str:
    in_environment = Path(sys.executable).with_name("ninja")
    if in_environment.exists():
        return str(in_environment)
    if found := shutil.which("ninja"):
        return found
    import ninja  # the wheel's program, if its script is not on the path

    return str(Path(ninja.BIN_DIR) / "ninja")


def _arch_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


@functools.cache
def _machine(cxx: str) -> str:
    """What `-march=native` means here, because machines with different CPUs may share a home directory.

    Raises:
        BuildError: the compiler does not start.
    """
    command = [*shlex.split(cxx), _arch_flag(), "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    except OSError as error:
        raise BuildError(f"the C++ compiler {cxx!r} does not start: {error.strerror}; correct or unset CXX") from error


def fingerprint(sources: list[Path], cxx: str, *more: str) -> str:
    """First 16 hex digits of the SHA-256 over sources, headers, flags, compiler, torch, architecture and `more`."""
    digest = hashlib.sha256()
    for path in sorted({*sources, *sources[0].parent.glob("*.h")}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (*_BASE_FLAGS, cxx, _machine(cxx), torch.__version__, platform.machine(), *more):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(name: str, sources: list[Path], includes: tuple[Path, ...] = ()) -> Path:
    """Compiles sources into `<name>-<fingerprint>.so` unless it exists; returns its path.

    It prints a line to standard error, because a build takes seconds. Concurrent processes wait for a lock.
    """
    cxx = compiler()
    if cxx is None:
        raise NoCompilerError("no C++ compiler found (looked for $CXX, g++, clang++); install g++ or set CXX")
    folder = cache_dir()
    library = folder / f"{name}-{fingerprint(sources, cxx, *map(str, includes))}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with open(library.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    print(f"rlkernel: compiling {name}, once, into {folder}", file=sys.stderr, flush=True)
                    with tempfile.TemporaryDirectory(dir=folder) as work:
                        _run_ninja(Path(work), sources, library, cxx, includes)
    except OSError as error:
        raise BuildError(
            f"cannot build {name} in {folder}: {error.strerror or error}; "
            "set RLKERNEL_CACHE to a folder that can be written"
        ) from error
    return library


def build_cpu() -> Path:
    """Compiles `csrc/cpu/*.cpp` unless an up-to-date library exists; returns the library's path.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed (its log stays in the cache), or the cache cannot be written.
    """
    return _build("rlkernel_cpu", sorted((source_dir() / "cpu").glob("*.cpp")))


def loaded(library: str) -> Path | None:
    """Path of a shared library, such as "libnvrtc.so", that this process has loaded; None if it has not."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(library):
            return Path("/" + path)
    return None


def cublaslt_path() -> Path:
    """The cuBLASLt library that torch has loaded into this process.

    Raises:
        BuildError: none is loaded (a CPU build of torch, or ROCm).
    """
    found = loaded("libcublasLt.so")
    if found is None:
        raise BuildError("torch has not loaded cuBLASLt, because this is not a CUDA build of torch")
    return found


def cuda_includes(cublaslt: Path | None = None) -> tuple[Path, ...]:
    """Folders with cuBLASLt's and CUDA's headers.

    It searches next to the loaded library, then the NVIDIA wheels, `$CUDA_HOME` and /usr/local/cuda.

    Raises:
        BuildError: a header is in none of them.
    """
    near = [] if cublaslt is None else [cublaslt.parent.parent / "include"]
    wheels = sorted(p for entry in map(Path, sys.path) for p in entry.glob("nvidia/*/include"))
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    tops = [*near, *wheels, *(Path(root) / "include" for root in roots if root)]
    folders = [folder for top in tops for folder in (top, top / "cccl")]
    chosen: list[Path] = []
    for header in _CUDA_HEADERS:
        if any((folder / header).is_file() for folder in chosen):
            continue
        found = next((folder for folder in folders if (folder / header).is_file()), None)
        if found is None:
            raise BuildError(
                f"CUDA's header {header} is in none of {', '.join(map(str, dict.fromkeys(tops)))}; "
                "install nvidia-cublas and nvidia-cuda-runtime, or set CUDA_HOME"
            )
        chosen.append(found)
    return tuple(chosen)


def build_cublaslt(includes: tuple[Path, ...]) -> Path:
    """Compiles `csrc/cuda/linear_cublaslt.cpp` against CUDA's headers in `includes`; returns the library's path.

    Raises:
        BuildError: as `build_cpu`.
    """
    return _build("rlkernel_cublaslt", [source_dir() / "cuda" / "linear_cublaslt.cpp"], includes)


def _run_ninja(work: Path, sources: list[Path], library: Path, cxx: str, includes: tuple[Path, ...]) -> None:
    paths = [f"-isystem '{folder}'" for folder in includes]
    flags = " ".join((*_BASE_FLAGS, _arch_flag(), *paths)).replace("$", "$$")
    lines = [
        f"cxx = {cxx}",
        f"flags = {flags}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "rule link",
        "  command = $cxx -shared -fopenmp $in -o $out -ldl",
    ]
    objects = []
    for source in sources:
        objects.append(f"{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {str(source).replace(' ', '$ ')}")
    lines += [f"build out.so: link {' '.join(objects)}", "default out.so", ""]
    (work / "build.ninja").write_text("\n".join(lines))
    ninja = _ninja()
    try:
        done = subprocess.run([ninja, "-C", str(work)], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{ninja} does not start: {error.strerror}; install ninja anew") from error
    log = library.with_suffix(".log")
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise BuildError(f"building {library.stem} failed (log: {log})\n{(done.stdout + done.stderr)[-4000:]}")
    os.replace(work / "out.so", library)


@functools.cache
def _load_cpu_library() -> ctypes.CDLL | BuildError:
    """The library, or the error, cached so that a failed build is not repeated for every op."""
    torch.get_num_threads()  # loads torch's OpenMP runtime first, so that both share one thread pool
    try:
        path = build_cpu()
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            return BuildError(
                f"cannot load {path}: {error}; set RLKERNEL_CACHE to a folder that allows execution, or delete the file"
            )
    except BuildError as error:
        return error


def cpu_library() -> ctypes.CDLL:
    """The loaded CPU library, built if necessary.

    Raises:
        BuildError: as `build_cpu`, or the library does not load.
    """
    loaded = _load_cpu_library()
    if isinstance(loaded, BuildError):
        raise loaded
    return loaded


@functools.cache
def cublaslt_library() -> ctypes.CDLL:
    """The loaded bridge to torch's cuBLASLt, built if necessary.

    Raises:
        BuildError: cuBLASLt, its headers or a compiler are missing, or the compiler failed.
    """
    path = cublaslt_path()
    library = ctypes.CDLL(str(build_cublaslt(cuda_includes(path))))
    library.rlk_lt_error.restype = ctypes.c_char_p
    library.rlk_lt_open.argtypes = [ctypes.c_char_p]
    if library.rlk_lt_open(str(path).encode()):
        raise BuildError(f"opening cuBLASLt failed: {library.rlk_lt_error().decode()}")
    return library
