"""Helpers of the GPU tests: data, comparisons that count what they compared, rows alone against rows of a batch.

`tests/test_gpu_checks.py` shows without a GPU that each of them can fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ops.op_checks import rand
from torch import Tensor

from rlkernel.contract import compare_bitwise
from rlkernel.kernels import scheduled_op
from rlkernel.kernels.scheduled_op import ScheduledOp

DEVICE = "cuda"
ROWS = (1, 2, 16, 33, 64, 256, 1000)
Record = Callable[..., None]
Outputs = Tensor | Sequence[Tensor | None]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)  # whose fast schedules are known


def vllm_against_training(folder: Path, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """What `vllm_on_gpu.py` found in a process of its own, and of that its (differing, compared) tokens by name."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_on_gpu.py")), str(folder), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(lines[-1].removeprefix("RESULT "))
    return found, {name: value for name, value in found.items() if isinstance(value, list)}


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers on the GPU, drawn on the CPU so that they are the same on every machine."""
    return rand(seed, *shape, dtype=dtype).to(DEVICE)


def slices(rows: int) -> list[slice]:
    """Slices of 1 to 1000 rows at the start, at the end and at an odd place of a batch."""
    return [slice(at, at + m) for m in ROWS if m <= rows for at in {0, rows - m, min(37, rows - m)}]


@dataclass
class Compared:
    """Counts of what a test has compared bit for bit, for `record(**vars(seen))`.

    A case is one comparison of two calls. Its tokens count once, also where the calls have several outputs; `elements`
    counts numbers that do not belong to a token: weight gradients, sums, optimizer state.
    """

    cases: int = 0
    tokens: int = 0
    elements: int = 0
    mismatches: int = 0

    def rows(self, found: Outputs, expected: Outputs, what: str) -> None:
        """Asserts that outputs of two calls, with one row per token, have the same bytes."""
        self.add(tokens=self._equal(found, expected, what)[0].shape[0])

    def whole(self, found: Outputs, expected: Outputs, what: str) -> None:
        """Asserts that outputs of two calls, without rows of tokens, have the same bytes."""
        self.add(elements=sum(t.numel() for t in self._equal(found, expected, what)))

    def add(self, tokens: int = 0, elements: int = 0, cases: int = 1) -> None:
        """Counts what the test compared by other means."""
        self.cases, self.tokens, self.elements = self.cases + cases, self.tokens + tokens, self.elements + elements

    def __iadd__(self, other: Compared) -> Compared:
        self.add(other.tokens, other.elements, other.cases)
        self.mismatches += other.mismatches
        return self

    def _equal(self, found: Outputs, expected: Outputs, what: str) -> list[Tensor]:
        pairs = list(zip(*((t,) if isinstance(t, Tensor) else t for t in (found, expected)), strict=True))
        for i, (ours, other) in enumerate(pairs):
            if ours is None and other is None:
                continue
            if same_bits(ours, other):
                continue
            report = compare_bitwise(ours, other)
            self.mismatches += report.mismatches
            assert not report.mismatches, f"{what}, tensor {i}: {report}"
        return [other for _, other in pairs if other is not None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one device, shape and dtype have the same bytes; compares on the device.

    `compare_bitwise` copies both to the CPU, which takes longer than most of the kernels under test.
    """
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(bits), b.detach().contiguous().view(bits))


def refusal(first: dict[str, Any] | None) -> dict[str, Any]:
    """The record of a wrong schedule that certification refused: the first comparison in which it differed."""
    counts = {name: (first or {}).get(name) or 0 for name in ("elements", "mismatches")}
    return {"cases": 1, **counts, "refused": True}


def assert_rows_alone(run: Callable[..., Any], batch: tuple[Tensor | None, ...], what: str) -> Compared:
    """Asserts that `run` on slices of the batch gives the bits of `run` on the whole batch; returns the counts."""
    whole = run(*batch)
    whole = (whole,) if isinstance(whole, Tensor) else tuple(whole)
    seen = Compared()
    for piece in slices(next(t.shape[0] for t in batch if t is not None)):
        alone = run(*(None if t is None else t[piece] for t in batch))
        seen.rows(alone, [None if w is None else w[piece] for w in whole],
                  f"{what}, rows {piece.start}:{piece.stop} alone")  # fmt: skip
    return seen


def forget() -> None:
    """Every op with schedules chooses again, from the verdict files."""
    for op in scheduled_op.scheduled_ops():
        op._runs.clear()
        op._classes.clear()


def ran_through() -> dict[str, set[str]]:
    """The schedules, except the anchor, that each op's calls have used since `forget` or the last block `without`."""
    found: dict[str, set[str]] = {}
    for op in scheduled_op.scheduled_ops():
        runs = list(op._runs.values())
        bound = [pair for known in op._classes.values() for pair in known.bound.items()]
        found[op.spec.name] = {name for name, fn in bound if any(fn is run for run in runs)}
    return {op: names for op, names in found.items() if names}


def faster_schedule(op: ScheduledOp, run: Callable[[], object]) -> str:
    """The one schedule of `op` that `run` uses in strict mode; asserts that it is faster than all others."""
    with scheduled_op.strict():  # which decides anew
        run()
        ran = list(op._runs.values())
    assert len(set(ran)) == 1, f"{op.spec.name}: {len(ran)} classes ran"
    found = [(known, name) for known in op._classes.values() for name, fn in known.bound.items() if fn is ran[0]]
    assert len(found) == 1, f"{op.spec.name}: the anchor ran, of {op.verdicts()}"
    ((known, name),) = found
    verdict = known.verdict
    times = {trial.name: trial.ms for trial in verdict.trials if trial.ms is not None}
    assert times[name] == min(times.values()) < verdict.anchor_ms, f"{op.spec.name}: {name} ran, {verdict}"
    return name
