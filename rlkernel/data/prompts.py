"""Rows of prompt files and of supervised examples, in TRL's columns; every error names the file and the line.

A prompt row has `prompt` and further columns, which are passed to the rewards. A supervised row has `prompt` and
`completion`, or `messages`, the last of which is the assistant's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkernel.data.contents import WHERE, check_content, check_messages, form_of, require
from rlkernel.data.errors import InputError
from rlkernel.data.files import Row, read_rows

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments of every reward; a column cannot have one of these names."""


def load_prompts(path: str | Path) -> list[Row]:
    """Rows of a prompt file, each with its file and line under the key `WHERE`.

    All rows must have the same columns, because a column is passed to the rewards as one list for the batch.

    Raises:
        InputError: as `read_rows`; a prompt is missing or empty; a row's columns differ from the first row's.
    """
    return list(iter_prompts(path))


def iter_prompts(path: str | Path) -> Iterator[Row]:
    """The rows of `load_prompts` one by one, so that those before a bad line are known."""
    first: Row | None = None
    for where, row in read_rows(path):
        prompt = check_content(where, "prompt", require(where, row, "prompt"))
        for column in sorted(row.keys() & set(RESERVED)):
            raise InputError(f"{where}: column {column!r} is an argument of every reward; give the column another name")
        first = first or {**row, WHERE: where}
        expected = first.keys() - {WHERE}
        for column in sorted(expected - row.keys()):
            raise InputError(f"{where}: column {column!r} is missing, which {first[WHERE]} has")
        for column in sorted(row.keys() - expected):
            raise InputError(f"{where}: column {column!r} is new, {first[WHERE]} does not have it")
        yield {**row, "prompt": prompt, WHERE: where}


def load_examples(path: str | Path) -> list[Row]:
    """Rows of a supervised file as `{prompt, completion}`, both of one form: text, messages or token ids.

    The last of `messages`, which must be the assistant's, is the completion; the others are the prompt.

    Raises:
        InputError: as `read_rows`; columns are missing, empty or mixed; `messages` do not end with the assistant's.
    """
    return list(iter_examples(path))


def iter_examples(path: str | Path) -> Iterator[Row]:
    """The rows of `load_examples` one by one, so that those before a bad line are known."""
    for where, row in read_rows(path):
        # Rows of one Arrow file have the same columns; where another row has a value, this one has null.
        if row.get("messages") is not None:
            messages = check_messages(where, "messages", row["messages"])
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise InputError(f"{where}: 'messages' must hold a prompt and end with the assistant's message")
            yield {"prompt": messages[:-1], "completion": messages[-1:], WHERE: where}
            continue
        prompt = check_content(where, "prompt", require(where, row, "prompt"))
        completion = check_content(where, "completion", require(where, row, "completion"))
        if form_of(prompt) != form_of(completion):
            raise InputError(
                f"{where}: 'prompt' is {form_of(prompt)} and 'completion' is {form_of(completion)}; give both as text, "
                "both as messages or both as token ids"
            )
        yield {"prompt": prompt, "completion": completion, WHERE: where}


def columns_of(rows: list[Row]) -> dict[str, list[Any]]:
    """All columns of a batch except the prompt, one list each, as rewards take them."""
    names = [name for name in rows[0] if name not in ("prompt", WHERE)]
    return {name: [row[name] for row in rows] for name in names}
