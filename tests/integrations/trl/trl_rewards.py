"""A reward that a configuration names."""

from __future__ import annotations

from typing import Any


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 10 for text in completions]
