"""Makes capsules from Python lists, the way a trainer or an engine has its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rlkernel_drift.capsule.capsule import Capsule, Kept, Operators, SpanKind
from rlkernel_drift.capsule.manifest import Manifest, Operator
from rlkernel_drift.capsule.tensor_file import Tensor


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
    operators: Operators | None = None,
) -> Capsule:
    """A capsule of prompts and their completions.

    Args:
        manifest: its `operators` are filled in from `operators`.
        prompts, completions: token ids.
        logprobs: stream -> a sequence of numbers a completion.
        positions: of all tokens of each sequence; default 0, 1, 2, ...
        masks: of the completions' tokens; default all count.
        kept: ids that could be drawn, a list a completion token; empty: all.
        sequence_ids: names of the sequences.
        operators: recorded outputs.

    Raises:
        CapsuleError: the parts do not fit each other.
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
