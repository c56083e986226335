"""Capture from transformers with rlkernel's ops (`rlkernel_transformers.apply`): scores given tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Operators
from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch
from rlkernel_drift.capture.request import (
    Request,
    captured,
    counted_sequences,
    kept_sets,
    recorded_rows,
    stream_of,
    tokens_only,
)
from rlkernel_drift.capture.rlkernel_engine import around
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import DTYPES, ReferenceModel
from rlkernel_drift.scoring.operators import forward, stored
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints, state_of

_BATCH = 8


def capture_rlkernel_hf(request: Request) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Raises:
        DriftError: there are no tokens to score, or rlkernel does not support the model.
    """
    if request.tokens is None:
        raise DriftError("hf+rlkernel scores tokens: give --tokens CAPSULE, or name it as the train side of compare")
    import rlkernel_transformers

    loaded = ReferenceModel.load(request.model, request.device, dtype=DTYPES[request.dtype])
    weights = fingerprints(state_of(loaded)) if request.weights else None
    try:
        rlkernel_transformers.apply(loaded.model)
    except ValueError as error:
        raise DriftError(f"rlkernel does not support this model: {error}") from None
    bare = tokens_only(request.tokens)
    operators = _operators(request, loaded, bare)
    streams = {f"{request.phase}.processed": _scored(request, loaded, bare)}
    config = {"dtype": request.dtype, "attention_backend": "rlkernel", "head_dtype": "float32"}
    contract = str(rlkernel_transformers.status(loaded.model).contract)
    return captured(request, bare, streams, operators, "hf+rlkernel", config, weights, contract=contract)


def _scored(request: Request, loaded: ReferenceModel, bare: Capsule) -> np.ndarray:
    """The training forward's log-probabilities of the counted tokens, over the recorded kept sets."""
    import rlkernel_transformers
    from rlkernel.ops import ids_to_kept

    sequences = counted_sequences(bare)
    vocab_size, device = loaded.vocab_size, loaded.device
    parts = []
    for first in range(0, bare.sequences, _BATCH):
        batch = sequences_of(bare, chosen=list(range(first, min(first + _BATCH, bare.sequences))))
        if not batch.counted:
            continue
        ids = torch.zeros(len(batch), max(map(len, batch.ids)), dtype=torch.int64)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, (own, rows) in enumerate(zip(batch.ids, batch.rows, strict=True)):
            ids[i, : len(own)], mask[i, : len(own)] = own, 1
            targets[i, rows] = own[rows + 1]
        kept = None
        if bare.kept is not None:
            kept = ids_to_kept(*kept_sets(bare, batch, vocab_size), vocab_size).to(device)
        with torch.no_grad():
            found = rlkernel_transformers.token_logprobs(
                loaded.model,
                ids.to(device),
                mask.to(device),
                targets=targets.to(device),
                temperature=request.sampling.temperature or 1.0,
                kept=kept,
            )
        assert found.logp is not None
        parts.append(found.logp.float().cpu()[targets != -100])
    return stream_of(bare, sequences, torch.cat(parts))


def _operators(request: Request, loaded: ReferenceModel, bare: Capsule) -> Operators:
    """Operator outputs, each sequence computed alone; q, k, v, gate and up are fused here and cannot be hooked."""
    if request.operators == "none":
        return Operators()
    rows, count = recorded_rows(request, bare)
    parts: dict[str, list[Tensor]] = {}
    keep = slice(None)

    def put(name: str, value: Tensor) -> None:
        x = value.reshape(-1, value.shape[-1])[keep]
        if request.operators == "fingerprint":
            x = row_fingerprints_torch(x, multipliers_torch(x.shape[1], x.device))
        parts.setdefault(name, []).append(x.detach().to("cpu", copy=True))

    handles = _attach(loaded.model.base_model, put)
    try:
        for part in map(bare.sequence, range(count)):
            if rows is not None:
                inside = rows[(rows >= part.start) & (rows < part.stop)] - part.start
                keep = torch.from_numpy(inside).to(loaded.device)  # type: ignore[assignment]
            ids, positions = (torch.from_numpy(x[part].astype(np.int64)) for x in (bare.ids, bare.positions))
            forward(loaded.model, ids, positions)
    finally:
        for handle in handles:
            handle.remove()
    return Operators(rows, {name: stored(torch.cat(values)) for name, values in parts.items()})


def _attach(base: Any, put: Callable[[str, Tensor], None]) -> list[Any]:
    """Hooks that call `put(name, value)` in a decoder whose layers return both parts of the residual stream."""

    def first(out: Any) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    def post(at: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            put(f"{at}attention_residual", out[1])
            put(f"{at}post_norm", out[0])

        return hook

    width = base.config.hidden_size
    handles = [base.embed_tokens.register_forward_hook(lambda m, a, out: put("embedding", out))]
    for i, layer in enumerate(base.layers):
        at = f"layers.{i}."
        handles += [
            layer.input_layernorm.register_forward_hook(lambda m, a, out, at=at: put(f"{at}input_norm", first(out))),
            layer.self_attn.o_proj.register_forward_hook(around(put, at, "attention", {"o_proj": width})),
            layer.post_attention_layernorm.register_forward_hook(post(at)),
            layer.mlp.down_proj.register_forward_hook(around(put, at, "activation", {"down_proj": width})),
            layer.register_forward_hook(lambda m, a, out, at=at: put(f"{at}output", out[0] + out[1])),
        ]
    handles.append(base.norm.register_forward_hook(lambda m, a, out: put("final_norm", first(out))))
    return handles
