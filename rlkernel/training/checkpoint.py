"""Checkpoints of a run: written atomically, verified when read, resumed bit for bit.

A checkpoint is a folder `checkpoints/step-N` of the run folder. It holds safetensors files, `state.json`, and a
`manifest.json` with the size and the SHA-256 of every other file. `checkpoints/latest` names the newest one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlkernel.data.errors import InputError
from rlkernel.data.files import data_files
from rlkernel.data.tokenizer import local_directory
from rlkernel.environment import environment
from rlkernel.models import Backbone, merge_adapters_
from rlkernel.models.lora import adapted
from rlkernel.parallel.ranks import Ranks
from rlkernel.signals import Interrupted, handled
from rlkernel.training.config import Settings, leaves, located
from rlkernel.training.run_folder import RunFolder

FOLDER, LATEST, MANIFEST, STATE = "checkpoints", "latest", "manifest.json", "state.json"
FROZEN = "reference"  # tensors that never change: every checkpoint links to the file of the first one
FORMAT = 1


@dataclass
class Checkpoint:
    """What a run continues from.

    Attributes:
        step: number of finished steps.
        state: JSON data: settings, contract, counters, digests of the data files.
        tensors: by file (model, optimizer, reference; ppo: value_model, value_optimizer), then by name.
    """

    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def tensors_of(model: Backbone) -> dict[str, Tensor]:
    """The parameters of a model by name; with adapters theirs alone, because the base is in the files of model.path."""
    has_adapters = bool(adapted(model))
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad or not has_adapters}


@torch.no_grad()
def load_tensors(model: Backbone, tensors: dict[str, Tensor]) -> None:
    """Copies what `tensors_of` returned into a model of the same shape."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
    merge_adapters_(model)


def name_of(step: int) -> str:
    """Folder name of the checkpoint after a step."""
    return f"step-{step:08d}"


def save(run: Path, checkpoint: Checkpoint, keep_last: int) -> Path:
    """Writes a checkpoint and removes all but the newest `keep_last`.

    Nothing replaces an older checkpoint before the new one is complete on disk: the files are written into a temporary
    folder and flushed, the folder is renamed, and only then `latest` is replaced.

    Raises:
        InputError: the checkpoint cannot be written; older ones stay.
    """
    root = run / FOLDER
    final, work = root / name_of(checkpoint.step), root / f".{name_of(checkpoint.step)}.new"
    try:
        root.mkdir(exist_ok=True)
        for stale in root.glob(".*.new"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        work.mkdir()
        previous = newest(run)
        manifest: dict[str, Any] = {}
        for name, tensors in checkpoint.tensors.items():
            file = work / f"{name}.safetensors"
            if name == FROZEN and previous is not None:
                try:
                    os.link(previous / file.name, file)
                except OSError:  # a file system without hard links
                    shutil.copyfile(previous / file.name, file)
            else:
                save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, file)
            manifest[file.name] = _entry(file)
        (work / STATE).write_text(json.dumps({"format": FORMAT, "step": checkpoint.step, **checkpoint.state}, indent=1))
        manifest[STATE] = _entry(work / STATE)
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in work.iterdir():
            _flush(file)
        _flush(work)
        if final.exists():  # written by a run that was interrupted before it replaced `latest`
            shutil.rmtree(final)
        os.replace(work, final)
        _point(root, final.name)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
        reason = getattr(error, "strerror", None) or error
        again = "start the run again" if newest(run) is None else f"continue from the one before it with --resume {run}"
        raise InputError(f"cannot write checkpoint {final} ({reason}); free some space and {again}") from None
    for old in sorted(root.glob("step-*"), reverse=True)[keep_last:]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def newest(run: Path) -> Path | None:
    """The checkpoint that `latest` names; None if there is none.

    Raises:
        InputError: `latest` names a folder that does not exist.
    """
    pointer = run / FOLDER / LATEST
    try:
        name = pointer.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not name or not (run / FOLDER / name).is_dir():
        there = ", ".join(path.name for path in sorted((run / FOLDER).glob("step-*"))) or "none"
        raise InputError(f"{pointer} names {name!r}, which does not exist; resume from one that does: {there}")
    return run / FOLDER / name


def rewind(run: Path, step: int) -> None:
    """Makes the checkpoint after `step` the newest one and removes later ones, which belong to abandoned steps."""
    _point(run / FOLDER, name_of(step))
    for path in (run / FOLDER).glob("step-*"):
        if path.name > name_of(step):
            shutil.rmtree(path)


def find(place: Path) -> Path:
    """The checkpoint at `place`: a checkpoint's own folder, or the newest one of a run folder.

    Raises:
        InputError: there is none.
    """
    place = place.absolute()
    if not place.exists():
        known = sorted(path.name for path in place.parent.glob("step-*"))
        there = f"there are {', '.join(known)}" if known else "name a run folder, or a checkpoint in its checkpoints/"
        raise InputError(f"--resume {place}: it does not exist; {there}")
    if (place / MANIFEST).exists() or place.parent.name == FOLDER:
        return place
    found = newest(place)
    if found is None:
        raise InputError(
            f"--resume {place}: no checkpoint there; name a run folder with {FOLDER}/, which train.save_every writes, "
            "or one checkpoint"
        )
    return found


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU after it has verified every file.

    Raises:
        InputError: a file is missing, truncated or changed; names the file and the checkpoint before it.
    """
    manifest = _read_manifest(path)
    for name, entry in manifest.items():
        if not (path / name).exists() or _entry(path / name) != entry:
            raise _damaged(path, name)
    if STATE not in manifest:
        raise _damaged(path, MANIFEST)
    state = json.loads((path / STATE).read_text())
    if state.get("format") != FORMAT:
        raise InputError(f"{path / STATE} has format {state.get('format')}; this version of rlkernel reads {FORMAT}")
    files = [name for name in manifest if name.endswith(".safetensors")]
    tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in files}
    return Checkpoint(state["step"], state, tensors)


class Saver:
    """Saves the checkpoints of a run: every `train.save_every` steps and when a signal asks the run to stop.

    With several ranks, each of them calls every method, and rank 0 writes.

    Args:
        resumed: the checkpoint that the run continues from, or None.

    Attributes:
        signal: number of the signal that asked the run to stop, or 0.
    """

    def __init__(self, run: RunFolder, settings: Settings, resumed: Checkpoint | None, ranks: Ranks = Ranks()):
        self.run, self.settings, self.resumed, self.ranks, self.signal = run, settings, resumed, ranks, 0
        self.data: dict[str, str] | None = resumed.state["data"] if resumed else None  # digests, computed once
        self.rewards = _rewards(settings)

    def save(self, make: Callable[[], Checkpoint]) -> None:
        """Saves what `make` returns, with what every kind of run needs to continue."""
        checkpoint = make()
        if not self.ranks.leads:
            return
        if self.data is None:
            self.data = _data(self.settings)
        checkpoint.state |= {
            "contract": self.run.contract,
            "settings": located(self.settings).model_dump(mode="json"),
            "hardware": environment()["hardware"],
            "data": self.data,
            "rewards": self.rewards,
        }
        save(self.run.folder, checkpoint, self.settings.train.keep_last)

    def stops_after(self, step: int, make: Callable[[], Checkpoint]) -> bool:
        """Saves after a step if a checkpoint is due; returns whether the run must stop."""
        self.share_signal()
        every, last = self.settings.train.save_every, step == self.settings.train.steps
        stop = bool(self.signal) and not last
        if stop or (every and (last or step % every == 0)):
            self.save(make)
        return stop

    def save_on_failure(self, make: Callable[[], Checkpoint], step: int, say: Callable[[str], None]) -> None:
        """Saves the last finished step of a run that fails in a later one, if no checkpoint has it."""
        if step == 0 or (self.run.folder / FOLDER / name_of(step)).exists():
            return
        with contextlib.suppress(InputError):  # of a full disk, which may be why the run fails
            self.save(make)
            say(f"step {step} is saved; continue from it with --resume {self.run.folder}")

    def share_signal(self) -> None:
        """Every rank takes over a signal that one has received, because it may reach them before and after a step."""
        self.signal = self.ranks.largest(self.signal)

    def require_running(self) -> None:
        """For work before the first step, which no checkpoint holds.

        Raises:
            Interrupted: a signal asked the run to stop.
        """
        if self.signal:
            raise Interrupted(self.signal, "the run had no checkpoint yet; start it again")

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], None]) -> Iterator[None]:
        """Inside the block, the first SIGINT or SIGTERM asks the run to stop after its step, a second one ends it."""

        def handle(number: int) -> None:
            if self.signal:
                saved = newest(self.run.folder) is not None
                raise Interrupted(number, f"{'the steps after the last checkpoint' if saved else 'all steps'} are lost")
            self.signal = number
            name = signal.Signals(number).name
            say(f"{name}: the run stops after this step and saves (not in the warm-up); once more to end it at once")

        with handled(handle):
            yield


CHANGEABLE = (
    "run.output", "run.tensorboard", "run.log_to", "run.metric_names", "run.samples", "run.save", "run.rank_timeout_s",
    "train.save_every", "train.keep_last", "train.micro_batch_tokens", "train.shard",
    "train.gradient_checkpointing", "optimizer.offload", "engine.", "reward_pool.",
)  # fmt: skip
"""Settings, or sections, that may change when a run is resumed, because no result depends on them. Exceptions are
`train.micro_batch_tokens` and `train.shard` on a GPU, where they may change the last bits of the weights
(`TokenBudget`)."""


def check_settings(checkpoint: Checkpoint, settings: Settings, contract: str) -> None:
    """Raises InputError if the run cannot continue from the checkpoint with these settings; names what differs."""
    old, new = (dict(leaves(s)) for s in (checkpoint.state["settings"], located(settings).model_dump(mode="json")))
    changeable = CHANGEABLE if settings.optimizer.schedule != "constant" else (*CHANGEABLE, "train.steps")
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith(changeable)]
    if changed == ["train.steps"]:
        raise InputError(
            "--resume: train.steps can change only in a run with optimizer.schedule=constant; start a new run from the "
            "trained model"
        )
    if changed:
        shown = "; ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in changed[:4])
        raise InputError(f"--resume: {shown}; resume with the settings of the run, or start a new run")
    if checkpoint.state["contract"] != contract:
        raise InputError(
            f"--resume: the checkpoint has contract {checkpoint.state['contract']}, this run {contract}; resume with "
            "the version of rlkernel that wrote it"
        )
    for name, digest in _data(settings).items():
        if checkpoint.state["data"].get(name) != digest:
            raise InputError(
                f"--resume: what {name} names has changed since the checkpoint; restore it or start a new run"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if not isinstance(manifest, dict):
            raise ValueError
    except (OSError, ValueError):
        raise _damaged(path, MANIFEST) from None
    return manifest


def _damaged(path: Path, name: str) -> InputError:
    others = [p for p in sorted(path.parent.glob("step-*"), reverse=True) if p.name < path.name]
    remedy = f"continue from the one before it with --resume {others[0]}" if others else "there is no older one"
    return InputError(f"checkpoint {path}: {name} is missing, truncated or changed since it was written; {remedy}")


def _entry(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while block := data.read(1 << 22):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _point(root: Path, name: str) -> None:
    """Replaces `latest` atomically."""
    new = root / f".{LATEST}.new"
    new.write_text(name)
    _flush(new)
    os.replace(new, root / LATEST)
    _flush(root)


def _data(settings: Settings) -> dict[str, str]:
    """SHA-256 of the files of each data setting, and of the model that adapters belong to."""
    files = {
        "data.train": settings.data.train, "data.heldout": settings.data.heldout, "warmup.data": settings.warmup.data
    }  # fmt: skip
    found = {name: data_files(path) for name, path in files.items() if path is not None}
    if settings.model.lora.rank:
        base = local_directory(str(settings.model.path))
        found["model.path"] = sorted((base / "config.json", *base.glob("*.safetensors")))
    return {name: " ".join(_entry(file)["sha256"] for file in each) for name, each in found.items()}


def changed_rewards(checkpoint: Checkpoint, settings: Settings) -> list[str]:
    """Reward files that differ from those of the checkpoint, which is allowed, because a reward may have had a bug."""
    old = checkpoint.state.get("rewards", {})
    return [file for file, digest in _rewards(settings).items() if old.get(file, digest) != digest]


def _rewards(settings: Settings) -> dict[str, str]:
    """SHA-256 of the Python files of the reward functions."""
    files = {(reward.function or "").rpartition(":")[0] for reward in settings.rewards}
    return {file: _entry(Path(file))["sha256"] for file in sorted(files) if file.endswith(".py")}


def _flush(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
