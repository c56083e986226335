"""A hypothesis: a way in which one side may have been computed otherwise, and what it predicts for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.verdict import Scalar


@dataclass(frozen=True)
class Prediction:
    """Log-probabilities under a hypothesis.

    Attributes:
        values: [N]; NaN where the hypothesis says nothing.
        parameters: fitted ones by name.
        hidden: [N, C] of the counted rows, where the body was changed, so that settings can be fitted on top.
        weight: of the head, where it is another one.
    """

    values: Tensor
    parameters: dict[str, Scalar] = field(default_factory=dict)
    hidden: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class Hypothesis:
    """One entry of the battery.

    Attributes:
        name: in words. cause: key of `knowledge.CAUSES`.
        implies: causes that it contains; a hypothesis is no rival of one that it contains.
        rounds: it rounds values that are noisy before: one that lies between two roundings moves a token by a step.
        dtype: of the layers, where it is another one: the noise of that dtype is what may be left.
    """

    name: str
    cause: str
    predict: Callable[[Context], Prediction | None]
    implies: frozenset[str] = frozenset()
    rounds: bool = False
    dtype: str = "float32"

    @property
    def causes(self) -> frozenset[str]:
        """Its cause and those that it contains."""
        return self.implies | {self.cause}


Battery = Callable[[Context], Iterator[Hypothesis]]
