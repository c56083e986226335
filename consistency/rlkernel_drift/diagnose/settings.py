"""Changes of the model's configuration: one number or one switch at a time.

The settings are read from the model's own configuration, so that new ones are searched without an entry here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.attention import FACTORS
from rlkernel_drift.diagnose.context import Computation, Context
from rlkernel_drift.diagnose.inputs import scale_positions
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.scoring.model import name_of, replaced, rotary_frequencies

BF16 = torch.bfloat16
_WINDOWS = (*range(2, 33), 40, 48, 64, 128, 256, 512, 1024, 2048, 4096)
_ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "mish",
    "sigmoid",
    "linear",
)
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
    """Changes of the rotary embedding."""
    rope = getattr(context.model.config.get_text_config(), "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return
    yield from _base_and_positions(context, rope)
    yield from _scaling(context, rope)
    yield from _narrow_frequencies(context)
    if rope["rope_type"] == "yarn":
        yield Change(
            "another attention factor of YaRN",
            "rope-scaling",
            "configuration",
            lambda c, x: _with_rope(c, attention_factor=x),
            (0.5, 0.7, 0.85, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0),
            True,
            parameter="attention_factor",
        )
    half = context.model.head_width // 2
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


def _with_rope(c: Computation, **entries: Any) -> Computation:
    """The computation with other entries of `rope_parameters`."""
    return c.with_body(config=(*c.body.config, ("rope_parameters", entries)))


def _base_and_positions(context: Context, rope: dict[str, Any]) -> Iterator[Change]:
    """Another base, scaling left out, and positions divided by a factor."""
    theta = float(rope.get("rope_theta", 10000.0))
    bases = tuple(2.25 + i / 4 for i in range(20))
    yield Change(
        "another rope base",
        "rope-base",
        "configuration",
        lambda c, x: _with_rope(c, rope_theta=10.0**x),
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
            lambda c, _: _with_rope(c, rope_type="default", rope_theta=theta),
        )
    yield Change(
        "rotary positions scaled",
        "rope-scaling",
        "configuration",
        lambda c, x: c.with_body(sequences=scale_positions(c.body.sequences, 2.0**x)),
        # A few percent turn the fast frequencies by a radian, so the error is smooth only near its minimum.
        tuple(sorted({i / 3 for i in range(-6, 16) if i} | {i / 24 for i in range(-6, 13) if i})),
        True,
        start=0.0,
        parameter="factor",
        shown=lambda x: 2.0**x,
    )


def _scaling(context: Context, rope: dict[str, Any]) -> Iterator[Change]:
    """YaRN and Llama 3 scaling, another factor, another share of rotated dimensions."""
    longest = getattr(context.model.config.get_text_config(), "max_position_embeddings", 4096) or 4096
    factors = (2.0, 4.0, 8.0, 32.0)
    original = tuple(sorted({longest // 4, longest, 8192, 32768}))
    yield Change(
        "YaRN scaling of rope",
        "rope-scaling",
        "configuration",
        lambda c, v: _with_rope(c, rope_type="yarn", factor=v[0], original_max_position_embeddings=v[1]),
        tuple((f, o) for o in original for f in factors),
        parameter="factor and original length",
        shown=str,
    )
    yield Change(
        "Llama 3 scaling of rope",
        "rope-scaling",
        "configuration",
        lambda c, v: _with_rope(
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
            lambda c, x: _with_rope(c, factor=x),
            tuple(rope["factor"] * f for f in FACTORS),
            True,
            parameter="factor",
            start=rope["factor"],
        )
    yield Change(
        "another share of rotated dimensions",
        "rope-scaling",
        "configuration",
        lambda c, x: _with_rope(c, partial_rotary_factor=x),
        (0.25, 0.5, 0.75),
        parameter="partial_rotary_factor",
    )


def _narrow_frequencies(context: Context) -> Iterator[Change]:
    for dtype in (BF16, torch.float16):
        yield Change(
            f"rotary frequencies rounded to {name_of(dtype)}",
            "rope-dtype",
            "configuration",
            partial(lambda dtype, c, _: _rotated(c, lambda f: f.to(dtype).to(f)), dtype),
        )
    for dtype in (BF16, torch.float16) if context.dtype == torch.float32 else ():
        yield Change(
            f"cosines and sines of rope rounded to {name_of(dtype)}",
            "rope-dtype",
            "configuration",
            partial(lambda dtype, c, both: _narrow_rope(c, dtype, both), dtype),
            (False, True),
            parameter="frequencies too",
            rounds=True,
        )


def _rotated(c: Computation, change: Callable[[Tensor], Tensor]) -> Computation:
    """The computation with other rotary frequencies [head_dim / 2]."""

    def patch(model: Any) -> contextlib.AbstractContextManager[None]:
        return replaced([(module, name, change(f)) for module, name, f in rotary_frequencies(model)])

    return c.with_patch(patch)


def _narrow_rope(c: Computation, dtype: torch.dtype, frequencies: bool) -> Computation:
    c = _rotated(c, lambda f: f.to(dtype).to(f)) if frequencies else c
    return c.with_patch(partial(_rounded_table, dtype))


def _rounded_table(dtype: torch.dtype, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Rotary embeddings with rounded cosines and sines."""
    stack = contextlib.ExitStack()
    hook = lambda module, args, out: tuple(x.to(dtype).to(x.dtype) for x in out)
    for module in {module for module, _, _ in rotary_frequencies(model)}:
        stack.callback(module.register_forward_hook(hook).remove)
    return stack


def _stopped(frequencies: Tensor, end: str, count: int) -> Tensor:
    """Frequencies with zero for the slowest ones, which are the last, or the fastest."""
    there = torch.arange(len(frequencies), device=frequencies.device)
    return frequencies * (there < len(frequencies) - count if end == "slowest" else there >= count)
