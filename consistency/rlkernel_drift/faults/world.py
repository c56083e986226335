"""A rollout engine, a trainer and what they record: healthy as made, wrong once a fault is planted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import (
    Capsule,
    Distribution,
    Kept,
    Manifest,
    Model,
    Operators,
    Sampling,
    Weights,
    build_capsule,
    describe_operators,
)
from rlkernel_drift.capsule import Tensor as Stored
from rlkernel_drift.diagnose.context import References
from rlkernel_drift.faults.engine import Engine, Path
from rlkernel_drift.faults.tiny import BOS, VOCABULARY, tiny_model, updated
from rlkernel_drift.scoring.model import ReferenceModel
from rlkernel_drift.scoring.operators import record
from rlkernel_drift.scoring.sequences import Sequences, sequences_of
from rlkernel_drift.scoring.weights import Adapter, fingerprints

SEQUENCES, LENGTH = 8, 36
RECORDED = 2
PATHS: tuple[Path, ...] = ("decode", "decode", "alone", "left", "right")
Edit = Callable[[Capsule], Capsule]


@dataclass
class World:
    """One rollout and its training forward.

    Attributes:
        rng: draws every value that is planted.
        base: the trainer's weights without adapter; previous: the version before.
        rollout, trainer: the two engines. sampled: what the tokens are drawn with.
        declared: sampling settings that the capsules claim. config: what they claim of the configuration.
        edits: changes of the rollout's capsule (a fault that is visible in the files).
        operators: record operator outputs of the rollout. fingerprints: record those of the weights.
        planted: the values, for the record.
    """

    family: str
    seed: int
    dtype: str
    rng: random.Random
    base: Any
    previous: Any
    rollout: Engine
    trainer: Engine
    adapter: Adapter | None = None
    declared: tuple[Sampling, Sampling] = (Sampling(), Sampling())
    config: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    edits: list[Edit] = field(default_factory=list)
    operators: bool = False
    fingerprints: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    planted: dict[str, Any] = field(default_factory=dict)

    @property
    def references(self) -> References:
        """What a diagnosis may use: the trainer's model, the version before, the adapter."""
        previous = None if self.previous is None else ReferenceModel(self.previous)
        return References(ReferenceModel(self.base), previous, self.adapter)


@dataclass(frozen=True)
class Recorded:
    """Both capsules of a world, and how large the planted fault is.

    Attributes:
        effect: mean |difference| between the faulty and the healthy engine on the same path; None: not planted.
    """

    world: World
    rollout: Capsule
    train: Capsule
    effect: float | None = None


def healthy_world(family: str, seed: int, dtype: str | None = None, *, with_previous: bool = False) -> World:
    """A world without fault; dtype, kernels and path of the rollout are drawn."""
    rng = random.Random(f"{family}/{seed}")
    dtype = dtype or rng.choice(("float32", "bfloat16"))
    base = tiny_model(family, seed)
    engine_model = copy.deepcopy(base)
    engine_model.set_attn_implementation(rng.choice(("eager", "sdpa")))
    kind = getattr(torch, dtype)
    world = World(
        family,
        seed,
        dtype,
        rng,
        base,
        updated(base, seed + 7000, rng.uniform(0.02, 0.06)) if with_previous else None,
        Engine(ReferenceModel(engine_model), kind, rng.choice(PATHS)),
        Engine(ReferenceModel(base), kind, "right"),
    )
    world.config = ({"dtype": dtype}, {"dtype": dtype})
    return world


def record_world(world: World, plant: Callable[[World], None] | None = None) -> Recorded:
    """Plants the fault, samples, scores on both sides, and makes the capsules."""
    healthy = replace(world.rollout, hooks=[], edits={})
    if plant is not None:
        plant(world)
    prompts = _prompts(world.rng)
    sampler = replace(healthy, path="decode", sampling=world.rollout.sampling)
    completions = sampler.sample(prompts, LENGTH, world.seed)
    lengths = [world.rng.randint(LENGTH // 2, LENGTH) for _ in prompts]
    completions = [c[:n] for c, n in zip(completions, lengths, strict=True)]
    bare = build_capsule(Manifest(), prompts, completions, {})
    sequences = sequences_of(bare)
    recorded = world.rollout.logprobs(sequences)
    train = world.trainer.logprobs(sequences)
    effect = None
    if plant is not None:
        trainer = world.trainer
        same = replace(healthy, path=world.rollout.path, sampling=trainer.sampling, edits=trainer.edits)
        effect = float((recorded - same.logprobs(sequences)).abs().mean())
    sides = (
        _capsule(world, 0, bare, sequences, recorded, "rollout"),
        _capsule(world, 1, bare, sequences, train, "train"),
    )
    rollout = sides[0]
    for edit in world.edits:
        rollout = edit(rollout)
    rollout.validate()
    return Recorded(world, rollout, sides[1], effect)


def _prompts(rng: random.Random) -> list[list[int]]:
    return [[BOS, *(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(9, 20)))] for _ in range(SEQUENCES)]


def _capsule(world: World, index: int, bare: Capsule, sequences: Sequences, values: Tensor, side: str) -> Capsule:
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = values.float().numpy()
    name = "recorded.processed" if side == "rollout" else "train.processed"
    operators = Operators()
    if world.operators and side == "rollout":
        operators = _record(world, bare)
    tensors = world.fingerprints.get(side)
    manifest = Manifest(
        side=side,  # type: ignore[arg-type]
        engine="tiny",
        model=Model(name=f"tiny-{world.family}", family=world.family, vocab_size=VOCABULARY),
        sampling=world.declared[index],
        config=world.config[index],
        weights=None if tensors is None else Weights(version=index, tensors=fingerprints(tensors)),
        vocabulary={str(i): f" t{i}" for i in range(VOCABULARY)},
        operators=describe_operators(operators),
    )
    return replace(bare, manifest=manifest, logprobs={name: stream}, operators=operators)


def _record(world: World, bare: Capsule) -> Operators:
    parts = [bare.sequence(i) for i in range(RECORDED)]
    pairs = [
        (torch.from_numpy(bare.ids[p].astype(np.int64)), torch.from_numpy(bare.positions[p].astype(np.int64)))
        for p in parts
    ]
    with world.rollout.active() as model:
        values = record(model, pairs)
    return Operators(np.arange(parts[-1].stop), values)


def with_distribution(capsule: Capsule, rows: np.ndarray, logits: np.ndarray) -> Capsule:
    """The capsule with whole logits rows."""
    return replace(capsule, distribution=Distribution(rows, Stored.of(logits)))


def with_kept(capsule: Capsule, kept: Kept) -> Capsule:
    """The capsule with kept sets."""
    return replace(capsule, kept=kept)
