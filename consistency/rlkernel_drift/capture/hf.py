"""Capture from transformers: sampling with a KV cache (rollout), or scoring given tokens in one forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import (
    Capsule,
    Distribution,
    Kept,
    Manifest,
    Operators,
    build_capsule,
)
from rlkernel_drift.capsule import Tensor as Stored
from rlkernel_drift.capture.request import (
    Request,
    captured,
    counted_sequences,
    prompt_ids,
    recorded_rows,
    stream_of,
    tokens_only,
)
from rlkernel_drift.scoring.model import DTYPES, Decoding, Head, ReferenceModel, decoded_hidden
from rlkernel_drift.scoring.operators import record
from rlkernel_drift.scoring.semantics import SortedLogits
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.scoring.weights import fingerprints, state_of

_CHUNK = 1 << 25


def capture_hf(request: Request, model: ReferenceModel | None = None) -> Capsule:
    """Captures a capsule.

    Args:
        request: what to record.
        model: a loaded model; default that of the request's directory.

    Raises:
        DriftError: the model or the prompts cannot be read, or no token counts.
    """
    dtype = DTYPES[request.dtype]
    loaded = model or ReferenceModel.load(request.model, request.device, request.attention, dtype)
    bare = tokens_only(request.tokens) if request.tokens else _sampled(request, loaded, dtype)
    sequences = counted_sequences(bare)
    streams: dict[str, np.ndarray] = {}
    if request.side == "rollout" and request.tokens is None:
        hidden = decoded_hidden(loaded.in_dtype(dtype), sequences)
        streams |= _streams(request, loaded, bare, sequences, hidden, "recorded")
    prefill = loaded.hidden(sequences, dtype)
    streams |= _streams(request, loaded, bare, sequences, prefill, request.phase)
    operators = _operators(request, loaded, bare, dtype)
    config = {
        "dtype": request.dtype,
        "attention_backend": loaded.model.config._attn_implementation,
        "head_dtype": request.head or request.dtype,
        "logits_dtype": request.head or request.dtype,
        "tie_word_embeddings": loaded.tied,
        "rope_theta": loaded.theta and float(f"{loaded.theta:.6g}"),  # of fp32 frequencies
    }
    weights = fingerprints(state_of(loaded)) if request.weights else None
    bare = replace(bare, distribution=_distribution(request, loaded, sequences, prefill))
    return captured(request, bare, streams, operators, "hf", config, weights)


def _head(request: Request) -> Head:
    """Precision of the head; transformers multiplies in the model's dtype and rounds the logits to it."""
    dtype = DTYPES[request.head or request.dtype]
    return Head() if dtype == torch.float32 else Head(dtype, dtype)


def _sampled(request: Request, model: ReferenceModel, dtype: torch.dtype) -> Capsule:
    """Samples completions of the prompts; returns their tokens and kept sets."""
    prompts = [ids for ids in prompt_ids(request) for _ in range(request.samples)]
    generator = torch.Generator().manual_seed(request.seed)
    state = Decoding(model.in_dtype(dtype), prompts)
    ends = getattr(model.config, "eos_token_id", None)
    stop = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    completions: list[list[int]] = [[] for _ in prompts]
    kept: list[list[list[int]]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    for _ in range(request.max_tokens):
        tokens, sets = _draw(request, model.head(state.hidden, _head(request)), generator)
        for i, token in enumerate(tokens.tolist()):
            if running[i]:
                completions[i].append(token)
                kept[i].append(sets[i])
                running[i] = token not in stop
        if not any(running):
            break
        state.feed(tokens)
    return build_capsule(Manifest(), prompts, completions, {}, kept=kept if request.sampling.filters else None)


def _draw(request: Request, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, list[list[int]]]:
    s = request.sampling
    if s.temperature == 0:
        return logits.argmax(-1).cpu(), [[] for _ in range(len(logits))]
    values, order = logits.cpu().sort(dim=-1, descending=True, stable=True)
    rows = SortedLogits(values, torch.zeros(len(values), dtype=torch.int64)).at(s.temperature)
    count = rows.kept(s.top_k, s.top_p, s.min_p)
    inside = torch.arange(values.shape[1])[None, :] < count[:, None]
    rank = (rows.probabilities * inside).multinomial(1, generator=generator)
    sets = [order[i, : int(count[i])].sort().values.tolist() if s.filters else [] for i in range(len(order))]
    return order.gather(1, rank)[:, 0], sets


def _streams(
    request: Request, model: ReferenceModel, bare: Capsule, sequences: Sequences, hidden: Tensor, phase: str
) -> dict[str, np.ndarray]:
    """Raw and processed log-probabilities of the counted tokens."""
    temperature = request.sampling.temperature or 1.0
    raw, processed = [], []
    step = max(1, _CHUNK // model.vocab_size)
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        logits = model.head(hidden[part], _head(request))
        if request.sampling.filters:
            logits = logits.cpu()
        targets, tokens = sequences.targets[part].to(logits.device), sequences.token[part]
        own = logits.gather(1, targets[:, None])[:, 0]
        raw.append(own - logits.logsumexp(-1))
        z = logits / temperature
        if request.sampling.filters and bare.kept is not None:
            z = _masked(z, bare.kept, tokens)
        elif request.sampling.filters:
            s = request.sampling
            processed.append(SortedLogits(logits, targets).at(temperature).processed(s.top_k, s.top_p, s.min_p))
            continue
        processed.append(z.gather(1, targets[:, None])[:, 0] - z.logsumexp(-1))
    return {
        f"{phase}.{values}": stream_of(bare, sequences, torch.cat(parts).float().cpu())
        for values, parts in (("processed", processed), ("raw", raw))
    }


def _masked(z: Tensor, kept: Kept, tokens: Tensor) -> Tensor:
    """Logits with minus infinity outside the recorded kept sets; an empty set keeps all."""
    z = z.clone()
    for row, token in enumerate(tokens.tolist()):
        ids = kept.ids[kept.offsets[token] : kept.offsets[token + 1]]
        if len(ids):
            inside = torch.zeros(z.shape[1], dtype=torch.bool)
            inside[torch.from_numpy(ids.astype(np.int64))] = True
            z[row, ~inside] = -torch.inf
    return z


def _operators(request: Request, model: ReferenceModel, bare: Capsule, dtype: torch.dtype) -> Operators:
    """Operator outputs in the form that the request names; each sequence is computed alone."""
    if request.operators == "none":
        return Operators()
    rows, count = recorded_rows(request, bare)
    pairs = []
    for part in map(bare.sequence, range(count)):
        ids, positions = (torch.from_numpy(x[part].astype(np.int64)) for x in (bare.ids, bare.positions))
        pairs.append((ids, positions))
    keep = None if rows is None else torch.tensor(rows)
    hashed = request.operators == "fingerprint"
    return Operators(rows, record(model.in_dtype(dtype), pairs, "fingerprint" if hashed else "full", keep))


def _distribution(request: Request, model: ReferenceModel, sequences: Sequences, hidden: Tensor) -> Distribution | None:
    if not request.logits_rows:
        return None
    count = min(request.logits_rows, sequences.counted)
    chosen = torch.linspace(0, sequences.counted - 1, count).round().long().unique()
    logits = model.head(hidden[chosen.to(hidden.device)], _head(request)).cpu().numpy()
    return Distribution(sequences.token[chosen].numpy(), Stored.of(logits))
