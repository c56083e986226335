"""`rlkernel-drift compare ROLLOUT [TRAIN]`, `assert` (silent where aligned), and `diagnose`, which names the cause."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkernel_drift.cli.capture import DTYPES, device_of, engine_args
from rlkernel_drift.cli.streams import at_least, atomic_file, discard_stdout, emit, write_file
from rlkernel_drift.errors import DriftError

if TYPE_CHECKING:
    from rlkernel_drift.compare import Options
    from rlkernel_drift.diagnose.context import References
    from rlkernel_drift.inputs.model import Engines
    from rlkernel_drift.verdict import Verdict

_INPUT = (
    "a capsule, a .jsonl file of token_ids and logprobs, a run folder, a metrics file, vLLM's hidden-state file, or "
    "ENGINE:MODEL_DIR (hf:, hf+rlkernel:, rlkernel:, vllm:, vllm+rlkernel:)"
)


def add_compare(subparsers: Any) -> None:
    """Adds the `compare` and `assert` commands."""
    for name, words in (
        ("compare", "compare two sides, gate by gate"),
        ("assert", "the same for CI: silent where aligned"),
    ):
        parser = subparsers.add_parser(name, help=words, description=words.capitalize() + ".")
        parser.add_argument("rollout", metavar="ROLLOUT", help=_INPUT)
        parser.add_argument("train", metavar="TRAIN", nargs="?", help="default: ROLLOUT, where it holds both sides")
        add_options(parser)
        add_engines(parser)
        parser.set_defaults(run=run_compare, quiet=name == "assert")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that compare: profile, floor, corrections, outputs."""
    parser.add_argument("--profile", metavar="NAME|FILE", help="bitwise, prime-rl, nemo, miles, mlperf or a TOML file")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failed gate")
    parser.add_argument("--floor", metavar="FILE", help="noise floor written by `rlkernel-drift floor`")
    parser.add_argument("--partial", action="store_true", help="one side may have less than half of the sequences")
    parser.add_argument("--tis-cap", type=float, default=2.0, metavar="C", help="cap of truncated importance sampling")
    parser.add_argument("--sequence-cap", type=float, default=3.0, metavar="C", help="cap of the sequence mask")
    parser.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.2), metavar=("LOW", "HIGH"), help="token clip")
    parser.add_argument("--gspo-clip", type=float, nargs=2, default=(3e-4, 4e-4), metavar=("LOW", "HIGH"))
    add_outputs(parser)


def options_of(args: argparse.Namespace) -> Options:
    """The options of `add_options`.

    Raises:
        DriftError: a profile, a floor or a number is invalid.
    """
    from rlkernel_drift.compare import Options
    from rlkernel_drift.consequences import Settings
    from rlkernel_drift.profiles import load_profile

    return Options(
        load_profile(args.profile) if args.profile else None,
        args.keep_going,
        read_floor(args.floor),
        Settings(
            tis_cap=args.tis_cap,
            sequence_cap=args.sequence_cap,
            clip_low=args.clip[0],
            clip_high=args.clip[1],
            gspo_low=args.gspo_clip[0],
            gspo_high=args.gspo_clip[1],
        ),
        args.typed,
        partial=args.partial,
    )


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Adds the options for inputs of the form ENGINE:MODEL_DIR."""
    group = parser.add_argument_group("engines", "for inputs of the form ENGINE:MODEL_DIR")
    group.add_argument("--prompts", metavar="FILE", help="where both sides are engines; default random token ids")
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group.add_argument("--max-tokens", type=at_least(1), default=64, metavar="N", help="completion length; default 64")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T")
    group.add_argument("--dtype", default="", choices=DTYPES, help="default: the model's")
    group.add_argument("--device", default="", help="cpu or cuda; default cuda where there is one")
    group.add_argument("--operators", default="full", choices=("none", "full", "rows", "fingerprint"))
    group.add_argument("--no-weights", action="store_true", help="leave out fingerprints of the weights")
    group.add_argument("--engine-args", default="{}", metavar="JSON", help="further arguments of vllm.LLM")


def engines_of(args: argparse.Namespace) -> Engines:
    """The options of `add_engines`."""
    import torch

    from rlkernel_drift.inputs.model import Engines

    return Engines(
        Path(args.prompts) if args.prompts else None,
        args.seed,
        args.max_tokens,
        args.temperature,
        args.dtype,
        device_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        args.operators,
        not args.no_weights,
        engine_args(args.engine_args),
        args.typed,
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name output files of a verdict."""
    parser.add_argument("--json", metavar="FILE", help="write the verdict as JSON (- for standard output)")
    parser.add_argument("--markdown", metavar="FILE", help="write Markdown to paste in an issue")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    add_pictures(parser)


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the HTML report and the PNG."""
    parser.add_argument("--html", metavar="FILE", help="write the report, one self-contained HTML file")
    parser.add_argument("--png", metavar="FILE", help="write a PNG (needs matplotlib)")


def run_compare(args: argparse.Namespace) -> int:
    """Compares, writes the verdict, returns its exit status."""
    return _finish(_compared, args)


def _compared(args: argparse.Namespace) -> Verdict:
    from rlkernel_drift.compare import compare_sources
    from rlkernel_drift.inputs import open_sides
    from rlkernel_drift.inputs.model import opened

    options = options_of(args)
    rollout, train = open_sides(args.rollout, args.train)
    if rollout.model is not None or train.model is not None:
        rollout, train = opened(rollout, train, engines_of(args))
    return compare_sources(rollout, train, options)


def _finish(judge: Callable[[argparse.Namespace], Verdict], args: argparse.Namespace) -> int:
    """Writes the verdict, which for an unusable input says so; returns its exit status."""
    from rlkernel_drift.gates import unusable

    try:
        verdict = judge(args)
    except DriftError as error:
        verdict = unusable(error, args.typed)
    return write(verdict, args)


def add_diagnose(subparsers: Any) -> None:
    """Adds the `diagnose` command."""
    words = "name the cause of a difference, with the model"
    parser = subparsers.add_parser("diagnose", help=words, description=words.capitalize() + ".")
    parser.add_argument("rollout", metavar="ROLLOUT", help="a capsule")
    parser.add_argument("train", metavar="TRAIN", help="a capsule of the same tokens, or hf:DIR to score them")
    parser.add_argument("--model", metavar="DIR", help="the trainer's model; default DIR where TRAIN is hf:DIR")
    parser.add_argument("--previous", metavar="DIR", help="the weights before the last update")
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapter that the trainer applies to the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="limit of the search; default 10 of processor time, up to 90 for slow models",
    )
    add_options(parser)
    parser.set_defaults(run=run_diagnose)


def run_diagnose(args: argparse.Namespace) -> int:
    """Compares and diagnoses; returns the verdict's exit status."""
    return _finish(_diagnosed, args)


def _diagnosed(args: argparse.Namespace) -> Verdict:
    from rlkernel_drift.compare import compare_sources, with_settings
    from rlkernel_drift.diagnose.attach import diagnose_verdict
    from rlkernel_drift.inputs import open_input
    from rlkernel_drift.inputs.model import Engines, scored

    options = options_of(args)
    device_of(args.device)
    rollout = open_input(args.rollout, "rollout")
    train = scored(open_input(args.train, "train"), rollout, Engines(device=args.device))
    rollout, train = with_settings(rollout, train)
    verdict = compare_sources(rollout, train, options)
    if rollout.capsule is None or train.capsule is None:
        raise DriftError("diagnose needs the tokens of both sides: capsules, not metrics files")
    path = args.model or (args.train.partition(":")[2] if args.train.startswith("hf:") else None)
    # logits rows of the capsule replace the model
    models = None if path is None and train.capsule.distribution else lambda: _references(path, args)
    if args.seconds is not None and not args.seconds > 0:
        raise DriftError(f"--seconds is {args.seconds:g}; it must be above 0")
    return diagnose_verdict(verdict, rollout.capsule, train.capsule, models, options.floor, args.seconds)


_SMALL = 20_000_000


def _references(path: str | None, args: argparse.Namespace) -> References:
    import torch

    from rlkernel_drift.diagnose.context import References
    from rlkernel_drift.scoring.model import ReferenceModel
    from rlkernel_drift.scoring.weights import read_adapter

    if path is None:
        raise DriftError("diagnose needs --model DIR, the trainer's model, or logits rows in the train capsule")
    model = ReferenceModel.load(path, args.device)
    if args.device == "cpu" and sum(p.numel() for p in model.model.parameters()) < _SMALL:
        torch.set_num_threads(1)  # threads of a small model wait for one another more than they compute
    previous = ReferenceModel.load(args.previous, args.device) if args.previous else None
    adapter = read_adapter(Path(args.adapter), model) if args.adapter else None
    return References(model, previous, adapter)


def write(verdict: Verdict, args: argparse.Namespace) -> int:
    """Writes the verdict in every requested form; returns its exit status."""
    from rich.console import Console

    from rlkernel_drift.output import write_junit, write_markdown, write_text

    class Terminal(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, the status of drift
            self.quiet = True
            discard_stdout()

    outputs = (
        (args.json, verdict.to_json),
        (args.markdown, lambda: write_markdown(verdict)),
        (args.junit, lambda: write_junit(verdict)),
    )
    # files first, because one that cannot be written changes the exit status to 2
    for path, text in outputs:
        if path and path != "-":
            write_file(path, text())
    write_pictures(verdict, args)
    if args.json != "-" and not (getattr(args, "quiet", False) and verdict.exit_code == 0):
        write_text(verdict, Terminal(highlight=False, stderr=verdict.exit_code == 2), details=True)
    for path, text in outputs:
        if path == "-":
            emit(text() + "\n")
    return verdict.exit_code


def write_pictures(verdict: Verdict, args: argparse.Namespace) -> None:
    """Writes the HTML report and the PNG if they are requested."""
    if args.html:
        from rlkernel_drift.report import write_html

        write_file(args.html, write_html(verdict))
    if args.png:
        from rlkernel_drift.report.figure import write_png

        with atomic_file(args.png) as path:
            write_png(verdict, path)


def read_floor(path: str | None) -> Any:
    """The noise floor in a file; None without a path."""
    if path is None:
        return None
    from pydantic import ValidationError

    from rlkernel_drift.capsule import Floor

    try:
        with open(path, encoding="utf-8") as file:
            return Floor.model_validate_json(file.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DriftError(f"{path} is not a noise floor: {place + ': ' if place else ''}{first['msg']}") from None
    except (OSError, ValueError) as error:
        raise DriftError(f"{path} is not a noise floor: {error}") from None
