"""Changes of operators: scaled, left out, rounded, wired otherwise; all layers first, then single ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.attention import BEFORE_ROPE, attention_of, rounded, rounded_in, scaled_to
from rlkernel_drift.diagnose.context import Computation, Context, Patch
from rlkernel_drift.diagnose.location import layer_count
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.gates.layers import layer_of
from rlkernel_drift.scoring.model import Attention, replaced
from rlkernel_drift.scoring.operators import Point, changed, points

BF16 = torch.bfloat16


def operator_kinds(model: Any) -> dict[str, list[str]]:
    """Operators by kind, such as q_proj: ["layers.0.q_proj", ...]."""
    found: dict[str, list[str]] = {}
    for point in points(model):
        found.setdefault(point.name.rpartition(".")[2] if point.name.startswith("layers.") else point.name, []).append(
            point.name
        )
    return found


def _on(names: frozenset[str], change: Callable[[Tensor], Tensor]) -> Patch:
    return lambda model: changed(model, names, change)


def operators(context: Context) -> Iterator[Change]:
    """Operators of all layers scaled, rounded or left out."""
    kinds = operator_kinds(context.model.model)
    added = ("post_norm", "post_mlp_norm") if "post_mlp_norm" in kinds else ("o_proj", "down_proj")
    both = frozenset(name for kind in added for name in kinds.get(kind, []))
    root = float(context.model.config.get_text_config().hidden_size) ** 0.5
    yield Change(
        "the embedding scaled",
        "model-setting",
        "operators",
        lambda c, f: c.with_patch(_on(frozenset({"embedding"}), lambda x: x * f)),
        tuple(sorted({1 / root, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, root})),
        True,
        start=1.0,
        parameter="scale",
        operator="embedding",
    )
    yield Change(
        "what each layer adds to the residual stream is scaled",
        "model-setting",
        "operators",
        lambda c, f: c.with_patch(_on(both, lambda x: x * f)),
        (0.25, 0.5, 0.8, 1.25, 2.0),
        True,
        start=1.0,
        parameter="residual_multiplier",
    )
    for dtype in (BF16, torch.float16) if context.dtype == torch.float32 else ():
        yield Change(
            f"norms computed in {str(dtype)[6:]}",
            "operator-dtype",
            "operators",
            partial(lambda dtype, c, _: c.with_patch(partial(_narrow_norms, dtype)), dtype),
            operator="every norm",
            rounds=True,
        )
    yield Change(
        "inputs of the projections rounded",
        "quantised-activations",
        "operators",
        lambda c, how: c.with_patch(partial(_rounded_inputs, _ACTIVATIONS[how])),
        tuple(_ACTIVATIONS),
        parameter="to",
        rounds=True,
    )
    if context.dtype == torch.float32:
        yield Change(
            "linear layers computed in another dtype",
            "body-dtype",
            "operators",
            lambda c, v: c.with_patch(partial(_narrow_projections, *v)),
            tuple(
                (dtype, first) for dtype in (BF16, torch.float16) for first in range(layer_count(context.model.model))
            ),
            parameter="dtype",
            shown=lambda v: str(v[0])[6:] + (f" from layer {v[1]} on" if v[1] else ""),
            rounds=True,
        )
    if _has_plain_gains(context.model.model):
        yield Change("norms of q and k behind the rotary embedding", "operator", "operators", _late_norms)
    yield from _experts(context, frozenset(kinds.get("experts", [])), "every layer", 1)
    cached = frozenset(name for kind in ("k_proj", "v_proj") for name in kinds.get(kind, []))
    yield Change(
        "keys and values rounded before the rotary embedding",
        "kv-cache-dtype",
        "operators",
        lambda c, how: c.with_patch(_on(cached, BEFORE_ROPE[how])),
        tuple(BEFORE_ROPE),
        parameter="to",
        rounds=True,
    )
    for kind, names in kinds.items():
        if len(names) > 1:
            yield from _operator(context, f"{kind} in every layer", frozenset(names), 2)
            yield from _rounded_operator(context, f"{kind} in every layer", frozenset(names), 2)


def single(context: Context) -> Iterator[Change]:
    """Single operators scaled or left out, one norm's epsilon, the attention of one layer."""
    for names in operator_kinds(context.model.model).values():
        for name in names:
            yield from _operator(context, name, frozenset({name}), 1)
    yield from _norms(context)
    layers = layer_count(context.model.model)
    for layer in range(layers):
        yield from attention_of(layer)
        if layers <= _SHALLOW:
            yield rounded_in(layer)
        yield _dead_heads(context, f"layers.{layer}.attention")
        yield _wiring(layer)
        yield from _experts(context, frozenset({f"layers.{layer}.experts"}), f"layer {layer}", 2)


_SHALLOW = 8
"""Layers up to which the keys and values of each are rounded, suspected or not."""


def closely(context: Context, suspects: list[str]) -> Iterator[Change]:
    """Suspected operators rounded, and the keys and values of their layers."""
    for name in suspects:
        yield from _rounded_operator(context, name, frozenset({name}), 1)
    if layer_count(context.model.model) > _SHALLOW:
        for layer in sorted({layer for name in suspects if (layer := layer_of(name)) is not None}):
            yield rounded_in(layer)


def _operator(context: Context, words: str, chosen: frozenset[str], effort: int) -> Iterator[Change]:
    """Changes of operators' outputs; a scale that a weight's scale equals is left to the changes of the weights."""
    where = [point for point in points(context.model.model) if point.name in chosen]
    if all(_has_own_scale(point) for point in where):
        yield Change(
            f"{words} scaled",
            "operator",
            "operators",
            lambda c, f: c.with_patch(_on(chosen, lambda x: x * f)),
            (0.0, 0.5, 1.25),
            True,
            start=1.0,
            parameter="scale",
            operator=words,
            effort=effort,
        )
    if all(point.where == "out" and ("norm" in point.name or point.name.endswith("output")) for point in where):
        yield Change(
            f"{words} left out: its input passes" if "norm" in words else f"{words.replace('.output', '')} skipped",
            "operator",
            "operators",
            lambda c, _: c.with_patch(lambda model: _passing(model, chosen)),
            operator=words,
            effort=effort,
        )


def _rounded_operator(context: Context, words: str, chosen: frozenset[str], effort: int) -> Iterator[Change]:
    for dtype in (BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if context.dtype == torch.float32 or dtype.itemsize == 1:
            yield Change(
                f"{words} rounded to {str(dtype)[6:]}",
                "operator-dtype",
                "operators",
                partial(lambda dtype, c, _: c.with_patch(_on(chosen, rounded(dtype))), dtype),
                operator=words,
                effort=effort,
                rounds=True,
            )


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": rounded(torch.float8_e4m3fn),
    "fp8 with a scale of the tensor": scaled_to(448, torch.float8_e4m3fn, (0, 1, 2)),
    "fp8 with a scale of each token": scaled_to(448, torch.float8_e4m3fn, (2,)),
    "int8 with a scale of the tensor": scaled_to(127, None, (0, 1, 2)),
    "int8 with a scale of each token": scaled_to(127, None, (2,)),
    "int4 with a scale of each token": scaled_to(7, None, (2,)),
}
"""What engines with eight-bit products do with the inputs [B, L, C] of the projections, except those of experts."""


def _rounded_inputs(function: Callable[[Tensor], Tensor], model: Any) -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            hook = lambda module, args: (function(args[0]), *args[1:]) if args[0].dim() == 3 else None
            stack.callback(module.register_forward_pre_hook(hook).remove)
    return stack


def _narrow_projections(dtype: torch.dtype, first: int, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Linear operators of the layers from `first` on, computed in a dtype; not those of experts."""

    def forward(module: Any, x: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), module.weight.to(dtype), bias).to(x.dtype)

    layers = model.base_model.layers[first:]
    linear = [m for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    return replaced([(m, "forward", partial(forward, m)) for m in linear])


def _has_plain_gains(model: Any) -> bool:
    """Whether q and k have norms of a head that multiply by their weight, not by one plus it."""
    attention = getattr(model.base_model.layers[0], "self_attn", None)
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is None or norm.weight.shape != (getattr(attention, "head_dim", None),) for norm in norms):
        return False
    return all(norm(torch.ones_like(norm.weight)).allclose(norm.weight, rtol=1e-2, atol=1e-3) for norm in norms)


def _late_norms(c: Computation, _: Any) -> Computation:
    """The gains of the norms multiply what the rotary embedding has turned; the division commutes with it."""
    gains: dict[int, tuple[Tensor, Tensor]] = {}

    def without_gain(model: Any) -> contextlib.AbstractContextManager[None]:
        found = []
        for i, layer in enumerate(model.base_model.layers):
            q, k = (norm.weight for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm))
            gains[i] = q.data, k.data
            found += [(weight, "data", torch.ones_like(weight.data)) for weight in (q, k)]
        return replaced(found)

    def gain(call: Attention) -> Attention:
        q, k = gains[call.layer]
        return replace(call, query=call.query * q, key=call.key * k)

    return c.with_patch(without_gain).with_body(attention=(*c.body.attention, gain))


_Routing = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def _lost(part: int, parts: int) -> _Routing:
    """A part of the experts returns zeros, as those of a lost expert-parallel rank."""
    return lambda index, weight, n: (index, weight * (index * parts // n != part))


_ROUTINGS: dict[str, _Routing] = {
    "the next expert computes": lambda index, weight, n: ((index + 1) % n, weight),
    "the previous expert computes": lambda index, weight, n: ((index - 1) % n, weight),
    "of the token before": lambda index, weight, n: (index.roll(1, 0), weight.roll(1, 0)),
    "of the token behind": lambda index, weight, n: (index.roll(-1, 0), weight.roll(-1, 0)),
    "all weights equal": lambda index, weight, n: (index, torch.full_like(weight, 1 / weight.shape[-1])),
    "only the first expert": lambda index, weight, n: (index, weight * (weight == weight.amax(-1, keepdim=True))),
    **{f"part {i + 1} of {n} of the experts lost": _lost(i, n) for n in (2, 4, 8) for i in range(n)},
}
"""Changes of the chosen experts [tokens, k], their weights and the number of experts."""


def _experts(context: Context, chosen: frozenset[str], where: str, effort: int) -> Iterator[Change]:
    """Routing of a mixture of experts, and the slope of its activation, where the experts hold one."""
    modules = [point.module for point in points(context.model.model) if point.name in chosen]
    if not modules or not hasattr(modules[0], "num_experts"):
        return
    count = int(modules[0].num_experts)

    def routed(change: _Routing, model: Any) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for point in points(model):
            if point.name in chosen:
                stack.callback(point.module.register_forward_pre_hook(partial(_routed, change, count)).remove)
        return stack

    yield Change(
        f"routing of {where}",
        "operator",
        "operators",
        lambda c, how: c.with_patch(partial(routed, _ROUTINGS[how])),
        tuple(_ROUTINGS),
        operator=f"experts of {where}",
        parameter="routing",
        effort=effort,
    )
    alpha = getattr(modules[0], "alpha", None)
    if isinstance(alpha, float):
        with_alpha = lambda model, value: replaced(
            [(point.module, "alpha", value) for point in points(model) if point.name in chosen]
        )
        yield Change(
            f"slope of the experts' activation in {where}",
            "activation",
            "operators",
            lambda c, value: c.with_patch(lambda model: with_alpha(model, value)),
            (0.5, 1.0, 1.3, 2.0, 3.0),
            True,
            start=alpha,
            operator=f"experts of {where}",
            parameter="alpha",
            effort=effort,
        )


def _routed(change: _Routing, count: int, module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (args[0], *change(args[1], args[2], count))


_WIRINGS = (
    "attention's residual missing",
    "attention's residual twice",
    "the MLP's residual missing",
    "the MLP's residual twice",
    "the MLP reads the layer's input",
)


def _wiring(layer: int) -> Change:
    """The residual stream of one layer."""
    return Change(
        f"the residual stream of layer {layer}",
        "operator",
        "operators",
        lambda c, how: c.with_patch(partial(_rewired, layer, how)),
        _WIRINGS,
        operator=f"layers.{layer}.output",
        parameter="wiring",
        effort=2,
    )


def _rewired(layer: int, how: str, model: Any) -> contextlib.AbstractContextManager[Any]:
    stack, kept, module = contextlib.ExitStack(), dict[str, Tensor](), model.base_model.layers[layer]
    norm = getattr(module, "pre_feedforward_layernorm", None)
    if norm is None and hasattr(module, "post_feedforward_layernorm"):
        raise ValueError("a layer without norms before its operators")  # as of OLMo 2
    if getattr(module, "residual_multiplier", 1.0) != 1.0:
        raise ValueError("a layer with a residual multiplier")  # as of Granite
    attention = module.self_attn if norm is None else module.post_attention_layernorm
    norm = module.post_attention_layernorm if norm is None else norm
    sign = 1 if how.endswith("twice") else -1

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[name] = args[0] if args else kwargs["hidden_states"]

        return hook

    def added(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            first = (output[0] if isinstance(output, tuple) else output) + sign * kept[name]
            return (first, *output[1:]) if isinstance(output, tuple) else first

        return hook

    stack.callback(module.register_forward_pre_hook(keep("input"), with_kwargs=True).remove)
    if how == _WIRINGS[-1]:
        stack.callback(norm.register_forward_pre_hook(lambda module, args: (kept["input"],)).remove)
    elif how.startswith("attention"):
        stack.callback(attention.register_forward_hook(added("input")).remove)
    else:
        stack.callback(norm.register_forward_pre_hook(keep("middle"), with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(added("middle")).remove)
    return stack


def _dead_heads(context: Context, name: str) -> Change:
    config = context.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def without(head: int, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., head * width : (head + 1) * width] = 0
        return x

    return Change(
        f"a head of {name} is dead",
        "operator",
        "operators",
        lambda c, head: c.with_patch(_on(frozenset({name}), partial(without, head))),
        tuple(range(config.num_attention_heads)),
        parameter="head",
        operator=name,
        effort=2,
    )


def _has_own_scale(point: Point) -> bool:
    """Whether no weight's scale is that of the output: biases, norms with an offset, the embedding, whole layers."""
    kind = point.name.rpartition(".")[2]
    if kind in ("attention_residual", "mlp", "attention", "activation"):
        return False
    weight = getattr(point.module, "weight", None)
    if "norm" in kind and weight is not None:
        return bool(weight.detach().mean().abs() < 0.5)  # Gemma multiplies by one plus the weight
    return not isinstance(point.module, torch.nn.Linear) or point.module.bias is not None


def _passing(model: Any, names: frozenset[str]) -> contextlib.AbstractContextManager[Any]:
    """Operators whose output is their input."""
    stack = contextlib.ExitStack()
    for point in points(model):
        if point.name in names:
            hook = lambda module, args, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
            stack.callback(point.module.register_forward_hook(hook).remove)
    return stack


def _narrow_norms(dtype: torch.dtype, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Norms whose input and output are rounded."""
    stack, narrow = contextlib.ExitStack(), rounded(dtype)
    for module in model.modules():
        if isinstance(getattr(module, "variance_epsilon", getattr(module, "eps", None)), float):
            stack.callback(module.register_forward_pre_hook(lambda m, args: (narrow(args[0]), *args[1:])).remove)
            stack.callback(module.register_forward_hook(lambda m, args, out: narrow(out)).remove)
    return stack


def _norms(context: Context) -> Iterator[Change]:
    """The epsilon of one norm."""
    modules = dict(context.model.model.named_modules())
    names = [
        n for n, m in modules.items() if isinstance(getattr(m, "variance_epsilon", getattr(m, "eps", None)), float)
    ]
    for name in names if len(names) > 1 else []:

        def patch(model: Any, name: str = name, value: float = 0.0) -> contextlib.AbstractContextManager[None]:
            module = model.get_submodule(name)
            return replaced([(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", value)])

        yield Change(
            f"another epsilon in {name}",
            "norm-epsilon",
            "operators",
            partial(lambda patch, c, x: c.with_patch(lambda m: patch(m, value=10.0**x)), patch),
            (-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0),
            True,
            parameter="epsilon",
            shown=lambda x: 10.0**x,
            operator=name,
            effort=2,
        )
