"""How many sampled log-probabilities of vLLM equal transformers' training forward, with and without rlkernel.

At least 50,000 sampled tokens per model at temperature 1: vLLM against transformers, both with rlkernel and both with
their defaults. Random weights at published shapes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from vllm_arms import Arm, make_model, memory, requests, temporary_folder

PRESETS = ("qwen3-0.6b", "qwen3-8b", "llama3-8b")
WORKLOAD = {"requests": 128, "prompt": (16, 1024), "output": (400, 400), "seed": 0, "vocabulary": 120000}
PAIRS: dict[str, tuple[str | None, str]] = {
    "rlkernel": ("split", "transformers with rlkernel"),
    "rlkernel fa3": ("fa3", "transformers with rlkernel, fa3"),
    "vllm default": (None, "transformers, sdpa"),
}
"""By engine: our variant of attention (None without rlkernel), and the training forward to compare with."""
USUAL = ("rlkernel", "vllm default")
BATCH = 8
"""Sequences per training forward."""


def packed(sequences: list[list[int]]) -> Iterator[list[list[int]]]:
    """Batches of sequences with similar length, to avoid padding."""
    order = sorted(sequences, key=len)
    return (order[i : i + BATCH] for i in range(0, len(order), BATCH))


def training_scores(model: Path, sequences: list[list[int]], ours: str | None) -> dict[tuple[int, ...], Any]:
    """Log-probability of every token after the first of each sequence, by transformers in bf16, right-padded."""
    import torch
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": "cuda"}
    if ours is None:
        settings["attn_implementation"] = "sdpa"
    found = AutoModelForCausalLM.from_pretrained(model, **settings)
    if ours is not None:
        import rlkernel_transformers

        rlkernel_transformers.apply(found, attention_variant=ours)
    out = {}
    for batch in packed(sequences):
        width = max(map(len, batch))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in batch], device="cuda")
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in batch], device="cuda")
        targets = ids.roll(-1, 1)
        with torch.no_grad():
            if ours is not None:
                logp = rlkernel_transformers.token_logprobs(
                    found, ids, mask, targets=targets.masked_fill(mask.roll(-1, 1) == 0, -100)
                ).logp
            else:
                hidden = found.model(input_ids=ids, attention_mask=mask).last_hidden_state
                logp = torch.stack([
                    found.lm_head(row).float().log_softmax(-1).gather(-1, t[:, None])[:, 0]
                    for row, t in zip(hidden, targets, strict=True)
                ])  # fmt: skip
        for sequence, row in zip(batch, logp.float().cpu(), strict=True):
            out[tuple(sequence)] = row[: len(sequence) - 1]
    del found
    torch.cuda.empty_cache()
    return out


def samples(model: Path, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Samples and log-probabilities of each engine; the engines start in parallel, because starting takes longest."""
    settings = {
        "model": str(model), "skip_tokenizer_init": True, "seed": 0, "max_model_len": 2048, "max_num_seqs": 128,
        "logprobs_mode": "processed_logprobs", **memory(24 << 30),
    }  # fmt: skip
    with ExitStack() as stack:
        engines = [stack.enter_context(Arm(arm, model.parent, settings)) for arm in arms]
        for engine in engines:
            engine.answer()
        asked = {"workload": WORKLOAD, "sampling": {"temperature": 1.0, "logprobs": 0}, "details": True}
        return {engine.name: engine.ask(**asked) for engine in engines}


def compare(model: Path, answer: dict[str, Any], ours: str | None) -> dict[str, Any]:
    """One engine's samples against one training forward."""
    import torch

    prompts, _ = requests(WORKLOAD)
    sequences = [p + s for p, s in zip(prompts, answer["sampled"], strict=True)]
    scores = training_scores(model, sequences, ours)
    sampled = torch.tensor([x for row in answer["logprobs"] for x in row])
    trained = torch.cat([scores[tuple(s)][len(p) - 1 :] for p, s in zip(prompts, sequences, strict=True)])
    difference = (sampled - trained).abs()
    return {
        "tokens": sampled.numel(),
        "mismatches": int((sampled != trained).sum()),
        "mean_abs": float(difference.mean()),
        "max_abs": float(difference.max()),
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--arms", nargs="+", choices=PAIRS, default=USUAL)
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_vllm_exact`, with presets and arms if they are not the usual ones."""
    parts = [] if set(args.preset) == set(PRESETS) else list(args.preset)
    parts += [] if set(args.arms) == set(USUAL) else [arm.replace(" ", "-") for arm in args.arms]
    return "_".join(("bench_vllm_exact", *parts))


def main() -> int:
    """Prints mismatches and writes the result."""
    args = options().parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench_vllm_exact: torch sees no CUDA GPU; nothing is measured")
        return 0
    folder, found = Path(temporary_folder()), []
    for preset in args.preset:
        model = make_model(preset, folder)
        answers = samples(model, args.arms)
        for arm in args.arms:
            ours, trainer = PAIRS[arm]
            row = {"op": f"sampled log-probabilities, {preset}", "dtype": "bfloat16", "ours": arm, "baseline": trainer}
            found.append({**row, **compare(model, answers[arm], ours)})
            print(found[-1], flush=True)
        shutil.rmtree(model)
    from importlib.metadata import version

    from results_io import write_result

    print(f"wrote {write_result(result_name(args), found, vllm=version('vllm'), transformers=version('transformers'))}")
    return int(any(row["mismatches"] for row in found if PAIRS[row["ours"]][0] is not None))


if __name__ == "__main__":
    sys.exit(main())
