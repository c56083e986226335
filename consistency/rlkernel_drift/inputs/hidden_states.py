"""vLLM's own hidden-state files (`extract_hidden_states`): token ids and the residual stream after chosen layers.

They have no log-probabilities; they locate, beside a capsule of the same tokens. Both orders of the dimensions are in
use ([layers, tokens, width] and [tokens, layers, width]); the token count tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlkernel_drift.capsule import Capsule, Manifest, Operators, Tensor, describe_operators
from rlkernel_drift.capsule.limits import DEFAULT_LIMITS
from rlkernel_drift.capsule.tensor_file import parse_tensors, read_bytes
from rlkernel_drift.errors import DriftError


def is_hidden_states(path: Path) -> bool:
    """Whether a file is one of vLLM's."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    return b'"hidden_states"' in head and b'"token_ids"' in head


def read_hidden_states(path: Path, layers: Sequence[int] | None = None) -> Capsule:
    """A capsule of one sequence with the layers' outputs.

    Args:
        layers: numbers of the recorded layers; default the first ones, in order. An output of layer k is what the
            engine has after it, both parts of the residual stream added.

    Raises:
        CapsuleError: a malformed file. DriftError: shapes that do not fit each other.
    """
    tensors = parse_tensors(read_bytes(path, DEFAULT_LIMITS.file_bytes, "hidden states"), path.name)
    ids = tensors["token_ids"].values.astype(np.int32).reshape(-1)
    states = tensors["hidden_states"]
    if states.values.ndim != 3 or len(ids) not in states.shape[:2]:
        raise DriftError(
            f"{path}: hidden_states is {states.shape}; expected three dimensions, one of {len(ids)} tokens"
        )
    values = states.values if states.shape[1] == len(ids) else states.values.swapaxes(0, 1)
    numbers = list(layers) if layers is not None else list(range(len(values)))
    if len(numbers) != len(values):
        raise DriftError(f"{path} holds {len(values)} layers; {len(numbers)} numbers were given")
    operators = Operators(
        None,
        {
            f"layers.{number}.output": Tensor(np.ascontiguousarray(rows), states.dtype)
            for number, rows in zip(numbers, values, strict=True)
        },
    )
    capsule = Capsule(
        manifest=Manifest(side="rollout", engine="vllm", operators=describe_operators(operators)),
        ids=ids,
        positions=np.arange(len(ids), dtype=np.int32),
        cu_seqlens=np.array([0, len(ids)], np.int64),
        mask=np.ones(len(ids), np.bool_),
        logprobs={},
        operators=operators,
    )
    capsule.validate()
    return capsule
