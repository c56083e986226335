"""Reward functions with TRL's signature, several with weights; every wrong return value is an error.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`completions` are texts, or for chat prompts lists with one assistant message. None means "not judged": the completion
is left out of this reward's part of the weighted sum, and another reward must have judged it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlkernel.data.contents import is_chat
from rlkernel.data.errors import InputError
from rlkernel.data.prompts import RESERVED

RewardFunction = Callable[..., Sequence[float | None]]
LARGEST = 1e15
"""Largest absolute value of a reward: the squares in an advantage's standard deviation must stay finite in fp32."""


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restores the process state that the trainer depends on and that rewards, which run in its process, may change."""
    folder, dtype, device = os.getcwd(), torch.get_default_dtype(), torch.get_default_device()
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(None)  # "cpu" would install a dispatch mode, which slows every call
            if torch.get_default_device() != device:
                torch.set_default_device(device)


def _one_line(error: BaseException) -> str:
    """Type and message of an exception, in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _shown(value: Any) -> str:
    """The value for a message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"reward: file {path} does not exist; write it as FILE.py:function")
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


def load_reward(reference: str) -> RewardFunction:
    """The callable named by `package.module:function` or `path/file.py:function`.

    Raises:
        InputError: the reference is malformed, the file, module or function is missing or not callable, or its import
            fails.
    """
    location, separator, attribute = reference.rpartition(":")
    if not separator or not location or not attribute:
        raise InputError(f"reward {reference!r}: expected FILE.py:function or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `python -m` has the working directory on the path, a console script does not
    try:
        with _restored_process():
            module = _module_of_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # includes a script's sys.exit
        raise InputError(
            f"reward {reference!r}: importing {location} failed: {_one_line(error)}{_places_of(error)}"
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
        parts: values that each reward returned, by name; None where it did not judge.
        metrics: mean of the values that rewards logged under each name with `log_metric`.
        extra: columns that rewards logged with `log_extra`, one value for each completion.
    """

    total: list[float]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """State of the run, which rewards get as `trainer_state`.

    Attributes:
        global_step: finished steps.
        max_steps: steps of the run.
    """

    global_step: int = 0
    max_steps: int = 0


class _Log:
    """Collects what rewards log for one batch of `count` completions."""

    def __init__(self, count: int):
        self.count = count
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def column(self, column: str, values: Sequence[Any]) -> None:
        found = [_as_json(value) for value in values]
        if len(found) != self.count:
            raise ValueError(f"log_extra({column!r}): {len(found)} values for {self.count} completions")
        self.extra[str(column)] = found


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return _shown(value)


@dataclass(frozen=True)
class Reward:
    """A named reward function and its weight in the sum."""

    name: str
    function: RewardFunction
    weight: float = 1.0


class Rewards:
    """The weighted sum of one or more reward functions.

    Args:
        rewards: the functions; names must differ, because metrics are named after them.
    """

    def __init__(self, rewards: Sequence[Reward]):
        if not rewards:
            raise InputError("reward: none given; use --reward FILE.py:function")
        self.rewards = list(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"reward: two rewards are called {name!r}; give each function its own name")

    def require(self, columns: Collection[str], source: str = "the data") -> None:
        """Checks that the data have every column that a function requires.

        Raises:
            InputError: names the reward, the column and the source of the data.
        """
        offered = (*RESERVED, *columns)
        for reward in self.rewards:
            for p in _parameters(reward):
                named = p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                if named and p.default is p.empty and p.name not in offered:
                    raise InputError(
                        f"reward {reward.name}: it takes {p.name!r}, which {source} lacks (there are: "
                        f"{', '.join(offered)})"
                    )

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
        state: TrainerState | None = None,
    ) -> Scores:
        """Scores a batch.

        Args:
            prompts, completions, completion_ids: one entry per completion.
            columns: the data's further columns.
            state: passed to the rewards as `trainer_state`.

        Raises:
            InputError: a function raised, or returned anything but one finite number of at most 1e15 in size (or None)
                per completion; or no function judged some completion.
        """
        self.require(columns)
        count = len(prompts)
        log = _Log(count)
        offered: dict[str, Any] = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        offered |= columns
        offered |= {"trainer_state": state or TrainerState(), "log_metric": log.metric, "log_extra": log.column}
        parts = {r.name: _checked(r.name, _call(r, offered), count) for r in self.rewards}
        total: list[float] = []
        for i in range(count):
            judged = [r.weight * value for r in self.rewards if (value := parts[r.name][i]) is not None]
            if not judged:
                raise InputError(
                    f"reward: completion {i} was judged by none of {', '.join(parts)} (all returned None); "
                    f"return a number, or add a reward that judges every completion"
                )
            if sum(map(abs, judged)) > LARGEST:
                raise InputError(
                    f"reward: the weighted sum of {', '.join(parts)} for completion {i} is above {LARGEST:g} in size; "
                    "use smaller weights or rewards"
                )
            total.append(math.fsum(judged))
        means = {name: sum(values) / len(values) for name, values in log.metrics.items()}
        return Scores(total, parts, means, log.extra)


def _parameters(reward: Reward) -> Collection[inspect.Parameter]:
    try:
        return inspect.signature(reward.function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(
            f"reward {reward.name}: Python cannot read its parameters; wrap it in `def {reward.name}(completions, **_)`"
        ) from None


def _call(reward: Reward, offered: dict[str, Any]) -> Any:
    """The return value of a reward; a coroutine is awaited and a generator read to its end."""
    parameters = _parameters(reward)
    names = {p.name for p in parameters}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # TRL requires **kwargs; other functions get what they name
        names |= offered.keys()
    # Lists are copied, so that a function that sorts or empties one changes nothing for the next.
    arguments = {name: list(v) if isinstance(v, list) else v for name, v in offered.items() if name in names}
    try:
        with _restored_process():
            answer = reward.function(**arguments)
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
            return list(answer) if isinstance(answer, Iterator) else answer
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes sys.exit, which would end the run as if it had succeeded
        form = ""
        if isinstance(error, (AttributeError, TypeError)):  # typical of a reward written for the other form
            form = "; the prompts are text, therefore each completion is text"
            if any(is_chat(prompt) for prompt in offered["prompts"]):
                form = (
                    '; the completion of a chat prompt is [{"role": "assistant", "content": text}], so read its text '
                    'as completion[0]["content"], or give prompts as text'
                )
        raise InputError(f"reward {reward.name}: raised {_one_line(error)}{_places_of(error)}{form}") from error


def _places_of(error: BaseException) -> str:
    """Lines at which the reward's code was entered and at which it raised."""
    trace = error.__traceback__
    places = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen importlib") and "importlib" not in Path(file).parts:
            places.append(f"{file}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f" ({', '.join(dict.fromkeys([places[0], places[-1]]))})" if places else ""


def _checked(name: str, answer: Any, count: int) -> list[float | None]:
    """The returned numbers as floats."""
    try:
        values = None if isinstance(answer, (str, bytes, dict, set, frozenset)) else list(answer)
    except TypeError:
        values = None
    if values is None:
        kind = "None" if answer is None else type(answer).__name__
        raise InputError(
            f"reward {name}: returned {kind}; it must return a list with one number for each of {count} completions"
        )
    if len(values) != count:
        raise InputError(f"reward {name}: returned {len(values)} values for {count} completions; expected one for each")
    checked: list[float | None] = []
    for i, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, (str, bytes, bytearray)) else None if value is None else float(value)
        except Exception:  # raised by the value's own type, such as a tensor of two elements
            number = math.nan
        if number is not None and not abs(number) <= LARGEST:
            raise InputError(
                f"reward {name}: value {i} is {_shown(value)}; it must be a finite number of at most {LARGEST:g} in "
                "size (or None to abstain)"
            )
        checked.append(number)
    return checked
