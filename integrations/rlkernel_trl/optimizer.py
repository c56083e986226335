"""AdamW for TRL's trainers: fp32 masters of bf16 weights, gradients accumulated and averaged in fp32.

The Trainer's clip and step use `ops.grad_norm` and `ops.adamw_`; the clip factor is applied inside the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlkernel import ops
from rlkernel.optim import AdamW
from rlkernel_transformers import fold_main_grads, main_grads

STANDARD = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` for which `ops.adamw_` computes AdamW."""


class MasterAdamW(AdamW):
    """`rlkernel.optim.AdamW` for a Trainer.

    Args:
        params, options: as for `AdamW`.
        model: the model, which gets fp32 gradient buffers (`main_grads`).
        masters: fp32 values of the parameters that were rounded to bf16.
        processes: number of processes over which `clip` averages the gradients, in fp32.
    """

    def __init__(
        self, params: Any, model: nn.Module, masters: dict[Tensor, Tensor], processes: int = 1, **options: Any
    ):
        super().__init__(params, **options)
        self._model, self._masters, self._processes = model, masters, processes
        self._scale: Tensor | None = None
        main_grads(model)

    def clip(self, max_norm: float | None) -> Tensor:
        """Averages the gradients over the processes and returns their norm; the next step scales it to `max_norm`."""
        self._add_stock_grads()
        fold_main_grads(self._model)
        if self._processes > 1:
            self._average()
        norm, self._scale, _ = ops.grad_norm(self.gradients(), max_norm=max_norm)
        return norm

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update with the factor of the preceding `clip`; zeroes the gradients."""
        loss = super().step(closure, scale=self._scale, zero_grad=True)
        self._scale = None
        return loss

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Resets the masters of weights that were written since the last step, for example by loading a checkpoint."""
        for p, state in self.state.items():
            master = state.get("master")
            if master is not None and not torch.equal(master.to(p.dtype), p):
                master.copy_(p)

    def _add_stock_grads(self) -> None:
        """Adds gradients of stock operators to `main_grad`, if a wrapper's `zero_grad` made `grad` another tensor."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad is not p.main_grad:
                    p.main_grad += p.grad
                    p.grad = None

    def _average(self) -> None:
        work = [torch.distributed.all_reduce(g, async_op=True) for g in self.gradients()]
        for done in work:
            done.wait()
        for g in self.gradients():
            g.div_(self._processes)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = super()._state_of(p)
        master = self._masters.pop(p, None)
        if master is not None and state["step"] == 0 and torch.equal(master.to(p.dtype), p.detach()):
            state["master"] = master  # unless a checkpoint has been loaded since
        return state


def round_weights(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """Rounds a model's fp32 parameters to `dtype` in place; returns the fp32 values of the trainable ones.

    LoRA's matrices stay fp32, as PEFT creates them; the weight that they are merged into is rounded.
    """
    masters: dict[Tensor, Tensor] = {}
    for name, p in model.named_parameters():
        if p.dtype == torch.float32 and dtype != torch.float32 and ".lora_" not in name:
            if p.requires_grad:
                masters[p] = p.data
            p.data = p.data.to(dtype)
    return masters
