"""The forwards that `apply` puts on a model's modules: transformers' interface outside, the lines of `models.decoder`
inside.

Packed tokens [T, ...] run through all layers, and the residual stream is added inside the norms, so every rounding of
the forward and of the backward is where `rlkernel.models` has it. Each function becomes the `forward` of one instance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from rlkernel import ops
from rlkernel.ops.logprob import inverse_temperature
from rlkernel_transformers.adapters import has_dropout, merged_weight
from rlkernel_transformers.joined import joined_linear
from rlkernel_transformers.packing import IGNORED, CallError, Packed, Scored, check_rows, check_targets, pack, place


@dataclass
class TokenLogprobs(ModelOutput):
    """Result of `token_logprobs`, in the shape of the targets; zero where nothing is scored.

    Attributes:
        logp: fp32 log-probability of each target.
        entropy: fp32 entropy of each token's distribution.
        lse: fp32 log-sum-exp of the logits over the temperature, not differentiable.
        mean_logit: fp32 mean of the logits over the temperature; top1: bool, whether the target has the largest
            logit. Both without gradient, and only where `statistics` was asked for.
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None
    top1: Tensor | None = None


@dataclass(frozen=True)
class Score:
    """What `token_logprobs` asks the model for; travels through wrappers as one keyword argument."""

    targets: Tensor
    temperature: float | Tensor = 1.0
    kept: Tensor | None = None
    keep_probs: bool = False
    rows: Tensor | None = None
    statistics: bool = False


def whole(weight: Tensor) -> Tensor:
    """The full tensor of a parameter that FSDP2 holds in shards."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


# ---- layers --------------------------------------------------------------------------------------


def linear_forward(self: Any, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
    bias = None if self.bias is None else whole(self.bias)
    return ops.linear(x, whole(self.weight), bias, chunks=self._rlkernel_chunks)


def head_forward(self: Any, x: Tensor) -> Tensor:  # [..., C] -> [..., V] fp32
    return ops.linear(x, head_weight(self), out_dtype=torch.float32)


def head_weight(head: Any) -> Tensor:  # [V, C]
    """Weight of the head; where it is tied and has a `main_grad`, under a name with its own chain of additions."""
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise CallError(f"the head is a {kind}; rlkernel takes no adapter on lm_head")
    weight = whole(head.weight)
    grad = getattr(weight, "head_main_grad", None)
    if grad is None or not torch.is_grad_enabled():
        return weight
    alias = weight.view_as(weight)
    alias.main_grad = grad  # type: ignore[attr-defined]
    return alias


def embedding_forward(self: Any, ids: Tensor) -> Tensor:
    out = ops.embedding(ids, whole(self.weight))
    if self.padding_idx is None or not torch.is_grad_enabled():
        return out
    # transformers does not train this row, which starts at zero, where a norm's gradient is as large as 1 / sqrt(eps).
    return torch.where((ids == self.padding_idx).unsqueeze(-1), out.detach(), out)


def norm_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight = whole(self.weight)
    if residual is None:
        return ops.rms_norm(x, weight, self.variance_epsilon)
    return ops.rms_norm(x, weight, self.variance_epsilon, residual)


def mlp_forward(self: Any, x: Tensor) -> Tensor:  # [T, C]
    layers = (self.gate_proj, self.up_proj)
    gate_up = _together(layers, x)
    if gate_up is None:
        gate_up = torch.cat([_call(layer, x) for layer in layers], dim=-1)
    return _call(self.down_proj, ops.swiglu(gate_up))


def attention_forward(self: Any, x: Tensor, packed: Packed) -> Tensor:  # [T, C]
    settings = self._rlkernel
    layers = (self.q_proj, self.k_proj, self.v_proj)
    qkv = _together(layers, x)
    if qkv is not None:
        q, k, v = qkv.view(x.shape[0], -1, self.head_dim).split(settings.heads, dim=1)
    else:
        q, k, v = (_call(layer, x).view(x.shape[0], -1, self.head_dim) for layer in layers)
    if settings.qk_norm:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = ops.rope(q, k, packed.positions, settings.cos_sin)
    if packed.cache is not None:
        k, v = _remember(self, packed, k, v)
    out, _ = ops.attention(
        q,
        k,
        v,
        packed.cu_seqlens,
        packed.cu_seqlens_k,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_k=packed.max_seqlen if packed.cu_seqlens_k is None else packed.max_seqlen_k,
        window=settings.windows[self.layer_idx],
        variant=settings.variant,
    )
    return _call(self.o_proj, out.reshape(x.shape[0], -1))


def layer_forward(self: Any, x: Tensor, residual: Tensor | None, packed: Packed) -> tuple[Tensor, Tensor]:
    if residual is None:
        residual, x = x, self.input_layernorm(x)
    else:
        x, residual = self.input_layernorm(x, residual)
    x = self.self_attn(x, packed)
    x, residual = self.post_attention_layernorm(x, residual)
    return self.mlp(x), residual


def _together(layers: tuple[Any, ...], x: Tensor) -> Tensor | None:
    """One product of layers that are a weight and a bias each; None where one is more than that."""
    weights, biases = [], []
    for layer in layers:
        if type(layer) is nn.Linear:
            weights.append(layer.weight)
        elif "_rlkernel_merged" in layer.__dict__ and not (layer.training and has_dropout(layer)):
            weights.append(merged_weight(layer))
            layer = layer.base_layer
        else:
            return None
        if layer.bias is not None:
            biases.append(layer.bias)
    return joined_linear(x, weights, biases)


def merged_forward(self: Any, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
    base = self.base_layer
    if self.training and has_dropout(self):
        return type(self).forward(self, x)  # PEFT's: base and low-rank product, each by our ops
    return ops.linear(x, merged_weight(self), base.bias, chunks=base._rlkernel_chunks)


def _call(layer: Any, x: Tensor) -> Tensor:
    """A layer with whatever an adapter put around it, exact when its parts are: those that were put in after `apply`
    still run stock kernels."""
    for part in () if "forward" in layer.__dict__ else layer.modules():
        if isinstance(part, nn.Linear) and "_rlkernel_chunks" not in part.__dict__:
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise CallError(f"{kind} was put into the model after rlkernel_transformers.apply; call apply(model) again")
    return layer(x)


def _remember(self: Any, packed: Packed, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stores new keys and values in the caller's cache; returns all that the call attends to, packed."""
    window = self._rlkernel.windows[self.layer_idx]
    new = [packed.scatter(t).transpose(1, 2) for t in (k, v)]
    stored = packed.cache.update(*new, self.layer_idx)
    length = packed.past + packed.shape[1]
    if stored[0].shape[2] != length:
        reason = f"the window of {window} keys has dropped some" if window else "the cache is not the dynamic one"
        raise CallError(
            f"past_key_values returned {stored[0].shape[2]} keys of {length}: {reason}; generate with use_cache=False, "
            "or with rlkernel_transformers.remove(model)"
        )
    if packed.keys is None:
        return k, v
    return stored[0].transpose(1, 2)[packed.keys], stored[1].transpose(1, 2)[packed.keys]


# ---- decoder -------------------------------------------------------------------------------------


def decoder_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> BaseModelOutputWithPast:
    """Hidden states after the final norm [B, L, C], zero at padding; packed [T, C] for a caller that packed itself."""
    packed = kwargs.pop("rlkernel_packed", None)
    inside = packed is not None
    if not inside:
        packed = prepare(
            self, input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, None, kwargs
        )
    collect = _option(self, kwargs, "output_hidden_states")
    states: list[Tensor] = []
    x = self.embed_tokens(packed.gather(input_ids)) if inputs_embeds is None else packed.gather(inputs_embeds)
    residual = None
    for layer in self.layers[: self.config.num_hidden_layers]:
        if collect:
            states.append(x if residual is None else x + residual)
        x, residual = layer(x, residual, packed)
    hidden = self.norm(x, residual)[0]
    out = hidden if inside else packed.scatter(hidden)
    return BaseModelOutputWithPast(
        last_hidden_state=out,
        past_key_values=packed.cache,
        hidden_states=(*(packed.scatter(s) for s in states), packed.scatter(hidden)) if collect else None,
    )


def causal_lm_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutputWithPast | TokenLogprobs:
    """Logits in fp32, the accumulator of the head's chain, and the loss of `labels`.

    With labels in training mode the loss comes from the fused log-probability and logits are None, unless
    `skip_logits=False` is passed.
    """
    if "_rlkernel" not in self.model.__dict__:  # after `remove`, called by a wrapper that keeps this forward (TRL's)
        return type(self).forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
    score = kwargs.pop("rlkernel_score", None)
    skip_logits = kwargs.pop("skip_logits", None)
    if skip_logits is None:
        skip_logits = self.training and labels is not None
    shifted = kwargs.pop("shift_labels", None)
    asked = score
    if score is None and (labels is not None or shifted is not None):
        ignored = kwargs.get("ignore_index", IGNORED)
        shape = shape_of(input_ids, inputs_embeds)
        if shifted is None:
            check_targets("labels", labels, shape)
            assert labels is not None
            shifted = shift(labels, ignored)
        check_targets("shift_labels", shifted, shape)
        asked = Score(shifted)
        if ignored != IGNORED:
            asked = replace(asked, targets=asked.targets.masked_fill(asked.targets == ignored, IGNORED))
    packed = prepare(
        self.model, input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, asked, kwargs
    )
    inner = self.model(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        rlkernel_packed=packed,
        output_hidden_states=_option(self.model, kwargs, "output_hidden_states"),
    )
    hidden = inner.last_hidden_state  # [T, C]
    if score is not None:
        return score_tokens(hidden, head_weight(self.lm_head), packed, score)
    loss = None
    if asked is not None:
        loss = _loss(hidden, head_weight(self.lm_head), packed, asked, kwargs.get("num_items_in_batch"))
    logits = None
    if not skip_logits:
        states = packed.scatter(hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept, :])
    out = CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=inner.past_key_values, hidden_states=inner.hidden_states
    )
    return out if kwargs.get("return_dict", True) is not False else out.to_tuple()


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
) -> Packed:
    """The call as packed tokens, refused where it is not one that our ops compute.

    A cache is used where one is passed, or with an explicit `use_cache=True`; the default of the configuration, which
    would build one in every training forward, is not followed.
    """
    shape = shape_of(input_ids, inputs_embeds)
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    settings = decoder._rlkernel
    _refuse_context(given.device)
    if _option(decoder, kwargs, "output_attentions"):
        raise CallError("output_attentions=True: the attention op keeps no weights; leave it out, or remove(model)")
    cache = past_key_values
    if cache is None and use_cache:
        from transformers import DynamicCache

        cache = DynamicCache(config=decoder.config)
    if cache is not None and type(cache).__name__ != "DynamicCache":
        raise CallError(
            f"past_key_values is a {type(cache).__name__}; rlkernel fills a DynamicCache: leave cache_implementation "
            "out, or generate with rlkernel_transformers.remove(model)"
        )
    if "cache" in kwargs or "block_table" in kwargs:
        raise CallError(
            "continuous batching of transformers (paged attention) is not supported: turn "
            "use_transformers_continuous_batching off, or generate with rlkernel_transformers.remove(model)"
        )
    checkpointed = decoder.layers[0].gradient_checkpointing and decoder.training and torch.is_grad_enabled()
    if cache is not None and checkpointed:
        if cache.get_seq_length():
            raise CallError("past_key_values under gradient checkpointing: recomputing would fill the cache twice")
        cache = None
    packed = pack(
        shape,
        given.device,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cu_seqlens=kwargs.get("cu_seq_lens_q"),
        max_seqlen=kwargs.get("max_length_q"),
        cache=cache,
        targets=None if score is None else score.targets,
        rows=None if score is None else score.rows,
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


def _refuse_context(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        raise CallError(
            "autocast is active: it casts inside the ops and changes their bits. Load the model in bfloat16 and turn "
            "mixed precision off: bf16=False in TrainingArguments, mixed_precision='no' in accelerate"
        )


def _option(decoder: Any, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name, False) if value is None else value)


# ---- log-probabilities ---------------------------------------------------------------------------


def shift(labels: Tensor, ignored: int = IGNORED) -> Tensor:  # [B, L]
    """Labels moved one to the left: the target of each token is the next one."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)


def score_tokens(hidden: Tensor, weight: Tensor, packed: Packed, score: Score) -> TokenLogprobs:
    """Log-probabilities of the targets [B, L] from packed hidden states [T, C]."""
    scored = packed.scored
    chosen = hidden if scored.rows is None else hidden.index_select(0, scored.rows)
    targets = _of_scored(score.targets, scored)
    if scored.valid is not None:
        targets = targets.clamp_min(0)
    temperature = score.temperature
    if not isinstance(temperature, Tensor | int | float):
        raise CallError(f"temperature is {temperature!r}; expected a number or a tensor")
    if isinstance(temperature, Tensor):
        given = tuple(temperature.shape)
        if temperature.dtype != torch.float32:
            raise CallError(
                f"temperature is {temperature.dtype}; expected float32. FSDP2 casts it in a call unless its "
                "MixedPrecisionPolicy has cast_forward_inputs=False"
            )
        if temperature.dim() == 1 and temperature.shape[0] == packed.shape[0]:
            temperature = temperature[:, None]
        sizes = zip(reversed(temperature.shape), reversed(packed.shape), strict=False)
        if temperature.dim() > 2 or any(size not in (1, full) for size, full in sizes):
            raise CallError(
                f"temperature is {given}; expected a number, [B={packed.shape[0]}] or "
                f"[B={packed.shape[0]}, L={packed.shape[1]}]"
            )
        temperature = _of_scored(temperature.expand(packed.shape), scored)
    kept = score.kept
    if kept is not None and kept.dim() == 3:
        if kept.shape[:2] != packed.shape:
            raise CallError(
                f"kept is {tuple(kept.shape)}; expected [B={packed.shape[0]}, L={packed.shape[1]}, ceil(V/32)] int32, "
                "or [N, ceil(V/32)] for the scored targets"
            )
        kept = _of_scored(kept, scored)
    keep_probs = score.keep_probs
    if not score.statistics:
        result = ops.linear_logprob(chosen, weight, targets, temperature=temperature, kept=kept, keep_probs=keep_probs)
        extra: dict[str, Tensor] = {}
    else:
        result, extra = _with_statistics(chosen, weight, targets, temperature, kept, keep_probs)

    def back(values: Tensor) -> Tensor:
        if scored.valid is not None:
            values = torch.where(scored.valid, values, torch.zeros((), dtype=values.dtype, device=values.device))
        return values.view(packed.shape) if scored.places is None else place(values, scored.places, packed.shape)

    return TokenLogprobs(*(back(values) for values in result), **{name: back(v) for name, v in extra.items()})


def _with_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, kept: Tensor | None, keep_probs: bool
) -> tuple[ops.LogProb, dict[str, Tensor]]:
    """`ops.linear_logprob` with the mean of the logits, and whether the target is the largest one."""
    inverse = inverse_temperature("token_logprobs", temperature, hidden)
    kernels = torch.ops.rlkernel
    keep_probs = keep_probs and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if ops.is_stock():
        logits = ops.linear(hidden, weight, out_dtype=torch.float32)
        result = ops.logprob(logits, targets, temperature=temperature, kept=kept)
        top = logits.argmax(-1) == targets
    else:
        op = kernels.linear_logprob_probs if keep_probs else kernels.linear_logprob
        logp, entropy, lse, stats, *_ = op(hidden, weight, targets, inverse, kept)
        result = ops.LogProb(logp, entropy, lse)
        top = logp.detach() == -stats[:, 1]  # logp is (logit - largest logit) - stats[:, 1]
    with torch.no_grad():
        mean = (hidden.float() * torch.mean(weight, 0, dtype=torch.float32)).sum(-1)
        mean = mean if inverse is None else mean * inverse
    return result, {"mean_logit": mean, "top1": top}


def _of_scored(values: Tensor, scored: Scored) -> Tensor:  # [B, L, ...] -> [N, ...]
    flat = values.flatten(0, 1)
    return flat if scored.places is None else flat.index_select(0, scored.places)


def _loss(hidden: Tensor, weight: Tensor, packed: Packed, score: Score, items: Any) -> Tensor:
    """Mean negative log-probability of the scored targets, or their sum over `num_items_in_batch`."""
    logp = score_tokens(hidden, weight, packed, score).logp
    assert logp is not None
    if items is None:
        places, valid = packed.scored.places, packed.scored.valid
        items = valid.sum() if valid is not None else packed.positions.numel() if places is None else places.numel()
    return -logp.sum() / items


@dataclass
class Settings:
    """What the forwards of one applied model share."""

    config: Any  # rlkernel.models.ModelConfig
    heads: tuple[int, int, int]
    qk_norm: bool
    windows: tuple[int | None, ...]
    variant: str
    cos_sin: Tensor  # [P, D] fp32; no buffer of the model, which casts of the model would round

    def to(self, device: torch.device) -> None:
        """Moves the rope table to where the input is."""
        if self.cos_sin.device != device:
            self.cos_sin = self.cos_sin.to(device)
