"""The forwards that `apply` sets on a model's modules: transformers' interface, the arithmetic of `rlkernel.models`.

All layers compute packed tokens [T, ...] and add the residual inside the norms, so forward and backward round where
`rlkernel.models` does. Each function becomes the `forward` of one instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from rlkernel import ops
from rlkernel.ops.linear_logprob import linear_logprob_top1
from rlkernel.ops.logprob import inverse_temperature
from rlkernel.parallel.vocabulary import parallel_linear_logprob
from rlkernel_transformers import leaf_gradients
from rlkernel_transformers.adapters import has_dropout, merged_weight, unsharded
from rlkernel_transformers.attention import attention_weights
from rlkernel_transformers.caches import update_cache
from rlkernel_transformers.calls import Score, entry, option, prepare, shape_of
from rlkernel_transformers.joined import joined_linear
from rlkernel_transformers.media import MEDIA, prepare_call
from rlkernel_transformers.packing import IGNORED, CallError, PackedCall, Scored, check_targets, place
from rlkernel_transformers.support import check_call, has_hooks


@dataclass
class TokenLogprobs(ModelOutput):
    """Result of `token_logprobs`, in the shape of the targets; zero where nothing is scored.

    Attributes:
        logp: fp32 log-probability of each target.
        entropy: fp32 entropy of each token's distribution.
        lse: fp32 log-sum-exp of the logits over the temperature, not differentiable.
        mean_logit: fp32 mean of the logits over the temperature. top1: bool, whether the target has the largest logit.
            Both without gradient, and None unless `statistics` was set.
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None
    top1: Tensor | None = None


def used(module: Any, name: str = "weight") -> Any:
    """A parameter of a module, or None, as its ops take it: whole, and with an fp32 gradient after `main_grads`."""
    parameter = getattr(module, name)
    if parameter is None:
        return None
    parameter = unsharded(parameter)
    return leaf_gradients.uses([module], [parameter])[0]


def rounded(weight: Any, dtype: torch.dtype) -> Any:
    """An fp32 parameter rounded to the dtype of a layer under autocast; any other unchanged."""
    if getattr(weight, "dtype", dtype) != torch.float32 or dtype == torch.float32:
        return weight
    out = weight.to(dtype)
    if getattr(weight, "main_grad", None) is not None and torch.is_grad_enabled():
        out.main_grad = weight.main_grad
    return out


# ---- layers --------------------------------------------------------------------------------------


def linear_forward(self: Any, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
    bias = rounded(used(self, "bias"), x.dtype)
    return ops.linear(x, rounded(used(self), x.dtype), bias, chunks=self._rlkernel_chunks)


def head_forward(self: Any, x: Tensor, score: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
    """Logits, [..., C] -> [..., V] fp32; or `score(x, weight)`."""
    weight = rounded(head_weight(self), x.dtype)
    return ops.linear(x, weight, out_dtype=torch.float32) if score is None else score(x, weight)


def through_head(head: Any, hidden: Tensor, score: Callable[[Tensor, Any], Any]) -> Any:
    """`score(hidden, weight)` within a call of the head, so that its hooks run: those of FSDP2 gather the weight.

    If another library's hook expects the head's output to be logits, `score` gets the head in place of its weight.
    """
    _check_head(head)
    after = (*head._forward_hooks.values(), *head._backward_hooks.values(), *head._backward_pre_hooks.values())
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in after):
        return score(hidden, head)
    return head(hidden, score=score)


def _check_head(head: Any) -> None:
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise CallError(f"the head is a {kind}; rlkernel does not support an adapter on lm_head")


def head_weight(head: Any) -> Tensor:  # [V, C]
    """Weight of the head. A tied one with a `main_grad` gets an alias with its own buffer, `head_main_grad`."""
    _check_head(head)
    weight: Tensor = used(head)
    grad = getattr(weight, "head_main_grad", None)
    if grad is None or not torch.is_grad_enabled():
        return weight
    alias = weight.view_as(weight)
    alias.main_grad = grad  # type: ignore[attr-defined]
    return alias


def first_rows(weight: Tensor, rows: int) -> Tensor:  # [V, C] -> [rows, C]
    """The first rows of a weight, whose gradient is accumulated onto the same rows of its `main_grad`."""
    out = weight[:rows]
    grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
    if grad is not None:
        out.main_grad = grad[:rows]  # type: ignore[attr-defined]
    return out


def embedding_forward(self: Any, ids: Tensor, lookup: Callable[[Tensor, Tensor], Tensor] = ops.embedding) -> Tensor:
    out = lookup(ids, used(self))
    if self.padding_idx is None or not torch.is_grad_enabled():
        return out
    # transformers does not train this row. It starts at zero, where a norm's gradient is as large as 1 / sqrt(eps).
    return torch.where((ids == self.padding_idx).unsqueeze(-1), out.detach(), out)


def norm_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight = rounded(used(self), x.dtype)
    if residual is None:
        return ops.rms_norm(x, weight, self.variance_epsilon)
    return ops.rms_norm(x, weight, self.variance_epsilon, residual)


def mlp_forward(self: Any, x: Tensor) -> Tensor:  # [T, C]
    layers = (self.gate_proj, self.up_proj)
    gate_up = _joined(layers, x)
    if gate_up is None:
        gate_up = torch.cat([_call(layer, x) for layer in layers], dim=-1)
    return _call(self.down_proj, ops.swiglu(gate_up))


def attention_forward(self: Any, x: Tensor, packed: PackedCall) -> Any:
    """Output [T, C], with the attention weights [B, H, L, S] if `packed.weights`."""
    settings = self._rlkernel
    layers = (self.q_proj, self.k_proj, self.v_proj)
    qkv = _joined(layers, x)
    if qkv is not None:
        q, k, v = qkv.view(x.shape[0], -1, self.head_dim).split(settings.heads, dim=1)
    else:
        q, k, v = (_call(layer, x).view(x.shape[0], -1, self.head_dim) for layer in layers)
    if settings.qk_norm:
        q, k = self.q_norm(q), self.k_norm(k)
    rope = packed.rope
    if rope is None:
        q, k = ops.rope(q, k, packed.positions, settings.cos_sin)
    else:
        q, k = ops.rope(q, k, rope.rows, rope.table)
    keys = None
    if packed.cache is not None or packed.pages is not None:
        k, v, keys = update_cache(self, packed, k, v)
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
    out = _call(self.o_proj, out.reshape(x.shape[0], -1))
    if not packed.weights:
        return out
    keys = packed.scatter(k).transpose(1, 2) if keys is None else keys
    return out, attention_weights(packed, q, keys, settings.windows[self.layer_idx])


def layer_forward(self: Any, x: Tensor, residual: Tensor | None, packed: PackedCall) -> tuple[Tensor, ...]:
    """Output of the MLP and the residual [T, C], with the attention weights if `packed.weights`."""
    if residual is None:
        residual, x = x, self.input_layernorm(x)
    else:
        x, residual = self.input_layernorm(x, residual)
    x = self.self_attn(x, packed)
    weights: list[Tensor] = []
    if packed.weights:
        x, *weights = x
    x, residual = self.post_attention_layernorm(x, residual)
    return self.mlp(x), residual, *weights


def _joined(layers: tuple[Any, ...], x: Tensor) -> Tensor | None:
    """The layers as one product; None if one has hooks, or is more than a weight and a bias."""
    weights, biases = [], []
    for layer in layers:
        if has_hooks(layer):
            return None
        if type(layer) is nn.Linear:
            weights.append(layer.weight)
        elif "_rlkernel_merged" in layer.__dict__ and not (layer.training and has_dropout(layer)):
            weights.append(merged_weight(layer))
            layer = layer.base_layer
        else:
            return None
        if layer.bias is not None:
            biases.append(layer.bias)
    weights, biases = leaf_gradients.uses(layers, weights), leaf_gradients.uses(layers, biases)
    return joined_linear(x, weights, biases, layers[0].__dict__.get("_rlkernel_group"))


def merged_forward(self: Any, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
    base = self.base_layer
    if self.training and has_dropout(self):
        return type(self).forward(self, x)  # PEFT's own: base and low-rank product, each by our ops
    weight = rounded(merged_weight(self), x.dtype)
    bias = None if base.bias is None else rounded(base.bias, x.dtype)
    return ops.linear(x, weight, bias, chunks=base._rlkernel_chunks)


def _call(layer: Any, x: Tensor) -> Tensor:
    """A layer, or an adapter around it. Raises CallError for a layer added after `apply`, which runs stock kernels."""
    for part in () if "forward" in layer.__dict__ else layer.modules():
        if isinstance(part, nn.Linear) and "_rlkernel_chunks" not in part.__dict__:
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise CallError(f"{kind} was put into the model after rlkernel_transformers.apply; call apply(model) again")
    return layer(x)


# ---- decoder -------------------------------------------------------------------------------------


@entry
def decoder_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> BaseModelOutputWithPast | tuple[Any, ...]:
    """Hidden states after the final norm [B, L, C], zero at padding; packed [T, C] if `rlkernel_packed` is passed.

    States of `output_hidden_states` are scattered to the caller's shape and gathered again, so they receive gradients.
    """
    packed = kwargs.pop("rlkernel_packed", None)
    is_packed = packed is not None
    if not is_packed:
        packed = prepare(
            self, input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, None, kwargs
        )
    layers = self.layers[: self.config.num_hidden_layers]
    wanted = option(self, kwargs, "output_hidden_states")
    by_layer = isinstance(wanted, list | tuple | set)  # indices of layers; layer i returns state i + 1
    chosen = {i + 1 for i in wanted} if by_layer else set(range(len(layers) + 1)) if wanted else set()
    states: dict[int, Tensor] = {}
    attentions: list[Tensor] = []

    def through(i: int, x: Tensor) -> Tensor:  # [T, C]
        if i not in chosen:
            return x
        states[i] = packed.scatter(x)
        return packed.gather(states[i])

    embeds = kwargs.pop("rlkernel_embeds", None)
    x = through(0, _embed(self, packed, input_ids, inputs_embeds) if embeds is None else embeds)
    residual = None
    for i, layer in enumerate(layers):
        if i in chosen and residual is not None:
            x = through(i, x + residual)
            residual = torch.full_like(x, -0.0)  # x + -0.0 has the bits of x, and the fused norm's backward stays
        x, residual, *weights = layer(x, residual, packed)
        attentions += weights
        added = None if packed.deepstack is None else packed.deepstack.after(i, x)
        if added is not None:
            x, residual = x + residual, added  # the next norm adds them
    hidden = through(len(layers), self.norm(x, residual)[0])
    out = hidden if is_packed else states[len(layers)] if len(layers) in states else packed.scatter(hidden)
    found = tuple(states.get(i) for i in range(1 if by_layer else 0, len(layers) + 1))
    result = BaseModelOutputWithPast(
        last_hidden_state=out,
        past_key_values=packed.cache,
        hidden_states=found if wanted else None,
        attentions=tuple(attentions) if packed.weights else None,
    )
    return result if is_packed or option(self, kwargs, "return_dict") else result.to_tuple()


def _embed(
    decoder: Any, packed: PackedCall, input_ids: Tensor | None, inputs_embeds: Tensor | None
) -> Tensor:  # [T, C]
    embedding = decoder.embed_tokens
    if inputs_embeds is not None:
        expected = inputs_embeds.dtype if isinstance(embedding.weight, DTensor) else embedding.weight.dtype
        if packed.dtype is None and inputs_embeds.dtype != expected:
            raise CallError(f"inputs_embeds is {inputs_embeds.dtype}; expected {expected}, the dtype of the model")
        x = packed.gather(inputs_embeds)
    elif embedding._forward_hooks or embedding._forward_pre_hooks:  # NEFTune's hook counts the tokens of a row
        x = packed.gather(embedding(input_ids))
    else:
        ids = packed.gather(input_ids)  # type: ignore[arg-type]
        x = embedding(ids if packed.pages is None else ids.long())
    return x if packed.dtype is None else x.to(packed.dtype)


@entry
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
    """Logits in fp32, the unrounded accumulator of the head, and the loss of `labels`.

    With labels in training mode the loss comes from the fused log-probability and logits are None, unless
    `skip_logits=False` is passed.
    """
    if "_rlkernel" not in self.model.__dict__:  # after `remove`, a wrapper (TRL's) may still call this forward
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
    check_call(self)
    score = kwargs.get("rlkernel_score")
    skip_logits = kwargs.pop("skip_logits", None)
    if skip_logits is None:
        skip_logits = self.training and labels is not None
    shifted = kwargs.pop("shift_labels", None)
    wanted = score
    if score is None and (labels is not None or shifted is not None):
        shape = shape_of(input_ids, inputs_embeds)
        wanted = Score(_targets_of(labels, shifted, shape, kwargs.get("ignore_index", IGNORED)))
    if score is not None and inputs_embeds is not None and inputs_embeds.shape[1] > score.targets.shape[-1]:
        raise CallError(
            f"token_logprobs: the model computes {inputs_embeds.shape[1]} tokens per row and {score.targets.shape[-1]} "
            "have targets, because PEFT prepends a learned prompt to each row: call the model itself, with labels"
        )
    media = {name: kwargs.pop(name) for name in MEDIA if name in kwargs}
    given = (input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, wanted, kwargs, media)
    packed = prepare_call(self, *given)
    inner = self.model(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        rlkernel_packed=packed,
        **media,
        output_hidden_states=score is None and option(self.model, kwargs, "output_hidden_states"),
    )
    hidden = inner.last_hidden_state  # [T, C]
    if score is not None:
        found: TokenLogprobs = through_head(self.lm_head, hidden, partial(score_tokens, packed=packed, score=score))
        return found
    loss = None
    if wanted is not None:
        items = kwargs.get("num_items_in_batch")
        loss = through_head(self.lm_head, hidden, partial(_loss, packed=packed, score=wanted, items=items))
    logits = None
    if not skip_logits:
        states = packed.scatter(hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept, :])
    out = CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=inner.past_key_values,
        hidden_states=inner.hidden_states,
        attentions=inner.attentions,
    )
    return out if option(self, kwargs, "return_dict") else out.to_tuple()


def _targets_of(labels: Tensor | None, shifted: Tensor | None, shape: tuple[int, int], ignored: int) -> Tensor:
    """Targets [B, L] of the loss from labels, or from labels that the caller has shifted; IGNORED where none is."""
    if shifted is None:
        check_targets("labels", labels, shape)
        assert labels is not None
        shifted = shift(labels, ignored)
    check_targets("shift_labels", shifted, shape)
    return shifted if ignored == IGNORED else shifted.masked_fill(shifted == ignored, IGNORED)


# ---- log-probabilities ---------------------------------------------------------------------------


def shift(labels: Tensor, ignored: int = IGNORED) -> Tensor:  # [B, L]
    """Labels shifted left by one: the target of each token is the next one."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)


def score_tokens(
    hidden: Tensor, weight: Tensor | nn.Module, packed: PackedCall, score: Score, group: ProcessGroup | None = None
) -> TokenLogprobs:
    """Log-probabilities of the targets [B, L] from packed hidden states [T, C] and the head's weight, or the head.

    With a group, the weight is this rank's part of the vocabulary.
    """
    weight = rounded(weight, hidden.dtype)
    if group is not None and (score.statistics or score.keep_probs):
        raise CallError("token_logprobs: statistics and keep_probs are not available with tp_group; leave them out")
    if score.vocabulary is not None and isinstance(weight, Tensor) and group is None:
        weight = first_rows(weight, score.vocabulary)
    scored = packed.scored
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
    extra: dict[str, Tensor] = {}
    chosen = hidden
    if scored.rows is not None and (score.statistics or isinstance(weight, nn.Module)):
        chosen = hidden.index_select(0, scored.rows)
    if isinstance(weight, nn.Module):
        logits = weight(chosen)[..., : score.vocabulary]
        result = ops.logprob(logits, targets, temperature=temperature, kept=kept)
        extra = _statistics_of(logits, targets, temperature) if score.statistics else {}
    elif score.statistics:
        result, extra = _with_statistics(chosen, weight, targets, temperature, kept, keep_probs)
    elif group is not None:
        options: dict[str, Any] = {"rows": scored.rows, "kept": kept, "vocabulary": score.vocabulary}
        result = parallel_linear_logprob(hidden, weight, targets, group, temperature=temperature, **options)
    else:
        result = ops.linear_logprob(
            hidden, weight, targets, rows=scored.rows, temperature=temperature, kept=kept, keep_probs=keep_probs
        )

    def back(values: Tensor) -> Tensor:
        if scored.valid is not None:
            values = torch.where(scored.valid, values, torch.zeros((), dtype=values.dtype, device=values.device))
        return values.view(packed.shape) if scored.places is None else place(values, scored.places, packed.shape)

    return TokenLogprobs(*(back(values) for values in result), **{name: back(v) for name, v in extra.items()})


def _with_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, kept: Tensor | None, keep_probs: bool
) -> tuple[ops.LogProb, dict[str, Tensor]]:
    """`ops.linear_logprob` with the mean of the logits, and whether the target has the largest one."""
    inverse = inverse_temperature("token_logprobs", temperature, hidden)
    result, top1 = linear_logprob_top1(hidden, weight, targets, inverse, kept, keep_probs)
    with torch.no_grad():
        mean = (hidden.float() * torch.mean(weight, 0, dtype=torch.float32)).sum(-1)
        mean = mean if inverse is None else mean * inverse
    return result, {"mean_logit": mean, "top1": top1}


@torch.no_grad()
def _statistics_of(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> dict[str, Tensor]:
    inverse = inverse_temperature("token_logprobs", temperature, logits)
    mean = logits.mean(-1)
    return {"mean_logit": mean if inverse is None else mean * inverse, "top1": logits.argmax(-1) == targets}


def _of_scored(values: Tensor, scored: Scored) -> Tensor:  # [B, L, ...] -> [N, ...]
    flat = values.flatten(0, 1)
    return flat if scored.places is None else flat.index_select(0, scored.places)


def _loss(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    packed: PackedCall,
    score: Score,
    items: Any,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Sum of the scored targets' negative log-probabilities over `items`, or over their number."""
    logp = score_tokens(hidden, weight, packed, score, group).logp
    assert logp is not None
    if items is None:
        places, valid = packed.scored.places, packed.scored.valid
        items = valid.sum() if valid is not None else packed.positions.numel() if places is None else places.numel()
    return -logp.sum() / items


@dataclass
class Settings:
    """Settings that the forwards of one model share."""

    config: Any  # rlkernel.models.ModelConfig
    heads: tuple[int, int, int]
    qk_norm: bool
    windows: tuple[int | None, ...]
    variant: str
    cos_sin: Tensor  # [P, D] fp32; not a buffer, because a cast of the model would round it
    vision: Any = None  # rlkernel.models.vision_config.VisionConfig of a vision-language model
    axes: Tensor | None = None  # [D/2] int64 of its positions, by pair of channels

    def to(self, device: torch.device) -> None:
        """Moves the rope table to the input's device."""
        if self.cos_sin.device != device:
            self.cos_sin = self.cos_sin.to(device)
            self.axes = None if self.axes is None else self.axes.to(device)
