"""A batch as JSON lines, one sample per line: what `rlkernel-drift layout` and `compare` read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.multimodal.build import Row, build_batch, kinds_of
from rlkernel.multimodal.schema import (
    TEMPORAL_AXES,
    Medium,
    Modality,
    MultimodalBatch,
    ProcessorFingerprint,
    modality_of,
)

_OF_BATCH = ("axes", "processor", "padding_side", "merge_size", "placeholder_ids")
"""Fields that all records of a file share."""
_IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "axes": lambda x: isinstance(x, list) and all(type(name) is str for name in x),
    "merge_size": lambda x: type(x) is int,
    "placeholder_ids": lambda x: isinstance(x, dict) and all(type(token) is int for token in x.values()),
    "padding_side": lambda x: x in ("left", "right", "none"),
    "processor": lambda x: x is None or (isinstance(x, dict) and isinstance(x.get("settings", {}), dict)),
}


def write_records(
    batch: MultimodalBatch, path: str | Path, *, logprobs: Sequence[Sequence[float]] | None = None
) -> None:
    """Writes one line per sample.

    Args:
        logprobs: for each sample, one number per token after its prompt, which ends where the first loss span begins;
            with them `rlkernel-drift compare` reads the file.
    """
    fingerprint = batch.processor_fingerprint
    with open(path, "w", encoding="utf-8") as file:
        for b, tokens in enumerate(batch.ranges):
            ids = batch.token_ids[tokens].tolist()
            loss = [span[1:] for span in batch.loss_spans.tolist() if span[0] == b]
            start = loss[0][0] if loss else len(ids)
            spans = batch.runs[b]
            media = [batch.media[m] for m in batch.media_of_samples[b]]
            record: dict[str, Any] = {
                "id": batch.sample_ids[b],
                "prompt_token_ids": ids[:start],
                "token_ids": ids[start:],
                "mask": batch.scored[tokens][start:].tolist(),
                "loss_spans": loss,
                "modality_spans": [[begin, end, kind.name.lower()] for begin, end, kind, _ in spans],
                "media": [vars(m) | {"modality": m.modality.name.lower()} for m in media],
                "padding_side": batch.padding_side,
                "merge_size": batch.merge_size,
                "placeholder_ids": {kind.name.lower(): token for kind, token in batch.placeholder_ids.items()},
            }
            if batch.positions is not None:
                record |= {"positions": batch.positions[:, tokens].tolist(), "axes": batch.axes}
            if batch.attention_mask is not None:
                record["attention_mask"] = batch.attention_mask[tokens].int().tolist()
            if fingerprint is not None:
                record["processor"] = vars(fingerprint)
            if logprobs is not None:
                record["logprobs"] = list(logprobs[b])
            file.write(json.dumps(record, default=str) + "\n")


def read_records(path: str | Path) -> MultimodalBatch:
    """Reads a file of `write_records`, or of any framework that writes the same fields.

    Required are `token_ids`, and `prompt_token_ids` if there is a prompt; all other fields are optional. Without
    `modality_spans` the placeholder runs are found by `placeholder_ids`; without `loss_spans` the loss scores the
    `token_ids` where `mask` is 1, or all of them.

    Raises:
        ValueError: a line is not a record; the message names the line and the field.
    """
    records = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                    where += f" (sample {record['id']!r})" if "id" in record else ""
                    records.append((record, _row(record), _fingerprint(record)))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                    words = f"field {error}" if isinstance(error, KeyError) else error
                    raise ValueError(
                        f"{where}: not a record of a sample ({words}); expected an object with token_ids "
                        "and the fields of docs/multimodal/layout.md"
                    ) from None
    if not records:
        raise ValueError(f"{path} has no records; write one line per sample")
    first, _, fingerprint = records[0]
    for record, *_ in records:
        for name in _OF_BATCH:
            if record.get(name) != first.get(name):
                raise ValueError(
                    f"{path}: sample {record.get('id')!r} has another {name} than the first sample; write two files"
                )
        if (record.get("positions") is None) != (first.get("positions") is None):
            raise ValueError(
                f"{path}: only one of sample {record.get('id')!r} and the first sample has positions; write those of "
                "all samples, or none"
            )
    return build_batch(
        [row for _, row, _ in records],
        sample_ids=[str(record.get("id", i)) for i, (record, *_) in enumerate(records)],
        axes=tuple(first.get("axes", TEMPORAL_AXES)),
        fingerprint=fingerprint,
        padding_side=first.get("padding_side", "none"),
        merge_size=first.get("merge_size", 2),
        placeholder_ids=_placeholders(first),
    )


def _fingerprint(record: Mapping[str, Any]) -> ProcessorFingerprint | None:
    return ProcessorFingerprint(**record["processor"]) if record.get("processor") else None


def _placeholders(record: Mapping[str, Any]) -> dict[Modality, int]:
    return {modality_of(kind): token for kind, token in record.get("placeholder_ids", {}).items()}


def _row(record: Mapping[str, Any]) -> Row:
    for name, is_of_type in _IS_OF_TYPE.items():
        if name in record and not is_of_type(record[name]):
            raise ValueError(f"{name} is {record[name]!r}")
    prompt, completion = record.get("prompt_token_ids") or [], record["token_ids"]
    ids = _per_token("token_ids", [*prompt, *completion], len(prompt) + len(completion))
    media = tuple(
        Medium(
            modality_of(m["modality"]),
            _grid(m["grid"]),
            str(m.get("digest") or ""),
            tuple(s) if isinstance(s := m.get("seconds", 1.0), list) else s,
        )
        for m in record.get("media", ())
    )
    scored = torch.zeros(len(ids), dtype=torch.bool)
    if "loss_spans" in record:
        for begin, end in _ascending("loss_spans", record["loss_spans"], len(ids)):
            scored[begin:end] = True
    else:
        scored[len(prompt) :] = _per_token("mask", record.get("mask", [True] * len(completion)), len(completion)).bool()
    positions = record.get("positions")
    attended = record.get("attention_mask")
    axes = record.get("axes", TEMPORAL_AXES)
    if positions is not None and len(positions) != len(axes):
        raise ValueError(f"positions has {len(positions)} lists for the axes {', '.join(axes)}; give one for each axis")
    kinds = kinds_of(ids, _placeholders(record))
    if "modality_spans" in record:
        kinds = torch.zeros_like(ids)
        for begin, end, kind in _ascending("modality_spans", record["modality_spans"], len(ids)):
            kinds[begin:end] = int(modality_of(kind))
    return Row(
        ids,
        kinds,
        media,
        attended=None if attended is None else _per_token("attention_mask", attended, len(ids)).bool(),
        scored=scored,
        positions=None if positions is None else torch.stack([_per_token("positions", p, len(ids)) for p in positions]),
    )


def _grid(grid: Any) -> tuple[int, int, int]:
    if not isinstance(grid, list) or [type(n) for n in grid] != [int, int, int]:
        raise ValueError(f"grid is {grid}; give the three whole numbers of patches [t, h, w]")
    t, h, w = grid
    return t, h, w


def _per_token(name: str, values: Any, tokens: int) -> Tensor:  # [tokens] int64
    given = torch.tensor(values)
    if given.shape != (tokens,):
        raise ValueError(f"{name} has the shape {list(given.shape)}; give one number for each of the {tokens} tokens")
    if given.is_floating_point() and not torch.equal(given, given.floor()):  # 1.0 in a mask is a whole number
        raise ValueError(f"{name} has fractions; give whole numbers")
    return given.long()


def _ascending(name: str, spans: Any, tokens: int) -> Any:
    """The spans. Raises ValueError unless they ascend within the sample: as a mask, overlapping spans would merge."""
    before = 0
    for i, span in enumerate(spans):
        begin, end = span[:2]
        if not before <= begin < end <= tokens:
            raise ValueError(
                f"{name}[{i}] is {span}; expected a span that begins at token {before} or later and ends at {tokens} "
                "at most: sort the spans, and merge those that share tokens"
            )
        before = end
    return spans
