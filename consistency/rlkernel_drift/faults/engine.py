"""An engine that samples and scores with a tiny model, decoding with a cache or in one forward, rightly or wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rlkernel_drift.capsule import Sampling
from rlkernel_drift.scoring.decoding import Decoding, decoded_hidden
from rlkernel_drift.scoring.model import Head, Layout, ReferenceModel
from rlkernel_drift.scoring.semantics import SortedLogits
from rlkernel_drift.scoring.sequences import Sequences

Path = Literal["decode", "alone", "left", "right"]
Change = Callable[[Sequences], Sequences]


@dataclass
class Engine:
    """How a side computes.

    Attributes:
        model: what computes, in `dtype`; edited and hooked as the fault wants.
        path: decode token by token with a cache, or one forward in a layout.
        sampling: what its log-probabilities really are.
        inputs: what it does to tokens and positions before scoring.
        hooks: context managers around its forwards (a faulty operator).
        head_weight: another head.
        extra_logits: padding entries of the vocabulary with logit zero.
        decimals: recorded log-probabilities are rounded to as many.
        shift: recorded log-probabilities are moved by this many tokens.
        prefix: (model, tokens): keys and values of the first tokens come from another model.
        attend: left padding is attended to, at this multiple.
    """

    model: ReferenceModel
    dtype: torch.dtype = torch.float32
    path: Path = "decode"
    sampling: Sampling = field(default_factory=Sampling)
    head: Head = field(default_factory=Head)
    inputs: Change = lambda sequences: sequences
    hooks: list[Callable[[Any], contextlib.AbstractContextManager[None]]] = field(default_factory=list)
    edits: dict[str, Tensor] = field(default_factory=dict)
    head_weight: Tensor | None = None
    extra_logits: int = 0
    decimals: int | None = None
    shift: int = 0
    prefix: tuple[ReferenceModel, int] | None = None
    attend: int = 0
    theta: float | None = None

    @contextlib.contextmanager
    def active(self) -> Any:
        """The model with its edits and hooks in place, for a while."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.model.edited(self.edits, self.dtype))
            if self.theta is not None:
                stack.enter_context(self.model.rotary_base(self.theta, self.dtype))
            for hook in self.hooks:
                stack.enter_context(hook(self.model.in_dtype(self.dtype)))
            yield self.model.in_dtype(self.dtype)

    def sample(self, prompts: list[list[int]], length: int, seed: int) -> list[list[int]]:
        """Completions, and nothing recorded: `logprobs` scores them."""
        generator = torch.Generator().manual_seed(seed)
        with self.active() as model:
            state = Decoding(model, prompts)
            chosen: list[Tensor] = []
            for _ in range(length):
                logits = self.model.head(state.hidden, self.head, self.head_weight)
                chosen.append(_draw(logits, self.sampling, generator))
                state.feed(chosen[-1])
        return [[int(step[i]) for step in chosen] for i in range(len(prompts))]

    def logprobs(self, sequences: Sequences) -> Tensor:  # [N]
        """Recorded log-probabilities of the counted tokens, as this engine computes them."""
        given = self.inputs(sequences)
        with self.active() as model:
            if self.prefix is not None:
                hidden = _with_prefix(model, self.prefix[0].in_dtype(self.dtype), given, self.prefix[1])
            elif self.attend:
                hidden = self.model.hidden(given, self.dtype, Layout("left", True, self.attend))
            elif self.path == "decode":
                hidden = decoded_hidden(model, given)
            else:
                pad: Literal["none", "left", "right"] = "none" if self.path == "alone" else self.path
                hidden = self.model.hidden(given, self.dtype, Layout(pad))
            logits = self.model.head(hidden, self.head, self.head_weight)
        if self.extra_logits:
            logits = torch.nn.functional.pad(logits, (0, self.extra_logits))
        rows = SortedLogits(logits, sequences.targets).at(self.sampling.temperature)
        values = rows.processed(self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        if self.head.logprobs is not None:
            values = values.to(self.head.logprobs).float()
        if self.decimals is not None:
            values = values.round(decimals=self.decimals)
        return _moved(values, sequences.owner, self.shift) if self.shift else values


@torch.no_grad()
def _with_prefix(model: Any, old: Any, sequences: Sequences, count: int) -> Tensor:
    parts = []
    for ids, positions, rows in zip(sequences.ids, sequences.positions, sequences.rows, strict=True):
        first = old.base_model(input_ids=ids[None, :count], position_ids=positions[None, :count], use_cache=True)
        rest = model.base_model(
            input_ids=ids[None, count:],
            position_ids=positions[None, count:],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
        parts.append(rest.last_hidden_state[0, rows - count])
    return torch.cat(parts)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    rows = SortedLogits(logits, torch.zeros(len(logits), dtype=torch.int64)).at(sampling.temperature)
    count = rows.kept(sampling.top_k, sampling.top_p, sampling.min_p)
    inside = torch.arange(logits.shape[1])[None, :] < count[:, None]
    rank = (rows.probabilities * inside).multinomial(1, generator=generator)
    return logits.sort(dim=-1, descending=True, stable=True).indices.gather(1, rank)[:, 0]


def _moved(values: Tensor, owner: Tensor, shift: int) -> Tensor:
    moved = torch.roll(values, shift)
    return torch.where(owner == torch.roll(owner, shift), moved, values)
