"""linear_logprob's products on Hopper: launches of csrc/cuda/linear_logprob_sm90.cu, forward and backward.

Each has the signature of its anchor in kernels/triton/linear_logprob.py, and gives way to it where an operand does not
begin at a 16-byte address, or the logits that are kept end inside a tile.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK
from rlkernel.kernels import build
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import Kernel, TensorMap, compile_cuda, tensor_map
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton.linear_grad import ascend
from rlkernel.kernels.triton.linear_logprob_rows import Active
from rlkernel.kernels.triton.logprob import TileBuffers

SOURCE = "linear_logprob_sm90.cu"
STATISTICS, GRADIENT, PROBS, DHIDDEN, DWEIGHT = range(5)  # MODE of the source
SHARED_BYTES = 4 * 48 * 1024 + 1024 + 64  # four pieces of both operands, barriers, and alignment
COLUMNS = 256  # of a tile, all of which it stores where logits are kept
STAGING_BYTES = 4 * 8192  # pieces of output on their way to memory


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


@functools.cache
def kernel(device: int, mode: int, temperature: bool, kept: bool, dentropy: bool) -> Kernel:
    macros = {"MODE": mode, "HAS_TEMPERATURE": temperature, "HAS_KEPT": kept, "HAS_DENTROPY": dentropy}
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", {name: int(v) for name, v in macros.items()})
    return Kernel(cubin, "rlk_linear_logprob", SHARED_BYTES + (STAGING_BYTES if mode in (GRADIENT, PROBS) else 0))


def _launch(
    kernel: Kernel, shape: tuple[int, int, int], device: torch.device, maps: tuple[TensorMap, ...], parts: int = 1,
    **rest: Any,
) -> None:  # fmt: skip
    """A result of shape[0] rows and shape[1] columns from shape[2] products each, or one each of `parts` of these, all
    but the last of LOGPROB_DGRAD_CHUNK products."""
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
    mode = STATISTICS if probs is None else PROBS
    _launch(
        kernel(hidden.get_device(), mode, inv_temperature is not None, kept is not None, False),
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
            kernel(
                hidden.get_device(), GRADIENT, inv_temperature is not None, kept is not None, dentropy is not None
            ),
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
            _launch, kernel(dz.get_device(), DHIDDEN, False, False, False), (*running.shape, len(weight)), dz.device,
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
            kernel(dz.get_device(), DWEIGHT, False, False, False), (*grad.shape, len(hidden)), dz.device,
            (tensor_map(dz, 64, 64), tensor_map(hidden, 64, 64)),
            count=active.count, sum=None if rounded else grad, rounded=grad if rounded else None, fresh=fresh,
        )  # fmt: skip
