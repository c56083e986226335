"""Opens inputs: capsules, files of sequences, run folders, vLLM's hidden states, metrics files, `ENGINE:MODEL_DIR`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlkernel_drift.capsule import Capsule, is_capsule, read_capsule
from rlkernel_drift.capsule.folder import MANIFEST, TOKENS
from rlkernel_drift.capture import ENGINES
from rlkernel_drift.errors import DriftError, UnknownInputError
from rlkernel_drift.inputs.hidden_states import is_hidden_states, read_hidden_states, split_numbers
from rlkernel_drift.inputs.metrics import Metrics, read_metrics
from rlkernel_drift.inputs.run_folder import is_pair, is_run_folder, read_run_folder, read_run_metrics
from rlkernel_drift.inputs.sequences import is_sequences, layout_file, read_sequences


@dataclass(frozen=True)
class Model:
    """A model directory and the engine that runs it."""

    engine: str
    path: Path


@dataclass(frozen=True)
class Source:
    """An opened input. A run folder has capsule and metrics; a model has neither until its engine has run.

    Attributes:
        layout: file of records with media, positions or loss spans, which `rlkernel_drift.layout` reads.
    """

    label: str
    kind: Literal["capsule", "sequences", "run folder", "model", "metrics", "hidden states"]
    capsule: Capsule | None = None
    metrics: Metrics | None = None
    model: Model | None = None
    layout: Path | None = None

    def __post_init__(self) -> None:
        # file names need not be UTF-8, but outputs are
        object.__setattr__(self, "label", self.label.encode("utf-8", "backslashreplace").decode())


def open_sides(rollout: str, train: str | None) -> tuple[Source, Source]:
    """Opens both sides; `train` may be left out if the first input holds both.

    Raises:
        CapsuleError, DriftError: as `open_input`, or the input holds one side only.
    """
    first, second = open_input(rollout, "rollout"), open_input(train or rollout, "train")
    return first, second if train is not None or is_pair(Path(rollout)) else train_side(second)


def train_side(source: Source) -> Source:
    """The train side of a single input, which must hold both sides, because one side is always aligned with itself.

    Raises:
        DriftError: it is a model, or a capsule with the log-probabilities of one side.
    """
    capsule = source.capsule
    if source.kind in ("run folder", "metrics"):
        return source
    if capsule is None or {name.startswith("train.") for name in capsule.logprobs} != {True, False}:
        raise DriftError(f"{source.label} holds one side only; name both (ROLLOUT TRAIN)")
    manifest = capsule.manifest.model_copy(update={"side": "train"})
    return replace(source, capsule=replace(capsule, manifest=manifest))


def open_input(text: str, side: Literal["rollout", "train"]) -> Source:
    """Opens one input.

    Args:
        text: a path, or `ENGINE:DIR` with one of `ENGINES`.
        side: the side to take from a run folder.

    Raises:
        CapsuleError, DriftError: it cannot be read.
        UnknownInputError: it is not one of the known kinds.
    """
    engine, _, directory = text.partition(":")
    if engine in ENGINES and directory:
        if not (Path(directory) / "config.json").is_file():
            raise DriftError(f"{directory} is not a model directory: it has no config.json")
        return Source(Path(directory).name, "model", model=Model(engine, Path(directory)))
    path, numbers = Path(text), None
    if not path.exists():
        named, numbers = split_numbers(text)
        path = Path(named)
    if not path.exists():
        raise UnknownInputError(f"{text} does not exist")
    if path.is_dir():
        if is_hidden_states(path):
            return Source(path.name, "hidden states", capsule=read_hidden_states(path, numbers))
        if is_capsule(path):
            return Source(path.name, "capsule", capsule=read_capsule(path), layout=layout_file(path))
        if is_pair(path):
            return Source(path.name, "capsule", capsule=read_capsule(path / side), layout=layout_file(path / side))
        if is_run_folder(path):
            return Source(path.name, "run folder", capsule=read_run_folder(path, side), metrics=read_run_metrics(path))
        if (path / "config.json").is_file():
            raise UnknownInputError(f"{text} is a model directory; name its engine: hf:{text} or rlkernel:{text}")
        if any((path / name).is_file() for name in (MANIFEST, TOKENS)):
            read_capsule(path)  # raises the error that names the missing or damaged part
        lost = [part for part in (path / "rollout", path / "train") if not is_capsule(part)]
        if len(lost) == 1:
            read_capsule(lost[0])
        raise UnknownInputError(f"{text} is neither a capsule (manifest.json) nor a run folder (metrics.jsonl)")
    if is_hidden_states(path):
        return Source(path.name, "hidden states", capsule=read_hidden_states(path, numbers))
    if path.suffix == ".safetensors":
        raise UnknownInputError(f"{text} is a safetensors file; a capsule is the folder around it")
    if is_sequences(path):
        return Source(path.name, "sequences", capsule=read_sequences(path), layout=layout_file(path))
    return Source(path.name, "metrics", metrics=read_metrics(path))
