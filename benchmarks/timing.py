"""Interleaved timing of several callables: medians on one machine, in one process, after warm-up.

`compare` also measures memory and notes candidates that run out of it; `rows` makes lines of a result file.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# Ceilings measured on an NVIDIA H200 (torch 2.11, CUDA 13.0): a bf16 product of 8192^3 and a device-to-device copy.
PEAKS = {"NVIDIA H200": {"bf16_flops": 791e12, "bytes": 4.3e12}}

LAUNCH_CYCLES, MOST_CYCLES = 12_000_000, 96_000_000
"""First and longest wait of the GPU. The first, about 6 ms at 1.98 GHz, is longer than the host needs to queue most
candidates; a candidate that synchronises can never be queued in time."""


def _once(fn: Callable[[], object], cuda: bool, cycles: int) -> tuple[float, bool]:
    """Milliseconds of a call, and whether they are GPU time only: the GPU still waited when the host had queued all."""
    if not cuda:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3, True
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)  # the GPU waits while the host queues fn: GPU time, not launch time, is measured
    begin.record()
    fn()
    end.record()
    hidden = not begin.query()
    end.synchronize()
    return begin.elapsed_time(end), hidden


def interleaved(
    candidates: Sequence[Callable[[], object]],
    cuda: bool,
    rounds: int = 15,
    warm_up: int = 3,
    rest: float = 0.0,
    by_copy: bool = False,
) -> list[float]:
    """Median milliseconds of each candidate. They alternate in random order, so that clocks and caches affect all
    alike.

    `rest` is a pause in seconds before each sample: at the power limit, a candidate is up to a tenth slower after a
    demanding one. On CUDA a 128 MiB write before every sample evicts the L2 cache, and the GPU waits while the host
    queues the work, so that GPU time is measured, as under a CUDA graph.

    If the host was not done queueing when the wait ended, the sample is retaken with twice the wait, and all rounds
    start again with that wait for all candidates, because a GPU that rested longer has more power. If the longest wait
    fails twice in a row, the candidate itself synchronises and is always measured with the longest wait; a single
    failure may be a pause of the host.

    The eviction by a write leaves dirty lines, and the candidate waits for their write-back. With `by_copy` a copy of
    128 MiB evicts the cache instead, which leaves it like an op that reads as much as it writes.
    """
    flush = torch.zeros(32 << 20, dtype=torch.int32, device="cuda") if cuda else None
    source = flush.clone() if flush is not None and by_copy else None
    for _ in range(warm_up):
        for fn in candidates:
            fn()
    times: list[list[float]] = [[] for _ in candidates]
    cycles, never = LAUNCH_CYCLES, set[int]()  # wait of all candidates; those that no wait hides

    def sample(i: int) -> float:
        nonlocal cycles
        wait, shown = MOST_CYCLES if i in never else cycles, 0
        while True:
            if rest:
                if cuda:
                    torch.cuda.synchronize()
                time.sleep(rest)
            if flush is not None:
                flush.zero_() if source is None else flush.copy_(source)
            ms, hidden = _once(candidates[i], cuda, wait)
            if hidden:
                cycles = max(cycles, wait)
            elif wait >= MOST_CYCLES:
                shown += 1
                if shown == 2:
                    never.add(i)
            if hidden or i in never:
                return ms
            wait = min(2 * wait, MOST_CYCLES)

    order, shuffle = list(range(len(candidates))), random.Random(0).shuffle
    done = 0
    while done < rounds:
        shuffle(order)
        before = cycles
        found = {i: sample(i) for i in order}
        if cycles > before:
            times, done = [[] for _ in candidates], 0
            continue
        for i, ms in found.items():
            times[i].append(ms)
        done += 1
    return [statistics.median(t) for t in times]


def peak_gib(fn: Callable[[], object], cuda: bool) -> float | None:
    """Peak GPU memory of fn beyond what was allocated before, in GiB; None on the CPU."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


class Timed(NamedTuple):
    """Result of `compare` for one candidate. If it did not run, ms is None and `problem` has the reason."""

    ms: float | None
    peak_gib: float | None
    problem: str | None = None


def compare(
    candidates: Mapping[str, Callable[[], object]], cuda: bool, rounds: int = 11, rest: float = 0.0
) -> dict[str, Timed]:
    """Time and memory of each candidate, interleaved. One that runs out of memory has a `problem` instead.

    Each candidate runs three times before it is timed. The third call measures memory, because the first two may
    compile kernels and certify schedules.
    """
    peaks: dict[str, float | None] = {}
    problems: dict[str, str] = {}
    for name, fn in candidates.items():
        try:
            for _ in range(2):  # compiles, certifies
                fn()
            peaks[name] = peak_gib(fn, cuda)
        except torch.OutOfMemoryError as error:
            problems[name] = f"out of memory: {str(error).splitlines()[0].split('. GPU', 1)[0]}"
        if cuda and name in problems:
            gc.collect()
            torch.cuda.empty_cache()
    ran = [name for name in candidates if name in peaks]
    taken = interleaved([candidates[name] for name in ran], cuda, rounds, 0, rest)
    times = dict(zip(ran, taken, strict=True))
    return {name: Timed(times.get(name), peaks.get(name), problems.get(name)) for name in candidates}


def rows(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    timed: Mapping[str, Timed],
    pairs: Sequence[tuple[str, str]],
    flops: float = 0,
    moved: float = 0,
) -> list[dict[str, Any]]:
    """Lines of a result file, one per pair (ours, baseline); they are also printed.

    `flops` and `moved` (bytes) are the minimum that the op needs; TFLOP/s count only those.
    """
    lines = []
    for ours, baseline in pairs:
        a, b = timed[ours], timed[baseline] if baseline else Timed(None, None)
        rate = lambda t: flops / t.ms / 1e9 if flops and t.ms else None
        line = {
            "op": op,
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "ours": ours,
            "baseline": baseline,
            "ours_ms": a.ms,
            "baseline_ms": b.ms,
            "ratio": b.ms / a.ms if a.ms and b.ms else None,
            "share_of_roofline": share_of_roofline(a.ms, flops, moved) if a.ms else None,
            **({"tflops": rate(a), "baseline_tflops": rate(b)} if flops else {}),
            "peak_gib": a.peak_gib,
            "baseline_peak_gib": b.peak_gib,
            "note": "; ".join(f"{name}: {t.problem}" for name, t in ((ours, a), (baseline, b)) if t.problem) or None,
        }
        lines.append(line)
        show = lambda ms: "       - " if ms is None else f"{ms:9.4f}"
        print(
            f"{op:34.34} {shape!s:24} {ours:22.22} {show(a.ms)} ms  {baseline:26.26} {show(b.ms)} ms  "
            f"ratio {line['ratio'] or 0:6.3f}  share {line['share_of_roofline'] or 0:.3f}  "
            f"GiB {a.peak_gib or 0:.3f} / {b.peak_gib or 0:.3f}{'  ' + line['note'] if line['note'] else ''}",
            flush=True,
        )
    return lines


def share_of_roofline(ms: float, flops: float, moved_bytes: float) -> float | None:
    """Roofline time (the larger of arithmetic and memory time at the measured peaks) over the time taken."""
    if not torch.cuda.is_available():
        return None
    peak = PEAKS.get(torch.cuda.get_device_name())
    if peak is None:
        return None
    return max(flops / peak["bf16_flops"], moved_bytes / peak["bytes"]) / (ms * 1e-3)
