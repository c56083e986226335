"""vLLM on several tensor-parallel ranks; `vllm_side.py` runs `ranks`."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


def ranks(
    folder: str,
    vocabulary: int,
    size: int,
    leaves: int = 8,
    on: bool = True,
    trainer: bool = False,
    updated: str = "",
    **changes: Any,
) -> dict[str, Any]:
    """Tokens and log-probabilities of an engine on `size` ranks.

    Args:
        on: with the flag. trainer: also compares with training forwards on one device.
        updated: folder of a checkpoint that is loaded afterwards.
    """
    from vllm_side import Trainer, against, differing, engine, generate, prompted, prompts, sampled, tokens

    import rlkernel_vllm

    given = {"additional_config": {"use_rl_kernel_backend": True, "tp_leaves": leaves}} if on else {}
    llm = engine(folder, on or False, dtype="bfloat16", tensor_parallel_size=size, **given, **changes)
    ids = prompts(vocabulary)
    outputs = generate(llm, ids, 16, temperature=0.8, seed=5)
    scored = generate(llm, [p + tokens(o) for p, o in zip(ids, outputs, strict=True)], 1, prompt_logprobs=0)
    out: dict[str, Any] = {
        "tokens": list(chain(*map(tokens, outputs))),
        "sampled": list(chain(*map(sampled, outputs))),
        "prompt": list(chain(*map(prompted, scored))),
    }
    if on:
        out["status"] = vars(rlkernel_vllm.assert_active(llm))
        out["fingerprints"] = rlkernel_vllm.fingerprints(llm)
    if updated:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": updated})
        out["updated"] = rlkernel_vllm.fingerprints(llm)
    llm.llm_engine.engine_core.shutdown()  # waiting workers take processor time
    if trainer:
        side = Trainer(folder, torch.bfloat16, leaves)
        out["trained"] = against(side, ids, outputs)
        expected = [side.scores(p + tokens(o)) for p, o in zip(ids, outputs, strict=True)]
        out["trained prompt"] = differing(out["prompt"], list(chain(*expected)))
    return out
