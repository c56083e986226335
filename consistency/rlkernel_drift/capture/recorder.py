"""Records operator outputs of a running engine for chosen requests: fingerprints of rows, or values.

Fingerprints are integer sums on the device without synchronisation, so recording works inside a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_drift.capsule.fingerprint import multipliers_torch, row_fingerprints_torch

KINDS = ("fingerprint", "values")


class Recorder:
    """Outputs of the last step, and the rows of the requests that are kept.

    Fingerprints go to buffers that are allocated before a CUDA graph is captured, and each replay fills them again.

    Args:
        kind: one of `KINDS`.
        rows: largest number of tokens per step.
    """

    def __init__(self, kind: str, rows: int) -> None:
        self.kind, self.rows = kind, rows
        self.step: dict[str, Tensor] = {}
        self.splits: dict[str, tuple[tuple[str, ...], list[int]]] = {}
        self._multipliers: dict[tuple[int, torch.device], Tensor] = {}
        self.on = False
        self.kept: list[dict[str, Tensor]] = []
        self.requests: dict[str, int] = {}
        self.sequences = 0

    def see(self, name: str, value: Tensor, residual: Tensor | None = None) -> None:
        """Records an operator's output, [T, ...]; the parts of a split residual stream are added."""
        value = value.reshape(value.shape[0], -1)
        if residual is not None:
            value = value + residual
        parts, sizes = self.splits.get(name, ((name,), [value.shape[1]]))
        for part, x in zip(parts, value.split(sizes, -1), strict=True):
            if self.kind == "values":
                self.step[part] = x.detach().clone()
            else:
                out = self.buffer(part, x.device)
                row_fingerprints_torch(x, self.multipliers(x.shape[1], x.device), out=out[: x.shape[0]])

    def see_tokens(self, ids: Tensor, positions: Tensor) -> None:
        """Records token ids and positions of the step."""
        positions = positions if positions.dim() == 1 else positions[0]
        for name, value in (("ids", ids), ("positions", positions)):
            self.buffer(name, value.device)[: value.shape[0]].copy_(value)

    def buffer(self, name: str, device: torch.device) -> Tensor:  # [rows] int64
        """The buffer for a step's integers."""
        if name not in self.step:
            self.step[name] = torch.zeros(self.rows, dtype=torch.int64, device=device)
        return self.step[name]

    def multipliers(self, width: int, device: torch.device) -> Tensor:
        key = (width, device)
        if key not in self._multipliers:
            self._multipliers[key] = multipliers_torch(width, device)
        return self._multipliers[key]

    def start(self, sequences: int) -> None:
        """Clears the kept rows, and keeps those of the next `sequences` requests."""
        self.kept, self.requests, self.sequences, self.on = [], {}, sequences, True

    def keep(self, order: list[str], counts: dict[str, int]) -> None:
        """Copies the rows of this step that belong to chosen requests.

        Args:
            order: requests in the order of their rows.
            counts: number of rows of each request.
        """
        chosen: list[int] = []
        owner: list[int] = []
        start = 0
        for request in order:
            count = counts[request]
            number = self.requests.setdefault(request, len(self.requests))
            if number < self.sequences:
                chosen += range(start, start + count)
                owner += [number] * count
            start += count
        if not chosen:
            return
        names = list(self.step)
        rows = torch.tensor(chosen, device=self.step["ids"].device)
        self.kept.append({"request": torch.tensor(owner), **{name: self.step[name][rows].cpu() for name in names}})

    def save(self, path: str) -> list[str]:
        """Writes the kept rows as safetensors; returns the names of the tensors in the order of computation."""
        from safetensors.torch import save_file

        names = list(self.kept[0]) if self.kept else []
        save_file({name: torch.cat([step[name] for step in self.kept]).contiguous() for name in names}, path)
        return names
