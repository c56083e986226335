"""`rlkernel fetch`: downloads a model or a data set from the Hugging Face hub; no other command uses the network."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rlkernel.cli.errors import UserError

_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
_SHARD = re.compile(r"\d{5}-of-\d{5}")


def add_parser(subparsers: Any) -> None:
    """Adds the `fetch` command."""
    parser = subparsers.add_parser(
        "fetch",
        help="download a model or a data set from the hub; the only command that uses the network",
        description="Download a model (safetensors, configuration, tokenizer) or a data set (Parquet, JSONL) from the "
        "Hugging Face hub. Private and gated repositories need the variable HF_TOKEN.",
    )
    parser.add_argument("repo", metavar="REPO_ID", help="name on the hub, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--data", action="store_true", help="REPO_ID is a data set")
    parser.add_argument("--output", metavar="DIR", help="where to put it; default: the hub's cache")


def run(args: argparse.Namespace) -> int:
    """Downloads, then prints the place and the next command; returns the exit status.

    Raises:
        UserError: the hub cannot be reached, or the repository has no files that rlkernel reads.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    kind = "dataset" if args.data else "model"
    try:
        names = HfApi().list_repo_files(args.repo, repo_type=kind)
        wanted = data_files_of(args.repo, names) if args.data else model_files_of(args.repo, names)
        folder = Path(snapshot_download(args.repo, repo_type=kind, local_dir=args.output, allow_patterns=wanted))
    except HFValidationError as error:
        raise UserError(f"fetch: {error}; give the name of a repository on the hub, owner/name") from None
    except OfflineModeIsEnabled:
        raise UserError("fetch: HF_HUB_OFFLINE is set; unset it to download") from None
    except HfHubHTTPError as error:
        raise UserError(
            f"fetch: {args.repo} cannot be downloaded: {_first_line(error)}; check the name (a data set needs --data); "
            "private and gated repositories need HF_TOKEN"
        ) from None
    except httpx.HTTPError as error:
        raise UserError(
            f"fetch: the hub cannot be reached ({_first_line(error)}); run it on a machine with a network, or copy the "
            "directory from one"
        ) from None
    print(f"{args.repo}: {len(wanted)} files in {folder}")
    if not args.data:
        model = args.repo if args.output is None else folder
        print(f'next: rlkernel generate --model {model} --prompt "..."')
        return 0
    for name in wanted:
        print(f"  {folder / name}")
    print(f"next: rlkernel data check '{folder / wanted[0]}'")
    return 0


def model_files_of(repo: str, names: list[str]) -> list[str]:
    """The files of a model repository that `load_model` and `Tokenizer` read: safetensors, JSON, chat templates.

    Raises:
        UserError: there are no safetensors, no configuration or no tokenizer that rlkernel reads.
    """
    from rlkernel.data.tokenizer import TOKENIZER_FILES

    for required, remedy in (
        ("config.json", "choose a repository in the format of transformers"),
        ("tokenizer.json", "choose one with a fast tokenizer"),
    ):
        if required not in names:
            raise UserError(f"fetch: {repo} has no {required}; {remedy}")
    exact = {"config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES}
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    if not weights:
        raise UserError(
            f"fetch: {repo} has no model*.safetensors, and rlkernel does not load pickled weights (.bin, .pt); choose "
            "a repository with safetensors"
        )
    templates = [name for name in names if name.startswith("additional_chat_templates/")]
    return sorted({*(name for name in names if name in exact), *weights, *templates})


def data_files_of(repo: str, names: list[str]) -> list[str]:
    """The Parquet and JSON files of a data set, those of one split as a pattern such as `train-*-of-00002.parquet`.

    Raises:
        UserError: there are none.
    """
    found = [name for name in names if name.endswith(_DATA_SUFFIXES)]
    if not found:
        raise UserError(f"fetch: the data set {repo} has no Parquet or JSONL files; convert it with datasets")
    return sorted({_SHARD.sub("*", name) for name in found})


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
