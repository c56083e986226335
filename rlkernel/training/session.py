"""A run from start to end: checks the input, opens the run folder, trains, saves the checkpoint, writes the report."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlkernel import ops
from rlkernel.data.contents import is_chat
from rlkernel.data.errors import InputError
from rlkernel.data.tokenizer import TokenizerError
from rlkernel.environment import environment
from rlkernel.models import CheckpointError, save_adapter, save_model
from rlkernel.parallel.ranks import Ranks
from rlkernel.signals import Interrupted, end, handled
from rlkernel.training import checkpoint
from rlkernel.training.checkpoint import newest
from rlkernel.training.config import Settings, located
from rlkernel.training.display import Display, clock, ready_kernels
from rlkernel.training.dpo import train_dpo
from rlkernel.training.grpo import GRPOTrainer
from rlkernel.training.pages.report import reported, write_report
from rlkernel.training.parts import Inputs, Parts, assemble, choose_device, read_inputs
from rlkernel.training.policy_run import train_policy
from rlkernel.training.ppo import PPOTrainer
from rlkernel.training.reward_model import train_reward
from rlkernel.training.run_folder import (
    CONFIG,
    SUMMARY,
    FollowedFolder,
    RunFolder,
    default_output,
    read_jsonl,
    repeat_command,
    to_json,
    write_text,
)
from rlkernel.training.runs import score_of
from rlkernel.training.sft import train_sft

TRAINERS: dict[str, Callable[[Parts[Any], RunFolder, Display, checkpoint.Saver], dict[str, Any]]] = {
    "grpo": partial(train_policy, GRPOTrainer),
    "ppo": partial(train_policy, PPOTrainer),
    "sft": train_sft,
    "dpo": train_dpo,
    "reward": train_reward,
}
"""Function of each algorithm, which trains and returns its part of `summary.json`."""


class StoppedError(RuntimeError):
    """A signal stopped the run after a step; its checkpoint and report are written.

    Attributes:
        signal: the signal's number.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


def run_training(
    settings: Settings,
    display: Display | None = None,
    resume: Path | None = None,
    auto: bool = False,
    ranks: Ranks = Ranks(),
) -> Path:
    """Runs the settings; returns the run folder.

    With several ranks, each of them calls it with the same arguments. Rank 0 writes the run folder.

    Args:
        settings: from `config.resolve`.
        display: where progress is shown; default standard output, on rank 0.
        resume: a run folder, or one of its checkpoints, to continue from.
        auto: continue in the settings' run folder: from its newest checkpoint, or from the start if it has none.
        ranks: this process's place among the ranks; `train.leaves` replaces its leaves.

    Raises:
        InputError: bad input, before the first step; or a reward that failed during training.
        StoppedError: SIGINT or SIGTERM stopped the run.
        MismatchError: a log-probability differs between rollout and training, in strict mode. The run folder keeps
            what was written until then.
    """
    started, clock_start = datetime.now(UTC), time.perf_counter()
    ranks = _with_leaves(ranks, settings)
    device = choose_device(settings.run.device)
    inputs = read_inputs(settings, ranks)
    contract = ops.attention_contract(settings.run.attention)
    wanted = Path(settings.run.output or default_output(settings))
    found, existing = _find_start(wanted, resume, auto) if ranks.leads else (None, None)
    path = ranks.broadcast(None if found is None else str(found))
    resumed = None
    if path is not None:
        resumed = checkpoint.load(Path(path))
        checkpoint.check_settings(resumed, settings, contract)
        existing = Path(path).parent.parent, resumed.step
    with (
        handled(partial(_on_signal, ranks)),  # a run that has begun writes its report
        closing(inputs),
        _display(ranks) if display is None else display as screen,
        _opened(ranks, settings, contract, existing) as run,
        _reported(ranks, run, facts := _facts(settings, run.folder, contract, device, started, ranks)),
        ranks.explained(),
    ):
        taken = "" if existing is not None or run.folder == wanted else f" ({wanted} is taken)"
        screen.say(f"run folder {run.folder}{taken}")
        if resumed is not None:
            if ranks.leads and checkpoint.find(resume or wanted) != found:
                raise InputError(
                    f"--resume {resume or 'auto'}: another process has saved a step meanwhile; start again"
                )
            _announce_resumption(resumed, settings, screen)
        saver = checkpoint.Saver(run, settings, resumed, ranks)
        with ops.stock(settings.run.backend == "torch"):
            try:
                parts = assemble(settings, inputs, device, run.folder, ranks)
                ready_kernels(device)
            except BaseException:
                run.abandon()
                raise
            if existing is not None:  # only now, because a run that cannot start must not lose its later steps
                run.rewind(existing[1])
            if resumed is not None and ranks.leads:
                _rewind_checkpoints(run, resumed.step, screen)
            model = _describe_model(parts, facts["model"])
            where = device if ranks.size == 1 else f"{ranks.size} ranks of {device}"
            screen.say(f"{settings.algorithm} on {where}, backend {settings.run.backend}, contract {contract}; {model}")
            for note in _notes(parts, inputs, run.folder):
                screen.say(f"note: {note}")
            if resumed is None:
                _write_examples(parts, run)
            with saver.listening(screen.say):
                trained = TRAINERS[settings.algorithm](parts, run, screen, saver)
        seconds = time.perf_counter() - clock_start
        summary = {**facts, "model": model, "dropped_rows": len(parts.dropped), **trained, "seconds": seconds}
        stopped = saver.signal and trained["steps"] < settings.train.steps
        if ranks.leads:
            report = _write_results(parts, run, summary, with_model=settings.run.save and not stopped)
        if stopped:
            launcher = f"torchrun --standalone --nproc-per-node {ranks.size} -m " if ranks.size > 1 else ""
            repeat = f"{launcher}rlkernel train {settings.algorithm} --resume {shlex.quote(str(run.folder.absolute()))}"
            raise StoppedError(f"stopped after step {trained['steps']}; continue with: {repeat}", saver.signal)
        if ranks.leads:
            _print_summary(screen, settings, summary, run.folder)
            screen.say(f"report: {report}")
        return run.folder


def _with_leaves(ranks: Ranks, settings: Settings) -> Ranks:
    leaves = settings.train.leaves
    if leaves % ranks.size:
        raise InputError(
            f"train.leaves={leaves} cannot be shared by {ranks.size} ranks; set train.leaves to a multiple of the "
            "number of ranks, such as 8 (which changes the bits), or start fewer ranks"
        )
    return replace(ranks, leaves=leaves)


def _find_start(wanted: Path, resume: Path | None, auto: bool) -> tuple[Path | None, tuple[Path, int] | None]:
    """(checkpoint to continue from, or None; existing run folder to start again in, with step -1, or None)."""
    if auto and newest(wanted) is not None:
        resume = wanted
    elif auto and (wanted / SUMMARY).exists():
        raise InputError(
            f"--resume auto: {wanted} holds a finished run without checkpoints; choose another --output DIR"
        )
    elif auto and (wanted / CONFIG).exists():
        return None, (wanted, -1)
    elif auto and wanted.is_dir() and any(wanted.iterdir()):
        raise InputError(
            f"--resume auto: {wanted} is not a run folder and not empty, so a repeated command would not find its run; "
            f"choose a folder of its own, such as --output {wanted / 'run'}"
        )
    return None if resume is None else checkpoint.find(resume), None


def _on_signal(ranks: Ranks, number: int) -> None:
    """Ends the run, except when torchrun sends SIGTERM because a rank has failed: the broken collective names it."""
    if ranks.cause_of(Interrupted(number)) is None:
        end(number)


def _display(ranks: Ranks) -> Display:
    """Standard output, on rank 0."""
    return Display() if ranks.leads else Display(Console(quiet=True))


def _opened(ranks: Ranks, settings: Settings, contract: str, existing: tuple[Path, int] | None) -> RunFolder:
    """The run folder, which rank 0 creates and writes."""
    if ranks.leads:
        run = RunFolder(settings, contract, existing)
        ranks.broadcast({"folder": str(run.folder), "resumed": run.resumed})
        return run
    opened: dict[str, Any] = ranks.broadcast({})
    return FollowedFolder(contract, Path(opened["folder"]), opened["resumed"])


def _reported(ranks: Ranks, run: RunFolder, facts: dict[str, Any]) -> AbstractContextManager[None]:
    return reported(run, facts) if ranks.leads else nullcontext()


def _facts(
    settings: Settings, folder: Path, contract: str, device: str, started: datetime, ranks: Ranks
) -> dict[str, Any]:
    """What is known at the start of a run: the contents of `run.json`, and the first part of `summary.json`."""
    return {
        "name": folder.name,
        "algorithm": settings.algorithm,
        "backend": settings.run.backend,
        "contract": contract,
        "device": device,
        "seed": settings.run.seed,
        "model": settings.model.path or f"from scratch for {settings.data.task}",
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "command": repeat_command(settings.algorithm, folder),
        "started": started.isoformat(timespec="milliseconds"),
        "environment": environment(),
    }


def _announce_resumption(resumed: checkpoint.Checkpoint, settings: Settings, screen: Display) -> None:
    """Says where the run continues, and what differs from the run that wrote the checkpoint."""
    screen.say(f"continues after step {resumed.step} of {settings.train.steps}")
    here, there = environment()["hardware"], resumed.state["hardware"]
    if here != there:
        screen.say(f"note: the checkpoint was written on {there}; on {here} results may differ in their bits")
    for file in checkpoint.changed_rewards(resumed, settings):
        screen.say(f"note: {file} has changed since the checkpoint; completions are judged by it from now on")


def _rewind_checkpoints(run: RunFolder, step: int, screen: Display) -> None:
    """Removes the checkpoints after `step`, and says whether the logs before it are incomplete."""
    checkpoint.rewind(run.folder, step)
    logged = {row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")}
    if len(logged) < step:
        lost = f"metrics.jsonl lacks {step - len(logged)} of the {step} steps"
        screen.say(f"note: {lost} before the checkpoint; the report's curves and totals lack them too")


def _describe_model(parts: Parts[Any], source: str) -> str:
    """Size, dtype and family of the model, and where its first weights come from."""
    size = sum(parameter.numel() for parameter in parts.model.parameters())
    dtype = str(parts.model.dtype).removeprefix("torch.")
    text = f"{size:,} parameters, {dtype}, {parts.model.hf_config()['model_type']}, {source}"
    if parts.settings.model.lora.rank:
        trained = sum(parameter.numel() for parameter in parts.model.parameters() if parameter.requires_grad)
        text += f"; LoRA trains {trained:,}"
    return text


def _write_results(parts: Parts[Any], run: RunFolder, summary: dict[str, Any], *, with_model: bool) -> Path:
    """Writes the summary, the report and the trained model; returns the path of the report."""
    try:  # small files first, because the checkpoint may fill the disk
        write_text(run.folder / SUMMARY, to_json(summary, indent=1) + "\n")
        return write_report(run.folder)
    finally:
        if with_model:
            _save(parts, run)


def _write_examples(parts: Parts, run: RunFolder) -> None:
    """Writes the first examples or pairs to `samples.jsonl`, with chat template and special tokens."""

    def text(ids: Sequence[int]) -> str:
        return parts.tokenizer.decode(ids, skip_special_tokens=False)

    shown = parts.settings.run.samples
    for pair in parts.pairs[:shown]:
        both = {"chosen": text(pair.chosen.completion), "rejected": text(pair.rejected.completion)}
        run.append("samples", {"step": 0, "prompt": text(pair.chosen.prompt), **both})
    for example in parts.examples[:shown] if parts.settings.algorithm == "sft" else ():
        run.append("samples", {"step": 0, "prompt": text(example.prompt), "completion": text(example.completion)})


def _save(parts: Parts, run: RunFolder) -> None:
    try:  # the model that an earlier end of a resumed run has written is replaced
        if parts.settings.model.lora.rank:
            base = located(parts.settings).model.path
            save_adapter(parts.model, run.folder / "adapter", str(base), overwrite=run.resumed)
        save_model(parts.model, run.folder / "model", tokenizer_dir=parts.tokenizer_dir, overwrite=run.resumed)
        for name in ("model", "adapter"):
            for partial_copy in run.folder.glob(f".{name}.*"):  # of a process that was killed here
                shutil.rmtree(partial_copy)
    except (CheckpointError, TokenizerError) as error:
        kept = "continue from the last checkpoint" if newest(run.folder) else "the trained model is lost"
        raise InputError(f"{kept}: {error}; the run's other files stay in {run.folder}") from None


def _notes(parts: Parts, inputs: Inputs, folder: Path) -> list[str]:
    """Warnings about settings that are allowed but rarely intended."""
    notes = []
    size, free = sum(p.numel() * p.element_size() for p in parts.model.parameters()), shutil.disk_usage(folder).free
    if parts.settings.run.save and free < size:
        need = f"the checkpoint at the end needs {size:,} bytes, {folder} has {free:,} free"
        notes.append(f"{need}; free some space before the run ends")
    if parts.dropped:
        count = f"rows that exceed the model's context and were dropped (data.overlong): {len(parts.dropped):,}"
        notes.append(f"{count}; the first: {parts.dropped[0]}")
    if parts.settings.optimizer.offload and parts.device == "cpu":
        notes.append("optimizer.offload has no effect on a CPU")
    if not parts.settings.has_rollouts:
        return notes
    rows = inputs.train if isinstance(inputs.train, list) else []
    chats = sum(is_chat(row["prompt"]) for row in rows)
    if chats:
        which = "prompts are chats" if chats == len(rows) else f"{chats:,} of {len(rows):,} prompts are chats"
        notes.append(f"{which}; rewards get each completion of a chat as [{{'role': 'assistant', 'content': text}}]")
    ends, own = parts.model.config.eos_token_id, parts.tokenizer.eos_token_id
    if not ends and not parts.settings.rollout.stop:
        notes.append("the model has no end-of-sequence token; every completion runs to rollout.max_tokens")
    elif ends and own is not None and own not in ends:
        notes.append(
            f"the tokenizer's end-of-sequence token {own} is not among the model's {list(ends)}; the model's are used"
        )
    if not parts.heldout:
        notes.append("no held-out prompts; set data.heldout or data.heldout_rows to evaluate on unseen prompts")
    return notes


def _print_summary(screen: Display, settings: Settings, summary: dict[str, Any], folder: Path) -> None:
    name = score_of(settings.algorithm)[0]

    def figure(key: str) -> str:
        return "none held out" if summary[key] is None else f"{summary[key]:.4g}"

    rows = [
        (f"held-out {name} before", figure("heldout_before")),
        (f"held-out {name} after", figure("heldout_after")),
    ]
    if settings.has_rollouts:
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
    if summary.get("dropped"):
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in summary["dropped"].items())
        rows.append(("dropped completions", f"{sum(summary['dropped'].values()):,} ({reasons})"))
    rows += [
        ("completion tokens", f"{summary['tokens']:,}"),
        ("seconds", f"{summary['seconds']:.1f} ({clock(summary['seconds'])})"),
        ("contract", summary["contract"]),
    ]
    if settings.run.save:
        rows.append(("model", str(folder / "model")))
    screen.summary(summary["name"], rows)
