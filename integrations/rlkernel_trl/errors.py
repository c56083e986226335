"""Errors of strict mode: a setting loses exactness, or a comparison found a token that differs."""


class ExactnessLostError(ValueError):
    """A setting under which rollout and training log-probabilities cannot be equal; the message says why."""


class MismatchError(RuntimeError):
    """A sampled token's log-probability differs between rollout and training forward; raised before the update."""
