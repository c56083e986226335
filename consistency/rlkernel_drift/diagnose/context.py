"""What hypotheses work with: the model, one side's tokens and log-probabilities, its declared settings and noise floor.

The noise floor of a scoring is calibrated: the model against itself in other layouts, and its distance to fp32. Two
healthy engines of the declared dtype lie within it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling, dtype_name
from rlkernel_drift.profiles import at_least
from rlkernel_drift.scoring.model import DTYPES, Head, Layout, ReferenceModel, decoded_hidden
from rlkernel_drift.scoring.semantics import IMPOSSIBLE, processed
from rlkernel_drift.scoring.sequences import Sequences, sequences_of
from rlkernel_drift.scoring.weights import Adapter


@dataclass(frozen=True)
class References:
    """The models that hypotheses may use.

    Attributes:
        model: as the trainer declares it, without adapter.
        previous: the version before. adapter: what the trainer computes on top of the model.
    """

    model: ReferenceModel
    previous: ReferenceModel | None = None
    adapter: Adapter | None = None


@dataclass
class Context:
    """One side to be explained.

    Attributes:
        target: [N] its log-probabilities of the counted tokens.
        sampling: settings that its numbers are declared to have; raw ones have temperature 1.
        dtype, head: declared precision. floor: noise of this computation, once it is known.
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
    prompt_lengths: list[int] = field(default_factory=list)

    @property
    def model(self) -> ReferenceModel:
        """The reference model."""
        return self.references.model

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
        self, sequences: Sequences | None = None, layout: Layout | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Hidden states of the counted rows, with the adapter where the trainer has one."""
        dtype = dtype or self.dtype
        adapter = self.references.adapter
        edits = {} if adapter is None else adapter.merged(self.model)
        with self.model.edited(edits, dtype):
            return self.model.hidden(sequences or self.sequences, dtype, layout)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Hidden states of the counted rows as a rollout computes them, token by token with a cache."""
        adapter = self.references.adapter
        with self.model.edited({} if adapter is None else adapter.merged(self.model), dtype):
            return decoded_hidden(self.model.in_dtype(dtype), self.sequences)

    def edited(self, tensors: dict[str, Tensor]) -> Tensor:
        """Hidden states with these parameters in place of the model's (and of the adapter's)."""
        adapter = self.references.adapter
        edits = ({} if adapter is None else adapter.merged(self.model)) | tensors
        with self.model.edited(edits, self.dtype):
            return self.model.hidden(self.sequences, self.dtype)

    def predict(self, hidden: Tensor, head: Head | None = None, weight: Tensor | None = None) -> Tensor:  # [N]
        """Log-probabilities from hidden states, under the declared settings."""
        head = head or self.head
        logits = self.model.head(hidden, head, weight)
        logp = processed(logits, self.sequences.targets.to(logits.device), self.sampling).cpu()
        return logp if head.logprobs is None else logp.to(head.logprobs).float()


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
        stream: which of its log-probabilities; budget: counted tokens at most, default what fits in memory.
        chosen: numbers of the sequences; default all.
        dtype: of the layers; default the first of `possible_dtypes`.
    """
    manifest = capsule.manifest
    model = references.model
    sequences = sequences_of(capsule, budget or model.rows_that_fit(), chosen)
    values = torch.from_numpy(np.array(capsule.logprobs[stream], np.float32))
    target = values[sequences.token] if len(sequences) else torch.zeros(0)
    target = torch.where(torch.isneginf(target), torch.full_like(target, IMPOSSIBLE), target)
    raw = stream.endswith(".raw")
    own = getattr(model.config, "pad_token_id", None)
    return Context(
        references,
        sequences,
        target,
        Sampling() if raw else manifest.sampling,
        dtype or possible_dtypes(capsule, model)[0],
        declared_head(capsule),
        bos=getattr(model.config, "bos_token_id", None),
        pad=own if isinstance(own, int) else 0,
        prompt_lengths=sequences.prompt,
    )


def declared_head(capsule: Capsule) -> Head:
    """Precision of the head by the side's configuration."""
    config = capsule.manifest.config
    inputs, logits = (DTYPES.get(dtype_name(config.get(key)) or "") for key in ("head_dtype", "logits_dtype"))
    inputs = None if inputs == torch.float32 else inputs
    return Head(inputs, None if logits == torch.float32 else logits)


def possible_dtypes(capsule: Capsule, model: ReferenceModel) -> list[torch.dtype]:
    """The dtype of the side's layers as it declares it; else every dtype that it may be, the checkpoint's own first."""
    known = capsule.manifest.dtype
    own = [model.own] if model.own in DTYPES.values() else []
    return [DTYPES[known]] if known else list(dict.fromkeys([*own, torch.bfloat16, torch.float16, torch.float32]))


LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("each sequence alone", Layout("none")),
    ("left padding", Layout("left")),
    ("wider right padding", Layout("right", multiple=64)),
)
_ROUNDING_SHARE = 1.15
"""Two engines that round at different places differ by up to the root of two times their distance to fp32; measured on
healthy pairs it is at most this (docs/drift/power.md)."""


def noise_floor(context: Context, as_is: Tensor) -> Floor:
    """Floor of |difference| for this model, these tokens and this dtype.

    Args:
        as_is: [N] log-probabilities of the declared computation.
    """
    differences: list[tuple[str, Tensor]] = []
    for name, layout in LAYOUTS:
        layout = replace(layout, token=context.pad)
        differences.append((name, context.predict(context.hidden(layout=layout)) - as_is))
    if context.dtype != torch.float32:
        exact = context.predict(context.hidden(dtype=torch.float32))
        differences.append(("rounding against float32", _ROUNDING_SHARE * (exact - as_is)))
    name = str(context.dtype).removeprefix("torch.")
    sizes = [(label, d.abs().double()) for label, d in differences]
    k3 = max(float((torch.expm1(d.double()) - d.double()).mean()) for _, d in differences)
    floor = Floor(
        mean=max(float(d.mean()) for _, d in sizes),
        p99=max(float(d.quantile(0.99)) for _, d in sizes),
        maximum=max(float(d.max()) for _, d in sizes),
        k3=max(k3, 0.0),
        tokens=len(as_is),
        permutations=[label for label, _ in sizes],
    )
    return at_least(floor, name)
