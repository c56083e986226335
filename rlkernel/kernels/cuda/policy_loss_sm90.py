"""Launcher of csrc/cuda/policy_loss_sm90.cu and, for long sequences, policy_loss_teams_sm90.cu.

Schedules of cuda/policy_loss.py; inputs that TMA cannot load run the anchor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.cuda.driver import load, noted
from rlkernel.kernels.policy_loss import COUNTS, STATS, Outputs, PolicyLossInputs, divides_by_tokens, sequence_mean
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import policy_loss as anchor
from rlkernel.kernels.triton.policy_loss_batch import how_divided

SOURCE, TEAMS_SOURCE = "policy_loss_sm90.cu", "policy_loss_teams_sm90.cu"
BLOCKS, SUMS, COUNTED = 128, 4, 7
CLUSTER, LANES, RECORD = 8, 128, 8  # the teams' second kernel: blocks, threads, words per sequence's record
MOST_SEQUENCES, MOST_TOKENS = 1 << 16, 1 << 30  # limits: sums in shared memory; counts in an int


class Setting(NamedTuple):
    """How a block is divided; changes no bit."""

    warps: int
    stages: int  # pieces per warp in shared memory
    piece: int  # tokens; divides a segment
    team: bool = False  # a block's warps share a sequence; else each warp has its own


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
    warps, stages, piece, team = setting
    return {"WARPS": warps, "MASKED": masked, **({} if team else {"STAGES": stages, "PIECE": piece})}


def shared_bytes(setting: Setting, masked: bool, batch: int) -> int:
    """Stages with their mbarriers and piece infos, the block's counts, sums of its sequences."""
    stage = 2 * (setting.piece + 4) * 4 + (SEGMENT + 16 if masked else 0)
    if setting.team:
        return setting.warps * (stage + 8)
    held = setting.warps * setting.stages * (stage + 8 + 20)
    return held + 4 * (COUNTED + 1) + common.cdiv(batch, BLOCKS) * 4 * SUMS


def launcher(device: int, masked: bool, setting: Setting) -> Callable[..., Outputs]:
    """A function with the argument of the anchor, `triton.policy_loss.policy_loss`, for token-level clipped losses
    with one advantage per sequence, at most MOST_SEQUENCES and MOST_TOKENS, without the further vectors and bounds."""
    variant, most = macros(setting, masked), shared_bytes(setting, masked, MOST_SEQUENCES)
    first = load(device, source(setting), "rlk_policy_loss_tokens", most, **variant)
    second = load(device, source(setting), "rlk_policy_loss_batch", 0, **variant)

    def policy_loss(x: PolicyLossInputs) -> Outputs:
        x = PolicyLossInputs._make([*(None if v is None else v.contiguous() for v in x[:5]), *x[5:]])
        if (x.logp.data_ptr() | x.old_logp.data_ptr() | (0 if x.mask is None else x.mask.data_ptr())) & 15:
            return anchor.policy_loss(x)
        batch = x.cu_seqlens.shape[0] - 1
        parts = x.logp.new_empty((batch, RECORD) if setting.team else (SUMS + COUNTED, BLOCKS))
        given, out = arguments(x, parts)
        with common.on_device(x.logp):
            first(batch if setting.team else BLOCKS, 32 * setting.warps, given)
            second(*((CLUSTER, LANES) if setting.team else (1, 32 * SUMS)), given, pdl=True)
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
