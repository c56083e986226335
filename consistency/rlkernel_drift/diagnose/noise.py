"""The calibrated noise floor of a scoring: the model against itself in other layouts, and its distance to fp32.

Two healthy engines of the declared dtype lie within it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.profiles import at_least
from rlkernel_drift.scoring.model import Layout

LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("each sequence alone", Layout("none")),
    ("left padding", Layout("left")),
    ("wider right padding", Layout("right", multiple=64)),
)
_ROUNDING_SHARE = 1.15
"""Two engines that round at different places differ by up to the root of two times their distance to fp32; measured on
healthy pairs it is at most this (docs/drift/power.md)."""


def noise_floor(context: Context, as_is: Tensor) -> Floor:
    """Floor of |difference| for this model, these tokens and this dtype.

    Args:
        as_is: [N] log-probabilities of the declared computation.
    """
    differences: list[tuple[str, Tensor]] = []
    for name, layout in LAYOUTS:
        layout = replace(layout, token=context.pad)
        differences.append((name, context.predict(context.hidden(layout=layout)) - as_is))
    if context.dtype != torch.float32:
        exact = context.predict(context.hidden(dtype=torch.float32))
        differences.append(("rounding against float32", _ROUNDING_SHARE * (exact - as_is)))
    name = str(context.dtype).removeprefix("torch.")
    sizes = [(label, d.abs().double()) for label, d in differences]
    k3 = max(float((torch.expm1(d.double()) - d.double()).mean()) for _, d in differences)
    floor = Floor(
        mean=max(float(d.mean()) for _, d in sizes),
        p99=max(float(d.quantile(0.99)) for _, d in sizes),
        maximum=max(float(d.max()) for _, d in sizes),
        k3=max(k3, 0.0),
        tokens=len(as_is),
        permutations=[label for label, _ in sizes],
    )
    return at_least(floor, name)
