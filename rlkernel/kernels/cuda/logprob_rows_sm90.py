"""Launcher of csrc/cuda/logprob_rows_sm90.cu, logprob of many rows of a large vocabulary on Hopper.

A schedule of cuda/logprob.py; logits that TMA cannot load run the anchor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import load, noted
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import logprob as anchor

SOURCE = "logprob_rows_sm90.cu"


class Setting(NamedTuple):
    """How a block is divided; changes no bit."""

    warps: int  # reader warps
    pieces: int  # buffers per warp
    lanes: int  # lanes per vocabulary tile: 32 / lanes tiles make up a piece


SETTINGS = (Setting(15, 1, 1), Setting(23, 2, 2))


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "targets", "inv_temperature", "logp", "entropy", "lse", "stats", "tile_max", "tile_sum",
            "tile_entropy", "target_z",
        )),
        ("logits_row", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("vocab", "tiles", "shared", "whole")),
    )  # fmt: skip


def shared_bytes(setting: Setting, vocab: int, turns: int | None = None) -> int:
    """Pieces, statistics of `turns` rows, and mbarriers."""
    held, turns = setting.warps * setting.pieces, turns or turns_of(setting, vocab)
    piece = 32 // setting.lanes * VOCAB_TILE * 2
    return held * (piece + 8) + turns * (12 * common.cdiv(vocab, VOCAB_TILE) + 16)


def _fits(setting: Setting, vocab: int, turns: int) -> bool:
    return shared_bytes(setting, vocab, turns) <= driver.SHARED_BYTES


def fits(setting: Setting, vocab: int) -> bool:
    """Whether shared memory holds the statistics of two rows."""
    return _fits(setting, vocab, 2)


def turns_of(setting: Setting, vocab: int) -> int:
    """Rows with statistics in shared memory: four for a small vocabulary, where warps work on several rows at once."""
    return 4 if _fits(setting, vocab, 4) else 2


def macros(setting: Setting, vocab: int, half: bool, temperature: bool) -> dict[str, int]:
    """The macros of a variant."""
    warps, pieces, lanes = setting
    turns = turns_of(setting, vocab)
    return {
        "WARPS": warps,
        "PIECES": pieces,
        "LANES": lanes,
        "TURNS": turns,
        "HALF": half,
        "HAS_TEMPERATURE": temperature,
    }


def launcher(
    device: int, dtype: torch.dtype, vocab: int, temperature: bool, setting: Setting
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A function with the arguments of the anchor, `triton.logprob.logprob`, for logits [T, vocab] with contiguous rows
    at a stride that is a multiple of 16 bytes, without kept sets."""
    tiles, variant = common.cdiv(vocab, VOCAB_TILE), macros(setting, vocab, dtype == torch.float16, temperature)
    kernel = load(device, SOURCE, "rlk_logprob_rows", shared_bytes(setting, vocab), **variant)
    most = driver.multiprocessors(device)

    def logprob(
        logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if logits.data_ptr() & 15:
            return anchor.logprob(logits, targets, inv_temperature, kept)
        tokens = logits.shape[0]
        targets = targets.contiguous()
        inv_temperature = None if inv_temperature is None else inv_temperature.contiguous()
        out = anchor.outputs(tokens, logits.device)
        blocks = min(tokens, most)
        if blocks == 0:
            return out
        shared = tokens % blocks
        with common.on_device(logits):
            # The remaining rows are split evenly across the blocks, and the anchor's kernel combines their statistics.
            buffers = anchor.TileBuffers(shared, vocab, logits.device) if shared else None
            parts = (buffers.maximum, buffers.sum, buffers.entropy, buffers.target) if buffers else ()
            arguments = Arguments(
                logits.data_ptr(), targets.data_ptr(), inv_temperature.data_ptr() if inv_temperature is not None else 0,
                *(t.data_ptr() for t in out), *([t.data_ptr() for t in parts] or [0] * 4), logits.stride(0), vocab,
                tiles, shared, tokens // blocks,
            )  # fmt: skip
            kernel(blocks, 32 * (setting.warps + 1), arguments)
            if buffers:
                logp, entropy, lse, stats = (t[:shared] for t in out)
                buffers.combine(logp, entropy, lse, stats)
        return out

    return noted(logprob, kernel)
