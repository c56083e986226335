"""Result files of GPU tests and benchmarks: `benchmarks/results/<gpu>/<name>.json`.

Every file carries command, commit, kernel_sha, hardware, driver, versions and contract id, so that a figure in the
documentation can be traced to the run that produced it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
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
KERNELS = ("csrc", "rlkernel/kernels", "rlkernel/ops")
"""Folders whose code decides bits and times."""


def kernel_sha(root: Path = ROOT) -> str:
    """First 16 hex digits of SHA-256 over the kernel and op files, which also shows uncommitted changes."""
    digest = hashlib.sha256()
    files = (path for top in KERNELS for path in (root / top).rglob("*") if path.is_file())
    names = (path.relative_to(root).as_posix() for path in files if "__pycache__" not in path.parts)
    for name in sorted(names, key=os.fsencode):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit(root: Path = ROOT) -> str | None:
    """`$RLKERNEL_COMMIT`, for a copy of this tree without git; else the commit of the checkout; else None."""
    named = os.environ.get("RLKERNEL_COMMIT") if root == ROOT else None
    if named:
        return named
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, check=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def has_current_kernels(recorded: str | None, root: Path = ROOT) -> bool:
    """Whether git finds the kernel and op files unchanged since a record's commit; False for an unknown commit."""
    if recorded is None:
        return False
    command = ["git", "diff", "--quiet", recorded, "--", *KERNELS]
    return subprocess.run(command, cwd=root, capture_output=True).returncode == 0


def own_cache(name: str) -> dict[str, str]:
    """Environment for processes that share a GPU or run under a tool: times are distorted there, so schedules chosen by
    them must not reach the user's cache."""
    return {"RLKERNEL_CACHE": str(ROOT / "build" / f"cache-{name}")}


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device cpu|cuda`, by default cuda if there is a GPU; `--device cuda` without a GPU is an error."""
    import torch

    available = torch.cuda.is_available()

    def known(name: str) -> str:
        if name == "cuda" and not available:
            raise argparse.ArgumentTypeError("cuda, but torch sees no CUDA GPU; leave the option out or use cpu")
        return name

    parser.add_argument("--device", type=known, choices=("cpu", "cuda"), default="cuda" if available else "cpu")


def gpu_folder(hardware: str) -> str:
    """Folder name of a piece of hardware: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")


def write_result(
    name: str, rows: list[dict[str, Any]], out: Path | None = None, folder: str | None = None, **extra: Any
) -> Path:
    """Writes one result file and returns its path.

    Args:
        name: file stem and `name` in the file.
        rows: one dict per measurement: `{op, shape, dtype, ours, baseline, ours_ms, baseline_ms, ratio,
            share_of_roofline, peak_gib}` for benchmarks, `{test, cases, tokens, elements, mismatches}` for tests.
        out: root folder, default `$RLKERNEL_RESULTS` or `benchmarks/results`.
        folder: subfolder of `out`, default the hardware's.
        extra: further fields of the file, or values that replace the default fields.
    """
    from rlkernel.contract import contract_id
    from rlkernel.environment import environment

    env = environment()
    root = out or Path(os.environ.get("RLKERNEL_RESULTS", RESULTS))
    folder_path = root / (folder or gpu_folder(env["hardware"]))
    folder_path.mkdir(parents=True, exist_ok=True)
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
    path = folder_path / f"{name}.json"
    temporary = folder_path / f"{name}.{os.getpid()}.tmp"  # another process may be writing the same name
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
    return path
