"""A reward for code that passes tests, which run in a process of their own with limits."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rlkernel.data.rewards.builtin.text import text_of

_SANDBOX = Path(__file__).with_name("sandbox.py")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def code(
    completions: list[Any],
    tests: list[Any],
    *,
    timeout_s: float = 10.0,
    memory_mib: int = 1024,
) -> list[float]:
    """1 if the completion's Python code passes every test of the column `tests`, else 0.

    The code is the completion's last fenced block, or the whole text if there is none. `tests` is Python that runs
    after the code in the same namespace, such as `assert f(2) == 4`; or a list of `{"input": ..., "output": ...}`, for
    each of which the code runs as a program whose standard output must equal `output`, trailing white space aside.

    Args:
        timeout_s: seconds of all tests of one completion together.
        memory_mib: address space of one process.

    Raises:
        ValueError: `tests` has another form.
        RuntimeError: the process could not be set up, so the completion has no verdict.
    """
    return [
        float(_passes(extract(text_of(completion)), one, timeout_s, memory_mib << 20))
        for completion, one in zip(completions, tests, strict=True)
    ]


def extract(text: str) -> str:
    """The last fenced block of Python, or the text itself."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _passes(program: str, tests: Any, seconds: float, memory: int) -> bool:
    deadline = time.monotonic() + seconds
    if isinstance(tests, str):
        return _run(program, tests, "", deadline, memory).finished
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise ValueError('a row of the column tests must be Python text or [{"input": ..., "output": ...}, ...]')
    for test in tests:
        result = _run(program, "", str(test["input"]), deadline, memory)
        if result.status != 0 or _lines(result.output) != _lines(str(test["output"])):
            return False
    return True


def _is_test(test: Any) -> bool:
    return isinstance(test, dict) and {"input", "output"} <= test.keys()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class _Result:
    def __init__(self, status: int | None, finished: bool, output: str):
        self.status, self.finished, self.output = status, finished, output


def _run(program: str, tests: str, text: str, deadline: float, memory: int) -> _Result:
    """Runs one program; its status is None if time ran out."""
    secret = secrets.token_hex(16)
    request = json.dumps({"code": program, "tests": tests, "secret": secret})
    seconds = max(0.0, deadline - time.monotonic())
    limits = [str(math.ceil(seconds) + 1), str(memory)]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as requested,
        tempfile.TemporaryFile() as printed,
    ):
        requested.write(request.encode())
        requested.seek(0)
        (Path(folder) / "stdin").write_text(text, encoding="utf-8")
        verdict, write_end = os.pipe()
        with os.fdopen(verdict, "rb") as pipe:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_SANDBOX), str(write_end), *limits],
                stdin=requested,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_environment(folder),
                pass_fds=[write_end],
                start_new_session=True,
            )
            os.close(write_end)
            status = _wait(process, seconds)
            os.set_blocking(verdict, False)
            answer = pipe.read() or b""
        if status is not None and not answer:
            raise RuntimeError(f"the sandbox ended with status {status} before it ran the completion's code")
        return _Result(status, answer == b"r" + secret.encode(), _printed(printed))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Exit status, or None if time ran out; nothing that the process started survives."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _printed(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the trainer's environment, which may hold keys."""
    return {
        "PATH": os.defpath,
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
