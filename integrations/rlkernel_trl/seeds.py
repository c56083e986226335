"""Seeds of generations and of their requests, equal on any number of processes and in a resumed run."""

from __future__ import annotations

from typing import Any

from rlkernel.engine.sampling_params import mix_seed


def request_seeds(root: int, first: int, count: int) -> list[int]:
    """Seeds of a process's requests, from the generation's and a request's number among those of all processes."""
    return [mix_seed(root, first + i) % (1 << 64) for i in range(count)]


class GenerationSeeds:
    """Seeds of generations, derived from the run's seed, the step, whether it is an evaluation, and a counter.

    A resumed run derives the same seeds.
    """

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None
        self._number = 0

    def next(self, trainer: Any) -> int:
        """Seed of the next generation."""
        at = (trainer.state.global_step, int(not trainer.model.training))
        self._number = self._number + 1 if self._at == at else 0
        self._at = at
        return mix_seed(trainer.args.seed, ((at[0] * 2 + at[1]) << 20) + self._number)
