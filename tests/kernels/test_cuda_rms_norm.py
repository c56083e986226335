"""Schedules of rms_norm's gradients without a GPU: shape classes, samples, the choice, the kernel's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import Launches, classes_of, milliseconds
from kernels.test_cuda_driver import needs_compiler, tool
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import build, clock, schedule
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import driver, rms_norm_grad_sm90
from rlkernel.kernels.cuda import rms_norm as cuda
from rlkernel.kernels.samples import KINDS, NONFINITE
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import rms_norm as anchor
from rlkernel.kernels.verdicts import ANCHOR

BF16 = torch.bfloat16
SHAPE = cuda.RMSNormShape(-1, BF16, 1024, True, cuda.FEW)


def call(rows: int, channels: int, dtype: torch.dtype = BF16, dr: bool = False) -> tuple[Any, ...]:
    """Arguments whose tensors have sizes but no storage of that size."""
    x = torch.empty(1, dtype=dtype).expand(rows, channels)
    return x, x if dr else None, x, torch.empty(channels, dtype=dtype), 1e-6


@pytest.mark.parametrize(
    ("given", "channels", "rows"),
    (
        (call(1024, 1024), 1024, 1024),
        (call(8192, 5120), 5120, 1024),
        (call(8193, 4096), 4096, 8193),
        (call(1023, 4096), 0, 0),
        (call(8192, 128), 0, 0),
        (call(8192, 1028), 0, 0),
        (call(8192, 1 << 15), 0, 0),
        ((call(8192, 1024, torch.float32)[0], *call(8192, 1024)[1:]), 0, 0),
        (call(8192, 4096, torch.float16), 0, 0),
        (call(8192, 4096, torch.float32), 0, 0),
    ),
)
def test_classes(given: tuple[Any, ...], channels: int, rows: int) -> None:
    found = cuda.shape_of(*given)
    assert (found.channels, found.rows, found.has_dr) == (channels, rows, False)


def test_heads_are_rows() -> None:
    x = torch.empty(1, dtype=BF16).expand(128, 8, 1024)
    assert cuda.shape_of(x, x, x, torch.empty(1024, dtype=BF16), 1e-6) == (-1, BF16, 1024, True, 1024)


def test_a_warm_call_is_known_by_its_class() -> None:
    sizes = itertools.product((1, 1023, 1024, 8192, 8193, 20000), (128, 1024, 1028, 4096))
    kinds = list(itertools.product((BF16, torch.float16), (False, True)))
    calls = [call(*size, *kind) for size in sizes for kind in kinds]
    assert len(classes_of(cuda.gradients.family, calls)) > 4


@pytest.mark.parametrize("kind", (*KINDS, NONFINITE))
@pytest.mark.parametrize("least", (cuda.FEW, cuda.MANY + 1))
def test_a_sample_is_of_its_class(least: int, kind: str) -> None:
    shape = SHAPE._replace(rows=least, channels=1024)
    counts = cuda.rows_of(shape)
    assert any(rows % anchor.LEAF for rows in counts) and counts[-1] % cuda.MANY == 0
    pair = anchor.leaves(counts[1], 4096)[1] * anchor.LEAF
    assert 0 < counts[1] % cuda.MANY - pair < 2 * anchor.LEAF, "the later leaf of a pair has a few rows"
    for rows in counts[:2]:
        given = cuda.sample(shape, rows, kind, torch.Generator().manual_seed(0))
        assert cuda.shape_of(*given) == shape and given[0].shape == given[1].shape == given[2].shape == (rows, 1024)
        assert bool(given[2].float().isfinite().all()) == (kind != NONFINITE)
    lonely = cuda.sample(shape._replace(has_dr=False), 1031, "normal", torch.Generator().manual_seed(0))
    assert lonely[1] is None


def test_samples_have_rows_of_zeros_without_eps() -> None:
    drawn = [cuda.sample(SHAPE, rows, kind, torch.Generator().manual_seed(0))
             for rows in cuda.rows_of(SHAPE)[:2] for kind in KINDS]  # fmt: skip
    alone = [x for *_, x, _, eps in drawn if eps == 0.0]
    assert alone and len(alone) < len(drawn)
    assert all(bool((x == 0).all(dim=1).any()) for x in alone)


def test_programs_have_all_leaves() -> None:
    """For any row count, the leaves per block as the kernel's source computes them form the contract's tree."""
    for channels in (1024, 2560, 4096):
        for tokens in (1, 15, 16, 17, 4096, 8191, 8192, 8193, 8192 + 4096 + 5, 16384):
            per_chunk = anchor.leaves(tokens, channels)[0]
            programs, pair = anchor.programs_of(tokens, channels)
            seen = set()
            for block in range(programs):
                leaf = block + block // pair * pair if pair else block
                seen.add(leaf)
                if pair and (leaf + pair) * anchor.LEAF < tokens:
                    seen.add(leaf + pair)
            assert seen == set(range(-(-tokens // anchor.LEAF))), (channels, tokens)
            assert programs <= -(-tokens // cuda.MANY) * per_chunk


# ---- the choice ------------------------------------------------------------------------------------


def plain(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    g = dy.float() * weight.float()
    dx = (g + x.float() * eps + (0 if dr is None else dr.float())).to(x.dtype)
    return dx, (dy.float() * x.float()).sum(0, keepdim=True)


def wrong(*given: Any) -> tuple[Tensor, Tensor]:
    """A wrong kernel: the last channel gets another channel's partial sum."""
    dx, partials = plain(*given)
    partials[:, -1] = partials[:, -2] + 1
    return dx, partials


def test_the_kernel_is_chosen_where_it_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(schedule, "_ops", dict(schedule._ops))
    monkeypatch.setattr(cuda, "MANY", 1100)
    good, bad = Schedule("hopper.a", lambda key: lambda *x: plain(*x)), Schedule("hopper.b", lambda key: wrong)
    made = ScheduledOp(dataclasses.replace(cuda.gradients.family, anchor=plain, schedules=(bad, good)))
    given = cuda.sample(SHAPE, 1024, "normal", torch.Generator().manual_seed(2))
    with schedule.strict():
        assert_bitwise(made.call(*given)[0], plain(*given)[0], "dx")
    assert made.chosen(*given) == "hopper.a"
    verdict = made.verdict(*given)
    assert verdict is not None
    first = verdict.trials[0].first
    assert first is not None and first["result"] == 1 and first["index"][-1] == 1023, "the last channel's sum"
    with schedule.without("hopper"):
        assert made.chosen(*given) == ANCHOR


# ---- the kernel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ("fits", "unaligned"))
@pytest.mark.parametrize("dr", (False, True))
def test_what_the_kernel_is_given(dr: bool, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    same = contextlib.nullcontext()
    monkeypatch.setattr(rms_norm_grad_sm90.common, "on_device", lambda t: same)
    monkeypatch.setattr(rms_norm_grad_sm90, "load", lambda *_, **variant: Launches(ran, "kernel"))
    monkeypatch.setattr(anchor, "gradients", lambda *given: ran.append("anchor"))
    run = rms_norm_grad_sm90.launcher(0, 4096, dr, 2)
    memory = torch.zeros(3, 40 * 4096 + 8, dtype=BF16)
    x, dy, second = (row[0 if which == "fits" else 1 :][: 40 * 4096].view(40, 4096) for row in memory)
    weight = torch.ones(4096, dtype=BF16)
    found = run(dy, second if dr else None, x, weight, 1e-5)
    if which != "fits":
        assert ran == ["anchor"]
        return
    dx, partials = found
    (name, blocks, threads, given, more), *rest = ran
    assert (name, threads, more, rest) == ("kernel", 256, {"pdl": True}, [])
    assert blocks == len(partials) == 3 and partials.shape == (3, 4096) and dx.shape == x.shape
    assert (given.x, given.dy, given.weight) == (x.data_ptr(), dy.data_ptr(), weight.data_ptr())
    assert (given.dx, given.partials) == (dx.data_ptr(), partials.data_ptr())
    assert given.dr == (second.data_ptr() if dr else None)
    assert (given.tokens, given.pair) == (40, 256) and given.eps == torch.tensor(1e-5).item()


def test_shared_memory_and_threads_are_within_a_multiprocessors() -> None:
    for channels in (520, 1024, 2560, 4096, 5120, 8192, 16384):
        for dr in (False, True):
            for groups in rms_norm_grad_sm90.RESIDENT:
                if not rms_norm_grad_sm90.fits(channels, dr, groups):
                    continue
                macros, threads = (
                    rms_norm_grad_sm90.macros(channels, dr, groups),
                    rms_norm_grad_sm90.threads(channels, groups),
                )
                assert macros["RESIDENT"] * threads <= 2048 and threads % 32 == 0
                held = macros["RESIDENT"] * (rms_norm_grad_sm90.shared_bytes(channels, dr) + 1024)
                assert macros["RESIDENT"] == 1 or held <= 228 << 10
    assert rms_norm_grad_sm90.fits(1024, True, 4) and rms_norm_grad_sm90.fits(8192, True, 4)
    assert not rms_norm_grad_sm90.fits(512, True, 4) and not rms_norm_grad_sm90.fits(16384, True, 4)


@needs_compiler
@pytest.mark.parametrize("groups", rms_norm_grad_sm90.RESIDENT)
@pytest.mark.parametrize(("channels", "dr"), ((1024, True), (2560, False), (4096, True), (8192, False)))
def test_it_compiles_without_spills(
    channels: int, dr: bool, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    macros = rms_norm_grad_sm90.macros(channels, dr, groups)
    driver.compile_cuda(build.source_dir() / "cuda" / rms_norm_grad_sm90.SOURCE, "90a", macros)
    (kept,) = (tmp_path / "cuda").iterdir()
    sass = tool("cuobjdump", "-sass", str(kept))
    assert "UBLKCP" in sass and not re.search(r"\b(STL|LDL)\b", sass), "spills"
    sums = 2 * max(1, 2048 // macros["BLOCK"]) * groups  # per thread; a plain butterfly takes five shuffles each
    assert len(re.findall(r"SHFL\.BFLY", sass)) <= 2 * (sums + 4), (
        "lanes exchange halves; twice, because the code exists for a diverged warp too"
    )
