"""Scenario of `vllm_side.py`: prompts with images and a video in vLLM, against transformers after `apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CASES: tuple[dict[str, Any], ...] = (
    {"images": [(4, 6), (6, 4)], "words": "describe"},
    {"images": [], "words": "click box", "frames": 8, "seed": 3},
    {"images": [(4, 4)], "words": "video", "frames": 8, "seed": 5},
    {"images": [], "words": "the answer"},
)
"""Several images, one video of 8 frames, both, text alone."""


def item(
    kind: str, images: list[tuple[int, int]], words: str, frames: int = 0, seed: int = 0, fps: float = 2.0
) -> dict[str, Any]:
    """A prompt of vLLM with the media of `vlm.call`."""
    from models import vlm

    made = vlm.processor(kind)
    patch = made.image_processor.patch_size
    content = [{"type": "image"}] * len(images) + [{"type": "video"}] * bool(frames) + [{"type": "text", "text": words}]
    text = made.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    media: dict[str, Any] = {}
    if images:
        media["image"] = [vlm.image(seed + i, h, w, patch) for i, (h, w) in enumerate(images)]
    if frames:
        about = {**vlm.metadata(frames, fps), "video_backend": "opencv", "do_sample_frames": False}
        media["video"] = [(vlm.video(seed, frames, patch), about)]
    return {"prompt": text + " answer is 42", **({"multi_modal_data": media} if media else {})}


def media(
    folder: str,
    kind: str,
    dtype: str,
    on: bool = True,
    chunk: int = 512,
    engine: dict[str, Any] | None = None,
    fps: float = 2.0,
) -> dict[str, Any]:
    """Log-probabilities of prompts and samples, batched, in chunks of `chunk` tokens, and again from both caches."""
    from models import vlm
    from transformers import AutoModelForImageTextToText
    from vllm import SamplingParams
    from vllm_side import ENGINE, prompted, sampled, tokens

    import rlkernel_transformers
    import rlkernel_vllm

    llm = rlkernel_vllm.LLM(
        model=folder, use_rl_kernel_backend=on, dtype=dtype, max_num_batched_tokens=chunk, seed=0,
        limit_mm_per_prompt={"image": 2, "video": 1}, **{**ENGINE, "max_model_len": 256, **(engine or {})},
    )  # fmt: skip
    parameters = SamplingParams(max_tokens=6, seed=1, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    run = lambda given: llm.generate(given, parameters, use_tqdm=False)
    outputs = run([item(kind, **case, fps=fps) for case in CASES])
    cached = llm.generate(
        [item(kind, **CASES[0])],
        SamplingParams(max_tokens=6, seed=1, logprobs=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )[0]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rlkernel_transformers.apply(model.to(device))
    found: dict[str, Any] = {"cached tokens": cached.num_cached_tokens}
    for case, output in zip(CASES, outputs, strict=True):
        given = vlm.call(kind, **case, fps=fps)
        assert given["input_ids"][0].tolist() == output.prompt_token_ids, "the processors disagree"
        new = tokens(output)
        ids = torch.tensor([output.prompt_token_ids + new])
        kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(new)))
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        given = {name: value.to(device) for name, value in given.items()}
        with torch.no_grad():
            wanted = rlkernel_transformers.token_logprobs(model, **given).logp[0, :-1].tolist()
        own = prompted(output) + sampled(output)
        name = f"{len(case['images'])} images, {case.get('frames', 0)} frames"
        found[name] = [sum(a != b for a, b in zip(own, wanted, strict=True)), len(own)]
    again = [sampled(cached), sampled(outputs[0])]
    found["prefix and processor cache"] = [sum(a != b for a, b in zip(*again, strict=True)), len(again[0])]
    if on:
        engine, trainer = rlkernel_vllm.fingerprints(llm), rlkernel_vllm.fingerprints(model)
        found["weights"] = [len(rlkernel_vllm.compare(engine, trainer)), len(engine)]
        found["exact"] = rlkernel_vllm.status(llm).exact
    return found


def saved(folder: Path, kind: str, dtype: str) -> Path:
    from models import vlm

    return vlm.save(kind, folder, getattr(torch, dtype))
