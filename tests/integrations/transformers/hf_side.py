"""Tiny models of transformers, the decoder of rlkernel.models with the same weights, and padded batches."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from models.hf_models import build
from torch import Tensor

import rlkernel_transformers as rt
from rlkernel.models import Decoder, PackedBatch, load_model

ROWS = [[5, 9, 3, 77, 12, 40, 41, 8, 8], [17, 4, 90], [60 + i for i in range(17)], [33, 2, 33, 1]]


@cache
def _pair(case: str, dtype: torch.dtype) -> tuple[Any, Decoder]:
    model = build(case).to(dtype)
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return model, load_model(Path(directory), dtype=dtype)


def pair(case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """A model of transformers after `apply`, in training mode, and our decoder: new copies with the same weights."""
    model, decoder = _pair(case, dtype)
    return rt.apply(copy.deepcopy(model)).train(), copy.deepcopy(decoder)


def stock(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """The stock model of transformers."""
    return copy.deepcopy(_pair(case, dtype)[0])


def padded(rows: list[list[int]], left: bool = True, extra: int = 0) -> tuple[Tensor, Tensor]:
    """ids and mask [B, L] with padding on one side, `extra` tokens more than needed."""
    length = max(map(len, rows)) + extra
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(length - len(row), length) if left else slice(0, len(row))
        ids[i, at] = torch.tensor(row)
        mask[i, at] = 1
    return ids, mask


def decoder_logprobs(decoder: Decoder, rows: list[list[int]], temperature: float = 1.0) -> Any:
    """logp and entropy of every next token, packed, from the training forward of rlkernel.models."""
    hidden = decoder(PackedBatch.from_sequences(rows))
    inner = torch.cat([torch.arange(len(row)) < len(row) - 1 for row in rows])
    targets = torch.tensor([token for row in rows for token in row[1:]])
    return decoder.logprob(hidden[inner], targets, temperature)


def next_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The entries of [B, L] that have a next token, row by row, as `decoder_logprobs` returns them."""
    following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return values[(mask & following).bool()]


def fused_gradients(
    model: Any, decoder: Decoder, name: str = "grad", own: str | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per parameter of the decoder: the gradient of transformers' model, joined as in the decoder, and its own; the
    attributes `name` and `own` (the same by default)."""
    found = {n.removeprefix("model."): getattr(p, name) for n, p in model.named_parameters()}
    out = {}
    for key, parameter in decoder.named_parameters():
        if "qkv_proj" in key:
            grad = torch.cat([found[key.replace("qkv_proj", f"{x}_proj")] for x in "qkv"])
        elif "gate_up_proj" in key:
            grad = torch.cat([found[key.replace("gate_up_proj", f"{x}_proj")] for x in ("gate", "up")])
        else:
            grad = found[key]
        out[key] = (grad, getattr(parameter, own or name))
    return out
