"""What certified schedules cost on the host: a warm call of a scheduled op less the call of what it chose.

The chosen callable is replaced by one that does nothing, so the tensors may lie anywhere; times are the smallest of
many short runs, on one thread. Whether addresses are aligned is asked by the schedules and not in here.
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

from results_io import write_result

from rlkernel.kernels.cuda import attention, linear, linear_logprob
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton.linear_logprob_backward import Active

CALLS = 200


def cost(fn: Callable[..., object], arguments: tuple[Any, ...], rounds: int) -> float:
    """Seconds a call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(CALLS):
            fn(*arguments)
        best = min(best, time.perf_counter() - start)
    return best / CALLS


def measure(op: ScheduledOp, arguments: tuple[Any, ...], rounds: int, what: str = "") -> dict[str, Any]:
    """One line of the table: microseconds from the call to that of the schedule; `what` is added to the name."""
    nothing = lambda *_: None
    call = op.family.dispatcher(runs := {}, lambda decided, *_: runs.setdefault(decided, nothing))
    call(*arguments)
    taken = cost(call, arguments, rounds) - cost(nothing, arguments, rounds)
    return {"op": f"dispatch {op.family.op}{what}", "ours": "warm call", "ours_ms": taken * 1e3}


def main() -> None:
    """Prints a line an op and writes `bench_dispatch.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    new = lambda *shape, dtype=torch.bfloat16: torch.zeros(*shape, dtype=dtype, device=args.device)
    x, dy, w = new(64, 1024), new(64, 512), new(512, 1024)
    grad = new(512, 1024, dtype=torch.float32)
    head, targets, row = new(8192, 1024), new(64, dtype=torch.int64), new(64, dtype=torch.float32)
    running, dz = new(64, 1024, dtype=torch.float32), new(64, 8192)
    scored = (x, head, targets, None, None)
    flag = new(1, dtype=torch.int32)
    active = Active(flag, flag, flag, row=8192)
    q, k = new(64, 16, 128), new(64, 8, 128)
    rows = []
    for op, arguments, *what in (
        (linear.linear, (x, w, None, 1, 1, None)),
        (linear.linear, (x, w, new(512), 1, 1, None), ", bias"),
        (linear.linear_dgrad, (dy, w, 1)),
        (linear.wgrad_chunk, (grad, dy, x, False)),
        (linear_logprob._forward, (*scored, False, 0)),
        (linear_logprob._dz, (dz, *scored, new(64, 2, dtype=torch.float32), row, row, None, active, 0, 8192)),
        (linear_logprob._dhidden, (running, None, dz, head, False, active)),
        (linear_logprob._dweight, (new(8192, 1024, dtype=torch.float32), dz, x, False, active)),
        (attention.prefill, (q, k, k, row, row, 4096, 4096, 0.1, 2048, 0, q, row)),
    ):
        found = measure(op, arguments, args.rounds, *what)
        rows.append(found)
        print(f"{found['op']:32} {found['ours_ms'] * 1e3:6.3f} us")
    print(f"wrote {write_result('bench_dispatch', rows)}")


if __name__ == "__main__":
    main()
