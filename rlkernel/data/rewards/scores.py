"""The weighted sum of reward functions, judged while other completions are still being sampled.

A completion for which a reward has no value is dropped, with a reason; the order of all results is that of the
completions, whenever and wherever they were judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rlkernel.data.errors import InputError
from rlkernel.data.prompts import RESERVED
from rlkernel.data.rewards.call import (
    LARGEST,
    Call,
    Failure,
    Job,
    Outcome,
    TrainerState,
    loaded,
    restored_process,
    run_job,
)
from rlkernel.data.rewards.load import RewardFunction
from rlkernel.data.rewards.pool import Limits, Pool, failed_always

Unit = Literal["completion", "group", "batch"]
LOG = "rewards.log"


@dataclass(frozen=True)
class Reward:
    """A named reward function and its weight in the sum.

    Attributes:
        function: a reference for `load_reward`, or the function itself.
        unit: what one call judges: one completion, the completions of one prompt, or all of a step.
        options: further keyword arguments of each call.
    """

    name: str
    function: str | RewardFunction
    weight: float = 1.0
    unit: Unit = "completion"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Rewards of one batch of completions.

    Attributes:
        total: weighted sum for each completion; None where it is dropped.
        dropped: reason for each dropped completion, by its index.
        parts: values that each reward returned, by name; None where it did not judge.
        metrics: mean of the values that rewards logged under each name with `log_metric`.
        extra: columns that rewards logged with `log_extra`, one value for each completion; None where none was logged.
    """

    total: list[float | None]
    dropped: dict[int, str]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def known(self) -> list[float]:
        """Sums of the completions that are not dropped; at least one."""
        return [value for value in self.total if value is not None]

    @property
    def mean(self) -> float:
        """Mean of the sums of the completions that are not dropped."""
        return math.fsum(self.known) / len(self.known)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of dropped completions by reason."""
        return dict(sorted(Counter(self.dropped.values()).items()))


class _Runner(Protocol):
    signatures: list[dict[str, Any]]

    def submit(self, job: Job) -> Future[list[Outcome]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Share:
    """The rewards that one runner calls: their numbers among all rewards."""

    runner: _Runner
    numbers: list[int]


class InProcess:
    """Runs jobs at once in the trainer's process, without limits."""

    def __init__(self, rewards: Sequence[Reward]):
        with restored_process():
            self._rewards = [loaded(reward.name, reward.function, reward.options) for reward in rewards]
        self.signatures = [reward.signature for reward in self._rewards]

    def submit(self, job: Job) -> Future[list[Outcome]]:
        outcomes: list[Outcome] = []
        run_job(self._rewards, job, outcomes.append)
        future: Future[list[Outcome]] = Future()
        future.set_result(outcomes)
        return future

    def close(self) -> None:
        pass


class Rewards:
    """The weighted sum of one or more reward functions.

    Args:
        rewards: the functions; names must differ, because metrics are named after them.
        limits: of the worker processes, which call the functions given as references; None calls them in this
            process, without limits. A function that is given itself is always called in this process.

    Raises:
        InputError: there is no reward, two have one name, or one cannot be loaded.
    """

    def __init__(self, rewards: Sequence[Reward], limits: Limits | None = None):
        if not rewards:
            raise InputError("reward: none given; use --reward FILE.py:function")
        self.rewards = list(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"reward: two rewards are called {name!r}; give each function its own name")
        remote = [n for n, r in enumerate(self.rewards) if limits is not None and isinstance(r.function, str)]
        local = [n for n in range(len(self.rewards)) if n not in remote]
        self._shares: list[_Share] = []
        if local:
            self._shares.append(_Share(InProcess([self.rewards[n] for n in local]), local))
        self._pool: Pool | None = None
        if limits is not None and remote:
            chosen = [self.rewards[n] for n in remote]
            described = [{"name": r.name, "function": r.function, "options": dict(r.options)} for r in chosen]
            self._pool = Pool(described, limits)
            self._shares.append(_Share(self._pool, remote))
        found = {n: s for share in self._shares for n, s in zip(share.numbers, share.runner.signatures, strict=True)}
        self._signatures = [found[n] for n in range(len(self.rewards))]
        self._check_options()

    def _check_options(self) -> None:
        for reward, signature in zip(self.rewards, self._signatures, strict=True):
            named = [name for name in signature["parameters"] if name not in RESERVED]
            for option in reward.options:
                if option in RESERVED or not (option in named or signature["any_keyword"]):
                    raise InputError(
                        f"reward {reward.name}: it has no option {option!r} (parameters: {', '.join(named) or 'none'})"
                    )

    def require(self, columns: Collection[str], source: str = "the data") -> None:
        """Checks that the data have every column that a function requires.

        Raises:
            InputError: names the reward, the column and the source of the data.
        """
        offered = (*RESERVED, *columns)
        for reward, signature in zip(self.rewards, self._signatures, strict=True):
            for name, required in signature["parameters"].items():
                if required and name not in offered and name not in reward.options:
                    raise InputError(
                        f"reward {reward.name}: it takes {name!r}, which {source} lacks (there are: "
                        f"{', '.join(offered)}) and its options do not give"
                    )
            for option in reward.options:
                if option in columns:
                    raise InputError(f"reward {reward.name}: {option!r} is an option and a column of {source}")

    def begin(self, state: TrainerState | None = None) -> PendingScores:
        """Starts judging a batch whose completions are added as they become ready."""
        return PendingScores(self.rewards, self._shares, state or TrainerState())

    def __call__(self, arguments: dict[str, list[Any]], state: TrainerState | None = None) -> Scores:
        """Judges a whole batch: `begin`, `add`, `result`."""
        pending = self.begin(state)
        pending.add(0, arguments)
        return pending.result()

    def log_to(self, folder: Path) -> None:
        """Appends what workers print to `rewards.log` in the folder, up to the limit."""
        if self._pool is not None:
            self._pool.log.open(folder / LOG)

    def close(self) -> None:
        """Kills the worker processes."""
        for share in self._shares:
            share.runner.close()


class PendingScores:
    """The rewards of one batch, some of which are being computed."""

    def __init__(self, rewards: list[Reward], shares: list[_Share], state: TrainerState):
        self._rewards, self._shares, self._state = rewards, shares, state
        self._added: dict[int, dict[str, list[Any]]] = {}
        self._failures: dict[int, _Dropped] = {}
        self._submitted: list[tuple[_Share, int, Future[list[Outcome]]]] = []

    def add(self, start: int, arguments: dict[str, list[Any]]) -> None:
        """Adds the completions of one prompt, and has them judged by the rewards that need no others.

        Args:
            start: position of the first completion in the batch.
            arguments: prompts, completions, completion_ids and the data's columns, one entry per completion.
        """
        self._added[start] = arguments
        self._submit(start, arguments, {"completion": 1, "group": len(arguments["prompts"])})

    def drop(self, i: int, failure: Failure) -> None:
        """Drops a completion because the environment failed in it; rewards still see it."""
        self._failures[i] = _Dropped("rollout.environment", replace(failure, reason="environment"))

    def _submit(self, start: int, arguments: dict[str, list[Any]], sizes: dict[str, int]) -> None:
        """Has the completions judged by the rewards whose units have a size, in calls of that many completions."""
        count = len(arguments["prompts"])
        for share in self._shares:
            calls = [
                Call(place, i, i + size)
                for place, number in enumerate(share.numbers)
                if (size := sizes.get(self._rewards[number].unit, 0))
                for i in range(0, count, size)
            ]
            if calls:
                self._submitted.append((share, start, share.runner.submit(Job(calls, arguments, self._state))))

    def result(self) -> Scores:
        """Waits for all rewards of the added completions.

        Raises:
            InputError: every completion was dropped, or a reward failed on its first `pool.HOPELESS` calls.
        """
        groups = [self._added[start] for start in sorted(self._added)]
        whole = {name: [value for group in groups for value in group[name]] for name in groups[0]}
        count = len(whole["prompts"])
        self._submit(0, whole, {"batch": count})
        outcomes = [
            (share.numbers[outcome.call.reward], start + outcome.call.start, outcome)
            for share, start, future in self._submitted
            for outcome in future.result()
        ]
        outcomes.sort(key=lambda found: found[:2])

        values: list[list[float | Failure | None]] = [[None] * count for _ in self._rewards]
        metrics: dict[str, list[float]] = {}
        extra: dict[str, list[Any]] = {}
        for number, start, outcome in outcomes:
            length = outcome.call.stop - outcome.call.start
            place = slice(start, start + length)
            values[number][place] = outcome.values if outcome.failure is None else [outcome.failure] * length
            for name, logged in outcome.metrics.items():
                metrics.setdefault(name, []).extend(logged)
            for column, entries in outcome.extra.items():
                extra.setdefault(column, [None] * count)[place] = entries
        total = [self._failures.get(i) or self._sum(i, [column[i] for column in values]) for i in range(count)]
        if not any(isinstance(value, float) for value in total):
            self._stop([value for value in total if isinstance(value, _Dropped)])
        return Scores(
            [value if isinstance(value, float) else None for value in total],
            {i: value.failure.reason for i, value in enumerate(total) if isinstance(value, _Dropped)},
            {
                reward.name: [value if isinstance(value, float) else None for value in column]
                for reward, column in zip(self._rewards, values, strict=True)
            },
            {name: math.fsum(logged) / len(logged) for name, logged in metrics.items()},
            extra,
        )

    def _sum(self, i: int, values: list[float | Failure | None]) -> float | _Dropped:
        """Weighted sum of completion i's values."""
        judged = []
        for reward, value in zip(self._rewards, values, strict=True):
            if isinstance(value, Failure):
                return _Dropped(f"reward {reward.name}", value)
            if value is not None:
                judged.append(reward.weight * value)
        names = ", ".join(reward.name for reward in self._rewards)
        if not judged:
            problem = f"completion {i} was judged by none of {names} (all returned None)"
            remedy = "return a number, or add a reward that judges every completion"
            return _Dropped("reward", Failure("none", f"{problem}; {remedy}"))
        if sum(map(abs, judged)) > LARGEST:
            problem = f"the weighted sum of {names} for completion {i} is above {LARGEST:g} in size"
            return _Dropped("reward", Failure("invalid", f"{problem}; use smaller weights or rewards"))
        return math.fsum(judged)

    def _stop(self, dropped: list[_Dropped]) -> None:
        reasons = Counter(one.failure.reason for one in dropped)
        counts = ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items()))
        first = dropped[0]
        raise failed_always(first.who, first.failure, f"all {len(dropped)} completions were dropped ({counts})")


@dataclass(frozen=True)
class _Dropped:
    """Why a completion has no reward: `who` is at fault."""

    who: str
    failure: Failure
