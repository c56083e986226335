"""A model of integers in place of a decoder, so that the engine's bookkeeping can be run and checked without kernels.

The "KV" of a token is a hash of all tokens up to it, kept per page slot; what is sampled is a hash of that, the seed
and the position. A wrong page, a stale page or a page overwritten too early therefore changes the output or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import numpy as np

from rlkernel.engine.block_manager import BlockManager
from rlkernel.engine.request import Request, Sequence
from rlkernel.engine.sampling_params import SamplingParams
from rlkernel.engine.scheduler import Scheduler, Step
from rlkernel.engine.table import SequenceTable

VOCAB = 7
PRIME = (1 << 61) - 1
EOS = 0


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token."""
    return (prefix * 1000003 + token + 1) % PRIME


def draw(prefix: int, seed: int, position: int) -> tuple[int, float]:
    """Token sampled after a prefix, and its "log-probability"."""
    mixed = extend(extend(prefix, seed % 1009), position)
    return mixed % VOCAB, -float(np.float32(mixed % 65537) / 7)


def expected(prompt: list[int], seed: int, params: SamplingParams, max_model_len: int) -> tuple[list[int], list[float]]:
    """The completion computed on its own, token after token."""
    prefix, tokens, logps = 1, [], []
    for token in prompt:
        prefix = extend(prefix, token)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while len(tokens) < params.max_tokens and len(prompt) + len(tokens) < max_model_len:
        token, logp = draw(prefix, seed, len(prompt) + len(tokens))
        tokens.append(token)
        logps.append(logp)
        if token in stops:
            break
        prefix = extend(prefix, token)
    return tokens, [float(np.float32(x)) for x in logps]


class Simulation:
    """Scheduler, pages and the integer model, with every step checked."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool = True,
        max_model_len: int = 64,
        ahead: int = 0,
    ) -> None:
        self.blocks = BlockManager(num_pages, prefix_caching)
        self.table = SequenceTable(max_num_seqs, page_size, (EOS,), max_model_len)
        self.scheduler = Scheduler(self.blocks, self.table, budget)
        self.kv = np.zeros((num_pages, page_size), np.int64)
        self.version = np.zeros(num_pages, np.int64)
        self.done: dict[int, Request] = {}
        self.next_id = 0
        self.ahead = ahead  # steps that run before the results of one are committed
        self.launched: deque[tuple[Step, np.ndarray, np.ndarray]] = deque()
        self.last = np.zeros(max_num_seqs, np.int64)  # last token sampled in each row, as on the device

    def add(self, prompt: list[int], params: SamplingParams, seed: int) -> Request:
        request = Request(self.next_id, None, prompt, params, seed)
        self.next_id += 1
        for sequence in request.spawn(None, self.blocks.prefix_caching):
            self.scheduler.add(sequence)
        return request

    def holders(self) -> list[list[int]]:
        return [self.table.pages(row) for row in self.scheduler.running]

    def step(self) -> list[Sequence]:
        before = set(self.scheduler.running.values())
        step = self.scheduler.schedule()
        if step is not None:
            self.blocks.check(self.holders())
            self._check_plan(step)
            self.launched.append((step, *self._forward(step, before)))
        if not self.launched or (step is not None and len(self.launched) <= self.ahead):
            return []
        ended = self.scheduler.commit(*self.launched.popleft(), None)
        self.blocks.check(self.holders())
        for sequence in ended:
            sequence.request.unfinished -= 1
            if sequence.request.unfinished == 0:
                self.done[sequence.request.request_id] = sequence.request
        return ended

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def _check_plan(self, step: Step) -> None:
        lens = step.query_lens
        assert len(lens) and lens.min() >= 1 and lens.sum() <= self.scheduler.budget
        assert len(set(step.rows.tolist())) == len(step.rows), "a row is in the batch twice"
        sequences = [self.scheduler.running[row] for row in self.scheduler.order.tolist()] + [*self.scheduler.waiting]
        arrivals = [(sequence.request.request_id, sequence.index) for sequence in sequences]
        assert arrivals == sorted(arrivals), "first come is not first served"

    def _forward(self, step: Step, before: Set[Sequence] = frozenset()) -> tuple[np.ndarray, np.ndarray]:
        size, table = self.table.page_size, self.table
        holders: dict[int, set[Sequence]] = {}
        for row, sequence in self.scheduler.running.items():
            for page in table.pages(row):
                holders.setdefault(page, set()).add(sequence)
        written: set[tuple[int, int]] = set()
        # All stores come first, then all reads: what the decoder does in each layer.
        for row, start, length in zip(step.rows, step.starts, step.query_lens, strict=True):
            prefix = 1
            for position in range(start + length):
                prefix = extend(prefix, self._token(row, position))
                if position >= start:
                    page, offset = int(table.block_table[row, position // size]), position % size
                    others = holders[page] - {self.scheduler.running[int(row)]}
                    assert not others & before, "a sequence writes a page that another running sequence holds"
                    assert (page, offset) not in written, "a slot is written twice in one step"
                    written.add((page, offset))
                    self.kv[page, offset] = prefix
        hidden = []
        for row, start, length in zip(step.rows, step.starts, step.query_lens, strict=True):
            prefix = 1
            for position in range(start + length):
                prefix = extend(prefix, self._token(row, position))
                found = self.kv[table.block_table[row, position // size], position % size]
                assert found == prefix, f"row {row} reads wrong KV at position {position}"
            hidden.append(prefix)
        for source, destination in step.copies:
            assert self.blocks.references(destination) == 1
            self.kv[destination] = self.kv[source]
        drawn = [
            draw(hidden[batch], int(table.seed[row]), int(position))
            for row, batch, position in zip(step.sample_rows, step.sample_batch, step.positions, strict=True)
        ]
        self.last[step.sample_rows] = [d[0] for d in drawn]
        return np.array([d[0] for d in drawn], np.int64), np.array([d[1] for d in drawn], np.float32)

    def _token(self, row: int, position: int) -> int:
        """A row's token; one that is not known yet is the last one sampled in the row."""
        token = int(self.table.tokens[row, position])
        if token < 0:
            assert position == self.table.computed[row] - 1
            token = int(self.last[row])
        return token

    def check_outputs(self, requests: list[Request]) -> None:
        """Every completion equals the one computed alone, and no page is held."""
        for request in requests:
            for sequence in request.sequences:
                want = expected(request.prompt_token_ids, sequence.seed, request.params, self.table.max_model_len)
                out = sequence.output(None)
                assert (out.token_ids, out.logprobs) == want
                stopped = out.finish_reason == "stop"
                assert stopped == (out.stop_reason is not None) == (out.stop_reason == out.token_ids[-1])
        assert self.blocks.available == self.blocks.num_pages
        self.blocks.check()
