"""AdamW for a Trainer: fp32 masters of bf16 weights, gradients summed in fp32 over micro-batches and ranks.

The Trainer's clip and step use the contract's gradient norm and `ops.adamw_`; the clip factor is applied inside the
step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rlkernel import ops
from rlkernel.optim import AdamW
from rlkernel.parallel.norm import grad_norm
from rlkernel_transformers import masters
from rlkernel_transformers.gradient_tree import GradientTree

STANDARD = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` for which `ops.adamw_` computes AdamW."""


class MasterAdamW(AdamW):
    """`rlkernel.optim.AdamW` for a Trainer.

    Args:
        params, options: as for `AdamW`.
        model: the model, after `main_grads` or before `fully_shard`.
        masters: fp32 values of the parameters that were rounded to bf16.

    Attributes:
        tree: sums the gradients; None: they are one chain over the micro-batches of one process.
    """

    def __init__(self, params: Any, model: nn.Module, masters: dict[Tensor, Tensor], **options: Any):
        super().__init__(params, **options)
        self.tree: GradientTree | None = None
        self._model, self._masters = model, masters
        self._scale: Tensor | None = None

    def clip(self, max_norm: float | None) -> Tensor:
        """Sums the gradients and returns their norm; the next step scales it to `max_norm`."""
        if self.tree is None:
            masters.settle(self._model)
        else:
            self.tree.finish()
        grads = self.gradients()
        sharded = any(isinstance(grad, DTensor) for grad in grads)
        found = grad_norm(grads, max_norm) if sharded else ops.grad_norm(grads, max_norm=max_norm)
        self._scale = found.scale
        return found.norm

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
    found: dict[Tensor, Tensor] = {}
    for name, p in model.named_parameters():
        if p.dtype == torch.float32 and dtype != torch.float32 and ".lora_" not in name:
            if p.requires_grad:
                found[p] = p.data
            p.data = p.data.to(dtype)
    return found


def restore_weights(model: nn.Module, rounded: dict[Tensor, Tensor]) -> MixedPrecisionPolicy:
    """Makes a model's half-precision trainable parameters their own fp32 masters, as FSDP2 shards them.

    Args:
        rounded: fp32 values of the parameters that were rounded; taken out of it.

    Returns:
        A policy under which FSDP2 gathers the parameters in their dtype before the call.
    """
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    halves = sorted(dtypes - {torch.float32}, key=str)
    for p in model.parameters():
        if p.requires_grad and p.dtype != torch.float32:
            master = rounded.pop(p, None)
            p.data = p.data.float() if master is None else master
    # LoRA trains fp32 matrices, and its frozen weights are gathered as they are.
    return MixedPrecisionPolicy(
        param_dtype=halves[0] if halves else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
