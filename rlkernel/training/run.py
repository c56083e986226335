"""The run folder: made new and writable before any work, it receives settings, metrics, samples and the report.

config.yaml  metrics.jsonl  samples.jsonl  eval.jsonl  model/  report.html
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.training.config import Settings, to_yaml


def default_output(settings: Settings) -> str:
    """`runs/<algorithm>-<task or model directory's name>`, with `-torch` for the control arm."""
    name = settings.data.task or Path(settings.model.path or "model").name
    return f"runs/{settings.algorithm}-{name}" + ("-torch" if settings.run.backend == "torch" else "")


def new_folder(wanted: str | Path) -> tuple[Path, list[Path]]:
    """Creates the run folder: `wanted` itself where it is absent or empty, else the first free `wanted-2`, `-3`, ...

    Returns the folder, and the absolute paths of all that were made for it, the innermost first.

    Raises:
        InputError: the folder cannot be created or written.
    """
    wanted = Path(wanted)
    number, folder = 1, wanted
    made = [parent for parent in wanted.absolute().parents if not parent.exists()]
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                made.insert(0, folder.absolute())
                break
            except FileExistsError:
                if folder.is_dir() and not any(folder.iterdir()):
                    break
                if wanted.name in ("", ".."):
                    raise InputError(f"run folder {wanted} is not empty; choose another with --output DIR") from None
                number += 1
                folder = wanted.with_name(f"{wanted.name}-{number}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"run folder {folder} is not writable ({error.strerror}); choose another with --output DIR"
        ) from None
    return folder, made


def clean(value: Any) -> Any:
    """The value as strict JSON: NaN and infinities become null, never a token that other parsers refuse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


class Run:
    """An open run folder.

    Args:
        settings: the resolved settings, saved as `config.yaml`.
        contract: contract id, written with every line of metrics.
    """

    def __init__(self, settings: Settings, contract: str):
        self.contract = contract
        self._events: Any = None
        writer = _tensorboard_writer() if settings.run.tensorboard else None
        self.folder, self._made = new_folder(settings.run.output or default_output(settings))
        self._place = self.folder.absolute()  # the current folder may be another when it is removed
        (self.folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
        if writer is not None:
            self._events = writer(str(self.folder / "tensorboard"))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends one JSON line to `<name>.jsonl` at once, so that a killed run keeps what it measured."""
        with open(self.folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(clean(row), ensure_ascii=False, allow_nan=False) + "\n")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`, with the step and the contract id, and the same numbers to TensorBoard."""
        self.append("metrics", {"step": step, "contract": self.contract, **values})
        if self._events is not None:
            for key, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._events.add_scalar(key, value, step)

    def abandon(self) -> None:
        """Removes what a run that never began has written, and the folders made for it; nothing was measured."""
        self.close()
        with contextlib.suppress(OSError):  # what made the run refuse is the error to tell
            for path in self._place.iterdir():
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for made in self._made:
            with contextlib.suppress(OSError):  # another run has a folder there by now
                made.rmdir()

    def close(self) -> None:
        """Closes the TensorBoard events; the run's numbers are on disk already."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensorboard_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("run.tensorboard=true needs the extra: pip install 'rlkernel[tensorboard]'") from None
    return SummaryWriter


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that `Run.append` wrote; an absent file has none."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def peak_memory_mib(device: str) -> float:
    """Peak memory so far in MiB: the GPU's allocations, or this process's resident set."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
