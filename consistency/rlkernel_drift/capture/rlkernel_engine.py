"""Capture from rlkernel: the engine samples (rollout), the training forward scores given tokens (train)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Manifest, Operators, build_capsule, describe_operators
from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch
from rlkernel_drift.capture.request import Request, Texts, manifest_of, read_prompts, recorded_rows, weights_of
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
    texts = Texts(request.model)
    if request.tokens is None:
        bare = _sampled(request, model, texts)
    else:
        bare = replace(request.tokens, logprobs={}, operators=Operators(), distribution=None, manifest=Manifest())
    streams = dict(bare.logprobs)
    phase = "train" if request.side == "train" else "prefill"
    streams[f"{phase}.processed"] = _scored(request, model, bare)
    operators = _operators(request, model, bare)
    weights = weights_of(fingerprints(dict(hf_tensors(model)))) if request.weights else None
    manifest = manifest_of(
        request,
        "rlkernel",
        {"dtype": request.dtype, "attention_variant": model.attention_variant, "head_dtype": "float32"},
        contract=model.contract,
        weights=weights,
        vocabulary=texts.vocabulary(bare.ids),
        operators=describe_operators(operators),
    )
    return replace(bare, manifest=manifest, logprobs=streams, operators=operators)


def _load(request: Request) -> Any:
    from rlkernel.models import CheckpointError, ConfigError, load_model
    from rlkernel.models.config import DTYPES

    try:
        return load_model(request.model, dtype=DTYPES[request.dtype], device=request.device)
    except (CheckpointError, ConfigError) as error:
        raise DriftError(str(error)) from None


def _sampled(request: Request, model: Any, texts: Texts) -> Capsule:
    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.engine.sampling_params import mix_seed
    from rlkernel.ops import kept_to_ids

    if request.prompts is None:
        raise DriftError("capture needs --prompts, or --tokens with a capsule")
    ids = [texts.ids(prompt) for prompt in read_prompts(request.prompts)]
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

    sequences = sequences_of(bare)
    if not sequences.counted:
        raise DriftError("there is no token to score: every mask is empty")
    batch = PackedBatch.from_sequences([ids[:-1] for ids in sequences.ids], model.device)
    starts = np.concatenate([[0], np.cumsum([len(ids) - 1 for ids in sequences.ids])])
    rows = torch.cat([r + int(start) for r, start in zip(sequences.rows, starts, strict=False)])
    kept = None
    if bare.kept is not None:
        vocab = model.config.vocab_size
        sets = [bare.kept.ids[bare.kept.offsets[t] : bare.kept.offsets[t + 1]] for t in sequences.token.tolist()]
        whole = np.arange(vocab, dtype=np.int32)
        sets = [ids if len(ids) else whole for ids in sets]
        offsets = torch.tensor(np.concatenate([[0], np.cumsum([len(ids) for ids in sets])]))
        kept = ids_to_kept(torch.from_numpy(np.concatenate(sets)), offsets, vocab).to(model.device)
    with torch.no_grad():
        hidden = model(batch).index_select(0, rows.to(model.device))
        targets = sequences.targets.to(model.device)
        logp = model.logprob(hidden, targets, request.sampling.temperature or 1.0, kept).logp
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = logp.float().cpu().numpy()
    return stream


# ---- the engine against itself -------------------------------------------------------------------------------------


def tokens_of(request: Request) -> Capsule:
    """The tokens to score: those of the request's capsule, or freshly sampled ones."""
    return request.tokens or _sampled(request, _load(request), Texts(request.model))


def scored_by_engine(request: Request, bare: Capsule, order: list[int], **engine: Any) -> Tensor:  # [N]
    """Log-probabilities of the counted tokens through the engine's paged forward.

    Args:
        order: in which the sequences are queued. engine: arguments of `rlkernel.engine.LLM`.
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

    rows = recorded_rows(request, bare)
    last = bare.sequences - 1 if rows is None else bare.place(int(rows[-1]))[0]
    parts = [torch.from_numpy(bare.ids[bare.sequence(i)].astype(np.int64)) for i in range(last + 1)]
    values: dict[str, Tensor] = {}
    handles = [h for point in _points(model) for h in point(values)]
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


def _points(model: Any) -> list[Any]:
    """Hooks a layer; fused projections are taken apart, both parts of the residual stream added."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    f = config.intermediate_size

    def attach(layer: Any, i: int) -> Any:
        def handles(values: dict[str, Tensor]) -> list[Any]:
            def put(name: str, value: Tensor) -> None:
                values[f"layers.{i}.{name}"] = value.detach().clone()

            def qkv(module: Any, args: Any, out: Tensor) -> None:
                put("input_norm", args[0])
                for name, part in zip(("q_proj", "k_proj", "v_proj"), out.split((q, kv, kv), -1), strict=True):
                    put(name, part)

            def projection(module: Any, args: Any, out: Tensor) -> None:
                put("attention", args[0])
                put("o_proj", out)

            def gate_up(module: Any, args: Any, out: Tensor) -> None:
                put("post_norm", args[0])
                for name, part in zip(("gate_proj", "up_proj"), out.split((f, f), -1), strict=True):
                    put(name, part)

            def down(module: Any, args: Any, out: Tensor) -> None:
                put("activation", args[0])
                put("down_proj", out)

            def whole(module: Any, args: Any, out: tuple[Tensor, Tensor]) -> None:
                put("attention_residual", out[1])
                put("output", out[0] + out[1])

            return [
                layer.self_attn.qkv_proj.register_forward_hook(qkv),
                layer.self_attn.o_proj.register_forward_hook(projection),
                layer.mlp.gate_up_proj.register_forward_hook(gate_up),
                layer.mlp.down_proj.register_forward_hook(down),
                layer.register_forward_hook(whole),
            ]

        return handles

    return [attach(layer, i) for i, layer in enumerate(model.layers)]
