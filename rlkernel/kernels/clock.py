"""Timing for the choice among certified schedules, robust to a loaded host and to other processes on the GPU.

Noise makes a sample longer, so the minimum counts, and samples are added while the two smallest disagree. A short
clock boost makes a sample shorter, so candidates close to the fastest get more samples and are ranked by a quantile.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CYCLES = 2_000_000_000  # per second: an upper bound of GPU clocks
MIN_WAIT, MAX_WAIT = 2e-4, 2e-2  # seconds that the GPU sleeps while the host queues a sample's launches
TRIES = 4  # per sample; the sleep doubles after each try whose launches it did not hide
SPREAD = 1.05  # ratio of the two smallest samples above which more are taken
PATIENCE = 3  # times `rounds`: the most rounds while samples disagree
CLOSE = 1.15  # ratio to the fastest below which candidates get more samples
CLOSE_ROUNDS = 3  # times `rounds`: their additional samples
QUANTILE = 0.2  # of their samples, by which they are ranked

Once = Callable[[Callable[[], object], float], tuple[float, bool]]  # (function, seconds of sleep) -> `on_gpu`


def on_host(fn: Callable[[], object], wait: float) -> tuple[float, bool]:
    """Milliseconds of a call, and True."""
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3, True


def on_gpu(fn: Callable[[], object], wait: float, flush: Tensor) -> tuple[float, bool]:
    """Milliseconds of a call on the current GPU after a write of `flush`, and whether a sleep of `wait` seconds hid the
    launches; if not, the milliseconds include host time."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    torch.cuda._sleep(int(wait * CYCLES))
    begin.record()
    fn()
    end.record()
    hidden = not begin.query()
    end.synchronize()
    return begin.elapsed_time(end), hidden


def times(candidates: Mapping[str, Callable[[], object]], once: Once, rounds: int) -> dict[str, float]:
    """Milliseconds of each candidate from at least `rounds` samples, taken in turns in a random order."""
    wait = dict.fromkeys(candidates, MIN_WAIT)
    taken: dict[str, list[float]] = {name: [] for name in candidates}

    def sample(name: str) -> float:
        for _ in range(TRIES):
            ms, hidden = once(candidates[name], wait[name])
            if hidden or wait[name] == MAX_WAIT:
                break
            wait[name] = min(2 * wait[name], MAX_WAIT)
        return ms

    for fn in candidates.values():
        once(fn, MIN_WAIT)  # may compile
    order, shuffle = list(candidates), random.Random(0).shuffle
    for turn in range(PATIENCE * rounds + 1):
        shuffle(order)
        for name in order:
            ms = sample(name)
            if turn > 0:  # the first round warms clocks and finds the sleeps
                taken[name].append(ms)
        if turn >= rounds:
            order = [name for name in order if sorted(taken[name])[1] > SPREAD * min(taken[name])]
    found = {name: min(samples) for name, samples in taken.items()}
    fastest = min(sorted(samples)[1] for samples in taken.values())  # two samples agree on it
    order = [name for name, ms in found.items() if ms < CLOSE * fastest]
    if len(order) > 1:
        for _ in range(CLOSE_ROUNDS * rounds):
            shuffle(order)
            for name in order:
                taken[name].append(sample(name))
        ranked = {name: sorted(taken[name])[int(QUANTILE * len(taken[name]))] for name in order}
        # Scaled to the minimum, because on a busy GPU the quantiles exceed the minimum of slower candidates.
        found |= {name: fastest * ms / min(ranked.values()) for name, ms in ranked.items()}
    return found


def milliseconds(
    candidates: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 7
) -> dict[str, float]:
    """`times` on the current device; on CUDA each sample starts with a flushed L2 cache."""
    if device.type != "cuda":
        return times(candidates, on_host, rounds)
    flush = torch.empty(32 << 20, dtype=torch.int32, device=device)
    return times(candidates, functools.partial(on_gpu, flush=flush), rounds)
