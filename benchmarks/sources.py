"""The files behind each record's kernel_sha, so that a table can say which of them have changed since.

`benchmarks/sources/<kernel_sha>.json` holds the digest of every file that the hash covers; `tables.py` writes those of
the records there are, from the checkout or from the record's commit, and removes the others.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from results_io import BENCHMARKS, HASHED, ROOT, _tracked, kernel_sha

FOLDER = BENCHMARKS / "sources"


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _here(root: Path) -> dict[str, str]:
    return {path: _short((root / path).read_bytes()) for path in sorted(_tracked(root))}


def _at(commit: str, sha: str, root: Path) -> dict[str, str] | None:
    """The files of a commit, None where git does not have it or they are not those of the hash."""

    def git(*args: str) -> bytes:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, check=True).stdout

    try:
        listed = git("ls-tree", "-r", "-z", "--name-only", commit, "--", *HASHED).split(b"\0")
        files = {path: git("cat-file", "blob", f"{commit}:{path.decode()}") for path in sorted(listed) if path}
    except (OSError, subprocess.CalledProcessError):
        return None
    whole = hashlib.sha256(b"".join(path + b"\0" + content + b"\0" for path, content in files.items()))
    if whole.hexdigest()[:16] != sha:
        return None
    return {path.decode(): _short(content) for path, content in files.items()}


def keep(records: Iterable[Mapping[str, Any]], root: Path = ROOT, folder: Path = FOLDER) -> None:
    """Writes the files of every hash that a record has, as far as they are known, and removes all others."""
    commits: dict[str, set[str]] = {}
    for record in records:
        if "kernel_sha" in record:
            commits.setdefault(record["kernel_sha"], set()).update(filter(None, [record.get("commit")]))
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        if path.stem not in commits:
            path.unlink()
    for sha, made_at in commits.items():
        path = folder / f"{sha}.json"
        if not path.exists():
            known = (_at(commit, sha, root) for commit in sorted(made_at))
            files = _here(root) if sha == kernel_sha(root) else next(filter(None, known), None)
            if files is not None:
                path.write_text(json.dumps(files, indent=0) + "\n")


def changed_since(sha: str, root: Path = ROOT, folder: Path = FOLDER) -> list[str] | None:
    """Files that were changed, added or removed since; None where nobody knows what the hash was of."""
    path = folder / f"{sha}.json"
    if not path.exists():
        return None
    then: dict[str, str] = json.loads(path.read_text())
    return sorted({name for name, _ in then.items() ^ _here(root).items()})
