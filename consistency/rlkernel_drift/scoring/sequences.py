"""Token sequences of a capsule, and the rows that predict its counted tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule


@dataclass(frozen=True)
class Sequences:
    """Sequences to score.

    Attributes:
        ids: token ids of each sequence, [L_i] int64.
        positions: of each sequence, [L_i] int64 (or float, where positions are scaled).
        rows: of each sequence, [n_i]: t - 1 for each counted token t, the row that predicts it.
        targets: [N] the counted tokens.
        owner: [N] sequence of each counted token.
        prompt: tokens before the first counted one, of each sequence.
        token: [N] packed token in the capsule.
    """

    ids: list[Tensor]
    positions: list[Tensor]
    rows: list[Tensor]
    targets: Tensor
    owner: Tensor
    prompt: list[int]
    token: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def counted(self) -> int:
        """N."""
        return int(self.targets.shape[0])

    def drop_first(self, count: int) -> Sequences:
        """Drops the first `count` tokens of each sequence; positions keep their first value."""
        return self._shortened(count, lambda ids, _, cut: ids[cut:])

    def drop_prompt_end(self, count: int) -> Sequences:
        """Drops the last `count` tokens of each prompt."""
        return self._shortened(count, lambda ids, prompt, cut: torch.cat([ids[: prompt - cut], ids[prompt:]]))

    def _shortened(self, count: int, shorten: Callable[[Tensor, int, int], Tensor]) -> Sequences:
        cut = [min(count, n - 1) for n in self.prompt]
        return replace(
            self,
            ids=[shorten(*each) for each in zip(self.ids, self.prompt, cut, strict=True)],
            positions=[p[: len(p) - c] for p, c in zip(self.positions, cut, strict=True)],
            rows=[rows - c for rows, c in zip(self.rows, cut, strict=True)],
            prompt=[n - c for n, c in zip(self.prompt, cut, strict=True)],
        )

    def prepend(self, token: int) -> Sequences:
        """Prepends a token to each sequence."""
        extra = torch.tensor([token])
        return replace(
            self,
            ids=[torch.cat([extra, ids]) for ids in self.ids],
            positions=[torch.cat([p, p[-1:] + 1]) for p in self.positions],
            rows=[rows + 1 for rows in self.rows],
            prompt=[n + 1 for n in self.prompt],
        )


def side_by_side(variants: list[Sequences]) -> Sequences:
    """The sequences of all variants of the same counted tokens, in their order."""
    exact = all(not p.is_floating_point() for v in variants for p in v.positions)
    return replace(
        variants[0],
        ids=[ids for v in variants for ids in v.ids],
        positions=[p if exact else p.float() for v in variants for p in v.positions],
        rows=[rows for v in variants for rows in v.rows],
        prompt=[n for v in variants for n in v.prompt],
    )


def sequences_of(capsule: Capsule, budget: int = 1 << 62, chosen: list[int] | None = None) -> Sequences:
    """Sequences of a capsule with at least one counted token.

    Args:
        budget: largest number of counted tokens; sequences beyond it are left out, except the first.
        chosen: numbers of the sequences; default all.
    """
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    rows: list[Tensor] = []
    owner: list[int] = []
    prompt: list[int] = []
    token: list[Tensor] = []
    total = 0
    for i in range(capsule.sequences) if chosen is None else chosen:
        part = capsule.sequence(i)
        counted = np.flatnonzero(capsule.mask[part])
        counted = counted[counted > 0]
        if not len(counted) or (ids and total + len(counted) > budget):
            continue
        total += len(counted)
        owner += [len(ids)] * len(counted)
        ids.append(torch.from_numpy(capsule.ids[part].astype(np.int64)))
        positions.append(torch.from_numpy(capsule.positions[part].astype(np.int64)))
        rows.append(torch.from_numpy(counted - 1))
        prompt.append(int(counted[0]))
        token.append(torch.from_numpy(counted + part.start))
    empty = torch.zeros(0, dtype=torch.int64)
    return Sequences(
        ids,
        positions,
        rows,
        torch.cat([x[r + 1] for x, r in zip(ids, rows, strict=True)]) if ids else empty,
        torch.tensor(owner, dtype=torch.int64),
        prompt,
        torch.cat(token) if token else empty,
    )
