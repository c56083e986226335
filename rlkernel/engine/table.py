"""State of the running sequences as arrays, one row per sequence, so that a step needs array operations and no loop.

Rows are reused. Columns (tokens, pages) grow by doubling with the longest sequence seen, not with the model's context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rlkernel.engine.request import Sequence

Array = npt.NDArray[Any]


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class SequenceTable:
    """Rows of running sequences (R = max_num_seqs).

    Attributes:
        tokens: [R, columns] int32 ids; -1 while a launched step samples the token.
        logps: [R, columns] fp32 log-probability of the token at the same position.
        block_table: [R, pages] int32.
        length: [R] tokens that are inputs of the model, including one that a launched step samples.
        known: [R] tokens whose ids are known.
        computed: [R] tokens whose KV is in the cache once all launched steps have run.
        generation: [R] number of sequences that have left the row.
        prompt_len: [R] tokens of the prompt.
        group: [R] equal for sequences with equal prompts, and seldom for others.
        limit: [R] total length at which the completion ends with "length".
        num_pages: [R] valid columns of `block_table`.
        node, registered: [R] node of the prefix cache, and number of pages registered in it.
        seed, temperature, top_k, top_p, min_p: [R] as `ops.sample` takes them.
        stop_ids: [R, columns] int64, padded with -1.
        scoring, has_stop_strings, keeps: [R] bool: is a scored prompt; has stop strings; returns kept masks.
        axes: [R, columns, 3] positions on several axes, of a model that has them (`axes_of`).
        ahead: [R] the position of the next token on all axes, minus the number of tokens before it.
    """

    def __init__(
        self,
        rows: int,
        page_size: int,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        axes_of: Callable[[Array], Array | None] = lambda ids: None,
    ) -> None:
        self.axes_of = axes_of
        self.rows = rows
        self.page_size = page_size
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self.tokens: Array = np.zeros((rows, 0), np.int32)
        self.logps: Array = np.zeros((rows, 0), np.float32)
        self.block_table: Array = np.zeros((rows, 0), np.int32)
        self.length: Array = np.zeros(rows, np.int64)
        self.known: Array = np.zeros(rows, np.int64)
        self.generation: Array = np.zeros(rows, np.int64)
        self.computed: Array = np.zeros(rows, np.int64)
        self.prompt_len: Array = np.zeros(rows, np.int64)
        self.group: Array = np.zeros(rows, np.int64)
        self.limit: Array = np.zeros(rows, np.int64)
        self.num_pages: Array = np.zeros(rows, np.int64)
        self.node: Array = np.zeros(rows, np.int64)
        self.registered: Array = np.zeros(rows, np.int64)
        self.seed: Array = np.zeros(rows, np.int64)
        self.temperature: Array = np.ones(rows, np.float32)
        self.top_k: Array = np.zeros(rows, np.int32)
        self.top_p: Array = np.ones(rows, np.float32)
        self.min_p: Array = np.zeros(rows, np.float32)
        self.stop_ids: Array = np.full((rows, 1), -1, np.int64)
        self.scoring: Array = np.zeros(rows, bool)
        self.has_stop_strings: Array = np.zeros(rows, bool)
        self.keeps: Array = np.zeros(rows, bool)
        self.axes: Array = np.zeros((rows, 0, 3), np.int64)
        self.ahead: Array = np.zeros(rows, np.int64)

    def _grow(self, columns: int) -> None:
        if columns <= self.tokens.shape[1]:
            return
        columns = ceil_div(max(64, columns, 2 * self.tokens.shape[1]), self.page_size) * self.page_size
        self.tokens = _widened(self.tokens, columns)
        self.logps = _widened(self.logps, columns)
        self.block_table = _widened(self.block_table, columns // self.page_size)
        self.axes = _widened(self.axes, columns)

    def load(self, row: int, sequence: Sequence, pages: list[int], computed: int, node: int, registered: int) -> None:
        """Loads a waiting sequence into a row, with pages for all its known tokens."""
        params, known = sequence.request.params, len(sequence.tokens)
        self._grow(known + 1)
        self.tokens[row, :known] = sequence.tokens
        self.logps[row, :known] = 0 if sequence.logps is None else sequence.logps
        self.block_table[row, : len(pages)] = pages
        axes = self.axes_of(sequence.tokens)
        if axes is not None:
            self.axes[row, :known] = axes.T
            self.ahead[row] = axes[:, -1].max() + 1 - known
        # The last token of a scored prompt is a target, never an input.
        self.length[row] = known - 1 if sequence.scoring else known
        self.known[row] = known
        self.computed[row] = computed
        self.prompt_len[row] = sequence.prompt_len
        self.group[row] = hash(sequence.group)
        self.limit[row] = min(sequence.prompt_len + params.max_tokens, self.max_model_len)
        self.num_pages[row] = len(pages)
        self.node[row] = node
        self.registered[row] = registered
        self.seed[row] = sequence.seed
        temperature = sequence.request.score_temperature
        self.temperature[row] = params.temperature if temperature is None else temperature
        # Greedy rows ignore the filters.
        filtered = params.filters
        self.top_k[row] = params.top_k if filtered else 0
        self.top_p[row] = params.top_p if filtered else 1.0
        self.min_p[row] = params.min_p if filtered else 0.0
        stops = (() if params.ignore_eos else self.eos_ids) + tuple(params.stop_token_ids)
        if len(stops) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(stops), -1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        self.scoring[row] = sequence.scoring
        self.has_stop_strings[row] = sequence.stop_matcher is not None
        # Read back in fp32, as the sampler does: a top_p that rounds to 1 keeps all tokens.
        dropping = self.top_k[row] > 0 or self.top_p[row] < 1 or self.min_p[row] > 0
        self.keeps[row] = params.return_kept and dropping

    def store(self, row: int, sequence: Sequence) -> None:
        """Copies the known tokens and log-probabilities of a row to its sequence."""
        known = int(self.known[row])
        sequence.tokens = self.tokens[row, :known].copy()
        sequence.logps = self.logps[row, :known].copy()

    def extend(self, rows: Array) -> Array:  # [S]
        """Adds one token to each of `rows`, which a launched step samples; returns the tokens' positions."""
        at: Array = self.length[rows]
        if len(rows):
            self._grow(int(at.max()) + 1)
            self.tokens[rows, at] = -1
            self.axes[rows, at] = (at + self.ahead[rows])[:, None]
            self.length[rows] = at + 1
        return at

    def fill(self, rows: Array, at: Array, tokens: Array, logps: Array) -> None:
        """Stores the sampled tokens at the positions that `extend` returned."""
        self.tokens[rows, at] = tokens
        self.logps[rows, at] = logps
        self.known[rows] = at + 1

    def pages(self, row: int) -> list[int]:
        """Pages of a row in order."""
        return self.block_table[row, : self.num_pages[row]].tolist()


def _widened(array: Array, columns: int, fill: int = 0) -> Array:
    wide = np.full((array.shape[0], columns, *array.shape[2:]), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
