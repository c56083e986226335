"""Capsules on disk: a folder with manifest.json, tokens.safetensors and, if recorded, operators.safetensors.

Folders are written atomically. Reading accepts only these files, without links, with the sizes and digests recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rlkernel_drift.capsule.capsule import Capsule, Distribution, Kept, Operators
from rlkernel_drift.capsule.manifest import FORMAT, File, Manifest
from rlkernel_drift.capsule.tensor_file import (
    DEFAULT_LIMITS,
    Array,
    Limits,
    Tensor,
    parse_json,
    parse_tensors,
    read_bytes,
    write_tensors,
)
from rlkernel_drift.errors import CapsuleError, DriftError, Refusal

MANIFEST = "manifest.json"
TOKENS = "tokens.safetensors"
OPERATORS = "operators.safetensors"

_REQUIRED = ("tokens.ids", "tokens.positions", "tokens.cu_seqlens", "tokens.mask")
_OPTIONAL = (
    "tokens.spans",
    "tokens.sequence_ids",
    "tokens.ranks",
    "kept.ids",
    "kept.offsets",
    "distribution.rows",
    "distribution.logits",
)


def is_capsule(path: Path) -> bool:
    """Whether a folder has a capsule's manifest, damaged or not, because reading it then names the damage; or capsules
    of several ranks."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return any(is_capsule(folder) for folder in rank_folders(path))
    if (path / TOKENS).is_file():
        return True
    with open(manifest, "rb") as file:
        return b"rlkernel.trace/" in file.read(1 << 16)


# ---- write ---------------------------------------------------------------------------------------------------------


def write_capsule(capsule: Capsule, path: str | Path, *, max_bytes: int = 256 << 20, text: bool = True) -> Path:
    """Writes a capsule folder.

    Args:
        capsule: checked before anything is written.
        path: folder to create; an existing capsule is replaced, anything else is an error.
        max_bytes: beyond this size operators and then logits rows are left out, which the manifest records.
        text: False leaves out all texts and the command (`--no-text`).

    Returns:
        The folder.

    Raises:
        CapsuleError: the capsule is not valid.
        DriftError: the folder cannot be written, or the tokens alone are too large.
    """
    target = Path(path)
    check_target(target)
    capsule = _bounded(capsule if text else redact(capsule), max_bytes)
    capsule.validate()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise DriftError(f"cannot write {target}: {error.strerror}") from None
    try:
        work.chmod(0o755)
        write_tensors(work / TOKENS, _token_tensors(capsule))
        if capsule.operators.values:
            write_tensors(work / OPERATORS, _operator_tensors(capsule.operators))
        files = {file.name: _describe(file) for file in sorted(work.iterdir())}
        manifest = capsule.manifest.model_copy(update={"files": files})
        text_of = json.dumps({"format": FORMAT} | manifest.model_dump(mode="json", exclude_defaults=True), indent=1)
        (work / MANIFEST).write_text(text_of + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(work, target)
    except OSError as error:
        raise DriftError(f"writing {target} failed: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def check_target(target: Path) -> None:
    """Refuses a path where a capsule cannot be written, before it is computed.

    Raises:
        DriftError: something else exists there, or its parent folder is not writable.
    """
    if target.exists() and not is_capsule(target) and (not target.is_dir() or any(target.iterdir())):
        raise DriftError(f"{target} exists and is not a capsule; choose another path")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise DriftError(f"cannot write {target}: {parent} is not a writable folder")


def redact(capsule: Capsule) -> Capsule:
    """The capsule without text: no vocabulary, no command."""
    update = {"vocabulary": {}, "command": [], "redacted": True}
    return replace(capsule, manifest=capsule.manifest.model_copy(update=update))


def _bounded(capsule: Capsule, max_bytes: int) -> Capsule:
    left_out = list(capsule.manifest.left_out)
    rest = max_bytes - sum(t.values.nbytes for t in _token_tensors(replace(capsule, distribution=None)).values())
    if rest < 0:
        raise DriftError(f"the tokens alone take {max_bytes - rest} bytes, more than {max_bytes}; use fewer sequences")
    distribution, operators = capsule.distribution, capsule.operators
    if distribution is not None:
        size = distribution.logits.values.nbytes
        if size > rest:
            left_out.append(f"logits of {len(distribution.rows)} tokens ({size} bytes)")
            distribution = None
        else:
            rest -= size
    size = sum(tensor.values.nbytes for tensor in operators.values.values())
    if size > rest:
        left_out.append(f"{len(operators.values)} operators ({size} bytes)")
        operators = Operators()
    described = capsule.manifest.operators if operators is capsule.operators else []
    manifest = capsule.manifest.model_copy(update={"operators": described, "left_out": left_out})
    return replace(capsule, manifest=manifest, distribution=distribution, operators=operators)


def _token_tensors(capsule: Capsule) -> dict[str, Tensor]:
    arrays: dict[str, Array | None] = {
        "tokens.ids": capsule.ids,
        "tokens.positions": capsule.positions,
        "tokens.cu_seqlens": capsule.cu_seqlens,
        "tokens.mask": capsule.mask,
        "tokens.spans": capsule.spans,
        "tokens.sequence_ids": capsule.sequence_ids,
        "tokens.ranks": capsule.ranks,
        "kept.ids": capsule.kept.ids if capsule.kept else None,
        "kept.offsets": capsule.kept.offsets if capsule.kept else None,
        "distribution.rows": capsule.distribution.rows if capsule.distribution else None,
        **{f"logprobs.{stream}": values for stream, values in capsule.logprobs.items()},
    }
    tensors = {name: Tensor.of(array) for name, array in arrays.items() if array is not None}
    if capsule.distribution:
        tensors["distribution.logits"] = capsule.distribution.logits
    return tensors


def _operator_tensors(operators: Operators) -> dict[str, Tensor]:
    rows = {} if operators.rows is None else {"operators.rows": Tensor.of(operators.rows)}
    return rows | {f"operator/{name}": tensor for name, tensor in operators.values.items()}


def _describe(path: Path) -> File:
    with open(path, "rb") as file:
        return File(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


# ---- read ----------------------------------------------------------------------------------------------------------


def read_capsule(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> Capsule:
    """Reads and checks a capsule folder, or one with a capsule of each rank, which are merged.

    Raises:
        CapsuleError: `refusal` is the stable name of the reason.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CapsuleError(Refusal.MISSING, f"{folder} is not a folder; a capsule is a folder with {MANIFEST}")
    try:
        if (parts := rank_folders(folder)) and not (folder / MANIFEST).exists():
            return _read_ranks(folder, parts, limits)
        return _read(folder, limits)
    except CapsuleError as error:
        # a comparison reads two capsules, so the message names the one
        raise CapsuleError(error.refusal, f"{folder}: {error.reason}") from None


def _read_ranks(folder: Path, parts: list[Path], limits: Limits) -> Capsule:
    for rank, part in enumerate(parts):
        if part != rank_folder(folder, rank):
            raise CapsuleError(Refusal.MISSING, f"it has no capsule of rank {rank}; the capture was stopped")
    return merge([read_capsule(part, limits) for part in parts])


def _read(folder: Path, limits: Limits) -> Capsule:
    manifest = parse_manifest(read_bytes(folder / MANIFEST, limits.json_bytes, "the manifest"), limits)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, file in manifest.files.items():
        # a manifest is not trusted, so it must not name other files or paths
        if name not in (TOKENS, OPERATORS):
            message = f"{MANIFEST} names the file {name[:80]!r}; expected {TOKENS} or {OPERATORS}"
            raise CapsuleError(Refusal.PATH, message)
        data = read_bytes(folder / name, limits.file_bytes, "named in the manifest")
        if len(data) != file.bytes:
            raise CapsuleError(Refusal.TRUNCATED, f"{name} has {len(data)} bytes; the manifest says {file.bytes}")
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise CapsuleError(Refusal.DIGEST, f"{name} was changed: its SHA-256 is not the one in the manifest")
        tensors[name] = parse_tensors(data, name, limits)
    if TOKENS not in tensors:
        raise CapsuleError(Refusal.MISSING, f"{MANIFEST} does not name {TOKENS}")
    return assemble(manifest, tensors[TOKENS], tensors.get(OPERATORS, {}), limits)


def parse_manifest(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Parses a manifest.

    Raises:
        CapsuleError: malformed JSON, another format, an unknown key or an invalid value.
    """
    try:
        values = parse_json(data, MANIFEST, limits)
    except CapsuleError as error:
        if error.refusal != Refusal.JSON:
            raise
        message = f"{error.reason}; the file is damaged, write or copy the capsule again"
        raise CapsuleError(Refusal.JSON, message) from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise CapsuleError(Refusal.FORMAT, f"{MANIFEST} has format {str(found)[:80]!r}; this version reads {FORMAT!r}")
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        message = f"{MANIFEST}: {place}: {first['msg']} ({error.error_count()} errors)"
        raise CapsuleError(Refusal.MANIFEST, message) from None


def assemble(
    manifest: Manifest, tokens: dict[str, Tensor], operators: dict[str, Tensor], limits: Limits = DEFAULT_LIMITS
) -> Capsule:
    """Builds a capsule from its parsed parts and checks it.

    Raises:
        CapsuleError: as `read_capsule`.
    """
    for name in _REQUIRED:
        if name not in tokens:
            raise CapsuleError(Refusal.TENSOR_MISSING, f"{TOKENS} lacks {name}")
    streams = {name.removeprefix("logprobs."): t for name, t in tokens.items() if name.startswith("logprobs.")}
    known = {*_REQUIRED, *_OPTIONAL, *(f"logprobs.{name}" for name in streams)}
    unknown = sorted(set(tokens) - known)
    if unknown:
        raise CapsuleError(Refusal.TENSOR_UNKNOWN, f"{TOKENS} holds {unknown[0][:80]!r}, which {FORMAT} lacks")
    if tokens["tokens.ids"].values.size > limits.tokens:
        raise CapsuleError(Refusal.COUNT, f"{tokens['tokens.ids'].values.size} tokens; at most {limits.tokens}")
    arrays = {name: _plain(name, tensor) for name, tensor in tokens.items() if name != "distribution.logits"}
    values = {n.removeprefix("operator/"): t for n, t in operators.items() if n.startswith("operator/")}
    unknown = sorted(set(operators) - {"operators.rows"} - {f"operator/{name}" for name in values})
    if unknown:
        raise CapsuleError(Refusal.TENSOR_UNKNOWN, f"{OPERATORS} holds {unknown[0][:80]!r}, which {FORMAT} lacks")
    rows = operators.get("operators.rows")
    order = {operator.name: i for i, operator in enumerate(manifest.operators)}
    capsule = Capsule(
        manifest=manifest,
        ids=arrays["tokens.ids"],
        positions=arrays["tokens.positions"],
        cu_seqlens=arrays["tokens.cu_seqlens"],
        mask=arrays["tokens.mask"],
        logprobs={name: arrays[f"logprobs.{name}"] for name in streams},
        spans=arrays.get("tokens.spans"),
        sequence_ids=arrays.get("tokens.sequence_ids"),
        ranks=arrays.get("tokens.ranks"),
        kept=_kept(arrays),
        distribution=_distribution(arrays, tokens.get("distribution.logits")),
        operators=Operators(
            None if rows is None else _plain("operators.rows", rows),
            dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order)))),
        ),
    )
    capsule.validate()
    return capsule


def _plain(name: str, tensor: Tensor) -> Array:
    if tensor.dtype in ("BF16", "F8_E4M3", "F8_E5M2"):
        raise CapsuleError(Refusal.DTYPE, f"{name} is {tensor.dtype}")
    if tensor.dtype == "BOOL" and tensor.values.size and np.ascontiguousarray(tensor.values).view(np.uint8).max() > 1:
        raise CapsuleError(Refusal.VALUE, f"{name} holds bytes that are not booleans")
    return tensor.values


def _kept(arrays: dict[str, Array]) -> Kept | None:
    if ("kept.ids" in arrays) != ("kept.offsets" in arrays):
        raise CapsuleError(Refusal.TENSOR_MISSING, "kept.ids and kept.offsets must both be present")
    return Kept(arrays["kept.ids"], arrays["kept.offsets"]) if "kept.ids" in arrays else None


def _distribution(arrays: dict[str, Array], logits: Tensor | None) -> Distribution | None:
    if (logits is None) != ("distribution.rows" not in arrays):
        raise CapsuleError(Refusal.TENSOR_MISSING, "distribution.rows and distribution.logits must both be present")
    return None if logits is None else Distribution(arrays["distribution.rows"], logits)


# ---- several ranks ---------------------------------------------------------------------------------------------------


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
