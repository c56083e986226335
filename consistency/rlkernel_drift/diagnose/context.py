"""What hypotheses work with: the model, one side's tokens, log-probabilities and declared settings, its noise floor.

The noise floor of a scoring is calibrated: the model against itself in other layouts, and its distance to fp32. Two
healthy engines of the declared dtype lie within it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling, dtype_name
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.model import DTYPES, Head, Layout, ReferenceModel, decoded_hidden, name_of
from rlkernel_drift.scoring.semantics import IMPOSSIBLE, processed
from rlkernel_drift.scoring.sequences import Sequences, sequences_of
from rlkernel_drift.scoring.weights import Adapter

_HEALTHY_MEAN, _HEALTHY_TAIL, _HEALTHY_SEQUENCE, _HEALTHY_BIAS = 1.25, 2.0, 2.5, 0.3  # times the floor's mean or p99


@dataclass(frozen=True)
class Residual:
    """What a prediction leaves unexplained.

    Attributes:
        mean, p99: of |prediction - target| over the predicted tokens.
        sequences: [B] mean of each sequence, NaN where nothing is predicted.
        share: share of the tokens that are predicted.
        tokens: [N] of each token, NaN where nothing is predicted.
        bias: mean of target - prediction.
    """

    mean: float
    p99: float
    sequences: Tensor
    share: float
    tokens: Tensor
    bias: float

    @property
    def usable(self) -> bool:
        """Whether enough tokens are predicted to judge."""
        return self.share >= 0.5

    def healthy(self, floor: Floor) -> bool:
        """Whether only noise is left: in the mean, in the tail, in the bias and in every sequence."""
        sequences = self.sequences[self.sequences.isfinite()]
        worst = float(sequences.max()) if len(sequences) else 0.0
        return (
            self.mean <= _HEALTHY_MEAN * floor.mean
            and self.p99 <= _HEALTHY_TAIL * floor.p99
            and worst <= _HEALTHY_SEQUENCE * floor.mean
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
        return Residual(float("inf"), float("inf"), torch.full((count,), torch.nan), 0.0, size, 0.0)
    known, mine = size[there].double(), owner[there]
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, known)
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, torch.ones_like(known))
    return Residual(
        float(known.mean()),
        float(known.quantile(0.99)) if len(known) < 1 << 23 else float(known.max()),
        sums / number,
        float(there.float().mean()),
        size,
        float((target - prediction)[there].double().mean()),
    )


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation of two differences over their tokens; 0 where it is undefined."""
    pair = torch.stack([a, b]).double()
    pair = pair[:, pair.isfinite().all(0)]
    found = float(torch.corrcoef(pair)[0, 1]) if pair.shape[1] > 2 else 0.0
    return found if found == found else 0.0


@dataclass(frozen=True)
class References:
    """The models that hypotheses may use.

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

    @property
    def model(self) -> ReferenceModel:
        """The reference model."""
        return self.references.model

    @property
    def temperature(self) -> float:
        """The declared temperature; 0 is treated as 1."""
        return self.sampling.temperature or 1.0

    @property
    def merged(self) -> dict[str, Tensor]:
        """Weights that the trainer's adapter changes; empty without an adapter."""
        return {} if self.references.adapter is None else self.references.adapter.merged(self.model)

    def computes_like(self, other: Context) -> bool:
        """Whether both declare the same computation of the same tokens."""
        mine, theirs = self.sequences, other.sequences
        return (
            self.references is other.references
            and (self.sampling, self.dtype, self.head) == (other.sampling, other.dtype, other.head)
            and _equal(mine.ids, theirs.ids)
            and _equal(mine.positions, theirs.positions)
            and _equal(mine.rows, theirs.rows)
        )

    def hidden(
        self,
        sequences: Sequences | None = None,
        layout: Layout | None = None,
        dtype: torch.dtype | None = None,
        edits: dict[str, Tensor] | None = None,
    ) -> Tensor:  # [N, C]
        """Hidden states of the counted rows.

        Args:
            edits: parameters that replace those of the model and of its adapter.
        """
        dtype = dtype or self.dtype
        with self.model.edited(self.merged | (edits or {}), dtype):
            return self.model.hidden(sequences or self.sequences, dtype, layout)

    def decoded(self, dtype: torch.dtype) -> Tensor:  # [N, C]
        """Hidden states of the counted rows as a rollout computes them, token by token with a cache."""
        with self.model.edited(self.merged, dtype):
            return decoded_hidden(self.model.in_dtype(dtype), self.sequences)

    def predict(self, hidden: Tensor, head: Head | None = None, weight: Tensor | None = None) -> Tensor:  # [N]
        """Log-probabilities from hidden states, under the declared settings."""
        head = head or self.head
        logits = self.model.head(hidden, head, weight)
        logp = processed(logits, self.sequences.targets.to(logits.device), self.sampling).cpu()
        return logp if head.logprobs is None else logp.to(head.logprobs).float()

    def residual(self, prediction: Tensor) -> Residual:
        """What a prediction [N] of the target leaves unexplained."""
        return residual(prediction, self.target, self.sequences.owner, len(self.sequences))

    def first(self, count: int) -> Context:
        """The context of the first sequences, for scans."""
        s = self.sequences
        keep = s.owner < count
        part = Sequences(
            s.ids[:count], s.positions[:count], s.rows[:count], s.targets[keep], s.owner[keep], s.prompt[:count],
            s.token[keep],
        )  # fmt: skip
        return replace(self, sequences=part, target=self.target[keep])


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
    differences = {
        name: context.predict(context.hidden(layout=replace(layout, token=context.pad))) - as_is
        for name, layout in LAYOUTS
    }
    if context.dtype != torch.float32:
        exact = context.predict(context.hidden(dtype=torch.float32))
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
