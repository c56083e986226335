"""Chooses the tokens of each step: first come, first served; decodes first, then prefill chunks up to the budget.

A step is planned in an order that correctness depends on: (1) decodes get new pages, preempting the youngest sequences
if pages are short; (2) pages that this step fills are registered in the prefix cache; (3) sequences are admitted, which
may share pages registered in (2), because each layer stores the batch's keys and values before it attends. Nothing is
preempted after (1), so every registered page is written.

A step may be planned before the last one's tokens are known. A sequence that the last step ends then has one token too
many in the new step; `commit` discards it. Pages are written in the order of the steps, so none is reused too early.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlkernel.engine.block_manager import ROOT, BlockManager
from rlkernel.engine.request import Sequence
from rlkernel.engine.table import SequenceTable, ceil_div

Array = npt.NDArray[Any]


@dataclass
class Step:
    """The plan of one batch of B sequences, of which S get a new token.

    Attributes:
        rows, starts, query_lens: [B] table row, first position and number of tokens of each sequence.
        sample_rows: [S] table rows that get a token: completed sequences of the batch, then forks.
        sample_batch: [S] index into the batch of the sequence whose last hidden state each sample reads, ascending
            over the completed ones; for a fork, the index of its leader.
        positions: [S] position of each sampled token.
        generations: [S] `table.generation` of `sample_rows` when the step was planned.
        num_forks: number of forks among the S.
        copies: (source, destination) pages to copy after the forward: the partly filled last page of a forked prompt.
    """

    rows: Array
    starts: Array
    query_lens: Array
    sample_rows: Array
    sample_batch: Array
    positions: Array
    generations: Array
    num_forks: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """Counts since the scheduler was created."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    forks: int = 0
    preemptions: int = 0


class Scheduler:
    """Queues, admission, preemption by recomputation, and state updates around each step.

    Args:
        blocks: the pages.
        table: the rows of running sequences.
        max_num_batched_tokens: most tokens of a step.
    """

    def __init__(self, blocks: BlockManager, table: SequenceTable, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.table = table
        self.budget = max_num_batched_tokens
        self.page_size = table.page_size
        self.stats = SchedulerStats()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by row
        self.order: Array = np.zeros(0, np.int64)  # rows of `running`, first come first
        self.in_flight = 0  # planned steps whose results are not committed
        self._rows = list(range(table.rows - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which must fit into an empty cache."""
        self.waiting.append(sequence)

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    # Planning

    def schedule(self) -> Step | None:
        """Plans the next step; None if no sequence can run before a step in flight is committed, or none is left."""
        if not self.busy:
            return None
        table = self.table
        decodes = self._decodes()
        if decodes is None:
            return None
        rows: list[int] = []
        lens: list[int] = []
        budget = self.budget - len(decodes)
        pending = table.length[self.order] - table.computed[self.order]
        for row in self.order[pending > 1].tolist():
            if budget == 0:
                break
            take = min(int(table.length[row] - table.computed[row]), budget)
            budget -= take
            rows.append(row)
            lens.append(take)
        planned = np.concatenate([decodes, np.asarray(rows, np.int64)])
        taken = np.concatenate([np.ones(len(decodes), np.int64), np.asarray(lens, np.int64)])
        self._register(planned, np.minimum(table.computed[planned] + taken, table.known[planned]))
        copies: list[tuple[int, int]] = []
        forks: list[tuple[int, int]] = []  # (row, index of the leader in the batch)
        if self.waiting and self._rows:
            planned, taken = self._admit_waiting(planned, taken, budget, forks, copies)
        if not len(planned):
            return None
        starts = table.computed[planned]
        done = (starts + taken == table.length[planned]) & ~table.scoring[planned]
        complete = np.flatnonzero(done)
        self.stats.steps += 1
        self.stats.decode_tokens += len(decodes)
        self.stats.prefill_tokens += int(taken.sum()) - len(decodes)
        forked = np.asarray(forks, np.int64).reshape(-1, 2)
        sample_rows = np.concatenate([planned[complete], forked[:, 0]])
        table.computed[planned] = starts + taken
        self.in_flight += 1
        return Step(
            planned,
            starts,
            taken,
            sample_rows,
            np.concatenate([complete, forked[:, 1]]),
            table.extend(sample_rows),
            table.generation[sample_rows],
            len(forks),
            copies,
        )

    def _decodes(self) -> Array | None:
        """Rows with one token to compute, each with a page for it; preempts the youngest if pages are short.

        None if it would preempt while a step is in flight: the youngest sequence's last token is not known yet.
        """
        table = self.table
        while True:
            order = self.order
            # a sequence at its limit ends when the step in flight is committed
            one = (table.length[order] - table.computed[order] == 1) & (table.length[order] < table.limit[order])
            rows = order[one][: self.budget]
            short = rows[table.computed[rows] // self.page_size >= table.num_pages[rows]]
            if len(short) <= self.blocks.available:
                break
            if self.in_flight:
                return None
            self._preempt(int(order[-1]))
        if len(short):
            table.block_table[short, table.num_pages[short]] = self.blocks.allocate(len(short))
            table.num_pages[short] += 1
        return rows

    def _preempt(self, row: int) -> None:
        sequence = self.running[row]
        self.table.store(row, sequence)
        self._leave(np.asarray([row]))
        # It is older than all waiting sequences, so the queue stays in order of arrival.
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _leave(self, rows: Array) -> None:
        """Removes rows from the running set and releases their pages."""
        for row in rows.tolist():
            self.blocks.release(self.table.pages(row))
            self.running.pop(row).row = -1
            self.table.generation[row] += 1
            self._rows.append(row)
        self.order = self.order[~np.isin(self.order, rows)]

    def _register(self, rows: Array, upto: Array) -> None:
        """Registers the pages of `rows` that are full when `upto` tokens of each are computed."""
        table, size = self.table, self.page_size
        if not self.blocks.prefix_caching or not len(rows):
            return
        full = upto // size
        for i in np.flatnonzero(full > table.registered[rows]).tolist():
            row, node = int(rows[i]), int(table.node[rows[i]])
            for page in range(int(table.registered[row]), int(full[i])):
                content = table.tokens[row, page * size : (page + 1) * size].tobytes()
                node = self.blocks.register(int(table.block_table[row, page]), node, content)
            table.node[row], table.registered[row] = node, full[i]

    def _admit_waiting(
        self,
        planned: Array,
        taken: Array,
        budget: int,
        forks: list[tuple[int, int]],
        copies: list[tuple[int, int]],
    ) -> tuple[Array, Array]:
        """Admits from the head of the queue while rows, pages and budget last; returns the extended batch."""
        table = self.table
        rows, lens = planned.tolist(), taken.tolist()
        leaders: dict[bytes | int, int] = {}  # group -> index in the batch of a sequence that completes its prompt now
        for i in np.flatnonzero(table.computed[planned] + taken == table.prompt_len[planned]).tolist():
            self._note_leader(leaders, rows[i], i)
        admitted: list[int] = []
        while self.waiting and self._rows:
            sequence = self.waiting[0]
            leader = leaders.get(sequence.group) if sequence.fresh and not sequence.scoring else None
            if leader is not None:
                row = self._fork(sequence, rows[leader], copies)
                if row is None:
                    break
                forks.append((row, leader))
            else:
                row = self._admit(sequence) if budget else None
                if row is None:
                    break
                take = min(int(table.length[row] - table.computed[row]), budget)
                budget -= take
                upto = int(table.computed[row]) + take
                self._register(np.asarray([row]), np.asarray([upto]))
                if upto == table.prompt_len[row]:
                    self._note_leader(leaders, row, len(rows))
                rows.append(row)
                lens.append(take)
            self.waiting.popleft()
            admitted.append(row)
        self.order = np.concatenate([self.order, np.asarray(admitted, np.int64)])
        return np.asarray(rows, np.int64), np.asarray(lens, np.int64)

    def _note_leader(self, leaders: dict[bytes | int, int], row: int, index: int) -> None:
        sequence = self.running[row]
        if self.table.length[row] == self.table.prompt_len[row] and not sequence.scoring:
            leaders.setdefault(sequence.group, index)

    def _can_allocate(self, pages: int) -> bool:
        """Whether a new sequence can get `pages` and each running sequence can still get one more.

        Without that reserve, the next page of a decode could preempt the new sequence and discard its prefill.
        """
        return pages + len(self.running) <= self.blocks.available

    def _admit(self, sequence: Sequence) -> int | None:
        """Gives a waiting sequence a row and pages for all its known tokens; None if pages are short."""
        size = self.page_size
        tokens = sequence.tokens
        inputs = len(tokens) - int(sequence.scoring)
        shared: list[int] = []
        node = ROOT
        if self.blocks.prefix_caching and not sequence.scoring:
            content = tokens.tobytes()
            width = size * tokens.itemsize
            for page in range((inputs - 1) // size):  # the last token is always computed: its hidden state is needed
                found = self.blocks.lookup(node, content[page * width : (page + 1) * width])
                if found is None:
                    break
                node = found[0]
                shared.append(found[1])
        self.blocks.share(shared)
        need = ceil_div(inputs, size) - len(shared)
        if not self._can_allocate(need):
            self.blocks.release(shared)
            return None
        self.blocks.stats.hits += len(shared)
        self._count_cached(sequence, len(shared) * size)
        pages = shared + self.blocks.allocate(need)
        return self._enter(sequence, pages, len(shared) * size, node, len(shared))

    def _fork(self, sequence: Sequence, leader: int, copies: list[tuple[int, int]]) -> int | None:
        """Gives a fresh sequence the KV of `leader`, which completes the same prompt in this step.

        Full pages are shared. A partly filled last page is copied, because both sequences will write to it. Returns the
        row, or None if pages are short.
        """
        table, length = self.table, sequence.prompt_len
        full, rest = divmod(length, self.page_size)
        if not self._can_allocate(int(rest > 0)):
            return None
        pages = table.block_table[leader, :full].tolist()
        self.blocks.share(pages)
        if rest:
            pages += self.blocks.allocate(1)
            copies.append((int(table.block_table[leader, full]), pages[-1]))
        self.stats.forks += 1
        self._count_cached(sequence, length)
        return self._enter(sequence, pages, length, int(table.node[leader]), int(table.registered[leader]))

    def _count_cached(self, sequence: Sequence, tokens: int) -> None:
        self.stats.cached_tokens += tokens
        sequence.cached_tokens += min(tokens, sequence.prompt_len) if sequence.fresh else 0

    def _enter(self, sequence: Sequence, pages: list[int], computed: int, node: int, registered: int) -> int:
        row = self._rows.pop()
        self.table.load(row, sequence, pages, computed, node, registered)
        self.running[row] = sequence
        sequence.row = row
        return row

    # After the forward

    def commit(self, step: Step, tokens: Array, logps: Array, kept: Array | None) -> list[Sequence]:
        """Stores a step's results; returns the sequences that ended, with their tokens and log-probabilities.

        Args:
            step: the plan that was run.
            tokens: [S] sampled ids.
            logps: [S] fp32 log-probabilities.
            kept: [S, ceil(V/32)] int32 masks, or None if all tokens were kept.
        """
        table = self.table
        self.in_flight -= 1
        ended: list[int] = []
        if table.scoring[step.rows].any():
            scored = step.starts + step.query_lens == table.length[step.rows]
            ended += step.rows[table.scoring[step.rows] & scored].tolist()
        rows, at = step.sample_rows, step.positions
        alive = table.generation[rows] == step.generations
        if not alive.all():  # the step before has ended the others
            rows, at, tokens, logps = rows[alive], at[alive], tokens[alive], logps[alive]
            kept = None if kept is None else kept[alive]
        if len(rows):
            table.fill(rows, at, tokens, logps)
            by_id = (tokens[:, None] == table.stop_ids[rows]).any(1)
            done = by_id | (table.known[rows] >= table.limit[rows])
            if kept is not None:
                for i in np.flatnonzero(table.keeps[rows]).tolist():
                    self.running[int(rows[i])].kept.append(kept[i])
            for i in np.flatnonzero(table.has_stop_strings[rows]).tolist():
                sequence = self.running[int(rows[i])]
                assert sequence.stop_matcher is not None
                found = sequence.stop_matcher.push(int(tokens[i]))
                if found is not None:
                    sequence.finish_reason, sequence.stop_reason = "stop", found
                    done[i] = True
            for i in np.flatnonzero(by_id).tolist():
                sequence = self.running[int(rows[i])]
                if sequence.stop_reason is None:
                    sequence.finish_reason, sequence.stop_reason = "stop", int(tokens[i])
            ended += rows[done].tolist()
            self._register(rows[done], at[done])
        if not ended:
            return []
        finished = [self.running[row] for row in ended]
        for row, sequence in zip(ended, finished, strict=True):
            table.store(row, sequence)
        self._leave(np.asarray(ended))
        return finished

    def clear(self) -> None:
        """Drops all sequences and frees all rows and pages, also after an error that left a step half planned."""
        for sequence in self.running.values():
            sequence.row = -1
        self.waiting.clear()
        self.running.clear()
        self.order = np.zeros(0, np.int64)
        self.in_flight = 0
        self.table.generation += 1
        self._rows = list(range(self.table.rows - 1, -1, -1))
        self.blocks.reset()
