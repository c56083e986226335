"""Turns a call of a model into packed tokens: handles autocast, caches and compiled graphs, and refuses bad calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rlkernel_transformers.caches import check_cache, new_cache, pack_pages
from rlkernel_transformers.packing import CallError, PackedCall, check_rows, pack


@dataclass(frozen=True)
class Score:
    """The request of `token_logprobs`, which passes through wrappers of the model as one keyword argument."""

    targets: Tensor
    temperature: float | Tensor = 1.0
    kept: Tensor | None = None
    keep_probs: bool = False
    rows: Tensor | None = None
    statistics: bool = False
    vocabulary: int | None = None


def entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's forward: disables autocast inside and passes its dtype on, and breaks the graph of torch.compile
    for a call with a cache."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if isinstance(a, Tensor)]
        if not tensors or "_rlkernel" not in getattr(self, "model", self).__dict__:
            return forward(self, *args, **kwargs)
        past = args[3] if len(args) > 3 else kwargs.get("past_key_values")
        if is_dynamo_compiling() and (past is not None or kwargs.get("cache") is not None):
            return _uncompiled(call, self, *args, **kwargs)
        device = tensors[0].device.type
        if not torch.is_autocast_enabled(device):
            return forward(self, *args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return forward(self, *args, rlkernel_dtype=dtype, **kwargs)

    return call


@functools.partial(
    torch.compiler.disable,
    reason="past_key_values: the number of cached keys is read from the cache; compile without fullgraph, so that such "
    "calls run eagerly",
)
def _uncompiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def prepare(
    decoder: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
    score: Score | None,
    kwargs: dict[str, Any],
) -> PackedCall:
    """The call as packed tokens. Raises CallError if our ops cannot compute it exactly.

    As in transformers, a cache is used if one is passed, and created with `use_cache=True` or, outside of training, by
    the configuration's default, but never for log-probabilities, after which nothing is generated.
    """
    shape = shape_of(input_ids, inputs_embeds)
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    settings = decoder._rlkernel
    dtype = kwargs.get("rlkernel_dtype")
    _check_context(decoder, given.device, dtype)
    checkpointed = decoder.layers[0].gradient_checkpointing and decoder.training and torch.is_grad_enabled()
    if past_key_values is not None:
        if checkpointed:
            raise CallError(
                "past_key_values under gradient checkpointing: the recomputation would fill the cache twice; leave it "
                "out, or call model.gradient_checkpointing_disable()"
            )
        check_cache(past_key_values, shape[1])
    if kwargs.get("cache") is not None:
        assert position_ids is not None
        packed = pack_pages(shape, position_ids, settings.windows, kwargs)
    else:
        if isinstance(attention_mask, dict):  # `generate` with a static cache: one per kind of layer, all equal
            attention_mask = next(iter(attention_mask.values()))
        packed = pack(
            shape,
            given.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
            max_seqlen=kwargs.get("max_length_q"),
            cache=past_key_values,
            targets=None if score is None else score.targets,
            rows=None if score is None else score.rows,
        )
        if use_cache is None:
            packed_rows = attention_mask is None and packed.cu_seqlens.numel() - 1 != shape[0]
            scoring = "rlkernel_score" in kwargs
            use_cache = bool(decoder.config.use_cache) and not (decoder.training or scoring or packed_rows)
        if use_cache and past_key_values is None and not checkpointed:
            packed = replace(packed, cache=new_cache())
    weights = bool(option(decoder, kwargs, "output_attentions"))
    weights &= "rlkernel_score" not in kwargs and packed.pages is None
    if weights or dtype is not None:
        packed = replace(packed, weights=weights, dtype=dtype)
    if weights and not is_dynamo_compiling():
        warnings.warn(
            "output_attentions: the attention op does not keep the weights, so eager torch computes them again for "
            "reporting; everything else stays on rlkernel",
            stacklevel=2,
        )
    if score is not None and score.rows is not None:
        check_rows(score.rows, packed.positions.numel())
    limit = settings.config.max_position_embeddings
    longest = packed.past + packed.max_seqlen if packed.longest is None else packed.longest
    if longest > limit and packed.cu_seqlens.numel() - 1 == packed.shape[0]:
        raise CallError(
            f"sequences of up to {longest} tokens exceed max_position_embeddings={limit} of "
            "the model; shorten them, or raise it in the configuration before apply(model)"
        )
    settings.to(given.device)
    return packed


def shape_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """(B, L) of a call.

    Raises:
        CallError: not exactly one of them is given, or it has other dimensions.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise CallError("pass exactly one of input_ids and inputs_embeds")
    for name, value in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
        if value is not None and not isinstance(value, Tensor):
            raise CallError(f"{name} is a {type(value).__name__}; expected a tensor, torch.tensor({name})")
    if input_ids is not None and input_ids.dim() != 2:
        raise CallError(f"input_ids is {tuple(input_ids.shape)}; expected [B, L], as ids[None] for one sequence")
    if inputs_embeds is not None and inputs_embeds.dim() != 3:
        raise CallError(f"inputs_embeds is {tuple(inputs_embeds.shape)}; expected [B, L, C]")
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    return given.shape[0], given.shape[1]


def _check_context(decoder: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raises CallError if autocast would reach the ops, or if its dtype is not that of a half-precision model."""
    if torch.is_autocast_enabled(device.type):
        raise CallError(
            "autocast is active: it casts inside the ops and changes their bits. Load the model in bfloat16 and turn "
            "mixed precision off: bf16=False in TrainingArguments, mixed_precision='no' in accelerate"
        )
    own = decoder.embed_tokens.weight.dtype
    if dtype is not None and own not in (torch.float32, dtype):
        raise CallError(
            f"autocast to {dtype} with parameters in {own}: rlkernel rounds only fp32 parameters at each use; cast the "
            f"model, model.to({dtype}) or model.float()"
        )


def option(decoder: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of the call; if it is not given, that of the configuration."""
    value = kwargs.get(name)
    return getattr(decoder.config, name, False) if value is None else value
