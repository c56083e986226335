"""Shape classes of linear's CUDA schedules, and doctor's table, without a GPU."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.cli import doctor
from rlkernel.kernels.cuda import linear as cuda


def key(x: Tensor, w: Tensor, bias: Tensor | None = None, chunks: int = 1, out: torch.dtype | None = None) -> tuple:
    return (0, *cuda._linear_key(x, w, bias, chunks, 1, out)[1:])


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def test_buckets_hold_their_rows() -> None:
    ms = [*range(0, 300), 511, 512, 513, 8192, 8193, 16384]
    buckets = [cuda.bucket(m) for m in ms]
    assert all(b >= m for m, b in zip(ms, buckets, strict=True)) and buckets == sorted(buckets)
    assert cuda.bucket(10**6) == cuda.LARGEST_BUCKET
    for m in (1, 9, 40, 5000):
        rows = cuda._rows(key(rand(1, 64).expand(m, 64).contiguous(), rand(48, 64)))
        assert {cuda.bucket(r) for r in rows} == {cuda.bucket(m)} and rows[-1] == cuda.bucket(m)


def test_one_class_per_kernel_choice() -> None:
    w = rand(48, 64)
    assert key(rand(2, 64), w) == key(rand(16, 64), w) != key(rand(17, 64), w)
    assert cuda._describe(key(rand(2, 64), w)) == cuda._describe(key(rand(2, 64), w, None, 1, torch.bfloat16))
    dgrad = cuda._shape(cuda._dgrad_key(rand(2, 48), w, 1))
    assert (dgrad.n, dgrad.k) == (64, 48)


def test_what_cublaslt_is_asked_for() -> None:
    w = rand(48, 64)
    assert cuda._cublaslt_supports(key(rand(2, 64), w))
    assert cuda._cublaslt_supports(key(rand(2, 64), w, rand(48), 8, torch.float32))
    for x, weight, chunks in (
        (rand(2, 128)[:, :64], w, 1),  # rows are not dense
        (rand(130)[2:].view(2, 64), w, 1),  # not at a 16-byte address
        (rand(0, 64), w, 1),
        (rand(2, 64), rand(44, 64), 1),  # N is no multiple of 8
        (rand(2, 64), w, 16),  # a chunk is no multiple of 8
        (rand(2, 64, dtype=torch.float32), w.float(), 1),
    ):
        assert not cuda._cublaslt_supports(key(x, weight, None, chunks))
    assert not cuda._cublaslt_supports(cuda._linear_key(rand(2, 64), w, None, 1, 1, None)), "a CPU tensor"


def test_doctor_prints_verdicts_and_the_first_differing_element() -> None:
    from rich.console import Console

    shape = {"M": 1, "N": 48, "bias": False}
    first = {"kind": "wide", "rows": 1, "index": [0, 7], "actual": "1.5", "expected": "1.25", "mismatches": 3,
             "elements": 48, "ulps": 2}  # fmt: skip
    common = {"op": "linear", "shape": shape, "ms": 0.5, "chosen": True, "first": None}
    rows = [
        {**common, "schedule": "cublaslt.0", "certified": True, "reason": "equal in 9 elements", "speed": 2.0},
        {**common, "schedule": "planted", "certified": False, "reason": "bits differ", "first": first, "ms": None,
         "speed": None, "chosen": False},
    ]  # fmt: skip
    out = io.StringIO()
    found = {"unavailable": "no compiler", "uncertified": [{"op": "o", "shape": shape, "reason": "full"}],
             "unsupported": [{"op": "p", "shape": shape, "schedules": ["hopper"]}], "rows": rows}  # fmt: skip
    doctor._print_schedules(Console(file=out, width=200), found)
    text = out.getvalue()
    for part in ("linear: schedules off, it runs its anchor: no compiler", "not certified: o",
                 "p M=1, N=48: anchor; not for this GPU or shape: hopper", "M=1, N=48", "certified, chosen",
                 "2.00x", "refused", "wide, 1 rows: at [0, 7] 1.5, anchor 1.25, 3 of 48 differ"):  # fmt: skip
        assert part in text, part
