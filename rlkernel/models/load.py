"""Loads a Hugging Face directory as the model that its `config.json` describes."""

from __future__ import annotations

from pathlib import Path

import torch

from rlkernel.data.tokenizer import local_directory
from rlkernel.models.checkpoint import load_as
from rlkernel.models.config import read_json
from rlkernel.models.decoder import Decoder
from rlkernel.models.vision_config import VISION_FAMILIES
from rlkernel.models.vision_decoder import VisionDecoder


def load_model(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", *, tp_leaves: int = 1
) -> Decoder:
    """Loads a Hugging Face model directory.

    Args:
        path: directory with `config.json` and safetensors, single or sharded, or the name of a model in the local cache
            of the Hugging Face hub (`data.tokenizer.local_directory`).
        dtype: float32, bfloat16 or float16, to which stored tensors are converted; default the dtype in `config.json`,
            else that of the stored embedding.
        device: where the model goes.
        tp_leaves: as in `ModelConfig`.

    Raises:
        ConfigError: `config.json` is missing or describes a model that is not supported.
        CheckpointError: a shard is missing or truncated; a tensor is missing, superfluous, not finite, or of a wrong
            shape or unsupported dtype. The message names file and tensor.
    """
    config = local_directory(path) / "config.json"
    if config.is_file() and str(read_json(config).get("model_type")) in VISION_FAMILIES:
        return VisionDecoder.load(local_directory(path), dtype, device, tp_leaves=tp_leaves)
    return load_as(Decoder, path, dtype, device, tp_leaves=tp_leaves)
