"""Peak of a run's memory, which on a GPU is that of torch and of the engine's KV cache together."""

from __future__ import annotations

import resource
import sys

import torch

from rlkernel.engine import LLM


def peak_memory_mib(device: str) -> float:
    """Peak memory so far in MiB: torch's GPU allocations, or this process's resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


class PeakMemory:
    """Peak of the memory in use. Between two calls of `end_phase` the engine is either awake or asleep.

    Args:
        device: "cpu" or "cuda".
        llm: its KV cache may be memory that torch's statistics lack.
    """

    def __init__(self, device: str, llm: LLM):
        self._device, self._llm, self._peak = device, llm, 0.0

    def end_phase(self) -> None:
        """Call it before the engine falls asleep, and before it wakes."""
        if self._device == "cuda":
            self._peak = self.peak_mib()
            torch.cuda.reset_peak_memory_stats()

    def peak_mib(self) -> float:
        """The peak so far, in MiB: the GPU's allocations, or this process's resident set."""
        if self._device != "cuda":
            return peak_memory_mib(self._device)
        return max(self._peak, (torch.cuda.max_memory_allocated() + self._llm.uncounted_bytes) / 2**20)
