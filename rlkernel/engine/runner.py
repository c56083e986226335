"""Runs one planned step: builds the batch from the table, calls model and sampler, copies the result to the host.

All inputs of a step are in one buffer with fixed addresses, which CUDA graphs read, and are copied to the device at
once. On the CPU the kernels read that buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.engine.graphs import DecodeGraphs, padded, padded_keys, padded_rows, padded_table
from rlkernel.engine.scheduler import Step
from rlkernel.engine.table import SequenceTable, ceil_div
from rlkernel.models import KVCache, PagedBatch

if TYPE_CHECKING:
    from rlkernel.models import Decoder

Array = npt.NDArray[Any]

_ALIGN = 64


@dataclass
class StepResult:
    """Sampled ids [S] int64, their log-probabilities [S] fp32, kept masks [S, ceil(V/32)] int32 or None."""

    tokens: Array
    logps: Array
    kept: Array | None = None


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
        "hidden_index": (i64, rows),
        "logits_index": (i64, rows),
        "seeds": (i64, rows),
        "sample_positions": (i64, rows),
        "temperature": (f32, rows),
        "top_k": (i32, rows),
        "top_p": (f32, rows),
        "min_p": (f32, rows),
        "copies": (i64, 2 * rows),
        "input_ids": (i64, tokens),
        "positions": (i64, tokens),
        "slots": (i64, tokens),
        "block_table": (i32, rows * pages),
        "axes": (i64, 3 * tokens),
        "score_index": (i64, tokens),
        "score_targets": (i64, tokens),
        "score_temperature": (f32, tokens),
    }


class Runner:
    """The model, its KV cache and the step buffers.

    Args:
        model: the decoder; its parameters are read in place.
        cache: KV pages.
        table: rows of running sequences.
        max_num_batched_tokens: most tokens of a step.
        max_pages: most pages of one sequence.
        graphs: runs the forward of steps with one token per sequence; None: the model runs it.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: SequenceTable,
        max_num_batched_tokens: int,
        max_pages: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.table = table
        self.graphs = graphs
        self.axes = model.axes_of(np.zeros(1, np.int32)) is not None
        self._max_rows = min(table.rows, max_num_batched_tokens)
        self._max_keys = max_pages * table.page_size
        self.buffers = StepBuffers(
            model.head_weight.device, step_sections(max_num_batched_tokens, table.rows, max_pages)
        )

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Computes a step, writes the log-probabilities of scored prompts into the table, and returns the samples."""
        table, put = self.table, self.buffers.put
        size = table.page_size
        rows, starts, lens = step.rows, step.starts, step.query_lens
        self.buffers.begin()
        total, batch = int(lens.sum()), len(rows)
        if total == batch:
            ends, owners, positions = np.arange(1, batch + 1), rows, starts
        else:
            ends = np.cumsum(lens)
            owners = np.repeat(rows, lens)
            positions = np.arange(total) - np.repeat(ends - lens - starts, lens)
        seq_lens = starts + lens
        ids = table.tokens[owners, positions]
        slots = table.block_table[owners, positions // size].astype(np.int64) * size + positions % size
        graphs = self.graphs if total == batch and self.graphs is not None and self.graphs.usable else None
        axes = table.axes[owners, positions].T if self.axes else None
        if graphs is None:
            packed = self._batch(
                ids, positions, ends, seq_lens, rows, slots, int(seq_lens.max()), int(lens.max()), axes
            )
        else:
            packed = self._padded_batch(ids, positions, seq_lens, rows, slots)
        sampled = self._put_samples(step, ends, total)
        scored = self._put_scores(owners, positions) if table.scoring[rows].any() else None
        copies = put("copies", np.asarray(step.copies, np.int64).T) if step.copies else None
        self.buffers.send()

        hidden = self.model(packed) if graphs is None else graphs.forward(packed)[:total]
        if copies is not None:
            self._copy_pages(copies[0], copies[1])
        if scored is not None:
            index, arguments = scored
            logps = self.model.logprob(hidden.index_select(0, index), **arguments).logp
            which = table.scoring[owners]
            table.logps[owners[which], positions[which] + 1] = logps.cpu().numpy()
        if sampled is None:
            return StepResult(np.zeros(0, np.int64), np.zeros(0, np.float32))
        hidden_index, logits_index, arguments = sampled
        if hidden_index is not None:
            hidden = hidden.index_select(0, hidden_index)
        logits = self.model.logits(hidden)
        if logits_index is not None:
            logits = logits.index_select(0, logits_index)
        return to_host(ops.sample(logits, **arguments))

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
        )

    def _padded_batch(self, ids: Array, positions: Array, seq_lens: Array, rows: Array, slots: Array) -> PagedBatch:
        """A batch of one token per sequence, padded to the shape of its graph.

        A padding row is a sequence of one token, id 0 at position 0, that reads page 0 and stores nothing (slot -1).
        """
        size = padded_rows(len(rows), self._max_rows)
        return self._batch(
            padded(ids, size, 0),
            padded(positions, size, 0),
            np.arange(1, size + 1),
            padded(seq_lens, size, 1),
            rows,
            padded(slots, size, -1),
            padded_keys(int(seq_lens.max()), self._max_keys),
            1,
        )

    def _put_samples(
        self, step: Step, ends: Array, total: int
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Any]] | None:
        """(hidden rows that need logits, logits row of each sample, arguments of `ops.sample`); None takes all rows."""
        table, put, rows = self.table, self.buffers.put, step.sample_rows
        if not len(rows):
            return None
        unique = step.sample_batch[: len(rows) - step.num_forks]
        every = len(unique) == total
        logits_index = np.searchsorted(unique, step.sample_batch) if step.num_forks else None
        arguments: dict[str, Any] = {
            "seeds": put("seeds", table.seed[rows]),
            "positions": put("sample_positions", table.length[rows]),
            "temperature": put("temperature", table.temperature[rows]),
            "return_kept": bool(table.keeps[rows].any()),
        }
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            values = getattr(table, name)[rows]
            arguments[name] = put(name, values) if (values != off).any() else None
        return (
            None if every else put("hidden_index", ends[unique] - 1),
            None if logits_index is None else put("logits_index", logits_index),
            arguments,
        )

    def _put_scores(self, owners: Array, positions: Array) -> tuple[Tensor, dict[str, Any]]:
        """(hidden rows of scored prompts, arguments of `model.logprob`)."""
        table, put = self.table, self.buffers.put
        index = np.flatnonzero(table.scoring[owners])
        return put("score_index", index), {
            "targets": put("score_targets", table.tokens[owners[index], positions[index] + 1]),
            "temperature": put("score_temperature", table.temperature[owners[index]]),
        }

    def _copy_pages(self, sources: Tensor, destinations: Tensor) -> None:
        for pages in (*self.cache.k, *self.cache.v):
            pages.index_copy_(0, destinations, pages.index_select(0, sources))


def to_host(sample: ops.Sample) -> StepResult:
    """The sample on the host, copied from a device as one int32 tensor."""
    tokens, logps, kept = sample
    if tokens.device.type == "cpu":
        return StepResult(tokens.numpy(), logps.numpy(), None if kept is None else kept.numpy())
    return from_words(to_words(sample).cpu())


def to_words(sample: ops.Sample) -> Tensor:  # [S, 2 + words of a mask] int32
    """A sample as one tensor: ids, bits of the log-probabilities, masks."""
    tokens, logps, kept = sample
    columns = [tokens.to(torch.int32)[:, None], logps.view(torch.int32)[:, None]]
    return torch.cat(columns if kept is None else [*columns, kept], 1)


def from_words(words: Tensor) -> StepResult:
    """Inverse of `to_words`, on the CPU."""
    array = words.numpy()
    masks = array[:, 2:] if array.shape[1] > 2 else None
    return StepResult(array[:, 0].astype(np.int64), array[:, 1].copy().view(np.float32), masks)
