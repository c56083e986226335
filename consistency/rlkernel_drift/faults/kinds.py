"""The kinds of planted faults: each draws its values at random and lists the causes that count as right.

A `visible` fault shows in the files and is named by a gate; the others show only in the log-probabilities or operators.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Sampling, build_capsule
from rlkernel_drift.diagnose.inputs import restart_positions, scale_positions, shift_positions
from rlkernel_drift.faults.world import LAYERS, VOCABULARY, World
from rlkernel_drift.scoring.model import Head, ReferenceModel, replaced, rotary_frequencies
from rlkernel_drift.scoring.operators import changed
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.scoring.weights import QUANTISATIONS, Adapter, linear_names, quantised

ALL = ("qwen3", "llama", "qwen2")
UNTIED = ("llama", "qwen2")

Plant = Callable[[World], None]
OutputChange = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        group: semantics, weights, tokens, layout, precision, settings, operators or unseen (by the grammar).
        causes: verdicts that count as right.
        operator: whether the verdict must also name the planted operator. place: whether its location must contain the
            planted place.
        dtype: the only dtype in which the fault exists; None draws one.
        previous: whether the diagnosis is given the previous version of the weights.
    """

    name: str
    group: str
    causes: frozenset[str]
    plant: Plant
    families: tuple[str, ...] = ALL
    dtype: str | None = None
    previous: bool = False
    visible: bool = False
    operator: bool = False
    place: bool = False


KINDS: dict[str, Kind] = {}


def kind(name: str, group: str, *causes: str, **options: Any) -> Callable[[Plant], None]:
    """Registers a planting function as a kind; without `causes` the kind's own name is the cause."""

    def register(plant: Plant) -> None:
        KINDS[name] = Kind(name, group, frozenset(causes or (name,)), plant, **options)

    return register


def _set(world: World, attribute: str, value: Any, planted: str = "") -> None:
    """Sets an attribute of the rollout engine, and records the value under the name `planted`."""
    setattr(world.rollout, attribute, value)
    if planted:
        world.planted[planted] = value


def _away_from(world: World, low: float, high: float, centre: float, gap: float) -> float:
    """A value drawn from a range, at least `gap` away from its harmless centre."""
    while True:
        value = world.rng.uniform(low, high)
        if abs(value - centre) >= gap:
            return value


# ---- semantics -----------------------------------------------------------------------------------------------------


def _sample(world: World, **settings: Any) -> None:
    world.planted |= settings
    world.rollout.sampling = Sampling(**settings)


kind("temperature", "semantics")(lambda w: _sample(w, temperature=_away_from(w, 0.4, 1.6, 1.0, 0.08)))
kind("top-p", "semantics")(lambda w: _sample(w, top_p=w.rng.uniform(0.5, 0.96)))
kind("top-k", "semantics")(lambda w: _sample(w, top_k=w.rng.randint(3, 60)))
kind("min-p", "semantics")(lambda w: _sample(w, min_p=w.rng.uniform(0.01, 0.3)))
kind("temperature and top-p", "semantics", "top-p")(
    lambda w: _sample(w, temperature=_away_from(w, 0.5, 1.4, 1.0, 0.12), top_p=w.rng.uniform(0.6, 0.93))
)


@kind("declared temperature", "semantics", "temperature", visible=True)
def declared_temperature(world: World) -> None:
    _sample(world, temperature=_away_from(world, 0.4, 1.6, 1.0, 0.05))
    world.declared = (world.rollout.sampling, Sampling())


@kind("raw against processed", "semantics", "logprobs-mode", visible=True)
def raw_against_processed(world: World) -> None:
    value = _away_from(world, 0.4, 1.6, 1.0, 0.05)
    world.planted["temperature"] = value
    world.trainer.sampling = Sampling(temperature=value)
    world.declared = (Sampling(temperature=value), Sampling(temperature=value))
    world.edits.append(lambda c: replace(c, logprobs={"recorded.raw": c.logprobs["recorded.processed"]}))


kind("padded vocabulary", "semantics", "padded-vocabulary")(
    lambda w: _set(w, "extra_logits", w.rng.randint(24, 400), "entries")
)
kind("off by one", "semantics", "off-by-one")(lambda w: _set(w, "shift", w.rng.choice((1, -1)), "tokens"))


# ---- weights -------------------------------------------------------------------------------------------------------


kind("stale weights", "weights", "stale-weights", previous=True)(lambda w: _replace_model(w, w.previous))


@kind("stale fingerprints", "weights", "stale-weights", "weights-differ", previous=True, visible=True)
def stale_fingerprints(world: World) -> None:
    _replace_model(world, world.previous)
    _fingerprint(world, dict(world.previous.named_parameters()))


@kind("one stale tensor", "weights", "partial-sync", previous=True)
def one_stale_tensor(world: World) -> None:
    name = _random_projection(world)
    old = dict(world.previous.named_parameters())[name].data
    new = dict(world.base.named_parameters())[name].data
    # The tensor missed several updates, so its old value is further away than one update.
    far = new + (old - new) * world.rng.uniform(4, 8)
    dict(world.previous.named_parameters())[name].data = far.bfloat16().float()
    world.rollout.edits[name] = far.bfloat16().float()


@kind("one stale fingerprint", "weights", "partial-sync", previous=True, visible=True)
def one_stale_fingerprint(world: World) -> None:
    name = _random_projection(world)
    world.rollout.edits[name] = dict(world.previous.named_parameters())[name].data
    _fingerprint(world, {**dict(world.base.named_parameters()), name: world.rollout.edits[name]})


@kind("missing LoRA", "weights", "lora-missing")
def missing_lora(world: World) -> None:
    world.adapter = _adapter(world)
    world.trainer.edits |= world.adapter.merged(world.trainer.model)


@kind("LoRA scale", "weights", "lora-scale")
def lora_scale(world: World) -> None:
    world.adapter = _adapter(world)
    factor = world.planted["factor"] = world.rng.choice((world.rng.uniform(0.2, 0.7), world.rng.uniform(1.5, 6.0)))
    world.trainer.edits |= world.adapter.merged(world.trainer.model)
    world.rollout.edits |= world.adapter.merged(world.rollout.model, factor)


kind("head is the embedding", "weights", "tied-embedding", families=UNTIED)(
    lambda w: _set(w, "head_weight", w.base.get_input_embeddings().weight.data)
)


@kind("swapped projections", "weights", "swapped-weights")
def swapped_projections(world: World) -> None:
    left, right = world.rng.choice((("k_proj", "v_proj"), ("gate_proj", "up_proj")))
    world.planted["tensors"] = f"{left} and {right}"
    parameters = {name: p.data for name, p in world.base.named_parameters()}
    for name in parameters:
        if f".{left}." in name:
            other = name.replace(left, right)
            world.rollout.edits |= {name: parameters[other], other: parameters[name]}


@kind("eight-bit weights", "weights", "quantised-weights", dtype="float32")
def eight_bit_weights(world: World) -> None:
    how = world.planted["rounding"] = world.rng.choice(QUANTISATIONS)
    for name in linear_names(world.trainer.model):
        world.rollout.edits[name] = quantised(world.trainer.model.parameter(name), how)


def _replace_model(world: World, model: Any) -> None:
    engine = copy.deepcopy(model)
    engine.set_attn_implementation(world.rollout.model.model.config._attn_implementation)
    world.rollout.model = ReferenceModel(engine)


def _random_projection(world: World) -> str:
    name = world.planted["tensor"] = world.rng.choice(linear_names(world.trainer.model))
    return name


def _fingerprint(world: World, rollout: dict[str, Tensor]) -> None:
    world.fingerprints = {
        "rollout": {name: p.detach() for name, p in rollout.items()},
        "train": {name: p.detach() for name, p in world.base.named_parameters()},
    }


def _adapter(world: World) -> Adapter:
    generator = torch.Generator().manual_seed(world.seed)
    updates = {}
    for name in linear_names(world.trainer.model):
        if name.split(".")[-2] in ("q_proj", "v_proj", "up_proj"):
            n, k = world.trainer.model.parameter(name).shape
            a, b = torch.randn(4, k, generator=generator) * 0.1, torch.randn(n, 4, generator=generator) * 0.1
            updates[name] = b @ a
    return Adapter(updates)


# ---- tokens --------------------------------------------------------------------------------------------------------


def _inputs(world: World, parameter: str, value: Any, change: Callable[[Sequences, Any], Sequences]) -> None:
    world.planted[parameter] = value
    world.rollout.inputs = lambda sequences: change(sequences, value)


kind("dropped first token", "tokens", "missing-bos")(lambda w: _set(w, "inputs", lambda s: s.drop_first(1)))
kind("dropped system prompt", "tokens", "chat-template")(
    lambda w: _inputs(w, "tokens", w.rng.randint(3, 8), Sequences.drop_first)
)
kind("dropped generation prompt", "tokens", "chat-template")(
    lambda w: _inputs(w, "tokens", w.rng.randint(2, 6), Sequences.drop_prompt_end)
)


kind("no first token in the files", "tokens", "missing-bos", visible=True)(
    lambda w: w.edits.append(lambda c: _rebuilt(c, lambda p, a: (p[1:], a)))
)


@kind("other template in the files", "tokens", "chat-template", visible=True)
def other_template(world: World) -> None:
    extra = [world.rng.randrange(2, VOCABULARY) for _ in range(world.rng.randint(3, 6))]
    world.edits.append(lambda c: _rebuilt(c, lambda p, a: ([*p[:2], *extra, *p[2:]], a)))


@kind("retokenised", "tokens", "retokenised", visible=True)
def retokenised(world: World) -> None:
    """Two tokens of a completion become two others with the same text."""
    at = world.rng.randint(2, 8)

    def edit(capsule: Capsule) -> Capsule:
        ids = capsule.ids.copy()
        first = int(capsule.cu_seqlens[1]) - at
        a, b = f" t{ids[first]}", f" t{ids[first + 1]}"
        ids[first], ids[first + 1] = (ids[first] + 1) % VOCABULARY, (ids[first + 1] + 1) % VOCABULARY
        words = dict(capsule.manifest.vocabulary)
        words[str(int(ids[first]))], words[str(int(ids[first + 1]))] = a, b
        return replace(capsule, ids=ids, manifest=capsule.manifest.model_copy(update={"vocabulary": words}))

    world.edits.append(edit)


@kind("cut sequences", "tokens", "truncated", visible=True)
def cut_sequences(world: World) -> None:
    count = world.rng.randint(2, 6)
    world.edits.append(lambda c: _rebuilt(c, lambda p, a: (p, a[:-count])))


@kind("other mask", "tokens", "mask-differs", visible=True)
def other_mask(world: World) -> None:
    count = world.rng.randint(3, 20)

    def edit(capsule: Capsule) -> Capsule:
        mask = capsule.mask.copy()
        mask[world.rng.sample([int(i) for i in np.flatnonzero(mask)], count)] = False
        return replace(capsule, mask=mask)

    world.edits.append(edit)


@kind("observation tokens", "tokens", "observation-tokens", visible=True)
def observation_tokens(world: World) -> None:
    count = world.rng.randint(4, 10)

    def edit(capsule: Capsule) -> Capsule:
        values = capsule.logprobs["recorded.processed"].copy()
        for i in range(0, capsule.sequences, 2):
            start = capsule.sequence(i).stop - count - 2
            values[start : start + count] = 0.0
        return replace(capsule, logprobs={"recorded.processed": values})

    world.edits.append(edit)


def _response_start(capsule: Capsule, sequence: int) -> int:
    part = capsule.sequence(sequence)
    return part.start + int(np.flatnonzero(capsule.mask[part])[0])


def _rebuilt(capsule: Capsule, change: Callable[[list[int], list[int]], tuple[list[int], list[int]]]) -> Capsule:
    prompts, completions, values = [], [], []
    stream = capsule.logprobs["recorded.processed"]
    for i in range(capsule.sequences):
        part, start = capsule.sequence(i), _response_start(capsule, i)
        p, a = change(capsule.ids[part.start : start].tolist(), capsule.ids[start : part.stop].tolist())
        prompts.append(p)
        completions.append(a)
        values.append(stream[start : start + len(a)])
    return build_capsule(capsule.manifest, prompts, completions, {"recorded.processed": values})


# ---- layout --------------------------------------------------------------------------------------------------------


kind("positions restart", "layout", "positions-restart")(lambda w: _set(w, "inputs", restart_positions))
kind("positions jump", "layout", "positions-shift")(
    lambda w: _inputs(w, "positions", w.rng.randint(3, 14), shift_positions)
)


@kind("positions in the files", "layout", "positions-restart", "positions-shift", visible=True)
def positions_in_the_files(world: World) -> None:
    def edit(capsule: Capsule) -> Capsule:
        positions = capsule.positions.copy()
        for i in range(capsule.sequences):
            start = _response_start(capsule, i)
            positions[start : capsule.sequence(i).stop] -= positions[start]
        return replace(capsule, positions=positions)

    world.edits.append(edit)


kind("attended padding", "layout", "padding-side")(
    lambda w: _set(w, "attend", w.rng.choice((1, 8, 16, 32, 64)), "multiple")
)
kind("rope base", "layout", "rope-base")(lambda w: _set(w, "theta", 10 ** _away_from(w, 2.6, 6.5, 4.0, 0.4), "theta"))
kind("rope scaling", "layout", "rope-scaling")(lambda w: _inputs(w, "factor", w.rng.uniform(1.4, 8.0), scale_positions))


@kind("stale prefix cache", "layout", "prefix-cache", previous=True)
def stale_prefix_cache(world: World) -> None:
    count = world.planted["tokens"] = world.rng.randint(4, 9)
    world.rollout.prefix = (ReferenceModel(world.previous), count)


# ---- precision -----------------------------------------------------------------------------------------------------


kind("bfloat16 logits", "precision", "bf16-logits", dtype="float32")(
    lambda w: _set(w, "head", Head(inputs=w.rng.choice((None, torch.bfloat16)), logits=torch.bfloat16))
)
kind("bfloat16 head", "precision", "head-dtype", dtype="float32")(
    lambda w: _set(w, "head", Head(inputs=torch.bfloat16))
)
kind("bfloat16 layers", "precision", "body-dtype", dtype="float32")(lambda w: _set(w, "dtype", torch.bfloat16))
kind("rounded records", "precision", "rounded-records", dtype="float32")(
    lambda w: _set(w, "decimals", w.rng.randint(1, 4), "decimals")
)


@kind("bfloat16 rotary frequencies", "precision", "rope-dtype", dtype="float32")
def bfloat16_rotary(world: World) -> None:
    rounded = lambda model: [(m, n, f.bfloat16().to(f)) for m, n, f in rotary_frequencies(model)]
    world.rollout.hooks.append(lambda model: replaced(rounded(model)))


# ---- settings of the model -----------------------------------------------------------------------------------------


@kind("norm epsilon in every layer", "settings", "norm-epsilon")
def every_norm_epsilon(world: World) -> None:
    epsilon = world.planted["epsilon"] = 10 ** world.rng.uniform(-4.0, -0.7)
    norms = lambda model: [m for m in model.modules() if hasattr(m, "variance_epsilon")]
    world.rollout.hooks.append(lambda model: replaced([(m, "variance_epsilon", epsilon) for m in norms(model)]))


@kind("other GELU", "settings", "activation", dtype="float32")
def other_gelu(world: World) -> None:
    trained, engine = world.rng.choice(("none", "tanh")), world.rollout
    world.planted["approximate"] = trained
    for model in (world.base, engine.model.model):
        for layer in model.base_model.layers:
            layer.mlp.act_fn = torch.nn.GELU(approximate=trained)
    other = torch.nn.GELU(approximate="tanh" if trained == "none" else "none")
    layers = lambda model: [layer.mlp for layer in model.base_model.layers]
    engine.hooks.append(lambda model: replaced([(mlp, "act_fn", other) for mlp in layers(model)]))


# ---- the cache -----------------------------------------------------------------------------------------------------


@kind("eight-bit keys and values", "precision", "operator-dtype", "kv-cache-dtype", "operator", dtype="float32")
def eight_bit_cache(world: World) -> None:
    names = {f"layers.{layer}.{name}" for layer in range(LAYERS) for name in ("k_proj", "v_proj")}
    rounded = lambda value: quantised(value.flatten(0, 1), "int8 per row").view(value.shape)
    world.rollout.hooks.append(lambda model: changed(model, names, rounded))


# ---- operators -----------------------------------------------------------------------------------------------------


def _layer(world: World, operator: str) -> int:
    # Kinds share their worlds: with the world's own generator each kind would draw the same layer and size.
    world.rng = random.Random(f"{operator}/{world.family}/{world.seed}")
    layer = world.rng.randrange(LAYERS)
    world.planted["operator"] = f"layers.{layer}.{operator}"
    world.operators = True
    return layer


def _operator_kind(name: str, operator: str, draw: Callable[[World], OutputChange], **options: Any) -> None:
    """Registers a fault that changes an operator's output in one layer drawn at random."""

    @kind(f"{name} in one layer", "operators", "operator", operator=True, **options)
    def plant(world: World) -> None:
        layer = _layer(world, operator)
        change = draw(world)
        world.rollout.hooks.append(lambda model: changed(model, {f"layers.{layer}.{operator}"}, change))


def _scale(world: World) -> OutputChange:
    factor = 1 + world.rng.choice((-1, 1)) * world.rng.uniform(0.03, 0.25)
    world.planted["factor"] = factor
    return lambda x: (x.float() * factor).to(x.dtype)


def _noise(world: World) -> OutputChange:
    size = world.planted["size"] = world.rng.uniform(0.03, 0.3)
    direction = torch.randn(4096, generator=torch.Generator().manual_seed(world.seed))

    def change(x: Tensor) -> Tensor:
        wide = x.float()
        rms = wide.square().mean(-1, keepdim=True).sqrt()
        return (wide + size * rms * direction[: x.shape[-1]]).to(x.dtype)

    return change


def _heads(world: World) -> OutputChange:
    """Two heads are exchanged, as by a wrong mapping of grouped queries."""
    return lambda x: x.unflatten(-1, (4, -1))[..., [1, 0, 2, 3], :].flatten(-2)


_operator_kind("scale of the norm before attention", "input_norm", _scale)
_operator_kind("scale of the norm before the MLP", "post_norm", _scale)
_operator_kind("error of the query projection", "q_proj", _noise)
_operator_kind("error of the key projection", "k_proj", _noise)
_operator_kind("error of the value projection", "v_proj", _noise)
_operator_kind("exchanged heads", "attention", _heads)
_operator_kind("error of the output projection", "o_proj", _noise)
_operator_kind("error of the gate projection", "gate_proj", _noise)
_operator_kind("error of the up projection", "up_proj", _noise)
_operator_kind("scale of the activation", "activation", _scale)
_operator_kind("error of the down projection", "down_proj", _noise)
_operator_kind("scale of the residual", "output", _scale)


@kind("norm epsilon in one layer", "operators", "operator", operator=True)
def norm_epsilon(world: World) -> None:
    layer = _layer(world, "input_norm")
    epsilon = world.planted["epsilon"] = 10 ** world.rng.uniform(-1.7, -0.3)
    norm = lambda model: model.base_model.layers[layer].input_layernorm
    world.rollout.hooks.append(lambda model: replaced([(norm(model), "variance_epsilon", epsilon)]))


@kind("attention scale in one layer", "operators", "operator", operator=True)
def attention_scale(world: World) -> None:
    layer = _layer(world, "attention")
    factor = world.planted["factor"] = world.rng.choice((world.rng.uniform(0.4, 0.85), world.rng.uniform(1.2, 2.0)))

    def hook(model: Any) -> contextlib.AbstractContextManager[None]:
        attention = model.base_model.layers[layer].self_attn
        return replaced([(attention, "scaling", attention.scaling * factor)])

    world.rollout.hooks.append(hook)


@kind("activation in one layer", "operators", "operator", operator=True)
def activation_function(world: World) -> None:
    layer = _layer(world, "activation")
    mlp = lambda model: model.base_model.layers[layer].mlp
    world.rollout.hooks.append(lambda model: replaced([(mlp(model), "act_fn", torch.nn.GELU())]))


_operator_kind("norm of queries", "q_norm", _scale, families=("qwen3",))


@kind("final norm", "operators", "operator", operator=True)
def final_norm(world: World) -> None:
    world.operators = True
    world.planted["operator"] = "final_norm"
    change = _noise(world)
    world.rollout.hooks.append(lambda model: changed(model, {"final_norm"}, change))
