"""`rlkernel generate`: completions of prompts with a Hugging Face model directory, as text or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import struct
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlkernel.cli import template_args
from rlkernel.signals import Interrupted, handled

if TYPE_CHECKING:
    from rlkernel.cli.completions import Output
    from rlkernel.data.tokenizer import Tokenizer
    from rlkernel.engine import RequestOutput, SamplingParams

Record = dict[str, Any]

_FIELDS = (
    *("prompt", "completion", "finish_reason", "prompt_token_ids", "token_ids", "tokens", "logprobs"),
    *("seed", "sampling", "contract"),
)
"""Fields of an output record; a column of the prompts with one of these names is renamed."""
_SAME = "resume with the prompts and options of the first run, or give another file with --output"


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
        metavar="FILE",
        help="prompts in the column `prompt`: text, chat messages or token ids; --output keeps the other columns",
    )
    parser.add_argument("--chat", action="store_true", help="wrap each --prompt as a user message in the chat template")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a completion; repeatable")
    parser.add_argument("-n", "--n", type=int, default=1, metavar="N", help="completions per prompt; default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    template_args.add_option(parser)
    parser.add_argument(
        "--overlong",
        choices=("refuse", "drop"),
        default="refuse",
        help="prompts longer than the context; default refuse",
    )
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
    parser.add_argument("--resume", action="store_true", help="complete only the prompts that --output does not have")


@dataclass(frozen=True)
class _Prompt:
    """A prompt to complete: its content, its file and line (or option), and the row's other columns."""

    content: Any
    where: str
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The text, the last message, or the token ids."""
        from rlkernel.data.contents import is_chat

        return str(self.content[-1]["content"] if is_chat(self.content) else self.content)


@dataclass
class _Run:
    """What a run has made.

    Attributes:
        records: output records of each finished prompt, by the prompt's number.
        resumed: number of prompts that were in the output already.
        dropped: messages about prompts that exceed the context.
        tokens, seconds: sampled tokens, and the time they took.
        signal: number of the signal that stopped the run, or 0.
    """

    records: dict[int, list[Record]]
    resumed: int = 0
    dropped: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    signal: int = 0


def run(args: argparse.Namespace) -> int:
    """Prints the completions, or writes them to --output; returns the exit status.

    After the first Ctrl-C or SIGTERM, the completions of the finished prompts are printed or written.
    """
    from rlkernel.cli.completions import Output
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import TokenizerError
    from rlkernel.models import CheckpointError, ConfigError

    try:
        if args.resume and args.output is None:
            raise InputError("--resume continues a file; name it with --output")
        output = None if args.output is None else Output(args.output, args.prompts, args.resume)
        prompts = _read_prompts(args)
        made = _generate(args, prompts, output)
        ordered = [made.records.get(i, []) for i in range(len(prompts))]
        if output is not None:
            output.finish([record for records in ordered for record in records])
    except (InputError, TokenizerError, CheckpointError, ConfigError, ValueError) as error:
        raise UserError(f"generate: {error}") from error
    if output is None:
        _print(prompts, ordered, args.logprobs)
    _report(args, made, len(prompts))
    return 128 + made.signal if made.signal else 0


def _report(args: argparse.Namespace, made: _Run, prompts: int) -> None:
    """Prints on standard error what was left out, the throughput, and what an interrupt has kept."""
    if made.dropped:
        print(f"prompts that exceed the context and were dropped: {len(made.dropped):,}; the first: {made.dropped[0]}",
              file=sys.stderr)  # fmt: skip
    if args.resume:
        print(f"prompts that {args.output} had already: {made.resumed:,} of {prompts:,}", file=sys.stderr)
    if made.tokens:
        rate = f"{made.tokens / made.seconds:,.0f} tokens/s"
        print(f"sampled {made.tokens:,} tokens in {made.seconds:.3g} s, {rate}", file=sys.stderr)
    if made.signal:
        done = len(made.records)
        where = "printed" if args.output is None else f"in {args.output}; to continue, add --resume to the same command"
        kept = f"their completions are {where}" if done else "nothing was written"
        total = prompts - len(made.dropped)
        print(f"rlkernel: interrupted: generate: {done} of {total} prompts were finished; {kept}", file=sys.stderr)


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
        raise InputError("no prompt; use --prompt TEXT or --prompts FILE")
    return prompts


def _generate(args: argparse.Namespace, prompts: list[_Prompt], output: Output | None) -> _Run:
    """Completes the prompts that `output` does not have yet, and adds them to it as they finish."""
    from rlkernel import ops
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import Tokenizer
    from rlkernel.engine import LLM
    from rlkernel.engine.sampling_params import mix_seed
    from rlkernel.models import load_model
    from rlkernel.models.config import DTYPES
    from rlkernel.training.display import ready_kernels
    from rlkernel.training.parts import choose_device

    params = [_sampling_params(args, i) for i in range(len(prompts))]
    if args.backend == "torch" and args.attention != "split":
        raise InputError(
            f"--attention {args.attention} needs backend rlkernel; --backend torch has no attention variants"
        )
    device = choose_device(args.device or "auto")
    tokenizer, variables = Tokenizer(args.model), template_args.parse(args.chat_template_args)
    tokenizer.check_template_args(variables)
    ids = [_encoded(prompt, tokenizer, variables) for prompt in prompts]
    model = load_model(args.model, dtype=DTYPES.get(args.dtype or ""), device=device)
    with ops.stock(args.backend == "torch"):
        llm = LLM(model, tokenizer, attention=args.attention)
        shared = {
            "sampling": {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            "contract": llm.contract if args.backend == "rlkernel" else None,
        }
        seeds = {mix_seed(p.seed or 0, j): (i, j) for i, p in enumerate(params) for j in range(args.n)}
        found = {} if output is None or not args.resume else _finished(output, seeds, ids, shared, args.n)
        made = _Run(found, resumed=len(found))
        numbers = {}  # of the prompts, by request id
        for i, prompt in enumerate(prompts):
            if i not in made.records:
                with _named_errors(prompt, made, drops=args.overlong == "drop"):
                    numbers[llm.add_request(ids[i], params[i])] = i
        if len(made.dropped) == len(prompts):
            raise InputError(f"--overlong drop leaves no prompt; the first: {made.dropped[0]}")
        ready_kernels(device)
        with _stopping(made):
            start = time.perf_counter()
            while llm.has_unfinished and not made.signal:
                for finished in llm.step():
                    i = numbers[finished.request_id]
                    made.records[i] = _records(prompts[i], finished, tokenizer, shared)
                    made.tokens += sum(len(completion.token_ids) for completion in finished.outputs)
                    if output is not None:
                        output.add(made.records[i])
            made.seconds = time.perf_counter() - start
    return made


def _sampling_params(args: argparse.Namespace, number: int) -> SamplingParams:
    """Sampling parameters of a prompt; its seed depends on --seed and on its number alone."""
    from rlkernel.engine import SamplingParams
    from rlkernel.engine.sampling_params import mix_seed

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        n=args.n,
        seed=mix_seed(args.seed, number) % (1 << 64),
        stop=args.stop,
    )


def _encoded(prompt: _Prompt, tokenizer: Tokenizer, variables: dict[str, Any]) -> list[int]:
    from rlkernel.data.errors import InputError
    from rlkernel.data.tokenizer import TokenizerError

    try:
        return tokenizer.encode_prompt(prompt.content, variables)
    except TokenizerError as error:
        raise InputError(f"{prompt.where}: {error}") from None


@contextlib.contextmanager
def _named_errors(prompt: _Prompt, made: _Run, *, drops: bool) -> Iterator[None]:
    """Names the prompt in an error of its request; with `drops`, notes one that exceeds the context instead."""
    from rlkernel.data.errors import InputError
    from rlkernel.engine import PromptTooLongError, RequestError

    try:
        yield
    except PromptTooLongError as error:
        if not drops:
            raise InputError(f"{prompt.where}: {error}, or drop it with --overlong drop") from None
        made.dropped.append(f"{prompt.where}: {error}")
    except RequestError as error:
        raise InputError(f"{prompt.where}: {error}") from None


def _records(prompt: _Prompt, finished: RequestOutput, tokenizer: Tokenizer, shared: Record) -> list[Record]:
    """Output records of a prompt's completions; `shared`: fields that are the same in all records."""
    return [
        {
            **prompt.columns,
            "prompt": prompt.content,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_token_ids": finished.prompt_token_ids,
            "token_ids": completion.token_ids,
            "tokens": [tokenizer.token(token) or "" for token in completion.token_ids],
            "logprobs": completion.logprobs,
            "seed": completion.seed,
            **shared,
        }
        for completion in finished.outputs
    ]


def _finished(
    output: Output, seeds: dict[int, tuple[int, int]], ids: list[list[int]], shared: Record, n: int
) -> dict[int, list[Record]]:
    """Records of the prompts whose n completions are all in the output already.

    Args:
        seeds: (number of the prompt, number of the completion) by the completion's seed.
        ids: token ids of the prompts.
        shared: fields that are the same in all records.

    Raises:
        InputError: a record belongs to another run.
    """
    from rlkernel.data.errors import InputError

    found: dict[int, dict[int, Record]] = {}
    for where, record in output.read():
        i, j = seeds.get(record["seed"], (-1, -1))
        if i < 0:
            raise InputError(f"{where}: no prompt of this run has the record's seed; {_SAME}")
        for name, value in {**shared, "prompt_token_ids": ids[i]}.items():
            if record.get(name) != value:
                raise InputError(
                    f"{where}: {name} is {str(record.get(name))[:80]} and would be {str(value)[:80]}; {_SAME}"
                )
        found.setdefault(i, {})[j] = record
    return {i: [of_prompt[j] for j in range(n)] for i, of_prompt in found.items() if len(of_prompt) == n}


@contextlib.contextmanager
def _stopping(made: _Run) -> Iterator[None]:
    """Inside the block, the first SIGINT or SIGTERM sets `made.signal`, a second one raises Interrupted."""

    def handle(number: int) -> None:
        if made.signal:
            raise Interrupted(number, "generate: the prompts of the current batch are lost")
        made.signal = number

    with handled(handle):
        yield


def _print(prompts: list[_Prompt], records: list[list[Record]], logprobs: bool) -> None:
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
