"""Interleaved timing of two callables: medians on one machine in one process, with the clocks warm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Ceilings measured on an NVIDIA H200 (torch 2.11, CUDA 13.0): a bf16 product of 8192^3 and a device-to-device copy.
PEAKS = {"NVIDIA H200": {"bf16_flops": 791e12, "bytes": 4.3e12}}

LAUNCH_CYCLES = 4_000_000
"""About 2 ms at 1.98 GHz: longer than the host needs to queue any candidate."""


def _once(fn: Callable[[], object], cuda: bool) -> float:
    if not cuda:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LAUNCH_CYCLES)  # the GPU waits while the host queues fn: GPU time, not launch time, is measured
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleaved(
    candidates: Sequence[Callable[[], object]], cuda: bool, rounds: int = 15, warm_up: int = 3
) -> list[float]:
    """Median milliseconds of each candidate; they take turns, so that clocks and caches treat them alike.

    On CUDA a 128 MiB write before every timing evicts the L2 cache, and the GPU is kept waiting while the host queues
    the work: what is measured is the time on the GPU, as under a CUDA graph.
    """
    flush = torch.empty(32 << 20, dtype=torch.int32, device="cuda") if cuda else None
    for _ in range(warm_up):
        for fn in candidates:
            fn()
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for fn, taken in zip(candidates, times, strict=True):
            if flush is not None:
                flush.zero_()
            taken.append(_once(fn, cuda))
    return [statistics.median(t) for t in times]


def peak_gib(fn: Callable[[], object], cuda: bool) -> float | None:
    """Device memory that fn needs beyond what was allocated before, in GiB; None on the CPU."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def share_of_roofline(ms: float, flops: float, moved_bytes: float) -> float | None:
    """Time the larger of arithmetic and memory needs at the measured ceilings, over the time taken."""
    if not torch.cuda.is_available():
        return None
    peak = PEAKS.get(torch.cuda.get_device_name())
    if peak is None:
        return None
    return max(flops / peak["bf16_flops"], moved_bytes / peak["bytes"]) / (ms * 1e-3)
