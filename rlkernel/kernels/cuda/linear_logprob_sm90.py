"""Launcher of csrc/cuda/linear_logprob_sm90.cu, linear_logprob's products on Hopper, forward and backward.

Each function has the signature of its anchor in kernels/triton/linear_logprob.py and calls it if an operand is not at a
16-byte address or the stored logits end inside a tile.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import Kernel, TensorMap, load, tensor_map
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton.linear_grad import ascend
from rlkernel.kernels.triton.linear_logprob_rows import Active
from rlkernel.kernels.triton.logprob import TileBuffers

SOURCE = "linear_logprob_sm90.cu"
COLUMNS = 256  # per tile; logits are stored in whole tiles


class Pass(enum.IntEnum):
    """`enum class Pass` of the source."""

    STATISTICS = 0
    DZ = 1
    PROBABILITIES = 2
    DHIDDEN = 3
    DWEIGHT = 4


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "targets", "inv_temperature", "kept", "tile_max", "tile_sum", "tile_entropy", "target_z",
            "logits", "stats", "entropy", "dlogp", "dentropy", "order", "count", "sum", "rounded",
        )),
        *((name, ctypes.c_int) for name in (
            "fresh", "tokens", "vocab", "pieces", "parts", "span", "tiles", "words", "first", "width",
        )),
    )  # fmt: skip


def macros(which: Pass, temperature: bool = False, kept: bool = False, dentropy: bool = False) -> dict[str, int]:
    """The macros of a variant."""
    return {"PASS": which, "HAS_TEMPERATURE": temperature, "HAS_KEPT": kept, "HAS_DENTROPY": dentropy}


def shared_bytes(which: Pass) -> int:
    """Four k blocks of both operands, mbarriers, alignment, and the staging pieces of a stored output."""
    return 4 * 48 * 1024 + 1024 + 64 + (4 * 8192 if which in (Pass.DZ, Pass.PROBABILITIES) else 0)


@functools.cache
def kernel(device: int, which: Pass, temperature: bool = False, kept: bool = False, dentropy: bool = False) -> Kernel:
    variant = macros(which, temperature, kept, dentropy)
    return load(device, SOURCE, "rlk_linear_logprob", shared_bytes(which), **variant)


def _launch(
    kernel: Kernel, shape: tuple[int, int, int], device: torch.device, maps: tuple[TensorMap, ...], parts: int = 1,
    **rest: Any,
) -> None:  # fmt: skip
    """Computes shape[0] rows and shape[1] columns from shape[2] products each; with several `parts`, one result per
    chunk of LOGPROB_DGRAD_CHUNK products."""
    given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in rest.items() if v is not None}
    clusters = parts * -(-shape[0] // 256) * -(-shape[1] // 256)
    most = driver.multiprocessors(device.index) // 2
    arguments = Arguments(
        tokens=shape[0], vocab=shape[1], pieces=-(-shape[2] // 64), parts=parts, span=LOGPROB_DGRAD_CHUNK // 64, **given
    )
    maps = (*maps, TensorMap())[:3]
    kernel(2 * min(clusters, most), 384, *maps, arguments)


def statistics(
    buffers: TileBuffers,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
    logits: Tensor | None,
) -> None:
    whole_tiles = logits is None or logits.shape[1] % COLUMNS == 0
    if (hidden.data_ptr() | weight.data_ptr()) & 15 or not whole_tiles:
        return anchor.tile_statistics(buffers, hidden, weight, targets, inv_temperature, kept, probs, logits)
    maps = [tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64)]
    if probs is not None:
        maps.append(tensor_map(probs, 64, 64))
    which = Pass.STATISTICS if probs is None else Pass.PROBABILITIES
    _launch(
        kernel(hidden.get_device(), which, inv_temperature is not None, kept is not None),
        (len(hidden), *weight.shape), hidden.device, tuple(maps), targets=targets, inv_temperature=inv_temperature,
        kept=kept, tile_max=buffers.maximum, tile_sum=buffers.sum, tile_entropy=buffers.entropy,
        target_z=buffers.target, logits=logits, width=None if logits is None else logits.shape[1],
        tiles=buffers.tiles, words=-(-len(weight) // 32),
    )  # fmt: skip


def dz_block(
    dz: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    active: Active,
    first: int,
    vocab_size: int,
) -> None:
    if (hidden.data_ptr() | weight.data_ptr()) & 15:
        return anchor.dz_block(
            dz, hidden, weight, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, active, first,
            vocab_size,
        )  # fmt: skip
    with common.on_device(hidden):
        _launch(
            kernel(hidden.get_device(), Pass.DZ, inv_temperature is not None, kept is not None, dentropy is not None),
            (len(hidden), *weight.shape), hidden.device,
            (tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64), tensor_map(dz, 64, 64)),
            targets=targets, inv_temperature=inv_temperature, kept=kept, stats=stats, entropy=entropy, dlogp=dlogp,
            dentropy=dentropy, order=active.order, count=active.count, words=-(-vocab_size // 32), first=first,
        )  # fmt: skip


def dhidden_block(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> None:
    if weight.data_ptr() & 15:
        return anchor.dhidden_block(running, dz, weight, fresh, active)
    parts = -(-len(weight) // LOGPROB_DGRAD_CHUNK)
    with common.on_device(dz):
        launch = functools.partial(
            _launch, kernel(dz.get_device(), Pass.DHIDDEN), (*running.shape, len(weight)), dz.device,
            (tensor_map(dz, 128, 64), tensor_map(weight, 64, 64)), parts, count=active.count,
        )  # fmt: skip
        if parts == 1:
            return launch(sum=running, fresh=fresh)
        sums = torch.empty(parts, *running.shape, dtype=torch.float32, device=dz.device)
        launch(sum=sums, fresh=True)
        ascend(sums, None if fresh else running, running)


def dweight_block(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
    if (grad.data_ptr() | hidden.data_ptr()) & 15:
        return anchor.dweight_block(grad, dz, hidden, fresh, active)
    rounded = grad.dtype != torch.float32
    with common.on_device(dz):
        _launch(
            kernel(dz.get_device(), Pass.DWEIGHT), (*grad.shape, len(hidden)), dz.device,
            (tensor_map(dz, 64, 64), tensor_map(hidden, 64, 64)),
            count=active.count, sum=None if rounded else grad, rounded=grad if rounded else None, fresh=fresh,
        )  # fmt: skip
