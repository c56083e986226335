"""Interleaved timing of several callables: medians on one machine in one process, with the clocks warm.

`compare` also measures memory and leaves out, with the reason, what runs out of it; `rows` turns its result into the
lines of a result file.
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
"""About 6 ms at 1.98 GHz, longer than the host needs to queue most candidates, and the longest that the GPU waits: a
candidate that itself waits for the GPU is never queued before."""


def _once(fn: Callable[[], object], cuda: bool, cycles: int) -> tuple[float, bool]:
    """Milliseconds of a call, and whether they are the GPU's alone: it still waited when the host had queued all."""
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
    """Median milliseconds of each candidate; they take turns, so that clocks and caches treat them alike.

    Every round has an order of its own, and `rest` seconds may pass before each timing: where power is the limit, a
    candidate behind a hot one is up to a tenth slower. On CUDA a 128 MiB write before every timing evicts the L2
    cache, and the GPU is kept waiting while the host queues the work: what is measured is the time on the GPU, as under
    a CUDA graph. A sample that was not hidden so is taken again behind a longer wait, and from then on all candidates
    wait as long: a GPU that rested more has more power. What was measured behind a shorter wait is thrown away, and
    those rounds begin anew, three times at most. A candidate that the longest wait does not hide twice in a row, as it
    waits for the GPU itself, is measured behind the longest; once may be a pause of the host.

    That write leaves a cache full of what is not in memory yet, and the candidate's reads wait until it is. `by_copy`:
    a copy of 128 MiB evicts the cache instead, and leaves it as an op does that reads as much as it writes.
    """
    flush = torch.zeros(32 << 20, dtype=torch.int32, device="cuda") if cuda else None
    source = flush.clone() if flush is not None and by_copy else None
    for _ in range(warm_up):
        for fn in candidates:
            fn()
    times: list[list[float]] = [[] for _ in candidates]
    cycles, never = LAUNCH_CYCLES, set[int]()  # the wait of all, and whose launches no wait hides

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
    """Device memory that fn needs beyond what was allocated before, in GiB; None on the CPU."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


class Timed(NamedTuple):
    """What `compare` found for one candidate; ms is None where it did not run, and `problem` then says why."""

    ms: float | None
    peak_gib: float | None
    problem: str | None = None


def compare(
    candidates: Mapping[str, Callable[[], object]], cuda: bool, rounds: int = 11, rest: float = 0.0
) -> dict[str, Timed]:
    """Time and memory of each candidate, taking turns; one that runs out of memory is left out, and says so.

    Each runs three times before it is timed, the third time for its memory: what a second call certifies, because the
    first one taught it something, is no part of it.
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
    """Lines of a result file: one a pair (ours, anchor) of candidates, printed as they are made.

    `flops` and `moved` (bytes) are what the op needs at the least; TFLOP/s count those alone.
    """
    lines = []
    for ours, anchor in pairs:
        a, b = timed[ours], timed[anchor] if anchor else Timed(None, None)
        rate = lambda t: flops / t.ms / 1e9 if flops and t.ms else None
        line = {
            "op": op,
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "ours": ours,
            "anchor": anchor,
            "ours_ms": a.ms,
            "anchor_ms": b.ms,
            "ratio": b.ms / a.ms if a.ms and b.ms else None,
            "share_of_roofline": share_of_roofline(a.ms, flops, moved) if a.ms else None,
            **({"tflops": rate(a), "anchor_tflops": rate(b)} if flops else {}),
            "peak_gib": a.peak_gib,
            "anchor_peak_gib": b.peak_gib,
            "note": "; ".join(f"{name}: {t.problem}" for name, t in ((ours, a), (anchor, b)) if t.problem) or None,
        }
        lines.append(line)
        show = lambda ms: "       - " if ms is None else f"{ms:9.4f}"
        print(
            f"{op:34.34} {shape!s:24} {ours:22.22} {show(a.ms)} ms  {anchor:26.26} {show(b.ms)} ms  "
            f"ratio {line['ratio'] or 0:6.3f}  share {line['share_of_roofline'] or 0:.3f}  "
            f"GiB {a.peak_gib or 0:.3f} / {b.peak_gib or 0:.3f}{'  ' + line['note'] if line['note'] else ''}",
            flush=True,
        )
    return lines


def share_of_roofline(ms: float, flops: float, moved_bytes: float) -> float | None:
    """Time the larger of arithmetic and memory needs at the measured ceilings, over the time taken."""
    if not torch.cuda.is_available():
        return None
    peak = PEAKS.get(torch.cuda.get_device_name())
    if peak is None:
        return None
    return max(flops / peak["bf16_flops"], moved_bytes / peak["bytes"]) / (ms * 1e-3)
