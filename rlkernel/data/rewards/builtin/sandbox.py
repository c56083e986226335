"""The program that runs a completion's code: limits itself, leaves the network, then runs code and tests.

`code.py` starts it as a script, in a new session and an empty folder. Its arguments: the descriptor of the pipe for its
verdict, seconds of processor time, bytes of memory. Standard input holds JSON: `code`, `tests`, `secret`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
FILE_BYTES = 16 << 20
"""Largest file, and largest output, that the code may write."""


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from limits import die_with_parent, limit_resource

    del sys.path[0]
    pipe, seconds, memory = map(int, sys.argv[1:])
    request = json.load(sys.stdin)
    die_with_parent()
    _leave_network()
    limit_resource(resource.RLIMIT_CPU, seconds)
    limit_resource(resource.RLIMIT_AS, memory)
    limit_resource(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit_resource(resource.RLIMIT_NOFILE, 64)
    limit_resource(resource.RLIMIT_NPROC, 64)
    limit_resource(resource.RLIMIT_CORE, 0)
    sys.argv[1:] = []
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.write(pipe, b"r")
    _run(request["code"], request["tests"], request["secret"].encode(), pipe)


def _leave_network() -> None:
    """Goes on in a child that has no network and takes its descendants with it when it ends, if Linux permits."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET):
        return
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 1)
    from limits import die_with_parent

    die_with_parent()


def _run(code: str, tests: str, secret: bytes, pipe: int) -> None:
    """Runs both as one program, and writes the secret if the end of the tests is reached."""
    # The code may replace functions of Python, so the ones used after it are taken before.
    run, write = exec, os.write
    names = {"__name__": "__main__"}
    checks = compile(tests, "<tests>", "exec")
    run(compile(code, "<completion>", "exec"), names)
    run(checks, names)
    write(pipe, secret)


if __name__ == "__main__":
    main()
