"""Triton's interpreter for tests: `run` runs a test file in a new process, whose kernels run in the interpreter.

A new process, because Triton chooses the interpreter when a kernel is defined. There, `conftest.py` installs
`memory_check` and calls `accelerate`, because the interpreter spends most of its time on patching `triton.language` at
each call of a device function and on reductions element by element.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def run(file: str, **environment: str) -> None:
    """Runs the tests of `file` that are defined under TRITON_INTERPRET=1, and fails if one of them does."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        env.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.fail(f"{done.stdout[-6000:]}{done.stderr[-2000:]}\nstatus {done.returncode}", pytrace=False)


def accelerate() -> None:
    """Same results in less time: one patch of `triton.language` per launch, and reductions slice by slice."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, by_elements = interpreter._patch_lang, interpreter.ReduceOps.generic_reduce
    scopes: list[Any] = []  # of the running launch, one for each set of modules that its functions import
    patched: set[frozenset[str]] = set()

    class Scope:
        @staticmethod
        def restore() -> None:
            patched.clear()
            while scopes:
                scopes.pop().restore()

    @functools.cache
    def modules(fn: Any) -> frozenset[str]:
        seen = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(m.__name__ for m in seen if m in (tl, tl.core))

    def patch_once(fn: Any) -> type[Scope]:
        if (needed := modules(fn)) not in patched:
            scopes.append(patch(fn))
            patched.add(needed)
        return Scope

    def by_slices(self: Any, inputs: Any) -> Any:
        """A left fold like Triton's, over all other axes at once."""
        if self.axis is None:
            return by_elements(self, inputs)
        slices = [[self.to_tensor(x, t.dtype) for x in np.moveaxis(t.handle.data, self.axis, 0)] for t in inputs]
        total, *rest = zip(*slices, strict=True)
        for one in rest:
            found = self.combine_fn.fn(*total, *one)
            total = found if isinstance(found, tuple) else (found,)
        shape = list(inputs[0].handle.data.shape)
        shape[self.axis : self.axis + 1] = [1] if self.keep_dims else []
        return [self.to_tensor(x.handle.data.reshape(shape), t.dtype) for x, t in zip(total, inputs, strict=True)]

    interpreter._patch_lang = patch_once
    interpreter.ReduceOps.generic_reduce = by_slices
