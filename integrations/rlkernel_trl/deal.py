"""Deals a generation's completions to micro-batches by the data's order, on any number of processes the same way.

TRL shuffles the completions that a process sampled among its own micro-batches, with the process's random state, so
what a micro-batch holds depends on the number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from rlkernel_trl.forward import Ragged


def deal(batch: dict[str, Any], accelerator: Any, *, micro_batches: int, seed: int) -> list[dict[str, Any]]:
    """This process's micro-batches of a generation, of which every process has sampled an equal part.

    All completions are gathered, permuted by the seed and cut; micro-batch i * W + r goes to process r of W. Each is
    padded to its own longest prompt and completion.

    Args:
        batch: rows of this process, tensors [B, ...] and lists; prompts are padded left, completions right. Values
            without rows (numbers, None) are equal on all processes.
        micro_batches: number of each process's.
        seed: equal on all processes.
    """
    rows = {name: value for name, value in batch.items() if isinstance(value, list) or _has_rows(value)}
    whole = {name: _gathered(name, value, accelerator) for name, value in rows.items()}
    total = len(next(iter(whole.values())))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed % (1 << 63)))
    mine = order.view(micro_batches, accelerator.num_processes, -1)[:, accelerator.process_index]
    return [{**batch, **_trimmed({name: _take(value, chosen) for name, value in whole.items()})} for chosen in mine]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _gathered(name: str, value: Any, accelerator: Any) -> Any:
    if isinstance(value, list):
        return gather_object(value)
    if value.dim() > 1:
        value = accelerator.pad_across_processes(value, dim=1, pad_first=name.startswith("prompt"))
    return accelerator.gather(value.contiguous())


def _take(value: Any, chosen: Tensor) -> Any:
    return [value[i] for i in chosen.tolist()] if isinstance(value, list) else value[chosen.to(value.device)]


def _trimmed(rows: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without columns that are padding in all of its rows."""
    prompt, completion = rows["prompt_mask"], rows["completion_mask"]
    first = int(prompt.any(0).int().argmax())
    last = completion.shape[1] - int(completion.any(0).flip(0).int().argmax())
    out = {}
    for name, value in rows.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] > 1:
            value = value[:, first:] if name.startswith("prompt") else value[:, :last]
        out[name] = value
    return out


def gather_kept(kept: list[Ragged], accelerator: Any) -> list[Ragged]:
    """The kept sets of all processes' completions, in the order of `accelerator.gather`."""
    sizes = torch.nn.utils.rnn.pad_sequence([offsets.diff() for _, offsets in kept], True, padding_value=-1)  # [B, C]
    ids = torch.cat([ids for ids, _ in kept])[None]  # [1, N]
    sizes = accelerator.gather(accelerator.pad_across_processes(sizes, dim=1, pad_index=-1).contiguous())
    ids = accelerator.gather(accelerator.pad_across_processes(ids, dim=1).contiguous())
    found = []
    for own, local in zip(ids, sizes.view(ids.shape[0], len(kept), -1), strict=True):
        start = 0
        for row in local:
            counts = row[row >= 0]
            offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            end = start + int(offsets[-1])
            found.append((own[start:end], offsets))
            start = end
    return found
