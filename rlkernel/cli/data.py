"""`rlkernel data check`: what a data file holds, and its first bad line, as training would read it."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rlkernel.cli import template_args

_PROMPTS, _EXAMPLES, _PREFERENCES = ("prompt",), ("prompt", "completion"), ("prompt", "chosen", "rejected")
_CONTENTS = {
    "grpo": _PROMPTS, "ppo": _PROMPTS, "sft": _EXAMPLES, "dpo": _PREFERENCES, "reward": _PREFERENCES
}  # fmt: skip
"""The columns with text, messages or token ids of each algorithm."""


def add_parser(subparsers: Any) -> None:
    """Adds the `data` command."""
    parser = subparsers.add_parser("data", help="check a data file: counts, lengths, duplicates, the first bad line")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="read a file as training would",
        description="Read a file as training would. The first bad line is an error, with exit status 2.",
    )
    check.add_argument("file", metavar="FILE", help="JSONL or Parquet file, pattern, or directory of save_to_disk")
    check.add_argument(
        "--algorithm", choices=tuple(_CONTENTS), help="whose columns are expected; default by the columns"
    )
    check.add_argument("--model", metavar="DIR", help="also count tokens, with the tokenizer and context of this model")
    check.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of the context that a prompt must leave free (rollout.max_tokens); default 256",
    )
    template_args.add_option(check)


def run(args: argparse.Namespace) -> int:
    """Prints what the file holds; returns the exit status.

    Raises:
        UserError: the first bad line, after the figures of the lines before it.
    """
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.data.files import read_rows

    problem: InputError | None = None
    rows: list[dict[str, Any]] = []
    tokens: dict[str, list[int]] = {}
    overlong: list[str] = []
    try:
        algorithm = args.algorithm or _algorithm_of(next(read_rows(args.file))[1])
        count = _token_counter(args, algorithm)
        for row in _reader(algorithm)(args.file):
            counts, fact = count(row)
            rows.append(row)
            for name, number in counts.items():
                tokens.setdefault(name, []).append(number)
            overlong += [fact] if fact else []
    except InputError as error:
        problem = error
    if rows:
        before = " before the first bad line" if problem else ""
        print(f"{args.file}: {len(rows):,} rows{before}, read for {algorithm}")
        figures = list(_figures(rows, _CONTENTS[algorithm], tokens, overlong))
        width = max(len(name) for name, _ in figures)
        for name, value in figures:
            print(f"  {name:<{width}}  {value}")
    if problem:
        raise UserError(f"data check: {problem}")
    return 0


def _algorithm_of(row: dict[str, Any]) -> str:
    """The algorithm whose columns a row has."""
    if "chosen" in row:
        return "dpo"
    return "sft" if "completion" in row or "messages" in row else "grpo"


def _reader(algorithm: str) -> Callable[[str], Iterator[dict[str, Any]]]:
    from rlkernel.data.preferences import iter_preferences
    from rlkernel.data.prompts import iter_examples, iter_prompts

    return {_PROMPTS: iter_prompts, _EXAMPLES: iter_examples, _PREFERENCES: iter_preferences}[_CONTENTS[algorithm]]


def _token_counter(
    args: argparse.Namespace, algorithm: str
) -> Callable[[dict[str, Any]], tuple[dict[str, int], str | None]]:
    """A function from a row to its token counts by column, and a message if the row exceeds the context.

    Raises:
        UserError: the model's directory has no tokenizer or configuration that can be read.
    """
    if args.model is None:
        return lambda row: ({}, None)
    from rlkernel.cli.errors import UserError
    from rlkernel.data.tokenizer import Tokenizer, TokenizerError
    from rlkernel.models import ConfigError
    from rlkernel.models.config import load_config
    from rlkernel.training.encoding import Encoder, OverlongError

    variables = template_args.parse(args.chat_template_args)
    try:
        tokenizer = Tokenizer(args.model)
        config = load_config(tokenizer.directory)
    except (TokenizerError, ConfigError) as error:
        raise UserError(f"data check: {error}") from None
    encoder = Encoder(config, tokenizer, max_tokens=args.max_tokens, template_args=variables)

    def count(row: dict[str, Any]) -> tuple[dict[str, int], str | None]:
        try:
            if _CONTENTS[algorithm] == _PROMPTS:
                return {"prompt": len(encoder.prompt(row).ids)}, None
            if _CONTENTS[algorithm] == _EXAMPLES:
                example = encoder.example(row)
                return {"prompt": len(example.prompt), "completion": len(example.completion)}, None
            chosen, rejected = encoder.preference(row)
            answers = {"chosen": len(chosen.completion), "rejected": len(rejected.completion)}
            return {"prompt": len(chosen.prompt), **answers}, None
        except OverlongError as error:
            return error.lengths, error.fact

    return count


def _figures(
    rows: list[dict[str, Any]], contents: tuple[str, ...], tokens: dict[str, list[int]], overlong: list[str]
) -> Iterator[tuple[str, str]]:
    """(name, value) of each line of the output."""
    from rlkernel.data.contents import WHERE
    from rlkernel.data.splits import count_prompts

    yield "distinct prompts", f"{count_prompts(rows):,}"
    first: dict[str, str] = {}
    repeated: list[str] = []
    for row in rows:
        place = row[WHERE]
        key = json.dumps({name: value for name, value in row.items() if name != WHERE}, sort_keys=True)
        if (earlier := first.setdefault(key, place)) != place:
            repeated.append(f"{place} repeats {earlier}")
    yield "duplicate rows", f"{len(repeated):,}" + (f", the first: {repeated[0]}" if repeated else "")
    for name in dict.fromkeys(name for row in rows for name in row if name != WHERE):
        kinds = Counter(_kind(row[name], name in contents) for row in rows if name in row)
        yield f"column {name}", ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
    for name in contents:
        yield f"{name}, characters", _spread([n for row in rows if (n := _characters(row[name])) is not None])
    for name, counts in tokens.items():
        yield f"{name}, tokens", _spread(counts)
    if tokens:
        remedy = "; data.overlong=drop leaves them out" if overlong else ""
        yield "exceed the context", f"{len(overlong):,}" + (f", the first: {overlong[0]}{remedy}" if overlong else "")


def _kind(value: Any, is_content: bool) -> str:
    from rlkernel.data.contents import form_of

    if is_content:
        return form_of(value)
    names = {dict: "object", list: "list", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _characters(content: Any) -> int | None:
    """Length of a content's texts; None for token ids."""
    if isinstance(content, str):
        return len(content)
    return sum(len(message["content"]) for message in content) if isinstance(content[0], dict) else None


def _spread(values: list[int]) -> str:
    """Smallest, largest and two nearest-rank percentiles."""
    if not values:
        return "none"
    ordered = sorted(values)

    median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
    return f"min {ordered[0]:,}, median {median:,}, p95 {p95:,}, max {ordered[-1]:,}"
