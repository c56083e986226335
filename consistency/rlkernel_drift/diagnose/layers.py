"""Changes inside layers, between their linear operators: rotary embedding, residual stream, activation, routing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.scoring.model import replaced
from rlkernel_drift.scoring.operators import points

Rotated = tuple[Tensor, Tensor]  # queries and keys [B, H, L, D]
_ROTATIONS: dict[str, Callable[[Any, Tensor, Tensor, Tensor, Tensor], Rotated]] = {
    "in the other direction": lambda rotate, q, k, cos, sin: rotate(q, k, cos, -sin),
    "twice": lambda rotate, q, k, cos, sin: rotate(*rotate(q, k, cos, sin), cos, sin),
    "not applied": lambda rotate, q, k, cos, sin: (q, k),
    "of the position before": lambda rotate, q, k, cos, sin: rotate(q, k, cos.roll(1, -2), sin.roll(1, -2)),
    "of the position behind": lambda rotate, q, k, cos, sin: rotate(q, k, cos.roll(-1, -2), sin.roll(-1, -2)),
    "of neighbours in place of halves": lambda rotate, q, k, cos, sin: _in_pairs(rotate, q, k, cos, sin),
}
"""Replacements of `rotate(q, k, cos, sin)`."""


def _in_pairs(rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    halves = lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    pairs = lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = cos.shape[-1] if cos.shape[-1] != q.shape[-1] // 2 else q.shape[-1]  # gpt-oss passes each angle once
    (q, *q_rest), (k, *k_rest) = (x.split([turned, x.shape[-1] - turned], -1) for x in (q, k))
    q, k = rotate(halves(q), halves(k), cos, sin)
    return torch.cat([pairs(q), *q_rest], -1), torch.cat([pairs(k), *k_rest], -1)


def rotary(layer: int | None) -> Change:
    """The rotary embedding of queries, keys or both, in one layer or in all."""

    def rotated(how: str, which: str, model: Any) -> contextlib.AbstractContextManager[Any]:
        layers, now = model.base_model.layers, [-1]
        attention = next(each.self_attn for each in layers if hasattr(each, "self_attn"))
        module = sys.modules[type(attention).__module__]
        rotate = module.apply_rotary_pos_emb

        def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Rotated:
            plain = rotate(q, k, cos, sin, *rest, **options)
            if layer not in (None, now[0]):
                return plain
            other = _ROTATIONS[how](lambda *x: rotate(*x, *rest, **options), q, k, cos, sin)
            return other[0] if "q" in which else plain[0], other[1] if "k" in which else plain[1]

        stack = contextlib.ExitStack()
        for i, each in enumerate(layers):
            enter = lambda module, args, i=i: now.__setitem__(0, i)
            stack.callback(each.register_forward_pre_hook(enter).remove)
        stack.enter_context(replaced([(module, "apply_rotary_pos_emb", turned)]))
        return stack

    where = "every layer" if layer is None else f"layer {layer}"
    return Change(
        f"the rotary embedding of {where}",
        "operator" if layer is not None else "rope-scaling",
        "operators",
        lambda c, value: c.with_patch(partial(rotated, *value)),
        tuple((how, which) for how in _ROTATIONS for which in ("qk", "q", "k")),
        parameter="rotation",
        shown=lambda value: f"{value[0]}, of {' and '.join(value[1])}",
        operator=f"rotary embedding of {where}",
        effort=1 + (layer is not None),
    )


def activations(layer: int | None) -> Iterator[Change]:
    """The slope of the gate's activation in one layer or all, and another activation in one."""

    def acting(change: Callable[[Any], Any], model: Any) -> contextlib.AbstractContextManager[Any]:
        layers = model.base_model.layers if layer is None else [model.base_model.layers[layer]]
        found = [m for each in layers for m in each.modules() if callable(getattr(m, "act_fn", None))]
        if not found:
            raise ValueError("the model's activation is no module")
        return replaced([(m.act_fn, "forward", change(m.act_fn.forward)) for m in found])

    where = "every layer" if layer is None else f"layer {layer}"
    yield Change(
        f"another slope of the activation in {where}",
        "activation",
        "operators",
        lambda c, slope: c.with_patch(partial(acting, lambda act: lambda x: act(slope * x) / slope)),
        (0.5, 0.7, 1.4, 2.0),
        True,
        start=1.0,
        parameter="slope",
        operator=f"activation in {where}",
        effort=2,
    )
    if layer is not None:
        yield Change(
            f"another activation in {where}",
            "activation",
            "operators",
            lambda c, name: c.with_patch(partial(acting, lambda act: _ACTIVATIONS[name])),
            tuple(_ACTIVATIONS),
            parameter="activation",
            operator=f"activation in {where}",
            effort=2,
        )


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "hardswish": torch.nn.functional.hardswish,
    "none": lambda x: x,
}


_WIRINGS = (
    "attention's residual missing",
    "attention's residual twice",
    "the MLP's residual missing",
    "the MLP's residual twice",
    "the MLP reads the layer's input",
)


def wiring(layer: int) -> Change:
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


_Routing = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def _lost(part: int, parts: int) -> _Routing:
    """A part of the experts returns zeros, as if an expert-parallel rank were lost."""
    return lambda index, weight, n: (index, weight * (index * parts // n != part))


def _above(least: float, renormalised: bool) -> _Routing:
    """Experts with small weights are skipped, even if a token has no others."""

    def route(index: Tensor, weight: Tensor, n: int) -> tuple[Tensor, Tensor]:
        kept = weight * (weight >= least)
        total = kept.sum(-1, keepdim=True)
        return index, kept / total.clamp(min=1e-9) if renormalised else kept

    return route


_ROUTINGS: dict[str, _Routing] = {
    "the next expert computes": lambda index, weight, n: ((index + 1) % n, weight),
    "the previous expert computes": lambda index, weight, n: ((index - 1) % n, weight),
    "of the token before": lambda index, weight, n: (index.roll(1, 0), weight.roll(1, 0)),
    "of the token behind": lambda index, weight, n: (index.roll(-1, 0), weight.roll(-1, 0)),
    "all weights equal": lambda index, weight, n: (index, torch.full_like(weight, 1 / weight.shape[-1])),
    "only the first expert": lambda index, weight, n: (index, weight * (weight == weight.amax(-1, keepdim=True))),
    **{
        f"weights below {least} are zero{', the rest renormalised' if again else ''}": _above(least, again)
        for least in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)
        for again in (False, True)
    },
    **{f"part {i + 1} of {n} of the experts lost": _lost(i, n) for n in (2, 4, 8) for i in range(n)},
}
"""Changes of the chosen experts [tokens, k], their weights and the number of experts."""


def experts(context: Context, chosen: frozenset[str], where: str, effort: int) -> Iterator[Change]:
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


def narrow_routers(dtype: torch.dtype, whole: bool, model: Any) -> contextlib.AbstractContextManager[None]:
    """Routers whose products, or only their results, are in a dtype."""
    plain = torch.nn.functional.linear

    def narrow(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        if not whole:
            return plain(x, w, bias).to(dtype).to(x.dtype)
        return plain(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)

    def routed(forward: Any, *args: Any) -> Any:
        with replaced([(torch.nn.functional, "linear", narrow)]):
            return forward(*args)

    found = [getattr(layer.mlp, name, None) for layer in model.base_model.layers for name in ("gate", "router")]
    routers = [router for router in found if router is not None]
    return replaced([(router, "forward", partial(routed, router.forward)) for router in routers])
