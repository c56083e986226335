"""The request of a capture (model, prompts or tokens, what to record), and the parts that all adapters share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from rlkernel_drift.capsule import (
    Capsule,
    Manifest,
    Model,
    Operators,
    Sampling,
    WeightFingerprint,
    Weights,
    describe_operators,
    dtype_name,
)
from rlkernel_drift.capsule.fingerprint import digest
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.sequences import Sequences, sequences_of

_PACKAGES = ("torch", "transformers", "vllm", "triton", "flash-attn", "flashinfer-python", "rlkernel", "tokenizers")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Request:
    """A capture.

    Attributes:
        model: directory.
        prompts: file with one prompt per line, or JSON lines with the column `prompt`; or token ids.
        tokens: a capsule whose sequences are scored instead of sampling new ones.
        operators: form in which operator outputs are recorded.
        operator_sequences: sequences of which they are recorded; `operator_rows`: tokens, for "rows".
        logits_rows: tokens whose logits rows are recorded.
        weights: record fingerprints of the weights.
        head: dtype of transformers' head and logits; "" is the dtype of the model.
        engine: further arguments of `vllm.LLM`.
    """

    model: Path
    prompts: Path | list[list[int]] | None = None
    tokens: Capsule | None = None
    side: Literal["rollout", "train"] = "rollout"
    seed: int = 0
    max_tokens: int = 64
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = ""
    head: str = ""
    operators: Literal["none", "full", "rows", "fingerprint"] = "none"
    operator_sequences: int = 2
    operator_rows: int = 64
    logits_rows: int = 0
    weights: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """Phase of the log-probabilities of one forward over given tokens."""
        return "train" if self.side == "train" else "prefill"

    @property
    def operator_count(self) -> int:
        """Sequences whose operators are recorded: all for fingerprints, because they are small."""
        return 1 << 30 if self.operators == "fingerprint" else self.operator_sequences


def sampling_of(**settings: float) -> Sampling:
    """Sampling settings of a command line.

    Raises:
        DriftError: a value is out of range; the message names its option.
    """
    try:
        return Sampling(**settings)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "--" + "-".join(map(str, first["loc"])).replace("_", "-")
        raise DriftError(f"{name} is {first['input']}: {first['msg']}") from None


def tokens_only(capsule: Capsule) -> Capsule:
    """The sequences of a capsule without anything that was computed for them."""
    return replace(capsule, logprobs={}, operators=Operators(), distribution=None, manifest=Manifest())


def counted_sequences(bare: Capsule) -> Sequences:
    """The sequences to score.

    Raises:
        DriftError: no token counts.
    """
    sequences = sequences_of(bare)
    if not sequences.counted:
        raise DriftError("there is no token to score: every mask is empty")
    return sequences


def stream_of(bare: Capsule, sequences: Sequences, values: Any) -> np.ndarray:  # [N] -> [T] fp32
    """Values of the counted tokens as a log-probability stream of the capsule, NaN elsewhere."""
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = np.asarray(values, np.float32)
    return stream


def kept_sets(bare: Capsule, sequences: Sequences, vocab_size: int) -> tuple[Tensor, Tensor]:  # [M] int32, [N+1] int64
    """Ids and offsets of the kept sets of the counted tokens; an empty set stands for the whole vocabulary."""
    assert bare.kept is not None
    ids, ends = bare.kept.ids, bare.kept.offsets
    everything = np.arange(vocab_size, dtype=np.int32)
    sets = [ids[ends[t] : ends[t + 1]] if ends[t] < ends[t + 1] else everything for t in sequences.token.tolist()]
    offsets = torch.tensor(np.concatenate([[0], np.cumsum([len(kept) for kept in sets])]))
    return torch.from_numpy(np.concatenate(sets)), offsets


def recorded_rows(request: Request, bare: Capsule) -> tuple[np.ndarray | None, int]:  # [R] int64, or None: all tokens
    """Tokens whose operators are recorded, and the number of sequences that contain them.

    The tokens are those that the scored capsule recorded, where it recorded operators, else a sample.
    """
    rows = _rows(request, bare)
    return rows, bare.sequences if rows is None else bare.place(int(rows[-1]))[0] + 1


def _rows(request: Request, bare: Capsule) -> np.ndarray | None:
    end = bare.sequence(min(request.operator_count, bare.sequences) - 1).stop
    if request.operators in ("rows", "fingerprint") and request.tokens is not None and request.tokens.operators.values:
        return request.tokens.operators.rows
    if request.operators == "rows":
        return np.unique(np.linspace(0, end - 1, min(end, request.operator_rows)).round().astype(np.int64))
    return None if end == bare.tokens else np.arange(end)


def prompt_ids(request: Request) -> list[list[int]]:
    """Token ids of the request's prompts.

    Raises:
        DriftError: without prompts, or with one that the model cannot take.
    """
    if request.prompts is None:
        raise DriftError("capture needs --prompts, or --tokens with a capsule")
    texts = Texts(request.model)
    prompts = _read_prompts(request.prompts) if isinstance(request.prompts, Path) else request.prompts
    return [texts.ids(prompt) for prompt in prompts]


def _read_prompts(path: Path) -> list[Any]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix in (".jsonl", ".json"):
            prompts = [json.loads(line)["prompt"] for line in lines]
        else:
            prompts = lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DriftError(f"{path} holds no prompts (one per line, or JSON lines with `prompt`): {error}") from None
    if not prompts:
        raise DriftError(f"{path} is empty; one prompt a line is needed")
    return prompts


def random_prompts(models: Sequence[Path], seed: int, max_tokens: int, longest: int | None = None) -> list[list[int]]:
    """Eight prompts of 16 to 128 random tokens, for comparisons without prompts: rounding does not depend on the text.

    Args:
        models: prompt and completion fit the smallest of their contexts and vocabularies.
        longest: context length that an engine was given, if any.

    Raises:
        DriftError: no prompt fits.
    """
    contexts = {model: context_length(model) for model in models}
    limit, whose = min(((n, f"the context of {m}") for m, n in contexts.items() if n), default=(None, ""))
    if longest is not None and (limit is None or longest < limit):
        limit, whose = longest, "max_model_len"
    # an engine that scores a sequence as a prompt needs capacity for one more token
    most = 128 if limit is None else limit - max_tokens - 1
    if most < 1:
        raise DriftError(
            f"{whose} is {limit} tokens, and --max-tokens {max_tokens} leaves no token for a prompt; "
            "choose a smaller --max-tokens"
        )
    vocabulary = min(describe_model(model).vocab_size or 256 for model in models)
    generator = np.random.default_rng(seed)
    lengths = (min(n, most) for n in (16, 24, 32, 48, 64, 80, 96, 128))
    return [generator.integers(min(3, vocabulary - 1), vocabulary, n).tolist() for n in lengths]


def context_length(model: Path) -> int | None:
    """The longest sequence that a model directory declares; None where it declares none."""
    text = _text_config(_config(model))
    declared = text.get("max_position_embeddings") or text.get("n_positions")
    return declared if isinstance(declared, int) else None


def own_dtype(model: Path) -> str:
    """The dtype that a model directory declares; float32 where it declares none that engines compute in."""
    config = _config(model)
    return dtype_name(config.get("dtype")) or dtype_name(config.get("torch_dtype")) or "float32"


class Texts:
    """The model's tokenizer, if it has one; prompts of token ids do not need it."""

    def __init__(self, model: Path) -> None:
        self.tokenizer: Any = None
        self.vocab_size = describe_model(model).vocab_size
        if (model / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt.

        Raises:
            DriftError: a text for a model without tokenizer, an id outside the vocabulary, or an empty prompt.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise DriftError("the model directory has no tokenizer.json; give prompts as lists of token ids")
            ids = list(self.tokenizer.encode(prompt).ids)
        else:
            ids = [int(i) for i in prompt]
            check_ids(ids, self.vocab_size, "a prompt")
        if not ids:
            raise DriftError(f"prompt {prompt!r} has no tokens")
        return ids

    def vocabulary(self, ids: np.ndarray) -> dict[str, str]:
        """Texts of the ids that occur, by id."""
        if self.tokenizer is None:
            return {}
        texts = {int(i): self.tokenizer.decode([int(i)], skip_special_tokens=False) for i in np.unique(ids)}
        return {str(i): text[:256] for i, text in texts.items()}


def check_ids(ids: list[int], vocab_size: int | None, where: str) -> None:
    """Refuses token ids outside the vocabulary.

    Raises:
        DriftError: the message names the first one.
    """
    wrong = next((i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)), None)
    if wrong is not None:
        raise DriftError(f"token id {wrong} of {where} is outside the model's vocabulary of {vocab_size}")


def describe_model(path: Path) -> Model:
    """The model that a directory describes, with digests of tokenizer and chat template.

    Raises:
        DriftError: config.json is missing or malformed.
    """
    config = _config(path)
    text = _text_config(config)
    return Model(
        name=path.resolve().name,
        family=str(config.get("model_type", "")),
        layers=text.get("num_hidden_layers"),
        hidden_size=text.get("hidden_size"),
        vocab_size=text.get("vocab_size"),
        tokenizer=_digest(path / "tokenizer.json"),
        chat_template=next((d for name in _TEMPLATE_FILES if (d := _digest(path / name))), _template(path)),
    )


def _config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DriftError(f"{model}: config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise DriftError(f"{model}: config.json is not a JSON object")
    return config


def model_settings(model: Path) -> dict[str, Any]:
    """All entries of config.json, and those of generation_config.json as `generation.<name>`; lists are JSON texts."""
    file = model / "generation_config.json"
    generation = {}
    if file.is_file():
        try:
            generation = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DriftError(f"{file} cannot be read: {error}") from None
    found = {**_flat(_text_config(_config(model))), **_flat(generation, "generation.")}
    return {key: value for key, value in found.items() if key not in ("dtype", "torch_dtype") and value is not None}


def _flat(entries: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return found


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal configuration."""
    return config.get("text_config") or config


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _template(path: Path) -> str | None:
    file = path / "tokenizer_config.json"
    try:
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    except (OSError, ValueError):
        return None
    return digest(json.dumps(template, sort_keys=True).encode()) if template else None


def captured(
    request: Request,
    bare: Capsule,
    streams: dict[str, np.ndarray],
    operators: Operators,
    engine: str,
    config: dict[str, Any],
    weights: dict[str, WeightFingerprint] | None,
    **fields: Any,
) -> Capsule:
    """The capsule of a capture.

    Args:
        bare: its tokens.
        streams, operators: what the engine computed for them.
        config: settings of the engine; those with the value None are left out.
        fields: further fields of the manifest.
    """
    manifest = Manifest(
        side=request.side,
        engine=engine,
        model=describe_model(request.model),
        weights=None if weights is None else Weights(tensors=weights),
        sampling=request.sampling,
        config={**model_settings(request.model), **{key: value for key, value in config.items() if value is not None}},
        versions=versions(),
        hardware=hardware(request.device),
        command=request.command,
        vocabulary=Texts(request.model).vocabulary(bare.ids),
        operators=describe_operators(operators),
        **fields,
    )
    return replace(bare, manifest=manifest, logprobs=streams, operators=operators)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: str) -> dict[str, str | int | float | bool | None]:
    """Name of the device, and its CUDA version or architecture."""
    if device.startswith("cuda"):
        return {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return {"device": "cpu", "machine": platform.machine()}
