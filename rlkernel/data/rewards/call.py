"""Calls a reward function and checks its answer; used in a worker process and, for debugging, in the trainer's.

A job holds completions and the calls to make on them. Each call has an outcome: values, or the failure that drops its
completions. Jobs and outcomes are JSON, because they travel through pipes.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

from rlkernel.data.contents import is_chat
from rlkernel.data.errors import InputError
from rlkernel.data.rewards.load import RewardFunction, describe, load_reward

LARGEST = 1e15
"""Largest absolute value of a reward: the squares in an advantage's standard deviation must stay finite in fp32."""
REASONS = ("raised", "timeout", "memory", "exited", "invalid", "none", "environment")
"""Why a completion is dropped: by a reward, or because the environment failed in it."""
TRACEBACK_CHARACTERS = 8000


@dataclass(frozen=True)
class TrainerState:
    """State of the run, which rewards get as `trainer_state`.

    Attributes:
        global_step: finished steps.
        max_steps: steps of the run.
    """

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True)
class Failure:
    """Why a reward has no value for a completion.

    Attributes:
        reason: one of `REASONS`.
        message: one line without the reward's name.
        traceback: of the exception, or the end of the output of a process that ended; may be empty.
    """

    reason: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Call:
    """One call of reward number `reward`, on the completions start..stop-1 of a job."""

    reward: int
    start: int
    stop: int


@dataclass
class Job:
    """Completions, and the calls to make on them.

    Attributes:
        arguments: prompts, completions, completion_ids and the data's columns: lists with one entry per completion.
    """

    calls: list[Call]
    arguments: dict[str, list[Any]]
    state: TrainerState

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        loaded = json.loads(text)
        calls = [Call(**call) for call in loaded["calls"]]
        return cls(calls, loaded["arguments"], TrainerState(**loaded["state"]))


@dataclass
class Outcome:
    """What one call gave.

    Attributes:
        values: one entry per completion: a number, None (not judged) or a Failure; empty if the call failed.
        failure: why the whole call failed, or None.
        metrics: values logged with `log_metric`, by name.
        extra: columns logged with `log_extra`, one value per completion.
    """

    call: Call
    values: list[float | Failure | None] = field(default_factory=list)
    failure: Failure | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        loaded = json.loads(text)
        values = [Failure(**v) if isinstance(v, dict) else v for v in loaded["values"]]
        failure = loaded["failure"] and Failure(**loaded["failure"])
        return cls(Call(**loaded["call"]), values, failure, loaded["metrics"], loaded["extra"])


class BadAnswerError(ValueError):
    """A reward returned something other than one value per completion."""


@dataclass(frozen=True)
class LoadedReward:
    """A function with the options that are passed to it in each call."""

    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def signature(self) -> dict[str, Any]:
        """What the trainer must know of it: parameters (name -> whether the data must give it), `**`, `async`.

        Raises:
            TypeError, ValueError: Python cannot read the parameters.
        """
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        function = self.function.func if isinstance(self.function, partial) else self.function
        return {
            "parameters": {p.name: p.default is p.empty for p in named},
            "any_keyword": any(p.kind is p.VAR_KEYWORD for p in parameters),
            "async": inspect.iscoroutinefunction(function)
            or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        }


def loaded(name: str, function: str | RewardFunction, options: Mapping[str, Any]) -> LoadedReward:
    """A reward, loaded if `function` is a reference, whose parameters Python can read.

    Raises:
        InputError: as `load_reward`; or the parameters cannot be read.
    """
    reward = LoadedReward(load_reward(function) if isinstance(function, str) else function, options)
    try:
        _ = reward.signature
    except (TypeError, ValueError):
        raise InputError(
            f"reward {name}: Python cannot read its parameters; wrap it in `def {name}(completions, **_)`"
        ) from None
    return reward


def run_job(rewards: Sequence[LoadedReward], job: Job, done: Callable[[Outcome], None]) -> None:
    """Makes the job's calls and hands each outcome to `done`; the calls of one `async def` run concurrently."""
    process = os.getpid()

    def finish(outcome: Outcome) -> None:
        if os.getpid() != process:  # a child that the reward forked must not go on in our place
            os._exit(0)
        done(outcome)

    for number, reward in enumerate(rewards):
        calls = [call for call in job.calls if call.reward == number]
        if calls and reward.signature["async"]:
            with restored_process():
                asyncio.run(_run_together(reward, calls, job, finish))
            continue
        for call in calls:
            with restored_process():
                finish(_run(reward, call, job))


async def _run_together(reward: LoadedReward, calls: list[Call], job: Job, done: Callable[[Outcome], None]) -> None:
    async def one(call: Call) -> None:
        log = _Log(call.stop - call.start)
        try:
            answer = await reward.function(**_arguments(reward, call, job, log))
            done(_outcome(call, answer, log))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            done(_failed(call, error, job))

    await asyncio.gather(*map(one, calls))


def _run(reward: LoadedReward, call: Call, job: Job) -> Outcome:
    log = _Log(call.stop - call.start)
    try:
        answer = reward.function(**_arguments(reward, call, job, log))
        if inspect.isawaitable(answer):
            answer = asyncio.run(awaited(answer))
        return _outcome(call, answer, log)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes sys.exit, which would end the process as if it had succeeded
        return _failed(call, error, job)


async def awaited(answer: Awaitable[Any]) -> Any:
    """A coroutine of any awaitable, as `asyncio.run` takes it."""
    return await answer


def _arguments(reward: LoadedReward, call: Call, job: Job, log: _Log) -> dict[str, Any]:
    """The arguments that the function takes, copied, so that a function that changes one affects no other call."""
    offered: dict[str, Any] = {name: values[call.start : call.stop] for name, values in job.arguments.items()}
    offered |= {"trainer_state": job.state, "log_metric": log.metric, "log_extra": log.column}
    if not reward.signature["any_keyword"]:  # TRL requires **kwargs; other functions get what they name
        offered = {name: value for name, value in offered.items() if name in reward.signature["parameters"]}
    copied = {name: copy.deepcopy(value) for name, value in offered.items() if isinstance(value, list)}
    return {**offered, **copied, **reward.options}


class _Log:
    """Collects what a reward logs in one call on `count` completions."""

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


def _shown(value: Any) -> str:
    """The value for a message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _outcome(call: Call, answer: Any, log: _Log) -> Outcome:
    """The checked answer.

    Raises:
        BadAnswerError: it is not a list with one entry per completion.
    """
    count = call.stop - call.start
    if answer is None or isinstance(answer, (str, bytes, dict, set, frozenset)) or not hasattr(answer, "__iter__"):
        kind = "None" if answer is None else type(answer).__name__
        raise BadAnswerError(f"returned {kind}; it must return a list with one number for each of {count} completions")
    answers = list(answer)
    if len(answers) != count:
        raise BadAnswerError(f"returned {len(answers)} values for {count} completions; expected one for each")
    values = [_checked(i, value) for i, value in enumerate(answers)]
    return Outcome(call, values, metrics=log.metrics, extra=log.extra)


def _checked(i: int, value: Any) -> float | Failure | None:
    """The returned value as a float; None stays None."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # raised by the value's own type, such as a tensor of two elements
        number = math.nan
    if abs(number) <= LARGEST:
        return number
    message = f"value {i} is {_shown(value)}; it must be a finite number of at most {LARGEST:g} in size"
    return Failure("invalid", f"{message} (or None to abstain)")


def _failed(call: Call, error: BaseException, job: Job) -> Outcome:
    if isinstance(error, BadAnswerError):
        return Outcome(call, failure=Failure("invalid", str(error)))
    if isinstance(error, InputError):  # a wrong option of a built-in reward, which needs no traceback
        return Outcome(call, failure=Failure("raised", str(error)))
    form = ""
    # Typical of a reward written for the other form; the job of an environment has no prompts.
    if isinstance(error, (AttributeError, TypeError)) and "prompts" in job.arguments:
        form = "; the prompts are text, therefore each completion is text"
        if any(is_chat(prompt) for prompt in job.arguments["prompts"]):
            form = (
                '; the completion of a chat prompt is [{"role": "assistant", "content": text}], so read its text '
                'as completion[0]["content"], or give prompts as text'
            )
    reasons = {MemoryError: "memory", TimeoutError: "timeout"}
    reason = next((name for kind, name in reasons.items() if isinstance(error, kind)), "raised")
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return Outcome(call, failure=Failure(reason, f"raised {describe(error)}{form}", trace))


@contextmanager
def restored_process() -> Iterator[None]:
    """Restores the state of the process that rewards may change and that later calls, or the trainer, depend on."""
    folder = os.getcwd()
    restore_torch = _state_of_torch()
    try:
        yield
    finally:
        os.chdir(folder)
        restore_torch()


def _state_of_torch() -> Callable[[], None]:
    """A function that restores torch's present defaults; does nothing if torch has not been imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(None)  # "cpu" would install a dispatch mode, which slows every call
            if torch.get_default_device() != device:
                torch.set_default_device(device)

    return restore
