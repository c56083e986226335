"""The forward, built from rlkernel.ops, that prefill, chunked prefill, decode, scoring and training share.

A token's hidden state therefore has one definition. The two kinds of batch differ only in how
`Attention` reads the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlkernel import ops
from rlkernel.models.batch import PackedBatch, PagedBatch
from rlkernel.models.config import ModelConfig, preset, to_hf
from rlkernel.models.rope_table import rope_table


class Linear(nn.Module):
    """Weight [N, K] and optional bias [N]; `chunks` as in `ops.linear`."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, chunks: int = 1) -> None:
        super().__init__()
        self.chunks = chunks
        self.weight = nn.Parameter(torch.empty(n, k, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return ops.linear(x, self.weight, self.bias, chunks=self.chunks)


class Weight(nn.Module):
    """A weight without a forward: [C] of a norm, [V, C] of the embedding and of an untied head."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


@dataclass
class Recomputed:
    """What a layer with activation checkpointing keeps from its first run, and its recomputation reads.

    Attributes:
        attention: result of `ops.attention`, so that the backward does not run attention's forward again: at long
            lengths it takes longer than the rest of the layer, and its output is as large as a layer's input.
    """

    attention: tuple[Tensor, Tensor] | None = None


class Attention(nn.Module):
    """Fused qkv projection [(H + 2 HK) D, C], optional q/k norm, rope, attention, output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.eps = layer, config.windows[layer], config.rms_norm_eps
        self.variant = ops.current_attention_variant()
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        dtype, c = config.dtype, config.hidden_size
        self.qkv_proj = Linear(sum(self.heads) * self.head_dim, c, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(c, width, dtype, bias=config.attention_bias, chunks=config.tp_leaves)
        self.q_norm = Weight(config.head_dim, dtype=dtype) if config.family.qk_norm else None
        self.k_norm = Weight(config.head_dim, dtype=dtype) if config.family.qk_norm else None

    def forward(
        self, x: Tensor, cos_sin: Tensor, batch: PackedBatch | PagedBatch, recomputed: Recomputed | None = None
    ) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], sum(self.heads), self.head_dim)
        q, k, v = qkv.split(self.heads, dim=1)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        if norms is not None and isinstance(batch, PagedBatch):  # one kernel from the projection to the cache
            cache = batch.kv_cache.k[self.layer], batch.kv_cache.v[self.layer], batch.slots
            q = ops.qk_norm_rope_store(q, k, v, *norms, self.eps, batch.positions, cos_sin, *cache)
            return self.o_proj(self._attend_pages(q, batch).reshape(x.shape[0], -1))
        if norms is not None:
            q, k = ops.rms_norm(q, norms[0], self.eps), ops.rms_norm(k, norms[1], self.eps)
        q, k = ops.rope(q, k, batch.positions, cos_sin)
        if isinstance(batch, PagedBatch):
            ops.store_kv_(batch.kv_cache.k[self.layer], batch.kv_cache.v[self.layer], k, v, batch.slots)
            out = self._attend_pages(q, batch)
        else:
            out = self._attend(q, k, v, batch, recomputed)
        return self.o_proj(out.reshape(x.shape[0], -1))

    def _attend(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, HK, D]
        v: Tensor,  # [T, HK, D]
        batch: PackedBatch,
        recomputed: Recomputed | None,
    ) -> Tensor:  # [T, H, D]
        """Causal attention over the packed keys."""
        known = None if recomputed is None else recomputed.attention
        options: dict[str, Any] = {"window": self.window, "variant": self.variant, "result": known}
        out, lse = ops.attention(q, k, v, batch.cu_seqlens, max_seqlen_q=batch.max_seqlen, **options)
        if recomputed is not None:
            recomputed.attention = out.detach(), lse.detach()
        return out

    def _attend_pages(self, q: Tensor, batch: PagedBatch) -> Tensor:  # [T, H, D] -> [T, H, D]
        """Causal attention over the cache, which holds the batch's keys and values."""
        out, _ = ops.paged_attention(
            q,
            batch.kv_cache.k[self.layer],
            batch.kv_cache.v[self.layer],
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            window=self.window,
            variant=self.variant,
            shared=batch.shared,
        )
        return out


class MLP(nn.Module):
    """Fused gate and up projection [2 F, C], swiglu, down projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, f = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(2 * f, c, config.dtype)
        self.down_proj = Linear(c, f, config.dtype, chunks=config.tp_leaves)

    def forward(self, x: Tensor) -> Tensor:  # [T, C]
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Layer(nn.Module):
    """One decoder layer. The norms add the residual stream, with the same rounding as transformers."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(config.hidden_size, dtype=config.dtype)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Weight(config.hidden_size, dtype=config.dtype)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor,
        batch: PackedBatch | PagedBatch,
        recomputed: Recomputed | None = None,
    ) -> tuple[Tensor, Tensor]:
        weight = self.input_layernorm.weight
        if residual is None:
            residual, x = x, ops.rms_norm(x, weight, self.eps)
        else:
            x, residual = ops.rms_norm(x, weight, self.eps, residual)
        x = self.self_attn(x, cos_sin, batch, recomputed)
        x, residual = ops.rms_norm(x, self.post_attention_layernorm.weight, self.eps, residual)
        return self.mlp(x), residual


@dataclass(frozen=True)
class Inputs:
    """What the layers compute with.

    Attributes:
        x: [T, C] embeddings.
        batch: its `positions` are rows of `cos_sin`.
        cos_sin: [P, D] fp32.
        added: [T, C] each, added to the hidden states after the first layers (deepstack).
    """

    x: Tensor
    batch: PackedBatch | PagedBatch
    cos_sin: Tensor
    added: tuple[Tensor, ...] = ()


class Backbone(nn.Module):
    """The decoder of any family in `families.FAMILIES` up to its final norm, without a head.

    Parameter names are Hugging Face's without the leading `model.`, with q, k, v and gate, up fused; `checkpoint.py`
    translates. Parameters are uninitialised after construction: use `from_config`, or `load_model`.

    Attributes:
        head: name of the head's tensor in a Hugging Face checkpoint.
        kind: ending of the class's names in transformers.
        config: the configuration.
        cos_sin: [P, D] fp32 table of rope, the same bits on every device.
        gradient_checkpointing: recompute each layer in the backward instead of keeping its activations, except the
            result of attention; the recomputed bits are the same, so gradients do not change.
    """

    head: ClassVar[str]
    kind: ClassVar[str]
    cos_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        v, c, dtype = config.vocab_size, config.hidden_size, config.dtype
        self.embed_tokens = Weight(v, c, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = Weight(c, dtype=dtype)
        # On the meta device the table would have no values; it stays on the CPU until the parameters move.
        place = "cpu" if self.device.type == "meta" else self.device
        self.register_buffer("cos_sin", rope_table(config).to(place), persistent=False)

    @classmethod
    def from_config(
        cls, config: ModelConfig | str, seed: int = 0, device: torch.device | str = "cpu", std: float = 0.02
    ) -> Self:
        """A model with random weights: matrices from a normal distribution, norms one, biases zero.

        Args:
            config: configuration, or the name of a preset.
            seed: of the CPU generator that draws all weights in fp32, so that the device does not change them.
            device: where the model goes.
            std: standard deviation of the matrices.
        """
        config = preset(config) if isinstance(config, str) else config
        with torch.device(device):
            model = cls(config)
        model.randomize_(seed, std)
        return model

    def randomize_(self, seed: int, std: float) -> None:
        """Random weights, as `from_config` makes them."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    draw = torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator)
                    parameter.copy_(draw)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # The table follows the device only, because `model.to(bfloat16)` would round it.
        table = self._buffers.pop("cos_sin", None)
        super()._apply(fn, recurse)
        if table is not None:
            self.register_buffer("cos_sin", table.to(self.embed_tokens.weight.device), persistent=False)
            self.config = replace(self.config, dtype=self.dtype)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.embed_tokens.weight.device

    @property
    def attention_variant(self) -> str:
        """Variant of attention in every layer.

        Engine and trainer share the model object, so a rollout and its training forward have the same variant.
        """
        return next(attention.variant for attention in self._attentions())

    def set_attention_variant(self, variant: str, page_size: int | None = None) -> None:
        """Sets the variant of attention, "split" or "fa3"; existing engines of this model then raise an error.

        Args:
            page_size: page size of the engine's cache, which is part of the certification; None without an engine.

        Raises:
            ValueError: the name is unknown.
            VariantError: the model cannot run the variant on its device.
        """
        config = self.config
        window = next((w for w in config.windows if w is not None), None)
        ops.check_attention_variant(
            variant,
            self.device,
            self.dtype,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            window=window,
        )
        for attention in self._attentions():
            attention.variant = variant

    def _attentions(self) -> Iterator[Attention]:
        return (module for module in self.modules() if isinstance(module, Attention))

    @property
    def contract(self) -> str:
        """Contract id of the numbers that the model computes."""
        return ops.attention_contract(self.attention_variant)

    def zero_main_grads(self) -> None:
        """Gives trained parameters a zeroed fp32 `main_grad`, in which backwards accumulate in the contract's order."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                _zero_buffer(parameter, "main_grad")

    def fold_main_grads(self) -> None:
        """Completes the gradients; call it once, after a step's last backward."""

    @property
    def num_inputs(self) -> int:
        """Input ids are below it: those of the vocabulary, and in a `VisionDecoder` those of media."""
        return self.config.vocab_size

    def inputs(self, batch: PackedBatch | PagedBatch) -> Inputs:
        """Embeddings and positions of a batch."""
        return Inputs(ops.embedding(batch.input_ids, self.embed_tokens.weight), batch, self.cos_sin)

    def check_ids(self, ids: npt.NDArray[Any], *, is_prompt: bool) -> None:  # [L]
        """Raises ValueError if a sequence's ids are below `num_inputs`, but the model cannot read them."""

    def axes_of(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:  # [L] -> [A, L]
        """Positions of a sequence's tokens on several axes; None: they are counted from 0."""
        return None

    def forget_features(self) -> None:
        """Drops what was computed with weights that have changed."""

    def hf_config(self) -> dict[str, Any]:
        """`config.json` of the model."""
        return to_hf(self.config, self.kind)

    def hf_name(self, name: str) -> str:
        """Name in a checkpoint of a tensor of `checkpoint.hf_layout`."""
        return name

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in a checkpoint that `checkpoint.hf_layout` does not have."""
        return iter(())

    def forward(self, batch: PackedBatch | PagedBatch) -> Tensor:  # [T, C]
        """Hidden states after the final norm.

        Args:
            batch: complete sequences, or new tokens with a paged cache (then without gradients).

        Raises:
            BatchError: the batch does not fit the model (values are checked on the CPU only).
        """
        batch.validate(self.config, self.num_inputs)
        with torch.no_grad() if isinstance(batch, PagedBatch) else nullcontext():
            inputs = self.inputs(batch)
            x, residual = inputs.x, None
            recompute = self.gradient_checkpointing and torch.is_grad_enabled()
            for i, layer in enumerate(self.layers):
                arguments = (x, residual, inputs.cos_sin, inputs.batch)
                if recompute:
                    x, residual = checkpoint(layer, *arguments, Recomputed(), use_reentrant=False)
                else:
                    x, residual = layer(*arguments)
                if i < len(inputs.added):
                    x, residual = x + residual, inputs.added[i]  # the next norm adds them
            return ops.rms_norm(x, self.norm.weight, self.config.rms_norm_eps, residual)[0]


class Decoder(Backbone):
    """Causal language model: the backbone and a head, which may be tied to the embedding."""

    head, kind = "lm_head.weight", "ForCausalLM"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        untied = not config.tie_word_embeddings
        self.lm_head = Weight(config.vocab_size, config.hidden_size, dtype=config.dtype) if untied else None

    @property
    def head_weight(self) -> Tensor:  # [V, C]
        """Weight of the language-model head, which is the embedding if they are tied."""
        if self.lm_head is not None:
            return self.lm_head.weight
        tied = self.embed_tokens.weight
        head_grad = getattr(tied, "head_main_grad", None)
        if head_grad is None or not torch.is_grad_enabled():
            return tied
        alias = tied.view_as(tied)
        alias.main_grad = head_grad  # type: ignore[attr-defined]
        return alias

    def zero_main_grads(self) -> None:
        """Gives trained parameters a zeroed fp32 `main_grad`, in which backwards accumulate in the contract's order.

        A tied embedding also gets `head_main_grad`. Each of its two uses then has its own chain of additions, so that
        splitting a batch into micro-batches changes no bit; `fold_main_grads` adds the two.
        """
        super().zero_main_grads()
        if self.lm_head is None and self.embed_tokens.weight.requires_grad:
            _zero_buffer(self.embed_tokens.weight, "head_main_grad")

    def fold_main_grads(self) -> None:
        """Adds a tied head's gradient to the embedding's `main_grad`; call it once, after a step's last backward."""
        tied = self.embed_tokens.weight
        head_grad = getattr(tied, "head_main_grad", None)
        if head_grad is not None:
            tied.main_grad.add_(head_grad)  # type: ignore[attr-defined]
            head_grad.zero_()

    def logits(self, hidden: Tensor) -> Tensor:  # [T, C] -> [T, V] fp32
        """Logits in fp32, as accumulated, never rounded to the model's dtype."""
        return ops.linear(hidden, self.head_weight, out_dtype=torch.float32)

    def logprob(
        self,
        hidden: Tensor,  # [T, C]
        targets: Tensor,  # [N] int64
        temperature: float | Tensor = 1.0,  # or [N] fp32
        kept: Tensor | None = None,  # [N, ceil(V/32)] int32
        rows: Tensor | None = None,  # [N] int64
    ) -> ops.LogProb:  # fields [N] fp32
        """Log-probability, entropy and log-sum-exp of each row's target, in bounded memory.

        Args:
            hidden: result of the forward.
            targets: the next tokens.
            temperature, kept, rows: as in `ops.linear_logprob`; rows defaults to all tokens.
        """
        return ops.linear_logprob(hidden, self.head_weight, targets, rows=rows, temperature=temperature, kept=kept)


def _zero_buffer(parameter: Tensor, name: str) -> None:
    buffer = getattr(parameter, name, None)
    if buffer is None or buffer.device != parameter.device:
        setattr(parameter, name, torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device))
    else:
        buffer.zero_()
