"""vLLM's own hidden-state files (`extract_hidden_states`): token ids and the residual stream at chosen layers.

Without log-probabilities they only locate differences. vLLM gives number k to the stream before layer k, so 0 is the
embedding. The file has no numbers, so `FILE@0,1,4` repeats the engine's `eagle_aux_hidden_state_layer_ids`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlkernel_drift.capsule import Capsule, Manifest, Operators, Tensor, describe_operators
from rlkernel_drift.capsule.tensor_file import DEFAULT_LIMITS, parse_tensors, read_bytes
from rlkernel_drift.errors import DriftError


def is_hidden_states(path: Path) -> bool:
    """Whether a path is one of vLLM's files, or a folder of them."""
    if path.is_dir():
        return any(is_hidden_states(file) for file in sorted(path.glob("*.safetensors"))[:1])
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    return b'"hidden_states"' in head and b'"token_ids"' in head


def split_numbers(text: str) -> tuple[str, list[int] | None]:
    """`FILE@0,1,4` as path and numbers; other paths unchanged."""
    found = re.fullmatch(r"(.+)@(\d{1,4}(?:,\d{1,4})*)", text)
    return (text, None) if found is None else (found[1], [int(number) for number in found[2].split(",")])


def read_hidden_states(path: Path, numbers: Sequence[int] | None = None) -> Capsule:
    """A capsule with the recorded streams; each file of a folder is a sequence.

    Args:
        numbers: vLLM's numbers of the recorded streams; default 1, 2, 3, ...

    Raises:
        CapsuleError: a file is malformed.
        DriftError: shapes or files do not match each other.
    """
    files = sorted(path.glob("*.safetensors"), key=_place) if path.is_dir() else [path]
    ids, streams, dtypes = zip(*(_read(file) for file in files), strict=True)
    count = len(streams[0])
    if any(len(stream) != count for stream in streams) or len(set(dtypes)) > 1:
        raise DriftError(f"{path}: the files differ in number of layers or dtype; they are of different engines")
    chosen = list(numbers) if numbers is not None else list(range(1, count + 1))
    if len(chosen) != count:
        raise DriftError(f"{path} holds {count} layers; {len(chosen)} numbers were given")
    values = (Tensor(np.concatenate(parts), dtypes[0]) for parts in zip(*streams, strict=True))
    operators = Operators(None, dict(zip(map(_name, chosen), values, strict=True)))
    lengths = [len(part) for part in ids]
    capsule = Capsule(
        manifest=Manifest(side="rollout", engine="vllm", operators=describe_operators(operators)),
        ids=np.concatenate(ids),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        mask=np.ones(sum(lengths), np.bool_),
        logprobs={},
        operators=operators,
    )
    capsule.validate()
    return capsule


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Token ids [L], streams [layers, L, width] and their dtype."""
    tensors = parse_tensors(read_bytes(path, DEFAULT_LIMITS.file_bytes, "hidden states"), path.name)
    if not {"token_ids", "hidden_states"} <= set(tensors):
        raise DriftError(
            f"{path} is not a hidden-state file of vLLM: it has {', '.join(sorted(tensors)) or 'no tensors'}"
        )
    wide = tensors["token_ids"].values
    if not np.issubdtype(wide.dtype, np.integer) or (wide.size and (wide.min() < 0 or wide.max() >= 1 << 31)):
        raise DriftError(f"{path}: token_ids must be integers from 0 to 2147483647")
    ids = wide.astype(np.int32).reshape(-1)
    states = tensors["hidden_states"]
    if states.values.ndim != 3 or len(ids) not in states.shape[:2]:
        raise DriftError(
            f"{path}: hidden_states is {states.shape}; expected three dimensions, one of {len(ids)} tokens"
        )
    # both orders of the first two dimensions are in use
    return ids, states.values.swapaxes(0, 1) if states.shape[0] == len(ids) else states.values, states.dtype


def _name(number: int) -> str:
    return f"layers.{number - 1}.output" if number else "embedding"


def _place(path: Path) -> tuple[int, str]:
    """Sort key: the number of the request, with which vLLM's file names begin."""
    number = re.match(r"\d+", path.name)
    return (int(number[0]) if number else 1 << 62, path.name)
