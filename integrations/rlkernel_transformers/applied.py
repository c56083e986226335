"""`apply`, `remove`, `status`: replace the forwards of a transformers model, instance by instance, and report on it.

Classes, parameters and the state dict do not change. Each replaced forward is an attribute of its module, so a deep
copy of the model keeps it, and deleting the attribute restores the class's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlkernel import ops
from rlkernel.models import ModelConfig
from rlkernel.models.rope_table import rope_table
from rlkernel.models.vision_config import MultimodalConfig
from rlkernel.ops.checks import check_flag
from rlkernel_transformers import forwards, masters, support, tensor_parallel, vision
from rlkernel_transformers.adapters import check_mergeable, has_dropout
from rlkernel_transformers.attention import NAME
from rlkernel_transformers.calls import Score, shape_of
from rlkernel_transformers.forwards import Settings, TokenLogprobs, shift
from rlkernel_transformers.joined import join_storage, separate_storage
from rlkernel_transformers.media import rope_index
from rlkernel_transformers.packing import IGNORED, CallError, check, check_targets

_OWN = frozenset(
    {
        *(forwards.causal_lm_forward, forwards.head_forward, forwards.decoder_forward, forwards.embedding_forward),
        *(forwards.layer_forward, forwards.attention_forward, forwards.mlp_forward, forwards.norm_forward),
        *(forwards.linear_forward, forwards.merged_forward, vision.vision_forward),
        *(vision.multimodal_forward, vision.multimodal_lm_forward),
        *tensor_parallel.FORWARDS,
    }
)


def apply(
    model: nn.Module,
    *,
    tp_leaves: int = 1,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    attention_variant: str | None = None,
    adapters: str = "low-rank",
    lora_dropout: bool = False,
    join_weights: bool = True,
) -> nn.Module:
    """Makes a dense decoder of transformers compute with rlkernel's ops, under the contract.

    Hidden states, logits, log-probabilities and, without adapters, gradients have the bits of `rlkernel.models` for the
    same weights, and therefore those of rlkernel's engine and of vLLM with the plugin. Call it again after adding
    adapters or moving the model to another device.

    Args:
        model: Qwen3, Qwen2, Llama or Mistral `ForCausalLM`, Qwen2.5-VL or Qwen3-VL (dense)
            `ForConditionalGeneration`, or a wrapper of one (PEFT).
        tp_leaves: chunks of K in o_proj and down_proj, as in `ModelConfig`: must be equal in rollout and training.
        tp_group: tensor-parallel ranks, for training: each keeps its part of every weight except those of norms
            (`sharded_parameters`) and gets the whole batch. Its size divides tp_leaves, the numbers of heads, the
            channels and the vocabulary.
        sequence_parallel: with tp_group, each rank keeps the activations between layers, and computes their norms, for
            its share of the tokens only. It changes no bit.
        attention_variant: "split" or "fa3"; None: the process's.
        adapters: how LoRA layers are computed. "low-rank": base and low-rank product separately, as PEFT does.
            "merged": with the rounded merged weight, as an engine does that was sent `merged_weights(model)`.
        lora_dropout: accept adapters whose `lora_dropout` is not 0, for training that no rollout has to equal. A merged
            layer then computes base and low-rank product separately in training mode, and merged in eval mode.
        join_weights: move the q, k, v weights, and the gate, up weights, into one buffer each, so that a group is one
            product without a copy.

    Returns:
        The model it was given.

    Raises:
        UnsupportedModelError: the model, or a setting of it, cannot be computed exactly; the message names it.
    """
    found = support.find_model(model)
    if tp_group is None and tensor_parallel.is_sharded(found):
        raise support.UnsupportedModelError("the weights are sharded: call apply with the same tp_group")
    config = support.read_config(found)
    support.check_wrappers(model, adapters)
    support.check(found, config, lora_dropout=lora_dropout)
    variant = ops.current_attention_variant(attention_variant)
    decoder, multimodal = support.decoder_of(found), support.read_multimodal(found)
    weight = decoder.embed_tokens.weight
    support.check_dtype(weight.dtype)
    if weight.device.type != "meta":
        _check_attention(variant, config, weight)
    check_flag("apply", "sequence_parallel", sequence_parallel)
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel shares tokens between tensor-parallel ranks; pass tp_group too")
    if adapters not in ("low-rank", "merged"):
        raise ValueError(f"adapters is {adapters!r}; expected 'low-rank' or 'merged'")
    support.check_chunks(config, tp_leaves)
    ranks = 1
    if tp_group is not None:
        if multimodal is not None:
            raise support.UnsupportedModelError("tp_group with a vision-language model; leave it out")
        if variant != "split":
            raise support.UnsupportedModelError(f"attention_variant={variant!r} with tp_group; use 'split'")
        tensor_parallel.shard(found, config, tp_leaves, tp_group)
        ranks = tp_group.size()
    settings = _settings_of(config, multimodal, variant, ranks, weight.device)
    for module, forward, chunks in _replacements(found, tp_leaves // ranks):
        _replace_forward(module, forward)
        if isinstance(module, nn.Linear):
            module.__dict__["_rlkernel_chunks"] = chunks
    for module, forward in () if tp_group is None else tensor_parallel.replacements(found, tp_group, sequence_parallel):
        _replace_forward(module, forward)
    _replace_adapters(found, merged=adapters == "merged")
    for module in [found.model, decoder, *([] if multimodal is None else [found.model.visual])]:
        module._rlkernel = settings
    if multimodal is not None:
        found.model.get_rope_index = support.Method(rope_index, found.model)
    for layer in decoder.layers:
        layer.self_attn._rlkernel = settings
    for group in _joinable(decoder) if join_weights else ():
        join_storage(group)
    if "_rlkernel_stock_attention" not in found.__dict__:
        found._rlkernel_stock_attention = decoder.config._attn_implementation
    decoder.config._attn_implementation = NAME
    return model


def remove(model: nn.Module) -> nn.Module:
    """Restores every forward that `apply` replaced, and drops the fp32 gradient buffers. Returns the model."""
    found = support.find_model(model)
    if tensor_parallel.is_sharded(found):
        raise support.UnsupportedModelError("remove: the weights are sharded; load sharded_parameters into a new model")
    masters.drop(found)
    for module in found.modules():
        if _is_ours(module):
            _restore_forward(module)
        for name in ("_rlkernel", "_rlkernel_chunks", "get_rope_index"):
            module.__dict__.pop(name, None)
    decoder = support.decoder_of(found)
    for group in _joinable(decoder):
        separate_storage(group)
    if "_rlkernel_stock_attention" in found.__dict__:
        decoder.config._attn_implementation = found.__dict__.pop("_rlkernel_stock_attention")
    return model


@dataclass(frozen=True)
class Row:
    """One module: its name, its class, what computes it ("rlkernel", "adapter", "stock"), and a remark."""

    module: str
    kind: str
    runs: str
    remark: str = ""


@dataclass(frozen=True)
class Status:
    """What computes a model, module by module."""

    rows: list[Row]
    contract: str | None

    @property
    def exact(self) -> bool:
        """Whether every module runs on rlkernel."""
        return bool(self.rows) and all(row.runs != "stock" for row in self.rows)

    def __str__(self) -> str:
        width = max((len(row.module) for row in self.rows), default=0)
        kinds = max((len(row.kind) for row in self.rows), default=0)
        lines = [f"{r.module:{width}}  {r.kind:{kinds}}  {r.runs:8} {r.remark}".rstrip() for r in self.rows]
        replaced = sum(row.runs != "stock" for row in self.rows)
        lines.append(f"{replaced} of {len(self.rows)} modules run on rlkernel; contract {self.contract or 'none'}")
        return "\n".join(lines)


def status(model: nn.Module) -> Status:
    """What computes the model, module by module; `print(status(model))` is a table."""
    found = support.find_model(model)
    rows = []
    for name, module in found.named_modules():
        if isinstance(module, nn.Dropout | nn.Identity | nn.ModuleList | nn.ModuleDict) or not _computes(module):
            continue
        runs, remark = _runs(module)
        if name.startswith("model.visual.") and _is_ours(found.model.visual):
            runs, remark = "rlkernel", "in the encoder's forward"
        if runs == "rlkernel" and name.rpartition(".")[2] in _JOINED and support.has_hooks(module):
            remark = "has hooks, so the layers of its group are computed one by one, and their input gradients too"
        rows.append(Row(name or "(model)", type(module).__name__, runs, remark))
    settings = found.model.__dict__.get("_rlkernel")
    contract = None if settings is None else ops.attention_contract(settings.variant)
    return Status(rows, contract)


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor | None = None,  # [B, L]
    attention_mask: Tensor | None = None,  # [B, L]
    position_ids: Tensor | None = None,  # [B, L]
    *,
    labels: Tensor | None = None,  # [B, L]
    targets: Tensor | None = None,  # [B, L]
    temperature: float | Tensor = 1.0,  # or [B] or [B, L]
    kept: Tensor | None = None,  # [N, ceil(V/32)] or [B, L, ceil(V/32)] int32
    keep_probs: bool = False,
    statistics: bool = False,
    rows: Tensor | None = None,  # [N]
    vocabulary: int | None = None,
    **inputs: Any,
) -> TokenLogprobs:  # fields [B, L]
    """Log-probability and entropy of each token's target, from hidden states; neither pass holds a [B, L, V] tensor.

    `logp[b, t]` is that of `targets[b, t]` after `input_ids[b, : t + 1]`; zero, without gradient, where the target is
    -100 or the token is padding. It calls the model itself, so FSDP, DDP, PEFT and gradient checkpointing work.

    Args:
        model: a model that `apply` was called on, or a wrapper of one.
        input_ids, attention_mask, position_ids: as in transformers; padding may stand anywhere. Packed rows pass
            position_ids, or `cu_seq_lens_q` and `max_length_q`, which avoid a read back from the device.
        labels: the tokens themselves, -100 where nothing is scored, as for transformers' loss: the result at t is
            that of `labels[:, t + 1]`.
        targets: the next tokens, if the caller shifts. Pass at most one of both; the default is `labels=input_ids`.
        temperature, kept, keep_probs: as in `ops.linear_logprob`; kept holds one row per scored target in
            order, or one for each of [B, L].
        statistics: also `mean_logit` and `top1`.
        rows: packed tokens to score, if the caller knows them; not read back, so on a GPU they are not checked.
        vocabulary: number of ids, from 0, that can be sampled; the rest of the head's rows, often padding, have no
            probability. None: all.
        inputs: other arguments of the model's forward.

    Raises:
        CallError, ValueError: an argument does not fit; the message names it.
        TypeError: keep_probs or statistics is not True or False.
    """
    found = support.find_model(model)
    if "_rlkernel" not in found.model.__dict__:
        raise support.UnsupportedModelError("token_logprobs: call rlkernel_transformers.apply(model) first")
    if labels is not None and targets is not None:
        raise CallError("token_logprobs: labels and targets are both given; pass one")
    unknown = sorted(set(inputs) - _call_names(found))
    if unknown:
        raise CallError(
            f"token_logprobs: unknown argument {', '.join(unknown)}; its own are labels, targets, temperature, kept, "
            "keep_probs, statistics, rows and vocabulary"
        )
    check_flag("token_logprobs", "keep_probs", keep_probs)
    check_flag("token_logprobs", "statistics", statistics)
    shape = shape_of(input_ids, inputs.get("inputs_embeds"))
    if targets is None:
        if labels is None:
            labels = _labels_of(shape, input_ids, attention_mask, inputs.get("past_key_values"))
        check_targets("labels", labels, shape)
        targets = shift(labels)
    if vocabulary is not None and not 0 < vocabulary <= found.config.vocab_size:
        raise CallError(f"token_logprobs: vocabulary is {vocabulary}; expected 1 to {found.config.vocab_size}")
    score = Score(targets, temperature, kept, keep_probs, rows, statistics, vocabulary)
    out = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        rlkernel_score=score,
        **inputs,
    )
    assert isinstance(out, TokenLogprobs)
    if out.logp is None or out.logp.dtype != torch.float32:
        raise CallError(
            "token_logprobs: a wrapper cast the log-probabilities; set output_dtype=None in FSDP2's "
            "MixedPrecisionPolicy and mixed_precision='no' in accelerate"
        )
    return out


# Keyword arguments that the forwards take in addition to the model's own parameters: packed rows and options.
_OPTIONS = frozenset(
    {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch", "cache_position"),
    }
)


def _labels_of(shape: tuple[int, int], input_ids: Tensor | None, attention_mask: Tensor | None, cache: Any) -> Tensor:
    """The input ids as labels, without those of padding."""
    if input_ids is None:
        raise CallError("token_logprobs: inputs_embeds has no next tokens; pass labels or targets")
    labels = input_ids.long()
    if attention_mask is None:
        return labels
    check(shape, attention_mask, None, None, None, cache)
    return labels.masked_fill(attention_mask[:, -shape[1] :] == 0, IGNORED)


def _call_names(model: Any) -> frozenset[str]:
    """Names of keyword arguments that a call of the model accepts."""
    return _OPTIONS | inspect.signature(type(model).forward).parameters.keys() - {"self", "kwargs"}


def _settings_of(
    config: ModelConfig, multimodal: MultimodalConfig | None, variant: str, ranks: int, device: torch.device
) -> Settings:
    """Settings of the forwards on one of `ranks` tensor-parallel ranks."""
    place = torch.device("cpu") if device.type == "meta" else device
    return Settings(
        config=config,
        heads=(config.num_heads // ranks, config.num_kv_heads // ranks, config.num_kv_heads // ranks),
        qk_norm=config.family.qk_norm,
        windows=config.windows,
        variant=variant,
        cos_sin=rope_table(config).to(place),
        vision=None if multimodal is None else multimodal.vision,
        axes=None if multimodal is None else torch.tensor(multimodal.axes, device=place),
    )


def _check_attention(variant: str, config: ModelConfig, weight: Tensor) -> None:
    """Raises VariantError unless the attention variant runs for this model on the weight's device."""
    ops.check_attention_variant(
        variant,
        weight.device,
        weight.dtype,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=next((window for window in config.windows if window is not None), None),
    )


# ---- replaced forwards ---------------------------------------------------------------------------


def _replacements(model: Any, tp_leaves: int) -> Iterator[tuple[nn.Module, Any, int]]:
    """(module, new forward, chunks of K) of every replaced module."""
    decoder = support.decoder_of(model)
    has_vision = decoder is not model.model
    yield model, vision.multimodal_lm_forward if has_vision else forwards.causal_lm_forward, 1
    if has_vision:
        yield model.model, vision.multimodal_forward, 1
        yield model.model.visual, vision.vision_forward, 1
    yield model.lm_head, forwards.head_forward, 1
    yield decoder, forwards.decoder_forward, 1
    yield decoder.embed_tokens, forwards.embedding_forward, 1
    yield decoder.norm, forwards.norm_forward, 1
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer, forwards.layer_forward, 1
        yield attention, forwards.attention_forward, 1
        yield mlp, forwards.mlp_forward, 1
        yield layer.input_layernorm, forwards.norm_forward, 1
        yield layer.post_attention_layernorm, forwards.norm_forward, 1
        for name in ("q_norm", "k_norm"):
            if getattr(attention, name, None) is not None:
                yield getattr(attention, name), forwards.norm_forward, 1
        for block in (attention, mlp):
            for name, child in block.named_children():
                chunks = tp_leaves if name in ("o_proj", "down_proj") else 1
                for linear in child.modules():
                    if isinstance(linear, nn.Linear):
                        # Only the base of an adapter is a chunked layer, not its low-rank products.
                        base = linear is child or linear is getattr(child, "base_layer", None)
                        yield linear, forwards.linear_forward, chunks if base else 1


def _replace_adapters(model: Any, *, merged: bool) -> None:
    """Gives LoRA layers the forward with a merged weight, or their own forward back."""
    for name, module in model.named_modules():
        if merged and hasattr(module, "base_layer"):
            check_mergeable(name, module)
            _replace_forward(module, forwards.merged_forward)
            module.__dict__["_rlkernel_merged"] = True
        elif "_rlkernel_merged" in module.__dict__:
            _restore_forward(module)


_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def _joinable(decoder: Any) -> Iterator[tuple[nn.Linear, ...]]:
    """Groups of plain linear layers with the same input: query, key and value, or gate and up."""
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if all(type(linear) is nn.Linear for linear in group):
                yield group


def _forward_attribute(module: nn.Module) -> str:
    """Attribute with the module's forward: accelerate's hooks (cpu_offload, device_map) replace `forward` by a function
    that calls `_old_forward`."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _replace_forward(module: nn.Module, forward: Any) -> None:
    name = _forward_attribute(module)
    before = module.__dict__.get(name)
    if before is not None and getattr(before, "__func__", None) not in _OWN:
        module.__dict__["_rlkernel_earlier_forward"] = before
    setattr(module, name, support.Method(forward, module))


def _restore_forward(module: nn.Module) -> None:
    name = _forward_attribute(module)
    del module.__dict__[name]
    module.__dict__.pop("_rlkernel_merged", None)
    before = module.__dict__.pop("_rlkernel_earlier_forward", None)
    if before is None and name != "forward":  # accelerate's hook was added after `apply` and needs a forward to call
        before = MethodType(type(module).forward, module)
    if before is not None:
        setattr(module, name, before)


def _computes(module: nn.Module) -> bool:
    """Whether the module's own forward does arithmetic."""
    name = type(module).__name__
    return bool(
        isinstance(module, nn.Linear | nn.Embedding)
        or name.endswith(("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm"))
        or hasattr(module, "base_layer")
        or any(True for _ in module.parameters(recurse=False))
    )


def _runs(module: nn.Module) -> tuple[str, str]:
    if _is_ours(module):
        if "_rlkernel_merged" in module.__dict__:
            separate = "; separate in training mode, with dropout" if has_dropout(module) else ""
            return "adapter", f"base and low-rank product merged and rounded{separate}"
        chunks = module.__dict__.get("_rlkernel_chunks", 1)
        return "rlkernel", f"{chunks} chunks of K" if chunks > 1 else ""
    if hasattr(module, "base_layer"):
        stale = [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and not _is_ours(m)]
        if stale:
            return "stock", f"{', '.join(stale)} was added after apply(model); call it again"
        return "adapter", "base and low-rank products by rlkernel, added by torch elementwise"
    foreign = module.__dict__.get("forward")
    if foreign and inspect.unwrap(getattr(foreign, "__func__", foreign), stop=_OWN.__contains__) in _OWN:
        return "rlkernel", "inside a wrapper of its forward"  # accelerate's mixed precision
    remark = getattr(foreign, "rlkernel", None)  # rlkernel_trl describes its wrapper of the model's forward here
    if remark is not None and "_rlkernel" in module.model.__dict__:
        return "rlkernel", remark
    return "stock", f"its forward is {getattr(foreign, '__qualname__', foreign)}" if foreign is not None else ""


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get(_forward_attribute(module)), "__func__", None) in _OWN
