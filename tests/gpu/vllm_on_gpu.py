"""vLLM on a GPU in a process of its own: `python vllm_on_gpu.py FOLDER ARGUMENTS` prints one line of JSON.

Compares sampled and prompt log-probabilities with `rlkernel.models` on the same GPU, before and after sleep mode, with
the V2 model runner, CUDA graphs and torch.compile. Each comparison is [differing numbers, numbers].
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]

LENGTHS = (17, 200, 777, 2300, 1, 64, 33, 1500)


def differing(one: list[float], other: list[float]) -> list[int]:
    assert len(one) == len(other) > 0
    return [sum(a != b for a, b in zip(one, other, strict=True)), len(one)]


def run(
    folder: Path, attention: str, preset: str, layers: int, sleep: bool, ranks: int = 1, leaves: int = 1
) -> dict[str, Any]:
    """Args: ranks, leaves: `tensor_parallel_size` and `tp_leaves`; the training forward runs on the first GPU."""
    from vllm import LLM, SamplingParams
    from vllm_arms import make_model

    import rlkernel_vllm
    from rlkernel.models import load_model
    from rlkernel.models import preset as named
    from rlkernel.models.batch import PackedBatch

    config = named(preset)
    config = replace(config, num_layers=layers, windows=config.windows[:layers], max_position_embeddings=4096)
    path = make_model(config, folder)
    llm = LLM(
        model=str(path), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=32, seed=0,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30,  # other tests share the GPU
        enable_sleep_mode=sleep, logprobs_mode="processed_logprobs",
        compilation_config={"cudagraph_capture_sizes": [1, 8, 32]}, tensor_parallel_size=ranks,
        additional_config={"use_rl_kernel_backend": True, "rl_kernel_attention": attention, "tp_leaves": leaves},
    )  # fmt: skip
    status = rlkernel_vllm.assert_active(llm)
    model = load_model(path, device="cuda", tp_leaves=leaves)
    model.set_attention_variant(attention)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 100000) for _ in range(n)] for n in LENGTHS]

    def generate(ids: list[list[int]], count: int, **sampling: Any) -> list[Any]:
        given = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, "seed": 1, **sampling}
        parameters = SamplingParams(max_tokens=count, **given)
        return llm.generate([{"prompt_token_ids": p} for p in ids], parameters, use_tqdm=False)

    def scores(ids: list[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            hidden = model(PackedBatch.from_sequences([ids], device="cuda"))[:-1]
            return model.logprob(hidden, torch.tensor(ids[1:], device="cuda"), temperature).logp.tolist()

    def against(temperature: float = 1.0) -> list[int]:
        ours, theirs = [], []
        for prompt, output in zip(prompts, generate(prompts, 40, temperature=temperature), strict=True):
            sampled = output.outputs[0]
            ours += [row[t].logprob for t, row in zip(sampled.token_ids, sampled.logprobs, strict=True)]
            theirs += scores([*prompt, *sampled.token_ids], temperature)[len(prompt) - 1 :]
        return differing(ours, theirs)

    out: dict[str, Any] = {"decode": against(), "temperature": against(0.6), "again, from the prefix cache": against()}
    sequence = prompts[3] + prompts[1]
    scored = generate([sequence, *prompts], 1, prompt_logprobs=0)[0]
    given = [row[t].logprob for t, row in zip(sequence[1:], scored.prompt_logprobs[1:], strict=True)]
    out["prompt"] = differing(given, scores(sequence))
    before = rlkernel_vllm.fingerprints(llm)
    out["weights"] = rlkernel_vllm.compare(before, rlkernel_vllm.fingerprints(_hf_names(model)))
    if sleep:
        for level in (1, 2):
            try:
                llm.sleep(level=level)
            except (
                AssertionError
            ) as error:  # vLLM measures the memory of all processes, and other tests may have allocated
                if "Memory usage increased" not in str(error):
                    raise
                llm.collective_rpc("wake_up")  # the workers sleep, but the executor has not recorded it
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
            out[f"after sleep {level}"] = against()
            out[f"weights after sleep {level}"] = rlkernel_vllm.compare(before, rlkernel_vllm.fingerprints(llm))
    llm.llm_engine.engine_core.shutdown()  # workers of other ranks hold this process's output open
    out["transformers"] = _through_transformers(path, attention, leaves, sequence, scores(sequence))
    return {**out, "runner": status.runner, "contract": status.contract, "exact": status.exact}


def _through_transformers(path: Path, attention: str, leaves: int, ids: list[int], expected: list[float]) -> list[int]:
    """Log-probabilities of transformers with rlkernel against those of `rlkernel.models`."""
    from transformers import AutoModelForCausalLM

    import rlkernel_transformers

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda")
    model = rlkernel_transformers.apply(plain, tp_leaves=leaves, attention_variant=attention)
    with torch.no_grad():
        found = rlkernel_transformers.token_logprobs(model, torch.tensor([ids], device="cuda")).logp[0, :-1]
    return differing(found.tolist(), expected)


def _hf_names(model: Any) -> dict[str, torch.Tensor]:
    from rlkernel.models.checkpoint import hf_tensors

    return dict(hf_tensors(model))


def main() -> None:
    from vllm_arms import entry_point

    folder = Path(sys.argv[1])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    sys.path.insert(0, str(entry_point(folder)))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *sys.path[1:4], os.environ.get("PYTHONPATH", "")])
    print("RESULT " + json.dumps(run(folder, **json.loads(sys.argv[2]))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
