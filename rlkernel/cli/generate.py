"""`rlkernel generate`: completions of prompts with a Hugging Face model directory, as text or as JSON lines."""

from __future__ import annotations

import argparse
import struct
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `generate` command."""
    parser = subparsers.add_parser(
        "generate",
        help="sample completions of prompts",
        description="Sample completions. The same seed gives the same completion in any batch, to the last bit.",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="prompts in the column `prompt`: text or chat messages")
    parser.add_argument("--chat", action="store_true", help="wrap each --prompt as a user message in the chat template")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a completion; repeatable")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="completions a prompt; default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as saved")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--backend", choices=("rlkernel", "torch"), default="rlkernel", help="torch: stock torch ops")
    parser.add_argument("--attention", choices=("split", "fa3"), default="split", help="order of attention")
    parser.add_argument("--logprobs", action="store_true", help="print each token, its log-probability and its bits")
    parser.add_argument("--output", metavar="FILE.jsonl", help="write JSON lines with ids and log-probabilities here")


def run(args: argparse.Namespace) -> int:
    """Prints the completions, or writes them to --output; returns the exit status."""
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import TokenizerError
    from rlkernel.models import CheckpointError, ConfigError

    try:
        rows = _generate(args)
    except (InputError, TokenizerError, CheckpointError, ConfigError, ValueError) as error:
        raise UserError(f"generate: {error}") from error
    if args.output is None:
        _print(rows, args.n, args.logprobs)
    return 0


def _generate(args: argparse.Namespace) -> list[dict[str, Any]]:
    import json

    from rlkernel import ops
    from rlkernel.data.errors import InputError
    from rlkernel.data.prompts import is_chat, load_prompts
    from rlkernel.data.tokenizer import Tokenizer
    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.engine.sampling_params import mix_seed
    from rlkernel.models import load_model
    from rlkernel.models.config import DTYPES
    from rlkernel.training.parts import choose_device
    from rlkernel.training.rollout import KnownTokens

    prompts: list[Any] = list(args.prompt or [])
    if args.chat:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    if args.prompts is not None:
        prompts += [row["prompt"] for row in load_prompts(args.prompts)]
    if not prompts:
        raise InputError("no prompt; use --prompt TEXT or --prompts FILE.jsonl")
    params = [
        SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_tokens,
            n=args.n,
            seed=mix_seed(args.seed, i) % (1 << 64),
            stop=args.stop,
        )
        for i in range(len(prompts))
    ]
    if args.backend == "torch" and args.attention != "split":
        raise InputError(
            f"--attention {args.attention} is an order of backend rlkernel; --backend torch has no variants"
        )
    device = choose_device(args.device or "auto")
    out = None
    if args.output is not None:
        try:
            out = open(args.output, "w", encoding="utf-8")  # noqa: SIM115  (opened before the model is loaded)
        except OSError as error:
            raise InputError(f"cannot write {args.output}: {error.strerror}") from None
    try:
        tokenizer = Tokenizer(args.model)
        model = load_model(args.model, dtype=DTYPES.get(args.dtype or ""), device=device)
        ids = [
            tokenizer.encode(tokenizer.apply_chat_template(prompt), add_special_tokens=False)
            if is_chat(prompt)
            else tokenizer.encode(prompt)
            for prompt in prompts
        ]
        with ops.stock(args.backend == "torch"):
            llm = LLM(model, KnownTokens(tokenizer), attention=args.attention)
            outputs = llm.generate(ids, params)
        rows = [
            {
                "prompt": prompt,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "token_ids": completion.token_ids,
                "tokens": [tokenizer.token(token) or "" for token in completion.token_ids],
                "logprobs": completion.logprobs,
                "contract": llm.contract if args.backend == "rlkernel" else None,
            }
            for prompt, output in zip(prompts, outputs, strict=True)
            for completion in output.outputs
        ]
        if out is not None:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    finally:
        if out is not None:
            out.close()
    return rows


def _print(rows: list[dict[str, Any]], per_prompt: int, logprobs: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for i, row in enumerate(rows):
        if i % per_prompt == 0:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            console.print(f"{'' if i == 0 else chr(10)}> {prompt}", style="bold", markup=False)
        console.print(row["completion"], markup=False)
        if logprobs:
            for token, text, logprob in zip(row["token_ids"], row["tokens"], row["logprobs"], strict=True):
                bits = struct.pack(">f", logprob).hex()
                console.print(f"  {logprob:12.6f}  {bits}  {token:>7}  {text!r}", markup=False)
