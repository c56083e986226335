"""Rewards: functions with the signature of TRL, called in worker processes (docs/guides/rewards.md).

`scores.Rewards` is the interface, and `environment.Environment` that of environments, which are called in the same way.
`pool` runs the workers, `worker` is the program that runs in one, `call` calls a function and checks its answer, `load`
finds a function by its reference, and `builtin` holds our own functions.
"""

from __future__ import annotations

from rlkernel.data.rewards.call import LARGEST, REASONS, Failure, TrainerState
from rlkernel.data.rewards.environment import Environment, observation
from rlkernel.data.rewards.load import load_reward
from rlkernel.data.rewards.pool import Limits
from rlkernel.data.rewards.scores import PendingScores, Reward, Rewards, Scores

__all__ = [
    "LARGEST",
    "REASONS",
    "Environment",
    "Failure",
    "Limits",
    "PendingScores",
    "Reward",
    "Rewards",
    "Scores",
    "TrainerState",
    "load_reward",
    "observation",
]
