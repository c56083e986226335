"""Changes of the model's configuration, of its operators and of the cache: one number or one switch at a time.

The configuration is read from the model itself, so that a setting needs no entry here to be searched.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.attention import BEFORE_ROPE, FACTORS, attention_of, rounded, rounded_in
from rlkernel_drift.diagnose.context import Computation, Context, Patch
from rlkernel_drift.diagnose.inputs import scale_positions
from rlkernel_drift.diagnose.location import layer_count
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.gates.layers import layer_of
from rlkernel_drift.scoring.model import replaced
from rlkernel_drift.scoring.operators import Point, changed, points

BF16 = torch.bfloat16
_WINDOWS = (*range(2, 33), 40, 48, 64, 128, 256, 512, 1024, 2048, 4096)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")
_SKIPPED = (
    "dropout",
    "initializer",
    "token_id",
    "max_position",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "aux_loss",
    "use_cache",
    "output_",
    "chunk_size",
    "return_dict",
    "is_encoder",
    "is_decoder",
    "pretraining_tp",
    "logits_scaling",
    "final_logit_softcapping",
    "jitter",
)
_CAUSES = {
    "eps": "norm-epsilon",
    "window": "attention-window",
    "softcap": "soft-cap",
    "act": "activation",
    "tie_word": "tied-embedding",
}


# ---- entries of the configuration ----------------------------------------------------------------------------------


def configuration(context: Context) -> Iterator[Change]:
    """One entry of the configuration changed, rope first."""
    config = context.model.config.get_text_config()
    yield from _rope(context)
    known = {name: getattr(config, name, None) for name in config.to_dict()}
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        known.setdefault(name, None)
    ordered = sorted(known, key=lambda name: (not any(key in name for key in _CAUSES), name))
    for name in ordered:
        value = known[name]
        if any(part in name for part in _SKIPPED) and name not in ("final_logit_softcapping", "logits_scaling"):
            continue
        cause = next((cause for key, cause in _CAUSES.items() if key in name), "model-setting")
        apply = lambda c, v, name=name: c.with_body(config=(*c.body.config, (name, v)))
        words = f"{name} in the configuration"
        recorded = context.recorded.get(name)
        if recorded is not None and recorded != value and not isinstance(value, (list, dict)):
            yield Change(f"{name} as the side recorded it", cause, "configuration", apply, (recorded,), parameter=name)
        if isinstance(value, bool):
            yield Change(words, cause, "configuration", apply, (not value,), parameter=name)
        elif name.endswith("window"):
            yield Change(
                words,
                cause,
                "configuration",
                apply,
                (1 << 20, value - 1, value + 1, *_WINDOWS) if value else _WINDOWS,
                parameter=name,
            )
        elif "softcap" in name:
            if value:
                yield Change(f"{name} left out", cause, "configuration", apply, (None,), parameter=name)
            scaled = tuple((value or 16.0) * f for f in (0.05, 0.1, *FACTORS))
            yield Change(words, cause, "configuration", apply, scaled, True, parameter=name, start=value)
        elif "eps" in name and isinstance(value, float):
            powers = lambda c, v, name=name: c.with_body(config=(*c.body.config, (name, 10.0**v)))
            grid = tuple(i / 2 for i in range(-16, 2))
            yield Change(
                words,
                cause,
                "configuration",
                powers,
                grid,
                True,
                parameter=name,
                shown=lambda v: 10.0**v,
                start=math.log10(value),
            )
        elif "act" in name and isinstance(value, str):
            others = tuple(a for a in _ACTIVATIONS if a != value)
            yield Change(words, cause, "configuration", apply, others, parameter=name)
        elif isinstance(value, (int, float)) and value:
            if isinstance(value, int) and "scalar" not in name and "multiplier" not in name:
                numbers = tuple(n for n in (1, 2, 3, 4, 6, 8, value - 1, value + 1) if n != value and n > 0)
                yield Change(words, cause, "configuration", apply, numbers, parameter=name, effort=2)
            else:
                scaled = tuple(value * f for f in FACTORS)
                yield Change(words, cause, "configuration", apply, scaled, True, parameter=name, start=value)
    yield from _layer_types(context)


def _layer_types(context: Context) -> Iterator[Change]:
    """Sliding and full attention exchanged, in all layers or in one."""
    types = getattr(context.model.config.get_text_config(), "layer_types", None)
    if not types or set(types) != {"sliding_attention", "full_attention"}:
        return
    flip = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
    options = [[flip[t] for t in types], *([kind] * len(types) for kind in flip)]
    options += [[flip[t] if i == k else t for i, t in enumerate(types)] for k in range(len(types))]
    yield Change(
        "layers with another kind of attention",
        "attention-window",
        "configuration",
        lambda c, v: c.with_body(config=(*c.body.config, ("layer_types", list(v)))),
        tuple(map(tuple, options)),
        parameter="layer_types",
        shown=str,
        effort=2,
    )


def _rope(context: Context) -> Iterator[Change]:
    config = context.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return
    longest = getattr(config, "max_position_embeddings", 4096) or 4096
    with_rope = lambda c, **entries: c.with_body(config=(*c.body.config, ("rope_parameters", entries)))
    theta = float(rope.get("rope_theta", 10000.0))
    bases = tuple(2.25 + i / 4 for i in range(20))
    yield Change(
        "another rope base",
        "rope-base",
        "configuration",
        lambda c, x: with_rope(c, rope_theta=10.0**x),
        bases,
        True,
        start=math.log10(theta),
        parameter="theta",
        shown=lambda x: 10.0**x,
    )
    if rope["rope_type"] != "default":
        yield Change(
            f"the rope scaling ({rope['rope_type']}) left out",
            "rope-scaling",
            "configuration",
            lambda c, _: with_rope(c, rope_type="default", rope_theta=theta),
        )
    yield Change(
        "rotary positions scaled",
        "rope-scaling",
        "configuration",
        lambda c, x: c.with_body(sequences=scale_positions(c.body.sequences, 2.0**x)),
        # Few percent turn the fast frequencies by a radian, so the error is smooth only very near its minimum.
        tuple(sorted({i / 3 for i in range(-6, 16) if i} | {i / 24 for i in range(-6, 13) if i})),
        True,
        start=0.0,
        parameter="factor",
        shown=lambda x: 2.0**x,
    )
    factors = (2.0, 4.0, 8.0, 32.0)
    original = tuple(sorted({longest // 4, longest, 8192, 32768}))
    yield Change(
        "YaRN scaling of rope",
        "rope-scaling",
        "configuration",
        lambda c, v: with_rope(c, rope_type="yarn", factor=v[0], original_max_position_embeddings=v[1]),
        tuple((f, o) for o in original for f in factors),
        parameter="factor and original length",
        shown=str,
    )
    yield Change(
        "Llama 3 scaling of rope",
        "rope-scaling",
        "configuration",
        lambda c, v: with_rope(
            c,
            rope_type="llama3",
            factor=v[0],
            original_max_position_embeddings=v[1],
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        tuple((f, o) for o in original for f in (8.0, 32.0)),
        parameter="factor and original length",
        shown=str,
    )
    if "factor" in rope:
        yield Change(
            "another factor of the rope scaling",
            "rope-scaling",
            "configuration",
            lambda c, x: with_rope(c, factor=x),
            tuple(rope["factor"] * f for f in FACTORS),
            True,
            parameter="factor",
            start=rope["factor"],
        )
    yield Change(
        "another share of rotated dimensions",
        "rope-scaling",
        "configuration",
        lambda c, x: with_rope(c, partial_rotary_factor=x),
        (0.25, 0.5, 0.75),
        parameter="partial_rotary_factor",
    )
    for dtype in (BF16, torch.float16):
        yield Change(
            f"rotary frequencies rounded to {str(dtype)[6:]}",
            "rope-dtype",
            "configuration",
            partial(lambda dtype, c, _: _rotated(c, lambda f: f.to(dtype).to(f)), dtype),
        )
    half = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    step = max(1, half // 16)
    yield Change(
        "some rotary frequencies do not turn",
        "rope-scaling",
        "configuration",
        lambda c, v: _rotated(c, lambda f: _stopped(f, *v)),
        tuple((end, n) for end in ("slowest", "fastest") for n in range(step, half + 1, step)),
        parameter="frequencies",
        shown=lambda v: f"the {v[1]} {v[0]}",
    )


def _rotated(c: Computation, change: Callable[[Tensor], Tensor]) -> Computation:
    """The computation with other rotary frequencies [head_dim / 2]."""

    def patch(model: Any) -> contextlib.AbstractContextManager[None]:
        buffers = ((m, n, b) for m in model.modules() for n, b in m.named_buffers(recurse=False))
        return replaced([(m, n, change(b)) for m, n, b in buffers if n.endswith("inv_freq")])

    return c.with_body(patches=(*c.body.patches, patch))


def _stopped(frequencies: Tensor, end: str, count: int) -> Tensor:
    """Frequencies with zero for the slowest ones, which are the last, or the fastest."""
    there = torch.arange(len(frequencies), device=frequencies.device)
    return frequencies * (there < len(frequencies) - count if end == "slowest" else there >= count)


# ---- operators -----------------------------------------------------------------------------------------------------


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
        lambda c, f: c.with_body(patches=(*c.body.patches, _on(frozenset({"embedding"}), lambda x: x * f))),
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
        lambda c, f: c.with_body(patches=(*c.body.patches, _on(both, lambda x: x * f))),
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
            partial(lambda dtype, c, _: c.with_body(patches=(*c.body.patches, partial(_narrow_norms, dtype))), dtype),
            operator="every norm",
            rounds=True,
        )
    cached = frozenset(name for kind in ("k_proj", "v_proj") for name in kinds.get(kind, []))
    yield Change(
        "keys and values rounded before the rotary embedding",
        "kv-cache-dtype",
        "operators",
        lambda c, how: c.with_body(patches=(*c.body.patches, _on(cached, BEFORE_ROPE[how]))),
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
    with_patch = lambda c, patch: c.with_body(patches=(*c.body.patches, patch))
    if all(_has_own_scale(point) for point in where):
        yield Change(
            f"{words} scaled",
            "operator",
            "operators",
            lambda c, f: with_patch(c, _on(chosen, lambda x: x * f)),
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
            lambda c, _: with_patch(c, lambda model: _passing(model, chosen)),
            operator=words,
            effort=effort,
        )


def _rounded_operator(context: Context, words: str, chosen: frozenset[str], effort: int) -> Iterator[Change]:
    with_patch = lambda c, patch: c.with_body(patches=(*c.body.patches, patch))
    for dtype in (BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if context.dtype == torch.float32 or dtype.itemsize == 1:
            yield Change(
                f"{words} rounded to {str(dtype)[6:]}",
                "operator-dtype",
                "operators",
                partial(lambda dtype, c, _: with_patch(c, _on(chosen, rounded(dtype))), dtype),
                operator=words,
                effort=effort,
                rounds=True,
            )


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
        lambda c, head: c.with_body(patches=(*c.body.patches, _on(frozenset({name}), partial(without, head)))),
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
            partial(
                lambda patch, c, x: c.with_body(patches=(*c.body.patches, lambda m: patch(m, value=10.0**x))), patch
            ),
            (-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0),
            True,
            parameter="epsilon",
            shown=lambda x: 10.0**x,
            operator=name,
            effort=2,
        )
