"""JSON lines of token ids and log-probabilities, as `rlkernel generate`, vLLM and trainers write them.

A record has one sequence, or several under `outputs` (vLLM's RequestOutput) or `choices` (OpenAI-style servers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlkernel_drift.capsule import Capsule, Manifest, Sampling, build_capsule
from rlkernel_drift.capsule.manifest import File
from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs.metrics import MAX_BYTES, json_lines

_TOKENS = ("token_ids", "completion_token_ids", "completion_ids", "output_token_ids")
_PROMPT = ("prompt_token_ids", "prompt_ids")
_LOGPROBS = ("logprobs", "completion_logprobs", "output_logprobs", "token_logprobs")
_LAYOUT = ("media", "positions", "loss_spans", "modality_spans")
_MASK = ("mask", "completion_mask")
_SEVERAL = ("outputs", "choices")
_MAX_TEXT = 512
NO_SAMPLING = "sampling settings"


@dataclass(frozen=True)
class _Sequence:
    """One completion of a record; `where` names its line."""

    where: str
    prompt: list[int] | None
    ids: list[int]
    logprobs: list[float]
    mask: list[bool]
    name: str | int | None
    record: dict[str, Any]


def is_sequences(path: Path) -> bool:
    """Whether the first line of a file is a record with lists of token ids or log-probabilities."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):
        return False
    names = (*_TOKENS, *_LOGPROBS, *_SEVERAL)
    return isinstance(first, dict) and any(isinstance(first.get(name), (list, dict)) for name in names)


def layout_file(path: Path) -> Path | None:
    """The file of an input that describes its layout: its own records, or layout.jsonl of a capsule; None without."""
    if path.is_dir():
        return path / "layout.jsonl" if (path / "layout.jsonl").is_file() else None
    with open(path, encoding="utf-8-sig") as file:
        first = json.loads(next((line for line in file if line.strip()), "null"))
    return path if isinstance(first, dict) and any(name in first for name in _LAYOUT) else None


def read_sequences(path: Path) -> Capsule:
    """The capsule of a file; docs/drift/compare.md lists the fields.

    Raises:
        DriftError: the message names the line, the field, and what was expected.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DriftError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        rows, cut = json_lines(path)
        content = path.read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        raise DriftError(f"{path} cannot be read as sequences: {error}") from None
    found = [sequence for place, row in rows for sequence in _sequences(row, f"{path}, {place}")]
    prompts = _all_or_none(found, "prompt_token_ids", [s.prompt for s in found])
    names = _all_or_none(found, "id", [s.name for s in found])
    empty = next((s for s in found if not s.ids and not s.prompt), None)
    if empty is not None:
        raise DriftError(
            f"{empty.where}: token_ids is empty and there is no prompt; leave the record out of both files"
        )
    contracts = {s.record.get("contract") for s in found}
    contract = contracts.pop() if len(contracts) == 1 else None
    sampling = _sampling(found)
    left_out = ([] if prompts else ["token ids of the prompts"]) + ([] if sampling else [NO_SAMPLING])
    # the path identifies the file: two equal files can be compared, a file with itself cannot
    identity = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return build_capsule(
        Manifest(
            engine=path.stem[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode(),
            contract=contract[:_MAX_TEXT] if isinstance(contract, str) else None,
            sampling=sampling or Sampling(),
            vocabulary=_vocabulary(found),
            left_out=left_out + ([f"{cut}, which is cut"] if cut else []),
            files={identity: File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())},
        ),
        prompts or [[] for _ in found],
        [s.ids for s in found],
        {"recorded.processed": [s.logprobs for s in found]},
        masks=[s.mask for s in found],
        sequence_ids=[_number_of(name) for name in names] if names else None,
    )


def _sequences(row: Any, where: str) -> list[_Sequence]:
    """The sequences of a record."""
    if not isinstance(row, dict):
        raise DriftError(f"{where} is not a JSON object; expected one with token_ids and logprobs")
    field = next((name for name in _SEVERAL if row.get(name) is not None), None)
    if field is None:
        return [_sequence(row, {}, where)]
    if not isinstance(row[field], list) or not all(isinstance(part, dict) for part in row[field]):
        raise DriftError(f"{where}: {field} is {_shown(row[field])}; expected a list of objects with token_ids")
    return [_sequence(part, row, f"{where}, {field}[{i}]") for i, part in enumerate(row[field])]


def _sequence(part: dict[str, Any], around: dict[str, Any], where: str) -> _Sequence:
    field, ids = _find(_TOKENS, part)
    if field is None:
        raise DriftError(f"{where} has no token_ids, which are compared instead of texts")
    ids = _ids(ids, f"{where}: {field}")
    field, values = _find(_LOGPROBS, part)
    if field is None:
        raise DriftError(f"{where} has no logprobs; expected a list of numbers, one for each of its token ids")
    logprobs = _logprobs(values, ids, f"{where}: {field}")
    field, prompt = _find(_PROMPT, {**around, **{k: v for k, v in part.items() if v is not None}})
    if field is not None:
        prompt = _ids(prompt, f"{where}: {field}")
    field, mask = _find(_MASK, part)
    if field is None:
        mask = [True] * len(ids)
    elif not isinstance(mask, list) or len(mask) != len(ids) or any(v not in (0, 1) for v in mask):
        raise DriftError(f"{where}: {field} is {_shown(mask)}; expected {len(ids)} times 0 or 1, one for each token id")
    # a server's id is new for each response, so it cannot match sequences
    name = None if "choices" in around else {**around, **part}.get("id")
    if not isinstance(name, (str, int, type(None))):
        raise DriftError(f"{where}: id is {_shown(name)}; expected a text or an integer")
    return _Sequence(where, prompt, ids, logprobs, [bool(v) for v in mask], name, {**around, **part})


def _find(names: Sequence[str], row: dict[str, Any]) -> tuple[str | None, Any]:
    """The first name with a value, and the value; (None, None) without one."""
    return next(((name, row[name]) for name in names if row.get(name) is not None), (None, None))


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise DriftError(f"{where} is {_shown(value)}; expected a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise DriftError(f"{where}[{i}] is {_shown(token)}; expected a token id from 0 to 2147483647")
    return value


def _logprobs(value: Any, ids: list[int], where: str) -> list[float]:
    if isinstance(value, dict):  # an OpenAI-style server's, of a completion or of a chat
        value = value.get("token_logprobs", value.get("content"))
    if not isinstance(value, list):
        raise DriftError(f"{where} is {_shown(value)}; expected a list of numbers, one for each token id")
    if len(value) != len(ids):
        raise DriftError(f"{where} has {len(value)} values for {len(ids)} token ids; expected one for each")
    return [_logprob(v, token, f"{where}[{i}]") for i, (v, token) in enumerate(zip(value, ids, strict=True))]


def _logprob(value: Any, token: int, where: str) -> float:
    """A number, or that of `token` in an object of vLLM or a server; null stands for NaN."""
    found = value
    if isinstance(found, dict) and "logprob" not in found:
        if str(token) not in found:
            raise DriftError(f"{where} has no value of token {token}; expected a number, or an object with it")
        found = found[str(token)]
    if isinstance(found, dict):
        found = found.get("logprob", "")
    if found is None:
        return float("nan")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise DriftError(f"{where} is {_shown(value)}; expected a number")
    try:
        return float(found)
    except OverflowError:
        return float("inf") if found > 0 else float("-inf")


def _all_or_none(found: list[_Sequence], field: str, values: list[Any]) -> list[Any] | None:
    """The values; None if no record has one."""
    there = [value is not None for value in values]
    if not any(there):
        return None
    if not all(there):
        lacks, has = found[there.index(False)], found[there.index(True)]
        raise DriftError(f"{lacks.where} has no {field}, and line {has.where.rpartition(', line ')[2]} has one")
    return values


def _sampling(found: list[_Sequence]) -> Sampling | None:
    """The settings under `sampling`, which must be the same in all records; None without them."""
    first = found[0].record.get("sampling") if found else None
    other = next((s for s in found if s.record.get("sampling") != first), None)
    if other is not None:
        raise DriftError(f"{other.where}: sampling differs from the first record; compare one setting at a time")
    if first is None:
        return None
    try:
        return Sampling.model_validate(first)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(["sampling", *map(str, wrong["loc"])])
        raise DriftError(f"{found[0].where}: {place}: {wrong['msg']}") from None


def _vocabulary(found: list[_Sequence]) -> dict[str, str]:
    """Texts of token ids, from `tokens` of the records."""
    texts: dict[str, str] = {}
    for s in found:
        tokens = s.record.get("tokens")
        if isinstance(tokens, list) and len(tokens) == len(s.ids):
            texts |= {str(i): t[:_MAX_TEXT] for i, t in zip(s.ids, tokens, strict=True) if isinstance(t, str)}
    return {key: text.encode("utf-8", "backslashreplace").decode() for key, text in texts.items()}


def _number_of(name: str | int) -> int:
    """The digest of an id, because capsules store ids in 64 bits."""
    digest = hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
