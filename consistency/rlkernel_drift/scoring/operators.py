"""Records every operator output of a transformers decoder, replays operators on a recording, and splices outputs in.

Operators have engine-neutral names (`layers.3.q_proj`). Attention and activation are not modules, so their outputs are
read as the inputs of the projections that follow them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlkernel_drift.capsule import Tensor as Stored
from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch
from rlkernel_drift.errors import DriftError

# (submodule of a layer, operator, whether it is the submodule's input or output), in the order of computation.
_LAYER: tuple[tuple[str, str, Literal["in", "out"]], ...] = (
    ("input_layernorm", "input_norm", "out"),
    ("self_attn.q_proj", "q_proj", "out"),
    ("self_attn.k_proj", "k_proj", "out"),
    ("self_attn.v_proj", "v_proj", "out"),
    ("self_attn.q_norm", "q_norm", "out"),
    ("self_attn.k_norm", "k_norm", "out"),
    ("self_attn.o_proj", "attention", "in"),
    ("self_attn.o_proj", "o_proj", "out"),
    ("post_attention_layernorm", "attention_residual", "in"),
    ("post_attention_layernorm", "post_norm", "out"),
    ("pre_feedforward_layernorm", "pre_mlp_norm", "out"),
    ("mlp.gate_proj", "gate_proj", "out"),
    ("mlp.up_proj", "up_proj", "out"),
    ("mlp.down_proj", "activation", "in"),
    ("mlp.down_proj", "down_proj", "out"),
    ("mlp.experts", "experts", "out"),
    ("mlp", "mlp", "out"),
    ("post_feedforward_layernorm", "post_mlp_norm", "out"),
)


@dataclass(frozen=True)
class Point:
    """Where an operator's output appears: as the output of a module, or as its input."""

    name: str
    module: Any
    where: Literal["in", "out"]


def points(model: Any) -> list[Point]:
    """All points of a transformers decoder, in the order of computation.

    Raises:
        DriftError: the model has no list of layers.
    """
    base = model.base_model
    layers = getattr(base, "layers", None)
    if layers is None:
        raise DriftError(f"{type(model).__name__} has no list of layers; its operators cannot be recorded")
    found = [Point("embedding", model.get_input_embeddings(), "out")]
    for i, layer in enumerate(layers):
        for path, name, where in _LAYER:
            module = _attribute(layer, path)
            if module is not None:
                found.append(Point(f"layers.{i}.{name}", module, where))
        found.append(Point(f"layers.{i}.output", layer, "out"))
    if getattr(base, "norm", None) is not None:
        found.append(Point("final_norm", base.norm, "out"))
    return found


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


@contextlib.contextmanager
def watched(where: list[Point], see: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Calls `see(name, value)` at each point of a forward; a returned tensor replaces the value."""

    def before(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = args[0] if args else kwargs.get("hidden_states")
            if value is None:
                return None
            new = see(name, value)
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        return hook

    def after(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            new = see(name, first)
            if new is None:
                return None
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    handles = []
    try:
        for point in where:
            if point.where == "in":
                handles.append(point.module.register_forward_pre_hook(before(point.name), with_kwargs=True))
            else:
                handles.append(point.module.register_forward_hook(after(point.name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def changed(model: Any, names: Set[str], change: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[None]:
    """Replaces the outputs of the named operators by `change` of them."""
    return watched([point for point in points(model) if point.name in names], lambda _, value: change(value))


def flat(value: Tensor, length: int) -> Tensor:
    """[1, L, ...] as [L, width]; the heads of [1, H, L, D] move behind the tokens. Experts return [L, width]."""
    x = value[0] if value.dim() > 2 else value
    if x.shape[0] != length and x.dim() == 3 and x.shape[1] == length:
        x = x.transpose(0, 1)
    return x.reshape(length, -1)


def forward(model: Any, ids: Tensor, positions: Tensor, *, grad: bool = False) -> Tensor:  # [L], [L] -> [L, C]
    """Hidden states of one sequence alone, without padding."""
    device = next(model.parameters()).device
    with torch.set_grad_enabled(grad):
        return model.base_model(
            input_ids=ids[None].to(device),
            position_ids=positions[None].to(device),
            attention_mask=torch.ones_like(ids[None]).to(device),
            use_cache=False,
        ).last_hidden_state[0]


def record(
    model: Any,
    sequences: list[tuple[Tensor, Tensor]],
    kind: Literal["full", "fingerprint"] = "full",
    rows: Tensor | None = None,
) -> dict[str, Stored]:
    """Operator outputs of sequences, each computed alone.

    Args:
        sequences: (ids, positions) of each.
        kind: values, or one fingerprint per row, hashed on the model's device.
        rows: packed tokens to keep, ascending; default all.
    """
    where = points(model)
    parts: dict[str, list[Tensor]] = {point.name: [] for point in where}
    multipliers: dict[int, Tensor] = {}
    start = 0
    for ids, positions in sequences:
        length = len(ids)
        keep = None
        if rows is not None:
            keep = rows[(rows >= start) & (rows < start + length)] - start
        start += length

        def see(name: str, value: Tensor, length: int = length, keep: Tensor | None = keep) -> None:
            x = flat(value, length)
            x = x if keep is None else x[keep.to(x.device)]
            if kind == "fingerprint":
                width = x.shape[1]
                if width not in multipliers:
                    multipliers[width] = multipliers_torch(width, x.device)
                x = row_fingerprints_torch(x, multipliers[width])
            parts[name].append(x.detach().to("cpu", copy=True))

        with watched(where, see):
            forward(model, ids, positions)
    return {name: stored(torch.cat(values)) for name, values in parts.items() if values}


def stored(value: Tensor) -> Stored:
    """A torch tensor in the form that a capsule stores."""
    value = value.detach().contiguous().cpu()
    if value.dtype == torch.bfloat16:
        return Stored(value.view(torch.uint16).numpy(), "BF16")
    return Stored.of(value.numpy())


def as_torch(value: Stored) -> Tensor:
    """A tensor of a capsule as a torch tensor."""
    tensor = torch.from_numpy(value.values.copy())
    return tensor.view(torch.bfloat16) if value.dtype == "BF16" else tensor


# ---- replay and splice ---------------------------------------------------------------------------------------------


def replay(
    model: Any, ids: Tensor, positions: Tensor, recorded: dict[str, Tensor]
) -> dict[str, Tensor]:  # name -> [L, width]
    """Computes every operator on the recorded outputs of the operators before it, in one forward.

    Each result is kept and then replaced by the recorded value, so that no error propagates.

    Args:
        recorded: name -> [L, width], all tokens of this sequence.
    """
    length = len(ids)
    results: dict[str, Tensor] = {}

    def see(name: str, value: Tensor) -> Tensor | None:
        results[name] = flat(value, length).detach().clone()
        if name not in recorded:
            return None
        known = recorded[name].to(device=value.device, dtype=value.dtype)
        if value[0].shape[0] != length and value.dim() == 4:
            return known.view(length, value.shape[1], -1).transpose(0, 1)[None]
        return known.view(value.shape)

    with watched(points(model), see):
        forward(model, ids, positions)
    return results


def spliced(model: Any, ids: Tensor, positions: Tensor, name: str, output: Tensor) -> Tensor:  # [L, C]
    """Hidden states with one operator's output replaced: a difference that remains arises behind that operator."""
    with changed(model, {name}, lambda value: output.to(device=value.device, dtype=value.dtype).view(value.shape)):
        return forward(model, ids, positions)
