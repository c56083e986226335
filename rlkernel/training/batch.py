"""Packs prompts and completions for one forward, and scores the completion tokens in it.

Sequences keep their order; micro-batches are consecutive runs of them under a token budget. No bit of a
log-probability or of a gradient depends on where the borders fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlkernel.models import Decoder, PackedBatch
from rlkernel.ops.logprob import LogProb


@dataclass(frozen=True)
class Sample:
    """One prompt with its completion.

    Attributes:
        prompt: token ids, at least one.
        completion: token ids, at least one, the end-of-sequence token included where it was sampled.
        logp: [L] fp32 log-probabilities from the rollout, or None (supervised data).
        kept: [L, ceil(V/32)] int32 masks of the tokens that could be sampled, or None for all.
    """

    prompt: list[int]
    completion: list[int]
    logp: Tensor | None = None
    kept: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class Packed:
    """Samples ready for the training forward. L is the number of completion tokens of all of them.

    Attributes:
        batch: prompts and completions, packed.
        rows: [L] positions in the packed batch whose hidden state predicts a completion token.
        targets: [L] the completion tokens.
        cu_seqlens: [B+1] int32 borders of the completions in `targets`.
        kept: [L, ceil(V/32)] int32 or None.
    """

    batch: PackedBatch
    rows: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    kept: Tensor | None


def micro_batches(samples: Sequence[Sample], budget: int) -> list[range]:
    """Consecutive index ranges of at most `budget` packed tokens; a longer single sample has a range of its own."""
    ranges: list[range] = []
    start, tokens = 0, 0
    for i, sample in enumerate(samples):
        size = len(sample) - 1
        if i > start and tokens + size > budget:
            ranges.append(range(start, i))
            start, tokens = i, 0
        tokens += size
    ranges.append(range(start, len(samples)))
    return ranges


def pack_samples(samples: Sequence[Sample], device: str) -> Packed:
    """Packs samples; the last token of each is predicted but never an input, so it is left out."""
    inputs = [(sample.prompt + sample.completion)[:-1] for sample in samples]
    batch = PackedBatch.from_sequences(inputs, device)
    rows, start = [], 0
    for sample, ids in zip(samples, inputs, strict=True):
        rows.append(torch.arange(start + len(sample.prompt) - 1, start + len(ids)))
        start += len(ids)
    masks = [sample.kept for sample in samples if sample.kept is not None]
    if masks and len(masks) != len(samples):
        raise ValueError("pack_samples: some samples have kept masks and some have none; all or none must")
    borders = [0, *accumulate(len(sample.completion) for sample in samples)]
    return Packed(
        batch,
        torch.cat(rows).to(device),
        torch.tensor([token for sample in samples for token in sample.completion], device=device),
        torch.tensor(borders, dtype=torch.int32, device=device),
        torch.cat(masks).to(device) if masks else None,
    )


def score(model: Decoder, packed: Packed, temperature: float = 1.0) -> LogProb:  # fields [L] fp32
    """Log-probability and entropy of every completion token, through the one training forward."""
    hidden = model(packed.batch)
    return model.logprob(hidden, packed.targets, temperature, packed.kept, packed.rows)


@torch.no_grad()
def score_all(
    model: Decoder, samples: Sequence[Sample], *, temperature: float, budget: int, device: str
) -> Tensor:  # [L] fp32
    """Log-probabilities of all completion tokens, in sample order, without gradients."""
    parts = []
    for chosen in micro_batches(samples, budget):
        parts.append(score(model, pack_samples([samples[i] for i in chosen], device), temperature).logp)
    return torch.cat(parts)
