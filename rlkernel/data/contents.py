"""The three forms of a prompt or a completion: text, a list of chat messages, or a list of token ids."""

from __future__ import annotations

import json
from typing import Any, Literal

from rlkernel.data.errors import InputError
from rlkernel.data.files import Row

WHERE = "__where__"
"""Key under which a loaded row keeps its place in its file; never passed to a reward."""
ROLES = ("system", "user", "assistant", "tool", "developer")
Form = Literal["text", "messages", "token ids"]


def form_of(content: Any) -> Form:
    """The form of a checked content."""
    if isinstance(content, str):
        return "text"
    return "messages" if isinstance(content[0], dict) else "token ids"


def is_chat(content: Any) -> bool:
    """Whether a prompt or completion is a list of chat messages."""
    return form_of(content) == "messages"


def require(where: str, row: Row, column: str) -> Any:
    """Value of a column.

    Raises:
        InputError: the row lacks the column; names those that it has.
    """
    if column not in row:
        columns = ", ".join(repr(name) for name in row) or "none"
        raise InputError(f"{where}: column {column!r} is missing (columns found: {columns})")
    return row[column]


def check_content(where: str, column: str, value: Any) -> Any:
    """The value as text, messages or token ids, without the null keys of messages.

    Arrow gives all structs of a column the same keys, so that a message may have `"tool_calls": null`.

    Raises:
        InputError: the value is empty or has none of the three forms.
    """
    if isinstance(value, str):
        if not value:
            raise InputError(f"{where}: column {column!r} is empty; it must hold at least one token")
        return value
    if not isinstance(value, list):
        raise InputError(
            f"{where}: column {column!r} must be text, a list of chat messages or a list of token ids, got "
            f"{type(value).__name__}"
        )
    if not value:
        raise InputError(f"{where}: column {column!r} is an empty list; it must hold a message or a token id")
    if isinstance(value[0], int):
        wrong = next((i for i in value if type(i) is not int or i < 0), None)
        if wrong is not None:
            raise InputError(f"{where}: column {column!r} holds {wrong!r}; token ids are integers of at least 0")
        return value
    return [_message(where, column, i, message) for i, message in enumerate(value)]


def check_messages(where: str, column: str, value: Any) -> list[dict[str, Any]]:
    """The value as `check_content`, which must be a list of messages.

    Raises:
        InputError: as `check_content`, or the value is not a list of messages.
    """
    content = check_content(where, column, value)
    if not is_chat(content):
        raise InputError(f"{where}: column {column!r} must be a list of chat messages")
    return content


def _message(where: str, column: str, number: int, message: Any) -> dict[str, Any]:
    if isinstance(message, dict):
        if message.get("role") in ROLES and isinstance(message.get("content"), str):
            return {name: value for name, value in message.items() if value is not None}
        if isinstance(message.get("content"), list):
            raise InputError(
                f"{where}: column {column!r}, message {number}: the content is a list of parts; images are not "
                "supported, join the parts of text to one text"
            )
    raise InputError(
        f'{where}: column {column!r}, message {number}: expected {{"role": ..., "content": text}} with a role of '
        f"{', '.join(ROLES)}, got {json.dumps(message)[:80]}"
    )
