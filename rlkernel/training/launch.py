"""A whole run: checks the input, opens the run folder, trains, saves the checkpoint, writes the report."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlkernel import ops
from rlkernel.data.errors import InputError
from rlkernel.data.prompts import is_chat
from rlkernel.data.tokenizer import TokenizerError
from rlkernel.environment import environment
from rlkernel.models import CheckpointError, save_model
from rlkernel.training.config import Settings
from rlkernel.training.display import Display, clock, ready_kernels
from rlkernel.training.grpo import train_grpo
from rlkernel.training.parts import Inputs, Parts, assemble, choose_device, read_inputs
from rlkernel.training.report import write_report
from rlkernel.training.run import Run, command, default_output, to_json, write_text
from rlkernel.training.sft import train_sft


def launch(settings: Settings, display: Display | None = None) -> Path:
    """Runs the settings; returns the run folder.

    Args:
        settings: from `config.resolve`.
        display: where progress goes; default standard output.

    Raises:
        InputError: bad input, before any work; or a reward that failed during it.
        MismatchError: a log-probability differs between rollout and training, in strict mode. What was measured
            until then stays in the run folder.
    """
    started, clock_start = datetime.now(UTC), time.perf_counter()
    device = choose_device(settings.run.device)
    inputs = read_inputs(settings)
    contract = ops.attention_contract(settings.run.attention)
    with Display() if display is None else display as screen, Run(settings, contract) as run:
        wanted = settings.run.output or default_output(settings)
        taken = "" if run.folder == Path(wanted) else f" ({wanted} is taken)"
        screen.say(f"run folder {run.folder}{taken}")
        try:
            with ops.stock(settings.run.backend == "torch"):
                parts = assemble(settings, inputs, device, run.folder)
                ready_kernels(device)
        except BaseException:
            run.abandon()
            raise
        size = sum(parameter.numel() for parameter in parts.model.parameters())
        model = f"{size:,} parameters, {str(parts.model.dtype).removeprefix('torch.')}"
        model += f", {parts.model.config.model_type}, " + (
            settings.model.path or f"from scratch for {settings.data.task}"
        )
        screen.say(f"{settings.algorithm} on {device}, backend {settings.run.backend}, contract {contract}; {model}")
        for note in _notes(parts, inputs, run.folder):
            screen.say(f"note: {note}")
        summary: dict[str, Any] = {
            "name": run.folder.name,
            "algorithm": settings.algorithm,
            "backend": settings.run.backend,
            "contract": contract,
            "device": device,
            "seed": settings.run.seed,
            "model": model,
            "threads": torch.get_num_threads(),
            "command": command(settings.algorithm, run.folder),
            "started": started.isoformat(timespec="seconds"),
            "environment": environment(),
        }
        train = train_grpo if settings.algorithm == "grpo" else train_sft
        with ops.stock(settings.run.backend == "torch"):
            summary |= train(parts, run, screen)
        summary["seconds"] = time.perf_counter() - clock_start
        try:  # the small files come first: a full disk takes them last
            write_text(run.folder / "summary.json", to_json(summary, indent=1) + "\n")
            report = write_report(run.folder)
        finally:
            if settings.run.save:
                _save(parts, run.folder)
        _print_summary(screen, settings, summary, run.folder)
        screen.say(f"report: {report}")
        return run.folder


def _save(parts: Parts, folder: Path) -> None:
    try:
        save_model(parts.model, folder / "model", tokenizer_dir=parts.tokenizer_dir)
    except (CheckpointError, TokenizerError) as error:
        raise InputError(f"the trained model is lost: {error}; the run's other files stay in {folder}") from None


def _notes(parts: Parts, inputs: Inputs, folder: Path) -> list[str]:
    """What is allowed and seldom meant."""
    notes = []
    size, free = sum(p.numel() * p.element_size() for p in parts.model.parameters()), shutil.disk_usage(folder).free
    if parts.settings.run.save and free < size:
        need = f"the checkpoint at the end needs {size:,} bytes, {folder} has {free:,} free"
        notes.append(f"{need}; make room before the run ends")
    if parts.settings.algorithm != "grpo":
        return notes
    if isinstance(inputs.train, list) and any(is_chat(row["prompt"]) for row in inputs.train):
        notes.append("prompts are chats; rewards get each completion as [{'role': 'assistant', 'content': text}]")
    ends, own = parts.model.config.eos_token_id, parts.tokenizer.eos_token_id
    if not ends and not parts.settings.rollout.stop:
        notes.append("the model names no end-of-sequence token; every completion runs to rollout.max_tokens")
    elif ends and own is not None and own not in ends:
        notes.append(
            f"the tokenizer's end-of-sequence token {own} is none of the model's {list(ends)}; the model's count"
        )
    if not parts.heldout:
        notes.append("no held-out prompts; give data.heldout or data.heldout_rows to see progress on unseen ones")
    return notes


def _print_summary(screen: Display, settings: Settings, summary: dict[str, Any], folder: Path) -> None:
    name = "reward" if settings.algorithm == "grpo" else "loss"

    def figure(key: str) -> str:
        return "none held out" if summary[key] is None else f"{summary[key]:.4g}"

    rows = [
        (f"held-out {name} before", figure("heldout_before")),
        (f"held-out {name} after", figure("heldout_after")),
    ]
    if settings.algorithm == "grpo":
        rows += [
            ("exact fraction", f"{summary['exact_frac']:.6g}"),
            ("mismatching tokens", f"{summary['mismatch_tokens']:,}"),
            ("largest difference", f"{summary['max_abs_diff']:.3g} nats"),
        ]
        if summary["probe"]:
            wrong = sum(row["mismatch_tokens"] for row in summary["probe"])
            of = sum(row["tokens"] for row in summary["probe"])
            worst = max(row["max_abs_diff"] for row in summary["probe"])
            rows.append(("the same on stock torch", f"{wrong:,} of {of:,} tokens differ, by up to {worst:.3g} nats"))
    rows += [
        ("completion tokens", f"{summary['tokens']:,}"),
        ("seconds", f"{summary['seconds']:.1f} ({clock(summary['seconds'])})"),
        ("contract", summary["contract"]),
    ]
    if settings.run.save:
        rows.append(("checkpoint", str(folder / "model")))
    screen.summary(summary["name"], rows)
