"""Scores one side of a comparison as the side declares itself, and finds the dtype in which it was computed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace

import torch

from rlkernel_drift.capsule import Capsule, Floor, dtype_name
from rlkernel_drift.diagnose.context import (
    Context,
    References,
    Residual,
    context_of,
    declared_head,
    noise_floor,
    possible_dtypes,
)
from rlkernel_drift.diagnose.location import OUTLIER, LocalError, Suspect, local_errors, probe
from rlkernel_drift.errors import DriftError
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.model import Head, name_of

_CLEARLY = 1.3
"""A dtype is preferred to another one if it leaves a difference smaller by this factor."""
_FAR = 3.0
"""If a side is farther from the model than the other side by this factor, its own dtype cannot be determined."""
_CORRELATED = 6.0
"""Standard errors from which on a correlation with the rounding of a dtype is significant."""


@dataclass(eq=False)
class Examined:
    """One side after its examination.

    Attributes:
        as_is: prediction of the declared computation.
        left: the differences that the declared computation does not explain.
        others: the side in the other precisions that it may have, if it declares none.
        cost: seconds of one scoring.
    """

    name: str
    capsule: Capsule
    context: Context
    as_is: torch.Tensor
    left: Residual
    floor: Floor
    local: dict[str, LocalError] | None = None
    others: list[Examined] = field(default_factory=list)
    cost: float = 0.0
    _suspects: list[Suspect] | None = None

    def suspects(self) -> list[Suspect]:
        """Tensors by how likely a random change of each causes the differences, best first."""
        if self._suspects is None:
            difference = self.context.target - self.as_is
            self._suspects = []
            with contextlib.suppress(DriftError):  # no list of layers
                self._suspects = probe(self.context, difference, max(3.0, 150 * self.cost))
        return self._suspects

    @property
    def healthy(self) -> bool:
        """Whether the reference, as declared, explains the side's log-probabilities."""
        return self.left.healthy(self.floor)

    @property
    def over_floor(self) -> float:
        """What the declared computation leaves, in multiples of the noise floor."""
        return self.left.mean / self.floor.mean

    @property
    def outliers(self) -> list[tuple[str, float]]:
        """Operators with errors of their own, worst first."""
        found = [(name, local.ratio) for name, local in (self.local or {}).items() if local.ratio > OUTLIER]
        return sorted(found, key=lambda item: -item[1])


def examine(
    name: str,
    capsule: Capsule,
    references: References,
    stream: str,
    floor: Floor | None = None,
    like: Examined | None = None,
) -> Examined:
    """Scores one side with the reference as the side declares itself, and calibrates the noise floor.

    A side that declares no dtype is scored in the checkpoint's, unless another dtype is clearly closer; one that
    declares none for its head in fp32 and in the dtype of its layers.

    Args:
        like: a side examined before; its scores are reused if it declares the same computation of the same tokens.
    """
    found: list[Examined] = []
    known = [] if like is None else [like, *like.others]
    dtypes = _dtypes(capsule, references, like)
    for dtype in dtypes:
        sides = []
        for head in _heads(capsule, dtype, like):
            context = context_of(capsule, references, stream, dtype=dtype)
            context.head = head
            if not context.sequences.counted:
                raise DriftError(f"the {name} side has no counted token")
            sides.append(examined(name, capsule, context, floor, known))
        side = next((s for s in sides if s.healthy), _closest(sides))
        if side.healthy and not found:
            return _exact(side, known, floor) if len(dtypes) > 1 else side
        if side.left.usable or not found:  # float16 may overflow
            found.append(side)
    closest = _closest(found)
    if closest.context.dtype == torch.float32:
        closest = next((side for side in found if side is not closest and rounds_like(side, closest)), closest)
    closest.others = [side for side in found if side is not closest]
    return closest


def _exact(side: Examined, known: list[Examined], floor: Floor | None) -> Examined:
    """A side that matches in 16 bits, in fp32 if it matches there too, because fp32 is within the noise of 16 bits."""
    if side.context.dtype == torch.float32:
        return side
    context = replace(side.context, dtype=torch.float32, head=declared_head(side.capsule), floor=None, _hidden={})
    exact = examined(side.name, side.capsule, context, None, known)
    if not exact.healthy:
        return side
    if floor is not None:  # a measured floor may be that of 16 bits, within which everything matches fp32
        exact.floor = exact.context.floor = raise_floor(floor, "float32")
    return exact


def _closest(sides: list[Examined]) -> Examined:
    """The side that leaves least; the first unless another is clearly closer."""
    closest = min(sides, key=lambda s: s.left.mean)
    return sides[0] if sides[0].left.mean <= _CLEARLY * closest.left.mean else closest


def _dtypes(capsule: Capsule, references: References, like: Examined | None) -> list[torch.dtype]:
    """Possible dtypes of the layers, that of the other side first."""
    known = possible_dtypes(capsule, references.model)
    return known if like is None else sorted(known, key=lambda dtype: dtype != like.context.dtype)


def _heads(capsule: Capsule, dtype: torch.dtype, like: Examined | None) -> list[Head]:
    """The declared head; else that of the other side, or in fp32 and in the layers' dtype, as in transformers."""
    declared = any(dtype_name(capsule.manifest.config.get(key)) for key in ("head_dtype", "logits_dtype"))
    if declared or dtype == torch.float32:
        return [declared_head(capsule)]
    if like is not None and like.healthy and like.context.dtype == dtype:
        return [like.context.head]
    return [Head(), Head(dtype, dtype)]


def examined(name: str, capsule: Capsule, context: Context, floor: Floor | None, known: list[Examined]) -> Examined:
    """A side scored under a context; scores and floor are those of a known side of the same computation, if any."""
    like = next((side for side in known if context.computes_like(side.context)), None)
    begin = time.thread_time()
    if like is not None:
        as_is, noise, cost = like.as_is, like.floor, like.cost
    else:
        as_is = context.score(context.declared)
        cost = time.thread_time() - begin
        noise = noise_floor(context, as_is) if floor is None else raise_floor(floor, name_of(context.dtype))
    context.floor = noise
    local = local_errors(context, capsule) if capsule.operators.values else None
    return Examined(name, capsule, context, as_is, context.residual(as_is), noise, local, cost=cost)


def in_one_dtype(sides: list[Examined]) -> list[Examined]:
    """The sides in a dtype that both may have, if more of them match the model in it than in their own.

    A side that is then far from the model is scored in the dtype of the other side, if it may have it.
    """
    forms = [{form.context.dtype: form for form in (*side.others, side)} for side in sides]
    best = sides
    for dtype in (dtype for dtype in forms[1] if dtype in forms[0]):
        both = [form_in(side, dtype) for side in sides]
        if sum(side.healthy for side in both) > sum(side.healthy for side in best):
            best = both
    near = min(best, key=lambda side: side.left.mean)
    far = lambda side: not side.healthy and side.left.mean > _FAR * near.left.mean
    return [form_in(side, near.context.dtype) if far(side) else side for side in best]


def form_in(side: Examined, dtype: torch.dtype) -> Examined:
    """The side scored in a dtype that it may have, with its other forms; as it is if it may not have that dtype."""
    forms = [side, *side.others]
    chosen = next((form for form in forms if form.context.dtype == dtype), side)
    return replace(chosen, others=[form for form in forms if form is not chosen])


def rounds_like(narrow: Examined, wide: Examined) -> bool:
    """Whether a side has the rounding of a dtype: it is clearly closer to the model there than in a wider one, or its
    differences from the wider one correlate with the rounding of the model. To be within its noise is not enough."""
    if _CLEARLY * narrow.left.mean <= wide.left.mean:
        return True
    rounding, rest = narrow.as_is - wide.as_is, wide.context.target - wide.as_is
    there = rounding.isfinite() & rest.isfinite()
    x, y = rounding[there], rest[there]
    limit = lambda v: v.clamp(-4 * float(v.abs().mean()), 4 * float(v.abs().mean()))  # no token decides alone
    x, y = limit(x), limit(y)
    correlation = float((x * y).mean() / (x.square().mean() * y.square().mean()).sqrt().clamp(min=1e-30))
    return correlation * len(x) ** 0.5 > _CORRELATED
