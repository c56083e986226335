"""Decoder models: a packed forward built from rlkernel.ops, families as data, Hugging Face load and save."""

from rlkernel.models.batch import BatchError, PackedBatch, PagedBatch
from rlkernel.models.checkpoint import CheckpointError, hf_tensors, save_model
from rlkernel.models.config import ConfigError, ModelConfig, Rope, load_config, preset
from rlkernel.models.decoder import Backbone, Decoder
from rlkernel.models.families import FAMILIES, PRESETS
from rlkernel.models.kv_cache import KVCache
from rlkernel.models.load import load_model
from rlkernel.models.lora import add_adapters, base_of, frozen, merge_adapters_, save_adapter
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
    "add_adapters",
    "base_of",
    "frozen",
    "hf_tensors",
    "load_config",
    "load_model",
    "merge_adapters_",
    "preset",
    "save_adapter",
    "save_model",
]
