"""Weights on disk and edits of weights that hypotheses need: fingerprints, quantisation, LoRA adapters."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlkernel_drift.capsule import WeightFingerprint
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
from rlkernel_drift.capsule.tensor_file import DEFAULT_LIMITS, parse_tensors, read_bytes
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import ReferenceModel
from rlkernel_drift.scoring.operators import as_torch, stored

Quantisation = Literal["fp8", "fp8 per tensor", "fp8 per row", "int8 per row"]
QUANTISATIONS: tuple[Quantisation, ...] = ("fp8", "fp8 per tensor", "fp8 per row", "int8 per row")
_FP8_MAX = 448.0


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a model directory's safetensors files, on the CPU.

    Raises:
        DriftError, CapsuleError: a file is missing or malformed.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DriftError(f"{path} has no safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        data = read_bytes(file, 1 << 40, "weights")
        tensors |= {name: as_torch(value) for name, value in parse_tensors(data, file.name, DEFAULT_LIMITS).items()}
    return tensors


def fingerprints(tensors: dict[str, Tensor]) -> dict[str, WeightFingerprint]:
    """Fingerprint of each tensor."""
    named = sorted(tensors.items())
    with ThreadPoolExecutor() as pool:  # hashing and numpy release the GIL
        found = pool.map(lambda item: weight_fingerprint(stored(item[1])), named)
        return {name: value for (name, _), value in zip(named, found, strict=True)}


def state_of(model: ReferenceModel) -> dict[str, Tensor]:
    """Weights as a checkpoint stores them: a tied head is not a tensor of its own."""
    state = dict(model.model.state_dict())
    if model.tied:
        state.pop("lm_head.weight", None)
    return state


def linear_names(model: ReferenceModel) -> list[str]:
    """Names of the projections' weights inside the layers."""
    return [
        name
        for name, value in model.model.named_parameters()
        if ".layers." in name and name.endswith("proj.weight") and value.dim() == 2
    ]


def quantised(weight: Tensor, how: Quantisation) -> Tensor:  # [N, K] -> [N, K]
    """The weight rounded to eight bits and converted back."""
    w = weight.float()
    if how == "fp8":
        return w.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(weight.dtype)
    peak = w.abs().max() if how == "fp8 per tensor" else w.abs().amax(1, keepdim=True)
    peak = peak.clamp(min=1e-12)
    if how == "int8 per row":
        scale = peak / 127
        return ((w / scale).round().clamp(-127, 127) * scale).to(weight.dtype)
    scale = peak / _FP8_MAX
    return ((w / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: what it adds to each weight at its own scale, by the weight's name."""

    updates: dict[str, Tensor]

    def merged(self, model: ReferenceModel, factor: float = 1.0) -> dict[str, Tensor]:
        """Weights of the model plus `factor` times the adapter's update."""
        return {name: model.parameter(name) + factor * update for name, update in self.updates.items()}


def read_adapter(path: Path, model: ReferenceModel) -> Adapter:
    """A PEFT adapter directory.

    Raises:
        DriftError: files are missing, or name modules that the model does not have.
    """
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DriftError(f"{path} is not a LoRA adapter: {error}") from None
    rank, alpha = float(config["r"]), float(config["lora_alpha"])
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    tensors = read_weights(path)
    names = {name for name, _ in model.model.named_parameters()}
    updates = {}
    for key, a in tensors.items():
        if ".lora_A" not in key:
            continue
        b = tensors.get(key.replace(".lora_A", ".lora_B"))
        name = key.split(".lora_A")[0].removeprefix("base_model.model.") + ".weight"
        if b is None or name not in names:
            raise DriftError(f"{path}: {key} matches no weight of the model")
        updates[name] = scale * (b.float() @ a.float())
    if not updates:
        raise DriftError(f"{path} holds no LoRA tensors")
    return Adapter(updates)
