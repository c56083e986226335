"""vLLM on several tensor-parallel ranks; `vllm_side.py` runs `ranks`."""

from __future__ import annotations

from itertools import chain
from typing import Any


def ranks(
    folder: str, vocabulary: int, size: int, leaves: int = 8, on: bool = True, updated: str = ""
) -> dict[str, Any]:
    """Sampled sequences of an engine on `size` ranks, and their log-probabilities as prompts.

    Args:
        on: with the flag.
        updated: folder of a checkpoint that is loaded afterwards.
    """
    from vllm_side import differing, engine, generate, prompted, prompts, sampled, tokens

    import rlkernel_vllm

    given = {"additional_config": {"use_rl_kernel_backend": True, "tp_leaves": leaves}} if on else {}
    llm = engine(folder, on or False, dtype="bfloat16", tensor_parallel_size=size, **given)
    ids = prompts(vocabulary)
    outputs = generate(llm, ids, 16, temperature=0.8, seed=5)
    sequences = [prompt + tokens(output) for prompt, output in zip(ids, outputs, strict=True)]
    scored = [prompted(output) for output in generate(llm, sequences, 1, prompt_logprobs=0)]
    out: dict[str, Any] = {
        "sequences": sequences,
        "scored": list(chain(*scored)),
        "decode against prefill": differing(
            list(chain(*map(sampled, outputs))), [value for row in scored for value in row[-16:]]
        ),
    }
    if on:
        out["status"] = vars(rlkernel_vllm.assert_active(llm))
        out["fingerprints"] = rlkernel_vllm.fingerprints(llm)
    if updated:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": updated})
        out["updated"] = rlkernel_vllm.fingerprints(llm)
    llm.llm_engine.engine_core.shutdown()  # waiting workers take processor time
    return out
