"""The option `--chat-template-args` of the commands that render chats."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option; `parse` reads its values."""
    parser.add_argument(
        "--chat-template-args",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the chat template, such as enable_thinking=false; repeatable, or one JSON object",
    )


def parse(words: list[str]) -> dict[str, Any]:
    """The variables of words `name=value`, whose values are YAML, or of JSON objects.

    Raises:
        UserError: a word is neither.
    """
    import yaml

    from rlkernel.cli.errors import UserError

    found: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        try:
            found |= json.loads(word) if word.lstrip().startswith("{") else {name.strip(): yaml.safe_load(text)}
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"--chat-template-args {word!r}: {' '.join(str(error).split())}") from None
        if not word.lstrip().startswith("{") and not (separator and name.strip() and text.strip()):
            raise UserError(f"--chat-template-args {word!r}: expected NAME=VALUE, such as enable_thinking=false")
    return found
