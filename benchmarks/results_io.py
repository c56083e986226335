"""Result files of GPU tests and benchmarks: one JSON a name under `benchmarks/results/<gpu>/`.

Every file carries command, commit, kernel_sha, hardware, driver, versions and contract id, so that a figure in the
documentation can be traced to what produced it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ROOT / "benchmarks"
HASHED = ("csrc", "rlkernel/kernels", "rlkernel/ops")
"""Folders whose code decides bits and times."""


def _tracked(root: Path) -> list[str]:
    """Files under HASHED that git tracks or would track, as new ones decide bits and times too."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *HASHED],
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout.decode()
        paths = [p for p in listed.split("\0") if p and (root / p).is_file()]
        if paths:
            return paths
    except (OSError, subprocess.CalledProcessError):
        pass
    found = (p for top in HASHED for p in (root / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [p.relative_to(root).as_posix() for p in found]


def kernel_sha(root: Path = ROOT) -> str:
    """First 16 hex digits of SHA-256 over the kernel and op files, in byte order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(_tracked(root), key=os.fsencode):
        digest.update(path.encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit(root: Path = ROOT) -> str | None:
    """`$RLKERNEL_COMMIT`, for a tree that travels without git; else the commit of the checkout; else None."""
    named = os.environ.get("RLKERNEL_COMMIT")
    if named:
        return named
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, check=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def own_cache(name: str) -> dict[str, str]:
    """For the environment of processes that are many to a GPU, or under a tool: the choices that certification times
    there stay out of the user's cache."""
    return {"RLKERNEL_CACHE": str(ROOT / "build" / f"cache-{name}")}


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device cpu|cuda`, by default cuda where there is a GPU; without one `--device cuda` is an error."""
    import torch

    there = torch.cuda.is_available()

    def known(name: str) -> str:
        if name == "cuda" and not there:
            raise argparse.ArgumentTypeError("cuda, but torch sees no CUDA GPU; leave the option out or use cpu")
        return name

    parser.add_argument("--device", type=known, choices=("cpu", "cuda"), default="cuda" if there else "cpu")


def gpu_folder(hardware: str) -> str:
    """Folder name of a piece of hardware: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")


def write_result(
    name: str, rows: list[dict[str, Any]], out: Path | None = None, folder: str | None = None, **extra: Any
) -> Path:
    """Writes one result file and returns its path.

    Args:
        name: file stem and `name` in the file.
        rows: one dict a measurement: `{op, shape, dtype, ours, anchor, ours_ms, anchor_ms, ratio, share_of_roofline,
            peak_gib}` for benchmarks, `{test, cases, tokens, elements, mismatches}` for tests.
        out: root folder, default `$RLKERNEL_RESULTS` or `benchmarks/results`.
        folder: folder in it, default the hardware's.
        extra: further fields of the file, or other values of those it has.
    """
    from rlkernel.contract import contract_id
    from rlkernel.environment import environment

    env = environment()
    root = out or Path(os.environ.get("RLKERNEL_RESULTS", RESULTS))
    place = root / (folder or gpu_folder(env["hardware"]))
    place.mkdir(parents=True, exist_ok=True)
    data = {
        "name": name,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "kernel_sha": kernel_sha(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **env,
        "contract": contract_id(),
        **extra,
        "rows": rows,
    }
    path = place / f"{name}.json"
    whole = place / f"{name}.{os.getpid()}.tmp"  # another process may be writing the same name
    whole.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(whole, path)
    return path
