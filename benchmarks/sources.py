"""The files behind each record's kernel_sha, so that a table can say which of them have changed since.

`benchmarks/sources/<kernel_sha>.json` holds the digest of every file that the hash covers; `tables.py` writes those of
the records there are, from the checkout or from the record's commit, and removes the others.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from results_io import BENCHMARKS, HASHED, ROOT, _tracked, kernel_sha

FOLDER = BENCHMARKS / "sources"


def _here(root: Path) -> dict[str, str]:
    return {p: hashlib.sha256((root / p).read_bytes()).hexdigest()[:16] for p in sorted(_tracked(root))}


def _at(commit: str, sha: str, root: Path) -> dict[str, str] | None:
    """The files of a commit, None where git does not have it or they are not those of the hash."""
    try:
        packed = subprocess.run(
            ["git", "archive", "--format=tar", commit, "--", *HASHED], cwd=root, capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
        return _here(Path(folder)) if kernel_sha(Path(folder)) == sha else None


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
