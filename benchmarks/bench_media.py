"""Time and memory of 8 completions of one prompt with 4 images: with the media cache, without, transformers, vLLM.

A model of a preset's shape is made with random weights. Each arm runs in a process of its own. A call starts with new
images of random pixels, so that it includes the image processor and no cache of an earlier call helps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from processes import Groups, exit_on_signals
from vllm_arms import temporary_folder
from vlm_models import PRESETS, make

COMPLETIONS, IMAGES, PAGE = 8, 4, 16
WARM, CALLS = 2, 3  # the first call compiles kernels, the second captures graphs
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"<|im_start|>user\n{PICTURE * IMAGES}Describe the images.<|im_end|>\n<|im_start|>assistant\n"
ARMS = {
    "cached": "rlkernel",
    "uncached": "rlkernel, each completion with media of its own",
    "transformers": "transformers",
    "vllm": "vLLM",
}
PACKAGES = ("transformers", "torchvision", "vllm")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's memory is then in torch's statistics of the arm's process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True)
class Work:
    """What every arm does.

    Attributes:
        model: its directory.
        side: of the square images, in pixels.
        tokens: of a completion.
    """

    model: str
    device: str
    side: int
    tokens: int

    def images(self, seed: int) -> list[Any]:
        """Random pixels."""
        import numpy as np
        from PIL import Image

        shape = (self.side, self.side, 3)
        random = np.random.default_rng(seed)
        return [Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)) for _ in range(IMAGES)]

    def pool(self, prompt: int, is_shared: bool) -> int:
        """KV pages that the completions need; full pages of a shared prompt count once."""
        own = prompt % PAGE if is_shared else prompt
        return (prompt - own) // PAGE + COMPLETIONS * (-(-(own + self.tokens) // PAGE) + 1)


class Processor:
    """A directory's image processor and tokenizer. The joint processor also has one of videos, for torchvision."""

    def __init__(self, model: str) -> None:
        import transformers as hf

        name = "Qwen2VLImageProcessor" if find_spec("torchvision") else "Qwen2VLImageProcessorPil"
        self.images = getattr(hf, name).from_pretrained(model)
        self.tokenizer = hf.AutoTokenizer.from_pretrained(model)
        self.placeholder = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __call__(self, images: list[Any]) -> dict[str, Any]:
        """`pixel_values`, `image_grid_thw`, and `input_ids` [L] with one placeholder for each feature."""
        import torch

        found = dict(self.images(images=images, return_tensors="pt"))
        counts = iter((found["image_grid_thw"].prod(1) // self.images.merge_size**2).tolist())
        rows = [[i] * next(counts) if i == self.placeholder else [i] for i in self.tokenizer(PROMPT)["input_ids"]]
        return {**found, "input_ids": torch.tensor([i for row in rows for i in row])}

    @property
    def name(self) -> str:
        """Class of the image processor, and the library that resizes."""
        library = "torchvision" if find_spec("torchvision") else "Pillow"
        return f"{type(self.images).__name__}, {library} {version(library)}"


@dataclass(frozen=True)
class Arm:
    """An implementation that is ready to run.

    Attributes:
        call: makes the completions from images.
        pool_bytes: of its KV pool, if it has one of fixed size.
        uncounted_bytes: of memory that torch's statistics lack.
    """

    call: Callable[[list[Any]], None]
    pool_bytes: int | None = None
    uncounted_bytes: Callable[[], int] = lambda: 0


def rlkernel(work: Work, processor: Processor, prompt: int, is_cached: bool) -> Arm:
    """rlkernel's engine. Without the cache each completion is a prompt of its own, with media of its own."""
    import torch

    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.models import KVCache, load_model
    from rlkernel.multimodal import ProcessorFingerprint

    decoder, pages = load_model(work.model, device=work.device), work.pool(prompt, is_cached)
    sizes = {"page_size": PAGE, "num_pages": pages, "max_model_len": prompt + work.tokens}
    llm = LLM(decoder, max_num_seqs=COMPLETIONS, prefix_caching=is_cached, **sizes)
    params = SamplingParams(n=COMPLETIONS if is_cached else 1, max_tokens=work.tokens, ignore_eos=True)

    def call(images: list[Any]) -> None:
        found = processor(images)
        grids = [tuple(grid) for grid in found["image_grid_thw"].tolist()]
        patches = found["pixel_values"].split([t * h * w for t, h, w in grids])
        prompts, held = [], []
        for copy in range(1 if is_cached else COMPLETIONS):
            fingerprint = ProcessorFingerprint(f"copy {copy}")
            media = [decoder.media.register(p, g, fingerprint) for p, g in zip(patches, grids, strict=True)]
            ids = found["input_ids"].clone()
            ids[ids == processor.placeholder] = torch.tensor([i for m in media for i in decoder.media.ids(m)])
            prompts.append(ids.tolist())
            held.append(media)  # until the call ends
        llm.generate(prompts, params)

    return Arm(call, pages * KVCache.page_bytes(decoder.config, PAGE, decoder.dtype), lambda: llm.uncounted_bytes)


def transformers(work: Work, processor: Processor, prompt: int) -> Arm:
    """transformers' `generate` with its default kernels."""
    import torch
    from transformers import AutoModelForImageTextToText

    decoder = AutoModelForImageTextToText.from_pretrained(work.model, dtype="auto").to(work.device).eval()
    options: dict[str, Any] = {
        "max_new_tokens": work.tokens, "num_return_sequences": COMPLETIONS, "do_sample": True, "top_k": 0,
        "suppress_tokens": processor.tokenizer.all_special_ids,  # random weights would end or name images anywhere
        "pad_token_id": processor.tokenizer.pad_token_id,
    }  # fmt: skip

    def call(images: list[Any]) -> None:
        found = processor(images)
        ids = found.pop("input_ids")[None]
        kinds = (ids == processor.placeholder).int()
        given = {**found, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        out = decoder.generate(**{name: value.to(work.device) for name, value in given.items()}, **options)
        assert out.shape == (COMPLETIONS, prompt + work.tokens), out.shape

    return Arm(call)


def vllm(work: Work, processor: Processor, prompt: int) -> Arm:
    """vLLM with its defaults. Its KV pool has the size of the arm without rlkernel's cache."""
    from vllm import LLM, SamplingParams

    from rlkernel.models import KVCache
    from rlkernel.models.vision_config import from_hf_multimodal

    text = from_hf_multimodal(json.loads((Path(work.model) / "config.json").read_text())).text
    pool = work.pool(prompt, False) * KVCache.page_bytes(text, PAGE, text.dtype)
    llm = LLM(
        work.model, limit_mm_per_prompt={"image": IMAGES, "video": 0}, max_model_len=prompt + work.tokens,
        max_num_seqs=COMPLETIONS, kv_cache_memory_bytes=pool, gpu_memory_utilization=0.05,
    )  # fmt: skip
    params = SamplingParams(n=COMPLETIONS, max_tokens=work.tokens, ignore_eos=True, detokenize=False)

    def call(images: list[Any]) -> None:
        given = {"prompt": PROMPT, "multi_modal_data": {"image": images}}
        (out,) = llm.generate([given], params, use_tqdm=False)
        found = (len(out.prompt_token_ids), [len(one.token_ids) for one in out.outputs])
        assert found == (prompt, [work.tokens] * COMPLETIONS), found

    return Arm(call, pool)


def measure(name: str, work: Work) -> dict[str, Any]:
    """One arm in this process: seconds of a call (median), and the peak of memory over the calls."""
    import torch

    processor = Processor(work.model)
    prompt = processor(work.images(0))["input_ids"].numel()
    if name in ("cached", "uncached"):
        arm = rlkernel(work, processor, prompt, name == "cached")
    else:
        arm = {"transformers": transformers, "vllm": vllm}[name](work, processor, prompt)
    is_gpu, seconds = work.device == "cuda", []
    for number in range(WARM + CALLS):
        if number == WARM and is_gpu:
            torch.cuda.reset_peak_memory_stats()
        images = work.images(number)
        started = time.perf_counter()
        arm.call(images)
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() + arm.uncounted_bytes() if is_gpu else None
    gib = lambda size: None if size is None else size / 2**30
    return {
        "prompt_tokens": prompt,
        "sampled_tokens": COMPLETIONS * work.tokens,
        "seconds": statistics.median(seconds[WARM:]),
        "peak_gib": gib(peak),
        "kv_pool_gib": gib(arm.pool_bytes),
        "processor": processor.name,
        "versions": {name: sys.modules[name].__version__ for name in PACKAGES if sys.modules.get(name)},
    }


def measure_in_process(name: str, work: Work, folder: Path, limit: float) -> dict[str, Any]:
    """`measure` in a new process; if it fails, its reason."""
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, str(HERE / "bench_media.py"), "--measure", name, str(out), json.dumps(vars(work))]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "vllm")}
    try:
        with log.open("w") as file:
            Groups().run(command, limit, env=environment, stdout=file, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {limit:.0f} s"}
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    text = log.read_text()
    print(text[-6000:])
    return {"failed": " ".join(text.split())[-200:] or "no output"}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--preset", choices=[name for name in PRESETS if name != "tiny"], default="qwen2.5-vl-3b")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, also on the CPU, and write no result")
    parser.add_argument("--model", help="a directory of Qwen2.5-VL or dense Qwen3-VL instead of a preset")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--side", type=int, help="of an image in pixels; default 560")
    parser.add_argument("--tokens", type=int, help="of a completion; default 64")
    parser.add_argument("--limit", type=float, default=180, help="seconds of an arm, after which it is stopped")
    parser.add_argument("--measure", nargs=3, metavar=("ARM", "FILE", "WORK"), help=argparse.SUPPRESS)
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_media`, with what is not the default."""
    changed = [Path(args.model).name] if args.model else []
    changed += [] if args.arms == list(ARMS) else args.arms
    changed += [f"{name}{value}" for name in ("side", "tokens") if (value := getattr(args, name)) is not None]
    return "_".join(("bench_media", *changed))


def main() -> int:
    """Prints one line per arm and writes the result. Exit status 1 if an arm of rlkernel failed."""
    args = options().parse_args()
    if args.measure:
        name, out, work = args.measure
        Path(out).write_text(json.dumps(measure(name, Work(**json.loads(work)))))
        return 0
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        print("bench_media: torch sees no CUDA GPU; nothing is measured (a trial run: --tiny)")
        return 0
    sizes = {"side": args.side or (112 if args.tiny else 560), "tokens": args.tokens or (8 if args.tiny else 64)}
    folder, rows, processors, versions = Path(temporary_folder()), [], set(), {}
    try:
        model = args.model or str(make("tiny" if args.tiny else args.preset, folder, device))
        torch.cuda.empty_cache()
        for name in args.arms:
            found = measure_in_process(name, Work(model, device, **sizes), folder, args.limit)
            processors |= {found.pop("processor")} if "processor" in found else set()
            versions |= found.pop("versions", {})
            rows.append({"arm": ARMS[name], **found})
            print(rows[-1], flush=True)
    finally:
        shutil.rmtree(folder)
    from results_io import write_result

    from rlkernel.environment import environment

    about = {"model": args.model or args.preset, "completions": COMPLETIONS}
    about |= {"images": IMAGES, **sizes, "processor": sorted(processors), "calls": CALLS}
    about["versions"] = environment()["versions"] | versions
    if not args.tiny:
        print(f"wrote {write_result(result_name(args), rows, **about)}")
    return int(any("failed" in row for row in rows if row["arm"].startswith("rlkernel")))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
