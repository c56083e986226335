"""policy_loss on Hopper in CUDA C++: launches of csrc/cuda/policy_loss_sm90.cu and, for long sequences,
csrc/cuda/policy_loss_teams_sm90.cu.

cuda/policy_loss.py offers it to certification, as any schedule; what the copy engine cannot read runs the anchor.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels import build
from rlkernel.kernels.cuda.driver import Kernel, compile_cuda, noted
from rlkernel.kernels.policy_loss import COUNTS, STATS, Outputs, PolicyLossInputs, divides_by_tokens, sequence_mean
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import policy_loss as anchor
from rlkernel.kernels.triton.policy_loss_batch import how_divided

SOURCE, TEAMS_SOURCE = "policy_loss_sm90.cu", "policy_loss_teams_sm90.cu"
BLOCKS, SUMS, COUNTED = 128, 4, 7
CLUSTER, LANES, RECORD = 8, 128, 8  # blocks and threads of the teams' second kernel; words that a sequence leaves it
MOST_SEQUENCES, MOST_TOKENS = 1 << 16, 1 << 30  # whose sums fit in shared memory; that an int counts


class Setting(NamedTuple):
    """How a block is divided; changes no bit."""

    warps: int
    stages: int  # pieces that a warp has in shared memory
    piece: int  # tokens, which make up segments
    team: bool = False  # a block's warps share a sequence; else each has its own


SETTINGS = (Setting(8, 2, 1024), Setting(24, 1, 1024), Setting(20, 2, 512))
TEAMS = tuple(Setting(warps, 1, SEGMENT, True) for warps in (2, 4, 8))


class Arguments(ctypes.Structure):
    """`struct Arguments` of csrc/cuda/policy_loss.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logp", "old_logp", "advantages", "borders", "mask", "normalizer", "dlogp", "parts", "loss", "scale",
            "stats", "totals",
        )),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "mean", "by_tokens", "divide_by")),
        *((name, ctypes.c_float) for name in ("low", "high", "divisor")),
    )  # fmt: skip


def source(setting: Setting) -> str:
    return TEAMS_SOURCE if setting.team else SOURCE


def macros(setting: Setting, masked: bool) -> dict[str, int]:
    """The macros of a variant."""
    if setting.team:
        return {"WARPS": setting.warps, "MASKED": int(masked)}
    return {"WARPS": setting.warps, "STAGES": setting.stages, "PIECE": setting.piece, "MASKED": int(masked)}


def shared_bytes(setting: Setting, masked: bool, batch: int) -> int:
    """Stages, their barriers and what is told of them, counts of the block, sums of its sequences."""
    stage = 2 * (setting.piece + 4) * 4 + (SEGMENT + 16 if masked else 0)
    if setting.team:
        return setting.warps * (stage + 8)
    held = setting.warps * setting.stages * (stage + 8 + 20)
    return held + 4 * (COUNTED + 1) + common.cdiv(batch, BLOCKS) * 4 * SUMS


@functools.cache
def _kernels(device: int, setting: Setting, masked: bool) -> tuple[Kernel, Kernel]:
    cubin = compile_cuda(build.source_dir() / "cuda" / source(setting), "90a", macros(setting, masked))
    most = shared_bytes(setting, masked, MOST_SEQUENCES)
    return Kernel(cubin, "rlk_policy_loss_tokens", most), Kernel(cubin, "rlk_policy_loss_batch", 0)


def launcher(device: int, masked: bool, setting: Setting) -> Callable[..., Outputs]:
    """A function with the argument of the anchor, `triton.policy_loss.policy_loss`, for a clipped loss of tokens with
    an advantage a sequence, MOST_SEQUENCES and MOST_TOKENS at most, and none of the further vectors and bounds.

    Raises:
        BuildError: there is no compiler for the kernels.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        first, second = _kernels(device, setting, masked)

    def policy_loss(x: PolicyLossInputs) -> Outputs:
        x = PolicyLossInputs._make([*(None if v is None else v.contiguous() for v in x[:5]), *x[5:]])
        if (x.logp.data_ptr() | x.old_logp.data_ptr() | (0 if x.mask is None else x.mask.data_ptr())) & 15:
            return anchor.policy_loss(x)
        batch = x.cu_seqlens.shape[0] - 1
        parts = x.logp.new_empty((batch, RECORD) if setting.team else (SUMS + COUNTED, BLOCKS))
        given, out = arguments(x, parts)
        with common.on_device(x.logp):
            first(batch if setting.team else BLOCKS, 32 * setting.warps, given)
            if setting.team:
                second(CLUSTER, LANES, given, early=True)
            else:
                second(1, 32 * SUMS, given, early=True)
        del parts  # must live until both are queued
        return out

    return noted(policy_loss, first)


def arguments(x: PolicyLossInputs, parts: Tensor) -> tuple[Arguments, Outputs]:
    """The kernels' arguments, with `parts` for the partial sums of the first kernel, and the outputs."""
    logp, tokens, batch = x.logp, x.logp.shape[0], x.cu_seqlens.shape[0] - 1
    by_tokens = divides_by_tokens(x.loss_type)
    divide_by, divisor = how_divided(x.normalizer, x.divisor, by_tokens, x.mask is not None, tokens, batch)
    dlogp = torch.empty_like(logp)
    loss, scale, stats = logp.new_empty(()), logp.new_empty(()), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)
    given = Arguments(
        *(None if v is None else v.data_ptr() for v in (
            *x[:5], x.normalizer, dlogp, parts, loss, scale, stats, counts,
        )),
        tokens, batch, sequence_mean(x.loss_type), by_tokens, divide_by, 1.0 - x.clip_low, 1.0 + x.clip_high,
        divisor or 0.0,
    )  # fmt: skip
    return given, (loss, dlogp, logp.new_empty(0), scale, stats, counts)
