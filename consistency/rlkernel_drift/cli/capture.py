"""`rlkernel-drift capture` records a capsule with an engine; `floor` measures the noise of an engine against itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkernel_drift.capture import ENGINES
from rlkernel_drift.cli.streams import at_least, write_file
from rlkernel_drift.errors import DriftError

if TYPE_CHECKING:
    from rlkernel_drift.capture.request import Request

DTYPES = ("float32", "bfloat16", "float16")
_RECORDING = ("operators", "operator_sequences", "operator_rows", "logits_rows")  # options of `capture` only


def add_capture(subparsers: Any) -> None:
    """Adds the `capture` command."""
    words = "record a capsule with an engine"
    parser = subparsers.add_parser("capture", help=words, description=words.capitalize() + ".")
    parser.add_argument("--engine", required=True, choices=ENGINES)
    add_request(parser)
    parser.add_argument("--side", choices=("rollout", "train"), help="default: rollout, or train with --tokens")
    parser.add_argument("--out", required=True, metavar="CAPSULE", help="folder to write")
    parser.add_argument("--operators", default="none", choices=("none", "full", "rows", "fingerprint"))
    parser.add_argument("--operator-sequences", type=at_least(1), default=2, metavar="N", help="sequences; default 2")
    parser.add_argument(
        "--operator-rows", type=at_least(1), default=64, metavar="N", help="tokens of `rows`; default 64"
    )
    parser.add_argument("--logits-rows", type=at_least(0), default=0, metavar="N", help="tokens with logits; default 0")
    parser.add_argument("--engine-args", default="{}", metavar="JSON", help="further arguments of vllm.LLM")
    parser.add_argument("--no-weights", action="store_true", help="leave out fingerprints of the weights")
    parser.add_argument("--no-text", action="store_true", help="leave out token texts and the command")
    parser.add_argument(
        "--max-mib", type=at_least(1), default=256, metavar="N", help="largest size of the capsule; default 256"
    )
    parser.set_defaults(run=run_capture)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a request: model, prompts or tokens, sampling, dtype, device."""
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line, or JSON lines with the column `prompt`")
    parser.add_argument("--tokens", metavar="CAPSULE", help="score the tokens of this capsule instead of sampling")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--max-tokens", type=at_least(1), default=64, metavar="N", help="default 64")
    parser.add_argument("-n", type=at_least(1), default=1, metavar="N", help="completions per prompt; default 1")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument("--attention", default="", help="attention kernels of transformers: sdpa, eager, ...")
    words = "head and logits of transformers; default the model's dtype"
    parser.add_argument("--head-dtype", default="", choices=DTYPES, help=words)


def request_of(args: argparse.Namespace) -> Request:
    """The request that the options describe."""
    from rlkernel_drift.capsule import Sampling, read_capsule
    from rlkernel_drift.capture.request import Request, check_ids, describe_model, sampling_of

    tokens = read_capsule(args.tokens) if args.tokens else None
    if not (Path(args.model) / "config.json").is_file():
        raise DriftError(f"{args.model} is not a model directory: it has no config.json")
    sampling = sampling_of(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    if tokens is not None and sampling == Sampling():
        sampling = tokens.manifest.sampling
    if tokens is None and args.prompts is None:
        raise DriftError(f"{args.typed[1]} needs --prompts FILE, or --tokens CAPSULE")
    if tokens is not None and tokens.tokens:
        check_ids(tokens.ids.tolist(), describe_model(Path(args.model)).vocab_size, args.tokens)
    return Request(
        model=Path(args.model),
        prompts=Path(args.prompts) if args.prompts else None,
        tokens=tokens,
        side=getattr(args, "side", None) or ("train" if tokens is not None else "rollout"),
        seed=args.seed,
        max_tokens=args.max_tokens,
        samples=args.n,
        sampling=sampling,
        dtype=args.dtype,
        device=device_of(args.device),
        attention=args.attention,
        head=args.head_dtype,
        weights=not getattr(args, "no_weights", False),
        engine=engine_args(args.engine_args),
        command=args.typed,
        **{name: getattr(args, name) for name in _RECORDING if name in args},
    )


def device_of(text: str) -> str:
    """Checks the device of `--device`.

    Raises:
        DriftError: it is not a device, or not available.
    """
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        raise DriftError(f"--device {text} is not a device; expected cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DriftError(f"--device {text} is not available: torch sees {count} CUDA devices; --device cpu needs none")
    return text


def engine_args(text: str) -> dict[str, Any]:
    """The JSON object of `--engine-args`."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DriftError(f"--engine-args is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise DriftError(f"--engine-args must be a JSON object, as in '{{\"max_model_len\": 4096}}'; it is {text}")
    return values


def run_capture(args: argparse.Namespace) -> int:
    """Captures and writes; returns 0."""
    import time

    from rlkernel_drift.capsule import check_target, write_capsule
    from rlkernel_drift.capture import run_engine

    check_target(Path(args.out))
    start = time.perf_counter()
    capsule = run_engine(args.engine, request_of(args))
    folder = write_capsule(capsule, args.out, max_bytes=args.max_mib << 20, text=not args.no_text)
    size = sum(file.stat().st_size for file in folder.iterdir())
    seconds = time.perf_counter() - start
    print(f"{folder}: {int(capsule.mask.sum())} tokens, {', '.join(capsule.logprobs)}, {size} bytes, {seconds:.1f} s")
    return 0


def add_floor(subparsers: Any) -> None:
    """Adds the `floor` command."""
    words = "measure the noise of an engine against itself"
    parser = subparsers.add_parser("floor", help=words, description=words.capitalize() + ".")
    parser.add_argument("--engine", default="hf", choices=("hf", "rlkernel", "vllm", "vllm+rlkernel"))
    parser.add_argument("--engine-args", default="{}", metavar="JSON", help="further arguments of vllm.LLM")
    add_request(parser)
    parser.add_argument("--out", metavar="FILE", help="write the floor as JSON, for compare --floor")
    parser.set_defaults(run=run_floor)


def run_floor(args: argparse.Namespace) -> int:
    """Measures, prints, writes; returns 0."""
    from rlkernel_drift.floor import measure_floor

    measured = measure_floor(args.engine, request_of(args))
    for name, s in measured.permutations.items():
        print(f"{name:28} mean |d| {s.mean:.3g}  p99 {s.p99:.3g}  max {s.maximum:.3g}  k3 {s.k3:.3g}")
    floor = measured.floor
    print(f"floor: mean |d| {floor.mean:.3g}, p99 {floor.p99:.3g}, max {floor.maximum:.3g} ({floor.tokens} tokens)")
    if args.out:
        write_file(args.out, floor.model_dump_json(indent=1) + "\n")
    return 0
