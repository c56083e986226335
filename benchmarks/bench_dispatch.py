"""Host overhead of certified schedules: time of a warm call of a scheduled op less the call of its chosen schedule.

The chosen schedule is replaced by an empty function, so the tensors can be on any device. Times are minima over many
short runs that alternate on one thread. Schedules check alignment themselves, so that check is not included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import add_device, write_result

from rlkernel.kernels.cuda import attention, linear, linear_logprob
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton.linear_logprob_rows import Active

CALLS = 200


def seconds(fn: Callable[..., object], arguments: tuple[Any, ...]) -> float:
    """Seconds per call, averaged over a short run."""
    start = time.perf_counter()
    for _ in range(CALLS):
        fn(*arguments)
    return (time.perf_counter() - start) / CALLS


def nothing(*_: object) -> None:
    """Replaces the chosen schedule."""


def warm(op: ScheduledOp, arguments: tuple[Any, ...]) -> Callable[..., object]:
    """The op's call, with `nothing` as its schedule."""
    assert op.spec.call_key is not None
    op._runs[op.spec.call_key(*arguments)] = nothing
    return op


def main() -> None:
    """Prints one line per op and writes `bench_dispatch.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    new = lambda *shape, dtype=torch.bfloat16: torch.zeros(*shape, dtype=dtype, device=args.device)
    x, dy, w = new(64, 1024), new(64, 512), new(512, 1024)
    grad = new(512, 1024, dtype=torch.float32)
    head, targets, row = new(8192, 1024), new(64, dtype=torch.int64), new(64, dtype=torch.float32)
    running, dz = new(64, 1024, dtype=torch.float32), new(64, 8192)
    scored = (x, head, targets, None, None)
    flag = new(1, dtype=torch.int32)
    active = Active(flag, flag, row=8192)
    q, k = new(64, 16, 128), new(64, 8, 128)
    cases: tuple[tuple[Any, ...], ...] = (
        (linear.linear, (x, w, None, 1, 1, None)),
        (linear.linear, (x, w, new(512), 1, 1, None), ", bias"),
        (linear.linear_dgrad, (dy, w, 1)),
        (linear.wgrad_chunk, (grad, dy, x, False)),
        (linear_logprob._forward, (*scored, False, 0)),
        (linear_logprob._dz, (dz, *scored, new(64, 2, dtype=torch.float32), row, row, None, active, 0, 8192)),
        (linear_logprob._dhidden, (running, dz, head, False, active)),
        (linear_logprob._dweight, (new(8192, 1024, dtype=torch.float32), dz, x, False, active)),
        (attention.prefill, (q, k, k, row, row, 4096, 4096, 0.1, 2048, 0, q, row)),
    )
    calls = [(op.spec.name + "".join(what), warm(op, arguments), arguments) for op, arguments, *what in cases]
    best = [[float("inf")] * 2 for _ in calls]
    for _ in range(args.rounds):  # alternating, so that changes of the host's clock affect all alike
        for least, (_, call, arguments) in zip(best, calls, strict=True):
            for i, fn in enumerate((call, nothing)):
                least[i] = min(least[i], seconds(fn, arguments))
    rows = []
    for (taken, idle), (name, _, _) in zip(best, calls, strict=True):
        rows.append({"op": f"dispatch {name}", "ours": "warm call", "ours_ms": (taken - idle) * 1e3})
        print(f"{rows[-1]['op']:32} {rows[-1]['ours_ms'] * 1e3:6.3f} us")
    print(f"wrote {write_result('bench_dispatch', rows)}")


if __name__ == "__main__":
    main()
