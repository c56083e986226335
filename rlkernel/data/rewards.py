"""Rewards as Python callables with TRL's signature, several with weights, and every wrong answer of one an error.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`completions` are texts, or for chat prompts lists with one assistant message. None means "this reward does not
judge this completion": it is left out of the weighted sum, and another reward must have judged it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkernel.data.errors import InputError

RewardFunction = Callable[..., Sequence[float | None]]


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"reward: file {path} does not exist; write it as FILE.py:function")
    name = f"rlkernel_reward_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"reward: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles inside the file look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_reward(reference: str) -> RewardFunction:
    """The callable behind `package.module:function` or `path/file.py:function`.

    Raises:
        InputError: malformed reference, missing file, module or function, an import that fails, not callable.
    """
    location, separator, attribute = reference.rpartition(":")
    if not separator or not location or not attribute:
        raise InputError(f"reward {reference!r}: expected FILE.py:function or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module beside the user; python -m has it there, a console script has not
    try:
        module = _module_of_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"reward {reference!r}: importing {location} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(
            f"reward {reference!r}: {location} has no {attribute!r} (it has: {', '.join(names) or 'none'})"
        )
    if not callable(function):
        raise InputError(f"reward {reference!r}: {attribute!r} is {type(function).__name__}, not a function")
    return function


@dataclass(frozen=True)
class Scores:
    """Rewards of one batch of completions.

    Attributes:
        total: weighted sum for each completion.
        parts: what each reward returned, by name; None where it did not judge.
    """

    total: list[float]
    parts: dict[str, list[float | None]]


@dataclass(frozen=True)
class Reward:
    """A named reward function and its weight in the sum."""

    name: str
    function: RewardFunction
    weight: float = 1.0


class Rewards:
    """The weighted sum of one or more reward functions.

    Args:
        rewards: the functions; names must differ, they key metrics.
    """

    def __init__(self, rewards: Sequence[Reward]):
        if not rewards:
            raise InputError("reward: none given; use --reward FILE.py:function")
        self.rewards = list(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"reward: two rewards are called {name!r}; give each function a name of its own")

    def require(self, columns: Collection[str]) -> None:
        """Checks, before any work, that the data have every column that a function cannot do without.

        Raises:
            InputError: names the reward and the column.
        """
        for reward in self.rewards:
            _require(reward, ("prompts", "completions", "completion_ids", *columns))

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> Scores:
        """Scores a batch.

        Args:
            prompts, completions, completion_ids: one entry a completion; `columns`: the data's further columns.

        Raises:
            InputError: a function raised, returned no list, the wrong count, NaN, an infinity or a non-number;
                or no function judged some completion.
        """
        offered = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        parts = {r.name: _checked(r, _call(r, offered), len(prompts)) for r in self.rewards}
        total: list[float] = []
        for i in range(len(prompts)):
            judged = [(r.weight, parts[r.name][i]) for r in self.rewards]
            if all(value is None for _, value in judged):
                names = ", ".join(parts)
                raise InputError(
                    f"reward: completion {i} was judged by none of {names} (all returned None); "
                    f"return a number, or add a reward that judges every completion"
                )
            total.append(math.fsum(weight * value for weight, value in judged if value is not None))
        return Scores(total, parts)


def _require(reward: Reward, offered: Collection[str]) -> None:
    for p in inspect.signature(reward.function).parameters.values():
        named = p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if named and p.default is p.empty and p.name not in offered:
            raise InputError(
                f"reward {reward.name}: it takes {p.name!r}, which the data lacks (there are: {', '.join(offered)})"
            )


def _call(reward: Reward, offered: dict[str, Any]) -> Any:
    _require(reward, offered)
    parameters = inspect.signature(reward.function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        # TRL asks for **kwargs; a function without it gets what it names.
        offered = {p.name: offered[p.name] for p in parameters if p.name in offered}
    try:
        return reward.function(**offered)
    except Exception as error:
        raise InputError(f"reward {reward.name}: raised {type(error).__name__}: {error}{_line_of(error)}") from error


def _line_of(error: BaseException) -> str:
    """Place in the reward's own file where it raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def _checked(reward: Reward, answer: Any, count: int) -> list[float | None]:
    what = f"reward {reward.name}"
    if answer is None:
        raise InputError(
            f"{what}: returned None; it must return a list with one number for each of {count} completions"
        )
    if isinstance(answer, (str, bytes, dict)):
        raise InputError(f"{what}: returned {type(answer).__name__}; it must return a list of {count} numbers")
    try:
        values = list(answer)
    except TypeError:
        raise InputError(
            f"{what}: returned {type(answer).__name__}; it must return a list of {count} numbers"
        ) from None
    if len(values) != count:
        raise InputError(f"{what}: returned {len(values)} values for {count} completions; one each is expected")
    checked: list[float | None] = []
    for i, value in enumerate(values):
        if value is None:
            checked.append(None)
            continue
        try:
            number = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, str) or not math.isfinite(number):
            raise InputError(f"{what}: value {i} is {value!r}; it must be a finite number (or None to abstain)")
        checked.append(number)
    return checked
