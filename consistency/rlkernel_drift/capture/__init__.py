"""Capture: capsules from engines. Each adapter imports its engine when it is called, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkernel_drift.capsule import Capsule
    from rlkernel_drift.capture.request import Request

ENGINES = ("hf", "hf+rlkernel", "rlkernel", "vllm", "vllm+rlkernel")


def run_engine(engine: str, request: Request) -> Capsule:
    """Captures a capsule with one of `ENGINES`."""
    if engine == "hf":
        from rlkernel_drift.capture.hf import capture_hf

        return capture_hf(request)
    if engine == "hf+rlkernel":
        from rlkernel_drift.capture.rlkernel_hf import capture_rlkernel_hf

        return capture_rlkernel_hf(request)
    if engine == "rlkernel":
        from rlkernel_drift.capture.rlkernel_engine import capture_rlkernel

        return capture_rlkernel(request)
    from rlkernel_drift.capture.vllm_engine import capture_vllm

    return capture_vllm(request, rlkernel=engine == "vllm+rlkernel")
