"""Runs sources of Hopper kernels on a CPU with cuda_on_cpu/sm90.cuh: bits, memory accesses and synchronisation.

The exponential is the C library's, and NaNs have the CPU's sign; everything else is the kernel's own code.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import build
from rlkernel.kernels.cuda import policy_loss, policy_loss_sm90, rms_norm_grad_sm90
from rlkernel.kernels.policy_loss import PolicyLossInputs
from rlkernel.kernels.reference import policy_loss as reference
from rlkernel.kernels.samples import KINDS, values
from rlkernel.kernels.triton import rms_norm as norm

BF16, HERE = torch.bfloat16, Path(__file__).parent / "cuda_on_cpu"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="needs g++ on Linux, and the long doubles of x86",
)
GUARD = 64  # elements on either side of what a kernel writes


@functools.cache
def built(
    folder: Path, source: str, macros: tuple[tuple[str, int], ...], planted: tuple[str, str] | None
) -> ctypes.CDLL:
    """The kernel compiled for this CPU, with a part of its source replaced by `planted`."""
    place = folder / f"{abs(hash((source, macros, planted)))}"
    place.mkdir()
    for header in (HERE / "sm90.cuh", HERE / "launch.cpp", build.source_dir() / "cuda" / "policy_loss.cuh"):
        shutil.copy(header, place)
    text = (build.source_dir() / "cuda" / source).read_text()
    if planted:
        assert text.count(planted[0]) == 1, planted[0]
        text = text.replace(*planted)
    (place / source).write_text(text)
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", f'-DSOURCE="{source}"']
    flags += [f"-D{name}={int(value)}" for name, value in macros] + ["-DNORM"] * source.startswith("rms")
    subprocess.run(["g++", *flags, "launch.cpp", "-o", "kernel.so"], cwd=place, check=True)
    return ctypes.CDLL(str(place / "kernel.so"))


def in_child(run: Callable[[], object]) -> int:
    """Exit status of a forked process, whose writes to shared memory are visible here."""
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def launch(
    library: ctypes.CDLL, arguments: ctypes.Structure, sizes: tuple[int, ...], seed: int, *read: Tensor | None
) -> int:
    def run() -> None:
        for x in read:
            if x is not None:
                library.readable(ctypes.c_void_p(x.data_ptr()), ctypes.c_longlong(x.nbytes))
        library.launch(ctypes.byref(arguments), *sizes, ctypes.c_uint(seed))

    return in_child(run)


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Shared memory between guards, which a child process can write."""
    whole = torch.full((GUARD + int(np.prod(shape)) + GUARD,), 3, dtype=dtype).share_memory_()
    return whole[GUARD:-GUARD].view(shape)


def guards_hold(x: Tensor) -> bool:
    whole = x._base
    assert whole is not None
    return bool((whole[:GUARD] == 3).all() and (whole[-GUARD:] == 3).all())


def one_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


# ---- policy_loss -----------------------------------------------------------------------------------


def of_losses(
    folder: Path,
    setting: policy_loss_sm90.Setting,
    x: PolicyLossInputs,
    seed: int,
    planted: tuple[str, str] | None = None,
) -> dict[str, Tensor]:
    masked, batch, t = x.mask is not None, len(x.cu_seqlens) - 1, len(x.logp)
    macros = tuple(policy_loss_sm90.macros(setting, masked).items())
    library = built(folder, policy_loss_sm90.source(setting), macros, planted)
    parts = shared(batch, 8) if setting.team else shared(11, 128)
    arguments, _ = policy_loss_sm90.arguments(x, parts)
    out = {
        "loss": shared(1),
        "dlogp": shared(t),
        "scale": shared(1),
        "stats": shared(14),
        "totals": shared(6, dtype=torch.int64),
    }
    for name, result in out.items():
        setattr(arguments, name, result.data_ptr())
    blocks = (batch, 8) if setting.team else (128, 1)
    sizes = (blocks[0], 32 * setting.warps, blocks[1], 128)
    status = launch(library, arguments, sizes, seed, x.logp, x.old_logp, x.mask)
    assert status == 0, f"exit status {status}"
    assert all(map(guards_hold, (parts, *out.values())))
    return out


def odd(given: PolicyLossInputs, case: str) -> tuple[PolicyLossInputs, bool]:
    """A modified sample, and whether its borders are invalid."""
    tokens, borders = len(given.logp), given.cu_seqlens.clone()
    if case == "one long":
        given = given._replace(advantages=given.advantages[:2])
        borders = torch.tensor([0, 5, tokens], dtype=torch.int32)
    elif case in KINDS:
        pass
    else:
        borders[{"first": 0}.get(case, len(borders) // 2)] = {
            "first": 1, "falls": -5, "past": tokens + 7, "least": -(1 << 31), "most": (1 << 31) - 1
        }[case]  # fmt: skip
    return given._replace(cu_seqlens=borders), case in ("first", "falls", "past", "least", "most")


@pytest.mark.parametrize("mean", (False, True), ids=("sums", "means"))
@pytest.mark.parametrize("masked", (False, True), ids=("whole", "masked"))
def test_teams_have_the_bits_of_warps(masked: bool, mean: bool, tmp_path: Path) -> None:
    """The kernel of the GPU records and the kernel for long sequences agree on certification's samples."""
    shape = policy_loss.PolicyLossShape(-1, True, masked, mean, 1 << 18, 1 << 12)
    cases = (*KINDS, "one long", "first", "falls", "past", "least", "most")
    for turn, (case, setting) in enumerate(zip(cases, itertools.cycle(policy_loss_sm90.TEAMS), strict=False)):
        kind = case if case in KINDS else "normal"
        (drawn,) = policy_loss.sample(shape, sum(policy_loss.RAGGED), kind, torch.Generator().manual_seed(turn))
        given, broken = odd(drawn, case)
        ours = of_losses(tmp_path, setting, given, turn)
        warps = policy_loss_sm90.SETTINGS[turn % len(policy_loss_sm90.SETTINGS)]
        theirs = of_losses(tmp_path, warps, given, turn)
        for name in (
            ("loss", "scale") if broken else ours
        ):  # with invalid borders sequences overlap, and the last writer is unspecified
            assert_bitwise(one_nan(ours[name]), one_nan(theirs[name]), f"{case}, team of {setting.warps}: {name}")
        assert bool(ours["loss"].isnan()) == (broken or case == "wide")
        if kind == "normal" and not broken:
            truth = reference.policy_loss(given)
            torch.testing.assert_close(ours["loss"][0], truth[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours["dlogp"], truth[1], rtol=1e-4, atol=1e-9)
            known = [i for i in range(14) if i != 9]  # largest drift; there is no rollout here
            torch.testing.assert_close(ours["stats"][known], truth[4][known], rtol=1e-4, atol=1e-6)
            assert torch.equal(ours["totals"], truth[5])


def test_a_team_that_does_not_wait_is_seen(tmp_path: Path) -> None:
    shape = policy_loss.PolicyLossShape(-1, True, True, False, 1 << 18, 1 << 12)
    (given,) = policy_loss.sample(shape, sum(policy_loss.RAGGED), "normal", torch.Generator().manual_seed(1))
    of_losses(tmp_path, policy_loss_sm90.TEAMS[0], given, 1)
    planted = ("      barrier_wait(barrier, turn & 1);\n", "")
    with pytest.raises(AssertionError, match="exit status 3"):
        of_losses(tmp_path, policy_loss_sm90.TEAMS[0], given, 1, planted)


# ---- rms_norm --------------------------------------------------------------------------------------


def tree(x: np.ndarray) -> np.ndarray:
    """Pairwise sums of rows: neighbours, then neighbouring sums."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: the 64-bit mantissa of a long double holds a product of two floats plus a float, or nearly."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def in_order(
    dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float, pair: int, programs: int
) -> tuple[Tensor, Tensor]:
    """An independent version of the contract's order: dx, and the partial sums of blocks with one leaf or two."""
    rows, channels = x.shape
    block = max(rms_norm_grad_sm90.LEAST, norm.next_power_of_2(channels))
    leaves, step = -(-rows // norm.LEAF), max(1, 2048 // block)
    full = lambda t: np.pad(t.float().numpy(), ((0, leaves * norm.LEAF - rows), (0, block - channels)))
    h, up, w = full(x), full(dy), np.pad(weight.float().numpy(), (0, block - channels))
    g = up * w
    square, dot = tree(h * h), tree(g * h)
    square[rows:] = 1.0
    rstd = np.float32(1) / np.sqrt(square / np.float32(channels) + np.float32(eps))
    mean = (dot * rstd) / np.float32(channels)
    h = h * rstd[:, None]
    d = rstd[:, None] * fma(-h, mean[:, None], g)
    d = d if dr is None else d + full(dr)
    p = up * torch.from_numpy(h).to(BF16).float().numpy()
    p = (p if step == 1 else p[0::2] + p[1::2]).reshape(leaves, norm.LEAF // step, block)
    sums = functools.reduce(np.add, (p[:, i] for i in range(p.shape[1])), np.zeros((leaves, block), np.float32))
    partials = np.zeros((programs, channels), np.float32)
    for i in range(programs):
        leaf = i + i // pair * pair if pair else i
        other = sums[leaf + pair] if pair and leaf + pair < leaves else np.zeros(block, np.float32)
        partials[i] = (sums[leaf] + other)[:channels]
    return torch.from_numpy(d[:rows, :channels].copy()).to(BF16), torch.from_numpy(partials)


def norms(
    folder: Path, channels: int, groups: int, dr: bool, planted: tuple[str, str] | None = None
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """(exit status, case, found, expected) for full and partial leaves, single and paired."""
    macros = rms_norm_grad_sm90.macros(channels, dr, groups)
    library = built(folder, rms_norm_grad_sm90.SOURCE, tuple(macros.items()), planted)
    for rows, pair in ((1, 0), (37, 0), (64, 2), (33, 2), (37, 2), (47, 2), (55, 2), (171, 2)):
        draw = torch.Generator().manual_seed(rows)
        kind = "zeros" if rows == 47 else "normal"  # of both signs
        x, dy, second = (values(kind, rows, channels, BF16, draw) for _ in range(3))
        weight, leaves = torch.randn(channels, generator=draw).to(BF16), -(-rows // norm.LEAF)
        programs = leaves // (2 * pair) * pair + min(leaves % (2 * pair), pair) if pair else leaves
        dx, partials = shared(rows, channels, dtype=BF16), shared(programs, channels)
        also = second if dr else None
        arguments = rms_norm_grad_sm90.Arguments(
            dy.data_ptr(), second.data_ptr() if dr else 0, x.data_ptr(), weight.data_ptr(), dx.data_ptr(),
            partials.data_ptr(), rows, pair, 1e-6,
        )  # fmt: skip
        sizes = (programs, rms_norm_grad_sm90.threads(channels, groups), 0, 0)
        status = launch(library, arguments, sizes, rows, x, dy, also)
        assert guards_hold(dx) and guards_hold(partials)
        for name, found, expected in zip(
            ("dx", "sums"), (dx, partials), in_order(dy, also, x, weight, 1e-6, pair, programs), strict=True
        ):
            yield status, f"{name} of {rows} rows, {channels} channels, leaves {pair} apart", found, expected


@pytest.mark.parametrize("groups", rms_norm_grad_sm90.RESIDENT)
@pytest.mark.parametrize(("channels", "dr"), ((1024, True), (1032, False), (2568, True)))
def test_norms_gradients_are_in_the_contracts_order(channels: int, dr: bool, groups: int, tmp_path: Path) -> None:
    for status, what, found, expected in norms(tmp_path, channels, groups, dr):
        assert status == 0, what
        assert_bitwise(found, expected, what)


@pytest.mark.parametrize(
    "planted",
    (
        ("    barrier_wait(barriers + step % STAGES * 8, step / STAGES & 1);\n", ""),
        ("    if (rows <= 0) return barrier_arrive(barrier);\n", "    if (rows <= 0) return;\n"),
        ("    if (thread == 0) load_step(step + STAGES);\n", ""),
        ("lane >> BIT & 1) * (N / 2)", "lane >> BIT & 1) * (N / 4)"),
    ),
    ids=("no wait", "missing phase", "missing load", "swapped sums"),
)
def test_it_shows_what_is_wrong(planted: tuple[str, str], tmp_path: Path) -> None:
    wrong = [
        status != 0 or not torch.equal(found, expected)
        for status, _, found, expected in norms(tmp_path, 1024, 4, False, planted)
    ]
    assert any(wrong)
