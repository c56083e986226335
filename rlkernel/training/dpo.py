"""Direct preference optimization: raises the log-probability of chosen completions over that of rejected ones.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290), Azar et al. 2023 (IPO, https://arxiv.org/abs/2310.12036), and
label smoothing of Mitchell 2023 (conservative DPO, https://ericmitchell.ai/cdpo.pdf).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkernel.models import Decoder
from rlkernel.parallel.ranks import Ranks, in_order
from rlkernel.training.batch import TokenBudget, pack_trajectories, score
from rlkernel.training.checkpoint import FROZEN, Saver
from rlkernel.training.config import DPOSettings
from rlkernel.training.display import Display
from rlkernel.training.pairs import Pair, sides, sums_of
from rlkernel.training.parts import Parts
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sft import warm_up
from rlkernel.training.supervised import train


def sigmoid_loss(
    chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:  # [...] fp64 each
    """DPO's loss, equation 7 of Rafailov et al.: -log sigmoid(beta (chosen - rejected)).

    With label smoothing e, the preference is taken to be wrong with probability e (Mitchell, equation 3):
    -(1 - e) log sigmoid(x) - e log sigmoid(-x).

    Args:
        chosen, rejected: log-probability of each completion minus that of the reference model, in nats.
        beta: weight of the KL to the reference model.
        label_smoothing: e, in [0, 0.5).
    """
    x = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:  # [...] fp64 each
    """IPO's loss, equation 17 of Azar et al.: (chosen - rejected - 1 / (2 beta))^2.

    Args:
        chosen, rejected: as in `sigmoid_loss`, each divided by its number of tokens, as its authors did (see TRL).
        beta: tau of the paper.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


class PairLogps(NamedTuple):
    """What `metrics` needs of one pair: its loss, and log-probabilities of both sides under both models."""

    loss: float
    chosen: float
    rejected: float
    reference: tuple[float, float]


class DPO:
    """The objective of DPO: the mean loss over pairs. The two sides of a pair are in the same forward."""

    headline, shown = "rewards/accuracies", {"loss": "loss", "rewards/accuracies": "accuracy"}

    def __init__(self, model: Decoder, settings: DPOSettings, device: str):
        self.model, self.settings, self.device = model, settings, device

    def terms(self, items: Sequence[Pair]) -> tuple[Tensor, list[PairLogps]]:
        # One pair at a time, because vectorised functions may round an element by its place in the vector.
        logps = pair_logps(self.model, items, self.device)
        losses = torch.stack([self._loss(pair, *both) for pair, both in zip(items, logps, strict=True)])
        records = [
            PairLogps(loss, chosen, rejected, pair.reference)
            for pair, loss, (chosen, rejected) in zip(items, losses.tolist(), logps.tolist(), strict=True)
        ]
        return losses, records

    def _loss(self, pair: Pair, chosen: Tensor, rejected: Tensor) -> Tensor:
        chosen, rejected = chosen - pair.reference[0], rejected - pair.reference[1]
        if self.settings.loss == "ipo":
            chosen = chosen / len(pair.chosen.completion)
            return ipo_loss(chosen, rejected / len(pair.rejected.completion), self.settings.beta)
        return sigmoid_loss(chosen, rejected, self.settings.beta, self.settings.label_smoothing)

    def record(self, data: Sequence[Any]) -> PairLogps:
        return PairLogps._make(data)

    def metrics(self, records: list[PairLogps]) -> dict[str, float]:
        """TRL's names: a completion's reward is beta times its log-probability relative to the reference model."""
        beta = self.settings.beta
        chosen = [beta * (one.chosen - one.reference[0]) for one in records]
        rejected = [beta * (one.rejected - one.reference[1]) for one in records]
        return {
            "loss": fmean(one.loss for one in records),
            "rewards/chosen": fmean(chosen),
            "rewards/rejected": fmean(rejected),
            "rewards/accuracies": fmean(float(c > r) for c, r in zip(chosen, rejected, strict=True)),
            "rewards/margins": fmean(c - r for c, r in zip(chosen, rejected, strict=True)),
            "logps/chosen": fmean(one.chosen for one in records),
            "logps/rejected": fmean(one.rejected for one in records),
        }

    def count(self, items: Sequence[Pair]) -> int:
        return len(items)

    def packed(self, item: Pair) -> int:
        return _packed(item)

    def completion_tokens(self, item: Pair) -> int:
        return item.completion_tokens


def _packed(pair: Pair) -> int:
    return len(pair.chosen) + len(pair.rejected) - 2


def pair_logps(model: Decoder, pairs: Sequence[Pair], device: str) -> Tensor:  # [P, 2] fp64, on the CPU
    """Log-probabilities of the chosen and the rejected completions, in nats."""
    both = sides(pairs)
    logp = score(model, pack_trajectories(both, device)).logp
    return sums_of(logp, [len(one.completion) for one in both]).view(-1, 2)


@torch.no_grad()
def reference_logps(
    model: Decoder, pairs: Sequence[Pair], budget: TokenBudget, device: str, saver: Saver, ranks: Ranks
) -> Tensor:  # [P, 2] fp64, on the CPU
    """`pair_logps` of all pairs, without gradients.

    Raises:
        Interrupted: a signal asked the run to stop.
    """

    def of_leaf(pairs: Sequence[Pair]) -> list[list[float]]:
        def work(ranges: list[range]) -> list[list[float]]:
            found = []
            for span in ranges:
                found += pair_logps(model, pairs[span.start : span.stop], device).tolist()
                saver.require_running()
            return found

        return budget.run([_packed(pair) for pair in pairs], work) if pairs else []

    logps = in_order(ranks.over_leaves(ranks.deal(pairs), of_leaf))
    return torch.tensor(logps, dtype=torch.float64).view(-1, 2)


def train_dpo(parts: Parts, run: RunFolder, display: Display, saver: Saver) -> dict[str, Any]:
    """Trains on `parts.pairs`; returns its part of `summary.json`.

    The reference model is the model before the first step. Its log-probabilities of all pairs are computed once; they
    are two numbers per pair and part of every checkpoint.
    """
    settings = parts.settings
    groups = {"train": parts.pairs, "heldout": parts.heldout_pairs}
    if saver.resumed is None:
        if settings.warmup.steps:
            warm_up(parts, display, saver)
        display.say(f"reference log-probabilities of {sum(map(len, groups.values())):,} pairs")
        budget = TokenBudget(settings.train.micro_batch_tokens)
        reference = {
            name: reference_logps(parts.model, pairs, budget, parts.device, saver, parts.ranks)
            for name, pairs in groups.items()
        }
    else:
        reference = {name: tensor.cpu() for name, tensor in saver.resumed.tensors[FROZEN].items()}
    pairs, heldout = (_with_reference(pairs, reference[name]) for name, pairs in groups.items())
    objective = DPO(parts.model, settings.dpo, parts.device)
    return train(objective, pairs, heldout, settings, parts.device, run, display, saver, parts.ranks, reference)


def _with_reference(pairs: Sequence[Pair], logps: Tensor) -> list[Pair]:
    return [replace(pair, reference=(c, r)) for pair, (c, r) in zip(pairs, logps.tolist(), strict=True)]
