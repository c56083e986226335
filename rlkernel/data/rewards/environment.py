"""An environment answers the turns of a conversation; it is called as a reward is, in worker processes with limits.

The workers call `observe`, a function with the signature of a reward, whose result travels in an extra column.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlkernel.data.contents import check_messages
from rlkernel.data.errors import InputError
from rlkernel.data.prompts import WHERE
from rlkernel.data.rewards.call import BadAnswerError, Call, Failure, Job, LoadedReward, Outcome, TrainerState, awaited
from rlkernel.data.rewards.load import load_reward
from rlkernel.data.rewards.pool import Limits, Pool
from rlkernel.data.rewards.scores import InProcess, Reward

LOG = "environment.log"
_COLUMN, _SETTING = "observation", "rollout.environment"
Message = dict[str, Any]


class Environment:
    """A user's function `environment(messages, ...) -> observation or None`.

    Its first argument is the conversation up to the assistant's last message; further ones are columns of the prompt's
    row. It returns None to end the conversation, text (a message of the user), a message, or a list of messages.

    Args:
        reference: FILE.py:function or package.module:function.
        limits: of the worker processes; None calls it in this process, without limits.

    Raises:
        InputError: it cannot be loaded.
    """

    def __init__(self, reference: str, limits: Limits | None):
        self.reference = reference
        # Only the first is called. The second has every worker load the function when it starts.
        both = [
            Reward(_SETTING, f"{__name__}:{observe.__name__}", options={"environment": reference}),
            Reward(_SETTING, reference),
        ]
        self._runner: InProcess | Pool
        try:
            if limits is None:
                self._runner = InProcess(both)
            else:
                listed = [{"name": r.name, "function": r.function, "options": dict(r.options)} for r in both]
                self._runner = Pool(listed, limits)
        except InputError as error:
            raise InputError(f"{_SETTING}: {str(error).removeprefix('reward ')}") from None

    def require(self, columns: Collection[str], source: str) -> None:
        """Checks that the data have every column that the function requires.

        Raises:
            InputError: names the column and the source of the data.
        """
        _, *needed = self._runner.signatures[1]["parameters"].items() or [("messages", True)]
        for name, required in needed:
            if required and name not in columns:
                raise InputError(
                    f"{_SETTING}: {self.reference} takes {name!r}, which {source} lacks (columns: "
                    f"{', '.join(columns) or 'none'}); add the column, or give the parameter a default"
                )

    def begin(self, messages: Sequence[Message], row: Mapping[str, Any]) -> Future[list[Outcome]]:
        """Starts a call; `observation` reads its result."""
        columns = {name: value for name, value in row.items() if name not in ("prompt", WHERE)}
        arguments: dict[str, list[Any]] = {"messages": [list(messages)], "columns": [columns]}
        return self._runner.submit(Job([Call(0, 0, 1)], arguments, TrainerState()))

    def log_to(self, folder: Path) -> None:
        """Appends what the function prints to `environment.log` in the folder, up to the limit."""
        if isinstance(self._runner, Pool):
            self._runner.log.open(folder / LOG)

    def close(self) -> None:
        """Kills the worker processes."""
        self._runner.close()


def observation(called: Future[list[Outcome]]) -> list[Message] | Failure | None:
    """The messages that a call returned; None at the end of the conversation.

    Raises:
        InputError: the environment's first `pool.HOPELESS` calls failed.
    """
    (outcome,) = called.result()
    return outcome.failure or outcome.extra[_COLUMN][0]


def observe(
    messages: list[list[Message]], columns: list[dict[str, Any]], environment: str, log_extra: Any
) -> list[float]:
    """Calls the environment on each conversation; runs where rewards run."""
    function = LoadedReward(load_reward(environment))
    names, takes_all = list(function.signature["parameters"])[1:], function.signature["any_keyword"]
    found = []
    for conversation, row in zip(messages, columns, strict=True):
        answer = function.function(conversation, **{n: v for n, v in row.items() if takes_all or n in names})
        if inspect.isawaitable(answer):
            answer = asyncio.run(awaited(answer))
        found.append(_checked(answer))
    log_extra(_COLUMN, found)
    return [0.0] * len(messages)


def _checked(answer: Any) -> list[Message] | None:
    if answer is None:
        return None
    if isinstance(answer, str):
        return [{"role": "user", "content": answer}]
    try:
        return check_messages("environment", "observation", [answer] if isinstance(answer, dict) else answer)
    except InputError:
        kind = type(answer).__name__
        raise BadAnswerError(
            f'returned {kind}; an environment returns text, {{"role": ..., "content": text}}, a list of such messages, '
            "or None"
        ) from None
