"""A capsule in memory: packed sequences with their log-probabilities and other recordings.

`logprobs[stream][t]` is the log-probability of token t given the tokens before it; `mask[t]` is whether the token
counts. `build_capsule` makes a capsule from Python lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule.manifest import Manifest, Operator
from rlkernel_drift.capsule.tensor_file import Array, Tensor
from rlkernel_drift.errors import CapsuleError, Refusal

PHASES = ("recorded", "decode", "prefill", "train")
VALUES = ("processed", "raw")
STREAMS = tuple(f"{phase}.{values}" for phase in PHASES for values in VALUES)


class SpanKind(IntEnum):
    """Kind of a span of tokens."""

    TEXT = 0
    PROMPT = 1
    COMPLETION = 2
    OBSERVATION = 3
    IMAGE = 4
    VIDEO = 5
    AUDIO = 6


@dataclass(frozen=True)
class Kept:
    """Tokens that could be sampled: `ids[offsets[t]:offsets[t+1]]` for token t; an empty set means all."""

    ids: NDArray[np.int32]  # [N]
    offsets: NDArray[np.int64]  # [T+1]


@dataclass(frozen=True)
class Distribution:
    """Logits rows of some tokens, with which temperature and filters can be diagnosed without the model.

    Attributes:
        rows: [R] the tokens that the logits predict, ascending.
        logits: [R, V] before temperature and filters.
    """

    rows: NDArray[np.int64]
    logits: Tensor


@dataclass(frozen=True)
class Operators:
    """Recorded operator outputs by name, in the order of computation.

    Attributes:
        rows: [R] the recorded tokens, ascending; None for all.
        values: name -> [R or T, width], or int64 [R or T] fingerprints.
    """

    rows: NDArray[np.int64] | None = None
    values: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Capsule:
    """B sequences of T tokens in total, packed.

    Attributes:
        manifest: content of manifest.json.
        ids, positions: [T] int32.
        cu_seqlens: [B+1] int64, first token of each sequence, then T.
        mask: [T] bool, tokens that count.
        logprobs: stream ("recorded.processed", "train.raw", ...) -> [T] fp32, NaN for tokens without one.
        spans: [S, 4] int32: sequence, begin and end within it, `SpanKind`.
        sequence_ids: [B] int64 names of the sequences, to match capsules in different order.
        ranks: [B] int32 number of the rank that computed each sequence; None if one process computed all.
    """

    manifest: Manifest
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: dict[str, NDArray[np.float32]]
    spans: NDArray[np.int32] | None = None
    sequence_ids: NDArray[np.int64] | None = None
    ranks: NDArray[np.int32] | None = None
    kept: Kept | None = None
    distribution: Distribution | None = None
    operators: Operators = field(default_factory=Operators)

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.ids.shape[0])

    @property
    def sequences(self) -> int:
        """B."""
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases, that of this side first."""
        return ("train", "recorded", "decode", "prefill") if self.manifest.side == "train" else PHASES

    @property
    def stream(self) -> str | None:
        """The stream that represents this side: that of its phase in training, processed rather than raw."""
        names = (f"{phase}.{values}" for phase in self.phases for values in VALUES)
        return next((name for name in names if name in self.logprobs), None)

    def sequence(self, index: int) -> slice:
        """Packed tokens of one sequence."""
        return slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))

    def place(self, token: int) -> tuple[int, int]:
        """(sequence, index in the sequence) of a packed token."""
        sequence = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
        return sequence, token - int(self.cu_seqlens[sequence])

    def text(self, token_id: int) -> str | None:
        """Text of a token id, if the capsule has it."""
        return self.manifest.vocabulary.get(str(token_id))

    def validate(self) -> None:
        """Checks shapes, dtypes and ranges of all arrays.

        Raises:
            CapsuleError: the message names the array and what is wrong with it.
        """
        tokens = self.tokens
        _vector("tokens.ids", self.ids, np.int32)
        _vector("tokens.positions", self.positions, np.int32, tokens)
        _vector("tokens.mask", self.mask, np.bool_, tokens)
        _offsets("tokens.cu_seqlens", self.cu_seqlens, tokens, strictly=True)
        model = self.manifest.model
        vocab = max(model.vocab_size or 0, model.padded_vocab_size or 0) or (1 << 31)
        _between("tokens.ids", self.ids, 0, vocab - 1)
        _between("tokens.positions", self.positions, 0, (1 << 31) - 1)
        for stream, values in self.logprobs.items():
            if stream not in STREAMS:
                raise CapsuleError(Refusal.TENSOR_UNKNOWN, f"logprobs.{stream}; streams are {', '.join(STREAMS)}")
            _vector(f"logprobs.{stream}", values, np.float32, tokens)
        if self.sequence_ids is not None:
            _vector("tokens.sequence_ids", self.sequence_ids, np.int64, self.sequences)
        if self.ranks is not None:
            _vector("tokens.ranks", self.ranks, np.int32, self.sequences)
            _between("tokens.ranks", self.ranks, 0, (1 << 31) - 1)
        if self.spans is not None:
            self._check_spans(self.spans)
        if self.kept is not None:
            _vector("kept.ids", self.kept.ids, np.int32)
            _vector("kept.offsets", self.kept.offsets, np.int64, tokens + 1)
            _offsets("kept.offsets", self.kept.offsets, len(self.kept.ids))
            _between("kept.ids", self.kept.ids, 0, vocab - 1)
        if self.distribution is not None:
            _rows("distribution.rows", self.distribution.rows, tokens)
            shape = self.distribution.logits.shape
            if len(shape) != 2 or shape[0] != len(self.distribution.rows):
                raise CapsuleError(
                    Refusal.SHAPE, f"distribution.logits is {shape}; expected [{len(self.distribution.rows)}, V]"
                )
        lengths = np.diff(self.cu_seqlens)
        for media in self.manifest.media:
            if media.sequence >= self.sequences or not media.begin < media.end <= lengths[media.sequence]:
                raise CapsuleError(Refusal.VALUE, f"media at {media.begin} to {media.end} of sequence {media.sequence}")
        self._check_operators()

    def _check_spans(self, spans: Array) -> None:
        if spans.ndim != 2 or spans.shape[1] != 4 or spans.dtype != np.int32:
            raise CapsuleError(Refusal.SHAPE, f"tokens.spans is {spans.shape} {spans.dtype}; expected [S, 4] int32")
        if not len(spans):
            return
        _between("tokens.spans, sequence", spans[:, 0], 0, self.sequences - 1)
        _between("tokens.spans, kind", spans[:, 3], 0, max(SpanKind))
        lengths = np.diff(self.cu_seqlens)[spans[:, 0]]
        if ((spans[:, 1] < 0) | (spans[:, 1] >= spans[:, 2]) | (spans[:, 2] > lengths)).any():
            raise CapsuleError(Refusal.VALUE, "tokens.spans: a span is empty or ends outside its sequence")

    def _check_operators(self) -> None:
        rows = self.operators.rows
        if rows is not None:
            _rows("operators.rows", rows, self.tokens)
        named = {operator.name: operator for operator in self.manifest.operators}
        if set(named) != set(self.operators.values) or len(named) != len(self.manifest.operators):
            raise CapsuleError(Refusal.TENSOR_MISSING, "operators of the manifest and of the tensor file differ")
        for name, tensor in self.operators.values.items():
            operator = named[name]
            count = self.tokens if operator.kind == "full" or rows is None else len(rows)
            shape = (count,) if operator.kind == "fingerprint" else (count, operator.width)
            if tensor.shape != shape or tensor.dtype != operator.dtype:
                raise CapsuleError(
                    Refusal.SHAPE,
                    f"operator {name} is {tensor.shape} {tensor.dtype}; the manifest says {shape} {operator.dtype}",
                )


def _vector(name: str, values: Array, dtype: Any, size: int | None = None) -> None:
    if values.ndim != 1 or values.dtype != np.dtype(dtype) or (size is not None and len(values) != size):
        expected = "n" if size is None else str(size)
        raise CapsuleError(
            Refusal.SHAPE, f"{name} is {values.shape} {values.dtype}; expected [{expected}] {np.dtype(dtype)}"
        )


def _offsets(name: str, values: Array, total: int, strictly: bool = False) -> None:
    _vector(name, values, np.int64)
    least = 1 if strictly else 0
    good = len(values) >= 1 and values[0] == 0 and values[-1] == total and (np.diff(values) >= least).all()
    if not good:
        raise CapsuleError(Refusal.VALUE, f"{name} must rise from 0 to {total}, by at least {least}")


def _between(name: str, values: Array, low: int, high: int) -> None:
    if len(values) and (int(values.min()) < low or int(values.max()) > high):
        raise CapsuleError(
            Refusal.VALUE, f"{name} ranges from {int(values.min())} to {int(values.max())}; expected {low} to {high}"
        )


def _rows(name: str, rows: Array, tokens: int) -> None:
    _vector(name, rows, np.int64)
    if len(rows) and (rows[0] < 0 or rows[-1] >= tokens or (np.diff(rows) <= 0).any()):
        raise CapsuleError(Refusal.VALUE, f"{name} must ascend within 0 to {tokens - 1}")


def build_capsule(
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Mapping[str, Sequence[Any]],
    *,
    positions: Sequence[Sequence[int]] | None = None,
    masks: Sequence[Sequence[bool]] | None = None,
    kept: Sequence[Sequence[Sequence[int]]] | None = None,
    sequence_ids: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    operators: Operators | None = None,
) -> Capsule:
    """A capsule of prompts and their completions.

    Args:
        manifest: its `operators` are filled in from `operators`.
        prompts, completions: token ids.
        logprobs: stream -> one sequence of numbers per completion.
        positions: of all tokens of each sequence; default 0, 1, 2, ...
        masks: which tokens of the completions count; default all.
        kept: ids that could be sampled, one list per completion token; an empty list means all.
        sequence_ids: names of the sequences.
        ranks: number of the rank that computed each sequence; default one process.
        operators: recorded outputs.

    Raises:
        CapsuleError: the parts do not match each other.
    """
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    starts = [int(cu_seqlens[i]) + len(prompt) for i, prompt in enumerate(prompts)]
    total = int(cu_seqlens[-1])
    ids = np.array([i for p, c in zip(prompts, completions, strict=True) for i in (*p, *c)], np.int32).reshape(-1)
    if positions is None:
        place = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.zeros(0, np.int32)])
    else:
        place = np.array([v for row in positions for v in row], np.int32)
    mask = np.zeros(total, np.bool_)
    streams = {name: np.full(total, np.nan, np.float32) for name in logprobs}
    sizes, ragged = np.zeros(total, np.int64), []
    spans = []
    for i, start in enumerate(starts):
        end = start + len(completions[i])
        mask[start:end] = True if masks is None else masks[i]
        for name, rows in logprobs.items():
            streams[name][start:end] = np.asarray(rows[i], np.float32)
        if kept is not None:
            sizes[start:end] = [len(row) for row in kept[i]]
            ragged += [v for row in kept[i] for v in row]
        spans.append((i, 0, len(prompts[i]), SpanKind.PROMPT))
        spans.append((i, len(prompts[i]), lengths[i], SpanKind.COMPLETION))
    capsule = Capsule(
        manifest=manifest.model_copy(update={"operators": describe_operators(operators)}),
        ids=ids,
        positions=place,
        cu_seqlens=cu_seqlens,
        mask=mask,
        logprobs=streams,
        spans=np.array([s for s in spans if s[1] < s[2]], np.int32).reshape(-1, 4),
        sequence_ids=None if sequence_ids is None else np.array(sequence_ids, np.int64),
        ranks=None if ranks is None else np.array(ranks, np.int32),
        kept=None if kept is None else Kept(np.array(ragged, np.int32), np.concatenate([[0], np.cumsum(sizes)])),
        operators=operators or Operators(),
    )
    capsule.validate()
    return capsule


def describe_operators(operators: Operators | None) -> list[Operator]:
    """The manifest's list of recorded operators."""
    if operators is None:
        return []
    kind: Literal["full", "rows"] = "full" if operators.rows is None else "rows"
    return [
        Operator(name=name, kind="fingerprint", dtype=tensor.dtype, width=0)
        if _is_fingerprint(tensor)
        else Operator(name=name, kind=kind, dtype=tensor.dtype, width=tensor.shape[1])
        for name, tensor in operators.values.items()
    ]


def _is_fingerprint(tensor: Tensor) -> bool:
    return tensor.dtype == "I64" and tensor.values.ndim == 1
