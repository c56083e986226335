"""Changes of operators: scaled, left out, repeated, rounded; those of all layers first, then single ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.capsule import layer_of
from rlkernel_drift.diagnose.attention import (
    BEFORE_ROPE,
    another_attention,
    rounded,
    rounded_in,
    scaled_scores,
    scaled_to,
)
from rlkernel_drift.diagnose.context import Computation, Context, Patch
from rlkernel_drift.diagnose.layers import activations, experts, narrow_routers, rotary, wiring
from rlkernel_drift.diagnose.location import layer_count
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.scoring.attention import Attention
from rlkernel_drift.scoring.model import name_of, replaced
from rlkernel_drift.scoring.operators import Point, changed, points

BF16 = torch.bfloat16
_OF_HEADS = ("q_norm", "k_norm")


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
    yield from _residual_stream(context, kinds)
    yield from _precision(context)
    yield from _every_norm(kinds)
    yield rotary(None)
    yield from activations(None)
    for kind in ("attention", "activation"):
        if kind in kinds:
            yield _lost_part(context, f"{kind} in every layer", frozenset(kinds[kind]))
    yield from _norms_of_heads(kinds)
    yield from experts(context, frozenset(kinds.get("experts", [])), "every layer", 1)
    if "experts" in kinds and context.dtype == torch.float32:
        yield Change(
            "the routers computed in another dtype",
            "operator-dtype",
            "operators",
            lambda c, v: c.with_patch(partial(narrow_routers, *v)),
            tuple((dtype, whole) for dtype in (BF16, torch.float16) for whole in (True, False)),
            parameter="dtype",
            shown=lambda v: name_of(v[0]),
            operator="router in every layer",
            rounds=True,
        )
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


def _residual_stream(context: Context, kinds: dict[str, list[str]]) -> Iterator[Change]:
    """The embedding, and what the layers add, scaled."""
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


def _precision(context: Context) -> Iterator[Change]:
    """Norms, projections and their inputs rounded."""
    for dtype in (BF16, torch.float16) if context.dtype == torch.float32 else ():
        yield Change(
            f"norms computed in {name_of(dtype)}",
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
        lambda c, how: c.with_patch(partial(_rounded_inputs, _INPUTS[how])),
        tuple(_INPUTS),
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
            shown=lambda v: name_of(v[0]) + (f" from layer {v[1]} on" if v[1] else ""),
            rounds=True,
        )


def _every_norm(kinds: dict[str, list[str]]) -> Iterator[Change]:
    """The residual stream clamped; norms scaled or centred."""
    outputs = frozenset(kinds.get("output", []))
    normed = frozenset(
        n for kind, each in kinds.items() for n in each if kind.endswith("norm") and kind not in _OF_HEADS
    )
    yield Change(
        "the residual stream is clamped",
        "operator",
        "operators",
        lambda c, limit: c.with_patch(_on(outputs, lambda x: x.clamp(-limit, limit))),
        tuple(2.0**i for i in range(-2, 8)),
        True,
        parameter="limit",
        operator="every layer",
        effort=2,
    )
    yield Change(
        "every norm but those of q and k scaled",
        "operator",
        "operators",
        lambda c, f: c.with_patch(_on(normed, lambda x: x * f)),
        (0.7, 1.4),
        True,
        start=1.0,
        parameter="scale",
        operator="every norm",
        effort=2,
    )
    yield Change(
        "every norm subtracts the mean",
        "operator",
        "operators",
        lambda c, skipped: c.with_patch(
            lambda model: _centred(m for n, m in _norm_modules(model).items() if not skipped or skipped not in n)
        ),
        ("", "self_attn"),
        parameter="norms",
        shown=lambda skipped: "those of the residual stream" if skipped else "all",
        operator="every norm",
    )


def _norms_of_heads(kinds: dict[str, list[str]]) -> Iterator[Change]:
    of_heads = frozenset(name for kind in _OF_HEADS for name in kinds.get(kind, []))
    if of_heads:
        yield Change(
            "q_norm and k_norm behind the rotary embedding",
            "operator",
            "operators",
            _late_norms,
            operator="q_norm and k_norm in every layer",
        )
        yield Change(
            "q_norm and k_norm left out: their inputs pass",
            "operator",
            "operators",
            lambda c, _: c.with_patch(lambda model: _passing(model, of_heads)),
            operator="q_norm and k_norm in every layer",
        )


def single(context: Context) -> Iterator[Change]:
    """Single operators scaled or left out, one norm's epsilon, parts of one layer."""
    for names in operator_kinds(context.model.model).values():
        for name in names:
            yield from _operator(context, name, frozenset({name}), 1)
    yield from _norms(context)
    layers = layer_count(context.model.model)
    for layer in range(layers):
        yield scaled_scores(layer)
        yield wiring(layer)
        yield from experts(context, frozenset({f"layers.{layer}.experts"}), f"layer {layer}", 2)
        if layers <= _SHALLOW:
            yield from _inside(context, layer)


_SHALLOW = 8
"""Layers up to which each is searched for changes of many values, suspected or not."""


def _inside(context: Context, layer: int) -> Iterator[Change]:
    """Changes of one layer that have many values."""
    yield another_attention(layer)
    yield rounded_in(layer)
    yield rotary(layer)
    yield from activations(layer)
    known = {point.name for point in points(context.model.model)}
    for name in (f"layers.{layer}.attention", f"layers.{layer}.activation"):
        if name in known:
            yield _lost_part(context, name, frozenset({name}))


def closely(context: Context, suspects: list[str]) -> Iterator[Change]:
    """Suspected operators rounded, and changes inside their layers."""
    for name in suspects:
        yield from _rounded_operator(context, name, frozenset({name}), 1)
    if layer_count(context.model.model) > _SHALLOW:
        for layer in sorted({layer for name in suspects if (layer := layer_of(name)) is not None}):
            yield from _inside(context, layer)


def _operator(context: Context, words: str, chosen: frozenset[str], effort: int) -> Iterator[Change]:
    """Changes of operators' outputs; a scale that equals the scale of a weight is among the changes of the weights."""
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
        yield Change(
            f"{words} applied twice",
            "operator",
            "operators",
            lambda c, _: c.with_patch(lambda model: _repeated(model, chosen)),
            operator=words,
            effort=effort,
        )


def _rounded_operator(context: Context, words: str, chosen: frozenset[str], effort: int) -> Iterator[Change]:
    for dtype in (BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if context.dtype == torch.float32 or dtype.itemsize == 1:
            yield Change(
                f"{words} rounded to {name_of(dtype)}",
                "operator-dtype",
                "operators",
                partial(lambda dtype, c, _: c.with_patch(_on(chosen, rounded(dtype))), dtype),
                operator=words,
                effort=effort,
                rounds=True,
            )


_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": rounded(torch.float8_e4m3fn),
    "fp8 with a scale of the tensor": scaled_to(448, torch.float8_e4m3fn, (0, 1, 2)),
    "fp8 with a scale of each token": scaled_to(448, torch.float8_e4m3fn, (2,)),
    "int8 with a scale of the tensor": scaled_to(127, None, (0, 1, 2)),
    "int8 with a scale of each token": scaled_to(127, None, (2,)),
    "int4 with a scale of each token": scaled_to(7, None, (2,)),
}
"""Roundings of the projections' inputs [B, L, C], as by engines with eight-bit products; experts are left out."""


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


def _late_norms(c: Computation, _: Any) -> Computation:
    """The norms of q and k behind the rotary embedding."""
    norms: dict[int, tuple[Any, Any]] = {}

    def without(model: Any) -> contextlib.AbstractContextManager[None]:
        both = [(layer.self_attn.q_norm, layer.self_attn.k_norm) for layer in model.base_model.layers]
        norms.update(enumerate((q.forward, k.forward) for q, k in both))
        return replaced([(norm, "forward", lambda x: x) for pair in both for norm in pair])

    def late(call: Attention) -> Attention:
        q, k = norms[call.layer]
        return replace(call, query=q(call.query), key=k(call.key))

    return c.with_patch(without).with_attention(late)


def _lost_part(context: Context, words: str, chosen: frozenset[str]) -> Change:
    """A part of a row-parallel operator's input is missing: a head, or the part of a rank."""
    heads = context.model.config.get_text_config().num_attention_heads

    def without(count: int, part: int, x: Tensor) -> Tensor:
        width = x.shape[-1] // count
        x = x.clone()
        x[..., part * width : (part + 1) * width] = 0
        return x

    return Change(
        f"a part of {words} is missing",
        "operator",
        "operators",
        lambda c, part: c.with_patch(_on(chosen, partial(without, *part))),
        tuple((count, part) for count in sorted({2, 4, 8, heads}) for part in range(count)),
        parameter="part",
        shown=lambda part: f"{part[1] + 1} of {part[0]}",
        operator=words,
        effort=2,
    )


def _has_own_scale(point: Point) -> bool:
    """Whether no weight's scale is that of the output: biases, norms with an offset, the embedding, whole layers."""
    kind = point.name.rpartition(".")[2]
    if kind in ("attention_residual", "mlp", "attention", "activation", "output"):
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


def _repeated(model: Any, names: frozenset[str]) -> contextlib.AbstractContextManager[Any]:
    """Operators whose output goes through them again."""

    def twice(forward: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        first = forward(x, *args, **options)
        return forward(first[0] if isinstance(first, tuple) else first, *args, **options)

    where = [point for point in points(model) if point.name in names]
    return replaced([(p.module, "forward", partial(twice, p.module.forward)) for p in where])


def _narrow_norms(dtype: torch.dtype, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Norms whose input and output are rounded."""
    stack, narrow = contextlib.ExitStack(), rounded(dtype)
    for module in _norm_modules(model).values():
        stack.callback(module.register_forward_pre_hook(lambda m, args: (narrow(args[0]), *args[1:])).remove)
        stack.callback(module.register_forward_hook(lambda m, args, out: narrow(out)).remove)
    return stack


def _norm_modules(model: Any) -> dict[str, Any]:
    has_epsilon = lambda m: isinstance(getattr(m, "variance_epsilon", getattr(m, "eps", None)), float)
    return {name: module for name, module in model.named_modules() if has_epsilon(module)}


def _centred(modules: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Norms that subtract the mean, as LayerNorm does and RMSNorm does not."""
    stack = contextlib.ExitStack()
    for module in modules:
        hook = lambda module, args: (args[0] - args[0].mean(-1, keepdim=True), *args[1:])
        stack.callback(module.register_forward_pre_hook(hook).remove)
    return stack


def _norms(context: Context) -> Iterator[Change]:
    """One norm with another epsilon, or with the mean subtracted."""
    names = list(_norm_modules(context.model.model))
    for name in names if len(names) > 1 else []:
        yield Change(
            f"{name} subtracts the mean",
            "operator",
            "operators",
            partial(lambda name, c, _: c.with_patch(lambda model: _centred([model.get_submodule(name)])), name),
            operator=name,
        )

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
