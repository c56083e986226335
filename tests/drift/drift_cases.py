"""Small capsules of made-up numbers for the tests of gates and verdicts, and pairs of engines with their diagnosis."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
from rich.console import Console

from rlkernel_drift.capsule import Capsule, Distribution, Floor, Manifest, Operators, Sampling, Tensor, build_capsule
from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose.attach import diagnose_verdict
from rlkernel_drift.faults.world import Recorded, healthy_world, record_world
from rlkernel_drift.output import write_text
from rlkernel_drift.profiles import GENERAL
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.verdict import Verdict

Side = Any


def sequences(n: int = 8, length: int = 40, seed: int = 0) -> tuple[list[list[int]], list[list[int]], list[Any]]:
    """Prompts, completions and log-probabilities."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 100, 5 + i % 3).tolist() for i in range(n)]
    completions = [rng.integers(0, 100, length + i).tolist() for i in range(n)]
    logprobs = [-rng.exponential(1.0, len(c)).astype(np.float32) for c in completions]
    return prompts, completions, logprobs


def capsule(side: Side = "rollout", noise: float = 0.0, seed: int = 0, logprobs: Any = None, **parts: Any) -> Capsule:
    """A capsule of the sequences, its log-probabilities off by Gaussian noise."""
    prompts, completions, own = sequences()
    rng = np.random.default_rng(seed + 100)
    given = own if logprobs is None else logprobs
    values = [v + np.minimum(rng.normal(0, noise, len(v)), np.maximum(-v, 0)).astype(np.float32) for v in given]
    stream = "recorded.processed" if side == "rollout" else "train.processed"
    names = ("positions", "masks", "kept", "sequence_ids", "operators")
    others = {name: parts.pop(name) for name in names if name in parts}
    prompts, completions = parts.pop("prompts", prompts), parts.pop("completions", completions)
    return build_capsule(
        Manifest(side=side, engine="test", **parts),
        prompts,
        completions,
        {parts.pop("stream", stream): values},
        **others,
    )


def operators(tokens: int, change: tuple[str, int, int] | None = None) -> Operators:
    """Recorded outputs of two layers; `change` moves one element of an operator by one ulp."""
    rng = np.random.default_rng(3)
    names = ["embedding", *(f"layers.{i}.{o}" for i in range(2) for o in ("q_proj", "output")), "final_norm"]
    values = {name: Tensor.of(rng.normal(size=(tokens, 4)).astype(np.float32)) for name in names}
    if change is not None:
        name, row, element = change
        array = values[name].values.copy()
        array[row, element] = np.nextafter(array[row, element], np.float32(np.inf))
        values[name] = Tensor.of(array)
    return Operators(None, values)


def with_logits(pair: Recorded) -> Recorded:
    """The pair with the trainer's logits of every third counted token in the train capsule."""
    sequences = sequences_of(pair.train)
    model = pair.world.trainer.model
    logits = model.head(model.hidden(sequences)).numpy()
    keep = np.arange(0, sequences.counted, 3)
    rows = Distribution(sequences.token.numpy()[keep], Tensor.of(logits[keep]))
    return dataclasses.replace(pair, train=dataclasses.replace(pair.train, distribution=rows))


SAMPLED = Sampling(temperature=0.7)


def gate(verdict: Verdict, name: str) -> Any:
    return next(g for g in verdict.gates if g.name == name)


def causes(verdict: Verdict, name: str) -> list[str]:
    return [f.cause for f in gate(verdict, name).findings if f.severity == "error"]


def printed(verdict: Verdict) -> str:
    file = io.StringIO()
    write_text(verdict, Console(file=file, width=200))
    return file.getvalue()


def part_of(count: int, **parts: Any) -> Capsule:
    """The train capsule of the first `count` sequences."""
    prompts, completions, logprobs = (rows[:count] for rows in sequences())
    return capsule("train", prompts=prompts, completions=completions, logprobs=logprobs, **parts)


def relabel(side: Capsule, stream: str | None) -> Capsule:
    """The capsule with its only stream under another name, unless that is None."""
    return side if stream is None else dataclasses.replace(side, logprobs={stream: next(iter(side.logprobs.values()))})


def recorded(seed: int = 4, temperature: float = 1.0, operators: bool = False) -> Recorded:
    world = healthy_world("llama", seed, "float32")
    world.operators = operators
    return record_world(world, lambda w: setattr(w.rollout, "sampling", Sampling(temperature=temperature)))


def diagnosed(pair: Recorded, floor: Floor | None = None, **options: object) -> Verdict:
    verdict = compare_capsules(pair.rollout, pair.train, Options(profile=GENERAL))
    references = None if options.get("files") else lambda: pair.world.references
    return diagnose_verdict(verdict, pair.rollout, pair.train, references, floor, options.get("seconds"))  # type: ignore[arg-type]


def noisy(pair: Recorded, size: float) -> Recorded:
    (name,) = pair.rollout.logprobs
    noise = np.random.default_rng(0).normal(0, size, pair.rollout.tokens).astype(np.float32)
    values = np.minimum(pair.rollout.logprobs[name] + noise, 0)
    return dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
