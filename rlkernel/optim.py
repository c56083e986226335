"""AdamW as a `torch.optim.Optimizer` on `ops.adamw_`, with fp32 masters and moments for parameters of any dtype.

Its state_dict has the keys of torch's AdamW, and `master` if the parameter is not fp32; each loads the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.ops.adamw import checked, run


class AdamW(torch.optim.Optimizer):
    """AdamW with the bits of `ops.adamw_`, in one call per group.

    The gradient of a parameter is its `main_grad` if it has one, else its `grad`; a parameter with neither is skipped.
    It is an error if both exist in different memory, or if a tied head's gradient was not folded into the embedding's.
    The state of a parameter is `step` (int), `exp_avg`, `exp_avg_sq` and, unless it is fp32, `master`, all fp32. Of a
    DTensor (FSDP2) each rank updates its own part; every element has the bits that it has on one rank.

    Args:
        params: parameters or groups of them, as for any torch optimizer; contiguous, fp32, bf16 or fp16.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, also per group.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and all(0 <= b < 1 for b in betas)):
            raise ValueError(
                f"AdamW: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}; expected lr >= 0, betas in "
                "[0, 1), eps > 0 and weight_decay >= 0"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def gradients(self) -> list[Tensor]:
        """Gradients of all parameters that have one, in the order of the groups.

        Raises:
            ValueError: a parameter has a `grad` in other memory than its `main_grad`.
        """
        return list(self._gradients().values())

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Gradients by parameter, of those that have one: the fp32 `main_grad`, else `grad`."""
        found = {}
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                grad, main_grad = p.grad, getattr(p, "main_grad", None)
                if grad is not None and main_grad is not None and not _is_same(grad, main_grad):
                    name = group["param_names"][i] if "param_names" in group else f"param_groups[{j}]['params'][{i}]"
                    raise ValueError(
                        f"AdamW: {name} has both grad and main_grad, and grad would be ignored; add p.grad to "
                        "p.main_grad and set p.grad to None"
                    )
                if main_grad is not None or grad is not None:
                    found[p] = grad if main_grad is None else main_grad
        return found

    def _checked_gradients(self) -> dict[Tensor, Tensor]:
        """Gradients by parameter, for an update.

        Raises:
            ValueError: as `gradients`; or a tied head's gradient was not folded into the embedding's.
        """
        found = self._gradients()
        for p in found:
            head = getattr(p, "head_main_grad", None)
            if head is not None and bool(head.any()):
                raise ValueError(
                    f"AdamW: the gradient of the tied head {tuple(head.shape)} was not added to the embedding's, and "
                    "would be lost; call fold_main_grads after the last backward of a step, before clipping"
                )
        return found

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, zero_grad: bool = False
    ) -> Any:
        """One update; `scale` and `zero_grad` as in `ops.adamw_`.

        All groups are checked before the first write, and an update is counted after it was made, so a step that raised
        for bad input may be repeated. An update that the device skips because `scale` is not finite is counted too,
        because the host does not know of it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self._checked_gradients(), scale, zero_grad)
        return loss

    def _update(self, grads_of: dict[Tensor, Tensor], scale: Tensor | None, zero_grad: bool) -> None:
        """The update of `step`; optimizers with other states replace it."""
        updates = []  # all are checked before the first one writes
        for group in self.param_groups:
            rows: dict[int, list[tuple[Any, ...]]] = {}  # by number of the update, which the bias correction needs
            for p in group["params"]:
                grad = grads_of.get(p)
                if grad is not None:
                    state = self._state_of(p)
                    tensors = (p, grad, state["exp_avg"], state["exp_avg_sq"], state.get("master", p))
                    rows.setdefault(int(state["step"]) + 1, []).append((p, state, tuple(map(local, tensors))))
            for step, chosen in rows.items():
                filled = [tensors for _, _, tensors in chosen if tensors[0].numel()]  # a rank's part may be empty
                calls: list[Any] = []
                if filled:
                    params, grads, exp_avgs, exp_avg_sqs, masters = zip(*filled, strict=True)
                    calls = checked(
                        params,
                        grads,
                        exp_avgs,
                        exp_avg_sqs,
                        masters=masters,
                        lr=float(group["lr"]),
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        step=step,
                        scale=scale,
                        zero_grad=zero_grad,
                    )
                updates.append((calls, step, chosen))
        for calls, step, chosen in updates:
            run(calls)
            for p, state, _ in chosen:
                self.state[p].update(state, step=step)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """A copy of a parameter's state, with missing entries; stored only after the update."""
        state = dict(self.state.get(p, ()))
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32 and "master" not in state:  # torch's AdamW has none
            state["master"] = p.detach().float()
        return state

    def set_state(self, p: Tensor, state: dict[str, Any]) -> None:
        """Continues a parameter from a state of `self.state`, whose tensors are copied to where the update reads."""
        self.state[p] = {name: v.to(p.device, copy=True) if isinstance(v, Tensor) else v for name, v in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of `torch.optim.AdamW`; copies its tensors."""
        for name in ("maximize", "amsgrad"):
            if any(group.get(name) for group in state_dict["param_groups"]):
                raise ValueError(f"AdamW: the state to load has {name}=True, which this optimizer does not compute")
        super().load_state_dict(state_dict)
        # torch casts every state to its parameter's dtype, but masters and moments are always fp32.
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for place, p in zip(places, params, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[p][name] = value.detach().to(p.device, torch.float32, copy=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same memory; any other tensor unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _is_same(grad: Tensor, main_grad: Any) -> bool:
    """Whether both share memory; `adamw_` refuses a `main_grad` that is not a tensor."""
    if grad is main_grad or not isinstance(main_grad, Tensor):
        return True
    return grad.layout == main_grad.layout == torch.strided and grad.data_ptr() == main_grad.data_ptr()
