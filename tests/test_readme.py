"""README and docs: links resolve, commands parse, Python examples run."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from e2e.tiny_model import make_model

from rlkernel.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_commands_parse() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [
        line
        for language, block in blocks
        if not language
        for line in block.splitlines()
        if line.startswith("rlkernel ")
    ]
    assert len(lines) >= 6
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])


def test_extras_of_the_install_lines_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    named = set(re.findall(r"\w+", "".join(re.findall(r"\[[\w,]+\]", "".join(lines)))))
    assert {"vllm", "trl", "transformers"} <= named <= extras.keys()


def test_every_op_has_a_page() -> None:
    from rlkernel.contract import ORDERS

    for op in ORDERS:
        assert (ROOT / "docs" / "ops" / f"{op}.md").exists(), op


# ---- examples ------------------------------------------------------------------------------------

ELSEWHERE = re.compile(r'"fa3"|vllm|trl|rlkernel_transformers|assert_aligned')
"""Blocks that need a GPU or another stack. The integration tests run those of the integrations' pages."""
STAND_INS = {
    "Qwen3-0.6B": "model",
    '"DIR"': '"model"',
    '"cuda"': '"cpu"',
    "num_layers=2)": "num_layers=1, hidden_size=64)",
}


def examples(page: Path) -> list[str]:
    return [b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if not ELSEWHERE.search(b)]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "integrations" and examples(page)],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the Python blocks of a page in order, with replacements for model and GPU."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(examples(page))
    if any(name in code for name in ("Qwen3-0.6B", '"DIR"')):
        pytest.importorskip("transformers")
        make_model(tmp_path / "model")
    names: dict[str, object] = {}
    for example in examples(page):
        for old, new in STAND_INS.items():
            example = example.replace(old, new)
        exec(compile(example, str(page), "exec"), names)
    if page.name == "README.md":
        assert names["drift"]() == 0.0  # type: ignore[operator]


def test_every_op_has_an_example_that_runs() -> None:
    assert all(examples(page) for page in (ROOT / "docs" / "ops").glob("*.md"))
