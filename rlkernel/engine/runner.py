"""Launches one planned step: builds the batch from the table, calls model and sampler, copies the result to the host.

All inputs of a step are in one buffer with fixed addresses, which CUDA graphs read, and are copied to the device at
once. On the CPU the kernels read that buffer. The last token sampled in each row of the table stays on the device, so
that the next step can be launched before the host knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.engine.graphs import DecodeGraphs, padded, padded_keys, padded_rows, padded_table, power_of_2
from rlkernel.engine.scheduler import Step
from rlkernel.engine.shared_prefix import Grouping, PrefixGroups
from rlkernel.engine.table import SequenceTable, ceil_div
from rlkernel.models import KVCache, PagedBatch

if TYPE_CHECKING:
    from rlkernel.models import Decoder

Array = npt.NDArray[Any]

_ALIGN = 64
LEAST_GROUPS, LEAST_MEMBERS = 8, 16
"""Smallest numbers of groups, and of sequences per group, for which attention of a decode step is launched."""


@dataclass
class StepResult:
    """Sampled ids [S] int64, their log-probabilities [S] fp32, kept masks [S, ceil(V/32)] int32 or None."""

    tokens: Array
    logps: Array
    kept: Array | None = None


class Launched:
    """Results of a launched step, on their way to the host.

    Args:
        samples: the packed samples (`to_words`) of the rows that were computed, or None.
        rows: [S] row of `samples` of each sample of the step.
        scores: log-probabilities of scored prompts, or None, and where they go in the table.
    """

    def __init__(
        self, samples: Tensor | None, rows: Array, scores: Tensor | None, keep_scores: Callable[[Array], None]
    ) -> None:
        self._samples = None if samples is None else _copied(samples)
        self._rows = rows
        self._scores = None if scores is None else _copied(scores)
        self._keep_scores = keep_scores
        found = samples if samples is not None else scores
        self._done = torch.cuda.Event() if found is not None and found.is_cuda else None
        if self._done is not None and found is not None:
            self._done.record(torch.cuda.current_stream(found.device))

    def result(self) -> StepResult:
        """Waits for the step, writes the log-probabilities of scored prompts into the table, returns the samples."""
        if self._done is not None:
            self._done.synchronize()
        if self._scores is not None:
            self._keep_scores(self._scores.numpy())
        if self._samples is None:
            return StepResult(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return from_words(self._samples.numpy()[self._rows])


def _copied(values: Tensor) -> Tensor:
    """The values on the host, valid once the current stream gets here."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class StepBuffers:
    """Named sections of one host buffer (pinned for CUDA) and of its copy on the device.

    Args:
        device: the model's device.
        sections: name -> (dtype, elements), in this order; those whose size varies most come last.
        staged: keep a copy on the device; default if the device is not the CPU.
    """

    def __init__(
        self, device: torch.device, sections: dict[str, tuple[torch.dtype, int]], staged: bool | None = None
    ) -> None:
        offsets, total = {}, 0
        for name, (dtype, count) in sections.items():
            offsets[name] = total
            total += ceil_div(count * dtype.itemsize, _ALIGN) * _ALIGN
        self._staged = device.type != "cpu" if staged is None else staged
        self._host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty(total, dtype=torch.uint8, device=device) if self._staged else self._host
        self._arrays: dict[str, Array] = {}
        self._tensors: dict[str, Tensor] = {}
        self._offsets = {name: (offsets[name], dtype.itemsize) for name, (dtype, _) in sections.items()}
        for name, (dtype, count) in sections.items():
            span = slice(offsets[name], offsets[name] + count * dtype.itemsize)
            self._arrays[name] = self._host[span].view(dtype).numpy()
            self._tensors[name] = self._device[span].view(dtype)
        self._used = 0
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def begin(self) -> None:
        """Starts a step; waits until the last step's copy to the device has finished."""
        self._used = 0
        if self._sent is not None:
            self._sent.synchronize()

    def put(self, name: str, values: Array) -> Tensor:
        """Writes `values` into a section; returns the device tensor of that shape, valid after `send`."""
        size = values.size
        self._arrays[name][:size] = values.reshape(-1)
        offset, itemsize = self._offsets[name]
        self._used = max(self._used, offset + size * itemsize)
        out = self._tensors[name][:size]
        return out if values.ndim == 1 else out.view(values.shape)

    def send(self) -> None:
        """Copies the used part to the device."""
        if self._staged:
            self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device.device))


def step_sections(tokens: int, rows: int, pages: int) -> dict[str, tuple[torch.dtype, int]]:
    """Sections for steps of at most `tokens` tokens and `rows` sequences of `pages` pages."""
    i64, i32, f32 = torch.int64, torch.int32, torch.float32
    return {
        "cu_seqlens": (i32, rows + 1),
        "seq_lens": (i32, rows),
        "groups": (i32, LEAST_GROUPS + rows + 1),
        "shared": (i32, rows),
        "sample_rows": (i64, rows),
        "hidden_index": (i64, rows),
        "logits_index": (i64, rows),
        "seeds": (i64, rows),
        "sample_positions": (i64, rows),
        "temperature": (f32, rows),
        "top_k": (i32, rows),
        "top_p": (f32, rows),
        "min_p": (f32, rows),
        "copies": (i64, 2 * rows),
        "owners": (i64, tokens),
        "input_ids": (i64, tokens),
        "positions": (i64, tokens),
        "slots": (i64, tokens),
        "block_table": (i32, rows * pages),
        "axes": (i64, 3 * tokens),
        "score_index": (i64, tokens),
        "score_targets": (i64, tokens),
        "score_temperature": (f32, tokens),
    }


LAST = 64
"""Sequences that a decode step takes in order of their length: about twice as many as an H200 attends to at a time with
8 key heads. A whole batch in that order is the line "longest first" of `bench_attention`; 64 have no record."""


def shortest_last(lengths: Array, last: int = LAST) -> Array:  # [B] -> [B]
    """Order of a decode batch in which the `last` shortest sequences end it, the shortest at its end.

    A GPU starts the programs of attention in the order of the batch, and the time of the last ones is not hidden.
    """
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate([np.sort(order[:-last]), order[-last:]])


class Runner:
    """The model, its KV cache and the step buffers.

    Args:
        model: the decoder; its parameters are read in place.
        cache: KV pages.
        table: rows of running sequences.
        max_num_batched_tokens: most tokens of a step.
        max_pages: most pages of one sequence.
        graphs: runs steps in which every sequence has one token; None: they run like the others.
        prefixes: finds completions of one prompt, whose keys are then read once; None: each sequence reads its own.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: SequenceTable,
        max_num_batched_tokens: int,
        max_pages: int,
        graphs: DecodeGraphs | None = None,
        prefixes: PrefixGroups | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.table = table
        self.graphs = graphs
        self.prefixes = prefixes
        self.axes = model.axes_of(np.zeros(1, np.int32)) is not None
        self._max_rows = min(table.rows, max_num_batched_tokens)
        self._max_keys = max_pages * table.page_size
        # by row of the table; padding has a row of its own
        self._last_tokens = torch.zeros(table.rows + 1, dtype=torch.int64, device=model.head_weight.device)
        self.buffers = StepBuffers(
            model.head_weight.device, step_sections(max_num_batched_tokens, table.rows, max_pages)
        )

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Starts the computation of a step; on a GPU it returns while the GPU works."""
        table = self.table
        rows, starts, lens = step.rows, step.starts, step.query_lens
        self.buffers.begin()
        is_decode = int(lens.sum()) == len(rows) and not (self.axes and self._name_media(table.tokens[rows, starts]))
        if not is_decode or step.copies or step.num_forks or table.scoring[rows].any():
            return self._launch_eagerly(step)
        graphs = self.graphs if self.graphs is not None and self.graphs.usable else None
        size = len(rows) if graphs is None else padded_rows(len(rows), self._max_rows)
        keys = int(starts.max()) + 1
        if graphs is not None:
            keys = padded_keys(keys, self._max_keys)
        grouping = None if self.prefixes is None else self.prefixes.find(rows)
        order = shortest_last(starts) if grouping is None else grouping.order
        rows, starts, sampled = rows[order], starts[order], np.argsort(order)[step.sample_batch]
        batch, owners = self._decode_batch(rows, starts, size, keys)
        if grouping is not None:
            batch = replace(batch, shared=self._shared(grouping, size))
        # every row of the batch gets a token; the step reads those of completed sequences
        arguments = self._sampling(rows, starts + 1, size)
        self.buffers.send()
        work = lambda: self._decode(batch, owners, arguments)
        filters = tuple(name for name, value in arguments.items() if isinstance(value, Tensor))
        shared = None if batch.shared is None else (batch.shared.groups.shape[0], *batch.shared[2:])
        key = (size, keys, filters, arguments["return_kept"], shared)
        words = work() if graphs is None else graphs.run(key, batch, work)
        return Launched(words, sampled, None, _no_scores)

    def _decode(self, batch: PagedBatch, owners: Tensor, arguments: dict[str, Any]) -> Tensor:  # [B, words] int32
        """One token of every sequence: `to_words` of the samples."""
        sample = ops.sample(self.model.logits(self._hidden(batch, owners)), **arguments)
        self._last_tokens.index_copy_(0, owners, sample.tokens)
        return to_words(sample)

    def _hidden(self, batch: PagedBatch, owners: Tensor) -> Tensor:  # [T, C]
        """The forward; a token id of -1 stands for the last one sampled in the token's row of the table."""
        ids = batch.input_ids
        return self.model(replace(batch, input_ids=torch.where(ids < 0, self._last_tokens[owners], ids)))

    def _decode_batch(self, rows: Array, positions: Array, size: int, keys: int) -> tuple[PagedBatch, Tensor]:
        """A batch of one token per sequence, padded to `size` sequences, and the row of each token in the table.

        A padding row is a sequence of one token, id 0 at position 0, that reads page 0 and stores nothing (slot -1).
        """
        table, page = self.table, self.table.page_size
        pages = table.block_table[rows, positions // page].astype(np.int64)
        axes = [padded(axis, size, 0) for axis in table.axes[rows, positions].T] if self.axes else None
        batch = self._batch(
            padded(table.tokens[rows, positions], size, 0),
            padded(positions, size, 0),
            np.arange(1, size + 1),
            padded(positions + 1, size, 1),
            rows,
            padded(pages * page + positions % page, size, -1),
            keys,
            1,
            None if axes is None else np.stack(axes),
        )
        return batch, self.buffers.put("owners", padded(rows, size, table.rows))

    def _shared(self, grouping: Grouping, size: int) -> ops.SharedPrefix:
        """The groups in the step buffers; their number and sizes are padded to powers of two, for few graphs.

        Programs of empty groups exit at once.
        """
        borders, put = grouping.groups, self.buffers.put
        count = power_of_2(max(LEAST_GROUPS, len(borders) - 1))
        most = power_of_2(max(LEAST_MEMBERS, int(np.diff(borders).max())))
        return ops.SharedPrefix(
            put("groups", padded(borders, count + 1, borders[-1])),
            put("shared", padded(grouping.lengths, size, 0)),
            most,
            padded_keys(int(grouping.lengths.max()), self._max_keys),
        )

    def _name_media(self, ids: Array) -> bool:
        """Whether one of the ids is a feature of a medium; ids of a token that is being sampled are -1."""
        return bool((ids >= self.model.config.vocab_size).any())

    def _launch_eagerly(self, step: Step) -> Launched:
        """A step with prefill, forks or scored prompts."""
        table, put, size = self.table, self.buffers.put, self.table.page_size
        rows, starts, lens = step.rows, step.starts, step.query_lens
        ends, owners = np.cumsum(lens), np.repeat(rows, lens)
        positions = np.arange(len(owners)) - np.repeat(ends - lens - starts, lens)
        seq_lens = starts + lens
        ids = table.tokens[owners, positions]
        slots = table.block_table[owners, positions // size].astype(np.int64) * size + positions % size
        axes = table.axes[owners, positions].T if self.axes else None
        batch = self._batch(ids, positions, ends, seq_lens, rows, slots, int(seq_lens.max()), int(lens.max()), axes)
        token_rows = put("owners", owners)
        sampled = self._put_samples(step, ends)
        which = np.flatnonzero(table.scoring[owners])
        scored = self._put_scores(owners[which], positions[which], which) if len(which) else None
        copies = put("copies", np.asarray(step.copies, np.int64).T) if step.copies else None
        self.buffers.send()

        hidden = self._hidden(batch, token_rows)
        if copies is not None:
            self._copy_pages(copies[0], copies[1])
        scores = None
        if scored is not None:
            index, arguments = scored
            scores = self.model.logprob(hidden.index_select(0, index), **arguments).logp
        words = None
        if sampled is not None:
            hidden_index, logits_index, sample_rows, arguments = sampled
            logits = self.model.logits(hidden.index_select(0, hidden_index))
            if logits_index is not None:
                logits = logits.index_select(0, logits_index)
            sample = ops.sample(logits, **arguments)
            self._last_tokens.index_copy_(0, sample_rows, sample.tokens)
            words = to_words(sample)

        def keep_scores(logps: Array) -> None:
            table.logps[owners[which], positions[which] + 1] = logps

        return Launched(words, np.arange(len(step.sample_rows)), scores, keep_scores)

    def _batch(
        self,
        ids: Array,
        positions: Array,
        ends: Array,
        seq_lens: Array,
        rows: Array,
        slots: Array,
        max_seqlen_k: int,
        max_seqlen_q: int,
        axes: Array | None = None,
    ) -> PagedBatch:
        """The batch in the step buffers; `ends`: end offset of each sequence."""
        put, pages = self.buffers.put, ceil_div(max_seqlen_k, self.table.page_size)
        return PagedBatch(
            input_ids=put("input_ids", ids),
            positions=put("positions", positions),
            cu_seqlens_q=put("cu_seqlens", np.concatenate([[0], ends])),
            seq_lens_k=put("seq_lens", seq_lens),
            block_table=put("block_table", padded_table(self.table.block_table, rows, len(seq_lens), pages)),
            slots=put("slots", slots),
            kv_cache=self.cache,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            axes=None if axes is None else put("axes", axes),
            has_media=axes is not None and self._name_media(ids),
        )

    def _sampling(self, rows: Array, positions: Array, size: int) -> dict[str, Any]:
        """Arguments of `ops.sample` for the tokens at `positions` of `rows`, padded to `size` rows."""
        table, put = self.table, self.buffers.put
        arguments: dict[str, Any] = {
            "seeds": put("seeds", padded(table.seed[rows], size, 0)),
            "positions": put("sample_positions", padded(positions, size, 0)),
            "temperature": put("temperature", padded(table.temperature[rows], size, 1)),
            "return_kept": bool(table.keeps[rows].any()),
        }
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            values = getattr(table, name)[rows]
            arguments[name] = put(name, padded(values, size, off)) if (values != off).any() else None
        return arguments

    def _put_samples(self, step: Step, ends: Array) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Any]] | None:
        """(hidden rows that need logits, logits row of each sample, its table row, arguments of `ops.sample`).

        The logits rows are None if they are those of the samples.
        """
        put, rows = self.buffers.put, step.sample_rows
        if not len(rows):
            return None
        unique = step.sample_batch[: len(rows) - step.num_forks]
        logits_index = np.searchsorted(unique, step.sample_batch) if step.num_forks else None
        return (
            put("hidden_index", ends[unique] - 1),
            None if logits_index is None else put("logits_index", logits_index),
            put("sample_rows", rows),
            self._sampling(rows, step.positions, len(rows)),
        )

    def _put_scores(self, rows: Array, positions: Array, index: Array) -> tuple[Tensor, dict[str, Any]]:
        """(hidden rows of scored prompts, arguments of `model.logprob`)."""
        table, put = self.table, self.buffers.put
        return put("score_index", index), {
            "targets": put("score_targets", table.tokens[rows, positions + 1]),
            "temperature": put("score_temperature", table.temperature[rows]),
        }

    def _copy_pages(self, sources: Tensor, destinations: Tensor) -> None:
        for pages in (*self.cache.k, *self.cache.v):
            pages.index_copy_(0, destinations, pages.index_select(0, sources))


def _no_scores(_: Array) -> None:
    """A step without scored prompts."""


def to_words(sample: ops.Sample) -> Tensor:  # [S, 2 + words of a mask] int32
    """A sample as one tensor: ids, bits of the log-probabilities, masks."""
    tokens, logps, kept = sample[:3]
    columns = [tokens.to(torch.int32)[:, None], logps.view(torch.int32)[:, None]]
    return torch.cat(columns if kept is None else [*columns, kept], 1)


def from_words(words: Array) -> StepResult:
    """Inverse of `to_words`, on the host."""
    masks = words[:, 2:] if words.shape[1] > 2 else None
    return StepResult(words[:, 0].astype(np.int64), words[:, 1].copy().view(np.float32), masks)
