"""Capture from transformers with rlkernel's ops under it (`rlkernel_transformers.apply`): scores given tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Manifest, Operators, describe_operators
from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch
from rlkernel_drift.capture.request import Request, Texts, manifest_of, recorded_rows, weights_of
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import DTYPES, ReferenceModel
from rlkernel_drift.scoring.operators import forward, stored
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.scoring.weights import fingerprints, state_of

_BATCH = 8


def capture_rlkernel_hf(request: Request) -> Capsule:
    """Captures a capsule; see `capture_hf`.

    Raises:
        DriftError: there are no tokens to score, or the model is not one that rlkernel computes.
    """
    if request.tokens is None:
        raise DriftError("hf+rlkernel scores tokens: give --tokens CAPSULE, or name it as the train side of compare")
    import rlkernel_transformers

    loaded = ReferenceModel.load(request.model, request.device, dtype=DTYPES[request.dtype])
    weights = weights_of(fingerprints(state_of(loaded))) if request.weights else None
    try:
        rlkernel_transformers.apply(loaded.model)
    except ValueError as error:
        raise DriftError(f"rlkernel does not compute this model: {error}") from None
    bare = replace(request.tokens, logprobs={}, operators=Operators(), distribution=None, manifest=Manifest())
    operators = _operators(request, loaded, bare)
    phase = "train" if request.side == "train" else "prefill"
    manifest = manifest_of(
        request,
        "hf+rlkernel",
        {"dtype": request.dtype, "attention_backend": "rlkernel", "head_dtype": "float32"},
        contract=str(rlkernel_transformers.status(loaded.model).contract),
        weights=weights,
        vocabulary=Texts(request.model).vocabulary(bare.ids),
        operators=describe_operators(operators),
    )
    streams = {f"{phase}.processed": _scored(request, loaded, bare)}
    return replace(bare, manifest=manifest, logprobs=streams, operators=operators)


def _scored(request: Request, loaded: ReferenceModel, bare: Capsule) -> np.ndarray:
    """The training forward's log-probabilities of the counted tokens, over the recorded kept sets."""
    import rlkernel_transformers
    from rlkernel.ops import ids_to_kept

    sequences = sequences_of(bare)
    if not sequences.counted:
        raise DriftError("there is no token to score: every mask is empty")
    vocab, device = loaded.vocab_size, loaded.device
    whole = np.arange(vocab, dtype=np.int32)
    parts, start = [], 0
    for first in range(0, len(sequences), _BATCH):
        chosen = range(first, min(first + _BATCH, len(sequences)))
        width = max(len(sequences.ids[i]) for i in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, i in enumerate(chosen):
            size, rows = len(sequences.ids[i]), sequences.rows[i]
            ids[row, :size], mask[row, :size] = sequences.ids[i], 1
            targets[row, rows] = sequences.ids[i][rows + 1]
        there = targets != -100
        kept = None
        if bare.kept is not None:
            tokens = sequences.token[start : start + int(there.sum())].tolist()
            sets = [bare.kept.ids[bare.kept.offsets[t] : bare.kept.offsets[t + 1]] for t in tokens]
            sets = [s if len(s) else whole for s in sets]
            offsets = torch.tensor(np.concatenate([[0], np.cumsum([len(s) for s in sets])]))
            kept = ids_to_kept(torch.from_numpy(np.concatenate(sets)), offsets, vocab).to(device)
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
        parts.append(found.logp.float().cpu()[there])
        start += int(there.sum())
    stream = np.full(bare.tokens, np.nan, np.float32)
    stream[sequences.token.numpy()] = torch.cat(parts).numpy()
    return stream


def _operators(request: Request, loaded: ReferenceModel, bare: Capsule) -> Operators:
    """Outputs of each sequence computed alone; q, k, v and gate, up are single products here and have no point."""
    if request.operators == "none":
        return Operators()
    rows = recorded_rows(request, bare)
    last = bare.sequences - 1 if rows is None else bare.place(int(rows[-1]))[0]
    parts: dict[str, list[Tensor]] = {}
    keep = slice(None)

    def put(name: str, value: Tensor) -> None:
        x = value.reshape(-1, value.shape[-1])[keep]
        if request.operators == "fingerprint":
            x = row_fingerprints_torch(x, multipliers_torch(x.shape[1], x.device))
        parts.setdefault(name, []).append(x.detach().to("cpu", copy=True))

    handles = _watch(loaded.model.base_model, put)
    try:
        for i in range(last + 1):
            part = bare.sequence(i)
            if rows is not None:
                inside = rows[(rows >= part.start) & (rows < part.stop)] - part.start
                keep = torch.from_numpy(inside).to(loaded.device)  # type: ignore[assignment]
            ids, positions = (torch.from_numpy(x[part].astype(np.int64)) for x in (bare.ids, bare.positions))
            forward(loaded.model, ids, positions)
    finally:
        for handle in handles:
            handle.remove()
    return Operators(rows, {name: stored(torch.cat(values)) for name, values in parts.items()})


def _watch(base: Any, put: Any) -> list[Any]:
    """Hooks of a decoder whose layers hand on both parts of the residual stream."""

    def first(out: Any) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    def post(at: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            put(f"{at}attention_residual", out[1])
            put(f"{at}post_norm", out[0])

        return hook

    def around(before: str, after: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            put(before, args[0])
            put(after, out)

        return hook

    handles = [base.embed_tokens.register_forward_hook(lambda m, a, out: put("embedding", out))]
    for i, layer in enumerate(base.layers):
        at = f"layers.{i}."
        handles += [
            layer.input_layernorm.register_forward_hook(lambda m, a, out, at=at: put(f"{at}input_norm", first(out))),
            layer.self_attn.o_proj.register_forward_hook(around(f"{at}attention", f"{at}o_proj")),
            layer.post_attention_layernorm.register_forward_hook(post(at)),
            layer.mlp.down_proj.register_forward_hook(around(f"{at}activation", f"{at}down_proj")),
            layer.register_forward_hook(lambda m, a, out, at=at: put(f"{at}output", out[0] + out[1])),
        ]
    handles.append(base.norm.register_forward_hook(lambda m, a, out: put("final_norm", first(out))))
    return handles
