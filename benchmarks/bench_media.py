"""Time and memory of 8 completions of one prompt with 4 images: rlkernel's media cache, without it, transformers, vLLM.

python benchmarks/bench_media.py MODEL [--arms cached uncached transformers vllm] [--side 560] [--tokens 64]

MODEL is a directory of Qwen2.5-VL or dense Qwen3-VL. Images are random pixels of side x side. Each arm runs in a
process of its own and prints one JSON line: seconds of the second call, and the device's peak memory in MiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

COMPLETIONS, IMAGES = 8, 4


def inputs(model: str, side: int) -> tuple[Any, str, list[Any]]:
    """Processor, text of the prompt, images."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(IMAGES)]
    content = [{"type": "image"}] * IMAGES + [{"type": "text", "text": "Describe the images."}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor, text, images


def rlkernel(model: str, side: int, tokens: int, cached: bool) -> Any:
    """A call that samples. Without the cache every completion is a prompt with media of its own."""
    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.models import load_model
    from rlkernel.multimodal import ProcessorFingerprint

    processor, text, images = inputs(model, side)
    batch = processor(text=[text], images=images, return_tensors="pt")
    decoder = load_model(model, device="cuda" if torch.cuda.is_available() else "cpu")
    grids = [tuple(grid) for grid in batch["image_grid_thw"].tolist()]
    patches = batch["pixel_values"].split([t * h * w for t, h, w in grids])
    llm = LLM(decoder, max_num_batched_tokens=8192, prefix_caching=cached)
    held: list[Any] = []

    def prompt(copy: int) -> list[int]:
        processor_of_copy = ProcessorFingerprint(f"copy {copy}")
        media = [decoder.media.register(p, g, processor_of_copy) for p, g in zip(patches, grids, strict=True)]
        held.extend(media)
        ids = batch["input_ids"][0].clone()
        rows = [i for medium in media for i in decoder.media.ids(medium)]
        ids[ids == decoder.multimodal.image_token_id] = torch.tensor(rows)
        found: list[int] = ids.tolist()
        return found

    prompts = [prompt(0)] if cached else [prompt(i) for i in range(COMPLETIONS)]
    params = SamplingParams(n=COMPLETIONS if cached else 1, max_tokens=tokens, ignore_eos=True)

    def call(held: list[Any] = held) -> None:  # which keeps the media
        llm.weights_updated()
        llm.generate(prompts, params)

    return call


def transformers(model: str, side: int, tokens: int) -> Any:
    """transformers' own generate with stock kernels."""
    from transformers import AutoModelForImageTextToText

    processor, text, images = inputs(model, side)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = AutoModelForImageTextToText.from_pretrained(model, dtype="auto").to(device).eval()
    batch = processor(text=[text], images=images, return_tensors="pt").to(device)
    length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    return lambda: decoder.generate(**batch, **length, do_sample=True, num_return_sequences=COMPLETIONS)


def vllm(model: str, side: int, tokens: int) -> Any:
    """vLLM's own kernels and encoder cache; its prefix cache is emptied before each call."""
    import vllm as engine

    _, text, images = inputs(model, side)
    llm = engine.LLM(model, limit_mm_per_prompt={"image": IMAGES}, gpu_memory_utilization=0.5, max_model_len=8192)
    params = engine.SamplingParams(n=COMPLETIONS, max_tokens=tokens, ignore_eos=True)

    def call() -> None:
        llm.reset_prefix_cache()
        llm.generate([{"prompt": text, "multi_modal_data": {"image": images}}], params, use_tqdm=False)

    return call


def measure(arm: str, model: str, side: int, tokens: int) -> dict[str, Any]:
    """Seconds of the second call of an arm, and its peak of memory."""
    if arm in ("cached", "uncached"):
        call = rlkernel(model, side, tokens, arm == "cached")
    else:
        call = {"transformers": transformers, "vllm": vllm}[arm](model, side, tokens)
    cuda = torch.cuda.is_available()
    call()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {"arm": arm, "seconds": time.perf_counter() - started, "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--arms", nargs="+", default=["cached", "uncached", "transformers", "vllm"])
    parser.add_argument("--side", type=int, default=560)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--here", action="store_true", help="measure the one arm in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.arms[0], args.model, args.side, args.tokens)))
        return
    for arm in args.arms:
        size = ["--side", str(args.side), "--tokens", str(args.tokens)]
        subprocess.run([sys.executable, __file__, args.model, "--arms", arm, *size, "--here"], check=True)


if __name__ == "__main__":
    main()
