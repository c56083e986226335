"""Replaces `model(..., labels=labels, fused_lm_head=True)`, which all of TRL's trainers call for log-probabilities.

The replacement unpads the batch, runs the model's own layers on rlkernel's ops, scores the labels and scatters the
results back. Losses, advantages and metrics stay TRL's.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from rlkernel import ops
from rlkernel.ops.sample import kept_set
from rlkernel_transformers.calls import Score
from rlkernel_transformers.forwards import head_weight, score_tokens, shift, through_head
from rlkernel_transformers.media import MEDIA, prepare_call
from rlkernel_transformers.packing import IGNORED, PackedCall
from rlkernel_trl.errors import ExactnessLostError

KEPT_ROWS = 1024
"""Rows whose logits are in memory at once while kept sets are recomputed: 0.6 GB of fp32 at 152k entries."""


@dataclass(frozen=True)
class Filters:
    """Sampling filters; a log-probability is over the tokens that they keep.

    Attributes:
        temperature: of the logits, which the filters see.
        top_k, top_p, min_p: as in `ops.sample`; off: 0, 1 and 0.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        """Whether a filter may drop tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Ragged = tuple[Tensor, Tensor]
"""Kept sets of one completion: ids [N] int32 and offsets [L+1] int64, as `ops.kept_to_ids` returns them."""


@dataclass
class ForwardState:
    """State that a trainer shares with the forwards of one model.

    Attributes:
        strict: whether a batch that only stock operators can score is an error.
        kept: kept sets of the rows of the next forwards, in order; None: `rebuild` decides.
        rebuild: compute the sets of these filters from the forward's own logits, and append them to `rebuilt`.
        rebuilt: recomputed sets, one per row.
        fallbacks: forwards on stock operators since the trainer last read it.
    """

    strict: bool = True
    kept: list[Ragged] | None = None
    rebuild: Filters | None = None
    rebuilt: list[Ragged] = field(default_factory=list)
    fallbacks: int = 0


def install(model: Any, state: ForwardState, *, temperature: float, outputs: tuple[str, ...]) -> None:
    """Replaces `model.forward`, to which TRL has added its fused head, for calls with `fused_lm_head=True`.

    Args:
        model: a causal language model after `rlkernel_transformers.apply` and TRL's `add_fused_lm_head`.
        state: shared with the trainer.
        temperature: the logits are divided by it.
        outputs: fields of `FusedCausalLMOutput` to fill, as in `trl.trainer.utils.add_fused_lm_head`.
    """
    stock = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        why = _unsupported(self, args, shift_labels, kwargs) if fused_lm_head else None
        if not fused_lm_head or why:
            if why:
                if state.strict:
                    raise ExactnessLostError(f"rlkernel cannot score a batch with {why}")
                state.fallbacks += 1
                kwargs["fused_lm_head"] = True
            for name, value in (
                ("labels", labels),
                ("shift_labels", shift_labels),
                ("num_items_in_batch", num_items_in_batch),
            ):
                if value is not None:
                    kwargs[name] = value
            return stock(*args, **kwargs)
        assert labels is not None
        input_ids = args[0] if args else kwargs["input_ids"]
        return _score(self, state, input_ids, labels, kwargs, temperature, outputs, num_items_in_batch)

    forward.rlkernel = "log-probabilities for TRL's trainer"  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


_SUPPORTED_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    *MEDIA,
}


def _unsupported(model: Any, args: tuple[Any, ...], shift_labels: Tensor | None, kwargs: dict[str, Any]) -> str | None:
    if "_rlkernel" not in model.model.__dict__:
        return "a model that rlkernel_transformers.remove was called on; call rlkernel_transformers.apply(model) again"
    if len(args) > 1:
        return "positional arguments besides input_ids"
    if shift_labels is not None:
        return "shift_labels (context or sequence parallelism)"
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _SUPPORTED_INPUTS)
    if unknown:
        return f"model inputs {', '.join(unknown)}"
    return None


def _score(
    model: Any,
    state: ForwardState,
    input_ids: Tensor,  # [B, W]
    labels: Tensor,  # [B, W]
    kwargs: dict[str, Any],
    temperature: float,
    outputs: tuple[str, ...],
    num_items_in_batch: Any,
) -> FusedCausalLMOutput:
    mask = labels[:, 1:] != IGNORED
    statistics = "is_top1" in outputs or "mean_logits" in outputs
    score = Score(shift(labels), temperature=temperature, statistics=statistics)
    passed = {k: kwargs[k] for k in ("cu_seq_lens_q", "max_length_q") if kwargs.get(k) is not None}
    mask_given, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    media = {name: kwargs[name] for name in MEDIA if kwargs.get(name) is not None}
    packed = prepare_call(model, input_ids, None, mask_given, position_ids, None, False, score, passed, media)
    hidden = model.model(input_ids=input_ids, rlkernel_packed=packed, **media).last_hidden_state  # [T, C]
    outputs_of = functools.partial(
        _outputs, state=state, packed=packed, score=score, mask=mask, outputs=outputs, items=num_items_in_batch
    )
    result: FusedCausalLMOutput = through_head(model.lm_head, hidden, outputs_of)
    return result


def _outputs(
    hidden: Tensor,  # [T, C]
    head: Tensor | torch.nn.Module,
    *,
    state: ForwardState,
    packed: PackedCall,
    score: Score,
    mask: Tensor,  # [B, W - 1]
    outputs: tuple[str, ...],
    items: Any,
) -> FusedCausalLMOutput:
    """TRL's outputs, from hidden states and the head's weight, or from the head if another library hooked it."""
    weight = head if isinstance(head, Tensor) else head_weight(head)
    if state.kept is not None or state.rebuild is not None:
        rows = packed.scored.rows
        scored = hidden.detach() if rows is None else hidden.detach().index_select(0, rows)
        score = replace(score, kept=_kept(state, scored, weight.detach(), mask))
    result = score_tokens(hidden, weight, packed, score)
    assert result.logp is not None and result.lse is not None
    logp = result.logp[:, :-1]
    extra: dict[str, Tensor] = {}
    for name, value in (("entropy", result.entropy), ("mean_logits", result.mean_logit), ("is_top1", result.top1)):
        if name in outputs and value is not None:
            extra[name] = value[:, :-1]
    if "log_sum_sq_probs" in outputs:
        half = replace(score, temperature=score.temperature / 2, statistics=False)
        with torch.no_grad():
            twice = score_tokens(hidden.detach(), weight.detach(), packed, half)
        assert twice.lse is not None
        extra["log_sum_sq_probs"] = (twice.lse - 2 * result.lse)[:, :-1]
    total = mask.sum().clamp(min=1) if items is None else items
    return FusedCausalLMOutput(loss=-logp.sum() / total, log_probs=logp, label_mask=mask, **extra)


def _kept(state: ForwardState, hidden: Tensor, weight: Tensor, scored: Tensor) -> Tensor | None:
    """Bit masks [L, ceil(V/32)] of the scored tokens, from the rollout or recomputed; None without filters."""
    if state.kept is None and state.rebuild is None:
        return None
    counts = scored.sum(1).tolist()
    if state.kept is not None:
        rows, state.kept = state.kept[: len(counts)], state.kept[len(counts) :]
        lengths = [offsets.numel() - 1 for _, offsets in rows]
        if any(count not in (0, length) for count, length in zip(counts, lengths, strict=True)):
            raise ValueError(f"kept sets of {lengths} tokens for completions of {counts}")
        masks = [
            ops.ids_to_kept(ids, offsets, weight.shape[0])
            for (ids, offsets), count in zip(rows, counts, strict=True)
            if count
        ]
        return torch.cat(masks) if masks else None
    assert state.rebuild is not None
    masks_of_all = kept_sets(hidden, weight, state.rebuild)
    state.rebuilt += [ops.kept_to_ids(row, weight.shape[0]) for row in masks_of_all.split(counts)]
    return masks_of_all


@torch.no_grad()
def kept_sets(
    hidden: Tensor,  # [L, C]
    weight: Tensor,  # [V, C]
    filters: Filters,
) -> Tensor:  # [L, ceil(V/32)] int32
    """Bit masks of the tokens that the filters of `ops.sample` keep, from logits computed block by block."""
    parts = []
    for rows in hidden.split(KEPT_ROWS):
        logits = ops.linear(rows, weight, out_dtype=torch.float32)
        fp32 = logits.new_ones(logits.shape[0])
        kept = kept_set(
            logits,
            temperature=torch.full_like(fp32, filters.temperature),
            top_k=torch.full_like(fp32, filters.top_k, dtype=torch.int32) if filters.top_k > 0 else None,
            top_p=torch.full_like(fp32, filters.top_p) if filters.top_p < 1 else None,
            min_p=torch.full_like(fp32, filters.min_p) if filters.min_p > 0 else None,
        )
        parts.append(kept)
    return torch.cat(parts) if parts else hidden.new_zeros(0, (weight.shape[0] + 31) // 32, dtype=torch.int32)
