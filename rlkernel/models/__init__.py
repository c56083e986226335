"""Decoder models: a packed forward built from rlkernel.ops, families as data, Hugging Face load and save."""

from rlkernel.models.batch import BatchError, PackedBatch, PagedBatch
from rlkernel.models.checkpoint import CheckpointError, hf_tensors, load_model, save_model
from rlkernel.models.config import ConfigError, ModelConfig, Rope, load_config, preset
from rlkernel.models.decoder import Backbone, Decoder
from rlkernel.models.families import FAMILIES, PRESETS
from rlkernel.models.kv_cache import KVCache
from rlkernel.models.scalar_head import ScalarModel

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Backbone",
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "KVCache",
    "ModelConfig",
    "PackedBatch",
    "PagedBatch",
    "Rope",
    "ScalarModel",
    "hf_tensors",
    "load_config",
    "load_model",
    "preset",
    "save_model",
]
