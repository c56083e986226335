"""The first example of each integration page, adapted to a local model."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs" / "integrations"


def first_lines(page: str, model: Path | str, **others: str) -> str:
    """The first Python block of a page, with `model` instead of Qwen3-0.6B and further replacements `others`."""
    found = re.search(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert found is not None
    code = found[1]
    for old, new in {"Qwen/Qwen3-0.6B": str(model), **others}.items():
        assert old in code, old
        code = code.replace(old, new)
    return code
