"""Limits that a process sets on itself; imports nothing heavy, because the sandbox of `builtin.code` uses it too."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def limit_resource(which: int, amount: int) -> None:
    """Lowers a resource limit for good; a stricter one that is already set stays."""
    hard = resource.getrlimit(which)[1]
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(which, (amount, amount))


def die_with_parent() -> None:
    """Asks Linux to kill this process if its parent dies, because a function that loops never sees its input end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
