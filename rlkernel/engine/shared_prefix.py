"""Finds completions of one prompt in a decode batch, so that attention reads the prompt's keys once per group.

Grouping costs attention one more launch per layer, so it is used only if it saves enough reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlkernel.contract.orders import ATTENTION_BLOCK
from rlkernel.engine.table import SequenceTable

Array = npt.NDArray[Any]

LEAST_SAVED_BYTES = 192 << 20
"""Keys and values per layer that a step must not read again for grouping to be used: about 50 us of an H200's memory,
of which the additional launches and the wait for the prefix's programs take a part. The last two cases of `SHARED`
in `bench_attention` lie on both sides of it."""


class Grouping(NamedTuple):
    """Order of a batch in which the members of a group are neighbours.

    Attributes:
        order: [B] index into the given rows.
        groups: [G+1] int32 as in `ops.SharedPrefix`, in the new order.
        lengths: [B] int32 shared keys, in the new order.
    """

    order: Array
    groups: Array
    lengths: Array


class PrefixGroups:
    """Groupings of batches; the last one is kept while the batch has the same sequences.

    Args:
        table: rows of running sequences.
        key_bytes: bytes of a token's key and value in one layer.
        least_saved: least bytes that a grouping must save per layer.
    """

    def __init__(self, table: SequenceTable, key_bytes: int, least_saved: int = LEAST_SAVED_BYTES) -> None:
        self._table = table
        self._least_keys = least_saved / key_bytes
        self._batch: bytes | None = None
        self._found: Grouping | None = None

    def find(self, rows: Array) -> Grouping | None:
        """The grouping of the sequences in `rows`, whose known keys lie in their pages; None if it does not pay."""
        batch = rows.tobytes() + self._table.generation[rows].tobytes()
        if batch != self._batch:
            self._batch, self._found = batch, self._group(rows)
        return self._found

    def _group(self, rows: Array) -> Grouping | None:
        table, size = self._table, self._table.page_size
        order = np.argsort(table.group[rows], kind="stable")
        borders = np.flatnonzero(np.diff(table.group[rows][order])) + 1
        members, lengths, saved, alone = [], [], 0, []
        for part in np.split(order, borders):
            pages = table.block_table[rows[part]]
            # a prompt that is still computed token by token has fewer keys
            most = min(int(table.prompt_len[rows[part[0]]]), int(table.computed[rows[part]].min()) - 1)
            differs = np.flatnonzero((pages != pages[0]).any(0))
            equal = min(int(differs[0]) if len(differs) else pages.shape[1], most // size)
            length = equal * size // ATTENTION_BLOCK * ATTENTION_BLOCK
            if len(part) == 1 or length == 0:
                alone.append(part)
                continue
            members.append(part)
            lengths.append(length)
            saved += (len(part) - 1) * length
        if saved < self._least_keys or not members:
            return None
        sizes = [len(part) for part in members]
        shared = np.concatenate([np.repeat(lengths, sizes), np.zeros(len(rows) - sum(sizes))])
        return Grouping(
            np.concatenate([*members, *alone]), np.cumsum([0, *sizes]).astype(np.int32), shared.astype(np.int32)
        )
