"""Built-in rewards: tables of right and wrong completions, among them texts that try to cheat."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Reward, Rewards, load_reward
from rlkernel.data.rewards.builtin import BUILTIN, sandbox
from rlkernel.data.rewards.builtin import code as code_module
from rlkernel.data.rewards.builtin.code import code, extract
from rlkernel.data.rewards.builtin.mathematics import math
from rlkernel.data.rewards.builtin.text import boxed, exact_match, format, length

CHAT = [{"role": "assistant", "content": " 42\n"}]


def test_every_built_in_reward_loads_by_its_name() -> None:
    for name in BUILTIN:
        assert callable(load_reward(name))
    with pytest.raises(InputError, match=r"built-in reward \(exact_match, boxed, math, format, length, code\)"):
        load_reward("maths")


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("42", "42", 1),
        (" 42\n", 42, 1),
        (CHAT, "42", 1),
        ("42.", "42", 0),
        ("42 42", "42", 0),
        ("", "42", 0),
        ("a", "A", 0),
    ],
)
def test_exact_match(completion: Any, answer: Any, value: float) -> None:
    assert exact_match([completion], [answer]) == [value]
    assert exact_match(["Paris "], ["paris"], ignore_case=True) == [1.0]


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"so \boxed{42}", "42", 1),
        (r"\boxed { 4 2 }", "42", 1),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\left( 1, 2\right)}", "(1,2)", 1),
        (r"\boxed{\{1\}}", r"\{1\}", 1),
        (r"\fbox{$x$}", "x", 1),
        (r"\boxed{42}", r"thus \boxed{42}", 1),
        (r"\boxed{42} no, \boxed{43}", "42", 0),
        (r"\boxed{41} no, \boxed{42}", "42", 1),
        (r"\boxed{42", "42", 0),
        (r"\boxed{42} \boxed{", "42", 0),
        (r"\boxed{}", "42", 0),
        (r"\boxed{42\}", "42", 0),
        (r"\boxed{{42}", "42", 0),
        (r"\boxed{41, 42}", "42", 0),
        ("42", "42", 0),
        (r"\boxed" * 5000, "42", 0),
        (r"\boxed{" * 5000 + "42" + "}" * 4999, "42", 1),
    ],
)
def test_boxed(text: str, answer: str, value: float) -> None:
    assert boxed([text], [answer]) == [value]


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{\frac12}", "0.5", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"\boxed{x=3}", "3", 1),
        (r"\boxed{50\%}", "0.5", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (r"\boxed{2 \text{ or } 3}", "2, 3", 1),
        (r"\boxed{B}", "B", 1),
        ("the answer is $7$", 7, 1),
        ([{"role": "assistant", "content": r"\boxed{7}"}], "7", 1),
        (r"\boxed{6} \boxed{7}", "6", 0),
        (r"\boxed{6, 7, 8}", "7", 0),
        (r"\boxed{6 \text{ or } 7}", "7", 0),
        (r"\boxed{x=6, x=7}", "7", 0),
        *((rf"\boxed{{6 \{join} 7}}", "7", 0) for join in ("vee", "lor", "land", "cup", "to", "Rightarrow")),
        (r"\boxed{[6, 7]}", "7", 0),
        (r"\boxed{x}", "7", 0),
        (r"\boxed{\text{answer}}", "7", 0),
        (r"\boxed{}", "7", 0),
        (r"\boxed{7", "6", 0),
        ("", "7", 0),
        (r"\boxed{" + "9" * 6000 + "}", "7", 0),
        (r"\boxed{__import__('os').getpid()}", "7", 0),
    ],
)
def test_math(text: Any, answer: Any, value: float) -> None:
    assert math([text], [answer]) == [value]


def test_math_that_has_no_verdict_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    monkeypatch.setattr("rlkernel.data.rewards.builtin.mathematics.verify", _with_seconds(math_verify.verify, 1))
    batch = {
        "prompts": ["p"] * 3,
        "completions": [r"\boxed{9^{9^{9^9}}}", r"\boxed{1}", "x"],
        "completion_ids": [[1]] * 3,
    }
    scores = Rewards([Reward("math", "math")])({**batch, "answer": ["1", "1", ""]})
    assert scores.total == [None, 1.0, None] and scores.dropped == {0: "timeout", 2: "raised"}


def _with_seconds(verify: Any, seconds: int) -> Any:
    return lambda *a, **k: verify(*a, timeout_seconds=seconds, **k)


def test_math_without_its_library_names_the_extra() -> None:
    hidden = "import sys; sys.modules['math_verify'] = None; from rlkernel.data.rewards import load_reward as load; "
    done = subprocess.run([sys.executable, "-c", hidden + "load('math')"], capture_output=True, text=True)
    assert "the library math-verify is missing" in done.stderr and 'pip install "rlkernel[math]"' in done.stderr


def test_format() -> None:
    pattern = r"<think>.*</think>\s*<answer>[^<]*</answer>"
    texts = ["<think>a\nb</think>\n<answer>1</answer>", "<think></think><answer>1</answer> more", "x"]
    assert format(texts, pattern=pattern) == [1.0, 0.0, 0.0]
    with pytest.raises(InputError, match=r"pattern '\(' is not a regular expression"):
        format(["x"], pattern="(")


def test_length() -> None:
    ids = [[0] * n for n in (0, 5, 10, 15, 40)]
    assert length(ids, target=10) == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert length(ids, limit=20, buffer=10) == [0.0, 0.0, 0.0, -0.5, -1.0]
    assert length([[0] * 20, [0] * 21], limit=20) == [0.0, -1.0]
    for options, message in (
        ({}, "give one of the options target and limit"),
        ({"target": 1, "limit": 1}, "and not both"),
        ({"target": 0}, "target is 0"),
        ({"limit": 2, "buffer": 3}, "buffer is 3"),
    ):
        rewards = Rewards([Reward("length", "length", options=options)])
        batch = {"prompts": ["p"], "completions": ["x"], "completion_ids": [[1]]}
        with pytest.raises(InputError, match=rf"^reward length: .*{message}[^\n]*$"):
            rewards(batch)


RIGHT = "def f(x):\n    return 2 * x\n"
ASSERTS = "assert f(2) == 4\nassert f(-1) == -2\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (RIGHT, 1),
        (f"First:\n```python\nbroken(\n```\nthen\n```python\n{RIGHT}```\nDone.", 1),
        (f"```py\n{RIGHT}", 1),
        (f"```\n{RIGHT}```", 1),
        ("def f(x):\n    return 4\n", 0),
        ("def f(x:\n", 0),
        ("", 0),
        ("import sys\nsys.exit(0)", 0),
        ("import os\nos._exit(0)", 0),
        ("import sys\ndef f(x):\n    sys.exit(0)", 0),
        ("def f(x):\n    raise KeyboardInterrupt", 0),
        ("import builtins, os\nbuiltins.exec = builtins.compile = os.write = lambda *a: 0", 0),
        (
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'r' + b'0' * 32)\n    except OSError: pass\n"
            "os._exit(0)",
            0,
        ),
        ("import os\nos.kill(os.getppid(), 9)", 0),
        ("x = bytearray(2 << 30)\n" + RIGHT, 0),
        ("open('big', 'wb').write(bytes(20 << 20))\n" + RIGHT, 0),
        ("print('x' * (20 << 20))\n" + RIGHT, 0),
        ("while True: pass", 0),
    ],
)
def test_code_with_asserts(text: str, value: float) -> None:
    assert code([text], [ASSERTS], timeout_s=0.7 if "while" in text else 10.0) == [value]


def test_code_as_a_program() -> None:
    tests = [{"input": "3\n4\n", "output": "7\n"}, {"input": "1\n1\n", "output": "2"}]
    programs = {
        "print(int(input()) + int(input()))": 1.0,
        "import sys\nprint(int(input()) + int(input()), ' ')\nsys.exit(0)": 1.0,
        "print(7)": 0.0,
        "print(int(input()) + int(input()))\nraise SystemExit(1)": 0.0,
        "print(open('/proc/self/fd/0').read())": 0.0,
    }
    assert code(list(programs), [tests] * len(programs)) == list(programs.values())
    with pytest.raises(ValueError, match="must be Python text or"):
        code(["x"], [[{"input": "x"}]])


def test_nothing_that_the_code_starts_survives() -> None:
    mark = f"sandbox{os.getpid()}"
    program = (
        "import os, sys, time\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])\n"
    )
    started = time.monotonic()
    assert code([program + "time.sleep(0.2)\n" + RIGHT], [ASSERTS]) == [1.0]
    assert time.monotonic() - started < 20
    if _may_leave_network():  # the descendants leave their session, so only a namespace of processes finds them
        commands = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
        assert mark not in commands


def test_code_has_no_network_where_linux_permits() -> None:
    program = (
        "import socket\n"
        "def f(x):\n"
        "    try: socket.create_connection(('127.0.0.1', 9), timeout=1)\n"
        "    except OSError as error: return error.errno\n"
    )
    expected = errno.ENETUNREACH if _may_leave_network() else errno.ECONNREFUSED
    assert code([program], [f"assert f(0) == {expected}"]) == [1.0]


def _may_leave_network() -> bool:
    flags = sandbox._CLONE_NEWUSER | sandbox._CLONE_NEWPID | sandbox._CLONE_NEWNET
    program = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    return subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_sandbox_that_cannot_start_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "_SANDBOX", code_module._SANDBOX.with_name("absent.py"))
    with pytest.raises(RuntimeError, match="the sandbox ended with status 2 before it ran"):
        code([RIGHT], [ASSERTS])


def test_the_last_block_is_the_code() -> None:
    assert extract("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "y = 2\n"
    assert extract("x = 1") == "x = 1"
