"""What the policy-gradient trainers share: rollout, rewards, the bitwise check, policy updates, evaluation, control.

`grpo.py` and `ppo.py` each define one step with these methods.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlkernel import nvtx, ops
from rlkernel.data.rewards import Rewards, Scores, TrainerState
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.models import Decoder, frozen
from rlkernel.training.batch import (
    PackedTrajectories,
    TokenBudget,
    Trajectory,
    pack_trajectories,
    packed_sizes,
    score,
    score_all,
)
from rlkernel.training.checkpoint import FROZEN, Checkpoint, load_tensors, tensors_of
from rlkernel.training.config import LossSettings, Settings, clip_range
from rlkernel.training.display import Display
from rlkernel.training.evaluation import pass_rates
from rlkernel.training.exactness import Exactness
from rlkernel.training.media import Prompt
from rlkernel.training.optimizer import Update
from rlkernel.training.parts import Parts
from rlkernel.training.policy_metrics import GradedCompletion, known, metrics_row, sample_row
from rlkernel.training.reward_shaping import KLController, overlong_penalty
from rlkernel.training.rollout import Judging, Sampler
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sharded_optimizer import make_optimizer
from rlkernel.training.turns import Completion, OnFinished

HELDOUT_SAMPLES = 24


class PolicyTrainer(ABC):
    """State of a run: the policy, its sampler and optimizer, and the frozen first policy if a KL needs it.

    Attributes:
        begun: whether the current step has its rewards; from then on it changes what a checkpoint holds.
    """

    def __init__(self, parts: Parts, run: RunFolder):
        self.parts, self.run, self.settings, self.ranks = parts, run, parts.settings, parts.ranks
        self.rewards, self.heldout_rewards = parts.rewards, parts.heldout_rewards
        for called in (parts.rewards, parts.environment):
            if called is not None and self.ranks.leads:
                called.log_to(run.folder)
        self.model, self.device = parts.model, parts.device
        self.reference = None
        if self.settings.loss.kl_coef > 0 or self.settings.loss.track_kl or self.settings.kl.coef > 0:
            self.reference = frozen(parts.model)
        self.kl = KLController(self.settings.kl)
        train = self.settings.train
        self.updates_per_step = train.epochs * train.minibatches
        self.budget = TokenBudget(train.micro_batch_tokens)
        updates = train.steps * self.updates_per_step
        self.optimizer = make_optimizer(parts.model, self.settings.optimizer, updates, self.ranks, train.shard)
        self.sampler = Sampler(parts)  # after the gradients' memory, because it takes a share of what is free
        self.seconds: dict[str, float] = {}
        self.prompts: list[Prompt] = []
        self.judging: Judging | None = None
        self.begun = False

    @abstractmethod
    def step(self, step: int) -> tuple[dict[str, Any], Exactness]:
        """Runs one step; returns its metrics and the comparison of all its tokens.

        Raises:
            MismatchError: a token's log-probabilities differ, in strict mode with backend rlkernel.
        """

    # ---- the parts of a step ---------------------------------------------------------------------

    def rollout(self, step: int) -> list[GradedCompletion]:
        """Samples a group of completions for each of the next prompts with the current weights.

        The rewards of a group begin as soon as it is sampled, while the engine still decodes others, or, with several
        ranks, once all are sampled. Group i belongs to leaf i mod `train.leaves`; its rank samples it and trains on it.
        """
        self.seconds, self.begun = {}, False
        self.prompts = list(islice(self.parts.prompts, self.settings.rollout.prompts))
        self.judging = self._judging(self.rewards, step - 1)
        with self.timed("rollout"):
            completions = self._sample(step, None if self.judging is None else self.judging.add)
        return self._graded(completions)

    def judge(self, completions: Sequence[GradedCompletion]) -> tuple[Scores, list[float]]:
        """(scores of the reward functions, rewards: their totals plus the penalty of long completions).

        Rank 0 judges, so that a reward of a whole batch sees it. A completion without a score leaves the loss; its
        reward is 0, which nothing may use.
        """
        rollout = self.settings.rollout
        with self.timed("reward"):
            scores = self._scores(self.judging)
        for i in scores.dropped:
            completions[i].dropped, completions[i].in_loss = True, False
        limits = (rollout.max_tokens, rollout.overlong_buffer, rollout.overlong_penalty)
        penalties = [overlong_penalty(len(one.trajectory.completion), *limits) for one in completions]
        totals = zip(scores.total, penalties, strict=True)
        self.begun = True
        return scores, [0.0 if total is None else total + penalty for total, penalty in totals]

    def score(self, completions: Sequence[GradedCompletion], step: int) -> Exactness:
        """Scores all tokens before the first update: with the frozen first policy if there is one, and, if the step has
        several updates, with the policy, whose log-probabilities are compared with the rollout's."""
        exact = Exactness()
        if self.reference is None and self.updates_per_step == 1:
            return exact
        with self.timed("score"):
            if self.reference is not None:
                for one, logp in zip(completions, self._score(self.reference, completions), strict=True):
                    one.ref_logp = logp
            if self.updates_per_step > 1:
                for one, logp in zip(completions, self._score(self.model, completions), strict=True):
                    one.training_logp = logp
                self._compare(exact, completions, torch.cat([known(one.training_logp) for one in completions]))
        self._require(exact, step)
        return exact

    def learn(
        self, completions: Sequence[GradedCompletion], exact: Exactness, step: int
    ) -> tuple[list[dict[str, float]], list[Update]]:
        """One update of the policy per minibatch and epoch; returns statistics of the micro-batches, and the updates.

        A step's only update compares the log-probabilities of its own forward with the rollout's, before the weights
        change. Micro-batches only bound the memory.
        """
        train, updates = self.settings.train, []
        stats: list[dict[str, float]] = []
        for minibatch in minibatches(completions, train.minibatches) * train.epochs:
            found, logps = self._gradients(minibatch)
            stats += found
            if self.updates_per_step == 1:
                self._compare(exact, minibatch, torch.cat(logps))
                for one, logp in zip(minibatch, logps, strict=True):
                    one.training_logp = logp
            self._require(exact, step)
            with self.timed("optimizer"):
                if _has_signal(self.settings.loss, minibatch):
                    updates.append(self.optimizer.step())
                else:
                    self.optimizer.discard()
        return stats, updates

    def adapt_kl(self, completions: Sequence[GradedCompletion]) -> dict[str, float]:
        """Moves the coefficient of the KL inside the reward after a step; returns both as metrics."""
        if self.settings.kl.coef == 0:
            return {}
        used, kl = self.kl.coef, math.fsum(math.fsum(one.kl.tolist()) for one in completions) / len(completions)
        self.kl.update(kl, len(completions))
        return {"kl_reward": kl, "kl_coef": used}

    def record(
        self,
        step: int,
        completions: Sequence[GradedCompletion],
        scores: Scores,
        stats: Sequence[dict[str, float]],
        updates: Sequence[Update],
        exact: Exactness,
        started: float,
    ) -> dict[str, Any]:
        """Writes the first completion of the first prompts to `samples.jsonl`; returns the step's metrics."""
        starts = range(0, len(completions), self.settings.rollout.group_size)
        for i in starts[: self.settings.run.samples]:
            row = sample_row(step, completions[i], scores.total[i], self.parts.tokenizer)
            if completions[i].dropped:
                row["dropped"] = scores.dropped[i]
            if (failure := completions[i].completion.failure) is not None:
                row["failure"] = failure.message
            if scores.extra:
                row["extra"] = {name: values[i] for name, values in scores.extra.items()}
            self.run.append("samples", row)
        row = metrics_row(self.settings, completions, scores, stats, updates, exact)
        seconds = time.perf_counter() - started
        return {
            **row,
            "tokens_per_s": row["tokens"] / seconds,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in self.seconds.items()},
            "memory_mib": self.sampler.memory.peak_mib(),
        }

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the block's time to a phase of the step, and opens its NVTX range."""
        started = time.perf_counter()
        with nvtx.range(name):
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    # ---- the run ---------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Checkpoint:
        """Everything that the next step depends on."""
        moments, numbers = self.optimizer.state()
        tensors = {"model": self.optimizer.model_tensors(), "optimizer": moments}
        if self.reference is not None and not self.settings.model.lora.rank:  # a base is in the files of model.path
            tensors[FROZEN] = tensors_of(self.reference)
        return Checkpoint(step, {"optimizer": numbers, "kl_coef": self.kl.coef}, tensors)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint: weights, optimizer, reference, and the position in the data."""
        load_tensors(self.model, checkpoint.tensors["model"])
        self.optimizer.restore(checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
        if self.reference is not None and FROZEN in checkpoint.tensors:
            load_tensors(self.reference, checkpoint.tensors[FROZEN])
        self.kl.coef = checkpoint.state["kl_coef"]
        for _ in range(checkpoint.step * self.settings.rollout.prompts):
            next(self.parts.prompts)

    def evaluate(self, step: int, display: Display) -> float | None:
        """Mean held-out reward with the current weights, on rank 0; None without held-out rows."""
        if not self.parts.heldout:
            return None
        settings = self.settings
        judging = self._judging(self.heldout_rewards, step)
        on_finished = None if judging is None else judging.add
        with self.optimizer.whole_weights():
            self.sampler.weights_updated()
            completions = self.sampler.evaluate(self.parts.heldout, settings.rollout, settings.eval, on_finished)
        if judging is None:
            return None
        scores = judging.scores()
        rewards, mean = scores.total, scores.mean
        n, rows = settings.eval.samples, len(self.parts.heldout)
        shown = [
            {"prompt": c.prompt.row["prompt"], "completion": c.shown, "reward": reward}
            for c, reward in list(zip(completions, rewards, strict=True))[::n][:HELDOUT_SAMPLES]
        ]
        length = sum(len(c.trajectory.positions) for c in completions) / len(completions)
        rates = pass_rates(rewards, n, settings.eval.pass_at, settings.eval.solved_at)
        row = {"step": step, "contract": self.run.contract, "reward": mean, **rates, "length": length, "rows": rows}
        self.run.append("eval", {**row, "dropped": len(scores.dropped), "samples": shown})
        passed = "".join(f", {name} {rate:.3f}" for name, rate in rates.items())
        dropped = f", {len(scores.dropped)} completions dropped" if scores.dropped else ""
        display.say(f"held-out reward after step {step}: {mean:.3f}{passed} ({rows} prompts{dropped})")
        return mean

    def probe(self, step: int) -> dict[str, Any]:
        """The control: samples and scores this step's prompts on stock torch ops; returns how much both differ."""
        with ops.stock():
            completions = self._graded(self._sample(seed_stream=-step))
            exact = Exactness()
            self._compare(exact, completions, torch.cat(self._score(self.model, completions)))
        self.sampler.weights_updated()  # the control's keys and values must not stay in the prefix cache
        return {"step": step, "tokens": exact.tokens, **exact.row(), "max_ulps": exact.max_ulps}

    def _sample(self, seed_stream: int, on_finished: OnFinished | None = None) -> list[Completion]:
        seed = mix_seed(self.settings.run.seed, seed_stream) % (1 << 64)
        with self.optimizer.whole_weights():
            self.sampler.weights_updated()
            return self.sampler.sample(self.prompts, self.settings.rollout, seed, on_finished)

    def _graded(self, completions: Sequence[Completion]) -> list[GradedCompletion]:
        """The completions, grouped by prompt, with their leaves; rewards and advantages follow."""
        keeps, size = not self.settings.rollout.mask_truncated, self.settings.rollout.group_size
        return [
            GradedCompletion(one, keeps or not one.truncated, torch.zeros(1), leaf=i // size % self.ranks.leaves)
            for i, one in enumerate(completions)
        ]

    def _judging(self, rewards: Rewards | None, step: int) -> Judging | None:
        """The rewards of a rollout, on rank 0, which has them."""
        return None if rewards is None else Judging(rewards, TrainerState(step, self.settings.train.steps))

    def _scores(self, judging: Judging | None) -> Scores:
        """Rank 0's scores on every rank; columns that rewards logged stay there, because only rank 0 writes them."""
        if self.ranks.size == 1:
            assert judging is not None
            return judging.scores()
        mine = None if judging is None else judging.scores()
        shared: Any = mine and [mine.total, sorted(mine.dropped.items()), mine.parts, mine.metrics]
        total, dropped, parts, metrics = self.ranks.broadcast(shared)
        return mine or Scores(total, dict(dropped), parts, metrics)

    def _gradients(self, minibatch: Sequence[GradedCompletion]) -> tuple[list[dict[str, float]], list[Tensor]]:
        """Adds up the gradients of a minibatch, leaf by leaf; returns the statistics of all micro-batches, and the fp32
        log-probabilities of each completion's tokens on the CPU."""
        normalizer = _normalizer(self.settings, minibatch)
        dealt = [[one for one in minibatch if one.leaf == leaf] for leaf in range(self.ranks.leaves)]
        logps: list[Tensor] = []

        def of_leaf(chosen: Sequence[GradedCompletion]) -> list[dict[str, float]]:
            stats: list[dict[str, float]] = []
            if chosen:
                sizes = packed_sizes([one.trajectory for one in chosen])
                work = self._micro_batches(chosen, normalizer)
                whole = self.optimizer.one_backward
                stats, found = self.budget.run(sizes, work, self.optimizer.discard_leaf, whole=whole)
                logps.extend(found.split([len(one.trajectory.positions) for one in chosen]))
            self.optimizer.end_leaf()
            return stats

        stats = [stat for leaf in self.ranks.over_leaves(dealt, of_leaf) for stat in leaf]
        own = [one for leaf, chosen in enumerate(dealt) if self.ranks.owns(leaf) for one in chosen]
        return stats, self._on_all_ranks(minibatch, own, logps)

    def _micro_batches(
        self, chosen: Sequence[GradedCompletion], normalizer: float
    ) -> Callable[[list[range]], tuple[list[dict[str, float]], Tensor]]:
        """The work of `TokenBudget.run` on the completions of one leaf."""

        def work(ranges: list[range]) -> tuple[list[dict[str, float]], Tensor]:
            stats, logps = [], []
            for span in ranges:
                batch = chosen[span.start : span.stop]
                packed = pack_trajectories([one.trajectory for one in batch], self.device)
                with self.timed("forward"):
                    result = score(self.model, packed, self.settings.rollout.temperature)
                    loss, stat = self._loss(batch, packed, result, normalizer)
                with self.timed("backward"):
                    loss.backward()
                    self.optimizer.gather()
                logps.append(result.logp.detach().cpu())
                stats.append({"loss": float(loss.detach()), **{name: float(value) for name, value in stat.items()}})
            return stats, torch.cat(logps)

        return work

    def _on_all_ranks(
        self, completions: Sequence[GradedCompletion], own: Sequence[GradedCompletion], values: Sequence[Tensor]
    ) -> list[Tensor]:  # [L_i] fp32 each, on the CPU
        """Exchanges values of tokens: those that this rank has computed for its own completions, for those of all."""
        by_id = {id(one): value for one, value in zip(own, values, strict=True)}
        lengths = [len(one.trajectory.positions) for one in completions]
        rows = [by_id.get(id(one), torch.zeros(length)) for one, length in zip(completions, lengths, strict=True)]
        return list(self.ranks.complete(torch.cat(rows)).split(lengths))

    def _loss(
        self, batch: Sequence[GradedCompletion], packed: PackedTrajectories, result: ops.LogProb, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of one micro-batch (`ops.policy_loss`)."""
        settings = self.settings.loss

        def join(values: Sequence[Tensor | None]) -> Tensor | None:
            present = [value for value in values if value is not None]
            return torch.cat(present).to(self.device) if present else None

        rollout_logp = join([one.trajectory.logp for one in batch])
        # None (the only update of a step, old_policy=scored): `result.logp` itself is the old policy's.
        scored_logp = join([one.training_logp for one in batch])
        mask = None
        if not all(one.in_loss for one in batch):
            mask = join([torch.full((len(one.trajectory.positions),), one.in_loss) for one in batch])
        return ops.policy_loss(
            result.logp,
            rollout_logp if settings.old_policy == "rollout" else scored_logp,
            torch.cat([one.advantages for one in batch]).to(self.device),
            packed.cu_seqlens,
            mask=mask,
            ref_logp=join([one.ref_logp for one in batch]),
            entropy=result.entropy,
            rollout_logp=rollout_logp,
            loss_type=settings.type,
            ratio_level=settings.ratio_level,
            clip_low=clip_range(settings.clip_low),
            clip_high=clip_range(settings.clip_high),
            clip_dual=settings.clip_dual,
            kl_coef=settings.kl_coef,
            kl_type=settings.kl_type,
            entropy_coef=settings.entropy_coef,
            tis_cap=settings.tis_cap,
            max_completion_length=self.settings.rollout.max_tokens,
            normalizer=normalizer,
        )

    def _score(
        self, model: Decoder, completions: Sequence[GradedCompletion]
    ) -> list[Tensor]:  # [L_i] fp32 each, on the CPU
        temperature = self.settings.rollout.temperature

        def scored(trajectories: Sequence[Trajectory]) -> Tensor:
            return score_all(model, trajectories, temperature=temperature, budget=self.budget, device=self.device)

        return self._over_ranks(completions, scored)

    def _over_ranks(
        self, completions: Sequence[GradedCompletion], work: Callable[[Sequence[Trajectory]], Tensor]
    ) -> list[Tensor]:  # [L_i] fp32 each, on the CPU
        """Results of `work` for the tokens of all completions, on every rank; each rank computes those of its leaves.

        Args:
            work: returns one number for each token of the trajectories that it is given.
        """
        own = [one for one in completions if self.ranks.owns(one.leaf)]
        with self.optimizer.whole_weights():
            found = work([one.trajectory for one in own]).cpu() if own else torch.empty(0)
        return self._on_all_ranks(completions, own, found.split([len(one.trajectory.positions) for one in own]))

    def _compare(self, exact: Exactness, completions: Sequence[GradedCompletion], logps: Tensor) -> None:
        """Adds the comparison of all tokens; every rank has them all, so that a mismatch stops every rank."""
        ranks = [one.leaf % self.ranks.size for one in completions] if self.ranks.size > 1 else ()
        exact.add([one.trajectory for one in completions], logps, ranks)

    def _require(self, exact: Exactness, step: int) -> None:
        if self.settings.run.strict and self.settings.run.backend == "rlkernel":
            exact.require(step)


def minibatches(completions: Sequence[GradedCompletion], parts: int) -> list[Sequence[GradedCompletion]]:
    """The completions in `parts` consecutive minibatches whose sizes differ by at most one."""
    size = len(completions)
    return [completions[size * i // parts : size * (i + 1) // parts] for i in range(parts)]


def _normalizer(settings: Settings, minibatch: Sequence[GradedCompletion]) -> float:
    """Denominator of the whole minibatch's loss, so that the losses of its micro-batches add up to it.

    A dropped completion does not count: the loss is that of a minibatch without it.
    """
    kept = max(1, sum(not one.dropped for one in minibatch))
    if settings.loss.type in ("grpo", "gspo", "reinforce"):
        return float(kept)
    if settings.loss.type == "dr_grpo":
        return float(kept * settings.rollout.max_tokens)
    return float(max(1, sum(len(one.trajectory.positions) for one in minibatch if one.in_loss)))


def _has_signal(loss: LossSettings, minibatch: Sequence[GradedCompletion]) -> bool:
    """Whether the loss has a gradient; without one an update would only follow the optimizer's momentum."""
    advantages = [one.advantages for one in minibatch if one.in_loss]
    if not advantages:
        return False
    return loss.kl_coef > 0 or loss.entropy_coef != 0 or any(bool(each.any()) for each in advantages)
