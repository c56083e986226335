"""The optimizer of an update that is dealt to leaves: the same bits on any number of ranks.

Gradients are summed over leaves in the tree. Masters and moments, and as `train.shard` says gradients and weights, are
sharded over ranks by segments of 16384 elements, so that the norm has the contract's order.

Source: ZeRO-1 to ZeRO-3 of Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlkernel import ops
from rlkernel.models import Backbone
from rlkernel.optim import AdamW
from rlkernel.parallel.norm import norm_of
from rlkernel.parallel.ranks import Ranks
from rlkernel.training.buckets import Bucket, Piece
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.int8_adamw import MOMENTS
from rlkernel.training.int8_states import BLOCK
from rlkernel.training.optimizer import Optimizer

Shard = Literal["states", "gradients", "weights"]


def make_optimizer(
    model: Backbone, settings: OptimizerSettings, total: int, ranks: Ranks, shard: Shard = "states"
) -> Optimizer:
    """The optimizer of a model in a run; arguments as in `ShardedOptimizer`."""
    if ranks.leaves == 1:
        return Optimizer(model, settings, total)
    return ShardedOptimizer(model, settings, total, ranks, shard)


class State(NamedTuple):
    """One state of a parameter: a value per element, or one per block of `per` elements.

    Attributes:
        is_flat: stored as [numel / per], not in the parameter's shape, as 8-bit moments are.
    """

    dtype: torch.dtype = torch.float32
    per: int = 1
    is_flat: bool = False

    def part(self, piece: Piece) -> slice:
        """The values of a piece."""
        return slice(piece.begin // self.per, -(-piece.end // self.per))


class ShardedOptimizer(Optimizer):
    """`Optimizer` for a model whose updates ranks share.

    Args:
        model, settings, total: as in `Optimizer`.
        ranks: this one and the others.
        shard: what each rank keeps only its part of. "states": masters and moments. "gradients": also the gradients of
            layers; each layer's are summed as soon as its backward ends, in memory that all layers share. "weights":
            also the weights of layers, which are gathered for each forward and backward of a layer, and for
            `whole_weights`, in which every other forward must run. With the last two a leaf is one backward.
    """

    def __init__(self, model: Backbone, settings: OptimizerSettings, total: int, ranks: Ranks, shard: Shard = "states"):
        self.ranks, self.shard = ranks, shard
        self._hooks: list[Any] = []
        super().__init__(model, settings, total)

    def _make_adamw(self) -> AdamW:
        self._layers: list[Bucket] = []
        layers: dict[int, list[tuple[str, Tensor]]] = {}
        rest: list[tuple[str, Tensor]] = []
        for name, p in self.named:
            found = re.match(r"layers\.(\d+)\.", name) if self.one_backward else None
            (layers.setdefault(int(found[1]), []) if found else rest).append((name, p))
        for i in sorted(layers, reverse=True):  # in the order of the backward
            grads = self._layers[0].grads if self._layers else None
            bucket = Bucket(layers[i], self.ranks, grads, self.shard == "weights")
            self._layers.append(bucket)
            layer = self.model.layers[i]
            self._hooks.append(layer.register_forward_pre_hook(partial(self._before_layer, bucket)))
            self._hooks.append(layer.register_forward_hook(partial(self._after_layer, bucket)))
        self._rest = [Bucket(rest, self.ranks)] if rest else []
        self._pinned = True  # weights stay whole until they are sharded for the first time
        self._waiting: list[Bucket] = []  # layers whose forward has run in this leaf
        self._running: list[Bucket] = []  # the layer whose backward runs
        self._added: list[Bucket] = []  # layers whose backward has run
        self._pieces = {name: piece for bucket in self._buckets for name, piece in bucket.pieces.items()}
        self.model.zero_main_grads()
        return self._adamw_over([self._pieces[name].weight for name, _ in self.named if name in self._pieces])

    @property
    def _buckets(self) -> list[Bucket]:
        return [*self._layers, *self._rest]

    def _before_layer(self, bucket: Bucket, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Gathers the layer's weights, and has its gradients summed once the backward reaches the layer's input.

        Activation checkpointing runs a layer again that still waits for its backward.
        """
        if not bucket.is_whole:
            bucket.gather()
        if not torch.is_grad_enabled() or bucket in self._waiting:
            return
        if bucket in self._added:
            raise RuntimeError(f"train.shard={self.shard}: a leaf is one backward, and a second one has begun")
        if inputs[0].requires_grad:  # not the first layer's with adapters; `end_leaf` adds that one
            self._waiting.append(bucket)
            inputs[0].register_hook(lambda gradient: self._end_backward(bucket))

    def _after_layer(self, bucket: Bucket, layer: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Frees the layer's weights until its backward begins."""
        if self._pinned or not bucket.shards_weights or bucket in self._running:
            return
        bucket.free()
        if torch.is_grad_enabled():
            outputs[0].register_hook(lambda gradient: self._begin_backward(bucket))

    def _begin_backward(self, bucket: Bucket) -> None:
        self._running.append(bucket)
        bucket.gather()

    def _end_backward(self, bucket: Bucket) -> None:
        self._waiting.remove(bucket)
        self._added.append(bucket)
        bucket.add_leaf()
        if bucket in self._running:
            self._running.remove(bucket)
            bucket.free()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        if self.shard != "weights":
            yield
            return
        self._pin()
        yield
        self._pinned = False
        for bucket in self._layers:
            bucket.take_own()
            bucket.free()

    def _pin(self) -> None:
        self._pinned = True
        for bucket in self._layers:
            if not bucket.is_whole:
                bucket.gather()

    def model_tensors(self) -> dict[str, Tensor]:
        if self.shard != "weights":
            return super().model_tensors()
        with self.whole_weights():
            tensors = super().model_tensors()
            return {name: t.to("cpu", copy=True) for name, t in tensors.items()} if self.ranks.leads else {}

    @property
    def one_backward(self) -> bool:
        return self.shard != "states"

    def close(self) -> None:
        self._pin()
        for hook in self._hooks:
            hook.remove()

    def gather(self) -> None:
        if self.one_backward and any(p.grad is not None for _, p in self.named):
            raise RuntimeError(
                f"train.shard={self.shard}: an op left a gradient in `grad`, which its layer has not summed"
            )
        super().gather()

    def end_leaf(self) -> None:
        self.model.fold_main_grads()
        is_empty = not self._added
        if is_empty:  # follows the other ranks through their forwards, and into the backward of the last layer
            for bucket in [*reversed(self._layers), *self._layers[:1]]:
                self._visit(bucket)
        for i, bucket in enumerate(self._buckets):
            if bucket in self._added:
                continue
            if is_empty and i + 1 < len(self._layers):  # a layer's output is the next one's input: this hook is first
                self._visit(self._layers[i + 1])
            bucket.add_leaf()
        self._added.clear()

    def _visit(self, bucket: Bucket) -> None:
        """Takes part in the gathering of a layer's weights."""
        if bucket.shards_weights and not self._pinned:
            bucket.gather()
            bucket.free()

    def discard_leaf(self) -> None:
        if self._layers:
            raise RuntimeError(
                "out of memory in a leaf whose layers' gradients are partly summed; raise train.leaves, set "
                "train.gradient_checkpointing=true, or set train.shard=states"
            )
        super().discard_leaf()

    def discard(self) -> None:
        for bucket in self._buckets:
            bucket.discard()

    def _norm(self) -> ops.GradNorm:
        squares = {name: each for bucket in self._buckets for name, each in bucket.finish().items()}
        return norm_of([squares[name] for name, _ in self.named], self.settings.clip_norm)

    def _share_weights(self) -> None:
        self._pinned = False
        for bucket in self._buckets:
            bucket.share_weights()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `Optimizer.state`, with whole tensors on rank 0 and none on the others; every rank must call it."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.named if self.updates else ():
            for kind, state in self._states(p).items():
                whole = torch.zeros(-(-p.numel() // state.per), dtype=state.dtype, device=self._state_device)
                if name in self._pieces:
                    piece = self._pieces[name]
                    whole[state.part(piece)] = self.adamw.state[piece.weight][kind].view(-1)
                self.ranks.complete(whole)
                if self.ranks.leads:
                    tensors[f"{name}.{kind}"] = (whole if state.is_flat else whole.view(p.shape)).cpu()
        steps = {name: self.updates for name, _ in self.named} if self.updates else {}
        return tensors, {"updates": self.updates, "steps": steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.updates = numbers["updates"]
        for bucket in self._buckets:  # the weights were loaded before
            bucket.take_own()
        for name, p in self.named:
            if name in numbers["steps"] and name in self._pieces:
                piece = self._pieces[name]
                own: dict[str, Any] = {"step": numbers["steps"][name]}
                for kind, state in self._states(p).items():
                    part = tensors[f"{name}.{kind}"].view(-1)[state.part(piece)]
                    own[kind] = part if state.is_flat else part.view(piece.weight.shape)
                self.adamw.set_state(piece.weight, own)

    @property
    def _state_device(self) -> torch.device:
        return torch.device("cpu") if self.settings.offload else self.model.device

    def _states(self, p: Tensor) -> dict[str, State]:
        """The states of a parameter by their names in AdamW."""
        states: dict[str, State] = {}
        for moment in MOMENTS:
            if self.settings.states == "int8" and p.dim() >= 2:
                states |= {moment: State(torch.uint8, 1, True), f"{moment}_max": State(torch.float32, BLOCK, True)}
            else:
                states[moment] = State()
        return states if p.dtype == torch.float32 else {**states, "master": State()}
