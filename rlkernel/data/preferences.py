"""Rows of preference files in TRL's columns: `prompt`, `chosen` and `rejected`, with an explicit or implicit prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkernel.data.contents import WHERE, check_content, form_of, is_chat, require
from rlkernel.data.errors import InputError
from rlkernel.data.files import Row, read_rows


def load_preferences(path: str | Path) -> list[Row]:
    """Rows of a preference file as `{prompt, chosen, rejected}`, all of one form: text, messages or token ids.

    Without a column `prompt`, the prompt is the longest common beginning of `chosen` and `rejected`, in messages, in
    characters or in token ids; a space at the end of a common text belongs to the answers. A `prompt` that is text
    while the answers are messages repeats their beginning, as in TRL's example data, and is not used. A column
    `margin`, by how much the chosen answer is better, is kept for reward models.

    Raises:
        InputError: as `read_rows`; columns are missing, empty or of different forms; both answers are equal, one has
            nothing after the prompt, messages do not end with the assistant's, or the margin is not a number.
    """
    return list(iter_preferences(path))


def iter_preferences(path: str | Path) -> Iterator[Row]:
    """The rows of `load_preferences` one by one, so that those before a bad line are known."""
    for where, row in read_rows(path):
        chosen, rejected = (check_content(where, name, require(where, row, name)) for name in ("chosen", "rejected"))
        if form_of(chosen) != form_of(rejected):
            raise InputError(
                f"{where}: 'chosen' is {form_of(chosen)} and 'rejected' is {form_of(rejected)}; give both in one form"
            )
        if chosen == rejected:
            raise InputError(f"{where}: 'chosen' and 'rejected' are equal, so there is no preference; remove the row")
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if is_chat(answer) and answer[-1]["role"] != "assistant":
                raise InputError(f"{where}: the messages of {name!r} must end with the assistant's")
        prompt = row.get("prompt")
        if prompt is not None:
            prompt = check_content(where, "prompt", prompt)
        if prompt is None or (is_chat(chosen) and form_of(prompt) == "text"):
            prompt, chosen, rejected = _split(where, chosen, rejected)
        elif form_of(prompt) != form_of(chosen):
            raise InputError(
                f"{where}: 'prompt' is {form_of(prompt)} and 'chosen' is {form_of(chosen)}; give both in one form"
            )
        found = {"prompt": prompt, "chosen": chosen, "rejected": rejected, WHERE: where}
        yield found if row.get("margin") is None else {**found, "margin": _margin(where, row["margin"])}


def _margin(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{where}: column 'margin' is {value!r}; it must be a finite number")
    return float(value)


def _split(where: str, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of two answers that begin with their prompt."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1
    if length == 0:
        raise InputError(
            f"{where}: 'chosen' and 'rejected' have no common beginning that could be their prompt; give it in a "
            "column 'prompt'"
        )
    if length == min(len(chosen), len(rejected)):
        shorter = "chosen" if len(chosen) == length else "rejected"
        raise InputError(
            f"{where}: {shorter!r} has nothing after the common prompt; give the prompt in a column 'prompt', or "
            "remove the row"
        )
    return chosen[:length], chosen[length:], rejected[length:]
