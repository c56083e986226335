"""Group relative policy optimization: `train_grpo` is the run, `Trainer.step` one step, to be read top to bottom.

The training forward scores every sampled token again, and its bytes are compared before the weights change.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlkernel import nvtx, ops
from rlkernel.contract import compare_bitwise
from rlkernel.data.rewards import REASONS, Scores, TrainerState
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.models import Decoder
from rlkernel.training.advantages import advantages_of
from rlkernel.training.batch import PackedTrajectories, Trajectory, micro_batches, pack_trajectories, score, score_all
from rlkernel.training.checkpoint import FROZEN, Checkpoint, Saver, load_tensors, tensors_of
from rlkernel.training.config import LossSettings, Settings, clip_range
from rlkernel.training.display import Display, count
from rlkernel.training.exactness import Exactness, hex_bits
from rlkernel.training.optimizer import Optimizer, Update
from rlkernel.training.parts import Parts, Prompt
from rlkernel.training.rollout import Completion, Judging, OnFinished, Sampler
from rlkernel.training.run_folder import RunFolder, peak_memory_mib
from rlkernel.training.sft import warm_up

HELDOUT_SAMPLES = 24
SAMPLE_TOKENS = 64
_EXTREMES = {"ratio_min": min, "ratio_max": max, "drift_max": max}
"""Statistics whose value for a step is an extreme of the micro-batches; the others are token-weighted means."""


@dataclass
class Progress:
    """What a run has measured so far.

    Attributes:
        step: finished steps.
        tokens: sampled tokens.
        exact: comparison of all of them.
        dropped: number of completions without a reward, by reason.
        probe: results of the control rollouts.
        before, after: first and last evaluation.
    """

    step: int = 0
    tokens: int = 0
    exact: Exactness = field(default_factory=Exactness)
    dropped: dict[str, int] = field(default_factory=dict)
    probe: list[dict[str, Any]] = field(default_factory=list)
    before: float | None = None
    after: float | None = None

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**state, "exact": Exactness(**state["exact"])})


def train_grpo(parts: Parts, run: RunFolder, display: Display, saver: Saver) -> dict[str, Any]:
    """Trains the policy of `parts`; returns its part of `summary.json`."""
    settings, resumed, progress = parts.settings, saver.resumed, Progress()
    if settings.warmup.steps and resumed is None:
        losses = warm_up(parts, display, saver)
        display.say(f"warm-up: {len(losses)} supervised steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    trainer = Trainer(parts, run)
    if resumed is None:
        progress.before = progress.after = trainer.evaluate(0, display)
        if settings.train.save_every:
            saver.save(lambda: trainer.checkpoint(progress))
    else:
        trainer.restore(resumed)
        progress = Progress.restored(resumed.state["progress"])
    probes = settings.run.probe_rollouts if settings.run.backend == "rlkernel" else 0
    probed = {max(1, round(settings.train.steps * i / probes)) for i in range(1, probes + 1)}  # evenly spread
    display.start("grpo", settings.train.steps)
    for step in range(progress.step + 1, settings.train.steps + 1):
        with nvtx.range(f"step {step}"):
            metrics, exact = trainer.step(step)
        progress.step = step
        progress.exact.merge(exact)
        progress.tokens += metrics["tokens"]
        for reason in REASONS:
            if number := metrics.get(f"dropped/{reason}"):
                progress.dropped[reason] = progress.dropped.get(reason, 0) + number
        run.log(step, metrics)
        display.step(step, _line(metrics))
        if step in probed:
            progress.probe.append(trainer.probe(step))
        due = settings.eval.every and step % settings.eval.every == 0
        if due or step == settings.train.steps:
            progress.after = trainer.evaluate(step, display)
        if saver.stops_after(step, lambda: trainer.checkpoint(progress)):
            break
    display.stop()
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "heldout_before": progress.before,
        "heldout_after": progress.after,
        **progress.exact.row(),
        "max_ulps": progress.exact.max_ulps,
        "first_mismatch": progress.exact.first,
        "dropped": progress.dropped,
        "probe": progress.probe,
    }


def _line(metrics: dict[str, Any]) -> dict[str, str]:
    kl = metrics.get("kl_ref", metrics["kl_old_k3"])
    return {
        "reward": f"{metrics['reward']:.3f}",
        "length": f"{metrics['length']:.1f}",
        "KL": f"{kl:.2g}",
        "exact": f"{metrics['exact_frac']:.4g}",
        "tok/s": count(metrics["tokens_per_s"]),
        "mem": f"{metrics['memory_mib']:.0f} MiB",
    }


@dataclass
class GradedCompletion:
    """A completion with what the loss reads of it.

    Attributes:
        reward: None if it was dropped.
        in_loss: False where it was dropped, and where `rollout.mask_truncated` leaves it out.
        training_logp: [L] fp32 log-probabilities from the training forward, once it has run.
        ref_logp: [L] fp32 from the frozen first policy, or None.
    """

    completion: Completion
    reward: float | None
    advantage: float
    in_loss: bool
    training_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    @property
    def trajectory(self) -> Trajectory:
        """Prompt and completion as token ids, with the rollout's log-probabilities."""
        return self.completion.trajectory


class Trainer:
    """State of a run: the policy, its sampler and optimizer, and the frozen first policy if the loss needs its KL."""

    def __init__(self, parts: Parts, run: RunFolder):
        self.parts, self.run, self.settings = parts, run, parts.settings
        assert parts.rewards is not None and parts.heldout_rewards is not None
        self.rewards, self.heldout_rewards = parts.rewards, parts.heldout_rewards
        self.rewards.log_to(run.folder)
        self.model, self.device = parts.model, parts.device
        self.reference = None
        if self.settings.loss.kl_coef > 0 or self.settings.loss.track_kl:
            self.reference = copy.deepcopy(parts.model).requires_grad_(False)
        train = self.settings.train
        self.updates_per_step = train.epochs * train.minibatches
        self.sampler = Sampler(parts.model, parts.tokenizer, self.settings.engine)
        self.optimizer = Optimizer(parts.model, self.settings.optimizer, train.steps * self.updates_per_step)
        self.seconds: dict[str, float] = {}
        self.prompts: list[Prompt] = []

    def step(self, step: int) -> tuple[dict[str, Any], Exactness]:
        """Runs one step; returns its metrics and the comparison of all its tokens.

        Raises:
            MismatchError: a token's log-probabilities differ, in strict mode with backend rlkernel.
        """
        settings, self.seconds, started = self.settings, {}, time.perf_counter()

        # Rollout: sample a group of completions for each prompt with the current weights. A group is judged as soon as
        # it is sampled, while the engine still decodes others.
        self.prompts = list(islice(self.parts.prompts, settings.rollout.prompts))
        judging = Judging(self.rewards, TrainerState(step - 1, settings.train.steps))
        with self._time("rollout"):
            completions = self._rollout(step, judging.add)

        # Rewards, and advantages relative to the other completions of the same prompt.
        with self._time("reward"):
            scores = judging.scores()
        advantages = advantages_of(scores.total, settings.rollout.group_size, settings.advantages)
        cut = [settings.rollout.mask_truncated and completion.truncated for completion in completions]
        graded = [
            GradedCompletion(completion, reward, advantage, in_loss=reward is not None and not is_cut)
            for completion, reward, advantage, is_cut in zip(completions, scores.total, advantages, cut, strict=True)
        ]

        # With several updates per step, all tokens are scored and compared before the first update.
        exact = Exactness()
        trajectories = [completion.trajectory for completion in completions]
        if self.updates_per_step > 1:
            with self._time("score"):
                for one, logp in zip(graded, self._score(self.model, trajectories), strict=True):
                    one.training_logp = logp
            exact.add(trajectories, torch.cat([_known(one.training_logp) for one in graded]))
            self._require(exact, step)
        if self.reference is not None:
            with self._time("score"):
                for one, logp in zip(graded, self._score(self.reference, trajectories), strict=True):
                    one.ref_logp = logp

        # Learn: one update per minibatch and epoch; micro-batches only bound the memory.
        stats: list[dict[str, float]] = []
        updates: list[Update] = []
        for minibatch in _minibatches(graded, settings.train.minibatches) * settings.train.epochs:
            normalizer = _normalizer(settings, minibatch)
            for span in micro_batches([one.trajectory for one in minibatch], settings.train.micro_batch_tokens):
                batch = minibatch[span.start : span.stop]
                packed = pack_trajectories([one.trajectory for one in batch], self.device)
                with self._time("forward"):
                    result = score(self.model, packed, settings.rollout.temperature)
                    loss, stat = self._loss(batch, packed, result, normalizer)
                if self.updates_per_step == 1:
                    exact.add([one.trajectory for one in batch], result.logp)
                    sizes = [len(one.trajectory.completion) for one in batch]
                    for one, logp in zip(batch, result.logp.detach().cpu().split(sizes), strict=True):
                        one.training_logp = logp
                with self._time("backward"):
                    loss.backward()
                    self.optimizer.gather()
                stats.append({"loss": float(loss.detach()), **{name: float(value) for name, value in stat.items()}})
            self._require(exact, step)
            with self._time("optimizer"):
                if _has_signal(settings.loss, minibatch):
                    updates.append(self.optimizer.step())
                else:
                    self.optimizer.discard()

        self._write_samples(step, graded, scores)
        return self._metrics(graded, scores, stats, updates, exact, time.perf_counter() - started), exact

    def checkpoint(self, progress: Progress) -> Checkpoint:
        """Everything that the next step depends on."""
        moments, numbers = self.optimizer.state()
        tensors = {"model": tensors_of(self.model), "optimizer": moments}
        if self.reference is not None:
            tensors[FROZEN] = tensors_of(self.reference)
        return Checkpoint(progress.step, {"progress": asdict(progress), "optimizer": numbers}, tensors)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint: weights, optimizer, reference, and the position in the data."""
        load_tensors(self.model, checkpoint.tensors["model"])
        self.optimizer.restore(checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
        if self.reference is not None:
            load_tensors(self.reference, checkpoint.tensors[FROZEN])
        for _ in range(checkpoint.step * self.settings.rollout.prompts):
            next(self.parts.prompts)

    def _rollout(self, seed_stream: int, on_finished: OnFinished | None = None) -> list[Completion]:
        self.sampler.weights_updated()
        seed = mix_seed(self.settings.run.seed, seed_stream) % (1 << 64)
        return self.sampler.sample(self.prompts, self.settings.rollout, seed, on_finished)

    def _loss(
        self, batch: Sequence[GradedCompletion], packed: PackedTrajectories, result: ops.LogProb, normalizer: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of one micro-batch (`ops.policy_loss`)."""
        settings = self.settings.loss

        def join(values: Sequence[Tensor | None]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return torch.cat(known).to(self.device) if known else None

        rollout_logp = join([one.trajectory.logp for one in batch])
        # None (the only update of a step, old_policy=scored): `result.logp` itself is the old policy's.
        scored_logp = join([one.training_logp for one in batch])
        mask = None
        if not all(one.in_loss for one in batch):
            mask = join([torch.full((len(one.trajectory.completion),), one.in_loss) for one in batch])
        return ops.policy_loss(
            result.logp,
            rollout_logp if settings.old_policy == "rollout" else scored_logp,
            torch.tensor([one.advantage for one in batch], device=self.device),
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

    def _metrics(
        self,
        graded: Sequence[GradedCompletion],
        scores: Scores,
        stats: Sequence[dict[str, float]],
        updates: Sequence[Update],
        exact: Exactness,
        seconds: float,
    ) -> dict[str, Any]:
        """One row of `metrics.jsonl`."""
        lengths = [len(one.trajectory.completion) for one in graded]
        size = self.settings.rollout.group_size
        judged = [[r for r in scores.total[i : i + size] if r is not None] for i in range(0, len(graded), size)]
        groups = [group for group in judged if group]
        return {
            "reward": math.fsum(scores.known) / len(scores.known),
            "reward_std": float(torch.tensor(scores.known, dtype=torch.float64).std(correction=0)),
            "dropped": len(scores.dropped),
            **{f"dropped/{reason}": number for reason, number in scores.reasons.items()},
            **_reward_means(scores.parts),
            **{f"logged/{name}": value for name, value in scores.metrics.items()},
            "groups_all_equal": sum(len(set(group)) == 1 for group in groups) / len(groups),
            "length": sum(lengths) / len(graded),
            "length_max": max(lengths),
            "truncated": sum(one.completion.truncated for one in graded) / len(graded),
            "masked": sum(not one.in_loss and one.reward is not None for one in graded),
            **_combine(stats, self.updates_per_step),
            "updates": len(updates),
            "grad_norm": max((update.grad_norm for update in updates), default=0.0),
            "lr": updates[-1].lr if updates else 0.0,
            **exact.row(),
            "tokens": sum(lengths),
            "tokens_per_s": sum(lengths) / seconds,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in self.seconds.items()},
            "memory_mib": peak_memory_mib(self.device),
        }

    def evaluate(self, step: int, display: Display) -> float | None:
        """Mean held-out reward with the current weights; None without held-out rows."""
        if not self.parts.heldout:
            return None
        settings = self.settings
        self.sampler.weights_updated()
        judging = Judging(self.heldout_rewards, TrainerState(step, settings.train.steps))
        completions = self.sampler.evaluate(
            self.parts.heldout, settings.rollout, settings.eval.temperature, judging.add
        )
        scores = judging.scores()
        mean = math.fsum(scores.known) / len(scores.known)
        shown = [
            {"prompt": c.prompt.row["prompt"], "completion": c.text, "reward": reward}
            for c, reward in list(zip(completions, scores.total, strict=True))[:HELDOUT_SAMPLES]
        ]
        length = sum(len(c.trajectory.completion) for c in completions) / len(completions)
        row = {"step": step, "contract": self.run.contract, "reward": mean, "length": length, "rows": len(completions)}
        self.run.append("eval", {**row, "dropped": scores.reasons, "samples": shown})
        dropped = f", {len(scores.dropped)} dropped" if scores.dropped else ""
        display.say(f"held-out reward after step {step}: {mean:.3f} ({len(completions)} prompts{dropped})")
        return mean

    def probe(self, step: int) -> dict[str, Any]:
        """The control: samples and scores this step's prompts on stock torch ops; returns how much both differ."""
        with ops.stock():
            trajectories = [completion.trajectory for completion in self._rollout(seed_stream=-step)]
            exact = Exactness()
            exact.add(trajectories, torch.cat(self._score(self.model, trajectories)))
        self.sampler.weights_updated()  # the control's keys and values must not stay in the prefix cache
        return {"step": step, "tokens": exact.tokens, **exact.row(), "max_ulps": exact.max_ulps}

    def _score(self, model: Decoder, trajectories: Sequence[Trajectory]) -> list[Tensor]:  # [L_i] fp32 each, on the CPU
        budget, temperature = self.settings.train.micro_batch_tokens, self.settings.rollout.temperature
        logp = score_all(model, trajectories, temperature=temperature, budget=budget, device=self.device)
        return list(logp.cpu().split([len(trajectory.completion) for trajectory in trajectories]))

    def _require(self, exact: Exactness, step: int) -> None:
        if self.settings.run.strict and self.settings.run.backend == "rlkernel":
            exact.require(step)

    @contextmanager
    def _time(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with nvtx.range(name):
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _write_samples(self, step: int, graded: Sequence[GradedCompletion], scores: Scores) -> None:
        """Writes the first completion of the first prompts, with the bits of both sides for each token."""
        starts = range(0, len(graded), self.settings.rollout.group_size)
        for i in starts[: self.settings.run.samples]:
            one = graded[i]
            rollout, training = _known(one.trajectory.logp), _known(one.training_logp)
            pairs = zip(one.trajectory.completion, rollout.tolist(), training.tolist(), strict=True)
            tokens = [
                {
                    "id": token,
                    "text": self.parts.tokenizer.token(token) or "",
                    "logp": sampled,
                    "rollout": hex_bits(sampled),
                    "training": hex_bits(trained),
                }
                for token, sampled, trained in islice(pairs, SAMPLE_TOKENS)
            ]
            row = {
                "step": step,
                "prompt": one.completion.prompt.row["prompt"],
                "completion": one.completion.text,
                "reward": one.reward,
                **({} if one.reward is not None else {"dropped": scores.dropped[i]}),
                "advantage": one.advantage,
                "exact": compare_bitwise(training, rollout).mismatches == 0,
                "tokens": tokens,
            }
            if scores.extra:
                row["extra"] = {name: values[i] for name, values in scores.extra.items()}
            self.run.append("samples", row)


def _known(logp: Tensor | None) -> Tensor:
    assert logp is not None
    return logp


def _minibatches(graded: Sequence[GradedCompletion], parts: int) -> list[Sequence[GradedCompletion]]:
    """The completions in `parts` consecutive minibatches whose sizes differ by at most one."""
    size = len(graded)
    return [graded[size * i // parts : size * (i + 1) // parts] for i in range(parts)]


def _normalizer(settings: Settings, minibatch: Sequence[GradedCompletion]) -> float:
    """Denominator of the whole minibatch's loss, so that the losses of its micro-batches add up to it.

    A dropped completion does not count: the loss is that of a minibatch without it.
    """
    kept = max(1, sum(one.reward is not None for one in minibatch))
    if settings.loss.type in ("grpo", "gspo", "reinforce"):
        return float(kept)
    if settings.loss.type == "dr_grpo":
        return float(kept * settings.rollout.max_tokens)
    return float(max(1, sum(len(one.trajectory.completion) for one in minibatch if one.in_loss)))


def _has_signal(loss: LossSettings, minibatch: Sequence[GradedCompletion]) -> bool:
    """Whether the loss has a gradient; without one an update would only follow the optimizer's momentum."""
    advantages = [one.advantage for one in minibatch if one.in_loss]
    if not advantages:
        return False
    return loss.kl_coef > 0 or loss.entropy_coef != 0 or any(value != 0.0 for value in advantages)


def _reward_means(parts: dict[str, list[float | None]]) -> dict[str, float]:
    """Mean of each reward function over the completions that it judged; empty for a single function."""
    if len(parts) < 2:
        return {}
    known = {name: [value for value in values if value is not None] for name, values in parts.items()}
    return {f"reward_{name}": math.fsum(values) / len(values) for name, values in known.items() if values}


def _combine(stats: Sequence[dict[str, float]], updates: int) -> dict[str, float]:
    """Statistics of a step from those of its micro-batches."""
    combined: dict[str, float] = {"loss": math.fsum(stat["loss"] for stat in stats) / max(1, updates)}
    seen = [stat for stat in stats if stat["tokens"] > 0]
    tokens = math.fsum(stat["tokens"] for stat in seen)
    for name in stats[0] if stats else ():
        if name in ("loss", "tokens", "sequences"):
            continue
        values = [stat[name] for stat in seen]
        if not values:
            combined[name] = 0.0
        elif name in _EXTREMES:
            combined[name] = _EXTREMES[name](values)
        else:
            combined[name] = math.fsum(v * s["tokens"] for v, s in zip(values, seen, strict=True)) / tokens
    return combined
