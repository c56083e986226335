"""Rewards as Python callables with TRL's signature, several with weights, and every wrong answer of one an error.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`completions` are texts, or for chat prompts lists with one assistant message. None means "this reward does not
judge this completion": it is left out of the weighted sum, and another reward must have judged it.

Rewards run in the trainer's own process. What they change of it (working directory, torch's defaults) is put back
after each call, and an exception of any kind, `sys.exit` included, is an error that names the reward.
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

from rlkernel.data.errors import InputError
from rlkernel.data.prompts import RESERVED, is_chat

RewardFunction = Callable[..., Sequence[float | None]]
LARGEST = 1e15
"""Largest size of a reward: the squares that an advantage's deviation adds up stay finite in fp32."""


@contextmanager
def _process_kept() -> Iterator[None]:
    """Puts back what user code changes of the process and the trainer depends on."""
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
            torch.set_default_device(None)  # no device at all is not the same as the CPU: it costs no dispatch
            if torch.get_default_device() != device:
                torch.set_default_device(device)


def _one_line(error: BaseException) -> str:
    """Type and message of an exception, in one line of bounded length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the message is the user's code too
        text = ""
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _shown(value: Any) -> str:
    """The value for a message; an integer of thousands of digits has no repr, and an object's own may raise."""
    try:
        text = repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


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
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # modules next to the file come first, as they do for a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        # Imports inside functions happen later: they find the folder last, where it cannot hide a library.
        with suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
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
        with _process_kept():
            module = _module_of_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit at the end of a script that is also a module, for instance
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
        parts: what each reward returned, by name; None where it did not judge.
        metrics: mean of the values that rewards logged under each name with `log_metric`.
        extra: columns that rewards logged with `log_extra`, one value for each completion.
    """

    total: list[float]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """What a reward reads of the run as `trainer_state`.

    Attributes:
        global_step: steps that are finished.
        max_steps: steps of the run.
    """

    global_step: int = 0
    max_steps: int = 0


class _Log:
    """Receives what the rewards of one batch of `count` completions log."""

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

    def require(self, columns: Collection[str], source: str = "the data") -> None:
        """Checks, before any work, that the data have every column that a function cannot do without.

        Raises:
            InputError: names the reward, the column and the source of the data.
        """
        for reward in self.rewards:
            _require(reward, (*RESERVED, *columns), source)

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
            prompts, completions, completion_ids: one entry a completion; `columns`: the data's further columns.
            state: handed to the rewards as `trainer_state`.

        Raises:
            InputError: a function raised, returned no list, the wrong count, NaN, an infinity, a non-number or one
                above 1e15 in size; or no function judged some completion.
        """
        count = len(prompts)
        log = _Log(count)
        offered: dict[str, Any] = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        offered |= columns
        offered |= {"trainer_state": state or TrainerState(), "log_metric": log.metric, "log_extra": log.column}
        parts = {r.name: _checked(r, _call(r, offered), count) for r in self.rewards}
        total: list[float] = []
        for i in range(count):
            judged = [(r.weight, parts[r.name][i]) for r in self.rewards]
            if all(value is None for _, value in judged):
                names = ", ".join(parts)
                raise InputError(
                    f"reward: completion {i} was judged by none of {names} (all returned None); "
                    f"return a number, or add a reward that judges every completion"
                )
            weighted = [weight * value for weight, value in judged if value is not None]
            if sum(map(abs, weighted)) > LARGEST:
                raise InputError(
                    f"reward: the weighted sum of {', '.join(parts)} for completion {i} is above {LARGEST:g} in size; "
                    "use smaller weights or rewards"
                )
            total.append(math.fsum(weighted))
        means = {name: sum(values) / len(values) for name, values in log.metrics.items()}
        return Scores(total, parts, means, log.extra)


def _parameters(reward: Reward) -> Collection[inspect.Parameter]:
    try:
        return inspect.signature(reward.function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(
            f"reward {reward.name}: Python cannot read its parameters; wrap it in `def {reward.name}(completions, **_)`"
        ) from None


def _require(reward: Reward, offered: Collection[str], source: str) -> None:
    for p in _parameters(reward):
        named = p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if named and p.default is p.empty and p.name not in offered:
            raise InputError(
                f"reward {reward.name}: it takes {p.name!r}, which {source} lacks (there are: {', '.join(offered)})"
            )


def _call(reward: Reward, offered: dict[str, Any]) -> Any:
    """What the reward returned; a coroutine is awaited, a generator is read to its end, where it may raise."""
    _require(reward, offered, "the data")
    parameters = _parameters(reward)
    names = {p.name for p in parameters}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # TRL asks for it; a function without gets what it names
        names |= offered.keys()
    # Lists of its own, so that a function that sorts or empties one changes nothing for the next.
    arguments = {name: list(v) if isinstance(v, list) else v for name, v in offered.items() if name in names}
    try:
        with _process_kept():
            answer = reward.function(**arguments)
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
            return list(answer) if isinstance(answer, Iterator) else answer
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit too: it would end the run in silence, as if it had finished
        text = f"raised {_one_line(error)}{_places_of(error)}{_hint(error, offered['prompts'])}"
        raise InputError(f"reward {reward.name}: {text}") from error


def _hint(error: BaseException, prompts: Sequence[Any]) -> str:
    """Which form the completions have, where the exception says that the reward takes them for another."""
    said = _one_line(error) if isinstance(error, (AttributeError, TypeError)) else ""
    chat = any(is_chat(prompt) for prompt in prompts)
    if chat and "list" in said:
        return (
            '; the completion of a chat prompt is [{"role": "assistant", "content": text}], so read its text as '
            'completion[0]["content"], or give prompts as text'
        )
    if not chat and ("string indices" in said or "'str' object" in said):
        return "; the prompts are text, therefore each completion is text"
    return ""


def _places_of(error: BaseException) -> str:
    """Where user code was entered, and where it raised."""
    trace = error.__traceback__
    places = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen importlib") and "importlib" not in Path(file).parts:
            places.append(f"{file}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f" ({', '.join(dict.fromkeys([places[0], places[-1]]))})" if places else ""


def _checked(reward: Reward, answer: Any, count: int) -> list[float | None]:
    what = f"reward {reward.name}"
    if answer is None:
        raise InputError(
            f"{what}: returned None; it must return a list with one number for each of {count} completions"
        )
    if isinstance(answer, (str, bytes, dict, set, frozenset)):
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
            number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
        except Exception:  # of the value's own type: an integer of 400 digits, a tensor of two elements
            number = math.nan
        if not abs(number) <= LARGEST:
            raise InputError(
                f"{what}: value {i} is {_shown(value)}; it must be a finite number of at most {LARGEST:g} in size "
                "(or None to abstain)"
            )
        checked.append(number)
    return checked
