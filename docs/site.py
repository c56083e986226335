"""Hooks of the documentation site (`mkdocs.yml`): pages that are not files under docs/.

README.md becomes the index page and CONTRIBUTING.md the page of that name; each API page lists names whose docstrings
mkdocstrings reads from the sources without importing them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
FOLDERS = {"docs/ops": "api/ops.md"}


def _ops() -> list[str]:
    """Where each public op is defined: `rlkernel.ops.linear` would name the module and not the function."""
    found = ast.parse((ROOT / "rlkernel/ops/__init__.py").read_text()).body
    return [f"{node.module}.{name.name}" for node in found if isinstance(node, ast.ImportFrom) for name in node.names]


API = {
    "ops": ("Operators", [*_ops(), "rlkernel.ops.warmup", "rlkernel.ops.report"]),
    "engine": ("Engine", ["rlkernel.engine.LLM", "rlkernel.engine.SamplingParams", "rlkernel.engine.RequestOutput"]),
    "models": ("Models", ["rlkernel.models"]),
    "multimodal": ("Images, videos and screens", ["rlkernel.multimodal"]),
    "parallel": (
        "Several ranks",
        [
            f"rlkernel.parallel.{n}"
            for n in ("tree", "collectives", "fsdp2", "ddp", "norm", "tensor", "vocabulary", "sequence")
        ],
    ),
    "contract": ("Contract", ["rlkernel.contract"]),
    "drift": ("Drift", ["rlkernel_drift.compare.compare", "rlkernel_drift.capsule"]),
    "kernels": ("Kernels", ["rlkernel.kernels.select", "rlkernel.kernels.scheduled_op"]),
    "integrations": ("Integrations", ["rlkernel_vllm", "rlkernel_trl", "rlkernel_transformers"]),
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for name, (title, members) in API.items():
        listed = "\n\n".join(f"::: {member}" for member in members)
        files.append(File.generated(config, f"api/{name}.md", content=f"# API: {title}\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links for the pages from the root. A link to a file that is not a page (a source) becomes text."""
    source = next((name for name, at in PAGES.items() if at == page.file.src_uri), f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link.groups("")
        if "://" in target:
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = {**PAGES, **FOLDERS}.get(found, found)
        if place == found and not found.startswith("docs/") and (ROOT / found).exists():
            return text
        place = posixpath.relpath(place.removeprefix("docs/"), posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({place}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)
