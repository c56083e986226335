"""AdamW with 8-bit moments: the update unpacks, changes and packs one slice of one parameter at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.optim import AdamW
from rlkernel.training.int8_states import BLOCK, dequantize, quantize

SLICE = 1 << 24
"""Elements updated together, a multiple of BLOCK: 64 MiB of each unpacked moment."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Int8AdamW(AdamW):
    """AdamW with the moments of matrices in 8 bits; masters, and moments of vectors, are fp32.

    The state of a parameter has the keys of `AdamW`. An 8-bit moment is [numel] uint8, and `<moment>_max` holds the
    largest size of each block of 256 values, fp32. Bad input may raise after other parameters were updated.
    """

    def _update(self, grads_of: dict[Tensor, Tensor], scale: Tensor | None, zero_grad: bool) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p in grads_of):
                state = self.state[p] = self.state.get(p) or _new_state(p)
                for first in range(0, p.numel(), SLICE):
                    span = slice(first, min(first + SLICE, p.numel()))
                    weight, states = p.view(-1)[span], _load(state, span)
                    ops.adamw_(
                        [weight],
                        [grads_of[p].view(-1)[span]],
                        *([states[kind]] for kind in MOMENTS),
                        masters=[states.get("master", weight)],
                        lr=group["lr"],
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        step=state["step"] + 1,
                        scale=scale,
                        zero_grad=zero_grad,
                    )
                    _store(state, span, states)
                state["step"] += 1


def _new_state(p: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    for kind in MOMENTS:
        if p.dim() > 1:
            state[kind] = torch.zeros(p.numel(), dtype=torch.uint8, device=p.device)
            state[f"{kind}_max"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        else:
            state[kind] = torch.zeros_like(p, dtype=torch.float32)
    if p.dtype != torch.float32:
        state["master"] = p.detach().float()
    return state


def _load(state: dict[str, Any], span: slice) -> dict[str, Tensor]:
    """fp32 states of a slice of the flat parameter; those stored in fp32 are views."""
    found = {}
    for kind in (*MOMENTS, "master"):
        if f"{kind}_max" in state:
            found[kind] = dequantize(state[kind][span], state[f"{kind}_max"][_blocks(span)], kind == "exp_avg")
        elif kind in state:
            found[kind] = state[kind].view(-1)[span]
    return found


def _store(state: dict[str, Any], span: slice, states: dict[str, Tensor]) -> None:
    """Packs the updated moments of a slice."""
    for kind in MOMENTS:
        if f"{kind}_max" in state:
            codes, largest = quantize(states[kind], kind == "exp_avg")
            state[kind][span] = codes
            state[f"{kind}_max"][_blocks(span)] = largest


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))
