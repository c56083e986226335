"""Attention of a transformers model with changes: of queries, keys, values, masks, scores and probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """One call of attention.

    Attributes:
        layer: number of the layer, -1 if the module does not say.
        query: [B, H, L, D]. key, value: [B, G, L, D], after the rotary embedding.
        mask: [B or 1, 1, L, L], added to the scores; None hides nothing.
        settings: further arguments of transformers' attention (scaling, softcap, s_aux, ...).
        prompts: [B] tokens of the prompts; sequences begin at index 0.
        scores, probabilities: changes of the scores [B, H, L, L] before the mask, and of their softmax.
        order: of the query heads, if they were permuted; the outputs are put back.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    settings: dict[str, Any]
    prompts: Tensor
    scores: tuple[Callable[[Tensor], Tensor], ...] = ()
    probabilities: tuple[Callable[[Tensor], Tensor], ...] = ()
    order: Tensor | None = None

    def output(self) -> Tensor:  # [B, L, H, D]
        """What transformers' eager code computes, with the changes."""
        groups, settings = self.query.shape[1] // self.key.shape[1], self.settings
        key, value = (x.repeat_interleave(groups, 1) for x in (self.key, self.value))
        scores = self.query @ key.transpose(2, 3) * (settings.get("scaling") or self.query.shape[-1] ** -0.5)
        if cap := settings.get("softcap"):
            scores = torch.tanh(scores / cap) * cap
        for change in self.scores:
            scores = change(scores)
        if self.mask is not None:
            scores = scores + self.mask[..., : scores.shape[-1]]
        sinks = settings.get("s_aux")
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        found = scores.softmax(-1, torch.float32).to(self.query.dtype)[..., : key.shape[2]]
        for change in self.probabilities:
            found = change(found)
        out = (found @ value).transpose(1, 2)
        return out if self.order is None else out[:, :, self.order.argsort()]


AttentionChange = Callable[[Attention], Attention]


class AttentionState:
    """What the registered attention function reads, because transformers passes it no arguments of ours.

    Attributes:
        changes: applied to each call. prompts: length of the prompt of each scored sequence.
        batch: numbers of the sequences in the batch that is computed.
    """

    changes: tuple[AttentionChange, ...] = ()
    prompts: Sequence[int] = ()
    batch: range = range(0)


@contextlib.contextmanager
def attending(model: Any, changes: tuple[AttentionChange, ...], kernels: str, prompts: Sequence[int]) -> Iterator[None]:
    """Attention with changes, or computed by another of transformers' kernels.

    Args:
        model: of transformers. prompts: length of the prompt of each sequence that is scored.
    """
    before = model.config._attn_implementation
    AttentionState.changes, AttentionState.prompts = changes, prompts
    try:
        model.set_attn_implementation(kernels or _registered())
        yield
    finally:
        model.set_attn_implementation(before)


def _registered() -> str:
    """Registers the changed attention with transformers, and returns its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("rlkernel_drift", _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rlkernel_drift", eager_mask)
    return "rlkernel_drift"


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any) -> Any:
    prompts = torch.tensor([AttentionState.prompts[i] for i in AttentionState.batch], device=query.device)
    call = Attention(getattr(module, "layer_idx", -1), query, key, value, mask, settings, prompts)
    for change in AttentionState.changes:
        call = change(call)
    return call.output().contiguous(), None
