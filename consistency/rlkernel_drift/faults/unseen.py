"""Kinds of planted faults that no change of the grammar contains: the diagnosis can only say where they are.

They were written after the grammar and are not used to tune it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.faults.kinds import kind
from rlkernel_drift.faults.world import LAYERS, World
from rlkernel_drift.scoring.operators import changed

_PLACES = ("operator", "scaled-weights", "swapped-weights", "missing-weights", "operator-dtype", "norm-epsilon")


def _in_a_layer(name: str, operator: str, change: Callable[[World, Tensor], Tensor]) -> None:
    """Registers a fault of one operator in a layer drawn at random; no operators are recorded."""

    @kind(f"{name} in one layer", "unseen", *_PLACES, place=True)
    def plant(world: World) -> None:
        place = world.planted["place"] = f"layers.{world.rng.randrange(LAYERS)}"
        world.rollout.hooks.append(lambda model: changed(model, {f"{place}.{operator}"}, lambda x: change(world, x)))


def _random(world: World, x: Tensor, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(world.seed)
    step = torch.randn(x.shape[-1], x.shape[-1], generator=generator) * x.shape[-1] ** -0.5
    return x + size * (x.float() @ step).to(x.dtype)


def _of_heads(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(x.unflatten(-1, (-1, 16)).clone()).flatten(-2)


def _first_head_zero(heads: Tensor) -> Tensor:
    heads[..., 0, :] = 0
    return heads


_in_a_layer("a head without output", "attention", lambda w, x: _of_heads(x, _first_head_zero))
_in_a_layer("values mixed at random", "v_proj", lambda w, x: _random(w, x, 0.2))
_in_a_layer("queries mixed at random", "q_proj", lambda w, x: _random(w, x, 0.2))
_in_a_layer("an MLP's result mixed at random", "down_proj", lambda w, x: _random(w, x, 0.1))
_in_a_layer("saturated activations", "activation", lambda w, x: x.clamp(-0.5 * float(x.std()), 0.5 * float(x.std())))
_in_a_layer("gates with the wrong sign below zero", "gate_proj", lambda w, x: torch.where(x < 0, -x, x))
_in_a_layer("half of the channels of a norm missing", "post_norm", lambda w, x: x * (torch.arange(x.shape[-1]) % 2))
_in_a_layer(
    "every eighth channel of the output projection missing",
    "o_proj",
    lambda w, x: x * (torch.arange(x.shape[-1]) % 8 > 0),
)


@kind("every layer's keys mixed at random", "unseen", "operator", "weights-differ", place=True)
def mixed_keys(world: World) -> None:
    world.planted["place"] = "in every layer"
    names = {f"layers.{layer}.k_proj" for layer in range(LAYERS)}
    world.rollout.hooks.append(lambda model: changed(model, names, lambda x: _random(world, x, 0.2)))


def _recorded(name: str, causes: tuple[str, ...], change: Callable[[World, Tensor], Tensor]) -> None:
    """Registers a fault of the recorded log-probabilities, [N] in the order of the requests."""

    @kind(name, "unseen", *causes)
    def plant(world: World) -> None:
        engine = world.rollout
        inner = engine.logprobs
        engine.logprobs = lambda sequences: change(world, inner(sequences))  # type: ignore[method-assign]


def _some(world: World, x: Tensor, share: float) -> Tensor:
    return torch.rand(len(x), generator=torch.Generator().manual_seed(world.seed)) < share


_recorded(
    "a few tokens hold the value before them",
    ("few-tokens", "off-by-one"),
    lambda w, x: torch.where(_some(w, x, 0.03), x.roll(1), x),
)
_recorded(
    "a few tokens are far too likely",
    ("few-tokens", "clamped"),
    lambda w, x: torch.where(_some(w, x, 0.03), x * 0.3, x),
)


def _later_requests(world: World, x: Tensor) -> Tensor:
    later = torch.arange(len(x)) > 0.7 * len(x)
    return torch.where(later, x * 1.2 - 0.05, x)


_recorded("the last requests have other values", ("some-requests", "units", "some-places"), _later_requests)


@kind("other weights in the second half of each completion", "unseen", "mid-request", "some-places")
def second_half(world: World) -> None:
    engine, other = world.rollout, world.base
    inner = engine.logprobs
    generator = torch.Generator().manual_seed(world.seed)
    edits = {
        name: p.data + 0.1 * float(p.std()) * torch.randn(p.shape, generator=generator)
        for name, p in other.named_parameters()
        if name.endswith("proj.weight")
    }

    def logprobs(sequences: Any) -> Tensor:
        first = inner(sequences)
        engine.edits = edits
        second = inner(sequences)
        engine.edits = {}
        counts = torch.bincount(sequences.owner)
        index = torch.cat([torch.arange(int(n)) for n in counts])
        return torch.where(index < counts[sequences.owner] // 2, first, second)

    engine.logprobs = logprobs  # type: ignore[method-assign]


@kind("another version of all weights", "unseen", "weights-differ", place=True)
def another_version(world: World) -> None:
    world.planted["place"] = "all layers"
    generator = torch.Generator().manual_seed(world.seed)
    for name, p in world.base.named_parameters():
        if name.endswith("proj.weight"):
            world.rollout.edits[name] = p.data + 0.03 * float(p.std()) * torch.randn(p.shape, generator=generator)
