"""`rlkernel train sft|dpo|reward|grpo|ppo`: turns options into settings and runs the trainer."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_OPTIONS = {
    "model": "model.path",
    "data": "data.train",
    "backend": "run.backend",
    "attention": "run.attention",
    "seed": "run.seed",
    "output": "run.output",
    "device": "run.device",
}


def add_parser(subparsers: Any) -> None:
    """Adds the `train` command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, and compare every sampled token's log-probability bit for bit",
        description="Train a model. Without arguments, `train grpo` makes a small model and teaches it to add.",
        epilog="Settings: `rlkernel train grpo --dry-run` prints them all; change one with a.b=value.",
    )
    parser.add_argument(
        "algorithm",
        choices=("sft", "dpo", "reward", "grpo", "ppo"),
        help="supervised; direct preference optimization; a reward model; group relative or proximal policy "
        "optimization",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings, such as optimizer.lr=1e-5")
    parser.add_argument("--config", metavar="FILE.yaml", help="settings as YAML")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face model directory (model.path)")
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="prompts, examples (sft) or preferences (dpo, reward): JSONL, Parquet or save_to_disk (data.train)",
    )
    parser.add_argument(
        "--reward",
        metavar="FILE.py:function|NAME",
        action="append",
        help="reward with TRL's signature, or a built-in one such as math; may be given several times (rewards)",
    )
    parser.add_argument(
        "--reward-model", metavar="DIR", action="append", help="reward model of `train reward`, as a reward (rewards)"
    )
    parser.add_argument("--backend", choices=("rlkernel", "torch"), help="torch: stock torch ops, as a control")
    parser.add_argument(
        "--attention", choices=("split", "fa3"), help="variant of attention in rollout and training (run.attention)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="run.seed")
    parser.add_argument("--output", metavar="DIR", help="run folder; if it is taken, a new name is used (run.output)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run.device")
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue a run folder or one of its checkpoints; auto: that of --output, if it has a checkpoint",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings as YAML and stop")
    _take_words_anywhere(parser)


def _take_words_anywhere(parser: argparse.ArgumentParser) -> None:
    """Accepts overrides after options too; argparse fills `overrides` from the first words and refuses later ones."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, rest = parse(args, namespace)
        found.overrides = [*found.overrides, *(word for word in rest if not word.startswith("-"))]
        return found, [word for word in rest if word.startswith("-")]

    parser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.parallel.torchrun import is_launched
    from rlkernel.training.config import resolve, to_yaml
    from rlkernel.training.run_folder import CONFIG

    options: dict[str, Any] = {key: getattr(args, name) for name, key in _OPTIONS.items()}
    options["rewards"] = [*(args.reward or []), *({"model": path} for path in args.reward_model or [])] or None
    try:
        resume = None if args.resume in (None, "auto") else Path(args.resume)
        if resume is not None and args.output is not None:
            raise UserError(f"--resume {resume} continues in its own run folder; leave --output out")
        if resume is not None and args.config is None:
            from rlkernel.training.checkpoint import find

            args.config = find(resume).parent.parent / CONFIG
        settings = resolve(args.algorithm, file=args.config, options=options, overrides=args.overrides)
        if args.dry_run:
            print(to_yaml(settings), end="")
            return 0
        from rlkernel.contract import MismatchError
        from rlkernel.parallel.launch import joined
        from rlkernel.parallel.ranks import RankError
        from rlkernel.training.parts import choose_device
        from rlkernel.training.session import StoppedError, run_training

        try:
            with joined(choose_device(settings.run.device), settings.run.rank_timeout_s) as ranks:
                try:
                    run_training(settings, resume=resume, auto=args.resume == "auto", ranks=ranks)
                except StoppedError as error:
                    if ranks.leads:
                        print(f"rlkernel: {error}", file=sys.stderr)
                    return 128 + error.signal
        except (MismatchError, FloatingPointError, RankError) as error:
            raise UserError(str(error)) from None
    except InputError as error:
        if is_launched() and os.environ["RANK"] != "0":  # rank 0 has the same error, or names this one's
            return 2
        raise UserError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not (isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text):
            raise
        raise UserError(
            f"out of memory ({text[:200] or 'MemoryError'}); lower engine.max_num_seqs, engine.num_pages or "
            "train.micro_batch_tokens, set train.gradient_checkpointing=true or optimizer.offload=true, or use a "
            "smaller model"
        ) from error
    return 0
