"""Reads JSONL files of prompts and of supervised examples; every error names the file and the line.

A prompt row has `prompt` (text, or a list of chat messages) and further columns, which are passed to the rewards. A
supervised row has `prompt` and `completion`, or `messages`, the last of which is the assistant's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from rlkernel.data.errors import InputError

Row = dict[str, Any]
T = TypeVar("T")
WHERE = "__where__"
"""Key under which a loaded row keeps its `file:line`; never passed to a reward."""
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments of every reward; a column cannot have one of these names."""
ROLES = ("system", "user", "assistant", "tool", "developer")


def read_jsonl(path: str | Path) -> Iterator[tuple[str, Row]]:
    """Yields (`file:line`, row) for each line of a JSONL file; blank lines are skipped.

    Raises:
        InputError: the file does not exist, is not UTF-8 or has no rows, or a line is not a JSON object.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # spreadsheets write a byte order mark
    except OSError as error:
        raise InputError(
            f"data: cannot read {path}: {error.strerror or error}; give the path of a JSONL file"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"data: {path} is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    found = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # includes Python's limits on digits and nesting
            raise InputError(
                f"{where}: not JSON that can be read ({error}); each line must be one JSON object"
            ) from None
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected a JSON object such as {{"prompt": "..."}}, got {type(row).__name__}')
        found = True
        yield where, row
    if not found:
        raise InputError(f"data: {path} has no rows; each line must be one JSON object")


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages (else it is text)."""
    return isinstance(prompt, list)


def _check_text(where: str, column: str, value: Any) -> None:
    if isinstance(value, str):
        if not value:
            raise InputError(f"{where}: column {column!r} is empty; a prompt must hold at least one token")
        return
    if not isinstance(value, list):
        raise InputError(
            f"{where}: column {column!r} must be text or a list of chat messages, got {type(value).__name__}"
        )
    if not value:
        raise InputError(f"{where}: column {column!r} is an empty list; it must hold at least one message")
    for i, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise InputError(
                f'{where}: column {column!r}, message {i}: expected {{"role": ..., "content": text}} '
                f"with a role of {', '.join(ROLES)}, got {json.dumps(message)[:80]}"
            )


def _require(where: str, row: Row, column: str) -> Any:
    if column not in row:
        columns = ", ".join(repr(name) for name in row) or "none"
        raise InputError(f"{where}: column {column!r} is missing (columns found: {columns})")
    return row[column]


def load_prompts(path: str | Path) -> list[Row]:
    """Rows of a prompt file, each with its file and line under the key `WHERE`.

    All rows must have the same columns, because a column is passed to the rewards as one list for the batch.

    Raises:
        InputError: as `read_jsonl`; a prompt is missing or empty; a row's columns differ from the first row's.
    """
    rows: list[Row] = []
    for where, row in read_jsonl(path):
        _check_text(where, "prompt", _require(where, row, "prompt"))
        for column in sorted(row.keys() & set(RESERVED)):
            raise InputError(f"{where}: column {column!r} is an argument of every reward; give the column another name")
        if rows:
            expected = rows[0].keys() - {WHERE}
            for column in sorted(expected - row.keys()):
                raise InputError(f"{where}: column {column!r} is missing, which {rows[0][WHERE]} has")
            for column in sorted(row.keys() - expected):
                raise InputError(f"{where}: column {column!r} is new, {rows[0][WHERE]} does not have it")
        rows.append({**row, WHERE: where})
    return rows


def load_examples(path: str | Path) -> list[Row]:
    """Rows of a supervised file as `{prompt, completion}`, both text or both lists of messages.

    The last of `messages`, which must be the assistant's, is the completion; the others are the prompt.

    Raises:
        InputError: as `read_jsonl`; columns are missing, empty or mixed; `messages` do not end with the assistant's.
    """
    rows: list[Row] = []
    for where, row in read_jsonl(path):
        if "messages" in row:
            messages = row["messages"]
            if not isinstance(messages, list):
                raise InputError(f"{where}: column 'messages' must be a list of chat messages")
            _check_text(where, "messages", messages)
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise InputError(f"{where}: 'messages' must hold a prompt and end with the assistant's message")
            rows.append({"prompt": messages[:-1], "completion": messages[-1:], WHERE: where})
            continue
        prompt, completion = _require(where, row, "prompt"), _require(where, row, "completion")
        _check_text(where, "prompt", prompt)
        _check_text(where, "completion", completion)
        if is_chat(prompt) != is_chat(completion):
            raise InputError(f"{where}: 'prompt' and 'completion' must both be text or both be lists of messages")
        rows.append({"prompt": prompt, "completion": completion, WHERE: where})
    return rows


def count_prompts(rows: list[Row]) -> int:
    """Number of different prompts."""
    return len({_key(row) for row in rows})


def _key(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def split_heldout(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): `count` rows drawn with a fixed seed, both parts in the file's order.

    The training part has no row whose prompt was drawn, duplicates included.
    """
    if count <= 0:
        return rows, []
    drawn = sorted(random.Random(0).sample(range(len(rows)), min(count, len(rows))))
    heldout = [rows[i] for i in drawn]
    kept_out = {_key(row) for row in heldout}
    return [row for row in rows if _key(row) not in kept_out], heldout


def shuffled(items: list[T], seed: int) -> Iterator[T]:
    """Endless stream over the items, each pass in a new order that depends on the seed only."""
    generator = random.Random(seed)
    while True:
        order = list(range(len(items)))
        generator.shuffle(order)
        for i in order:
            yield items[i]


def columns_of(rows: list[Row]) -> dict[str, list[Any]]:
    """All columns of a batch except the prompt, one list each, as rewards take them."""
    names = [name for name in rows[0] if name not in ("prompt", WHERE)]
    return {name: [row[name] for row in rows] for name in names}
