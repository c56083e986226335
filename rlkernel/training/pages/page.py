"""The frame of our HTML pages: one file with its style sheet, no script, nothing loaded; generated text is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

LONGEST_TEXT = 1500


def page(title: str, header: str, body: Sequence[str], footer: str, wide: bool = False) -> str:
    """A page as HTML. Its policy allows only its own style sheet.

    Args:
        title: text.
        header, body, footer: HTML.
        wide: use more of a wide window, for tables with many columns.
    """
    style = (files("rlkernel.training.pages") / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body{' class=wide' if wide else ''}>\n"
        '<a class="skip" href="#main">Skip to the curves</a>\n'
        f'<header>{header}</header>\n<main id="main">{"".join(body)}</main>\n'
        f"<footer><p>{footer}</p></footer>\n</body>\n</html>\n"
    )


def show(text: Any) -> str:
    """Generated text as HTML: escaped, with control and direction characters made visible, and cut if very long."""
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    rest = len(text) - LONGEST_TEXT
    visible = "".join(_visible(character) for character in text[:LONGEST_TEXT])
    tail = f" <em>… {rest:,} more characters</em>" if rest > 0 else ""
    return f"<code><bdi>{escape(visible)}</bdi></code>{tail}"


def _visible(character: str) -> str:
    if character in "\n\t":
        return {"\n": "⏎\n", "\t": "⇥\t"}[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    # category Cf has the characters that change the direction of text or have no width
    return f"⟨U+{code:04X}⟩" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co") else character


def code(value: Any) -> str:
    """A value in monospaced type; a missing one as a dash."""
    return "–" if value is None else f"<code>{escape(str(value))}</code>"


def figures(values: dict[str, str]) -> str:
    """The row of boxes with a run's main figures."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="figures">{boxes}</dl>'
