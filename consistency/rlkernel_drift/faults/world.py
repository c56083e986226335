"""A rollout engine and a trainer on one tiny model, and what they record; healthy until a fault is planted.

The weights are random, but peaked enough that sampled tokens differ in probability.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import (
    Capsule,
    Manifest,
    Model,
    Operators,
    Sampling,
    Weights,
    build_capsule,
    describe_operators,
)
from rlkernel_drift.diagnose.context import References
from rlkernel_drift.diagnose.inputs import filled
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import (
    Decoding,
    Head,
    Layout,
    ReferenceModel,
    decoded_hidden,
    prefixed_hidden,
    replaced,
    rotary_frequencies,
)
from rlkernel_drift.scoring.operators import record
from rlkernel_drift.scoring.semantics import SortedLogits
from rlkernel_drift.scoring.sequences import Sequences, sequences_of
from rlkernel_drift.scoring.weights import Adapter, fingerprints

FAMILIES = ("qwen3", "llama", "qwen2")
VOCABULARY = 256
LAYERS = 4
BOS = 1


def tiny_model(family: str, seed: int) -> Any:
    """A model of 0.2 million parameters in fp32.

    Args:
        family: one of `FAMILIES`; only Qwen3 ties its head to the embedding.
    """
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise DriftError("planted faults need transformers: pip install 'rlkernel[drift]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if family == "qwen3":
        settings["head_dim"] = 16
    config = getattr(transformers, f"{names[family]}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[family]}ForCausalLM")(config).eval()
        with torch.no_grad():
            embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            for name, p in model.named_parameters():
                if p.dim() == 1 and name.endswith("weight"):
                    p.mul_(1 + 0.1 * torch.randn_like(p))
                elif p.dim() == 1:
                    p.normal_(0, 0.05)
                elif ".layers." in name:
                    p.normal_(0, 0.12)
            embedding.normal_(0, 0.3)
            if head is not embedding:
                head.normal_(0, 0.3)
            # bfloat16 values, so that a copy in bfloat16 holds the same weights.
            for p in model.parameters():
                p.copy_(p.bfloat16().float())
    return model.requires_grad_(False)


def updated(model: Any, seed: int, size: float) -> Any:
    """The model after one imitated policy update: each tensor plus noise of `size` times its standard deviation."""
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in new.parameters():
            spread = float(p.std()) if p.numel() > 1 else 1.0
            step = torch.randn(p.shape, generator=generator) * spread * size
            p.copy_((p + step).bfloat16().float())
    return new


ForwardPath = Literal["decode", "alone", "left", "right"]


@dataclass
class Engine:
    """How a side computes.

    Attributes:
        path: "decode" computes token by token with a cache, the others one forward in a layout.
        sampling: the settings that its log-probabilities really have.
        inputs: change of tokens and positions before scoring.
        hooks: context managers around its forwards, such as a faulty operator; edits: replaced parameters.
        head_weight: weight of the head, if it is not the model's.
        extra_logits: number of padding entries of the vocabulary, with logit zero.
        decimals: decimals to which recorded log-probabilities are rounded.
        shift: tokens by which recorded log-probabilities are shifted.
        prefix: (model, tokens): keys and values of the first tokens come from another model.
        attend: multiple to which left padding is added and attended to; 0 for none.
        theta: base of the rotary embedding, if it is not the model's.
    """

    model: ReferenceModel
    dtype: torch.dtype = torch.float32
    path: ForwardPath = "decode"
    sampling: Sampling = field(default_factory=Sampling)
    head: Head = field(default_factory=Head)
    inputs: Callable[[Sequences], Sequences] = lambda sequences: sequences
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
        """The model with its edits and hooks applied inside the context."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.model.edited(self.edits, self.dtype))
            if self.theta is not None:
                stack.enter_context(_rotary_base(self.model.in_dtype(self.dtype), self.theta))
            for hook in self.hooks:
                stack.enter_context(hook(self.model.in_dtype(self.dtype)))
            yield self.model.in_dtype(self.dtype)

    def sample(self, prompts: list[list[int]], length: int, seed: int) -> list[list[int]]:
        """Samples completions; `logprobs` scores them."""
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
        """Log-probabilities of the counted tokens as this engine computes and records them."""
        given = self.inputs(sequences)
        if self.attend:
            width = -(-max(map(len, given.ids)) // self.attend) * self.attend
            given = filled(given, "sequences", width, "counted", 0)
        with self.active() as model:
            if self.prefix is not None:
                hidden = prefixed_hidden(
                    self.prefix[0].in_dtype(self.dtype), model, given, [self.prefix[1]] * len(given)
                )
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
        if self.decimals is not None:
            values = values.round(decimals=self.decimals)
        return _moved(values, sequences.owner, self.shift) if self.shift else values


def _rotary_base(model: Any, theta: float) -> contextlib.AbstractContextManager[None]:
    """Another base of the rotary embedding inside the context."""
    exponent = lambda f: torch.arange(len(f), dtype=torch.float64) / len(f)
    return replaced([(m, n, (theta ** -exponent(f)).to(f)) for m, n, f in rotary_frequencies(model)])


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    rows = SortedLogits(logits, torch.zeros(len(logits), dtype=torch.int64)).at(sampling.temperature)
    count = rows.kept(sampling.top_k, sampling.top_p, sampling.min_p)
    inside = torch.arange(logits.shape[1])[None, :] < count[:, None]
    rank = (rows.probabilities * inside).multinomial(1, generator=generator)
    return logits.sort(dim=-1, descending=True, stable=True).indices.gather(1, rank)[:, 0]


def _moved(values: Tensor, owner: Tensor, shift: int) -> Tensor:
    moved = torch.roll(values, shift)
    return torch.where(owner == torch.roll(owner, shift), moved, values)


SEQUENCES, LENGTH = 8, 36
RECORDED = 2
PATHS: tuple[ForwardPath, ...] = ("decode", "decode", "alone", "left", "right")
Edit = Callable[[Capsule], Capsule]


@dataclass
class World:
    """One rollout and its training forward.

    Attributes:
        rng: draws every planted value.
        base: the trainer's weights without adapter; previous: the previous version.
        rollout, trainer: the two engines.
        declared: sampling settings that the (rollout, train) capsules declare; config: configuration that they declare.
        edits: changes of the rollout's capsule, for faults that are visible in the files.
        operators: whether operator outputs of the rollout are recorded.
        fingerprints: side -> weights whose fingerprints are recorded.
        planted: the planted values, for the record.
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
        """What a diagnosis may use: the trainer's model, its previous version, the adapter."""
        previous = None if self.previous is None else ReferenceModel(self.previous)
        return References(ReferenceModel(self.base), previous, self.adapter)


@dataclass(frozen=True)
class Recorded:
    """Both capsules of a world.

    Attributes:
        effect: mean |difference| between the faulty and the healthy engine on the same path; None without a fault.
    """

    world: World
    rollout: Capsule
    train: Capsule
    effect: float | None = None


def healthy_world(family: str, seed: int, dtype: str | None = None, *, with_previous: bool = False) -> World:
    """A world without a fault; dtype, attention implementation and path of the rollout are drawn at random."""
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
    """Plants the fault, samples, scores on both sides, and builds the capsules."""
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
