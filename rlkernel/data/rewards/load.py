"""Finds a reward function by its reference, and describes errors of its code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.data.rewards.builtin import BUILTIN

RewardFunction = Callable[..., Any]


def load_reward(reference: str) -> RewardFunction:
    """The callable named by `path/file.py:function`, `package.module:function` or the name of a built-in reward.

    Raises:
        InputError: the reference is malformed, the file, module or function is missing or not callable, or its import
            fails.
    """
    location, separator, attribute = BUILTIN.get(reference, reference).rpartition(":")
    if not separator or not location or not attribute:
        raise InputError(
            f"reward {reference!r}: expected FILE.py:function, package.module:function or a built-in reward "
            f"({', '.join(BUILTIN)})"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `python -m` has the working directory on the path, a console script does not
    try:
        module = _module_of_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # includes a script's sys.exit
        raise InputError(f"reward {reference!r}: importing {location} failed: {describe(error)}") from error
    function = getattr(module, attribute, None)
    if function is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(
            f"reward {reference!r}: {location} has no {attribute!r} (it has: {', '.join(names) or 'none'})"
        )
    if not callable(function):
        raise InputError(f"reward {reference!r}: {attribute!r} is {type(function).__name__}, not a function")
    return function


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"reward: file {path} does not exist")
    name = f"rlkernel_reward_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # modules next to the file are found first, as for a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        # For imports inside functions, which run later, the folder stays last, where it cannot hide a library.
        with suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def describe(error: BaseException) -> str:
    """Type, message and places of an exception, in one line of bounded length."""
    text = "".join(c for c in " ".join(str(error).split()) if c.isprintable())  # no escape codes on a terminal
    name = type(error).__name__
    return (f"{name}: {text[:500]}" if text else name) + _places_of(error)


def _places_of(error: BaseException) -> str:
    """Lines at which the reward's code was entered and at which it raised."""
    own = os.path.dirname(__file__) + os.sep
    trace = error.__traceback__
    places = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        ours = file.startswith(own) and not file.startswith(f"{own}builtin")
        if not ours and not file.startswith("<frozen importlib") and "importlib" not in Path(file).parts:
            places.append(f"{file}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f" ({', '.join(dict.fromkeys([places[0], places[-1]]))})" if places else ""
