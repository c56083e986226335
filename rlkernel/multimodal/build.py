"""Makes a batch of rows of tokens: drops their padding, finds the placeholder runs, and gives each run its medium."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from rlkernel.multimodal.schema import (
    TEMPORAL_AXES,
    Medium,
    Modality,
    MultimodalBatch,
    ProcessorFingerprint,
    modality_of,
)


@dataclass(frozen=True)
class Row:
    """One sample as a framework has it, with padding.

    Attributes:
        token_ids: [L].
        kinds: [L] `Modality` of each token.
        media: in the order of their placeholders, per modality.
        attended: [L] bool, the attention mask; None means all tokens.
        scored: [L] bool, the tokens that the loss scores; None means none.
        positions: [A, L].
    """

    token_ids: Tensor
    kinds: Tensor
    media: Sequence[Medium]
    attended: Tensor | None = None
    scored: Tensor | None = None
    positions: Tensor | None = None


def kinds_of(token_ids: Tensor, placeholder_ids: Mapping[Modality, int]) -> Tensor:  # [..., L] -> [..., L]
    """The modality of each token by its id."""
    kinds = torch.zeros_like(token_ids)
    for kind, token in placeholder_ids.items():
        kinds[token_ids == token] = int(kind)
    return kinds


def build_batch(
    rows: Sequence[Row],
    *,
    sample_ids: Sequence[str] | None = None,
    axes: tuple[str, ...] = TEMPORAL_AXES,
    fingerprint: ProcessorFingerprint | None = None,
    padding_side: str = "none",
    merge_size: int = 2,
    placeholder_ids: Mapping[Modality, int] | None = None,
) -> MultimodalBatch:
    """Packs rows into a batch. Wrong counts of placeholders and media are kept: `validate` and `layout` name them.

    Args:
        sample_ids: default "0", "1", ....

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("the batch has no samples; pass at least one")
    ids, masks, positions, lengths = [], [], [], [0]
    modality_spans, media_ids, loss_spans, media = [], [], [], list[Medium]()
    for sample, row in enumerate(rows):
        kept = _without_padding(row.attended, len(row.token_ids))
        ids.append(row.token_ids[kept].long())
        lengths.append(len(ids[-1]))
        masks.append(torch.ones(lengths[-1], dtype=torch.bool) if row.attended is None else row.attended[kept].bool())
        if row.positions is not None:
            positions.append(row.positions[:, kept].long())
        spans = _runs(row.kinds[kept])
        modality_spans += [(sample, *span) for span in spans]
        media_ids += [i if i < 0 else i + len(media) for i in assign(spans, row.media)]
        media += [replace(medium, sample=sample) for medium in row.media]
        if row.scored is not None:
            loss_spans += [(sample, begin, end) for begin, end, _ in _runs(row.scored[kept].long())]
    mask = torch.cat(masks)
    return MultimodalBatch(
        token_ids=torch.cat(ids),
        cu_seqlens=torch.tensor(lengths).cumsum(0).int(),
        sample_ids=tuple(sample_ids if sample_ids is not None else map(str, range(len(rows)))),
        modality_spans=torch.tensor(modality_spans, dtype=torch.int64).reshape(-1, 4),
        media_ids=torch.tensor(media_ids, dtype=torch.int64),
        media=tuple(media),
        loss_spans=torch.tensor(loss_spans, dtype=torch.int64).reshape(-1, 3),
        positions=torch.cat(positions, 1) if positions else None,
        axes=axes,
        attention_mask=None if bool(mask.all()) else mask,
        processor_fingerprint=fingerprint,
        padding_side=padding_side,
        merge_size=merge_size,
        placeholder_ids=dict(placeholder_ids or {}),
    )


def _without_padding(attended: Tensor | None, length: int) -> slice:
    """The tokens from the first to the last that is attended to."""
    if attended is None:
        return slice(0, length)
    there = torch.nonzero(attended).flatten().tolist()
    return slice(there[0], there[-1] + 1) if there else slice(0, 0)


def _runs(kinds: Tensor) -> list[tuple[int, int, int]]:
    """(begin, end, kind) of the runs of equal kinds other than 0."""
    found = []
    for kind, group in groupby(enumerate(kinds.tolist()), lambda item: item[1]):
        tokens = [i for i, _ in group]
        if kind:
            found.append((tokens[0], tokens[-1] + 1, int(modality_of(kind))))
    return found


def assign(spans: Sequence[tuple[int, int, int]], media: Sequence[Medium]) -> list[int]:
    """The index of the medium that each placeholder run shows; -1 where there is none.

    Runs and media of a modality have one order. If a sample's video runs are as many as the temporal patches of its
    videos, and not as the videos, each run shows one temporal patch (Qwen3-VL).
    """
    runs = [kind for *_, kind in spans]
    videos = [m for m in media if m.modality == Modality.VIDEO]
    patches = sum(m.grid[0] for m in videos)
    by_patch = runs.count(Modality.VIDEO) > len(videos) and patches > len(videos)
    queues: dict[int, Iterator[int]] = {}
    for kind in (Modality.IMAGE, Modality.VIDEO):
        repeats = lambda m, k=kind: m.grid[0] if by_patch and k == Modality.VIDEO else 1
        queues[kind] = iter([i for i, m in enumerate(media) if m.modality == kind for _ in range(repeats(m))])
    return [next(queues[kind], -1) for kind in runs]
