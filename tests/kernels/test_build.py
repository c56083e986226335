"""Building on first use: one build for many processes, a log on failure, the reference where there is no compiler.

Controls: counted compiler calls, changed sources and damaged libraries; each must cause a build or an error.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.fake_schedules import arguments, equal, spec

from rlkernel.cli.main import main
from rlkernel.kernels import build, scheduled_op, select, verdicts
from rlkernel.kernels.errors import BuildError, NoCompilerError
from rlkernel.kernels.scheduled_op import ScheduledOp

ROOT = Path(__file__).parents[2]
ADD = "import torch; from rlkernel import ops; print(ops.linear(torch.ones(2, 3), torch.ones(4, 3)).sum().item())"
SEVEN = 'extern "C" __attribute__((visibility("default"))) int seven() { return 7; }'


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_fingerprint_covers_sources_flags_compiler_and_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("int x;")
    cxx = build.compiler()
    assert cxx is not None
    first = build.fingerprint([source], cxx)
    assert build.fingerprint([source], cxx) == first
    (tmp_path / "h.h").write_text("int y;")
    assert build.fingerprint([source], cxx) != first
    (tmp_path / "h.h").unlink()
    monkeypatch.setattr(build, "_BASE_FLAGS", (*build._BASE_FLAGS, "-g"))
    flagged = build.fingerprint([source], cxx)
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    assert len({first, flagged, build.fingerprint([source], cxx)}) == 3


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    """The compiler takes two seconds, so that all processes ask for the library while the first one builds it."""
    compiler, source = tmp_path / "counted", tmp_path / "a.cpp"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {tmp_path}/links; sleep 2;; esac\nexec {build.compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    source.write_text(SEVEN)
    code = f"""
import ctypes, pathlib
from rlkernel.kernels import build
print(ctypes.CDLL(str(build._build("a", [pathlib.Path({str(source)!r})]))).seven())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RLKERNEL_CACHE": str(tmp_path / "c"), "CXX": str(compiler)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [p.communicate()[0].strip() for p in processes] == ["7"] * 3
    assert (tmp_path / "links").read_text().count("x") == 1
    left = {p.suffix for p in (tmp_path / "c").iterdir()}
    assert left == {".so", ".lock", ".log"}


def test_a_library_is_built_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build prints one line on standard error."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "a.cpp"
    source.write_text(SEVEN)
    built = build._build("a", [source])
    before = built.stat().st_mtime_ns
    assert build._build("a", [source]) == built and built.stat().st_mtime_ns == before
    assert capsys.readouterr().err == f"rlkernel: compiling a, once, into {tmp_path / 'cache'}\n"
    assert ctypes.CDLL(str(built)).seven() == 7


def test_files_honour_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        build.put(tmp_path / "new" / "file.json", b"{}")
    finally:
        os.umask(before)
    (made,) = (tmp_path / "new").iterdir()
    assert made.stat().st_mode & 0o777 == 0o640 and made.read_bytes() == b"{}"


def test_no_compiler_runs_the_reference_with_one_warning(tmp_path: Path) -> None:
    done = run(f"{ADD}\n{ADD}", RLKERNEL_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert done.returncode == 0 and done.stdout.split() == ["24.0", "24.0"], done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "no C++ compiler found" in done.stderr


def test_failed_build_is_an_error_with_a_log_and_runs_once(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\necho cannot compile today >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = f"""
from rlkernel.kernels.errors import BuildError
for _ in range(2):
    try:
        {ADD.replace("; ", chr(10) + "        ")}
    except BuildError as error:
        print(str(error).replace(chr(10), " "))
"""
    done = run(code, RLKERNEL_CACHE=str(tmp_path / "c"), CXX=str(compiler))
    assert done.stdout.count("cannot compile today") >= 2 and ".log" in done.stdout, done.stderr
    calls = (tmp_path / "calls").read_text().count("x")
    assert calls <= 1 + len(list((build.source_dir() / "cpu").glob("*.cpp")))
    (log,) = (tmp_path / "c").glob("*.log")
    assert "cannot compile today" in log.read_text()
    assert not list((tmp_path / "c").glob("*.so"))


def test_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (source := tmp_path / "a.cpp").write_text(SEVEN)
    monkeypatch.setenv("RLKERNEL_CACHE", str(source / "cache"))
    with pytest.raises(BuildError, match="RLKERNEL_CACHE"):
        build._build("a", [source])


def test_cache_that_cannot_be_entered_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def closed(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    source = tmp_path / "a.cpp"
    source.write_text("int x;")
    cxx = build.compiler()
    monkeypatch.setattr(build, "fingerprint", lambda *more: f"0-{cxx}"[:3])
    for name in ("exists", "mkdir", "glob"):
        monkeypatch.setattr(Path, name, closed)
    with pytest.raises(BuildError, match=r"Permission denied; set RLKERNEL_CACHE"):
        build._build("a", [source])
    assert verdicts.stored() == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    monkeypatch.delenv("RLKERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # its specification treats empty as unset
    assert build.cache_dir() == home / ".cache" / "rlkernel"
    monkeypatch.setenv("RLKERNEL_CACHE", "~/kernels")  # not expanded by a shell
    assert build.cache_dir() == home / "kernels"


@pytest.mark.parametrize("where", (".", "cache"))
def test_a_relative_cache_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str) -> None:
    build._absolute.cache_clear()
    monkeypatch.setenv("RLKERNEL_CACHE", where)
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "a.cpp"
    source.write_text(SEVEN)
    built = build._build("a", [source])
    assert ctypes.CDLL(str(built)).seven() == 7 and built.parent == tmp_path / where
    monkeypatch.chdir("/")
    assert build.cache_dir() == tmp_path / where
    build._absolute.cache_clear()


def test_a_relative_cache_without_a_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", "gone")
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    build._absolute.cache_clear()
    with pytest.raises(BuildError, match="working directory for the cache; set RLKERNEL_CACHE to the absolute path"):
        build.cache_dir()
    assert verdicts.load({}) is None


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home in $HOME and the passwd file, as in a container with an unknown user id."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "RLKERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("root", ("", "~/kernels"))
def test_without_a_home_a_build_asks_for_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], homeless: None, root: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", root)
    message = "there is no home or working directory for the cache; set RLKERNEL_CACHE to the absolute path of a folder"
    monkeypatch.setattr(build, "cpu_library", build.build_cpu)  # without the cache of its result
    with pytest.raises(BuildError, match=message):
        build.cpu_library()
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert verdicts.stored() == [] and verdicts.load({}) is None
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path


def test_without_a_home_certification_runs_and_stores_nothing(cache: Path, homeless: None) -> None:
    with pytest.warns(RuntimeWarning, match="could not keep a verdict: there is no home .*; set RLKERNEL_CACHE"):
        assert ScheduledOp(spec(equal)).chosen(*arguments()) == "fake.equal"
    assert scheduled_op.report(torch.device("cpu"))[-1]["certified"] and not cache.exists()


def test_without_a_home_device_code_is_compiled_and_not_stored(monkeypatch: pytest.MonkeyPatch, homeless: None) -> None:
    from rlkernel.kernels.cuda import driver

    monkeypatch.setattr(driver, "compiler", lambda: "nvrtc")
    monkeypatch.setattr(driver, "_nvrtc", lambda: object())
    monkeypatch.setattr(driver, "_with_nvrtc", lambda *arguments: b"code")
    source = build.source_dir() / "cuda" / "linear_logprob_sm90.cu"
    assert driver.compile_cuda(source, "90a", {}) == b"code"


def test_a_missing_cxx_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -O1")
    with pytest.raises(BuildError, match="/nowhere/g"):
        build.compiler()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert build.compiler() is None
    with pytest.raises(NoCompilerError, match="install g\\+\\+"):
        build.build_cpu()


def test_cxx_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_bytes(b"\x7fELF and no more")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"C\+\+ compiler '.*g\+\+' does not start: .*; correct or unset CXX"):
        build.build_cpu()


def test_programs_that_do_not_start_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlkernel.kernels.cuda import driver

    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF and no more")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(BuildError, match=r"CXX='g.*No closing quotation; correct or unset CXX"):
        build.compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_ninja", lambda: str(broken))
    with pytest.raises(BuildError, match=r"broken does not start: .*; install ninja anew"):
        build.build_cpu()
    monkeypatch.setattr(driver, "_nvrtc", lambda: None)
    monkeypatch.setattr(driver, "_nvcc", lambda: str(broken))
    assert driver.compiler.__wrapped__() == "none"
    source = build.source_dir() / "cuda" / "linear_logprob_sm90.cu"
    with pytest.raises(BuildError, match=r"broken does not start: .*; correct PATH or CUDA_HOME"):
        driver.compile_cuda(source, "90a", {})


def test_doctor_reports_a_missing_cxx_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(build, "cpu_library", build.build_cpu)  # without the caches of earlier results
    monkeypatch.setattr(select, "_no_compiler", select._no_compiler.__wrapped__)
    monkeypatch.setattr(select, "_chosen", {})
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "CXX='/nowhere/g++'" in captured.out + captured.err
