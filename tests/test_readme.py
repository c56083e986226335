"""What README and docs say holds: links lead somewhere, commands parse, the Python example of the ops runs."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from rlkernel.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_commands_parse() -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("rlkernel ")]
    assert len(lines) >= 6
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])


def test_how_to_install_beside_other_stacks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    named = set(re.findall(r"\w+", "".join(re.findall(r"\[[\w,]+\]", "".join(lines)))))
    assert {"vllm", "trl", "transformers"} <= named <= extras.keys()


def test_every_op_has_a_page() -> None:
    from rlkernel.contract import ORDERS

    for op in ORDERS:
        assert (ROOT / "docs" / "ops" / f"{op}.md").exists(), op


def test_ops_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "linear_logprob" in block]
    names: dict[str, object] = {}
    exec(example, names)
    assert names["weight"].grad is not None  # type: ignore[attr-defined]
