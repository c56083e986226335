"""CUDA graphs of decode steps: forward and sampling over padded batches, captured once per shape and then replayed.

Launching the hundreds of short kernels of a decode step takes the host longer than the GPU needs to run them. A replay
has the bits of the eager forward, because padding only adds sequences and a token's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract.orders import ATTENTION_SPLIT
from rlkernel.models import PagedBatch
from rlkernel.ops.define import is_forced

if TYPE_CHECKING:
    from rlkernel.models import Decoder

Array = npt.NDArray[Any]
Work = Callable[[], Tensor]


def power_of_2(n: int) -> int:
    """Smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def padded_rows(rows: int, limit: int) -> int:
    """Batch size of the graph for `rows` sequences: 1, 2, 4, 8, a multiple of 16, or at most `limit`."""
    size = power_of_2(rows) if rows <= 8 else -(-rows // 16) * 16
    return min(size, limit)


def padded_keys(keys: int, limit: int) -> int:
    """`max_seqlen_k` of the graph for a longest sequence of `keys`: a power of two, or at most `limit`.

    It determines how many splits attention launches; programs of splits that a sequence does not have exit at once.
    Fewer keys than one split need no graph of their own.
    """
    return min(max(ATTENTION_SPLIT, power_of_2(keys)), limit)


def padded(values: Array, size: int, fill: int) -> Array:  # [n] -> [size]
    """`values`, padded with `fill`."""
    out = np.full(size, fill, values.dtype)
    out[: len(values)] = values
    return out


def padded_table(block_table: Array, rows: Array, size: int, pages: int) -> Array:  # [size, pages]
    """The block table of `rows`, with page 0 in padded rows and columns."""
    out = np.zeros((size, pages), block_table.dtype)
    columns = min(pages, block_table.shape[1])
    out[: len(rows), :columns] = block_table[rows, :columns]
    return out


class Recorder:
    """Captures steps on a GPU. The graphs share one memory pool, which holds the activations of one decode step.

    Sharing is safe, because a replay reads nothing of an earlier one and its result is consumed before the next starts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Captures `work`, which has run once so that its kernels are compiled; returns a function that replays it.

        Raises:
            RuntimeError: the step cannot be captured, or memory is short.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may allocate memory during the capture.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                out = work()
        except RuntimeError as error:
            raise RuntimeError(
                f"the decode step could not be captured as a CUDA graph: {error}; LLM(..., cuda_graphs=False) runs it "
                "without graphs"
            ) from error

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return replay


class DecodeGraphs:
    """Graphs of a model's decode steps, by a key of their shapes and settings.

    A shape first runs eagerly, which compiles its kernels, and is captured the second time. All graphs are dropped when
    the parameters, the cache or the step buffers have other addresses than at capture; values may change in place.

    Args:
        model: the decoder.
        recorder: makes the object that captures; called again after all graphs were dropped.

    Attributes:
        recorded, replayed: numbers of captures and replays.
    """

    def __init__(self, model: Decoder, recorder: Callable[[], Callable[[Work], Work]]) -> None:
        self._model = model
        self._make_recorder = recorder
        self._recorder: Callable[[Work], Work] | None = None
        self._graphs: dict[Hashable, Work] = {}
        self._warm: set[Hashable] = set()
        self._places: tuple[int, ...] = ()
        self._owners: list[tuple[Mapping[str, Tensor | None], str]] = []
        self.recorded = 0
        self.replayed = 0
        self.refresh()

    @property
    def usable(self) -> bool:
        """Whether the default implementations run; blocks that choose others (tests, control arm) stay eager."""
        return not ops.is_stock() and not is_forced()

    def refresh(self) -> None:
        """Lists the model's modules again; needed after a module, but not after a parameter, was replaced."""
        self._owners.clear()
        for module in self._model.modules():
            self._owners += [(module._parameters, name) for name in module._parameters]
            self._owners += [(module._buffers, name) for name in module._buffers]

    def clear(self) -> None:
        """Drops all graphs and the memory of their activations."""
        self._graphs.clear()
        self._warm.clear()
        self._recorder = None

    def run(self, key: Hashable, batch: PagedBatch, work: Work) -> Tensor:
        """`work()`, replayed if its key was captured; the result is overwritten by the next call.

        Args:
            key: equal keys must mean equal launches, with equal shapes and addresses.
            batch: one token per sequence, with tensors in the step buffers.
            work: computes the step of `batch`.
        """
        places = self._addresses(batch)
        if places != self._places:
            self.clear()
            self._places = places
        replay = self._graphs.get(key)
        if replay is None:
            if key not in self._warm:
                out = work()
                self._warm.add(key)
                return out
            self._recorder = self._recorder or self._make_recorder()
            replay = self._graphs[key] = self._recorder(work)
            self.recorded += 1
        self.replayed += 1
        return replay()

    def _addresses(self, batch: PagedBatch) -> tuple[int, ...]:
        found = [held.get(name) for held, name in self._owners]
        found += [batch.input_ids, batch.kv_cache.k[0], batch.kv_cache.v[0]]
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)


def wanted(cuda_graphs: bool | None, device: torch.device) -> bool:
    """Whether decode steps of a model on `device` are captured; None: on NVIDIA GPUs.

    Raises:
        ValueError: `cuda_graphs` is True and the model is not on a GPU.
    """
    if cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"LLM: cuda_graphs=True, but the model is on {device}; move it to a GPU, or leave cuda_graphs out"
        )
    if cuda_graphs is None:
        return device.type == "cuda" and torch.version.hip is None
    return cuda_graphs
