"""Capture from vLLM: samples with a seed a request, then scores its own tokens as prompts, without prefix cache.

The model runs as the installed vLLM runs it; with the plugin of rlkernel installed and asked for, that is its model.
Operators are not recorded here: vLLM's own hidden-state files are read by `compare` (`inputs.hidden_states`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from rlkernel_drift.capsule import Capsule, Manifest, Operators, build_capsule
from rlkernel_drift.capture.request import Request, Texts, manifest_of, read_prompts, weights_of
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints, read_weights

_SETTINGS = ("VLLM_BATCH_INVARIANT", "VLLM_ATTENTION_BACKEND")


def capture_vllm(request: Request) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Raises:
        DriftError: vLLM is missing, or operators were asked for.
    """
    try:
        from vllm import LLM
    except ImportError:
        raise DriftError("this engine needs vLLM: pip install 'rlkernel[vllm]'") from None
    if request.operators != "none":
        raise DriftError("operators are not recorded from vLLM; give its hidden-state file to compare instead")
    engine = LLM(
        model=str(request.model),
        dtype=request.dtype,
        seed=request.seed,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    texts = Texts(request.model)
    if request.tokens is None:
        bare = _sampled(request, engine, texts)
    else:
        bare = replace(request.tokens, logprobs={}, operators=Operators(), distribution=None, manifest=Manifest())
    streams = dict(bare.logprobs)
    phase = "train" if request.side == "train" else "prefill"
    streams[f"{phase}.raw"] = _scored(engine, bare)
    config: dict[str, Any] = {"dtype": request.dtype, "prefix_caching": False}
    config |= {name.lower(): os.environ[name] for name in _SETTINGS if name in os.environ}
    weights = weights_of(fingerprints(read_weights(request.model))) if request.weights else None
    manifest = manifest_of(request, "vllm", config, weights=weights, vocabulary=texts.vocabulary(bare.ids))
    return replace(bare, manifest=manifest, logprobs=streams)


def _sampled(request: Request, engine: Any, texts: Texts) -> Capsule:
    from vllm import SamplingParams

    if request.prompts is None:
        raise DriftError("capture needs --prompts, or --tokens with a capsule")
    prompts = [texts.ids(p) for p in read_prompts(request.prompts) for _ in range(request.samples)]
    s = request.sampling
    params = [
        SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k or -1,
            top_p=s.top_p,
            min_p=s.min_p,
            max_tokens=request.max_tokens,
            seed=request.seed + i,
            logprobs=0,
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    completions = [list(o.outputs[0].token_ids) for o in outputs]
    values = [
        [float(step[token].logprob) for step, token in zip(o.outputs[0].logprobs, c, strict=True)]
        for o, c in zip(outputs, completions, strict=True)
    ]
    return build_capsule(Manifest(), prompts, completions, {"recorded.processed": values})


def _scored(engine: Any, bare: Capsule) -> np.ndarray:
    """Prompt log-probabilities of the counted tokens: always those of the raw logits."""
    from vllm import SamplingParams

    sequences = sequences_of(bare)
    if not sequences.counted:
        raise DriftError("there is no token to score: every mask is empty")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = [s.tolist() for s in sequences.ids]
    outputs = engine.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    values = [
        float(o.prompt_logprobs[int(row) + 1][tokens[int(row) + 1]].logprob)
        for o, tokens, rows in zip(outputs, ids, sequences.rows, strict=True)
        for row in rows
    ]
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = np.array(values, np.float32)
    return stream
