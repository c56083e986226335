"""The times by which certification chooses, made so that a busy host does not bend them, nor now and then a shared GPU.

On a GPU a sample whose launches were not all queued before the GPU came to them is tried anew behind a longer wait.
What else disturbs a sample makes it longer: the least one is taken, and where the two least lie apart, more are asked
for. But a clock that runs high for a moment makes one shorter, and among candidates that are close the least would be
drawn by lot: they get many more samples and are compared with each other by a quantile.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CYCLES = 2_000_000_000  # of a GPU's clock, a second: no faster than this
LEAST_WAIT, MOST_WAIT = 2e-4, 2e-2  # seconds that the GPU waits for the launches of a sample
TRIES = 4  # at a sample whose launches outlast the wait, which doubles each time
SPREAD = 1.05  # between the two least samples, above which they are no evidence yet
PATIENCE = 3  # times the rounds asked for, at most
CLOSE = 1.15  # to the fastest: candidates between which further samples decide
CLOSE_ROUNDS = 3  # times the rounds asked for, which those have further
QUANTILE = 0.2  # of their samples, by which they are compared

Once = Callable[[Callable[[], object], float], tuple[float, bool]]  # (what to time, seconds of wait)


def on_host(fn: Callable[[], object], wait: float) -> tuple[float, bool]:
    """Milliseconds that a call takes, and True."""
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3, True


def on_gpu(fn: Callable[[], object], wait: float, flush: Tensor) -> tuple[float, bool]:
    """Milliseconds of a call's work on the current GPU behind a write of `flush`, and whether a wait of so many seconds
    hid the launches: else the host's time is in them."""
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
    """Milliseconds of each candidate, of at least `rounds` samples; they take turns, each round in an order of its own.

    A candidate gets further rounds, PATIENCE times as many at most, while its two least samples lie SPREAD apart; the
    least counts. Those CLOSE to the fastest get CLOSE_ROUNDS times as many. How these compare with each other is what
    their quantiles say, which on a GPU that is mostly another's lie above the least of slower candidates.
    """
    wait = dict.fromkeys(candidates, LEAST_WAIT)
    taken: dict[str, list[float]] = {name: [] for name in candidates}

    def sample(name: str) -> float:
        for _ in range(TRIES):
            ms, hidden = once(candidates[name], wait[name])
            if hidden or wait[name] == MOST_WAIT:
                break
            wait[name] = min(2 * wait[name], MOST_WAIT)
        return ms

    for fn in candidates.values():
        once(fn, LEAST_WAIT)  # may compile
    order, shuffle = list(candidates), random.Random(0).shuffle
    for turn in range(PATIENCE * rounds + 1):
        shuffle(order)
        for name in order:
            ms = sample(name)
            if turn > 0:  # the first round warms clocks and finds the waits
                taken[name].append(ms)
        if turn >= rounds:
            order = [name for name in order if _apart(taken[name])]
    found = {name: min(samples) for name, samples in taken.items()}
    fastest = min(sorted(samples)[1] for samples in taken.values())  # not by one sample alone
    order = [name for name, ms in found.items() if ms < CLOSE * fastest]
    if len(order) > 1:
        for _ in range(CLOSE_ROUNDS * rounds):
            shuffle(order)
            for name in order:
                taken[name].append(sample(name))
        middle = {name: sorted(taken[name])[int(QUANTILE * len(taken[name]))] for name in order}
        found |= {name: fastest * ms / min(middle.values()) for name, ms in middle.items()}
    return found


def _apart(samples: list[float]) -> bool:
    first, second = sorted(samples)[:2]
    return second > SPREAD * first


def milliseconds(
    candidates: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 7
) -> dict[str, float]:
    """`times` on a device, which is current; on CUDA behind a flushed L2 cache."""
    if device.type != "cuda":
        return times(candidates, on_host, rounds)
    flush = torch.empty(32 << 20, dtype=torch.int32, device=device)
    return times(candidates, functools.partial(on_gpu, flush=flush), rounds)
