"""Captures of several ranks: a folder with a capsule `rank-0`, `rank-1`, ... of each, read as one capsule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule.capsule import Capsule
from rlkernel_drift.errors import CapsuleError, Refusal

COUNT = "ranks"
"""Key of a manifest's `config`: how many ranks wrote a capsule."""
_SHARED = ("side", "engine", "step", "contract", "model", "weights", "sampling")


def rank_folder(path: Path, rank: int) -> Path:
    """Where a rank writes its capsule."""
    return path / f"rank-{rank}"


def rank_folders(path: Path) -> list[Path]:
    """The capsules of the ranks in a folder, by their numbers; empty if it is not a capture of several ranks."""
    found = [(int(m[1]), child) for child in path.glob("rank-*") if (m := re.fullmatch(r"rank-(\d{1,6})", child.name))]
    return [child for _, child in sorted(found)]


def merge(capsules: Sequence[Capsule]) -> Capsule:
    """One capsule of the sequences of all ranks, in the order of the ranks.

    Args:
        capsules: of rank 0, 1, ...

    Raises:
        CapsuleError: a rank is missing, differs from rank 0 in what both must share, or recorded more than
            log-probabilities.
    """
    first = capsules[0]
    expected = first.manifest.config.get(COUNT, len(capsules))
    if expected != len(capsules):
        message = f"it holds the capsules of {len(capsules)} ranks, but {expected} ranks wrote them; capture again"
        raise CapsuleError(Refusal.MISSING, message)
    for rank, one in enumerate(capsules):
        for name in _SHARED:
            mine, theirs = getattr(one.manifest, name), getattr(first.manifest, name)
            if mine != theirs:
                raise CapsuleError(Refusal.VALUE, f"rank {rank} has another {name} than rank 0: {mine} and {theirs}")
        if set(one.logprobs) != set(first.logprobs):
            raise CapsuleError(Refusal.VALUE, f"rank {rank} has other streams of log-probabilities than rank 0")
        if one.operators.values or one.kept is not None or one.distribution is not None:
            message = f"rank {rank} recorded operators, kept sets or logits; compare the folders of one rank at a time"
            raise CapsuleError(Refusal.VALUE, message)
    sequences = np.cumsum([0, *(one.sequences for one in capsules)])
    tokens = np.cumsum([0, *(one.tokens for one in capsules)])
    starts = [one.cu_seqlens[:-1] + start for one, start in zip(capsules, tokens[:-1], strict=True)]
    spans = [
        one.spans + np.array([start, 0, 0, 0], np.int32)
        for one, start in zip(capsules, sequences[:-1], strict=True)
        if one.spans is not None
    ]
    vocabulary = {key: text for one in capsules for key, text in one.manifest.vocabulary.items()}
    return Capsule(
        manifest=first.manifest.model_copy(update={"vocabulary": vocabulary}),
        ids=np.concatenate([one.ids for one in capsules]),
        positions=np.concatenate([one.positions for one in capsules]),
        cu_seqlens=np.concatenate([*starts, tokens[-1:]]).astype(np.int64),
        mask=np.concatenate([one.mask for one in capsules]),
        logprobs={name: np.concatenate([one.logprobs[name] for one in capsules]) for name in first.logprobs},
        spans=np.concatenate(spans).astype(np.int32) if spans else None,
        sequence_ids=_named(capsules),
        ranks=np.repeat(np.arange(len(capsules), dtype=np.int32), np.diff(sequences)),
    )


def _named(capsules: Sequence[Capsule]) -> NDArray[np.int64]:
    """Names of the sequences: each rank's own ones, which count from 0 on every rank, made different by its number."""
    names = [
        np.arange(one.sequences, dtype=np.int64) if one.sequence_ids is None else one.sequence_ids for one in capsules
    ]
    return np.concatenate([own * len(capsules) + rank for rank, own in enumerate(names)]).astype(np.int64)
