"""AdamW whose masters and moments lie in pinned host memory; the update streams them through the device in blocks.

The copies of a block to and from the device overlap with each other and with the update of the block before it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.optim import AdamW

BLOCK = 1 << 24
"""Elements that are updated together: 64 MiB of each of the three states, twice on the device."""


@dataclass
class _Slot:
    """Device memory of one block: [3, BLOCK] fp32, and the event after which it can be overwritten."""

    memory: Tensor
    stored: Any = None


class OffloadedAdamW(AdamW):
    """`AdamW` with its states in host memory, and the same bits.

    The state of a parameter is made of CPU tensors with the keys of `AdamW`. It is complete when `step` returns. Bad
    input may raise after other parameters were updated.

    Args:
        params, options: as in `AdamW`; all parameters are on one device. 12 bytes of host memory per element, 8 for
            fp32 parameters.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        chosen = [p for group in self.param_groups for p in group["params"]]
        self._device = chosen[0].device
        sizes = [(p, kind) for p in chosen for kind in kinds_of(p)]
        memory = torch.zeros(sum(p.numel() for p, _ in sizes), dtype=torch.float32)
        if self._device.type == "cuda":
            _pin(memory)
            weakref.finalize(self, _unpin, memory.data_ptr()).atexit = False  # the process's exit unpins it
        parts = memory.split([p.numel() for p, _ in sizes])
        self._host: dict[Tensor, dict[str, Tensor]] = {p: {} for p in chosen}
        for (p, kind), part in zip(sizes, parts, strict=True):
            self._host[p][kind] = part.view(p.shape)

    def _update(self, grads_of: dict[Tensor, Tensor], scale: Tensor | None, zero_grad: bool) -> None:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            self._stream(grads_of, scale, zero_grad)

    def _stream(self, grads_of: dict[Tensor, Tensor], scale: Tensor | None, zero_grad: bool) -> None:
        device = torch.get_device_module(self._device)  # on a CPU its streams and events do nothing
        loads, stores = device.Stream(), device.Stream()
        slots = [_Slot(torch.empty(3, BLOCK, dtype=torch.float32, device=self._device)) for _ in range(2)]
        current = device.current_stream()
        loads.wait_stream(current)  # the slots' memory may have belonged to another tensor
        for turn, (group, p, span) in enumerate(self._blocks(grads_of)):
            state, slot = self._placed(p), slots[turn % len(slots)]
            on_host = [state[kind].view(-1)[span] for kind in kinds_of(p)]
            states = [row[: span.stop - span.start] for row in slot.memory[: len(on_host)]]
            with device.stream(loads):
                if slot.stored is not None:
                    loads.wait_event(slot.stored)
                for here, there in zip(states, on_host, strict=True):
                    here.copy_(there, non_blocking=True)
            current.wait_event(loads.record_event())
            weight = p.view(-1)[span]
            ops.adamw_(
                [weight],
                [grads_of[p].view(-1)[span]],
                states[:1],
                states[1:2],
                masters=states[2:] or [weight],
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(state["step"]) + 1,
                scale=scale,
                zero_grad=zero_grad,
            )
            stores.wait_event(current.record_event())
            with device.stream(stores):
                for here, there in zip(states, on_host, strict=True):
                    there.copy_(here, non_blocking=True)
            slot.stored = stores.record_event()
        device.synchronize()
        for p in grads_of:
            self.state[p]["step"] = int(self.state[p]["step"]) + 1

    def _blocks(self, grads_of: dict[Tensor, Tensor]) -> Iterator[tuple[dict[str, Any], Tensor, slice]]:
        """(group, parameter, elements) of at most BLOCK elements each, of all parameters with a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in grads_of:
                    for first in range(0, p.numel(), BLOCK):
                        yield group, p, slice(first, min(first + BLOCK, p.numel()))

    def set_state(self, p: Tensor, state: dict[str, Any]) -> None:
        self.state[p] = dict(state)
        self._placed(p)

    def _placed(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter, whose tensors are those of the pinned memory."""
        state = self.state[p]
        for kind, there in self._host[p].items():
            found = state.get(kind)
            if found is there:
                continue
            if found is not None:
                there.copy_(found)
            elif kind == "master":
                there.copy_(p)
            state[kind] = there
        state.setdefault("step", 0)
        return state


def kinds_of(p: Tensor) -> tuple[str, ...]:
    """Names of a parameter's states; an fp32 parameter is its own master."""
    return ("exp_avg", "exp_avg_sq") if p.dtype == torch.float32 else ("exp_avg", "exp_avg_sq", "master")


def _pin(memory: Tensor) -> None:
    """Lets a GPU copy from and to the memory while the host goes on.

    torch's own pinned allocator rounds sizes up to a power of two, which can double the memory of a large model.

    Raises:
        RuntimeError: the memory cannot be pinned.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(
            f"AdamW: {memory.nbytes / 2**30:.1f} GiB of host memory for the optimizer's states could not be pinned "
            f"(CUDA error {code}); free host memory, or set optimizer.offload=false"
        )


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
