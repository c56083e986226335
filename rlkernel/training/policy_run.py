"""A policy-gradient run from its first step to its last, for any trainer of `policy_trainer.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlkernel import nvtx
from rlkernel.data.rewards import REASONS
from rlkernel.training.checkpoint import Checkpoint, Saver
from rlkernel.training.display import Display, count
from rlkernel.training.exactness import Exactness
from rlkernel.training.parts import Parts
from rlkernel.training.policy_trainer import PolicyTrainer
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sft import warm_up


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
        measured: last step after which control and evaluation are done, where they were due.
        idle: steps without an update.
    """

    step: int = 0
    tokens: int = 0
    exact: Exactness = field(default_factory=Exactness)
    dropped: dict[str, int] = field(default_factory=dict)
    probe: list[dict[str, Any]] = field(default_factory=list)
    measured: int = 0
    idle: int = 0
    before: float | None = None
    after: float | None = None

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{"measured": state["step"], **state, "exact": Exactness(**state["exact"])})


def train_policy(
    trainer_class: type[PolicyTrainer], parts: Parts, run: RunFolder, display: Display, saver: Saver
) -> dict[str, Any]:
    """Trains the policy of `parts`; returns its part of `summary.json`."""
    settings, resumed, progress = parts.settings, saver.resumed, Progress()
    if settings.warmup.steps and resumed is None:
        losses = warm_up(parts, display, saver)
        display.say(f"warm-up: {len(losses)} supervised steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    trainer = trainer_class(parts, run)

    def checkpoint() -> Checkpoint:
        made = trainer.checkpoint(progress.step)
        made.state["progress"] = asdict(progress)
        return made

    if resumed is None:
        progress.before = progress.after = trainer.evaluate(0, display)
        if settings.train.save_every:
            saver.save(checkpoint)
    else:
        trainer.restore(resumed)
        progress = Progress.restored(resumed.state["progress"])
        resumed.tensors.clear()  # they map the checkpoint's files, which would keep a removed checkpoint on the disk
    probes = settings.run.probe_rollouts if settings.run.backend == "rlkernel" else 0
    probed = {max(1, round(settings.train.steps * i / probes)) for i in range(1, probes + 1)}  # evenly spread

    def measure(step: int) -> None:
        """The control and the held-out score after a step."""
        if step in probed and not any(row["step"] == step for row in progress.probe):
            progress.probe.append(trainer.probe(step))
        if step == settings.train.steps or (settings.eval.every and step % settings.eval.every == 0):
            progress.after = trainer.evaluate(step, display)
        progress.measured = step

    display.start(settings.algorithm, settings.train.steps)
    try:
        if progress.measured < progress.step:  # the run had failed there
            measure(progress.step)
        for step in range(progress.step + 1, settings.train.steps + 1):
            with nvtx.range(f"step {step}"):
                metrics, exact = trainer.step(step)
            progress.step, trainer.begun = step, False
            progress.exact.merge(exact)
            progress.tokens += metrics["tokens"]
            progress.idle += not metrics["updates"]
            for reason in REASONS:
                if number := metrics.get(f"dropped/{reason}"):
                    progress.dropped[reason] = progress.dropped.get(reason, 0) + number
            run.log(step, metrics)
            display.step(step, _line(metrics))
            measure(step)
            if saver.stops_after(step, checkpoint):
                break
    except Exception:
        if not trainer.begun and parts.ranks.size == 1:
            saver.save_on_failure(checkpoint, progress.step, display.say)
        raise
    display.stop()
    if progress.idle:
        display.say(
            f"note: {progress.idle} of {progress.step} steps made no update, because all rewards of each group were "
            "equal, or all completions were dropped"
        )
    trainer.optimizer.close()
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
    dropped = sum(int(metrics.get(f"dropped/{reason}", 0)) for reason in REASONS)
    return {
        "reward": f"{metrics['reward']:.3f}",
        **({"dropped": str(dropped)} if dropped else {}),
        "length": f"{metrics['length']:.1f}",
        "KL": f"{kl:.2g}",
        "exact": f"{metrics['exact_frac']:.4g}",
        "tok/s": count(metrics["tokens_per_s"]),
        "mem": f"{metrics['memory_mib']:.0f} MiB",
    }
