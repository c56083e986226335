"""CUDA graphs of decode steps: the model's forward over padded batches, recorded once a shape and then replayed.

A decode step is hundreds of short kernels, and launching them one by one takes the host longer than the GPU takes to
run them. A graph launches them all at once. It holds addresses, never values: inputs lie in the runner's step buffers,
weights and cache where they are. Padding adds sequences to the batch and the contract keeps a token's bits whatever is
in its batch, so a replay gives the bits of the eager forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
Forward = Callable[[], Tensor]
Key = tuple[int, int]


def padded_rows(rows: int, limit: int) -> int:
    """Sequences of the graph that serves `rows` of them: 1, 2, 4, 8, a multiple of 16, or `limit`, the most."""
    size = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 16) * 16
    return min(size, limit)


def padded_keys(keys: int, limit: int) -> int:
    """Keys that the graph for a longest sequence of `keys` is launched for: a power of two, or `limit`, the most.

    They decide how many splits attention launches, each a program that ends at once where a sequence has no such
    split. Up to one split the launch is the same, so no graph is made for less.
    """
    return min(max(ATTENTION_SPLIT, 1 << (keys - 1).bit_length()), limit)


def padded(values: Array, size: int, fill: int) -> Array:  # [n] -> [size]
    """`values` and then `fill`."""
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
    """Records forwards on a GPU; the graphs share one memory pool.

    They may: a replay reads nothing that an earlier replay left there, and its result is consumed before the next one
    starts. The pool therefore holds the activations of one decode step, not of all graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        """Records `forward`, which ran before (kernels are compiled then); returns what replays it.

        Raises:
            RuntimeError: something in the forward cannot be recorded, or memory is short.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Calls that a recording forbids are forbidden to this thread alone: others may allocate meanwhile.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                out = forward()
        except RuntimeError as error:
            raise RuntimeError(
                f"the decode step could not be recorded as a CUDA graph: {error}; LLM(..., cuda_graphs=False) runs it "
                "kernel by kernel"
            ) from error

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return replay


class DecodeGraphs:
    """Graphs of a model's decode steps, by (padded sequences, padded keys).

    A shape runs eagerly when it comes up first, which compiles its kernels, and is recorded when it comes up again.
    Everything recorded is dropped when the parameters, the cache or the step buffers lie elsewhere than at recording;
    values written in place need nothing.

    Args:
        model: the decoder.
        recorder: makes the object that records; called again after everything was dropped.

    Attributes:
        recorded, replayed: counts since the start.
    """

    def __init__(self, model: Decoder, recorder: Callable[[], Callable[[Forward], Forward]]) -> None:
        self._model = model
        self._make_recorder = recorder
        self._recorder: Callable[[Forward], Forward] | None = None
        self._graphs: dict[Key, Forward] = {}
        self._warm: set[Key] = set()
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
        """Looks up the model's modules anew; a replaced parameter is noticed without it, a replaced module is not."""
        self._owners.clear()
        for module in self._model.modules():
            self._owners += [(module._parameters, name) for name in module._parameters]
            self._owners += [(module._buffers, name) for name in module._buffers]

    def forward(self, batch: PagedBatch) -> Tensor:  # [T, C], overwritten by the next call
        """`model(batch)`: replayed where this shape was recorded.

        Args:
            batch: one token a sequence, tensors in the step buffers, padded such that equal (sequences, max_seqlen_k)
                mean equal shapes and addresses.
        """
        places = self._addresses(batch)
        if places != self._places:
            self._graphs.clear()
            self._warm.clear()
            self._recorder, self._places = None, places
        key = (batch.seq_lens_k.numel(), batch.max_seqlen_k)
        replay = self._graphs.get(key)
        if replay is None:
            if key not in self._warm:
                out = self._model(batch)
                self._warm.add(key)
                return out
            self._recorder = self._recorder or self._make_recorder()
            replay = self._graphs[key] = self._recorder(lambda: self._model(batch))
            self.recorded += 1
        self.replayed += 1
        return replay()

    def _addresses(self, batch: PagedBatch) -> tuple[int, ...]:
        found = [held.get(name) for held, name in self._owners]
        found += [batch.input_ids, batch.kv_cache.k[0], batch.kv_cache.v[0]]
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)


def wanted(cuda_graphs: bool | None, device: torch.device) -> bool:
    """Whether decode steps of a model on `device` are recorded; None: on NVIDIA GPUs.

    Raises:
        ValueError: True without a GPU.
    """
    if cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"LLM: cuda_graphs=True, but the model is on {device}; move it to a GPU, or leave cuda_graphs out"
        )
    if cuda_graphs is None:
        return device.type == "cuda" and torch.version.hip is None
    return cuda_graphs
