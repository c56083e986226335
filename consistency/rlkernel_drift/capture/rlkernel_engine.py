"""Capture from rlkernel: the engine samples (rollout), and the training forward scores the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Manifest, Operators, build_capsule
from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch
from rlkernel_drift.capture.request import (
    Request,
    captured,
    counted_sequences,
    kept_sets,
    prompt_ids,
    recorded_rows,
    stream_of,
    tokens_only,
)
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.operators import stored
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints


def capture_rlkernel(request: Request) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Raises:
        DriftError: the model or the prompts cannot be read.
    """
    from rlkernel.models.checkpoint import hf_tensors

    model = _load(request)
    bare = tokens_only(request.tokens) if request.tokens else _sampled(request, model)
    streams = {**bare.logprobs, f"{request.phase}.processed": _scored(request, model, bare)}
    operators = _operators(request, model, bare)
    config = {"dtype": request.dtype, "attention_variant": model.attention_variant, "head_dtype": "float32"}
    weights = fingerprints(dict(hf_tensors(model))) if request.weights else None
    return captured(request, bare, streams, operators, "rlkernel", config, weights, contract=model.contract)


def _load(request: Request) -> Any:
    from rlkernel.models import CheckpointError, ConfigError, load_model
    from rlkernel.models.config import DTYPES

    try:
        return load_model(request.model, dtype=DTYPES[request.dtype], device=request.device)
    except (CheckpointError, ConfigError) as error:
        raise DriftError(str(error)) from None


def _sampled(request: Request, model: Any) -> Capsule:
    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.engine.sampling_params import mix_seed
    from rlkernel.ops import kept_to_ids

    ids = prompt_ids(request)
    s = request.sampling
    params = [
        SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            max_tokens=request.max_tokens,
            n=request.samples,
            seed=mix_seed(request.seed, i) % (1 << 64),
            return_kept=s.filters,
        )
        for i in range(len(ids))
    ]
    outputs = LLM(model).generate(ids, params)
    rows = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
    kept = None
    if s.filters:
        kept = []
        for _, completion in rows:
            assert completion.kept is not None
            flat, offsets = kept_to_ids(completion.kept, model.config.vocab_size)
            ends = offsets.tolist()
            kept.append([flat[a:b].tolist() for a, b in pairwise(ends)])
    return build_capsule(
        Manifest(),
        [list(prompt) for prompt, _ in rows],
        [c.token_ids for _, c in rows],
        {"recorded.processed": [c.logprobs_tensor.numpy() for _, c in rows]},
        kept=kept,
    )


def _scored(request: Request, model: Any, bare: Capsule) -> np.ndarray:
    """The training forward's log-probabilities of the counted tokens, over the recorded kept sets."""
    from rlkernel.models import PackedBatch
    from rlkernel.ops import ids_to_kept

    sequences = counted_sequences(bare)
    batch = PackedBatch.from_sequences([ids[:-1] for ids in sequences.ids], model.device)
    starts = np.concatenate([[0], np.cumsum([len(ids) - 1 for ids in sequences.ids])])
    rows = torch.cat([r + int(start) for r, start in zip(sequences.rows, starts, strict=False)])
    kept = None
    if bare.kept is not None:
        vocab_size = model.config.vocab_size
        kept = ids_to_kept(*kept_sets(bare, sequences, vocab_size), vocab_size).to(model.device)
    with torch.no_grad():
        hidden = model(batch).index_select(0, rows.to(model.device))
        targets = sequences.targets.to(model.device)
        logp = model.logprob(hidden, targets, request.sampling.temperature or 1.0, kept).logp
    return stream_of(bare, sequences, logp.float().cpu())


# ---- the engine against itself -------------------------------------------------------------------------------------


def tokens_of(request: Request) -> Capsule:
    """The tokens to score: those of the request's capsule, or newly sampled ones."""
    return request.tokens or _sampled(request, _load(request))


def scored_by_engine(request: Request, bare: Capsule, order: list[int], **engine: Any) -> Tensor:  # [N]
    """Log-probabilities of the counted tokens through the engine's paged forward.

    Args:
        order: in which the sequences are queued.
        engine: arguments of `rlkernel.engine.LLM`.
    """
    from rlkernel.engine import LLM

    sequences = sequences_of(bare)
    temperature = request.sampling.temperature or 1.0
    scores = LLM(_load(request), **engine).score([sequences.ids[i].tolist() for i in order], temperature)
    by_sequence = dict(zip(order, scores, strict=True))
    return torch.cat([by_sequence[i][sequences.rows[i]] for i in range(len(sequences))])


def scored_by_training(request: Request, bare: Capsule) -> np.ndarray:  # [N]
    """The same log-probabilities through the training forward."""
    sequences = sequences_of(bare)
    return _scored(request, _load(request), replace(bare, kept=None))[sequences.token.numpy()]


# ---- operators -----------------------------------------------------------------------------------------------------


def _operators(request: Request, model: Any, bare: Capsule) -> Operators:
    if request.operators == "none":
        return Operators()
    from rlkernel.models import PackedBatch

    rows, count = recorded_rows(request, bare)
    parts = [torch.from_numpy(bare.ids[bare.sequence(i)].astype(np.int64)) for i in range(count)]
    values: dict[str, Tensor] = {}
    handles = _attach(model, lambda name, value: values.update({name: value.detach().clone()}))
    try:
        with torch.no_grad():
            values["final_norm"] = model(PackedBatch.from_sequences(parts, model.device))
    finally:
        for handle in handles:
            handle.remove()
    keep = slice(None) if rows is None else torch.from_numpy(rows)
    if request.operators == "fingerprint":
        hashed = {n: row_fingerprints_torch(v, multipliers_torch(v.shape[1], v.device)) for n, v in values.items()}
        return Operators(rows, {name: stored(value[keep]) for name, value in hashed.items()})
    return Operators(rows, {name: stored(value.cpu()[keep]) for name, value in values.items()})


def _attach(model: Any, put: Callable[[str, Tensor], object]) -> list[Any]:
    """Hooks that call `put(name, value)`; fused projections are split, both parts of the residual stream added."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "self_attn.qkv_proj": ("input_norm", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
        "self_attn.o_proj": ("attention", {"o_proj": config.hidden_size}),
        "mlp.gate_up_proj": ("post_norm", dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)),
        "mlp.down_proj": ("activation", {"down_proj": config.hidden_size}),
    }
    handles = []
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}."
        for path, (before, sizes) in fused.items():
            handles.append(layer.get_submodule(path).register_forward_hook(around(put, at, before, sizes)))

        def residual(module: Any, args: Any, out: tuple[Tensor, Tensor], at: str = at) -> None:
            put(f"{at}attention_residual", out[1])
            put(f"{at}output", out[0] + out[1])

        handles.append(layer.register_forward_hook(residual))
    return handles


def around(put: Callable[[str, Tensor], object], at: str, before: str, sizes: dict[str, int]) -> Any:
    """A hook that records a module's input under one name, and parts of its output under others.

    Args:
        sizes: name -> width of each part of the output.
    """

    def hook(module: Any, args: Any, out: Tensor) -> None:
        put(at + before, args[0])
        for name, part in zip(sizes, out.split(list(sizes.values()), -1), strict=True):
            put(at + name, part)

    return hook
