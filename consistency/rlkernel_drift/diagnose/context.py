"""One side to be explained: its tokens and log-probabilities, its declared computation, its noise floor.

A `Computation` holds everything that decides the log-probabilities of given tokens, from the inputs to the recording.
A change maps one computation to another, so that changes compose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling, dtype_name
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.attention import AttentionChange, AttentionState, attending
from rlkernel_drift.scoring.model import (
    DTYPES,
    Head,
    Layout,
    ReferenceModel,
    decoded_hidden,
    name_of,
    prefixed_hidden,
    replaced,
)
from rlkernel_drift.scoring.semantics import IMPOSSIBLE, processed
from rlkernel_drift.scoring.sequences import Sequences, sequences_of, side_by_side
from rlkernel_drift.scoring.weights import Adapter

_HEALTHY_MEAN, _HEALTHY_TAIL, _HEALTHY_SEQUENCE, _HEALTHY_BIAS = 1.25, 2.0, 2.5, 0.3  # times the floor's mean or p99
_AT_ONCE = 8192  # tokens that go through the model in one call
_KEPT = 1 << 30  # largest size of the kept outputs of the layers, in bytes
_BODIES = 6  # bodies whose hidden states are kept
RACED = 3
"""In 16 bits, fewer differing tokens than this are not named, because a near tie of two experts can move single tokens
far."""
MATCHING = 3
"""In 16 bits, requests are not named where fewer others match, because a fault of all may be hidden in their noise."""
_LONG, _TIE = 8, 2.0  # least tokens of a sequence, and most nats, of which one may be such a token
_OF_16_BITS = 1e-4  # nats: noise floors above it are those of 16 bits
_SPREAD = 0.75  # standard errors of a sequence's mean, in 99% quantiles over the root of its tokens

Patch = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""A change of the model of a dtype, active inside the context manager."""


@dataclass(frozen=True)
class Body:
    """What decides the hidden states of given tokens.

    Attributes:
        config: entries of the model's configuration that are replaced.
        edits: parameters that are replaced, by name.
        patches: hooks and attributes. attention: changes of queries, keys, values and masks.
        previous: whether the weights are those of the previous version.
        prefix: first tokens of each sequence that went through the previous version of the weights; () means none.
        decoded: whether tokens are computed one by one with a cache.
        start: layers before this one compute what they declare, and are not computed again.
    """

    sequences: Sequences
    dtype: torch.dtype
    layout: Layout | None = None
    config: tuple[tuple[str, Any], ...] = ()
    edits: Mapping[str, Tensor] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()
    attention: tuple[AttentionChange, ...] = ()
    kernels: str = ""
    previous: bool = False
    prefix: tuple[int, ...] = ()
    decoded: bool = False
    start: int = 0


@dataclass(frozen=True)
class Rows:
    """Where the counted rows are, for processing of logits that depends on earlier tokens, and the target [N]."""

    sequences: Sequences
    target: Tensor

    def index(self, values: Tensor) -> Tensor:  # [N, 1]
        """Ids of the sampled tokens, on the device of some values."""
        return self.sequences.targets.to(values.device)[:, None]

    def sampled(self, values: Tensor) -> Tensor:  # [N, V] -> [N]
        """Values of the sampled tokens."""
        return values.gather(1, self.index(values))[:, 0]


LogitChange = Callable[[Tensor, Rows], Tensor]
StreamChange = Callable[[Tensor, Tensor, Rows], Tensor]
"""Maps log-probabilities [N], logits [N, V] and rows to log-probabilities [N]."""


@dataclass(frozen=True)
class Computation:
    """How the log-probabilities of a side are computed from its tokens.

    Attributes:
        weight: of the head, if it is not the model's.
        logits: changes of the logits before temperature and filters, in order.
        stream: changes of the log-probabilities, in order.
    """

    body: Body
    sampling: Sampling
    head: Head
    weight: Tensor | None = None
    logits: tuple[LogitChange, ...] = ()
    stream: tuple[StreamChange, ...] = ()

    def with_body(self, **parts: Any) -> Computation:
        """The computation with other parts of its body."""
        return replace(self, body=replace(self.body, **parts))

    def with_patch(self, patch: Patch) -> Computation:
        """The computation with a further patch of the model."""
        return self.with_body(patches=(*self.body.patches, patch))

    def with_attention(self, change: AttentionChange) -> Computation:
        """The computation with a further change of attention in all layers."""
        return self.with_body(attention=(*self.body.attention, change))

    def with_edits(self, edits: Mapping[str, Tensor]) -> Computation:
        """The computation with further replaced parameters."""
        return self.with_body(edits={**self.body.edits, **edits})


@dataclass(frozen=True)
class Residual:
    """What a prediction leaves unexplained.

    Attributes:
        mean, p99: of |prediction - target| over the predicted tokens.
        sequences: [B] mean of each sequence, NaN where nothing is predicted. counts: [B] its predicted tokens.
        largest: [B] its largest difference.
        share: share of the tokens to explain that are predicted.
        tokens: [N] of each token, NaN where nothing is predicted.
        bias: mean of target - prediction.
    """

    mean: float
    p99: float
    sequences: Tensor
    share: float
    tokens: Tensor
    bias: float
    counts: Tensor
    largest: Tensor

    @property
    def usable(self) -> bool:
        """Whether enough tokens are predicted to judge."""
        return self.share >= 0.5

    def healthy(self, floor: Floor) -> bool:
        """Whether only noise is left: in the mean, in the tail, in the bias and in every sequence.

        In 16 bits one token of a sequence may be far off, because a near tie of two experts moves it, but not in many
        sequences.
        """
        there = self.sequences.isfinite()
        mean, count, largest = (x[there] for x in (self.sequences, self.counts, self.largest))
        # The mean of few tokens varies, the more the heavier their tail is.
        spread = floor.mean + _SPREAD * floor.p99 / count.sqrt()
        limit = spread.clamp(min=_HEALTHY_SEQUENCE * floor.mean)
        above = mean > limit
        tied = (count >= _LONG) & (largest <= _TIE) & ((mean * count - largest) / (count - 1) <= limit)
        return (
            self.mean <= _HEALTHY_MEAN * floor.mean
            and self.p99 <= _HEALTHY_TAIL * floor.p99
            and (not above.any() or (floor.mean > _OF_16_BITS and bool(tied[above].all()) and int(above.sum()) < RACED))
            and abs(self.bias) <= _HEALTHY_BIAS * floor.mean
        )


def residual(prediction: Tensor, target: Tensor, owner: Tensor, count: int) -> Residual:
    """Residual of a prediction; tokens that are NaN in either tensor are left out.

    Args:
        prediction, target: [N]. owner: [N] sequence of each token, of `count` sequences.
    """
    size = (prediction - target).abs().clamp(max=-IMPOSSIBLE)
    there = torch.isfinite(size)
    if not bool(there.any()):
        none = torch.full((count,), torch.nan)
        return Residual(float("inf"), float("inf"), none, 0.0, size, 0.0, torch.zeros(count), none)
    known, mine = size[there].double(), owner[there]
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, known)
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, torch.ones_like(known))
    return Residual(
        float(known.mean()),
        float(known.quantile(0.99)) if len(known) < 1 << 23 else float(known.max()),
        sums / number,
        float(there.sum() / torch.isfinite(target).sum()),
        size,
        float((target - prediction)[there].double().mean()),
        number,
        torch.zeros(count, dtype=torch.float64).scatter_reduce_(0, mine, known, "amax"),
    )


@dataclass(frozen=True)
class References:
    """The models that changes may use.

    Attributes:
        model: as the trainer declares it, without adapter.
        previous: its previous version. adapter: what the trainer adds to the model's weights.
    """

    model: ReferenceModel
    previous: ReferenceModel | None = None
    adapter: Adapter | None = None


@dataclass
class Context:
    """One side to be explained.

    Attributes:
        target: [N] its log-probabilities of the counted tokens.
        sampling: its declared settings; raw log-probabilities have temperature 1.
        dtype, head: its declared precision. floor: noise of this computation, once it is known.
        bos, pad: token ids of the model's config.
        recorded: settings that the side recorded of itself.
        undeclared: processing of the logits that both sides have and neither declares.
        check: called between the scorings of `errors`; it raises where the time is used up.
    """

    references: References
    sequences: Sequences
    target: Tensor
    sampling: Sampling
    dtype: torch.dtype
    head: Head
    floor: Floor | None = None
    bos: int | None = None
    pad: int = 0
    recorded: Mapping[str, Any] = field(default_factory=dict)
    undeclared: Callable[[Computation], Computation | None] | None = None
    _hidden: dict[int, tuple[Body, Tensor]] = field(default_factory=dict, repr=False)
    check: Callable[[], None] = lambda: None
    _layers: dict[range, list[Any]] = field(default_factory=dict, repr=False)
    _reusable: bool | None = None

    @property
    def model(self) -> ReferenceModel:
        """The reference model."""
        return self.references.model

    @property
    def merged(self) -> dict[str, Tensor]:
        """Weights that the trainer's adapter changes; empty without an adapter."""
        return {} if self.references.adapter is None else self.references.adapter.merged(self.model)

    def weight(self, name: str) -> Tensor:
        """A parameter as the trainer holds it, with its adapter."""
        return self.merged[name] if name in self.merged else self.model.parameter(name)

    @cached_property
    def declared(self) -> Computation:
        """The computation that the side declares."""
        found = Computation(Body(self.sequences, self.dtype, edits=self.merged), self.sampling, self.head)
        return found if self.undeclared is None else self.undeclared(found) or found

    def computes_like(self, other: Context) -> bool:
        """Whether both declare the same computation of the same tokens."""
        mine, theirs = self.sequences, other.sequences
        return (
            self.references is other.references
            and self.undeclared is other.undeclared
            and (self.sampling, self.dtype, self.head) == (other.sampling, other.dtype, other.head)
            and _equal(mine.ids, theirs.ids)
            and _equal(mine.positions, theirs.positions)
            and _equal(mine.rows, theirs.rows)
        )

    # ---- scoring ---------------------------------------------------------------------------------------------------

    def hidden(self, body: Body) -> Tensor:  # [N, C]
        """Hidden states of the counted rows; those of the last bodies are kept, because many changes share a body."""
        kept = self._hidden.get(id(body))
        if kept is not None:
            return kept[1]
        found = self._computed(body)
        while len(self._hidden) >= _BODIES:
            self._hidden.pop(next(iter(self._hidden)))
        self._hidden[id(body)] = (body, found)
        return found

    def _computed(self, body: Body) -> Tensor:
        model = self.model
        if body.previous:
            assert self.references.previous is not None
            model = self.references.previous
        with contextlib.ExitStack() as stack:
            stack.enter_context(model.edited(body.edits, body.dtype))
            base = stack.enter_context(model.configured(dict(body.config), body.dtype))
            for patch in body.patches:
                stack.enter_context(patch(base))
            if body.start:
                known = lambda *_, i, **__: self._layers[AttentionState.batch][i]
                layers = enumerate(base.base_model.layers[: body.start])
                stack.enter_context(replaced([(layer, "forward", partial(known, i=i)) for i, layer in layers]))
            if body.attention or body.kernels:
                stack.enter_context(attending(base, body.attention, body.kernels, body.sequences.prompt))
            if body.prefix:
                assert self.references.previous is not None
                old = self.references.previous.in_dtype(body.dtype)
                return prefixed_hidden(old, base, body.sequences, body.prefix)
            if body.decoded:
                return decoded_hidden(base, body.sequences)
            return model.hidden(body.sequences, body.dtype, body.layout, base)

    def keeps_layers(self, refused: tuple[type[Exception], ...]) -> bool:
        """Keeps the declared outputs of all layers; whether a body with a `start` can use them.

        It cannot where they are too large, or where a layer reads more than the output of the layer before it.

        Args:
            refused: exceptions of models whose layers cannot be replaced.
        """
        if self._reusable is None:
            self._reusable = False
            with contextlib.suppress(*refused), contextlib.ExitStack() as stack:
                body = self.declared.body
                layers = self.model.in_dtype(body.dtype).base_model.layers
                width = self.model.config.get_text_config().hidden_size * body.dtype.itemsize
                if len(layers) * sum(map(len, self.sequences.ids)) * width > _KEPT:
                    return False
                keep = lambda module, args, output: self._layers.setdefault(AttentionState.batch, []).append(output)
                for layer in layers:
                    stack.callback(layer.register_forward_hook(keep).remove)
                found = self._computed(body)
                stack.close()
                self._reusable = found.equal(self._computed(replace(body, start=len(layers) - 1)))
        return self._reusable

    def logits(self, computation: Computation) -> Tensor:  # [N, V]
        """Logits of the counted rows before temperature and filters."""
        return self._logits(computation, self.hidden(computation.body))

    def _logits(self, computation: Computation, hidden: Tensor) -> Tensor:
        body = computation.body
        weight = computation.weight
        if weight is None and body.previous:
            assert self.references.previous is not None
            weight = self.references.previous.model.get_output_embeddings().weight.data
        if weight is None:
            weight = next((body.edits[n] for n in self.model.head_names if n in body.edits), None)
        apply = lambda weight: self.model.head(hidden, computation.head, weight, dict(body.config))
        z = apply(weight)
        if body.prefix:
            assert self.references.previous is not None
            count = [row < n for row, n in zip(body.sequences.rows, body.prefix, strict=True)]
            old = torch.cat(count).to(z.device)
            if bool(old.any()):
                z[old] = apply(self.references.previous.model.get_output_embeddings().weight.data)[old]
        for change in computation.logits:
            z = change(z, Rows(self.sequences, self.target))
        return z

    def score(self, computation: Computation) -> Tensor:  # [N]
        """Log-probabilities of the counted tokens."""
        return self._processed(computation, self.logits(computation))

    @property
    def at_once(self) -> int:
        """Computations of other tokens or positions that are scored in one call, because a call costs more than the
        tokens of a small model."""
        return max(1, _AT_ONCE // max(1, sum(map(len, self.sequences.ids))))

    def errors(self, computations: Sequence[Computation]) -> list[float]:
        """`error` of each."""
        found: list[float] = []
        for i in range(0, len(computations), self.at_once):
            self.check()
            found += [self.residual(x).mean for x in self._scores(computations[i : i + self.at_once])]
        return found

    def _scores(self, computations: Sequence[Computation]) -> list[Tensor]:  # [N] each
        first = computations[0]
        if len(computations) == 1 or not all(_differ_in_tokens(first, other) for other in computations):
            return [self.score(computation) for computation in computations]
        hidden = self._computed(replace(first.body, sequences=side_by_side([c.body.sequences for c in computations])))
        parts = hidden.split(self.sequences.counted)
        return [self._processed(c, self._logits(c, part)) for c, part in zip(computations, parts, strict=True)]

    def _processed(self, computation: Computation, z: Tensor) -> Tensor:
        targets = self.sequences.targets.to(z.device)
        logp = processed(z, targets, computation.sampling)
        for change in computation.stream:
            logp = change(logp, z / (computation.sampling.temperature or 1.0), Rows(self.sequences, self.target))
        return logp.cpu()

    def residual(self, prediction: Tensor) -> Residual:
        """What a prediction [N] of the target leaves unexplained."""
        return residual(prediction, self.target, self.sequences.owner, len(self.sequences))

    def error(self, computation: Computation) -> float:
        """Mean |difference| that a computation leaves."""
        return self.residual(self.score(computation)).mean

    def part(self, chosen: list[int]) -> Context:
        """The context of some sequences."""
        s = self.sequences
        place = {k: i for i, k in enumerate(chosen)}
        keep = torch.tensor([int(o) in place for o in s.owner.tolist()], dtype=torch.bool)
        pick = lambda values: [values[k] for k in chosen]
        owner = torch.tensor([place[int(o)] for o in s.owner[keep].tolist()], dtype=torch.int64)
        small = Sequences(
            pick(s.ids), pick(s.positions), pick(s.rows), s.targets[keep], owner, pick(s.prompt), s.token[keep]
        )
        return replace(self, sequences=small, target=self.target[keep], _hidden={}, _layers={}, _reusable=None)


def _differ_in_tokens(a: Computation, b: Computation) -> bool:
    """Whether two computations differ only in their sequences, each of which is computed by itself."""
    same = all(getattr(a.body, f.name) is getattr(b.body, f.name) for f in fields(Body) if f.name != "sequences")
    alone = not (a.body.prefix or a.body.attention or a.body.decoded or a.body.kernels)
    return same and alone and a.head == b.head and a.weight is b.weight


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.equal(y) for x, y in zip(a, b, strict=True))


def context_of(
    capsule: Capsule,
    references: References,
    stream: str,
    budget: int | None = None,
    chosen: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Context:
    """The context of one side of a comparison.

    Args:
        stream: name of its log-probabilities.
        budget: largest number of counted tokens; default what fits in memory.
        chosen: numbers of the sequences; default all.
        dtype: of the layers; default the first of `possible_dtypes`.
    """
    model = references.model
    sequences = sequences_of(capsule, budget or model.rows_that_fit(), chosen)
    values = torch.from_numpy(np.array(capsule.logprobs[stream], np.float32))
    pad = getattr(model.config, "pad_token_id", None)
    return Context(
        references,
        sequences,
        possible(values[sequences.token]),
        Sampling() if stream.endswith(".raw") else capsule.manifest.sampling,
        dtype or possible_dtypes(capsule, model)[0],
        declared_head(capsule),
        bos=getattr(model.config, "bos_token_id", None),
        pad=pad if isinstance(pad, int) else 0,
        recorded=capsule.manifest.config,
    )


def possible(logprobs: Tensor) -> Tensor:
    """Log-probabilities with minus infinity replaced by `IMPOSSIBLE`."""
    return torch.where(torch.isneginf(logprobs), torch.full_like(logprobs, IMPOSSIBLE), logprobs)


def declared_head(capsule: Capsule) -> Head:
    """Precision of the head that the side declares."""
    config = capsule.manifest.config
    inputs, logits = (DTYPES.get(dtype_name(config.get(key)) or "") for key in ("head_dtype", "logits_dtype"))
    inputs = None if inputs == torch.float32 else inputs
    return Head(inputs, None if logits == torch.float32 else logits)


def possible_dtypes(capsule: Capsule, model: ReferenceModel) -> list[torch.dtype]:
    """The dtype that the side declares for its layers; else every possible dtype, the checkpoint's first."""
    known = capsule.manifest.dtype
    own = [model.own] if model.own in DTYPES.values() else []
    return [DTYPES[known]] if known else list(dict.fromkeys([*own, torch.bfloat16, torch.float16, torch.float32]))


LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("each sequence alone", Layout("none")),
    ("left padding", Layout("left")),
    ("wider right padding", Layout("right", multiple=64)),
)
_ROUNDING_SHARE = 1.15
"""Largest measured ratio of the distance of two healthy engines to the distance of one from fp32 (docs/drift/power.md);
independent roundings would give the root of two."""


def noise_floor(context: Context, as_is: Tensor) -> Floor:
    """Noise floor of |difference| for this model, these tokens and this dtype.

    Args:
        as_is: [N] log-probabilities of the declared computation.
    """
    declared = context.declared
    differences = {
        name: context.score(declared.with_body(layout=replace(layout, token=context.pad))) - as_is
        for name, layout in LAYOUTS
    }
    if context.dtype != torch.float32:
        exact = context.score(declared.with_body(dtype=torch.float32))
        differences["rounding against float32"] = _ROUNDING_SHARE * (exact - as_is)
    sizes = [d.abs().double() for d in differences.values()]
    k3 = max(float((torch.expm1(d.double()) - d.double()).mean()) for d in differences.values())
    floor = Floor(
        mean=max(float(d.mean()) for d in sizes),
        p99=max(float(d.quantile(0.99)) for d in sizes),
        maximum=max(float(d.max()) for d in sizes),
        k3=max(k3, 0.0),
        tokens=len(as_is),
        permutations=list(differences),
    )
    return raise_floor(floor, name_of(context.dtype))
