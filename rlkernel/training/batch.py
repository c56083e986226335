"""Packs prompts and completions for one forward, and scores the completion tokens in it.

Micro-batches are consecutive trajectories within a token budget; where their borders fall changes no bit of a
log-probability, and on a CPU none of a gradient (`TokenBudget`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from rlkernel.models import Decoder, PackedBatch
from rlkernel.ops.logprob import LogProb

T = TypeVar("T")


@dataclass(frozen=True)
class Trajectory:
    """One prompt with its completion, sampled or given as an example, with L target tokens.

    Attributes:
        prompt: token ids, at least one.
        completion: token ids, at least one; includes the end-of-sequence token if it was sampled.
        logp: [L] fp32 log-probabilities from the rollout; None for supervised data.
        kept: [L, ceil(V/32)] int32 masks of the tokens that could be sampled; None for all.
        sampled: positions of the targets in `completion`, ascending up to its last token; the tokens between them are
            observations of an environment. None: all tokens are targets.
    """

    prompt: list[int]
    completion: list[int]
    logp: Tensor | None = None
    kept: Tensor | None = None
    sampled: list[int] | None = None

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the targets in `completion`."""
        return range(len(self.completion)) if self.sampled is None else self.sampled

    @property
    def targets(self) -> list[int]:
        """The tokens that are scored, compared and learnt: the completion without observations."""
        return [self.completion[i] for i in self.positions]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class PackedTrajectories:
    """Trajectories ready for the training forward, with L target tokens in total.

    Attributes:
        batch: prompts and completions, packed.
        rows: [L] positions in the packed batch whose hidden state predicts a target.
        targets: [L] the completion tokens, without observations.
        cu_seqlens: [B+1] int32 borders of the trajectories in `targets`.
        kept: [L, ceil(V/32)] int32 or None.
    """

    batch: PackedBatch
    rows: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    kept: Tensor | None


def spans(sizes: Sequence[int], budget: int) -> list[range]:
    """Consecutive index ranges whose sizes sum to at most `budget`; a larger one gets its own range."""
    ranges: list[range] = []
    start, tokens = 0, 0
    for i, size in enumerate(sizes):
        if i > start and tokens + size > budget:
            ranges.append(range(start, i))
            start, tokens = i, 0
        tokens += size
    ranges.append(range(start, len(sizes)))
    return ranges


def packed_sizes(trajectories: Sequence[Trajectory]) -> list[int]:
    """Tokens of each trajectory in the training forward, which leaves the last one out."""
    return [len(one) - 1 for one in trajectories]


class TokenBudget:
    """Largest number of tokens of a micro-batch; halved when the GPU runs out of memory.

    Borders of micro-batches change no bit on a CPU. On a GPU weight gradients are summed in chunks of `WGRAD_TOKENS`
    tokens from the start of each micro-batch, so other borders may change their last bits.

    Args:
        tokens: the budget at the start.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens

    def run(
        self,
        sizes: Sequence[int],
        work: Callable[[list[range]], T],
        discard: Callable[[], None] = lambda: None,
        *,
        whole: bool = False,
    ) -> T:
        """`work(ranges)` on the micro-batches of some items, repeated with smaller ones if memory runs out.

        Args:
            sizes: tokens of each item in the forward; a micro-batch is a range of consecutive items.
            work: computes all of them and returns their results.
            discard: undoes what an attempt left behind that failed, such as the gradients of its first micro-batches
                and of some layers of the one that failed.
            whole: all items are one micro-batch.

        Raises:
            torch.OutOfMemoryError: every micro-batch is a single item already.
        """
        while True:
            ranges = [range(len(sizes))] if whole else spans(sizes, self.tokens)
            try:
                return work(ranges)
            except torch.OutOfMemoryError:
                if max(map(len, ranges)) == 1:
                    raise
            # Outside of the except block, because the traceback holds the tensors of the attempt.
            discard()
            torch.cuda.empty_cache()
            before = self.tokens
            while spans(sizes, self.tokens) == ranges:
                self.tokens //= 2
            # On every rank, because each has a budget of its own.
            print(f"out of memory: micro-batches have {self.tokens} tokens now, not {before}", flush=True)


def pack_trajectories(trajectories: Sequence[Trajectory], device: str) -> PackedTrajectories:
    """Packs trajectories; the last token of each is left out, because it is predicted but never an input."""
    inputs = [(one.prompt + one.completion)[:-1] for one in trajectories]
    batch = PackedBatch.from_sequences(inputs, device)
    rows, start = [], 0
    for one, ids in zip(trajectories, inputs, strict=True):
        places = torch.arange(len(one.completion)) if one.sampled is None else torch.tensor(one.sampled)
        rows.append(places + (start + len(one.prompt) - 1))
        start += len(ids)
    masks = [one.kept for one in trajectories if one.kept is not None]
    if masks and len(masks) != len(trajectories):
        raise ValueError("pack_trajectories: some trajectories have kept masks and some do not; all or none must")
    borders = [0, *accumulate(len(one.positions) for one in trajectories)]
    return PackedTrajectories(
        batch,
        torch.cat(rows).to(device),
        torch.tensor([token for one in trajectories for token in one.targets], device=device),
        torch.tensor(borders, dtype=torch.int32, device=device),
        torch.cat(masks).to(device) if masks else None,
    )


def pack_complete(trajectories: Sequence[Trajectory], device: str) -> PackedBatch:
    """Packs trajectories with their last tokens, at which a reward model gives its score."""
    return PackedBatch.from_sequences([one.prompt + one.completion for one in trajectories], device)


def score(model: Decoder, packed: PackedTrajectories, temperature: float = 1.0) -> LogProb:  # fields [L] fp32
    """Log-probability and entropy of every target token, through the training forward."""
    hidden = model(packed.batch)
    return model.logprob(hidden, packed.targets, temperature, packed.kept, packed.rows)


@torch.no_grad()
def score_all(
    model: Decoder, trajectories: Sequence[Trajectory], *, temperature: float, budget: TokenBudget, device: str
) -> Tensor:  # [L] fp32
    """Log-probabilities of all target tokens, in order, without gradients."""

    def work(ranges: list[range]) -> Tensor:
        packed = (pack_trajectories(trajectories[span.start : span.stop], device) for span in ranges)
        return torch.cat([score(model, one, temperature).logp for one in packed])

    return budget.run(packed_sizes(trajectories), work)
