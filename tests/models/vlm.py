"""Tiny random models of transformers' Qwen2.5-VL and Qwen3-VL classes, with processors and a tokenizer made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("qwen2_5_vl", "qwen3_vl")


def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["user assistant system describe the image answer is 42 click box video"] * 20, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
    )
    found.chat_template = TEMPLATE
    return found


def processor(kind: str) -> Any:
    """The family's own processor, with a budget of 4 to 64 patches."""
    import transformers as hf

    patch = 14 if kind == "qwen2_5_vl" else 16
    size = {"shortest_edge": patch * patch * 4, "longest_edge": patch * patch * 64}
    shared: dict[str, Any] = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    images = hf.Qwen2VLImageProcessor(size=size, **shared)
    if kind == "qwen2_5_vl":
        videos = hf.Qwen2VLVideoProcessor(size=size, do_sample_frames=False, **shared)
        return hf.Qwen2_5_VLProcessor(images, tokenizer(), videos, chat_template=TEMPLATE)
    size = {"shortest_edge": patch * patch * 8, "longest_edge": patch * patch * 512}
    videos = hf.Qwen3VLVideoProcessor(size=size, do_sample_frames=False, **shared)
    return hf.Qwen3VLProcessor(images, tokenizer(), videos, chat_template=TEMPLATE)


def config(kind: str, **text: Any) -> Any:
    import transformers as hf

    ids = {token: i for i, token in enumerate(SPECIAL)}
    shared: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    decoder: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    vision: dict[str, Any] = {"depth": 2, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "qwen2_5_vl":
        decoder |= {"rope_parameters": {**rope, "mrope_section": [4, 6, 6]}, "use_sliding_window": False, **text}
        vision |= {"hidden_size": 40, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return hf.Qwen2_5_VLConfig(text_config=decoder, vision_config=vision, **shared)
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    decoder |= {"rope_parameters": {**rope, **sections}, "head_dim": 32, **text}
    vision |= {"hidden_size": 32, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return hf.Qwen3VLConfig(text_config=decoder, vision_config=vision, **shared)


def model(kind: str, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """A model in eval mode, with weights large enough that images change every log-probability."""
    import transformers as hf

    cls = hf.Qwen2_5_VLForConditionalGeneration if kind == "qwen2_5_vl" else hf.Qwen3VLForConditionalGeneration
    torch.manual_seed(0)
    found = cls(config(kind, **text)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
            else:
                parameter.uniform_(0.5, 1.5)
    return found.to(dtype)


def save(kind: str, folder: Path, dtype: torch.dtype) -> Path:
    """The model and its processor on disk."""
    model(kind, dtype).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return folder


def image(seed: int, rows: int, columns: int, patch: int) -> Any:
    """A picture of random pixels."""
    shape = (patch * rows, patch * columns, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def video(seed: int, frames: int, patch: int) -> np.ndarray:
    """Frames [n, H, W, 3] of random pixels, 4 x 4 patches each."""
    return np.random.default_rng(seed).integers(0, 255, (frames, 4 * patch, 4 * patch, 3), dtype=np.uint8)


def metadata(frames: int, fps: float = 2.0) -> dict[str, Any]:
    """Of a video; at two frames per second a frame of the grid is one second."""
    return {"fps": fps, "duration": frames / fps, "total_num_frames": frames, "frames_indices": list(range(frames))}


def call(
    kind: str, images: list[tuple[int, int]], words: str, *, frames: int = 0, seed: int = 0, fps: float = 2.0
) -> dict[str, Tensor]:
    """One prompt through the processor: arguments of the model's forward.

    Args:
        images: rows and columns of each image, in patches.
        frames: of one video, 0 for none.
        fps: frames per second of the video.
    """
    made = processor(kind)
    patch = made.image_processor.patch_size
    content = [{"type": "image"}] * len(images) + [{"type": "video"}] * bool(frames) + [{"type": "text", "text": words}]
    text = made.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    media: dict[str, Any] = {}
    if images:
        media["images"] = [image(seed + i, rows, columns, patch) for i, (rows, columns) in enumerate(images)]
    if frames:
        media |= {"videos": [video(seed, frames, patch)], "video_metadata": [metadata(frames, fps)]}
    found = made(text=[text + " answer is 42"], return_tensors="pt", **media)
    return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in found.items()}


def raw_call(
    kind: str, images: list[tuple[int, int]], words: int, *, frames: int = 0, seed: int = 0, dtype: Any = torch.float32
) -> dict[str, Tensor]:
    """Arguments of a forward without a processor: random tokens and pixels, a video of 4 x 4 patches at the end."""
    generator = torch.Generator().manual_seed(seed)
    grids, clip = [(1, h, w) for h, w in images], [(frames // 2, 4, 4)] if frames else []
    start, end, picture, film = (SPECIAL.index(f"<|{name}|>") for name in _MARKS)
    ids = [1]
    for token, media in ((picture, grids), (film, clip)):
        for t, h, w in media:
            runs = [t] if kind == "qwen2_5_vl" else [1] * t  # Qwen3-VL has a run per pair of frames
            for n in runs:
                ids += [start, *[token] * (n * h * w // 4), end]
    ids += torch.randint(8, 300, (words,), generator=generator).tolist()
    tokens = torch.tensor([ids])
    out = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    out["mm_token_type_ids"] = ((tokens == picture) + 2 * (tokens == film)).int()
    elements = 6 * (14 if kind == "qwen2_5_vl" else 16) ** 2
    for pixels, name, media in (("pixel_values", "image", grids), ("pixel_values_videos", "video", clip)):
        if media:
            rows = sum(t * h * w for t, h, w in media)
            out[pixels] = torch.randn(rows, elements, generator=generator).to(dtype)
            out[f"{name}_grid_thw"] = torch.tensor(media)
    return out


_MARKS = ("vision_start", "vision_end", "image_pad", "video_pad")


def batch(calls: list[dict[str, Tensor]], side: str, extra: int = 3) -> dict[str, Tensor]:
    """The calls as rows of one, padded on a side to a length that is `extra` above the longest."""
    longest = max(c["input_ids"].shape[1] for c in calls) + extra

    def padded(row: Tensor) -> Tensor:
        missing = longest - row.shape[1]
        return torch.nn.functional.pad(row, (missing, 0) if side == "left" else (0, missing))

    out = {}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        out[name] = torch.cat([padded(c[name]) for c in calls])
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        parts = [c[name] for c in calls if name in c]
        if parts:
            out[name] = torch.cat(parts)
    return out
