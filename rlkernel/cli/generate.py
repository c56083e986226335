"""`rlkernel generate`: completions of prompts with a Hugging Face model directory, as text or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import secrets
import shutil
import struct
import tempfile
import unicodedata
from dataclasses import dataclass, field
from typing import Any

_FIELDS = (
    *("prompt", "completion", "finish_reason", "prompt_token_ids", "token_ids", "tokens", "logprobs"),
    *("sampling", "contract"),
)
"""Fields of an output record; a column of the prompts with one of these names is renamed."""


def add_parser(subparsers: Any) -> None:
    """Adds the `generate` command."""
    parser = subparsers.add_parser(
        "generate",
        help="sample completions of prompts",
        description="Sample completions. The same seed gives the same completion in any batch, to the last bit.",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help="prompts in the column `prompt`: text or chat messages; --output keeps the other columns",
    )
    parser.add_argument("--chat", action="store_true", help="wrap each --prompt as a user message in the chat template")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a completion; repeatable")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="completions per prompt; default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as saved")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--backend", choices=("rlkernel", "torch"), default="rlkernel", help="torch: stock torch ops")
    parser.add_argument("--attention", choices=("split", "fa3"), default="split", help="variant of attention")
    parser.add_argument("--logprobs", action="store_true", help="print each token, its log-probability and its bits")
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="write JSON lines with ids and log-probabilities; an existing file is replaced at the end",
    )


@dataclass(frozen=True)
class _Prompt:
    """A prompt to complete: its text or messages, its file and line (or option), and the row's other columns."""

    content: Any
    where: str
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def run(args: argparse.Namespace) -> int:
    """Prints the completions, or writes them to --output; returns the exit status.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the completions of the finished prompts are printed or written.
    """
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import TokenizerError
    from rlkernel.models import CheckpointError, ConfigError

    try:
        if args.output is not None:
            _check_output(args.output, args.prompts)
        prompts = _read_prompts(args)
        records = _generate(args, prompts)
        done = sum(map(bool, records))
        if args.output is not None and done:
            _write(args.output, [record for of_prompt in records for record in of_prompt])
    except (InputError, TokenizerError, CheckpointError, ConfigError, ValueError) as error:
        raise UserError(f"generate: {error}") from error
    if args.output is None:
        _print(prompts, records, args.logprobs)
    if done < len(prompts):
        where = "printed" if args.output is None else f"in {args.output}"
        kept = f"their completions are {where}" if done else "nothing was written"
        raise KeyboardInterrupt(f"generate: {done} of {len(prompts)} prompts were finished; {kept}")
    return 0


def _read_prompts(args: argparse.Namespace) -> list[_Prompt]:
    from rlkernel.data.contents import WHERE
    from rlkernel.data.errors import InputError
    from rlkernel.data.prompts import load_prompts

    prompts = [
        _Prompt([{"role": "user", "content": text}] if args.chat else text, f"--prompt {i}")
        for i, text in enumerate(args.prompt or [], 1)
    ]
    for row in load_prompts(args.prompts) if args.prompts is not None else ():
        columns = {}
        for name in row:
            if name in ("prompt", WHERE):
                continue
            free = name
            while free in _FIELDS or (free != name and free in row):
                free = f"input_{free}"
            columns[free] = row[name]
        prompts.append(_Prompt(row["prompt"], row[WHERE], columns))
    if not prompts:
        raise InputError("no prompt; use --prompt TEXT or --prompts FILE.jsonl")
    return prompts


def _generate(args: argparse.Namespace, prompts: list[_Prompt]) -> list[list[dict[str, Any]]]:
    """Output records of each prompt; none for prompts that Ctrl-C left unfinished."""
    from rlkernel import ops
    from rlkernel.data.contents import is_chat
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import Tokenizer, TokenizerError
    from rlkernel.engine import LLM, RequestError, SamplingParams
    from rlkernel.engine.sampling_params import mix_seed
    from rlkernel.models import load_model
    from rlkernel.models.config import DTYPES
    from rlkernel.training.display import ready_kernels
    from rlkernel.training.parts import choose_device

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
            f"--attention {args.attention} needs backend rlkernel; --backend torch has no attention variants"
        )
    device = choose_device(args.device or "auto")
    tokenizer = Tokenizer(args.model)
    ids = []
    for prompt in prompts:
        try:
            if is_chat(prompt.content):
                text = tokenizer.apply_chat_template(prompt.content)
                ids.append(tokenizer.encode(text, add_special_tokens=False))
            else:
                ids.append(tokenizer.encode(prompt.content))
        except TokenizerError as error:
            raise InputError(f"{prompt.where}: {error}") from None
    model = load_model(args.model, dtype=DTYPES.get(args.dtype or ""), device=device)
    with ops.stock(args.backend == "torch"):
        llm = LLM(model, tokenizer, attention=args.attention)
        numbers = {}
        for i, prompt in enumerate(prompts):
            try:
                numbers[llm.add_request(ids[i], params[i])] = i
            except RequestError as error:
                raise InputError(f"{prompt.where}: {error}") from None
        ready_kernels(device)
        records: list[list[dict[str, Any]]] = [[] for _ in prompts]
        with contextlib.suppress(KeyboardInterrupt):  # `run` reports that some prompts are unfinished
            while llm.has_unfinished:
                for output in llm.step():
                    i = numbers[output.request_id]
                    records[i] = [
                        {
                            **prompts[i].columns,
                            "prompt": prompts[i].content,
                            "completion": completion.text,
                            "finish_reason": completion.finish_reason,
                            "prompt_token_ids": output.prompt_token_ids,
                            "token_ids": completion.token_ids,
                            "tokens": [tokenizer.token(token) or "" for token in completion.token_ids],
                            "logprobs": completion.logprobs,
                            "sampling": {
                                "temperature": args.temperature,
                                "top_p": args.top_p,
                                "top_k": args.top_k,
                                "min_p": args.min_p,
                            },
                            "contract": llm.contract if args.backend == "rlkernel" else None,
                        }
                        for completion in output.outputs
                    ]
    return records


def _check_output(path: str, prompts: str | None) -> None:
    """Checks before any work that the output can be written and is not the prompts file.

    Raises:
        InputError: names the file.
    """
    from rlkernel.data.errors import InputError

    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise InputError(f"cannot write {path!r}: it is a directory; give the name of a file with --output")
    if _is_stream(path):
        return
    if os.path.exists(path):
        if prompts is not None and os.path.exists(prompts) and os.path.samefile(path, prompts):
            raise InputError(f"--output {path} is the prompts file {prompts} itself; give another name with --output")
        if not os.access(path, os.W_OK):
            raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(target)):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _write(path: str, records: list[dict[str, Any]]) -> None:
    """Writes JSON lines, to a file atomically, to a device or a pipe one by one.

    Raises:
        InputError: the output cannot be written.
    """
    target, plain = os.path.realpath(path), not _is_stream(path)
    work = os.path.join(os.path.dirname(target), f".rlkernel-{secrets.token_hex(8)}.tmp") if plain else path
    try:
        with open(work, "x" if plain else "w", encoding="utf-8") as out:
            out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if plain:
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(target, work)
            os.replace(work, target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        if plain:
            with contextlib.suppress(OSError):
                os.unlink(work)


def _is_stream(path: str) -> bool:
    """Whether a path is a device or a pipe, which cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path)


def _unwritable(path: str, error: OSError) -> Exception:
    from rlkernel.data.errors import InputError

    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space, or give a file elsewhere with --output" if full else "give another file with --output"
    return InputError(f"cannot write {path}: {error.strerror}; {remedy}")


def _print(prompts: list[_Prompt], records: list[list[dict[str, Any]]], logprobs: bool) -> None:
    from rlkernel.training.display import Screen

    console = Screen()

    def say(text: str, style: str | None = None) -> None:
        if console.is_terminal:
            console.print(_visible(text), style=style, markup=False)
        else:
            print(text)

    first = True
    for prompt, of_prompt in zip(prompts, records, strict=True):
        if not of_prompt:
            continue
        say(f"{'' if first else chr(10)}> {prompt.shown}", "bold")
        first = False
        for record in of_prompt:
            say(record["completion"])
            if logprobs:
                for token, text, logprob in zip(record["token_ids"], record["tokens"], record["logprobs"], strict=True):
                    bits = struct.pack(">f", logprob).hex()
                    say(f"  {logprob:12.6f}  {bits}  {token:>7}  {text!r}")


def _visible(text: str) -> str:
    """The text with control characters escaped, because a sampled one could move the terminal's cursor."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
