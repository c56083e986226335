"""Decoding with a cache, as rollouts do: a batch of prompts padded on the left, then one token a sequence at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.scoring.sequences import Sequences


class Decoding:
    """State of a decoded batch.

    Args:
        model: of transformers. prompts: token ids. positions: of each sequence; default 0, 1, 2, ...

    Attributes:
        hidden: [B, C] of the last token of each sequence.
    """

    def __init__(self, model: Any, prompts: list[list[int]], positions: list[Tensor] | None = None) -> None:
        self.model, width = model, max(map(len, prompts))
        self.device = next(model.parameters()).device
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        place = torch.zeros_like(ids) if positions is None else torch.zeros(ids.shape, dtype=positions[0].dtype)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
            known = torch.arange(len(prompt)) if positions is None else positions[row][: len(prompt)]
            place[row, width - len(prompt) :] = known
        self.mask = mask.to(self.device)
        self.next = torch.tensor([len(prompt) for prompt in prompts])
        self.cache: Any = None
        self._run(ids, place)

    def _run(self, ids: Tensor, positions: Tensor) -> None:
        with torch.no_grad():
            out = self.model.base_model(
                input_ids=ids.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=self.mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache, self.hidden = out.past_key_values, out.last_hidden_state[:, -1]

    def feed(self, tokens: Tensor, positions: Tensor | None = None) -> None:
        """One more token a sequence, [B]."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self._run(tokens[:, None], (self.next if positions is None else positions)[:, None])
        self.next = self.next + 1


def decoded_hidden(model: Any, sequences: Sequences) -> Tensor:  # [N, C]
    """Hidden states of the counted rows, each computed when its token was fed to the cache."""
    prompts = [ids[: int(rows[0]) + 1].tolist() for ids, rows in zip(sequences.ids, sequences.rows, strict=True)]
    state = Decoding(model, prompts, sequences.positions)
    steps = [state.hidden]
    longest = max(int(rows[-1]) - int(rows[0]) for rows in sequences.rows)
    for step in range(longest):
        at = [min(len(p) + step, len(ids) - 1) for p, ids in zip(prompts, sequences.ids, strict=True)]
        tokens = torch.stack([ids[i] for ids, i in zip(sequences.ids, at, strict=True)])
        places = torch.stack([p[i] for p, i in zip(sequences.positions, at, strict=True)])
        state.feed(tokens, places)
        steps.append(state.hidden)
    table = torch.stack(steps)
    return torch.cat([table[(rows - int(rows[0])).to(table.device), i] for i, rows in enumerate(sequences.rows)])
