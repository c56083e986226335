"""Directories of Qwen2.5-VL with random weights, a tokenizer and an image processor, made without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

PRESETS: dict[str, dict[str, Any]] = {
    # config.json of https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct, except the ids of tokens
    "qwen2.5-vl-3b": {
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    }
}
PRESETS["tiny"] = {
    **PRESETS["qwen2.5-vl-3b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "torch_dtype": "float32",
    "vocab_size": 320,
    "vision_config": {
        **PRESETS["qwen2.5-vl-3b"]["vision_config"],
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
}
IMAGE_PROCESSOR = {
    # preprocessor_config.json of the same model, except max_pixels, which the model card recommends for less memory
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 1280 * 28 * 28,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "patch_size": 14,
    "processor_class": "Qwen2_5_VLProcessor",
    "temporal_patch_size": 2,
}


def make(preset: str, folder: Path, device: str) -> Path:
    """Saves a model of a preset's shape with the weights of `draw_weights_`."""
    import torch
    from models import vlm
    from vllm_arms import draw_weights_

    from rlkernel.models import save_model
    from rlkernel.models.vision_config import from_hf_multimodal
    from rlkernel.models.vision_decoder import VisionDecoder

    tokenizer = vlm.tokenizer()
    ids = {f"{name}_token_id": vlm.SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": vlm.SPECIAL.index(f"<|{name}_pad|>") for name in ("image", "video")}
    with torch.device(device):
        model = VisionDecoder(from_hf_multimodal({**PRESETS[preset], **ids, "eos_token_id": tokenizer.eos_token_id}))
    draw_weights_(model, device)
    out = save_model(model, folder / preset)
    tokenizer.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=1) + "\n")
    return out
