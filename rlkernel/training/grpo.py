"""Group relative policy optimization, one step after another: sample, judge, compare, learn.

`train_grpo` runs the steps, `Trainer.step` is one of them and reads top to bottom. Every sampled token is scored
again by the training forward and its bytes are compared before the weights change.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlkernel import nvtx, ops
from rlkernel.contract import compare_bitwise
from rlkernel.data.rewards import Scores, TrainerState
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.training.batch import Sample, micro_batches, pack_samples, score, score_all
from rlkernel.training.config import LossSettings, Settings, clip_range
from rlkernel.training.display import Display, count
from rlkernel.training.exactness import Exactness, hex_bits
from rlkernel.training.optimizer import Optimizer, Update
from rlkernel.training.parts import Parts, Prompt
from rlkernel.training.rollout import Completion, Sampler, judge
from rlkernel.training.run import Run, peak_memory_mib
from rlkernel.training.sft import warm_up

HELDOUT_SAMPLES = 24
SAMPLE_TOKENS = 64
_MINIMA, _MAXIMA = ("ratio_min",), ("ratio_max", "drift_max")


def train_grpo(parts: Parts, run: Run, display: Display) -> dict[str, Any]:
    """Trains the policy of `parts`; returns the figures of `summary.json`."""
    settings = parts.settings
    if settings.warmup.steps:
        losses = warm_up(parts, display)
        display.say(f"warm-up: {len(losses)} supervised steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    trainer = Trainer(parts, run)
    total = Exactness()
    tokens = 0
    probe: list[dict[str, Any]] = []
    control = (
        _spread(settings.run.probe_rollouts, settings.train.steps) if settings.run.backend == "rlkernel" else set()
    )
    before = after = trainer.evaluate(0, display)
    display.start("grpo", settings.train.steps)
    for step in range(1, settings.train.steps + 1):
        with nvtx.range(f"step {step}"):
            metrics, exact = trainer.step(step)
        total.merge(exact)
        tokens += metrics["tokens"]
        run.log(step, metrics)
        display.step(step, _line(metrics))
        if step in control:
            probe.append(trainer.probe(step))
        due = settings.eval.every and step % settings.eval.every == 0
        if due or step == settings.train.steps:
            after = trainer.evaluate(step, display)
    display.stop()
    return {
        "steps": settings.train.steps,
        "tokens": tokens,
        "heldout_before": before,
        "heldout_after": after,
        **total.row(),
        "max_ulps": total.max_ulps,
        "first_mismatch": total.first,
        "probe": probe,
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


class Trainer:
    """State of a run: the policy with its sampler and optimizer, and the frozen first policy where a KL asks for it."""

    def __init__(self, parts: Parts, run: Run):
        self.parts, self.run, self.settings = parts, run, parts.settings
        assert parts.rewards is not None and parts.heldout_rewards is not None
        self.rewards, self.heldout_rewards = parts.rewards, parts.heldout_rewards
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
        """One step: returns its metrics and the comparison of all its tokens.

        Raises:
            MismatchError: a token's log-probabilities differ, in strict mode with backend rlkernel.
        """
        settings, self.seconds, started = self.settings, {}, time.perf_counter()

        # Sample a group of completions for each prompt, with the weights as they are.
        prompts = self.prompts = list(islice(self.parts.prompts, settings.rollout.prompts))
        with self._time("rollout"):
            self.sampler.weights_updated()
            seed = mix_seed(settings.run.seed, step) % (1 << 64)
            completions = self.sampler.sample(prompts, settings.rollout, seed, settings.rollout.group_size)
        samples = [completion.sample for completion in completions]

        # Judge them; an advantage compares a completion with the others of its prompt.
        with self._time("reward"):
            scores = judge(self.rewards, completions, TrainerState(step - 1, settings.train.steps))
        advantages = ops.group_advantages(
            torch.tensor(scores.total, dtype=torch.float32),
            settings.rollout.group_size,
            mode=settings.advantages.mode,
            normalize_std=settings.advantages.normalize_std,
            eps=settings.advantages.eps,
        ).tolist()
        counted = [not (settings.rollout.mask_truncated and completion.truncated) for completion in completions]

        # With several updates a step, all tokens are scored and compared before the first of them.
        exact = Exactness()
        rollout_logp = [_logp(sample) for sample in samples]
        old_logp: list[Tensor] | None = rollout_logp
        scored: list[Tensor] = []
        if self.updates_per_step > 1:
            with self._time("score"):
                scored = self._score(self.model, samples)
            exact.add(samples, torch.cat(scored))
            self._require(exact, step)
        if settings.loss.old_policy == "scored":
            old_logp = scored or None  # None: the training forward's own, by the only update
        ref_logp = None
        if self.reference is not None:
            with self._time("score"):
                ref_logp = self._score(self.reference, samples)

        # Learn: passes over the minibatches, an update each; micro-batches only bound the memory.
        stats: list[dict[str, float]] = []
        updates: list[Update] = []
        for _ in range(settings.train.epochs):
            for part in _minibatches(len(samples), settings.train.minibatches):
                chosen = [samples[i] for i in part]
                denominator = _normalizer(settings, chosen, [counted[i] for i in part])
                learns = _has_signal(settings.loss, [advantages[i] for i in part if counted[i]])
                for micro in micro_batches(chosen, settings.train.micro_batch_tokens):
                    picked = [part[i] for i in micro]
                    packed = pack_samples([samples[i] for i in picked], self.device)
                    with self._time("forward"):
                        result = score(self.model, packed, settings.rollout.temperature)
                        loss, stat = ops.policy_loss(
                            result.logp,
                            None if old_logp is None else self._join(old_logp, picked),
                            torch.tensor([advantages[i] for i in picked], device=self.device),
                            packed.cu_seqlens,
                            mask=_mask(samples, counted, picked, self.device),
                            ref_logp=None if ref_logp is None else self._join(ref_logp, picked),
                            entropy=result.entropy,
                            rollout_logp=self._join(rollout_logp, picked),
                            loss_type=settings.loss.type,
                            ratio_level=settings.loss.ratio_level,
                            clip_low=clip_range(settings.loss.clip_low),
                            clip_high=clip_range(settings.loss.clip_high),
                            clip_dual=settings.loss.clip_dual,
                            kl_coef=settings.loss.kl_coef,
                            kl_type=settings.loss.kl_type,
                            entropy_coef=settings.loss.entropy_coef,
                            tis_cap=settings.loss.tis_cap,
                            max_completion_length=settings.rollout.max_tokens,
                            normalizer=denominator,
                        )
                    if self.updates_per_step == 1:
                        exact.add([samples[i] for i in picked], result.logp)
                        scored += result.logp.detach().cpu().split([len(samples[i].completion) for i in picked])
                    with self._time("backward"):
                        loss.backward()
                        self.optimizer.gather()
                    stats.append({"loss": float(loss.detach()), **{name: float(value) for name, value in stat.items()}})
                self._require(exact, step)
                with self._time("optimizer"):
                    if learns:
                        updates.append(self.optimizer.step())
                    else:
                        self.optimizer.discard()

        self._keep_samples(step, completions, scores, advantages, scored)
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.completion) for sample in samples)
        size = settings.rollout.group_size
        groups = [scores.total[i : i + size] for i in range(0, len(samples), size)]
        metrics: dict[str, Any] = {
            "reward": math.fsum(scores.total) / len(samples),
            "reward_std": float(torch.tensor(scores.total, dtype=torch.float64).std(correction=0)),
            **_reward_parts(scores.parts),
            **{f"logged/{name}": value for name, value in scores.metrics.items()},
            "groups_all_equal": sum(len(set(group)) == 1 for group in groups) / len(groups),
            "length": tokens / len(samples),
            "length_max": max(len(sample.completion) for sample in samples),
            "truncated": sum(completion.truncated for completion in completions) / len(samples),
            "masked": counted.count(False),
            **_combine(stats, self.updates_per_step),
            "updates": len(updates),
            "grad_norm": max((update.grad_norm for update in updates), default=0.0),
            "lr": updates[-1].lr if updates else 0.0,
            **exact.row(),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in self.seconds.items()},
            "memory_mib": peak_memory_mib(self.device),
        }
        return metrics, exact

    def evaluate(self, step: int, display: Display) -> float | None:
        """Mean held-out reward with the weights as they are; None where there are no held-out rows."""
        if not self.parts.heldout:
            return None
        settings = self.settings
        self.sampler.weights_updated()
        completions = self.sampler.evaluate(self.parts.heldout, settings.rollout, settings.eval.temperature)
        state = TrainerState(step, settings.train.steps)
        rewards = judge(self.heldout_rewards, completions, state).total
        mean = math.fsum(rewards) / len(rewards)
        shown = [
            {"prompt": c.prompt.row["prompt"], "completion": c.text, "reward": reward}
            for c, reward in list(zip(completions, rewards, strict=True))[:HELDOUT_SAMPLES]
        ]
        length = sum(len(c.sample.completion) for c in completions) / len(completions)
        row = {"step": step, "contract": self.run.contract, "reward": mean, "length": length, "rows": len(rewards)}
        self.run.append("eval", {**row, "samples": shown})
        display.say(f"held-out reward after step {step}: {mean:.3f} ({len(rewards)} prompts)")
        return mean

    def probe(self, step: int) -> dict[str, Any]:
        """The control: this step's prompts sampled and scored on stock torch ops, and how far apart both are."""
        settings = self.settings
        with ops.stock():
            self.sampler.weights_updated()
            seed = mix_seed(settings.run.seed, -step) % (1 << 64)
            completions = self.sampler.sample(self.prompts, settings.rollout, seed, settings.rollout.group_size)
            samples = [completion.sample for completion in completions]
            exact = Exactness()
            exact.add(samples, torch.cat(self._score(self.model, samples)))
        self.sampler.weights_updated()  # nothing of the control stays in the cache
        return {"step": step, "tokens": exact.tokens, **exact.row(), "max_ulps": exact.max_ulps}

    def _score(self, model: Any, samples: Sequence[Sample]) -> list[Tensor]:
        budget = self.settings.train.micro_batch_tokens
        temperature = self.settings.rollout.temperature
        logp = score_all(model, samples, temperature=temperature, budget=budget, device=self.device)
        return list(logp.cpu().split([len(sample.completion) for sample in samples]))

    def _join(self, values: Sequence[Tensor], picked: Sequence[int]) -> Tensor:
        return torch.cat([values[i] for i in picked]).to(self.device)

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

    def _keep_samples(
        self,
        step: int,
        completions: Sequence[Completion],
        scores: Scores,
        advantages: Sequence[float],
        scored: Sequence[Tensor],
    ) -> None:
        """The first completion of the first prompts, token by token with the bits of both sides."""
        starts = range(0, len(completions), self.settings.rollout.group_size)
        for i in starts[: self.settings.run.samples]:
            completion = completions[i]
            sample, rollout = completion.sample, _logp(completion.sample).tolist()
            tokens = [
                {
                    "id": token,
                    "text": self.parts.tokenizer.token(token) or "",
                    "logp": rollout[j],
                    "rollout": hex_bits(rollout[j]),
                    "training": hex_bits(float(scored[i][j])),
                }
                for j, token in enumerate(sample.completion[:SAMPLE_TOKENS])
            ]
            equal = compare_bitwise(scored[i], _logp(sample)).mismatches == 0
            row = {"step": step, "prompt": completion.prompt.row["prompt"], "completion": completion.text}
            row |= {"reward": scores.total[i], "advantage": advantages[i], "exact": equal, "tokens": tokens}
            if scores.extra:
                row["extra"] = {name: values[i] for name, values in scores.extra.items()}
            self.run.append("samples", row)


def _spread(count: int, steps: int) -> set[int]:
    """`count` steps evenly spread over the run, the last one among them."""
    return {max(1, round(steps * i / count)) for i in range(1, count + 1)}


def _logp(sample: Sample) -> Tensor:
    assert sample.logp is not None
    return sample.logp


def _minibatches(size: int, parts: int) -> Iterator[range]:
    """`size` completions cut into `parts` consecutive ranges whose sizes differ by one at most."""
    for i in range(parts):
        yield range(size * i // parts, size * (i + 1) // parts)


def _mask(samples: Sequence[Sample], counted: Sequence[bool], picked: Sequence[int], device: str) -> Tensor | None:
    if all(counted[i] for i in picked):
        return None
    return torch.cat([torch.full((len(samples[i].completion),), counted[i]) for i in picked]).to(device)


def _normalizer(settings: Settings, samples: Sequence[Sample], counted: Sequence[bool]) -> float:
    """Denominator of the whole minibatch, so that the losses of its micro-batches add up to its own."""
    if settings.loss.type in ("grpo", "gspo", "reinforce"):
        return float(len(samples))
    if settings.loss.type == "dr_grpo":
        return float(len(samples) * settings.rollout.max_tokens)
    return float(max(1, sum(len(s.completion) for s, counts in zip(samples, counted, strict=True) if counts)))


def _has_signal(loss: LossSettings, advantages: Sequence[float]) -> bool:
    """Whether an update would be driven by anything but the optimizer's momentum."""
    if not advantages:
        return False
    return loss.kl_coef > 0 or loss.entropy_coef != 0 or any(value != 0.0 for value in advantages)


def _reward_parts(parts: dict[str, list[float | None]]) -> dict[str, float]:
    """Mean of each reward over the completions that it judged, where there are several rewards."""
    if len(parts) < 2:
        return {}
    known = {name: [value for value in values if value is not None] for name, values in parts.items()}
    return {f"reward_{name}": math.fsum(values) / len(values) for name, values in known.items() if values}


def _combine(stats: Sequence[dict[str, float]], updates: int) -> dict[str, float]:
    """Statistics of a step from those of its micro-batches: token-weighted means, extremes, mean loss."""
    combined: dict[str, float] = {"loss": math.fsum(stat["loss"] for stat in stats) / max(1, updates)}
    seen = [stat for stat in stats if stat["tokens"] > 0]
    tokens = math.fsum(stat["tokens"] for stat in seen)
    for name in stats[0] if stats else ():
        if name in ("loss", "tokens", "sequences"):
            continue
        values = [stat[name] for stat in seen]
        if not values:
            combined[name] = 0.0
        elif name in _MINIMA or name in _MAXIMA:
            combined[name] = min(values) if name in _MINIMA else max(values)
        else:
            combined[name] = math.fsum(v * s["tokens"] for v, s in zip(values, seen, strict=True)) / tokens
    return combined
