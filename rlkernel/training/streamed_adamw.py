"""AdamW that updates one slice of one parameter at a time, for states that are not stored as the update reads them.

`load` and `store` convert a slice between its stored form and fp32 on the parameter's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.optim import AdamW
from rlkernel.training.int8_states import BLOCK, dequantize, quantize

SLICE = 1 << 24  # elements updated together, a multiple of BLOCK; bounds the memory of unpacked states
MOMENTS = ("exp_avg", "exp_avg_sq")


class StreamedAdamW(AdamW):
    """AdamW with stored states that are unpacked for the update.

    A parameter's state has the keys of `AdamW`. An 8-bit moment is [numel] uint8, and `<moment>_max` holds the largest
    size of each block of 256 values, fp32.

    Args:
        params, options: as in `AdamW`.
        int8: keep the moments of matrices in 8 bits; those of vectors, and masters, are fp32.
    """

    def __init__(self, params: Any, *, int8: bool, **options: Any) -> None:
        super().__init__(params, **options)
        self.int8 = int8

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, zero_grad: bool = False
    ) -> Any:
        """One update of every parameter that has a gradient, as in `AdamW`; the same bits for any SLICE."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._gradients()
        for group in self.param_groups:
            for p in group["params"]:
                if p not in grads:
                    continue
                state = self.state[p] = self.state.get(p) or self.start(p)
                for first in range(0, p.numel(), SLICE):
                    span = slice(first, min(first + SLICE, p.numel()))
                    states = self.load(p, state, span)
                    weight = p.view(-1)[span]
                    ops.adamw_(
                        [weight],
                        [grads[p].view(-1)[span]],
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
                    self.store(state, span, states)
                state["step"] += 1
        return loss

    def start(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first update."""
        state: dict[str, Any] = {"step": 0}
        for kind in MOMENTS:
            if self.int8 and p.dim() > 1:
                state[kind] = torch.zeros(p.numel(), dtype=torch.uint8, device=p.device)
                state[f"{kind}_max"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
            else:
                state[kind] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32:
            state["master"] = p.detach().float()
        return state

    def load(self, p: Tensor, state: dict[str, Any], span: slice) -> dict[str, Tensor]:
        """fp32 states of a slice of a flat parameter, on its device; those stored in fp32 are views."""
        found = {}
        for kind in (*MOMENTS, "master"):
            if f"{kind}_max" in state:
                found[kind] = dequantize(state[kind][span], state[f"{kind}_max"][_blocks(span)], kind == "exp_avg")
            elif kind in state:
                found[kind] = state[kind].view(-1)[span]
        return found

    def store(self, state: dict[str, Any], span: slice, states: dict[str, Tensor]) -> None:
        """Puts the updated states of a slice back."""
        for kind in MOMENTS:
            if f"{kind}_max" in state:
                codes, largest = quantize(states[kind], kind == "exp_avg")
                state[kind][span] = codes
                state[f"{kind}_max"][_blocks(span)] = largest


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))
