"""linear_logprob on CUDA: a warp-specialised kernel on Hopper where it equals the Triton anchor, cuBLASLt's gradients.

The anchor and the order of the backward are those of kernels/triton/linear_logprob.py; here are the schedules that
may take the place of its products (csrc/cuda/linear_logprob_sm90.cu) and their certification.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.cuda import linear as products
from rlkernel.kernels.cuda.driver import Kernel, TensorMap, compile_cuda, tensor_map
from rlkernel.kernels.schedule import Family, Key, Run, Schedule, ScheduledOp, values
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import logprob as statistics
from rlkernel.kernels.triton.logprob import TileBuffers

SOURCE = "linear_logprob_sm90.cu"
LEAST_TOKENS = 129  # fewer leave half of a cluster's tokens empty; the anchor has tiles for them
STATISTICS, GRADIENT, PROBS = 0, 1, 2  # MODE of the source
SHARED_BYTES = 4 * 48 * 1024 + 1024 + 64  # four pieces of both operands, barriers, and alignment
STAGING_BYTES = 4 * 8192  # pieces of output on their way to memory
SAMPLE_ENTRIES = 8232  # vocabulary that certification compares: whole tiles, and a last one in part


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "targets", "inv_temperature", "kept", "tile_max", "tile_sum", "tile_entropy", "target_z",
            "stats", "entropy", "dlogp", "dentropy",
        )),
        *((name, ctypes.c_int) for name in ("tokens", "vocab", "pieces", "tiles", "words", "first")),
    )  # fmt: skip


@functools.cache
def _kernel(device: int, mode: int, temperature: bool, kept: bool, dentropy: bool) -> Kernel:
    macros = {"MODE": mode, "HAS_TEMPERATURE": temperature, "HAS_KEPT": kept, "HAS_DENTROPY": dentropy}
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", {name: int(v) for name, v in macros.items()})
    return Kernel(cubin, "rlk_linear_logprob", SHARED_BYTES + (STAGING_BYTES if mode != STATISTICS else 0))


def _launch(mode: int, hidden: Tensor, weight: Tensor, out: Tensor | None, **rest: Tensor | int | None) -> None:
    (tokens, c), vocab = hidden.shape, weight.shape[0]
    given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in rest.items() if v is not None}
    flags = (rest[name] is not None for name in ("inv_temperature", "kept"))
    kernel = _kernel(hidden.get_device(), mode, *flags, rest.get("dentropy") is not None)
    clusters = -(-tokens // 256) * -(-vocab // 256)
    most = torch.cuda.get_device_properties(hidden.device).multi_processor_count // 2
    kernel(
        2 * min(clusters, most), 384, tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64),
        TensorMap() if out is None else tensor_map(out, 64, 64),
        Arguments(tokens=tokens, vocab=vocab, pieces=-(-c // 64), **given),
    )  # fmt: skip


# ---- schedules -----------------------------------------------------------------------------------


def _statistics(
    buffers: TileBuffers,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
) -> None:
    _launch(
        STATISTICS if probs is None else PROBS, hidden, weight, probs, targets=targets,
        inv_temperature=inv_temperature, kept=kept, tile_max=buffers.maximum, tile_sum=buffers.sum,
        tile_entropy=buffers.entropy, target_z=buffers.target, tiles=buffers.tiles, words=-(-weight.shape[0] // 32),
    )  # fmt: skip


def _dz_block(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    first: int,
    vocab_size: int,
) -> Tensor:
    dz = torch.empty(hidden.shape[0], weight.shape[0], dtype=weight.dtype, device=hidden.device)
    with common.on_device(hidden):
        _launch(
            GRADIENT, hidden, weight, dz, targets=targets, inv_temperature=inv_temperature, kept=kept, stats=stats,
            entropy=entropy, dlogp=dlogp, dentropy=dentropy, words=-(-vocab_size // 32), first=first,
        )  # fmt: skip
    return dz


# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of both ops. The kernel's arithmetic knows neither T nor V, so they are no part of it."""

    device: int  # index, -1 for the CPU
    many: bool  # at least LEAST_TOKENS
    c: int
    dtype: torch.dtype
    dense: bool  # the copy engine can fetch both operands and store the output
    temperature: bool
    kept: bool
    probs: bool
    dlogp: bool
    dentropy: bool


def _dense(hidden: Tensor, weight: Tensor) -> bool:
    return (
        not ((hidden.data_ptr() | weight.data_ptr()) & 15 or (hidden.stride(0) | weight.stride(0)) & 7)
        and hidden.stride(1) == weight.stride(1) == 1
    )


def _forward_key(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    keep_probs: bool,
) -> Key:  # fmt: skip
    dense = _dense(hidden, weight) and not (keep_probs and weight.shape[0] % 8)
    return (
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype, dense,
        inv_temperature is not None, kept is not None, keep_probs, False, False,
    )  # fmt: skip


def _dz_key(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, first: int, vocab_size: int,
) -> Key:  # fmt: skip
    return (
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype,
        _dense(hidden, weight) and not weight.shape[0] % 8,
        inv_temperature is not None, kept is not None, False, dlogp is not None, dentropy is not None,
    )  # fmt: skip


def _describe(key: Key) -> dict[str, Any]:
    s = Shape(*key)  # type: ignore[arg-type]
    plain = {**s._asdict(), "dtype": str(s.dtype).removeprefix("torch.")}
    del plain["device"]
    return plain


def _device(key: Key) -> torch.device:
    return torch.device("cuda", key[0]) if key[0] >= 0 else torch.device("cpu")  # type: ignore[operator, arg-type]


def _rows(key: Key) -> list[int]:
    return [LEAST_TOKENS, 1000, 2048] if key[1] else [1, 77, LEAST_TOKENS - 1]


def _forward_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s, device = Shape(*key), generator.device  # type: ignore[arg-type]
    hidden = values(kind, m, s.c, s.dtype, generator)
    weight = values(kind, SAMPLE_ENTRIES, s.c, s.dtype, generator, second=True) * (4 * s.c**-0.5)
    targets = torch.randint(0, SAMPLE_ENTRIES, (m,), device=device, generator=generator)
    inverse, kept = None, None
    if s.temperature:
        inverse = 0.5 + torch.rand(m, device=device, generator=generator)
    if s.kept:
        shape = (m, -(-SAMPLE_ENTRIES // 32))
        kept = torch.randint(-(2**31), 2**31, shape, device=device, generator=generator).to(torch.int32)
    return hidden, weight, targets, inverse, kept, s.probs


def _dz_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s, device = Shape(*key), generator.device  # type: ignore[arg-type]
    hidden, weight, targets, inverse, kept, _ = _forward_sample(key, m, kind, generator)
    _, entropy, _, stats = anchor.forward(hidden, weight, targets, inverse, kept)
    up = []
    for wanted in (s.dlogp, s.dentropy):
        g = torch.randn(m, device=device, generator=generator)
        g[::7] = 0.0
        up.append(g if wanted else None)
    first = 4096  # a block inside the vocabulary that ends with it
    return hidden, weight[first:], targets, inverse, kept, stats, entropy, *up, first, SAMPLE_ENTRIES


def _supports(key: Key) -> bool:
    s = Shape(*key)  # type: ignore[arg-type]
    if not (s.many and s.dense and s.dtype == torch.bfloat16 and s.c > 0 and s.device >= 0):
        return False
    return not common.IS_HIP and torch.cuda.get_device_capability(s.device) == (9, 0)


def _bind(run: Run, modes: Callable[[Shape], tuple[int, ...]]) -> Callable[[Key], Run]:
    def bind(key: Key) -> Run:
        s = Shape(*key)  # type: ignore[arg-type]
        for mode in modes(s):
            with torch.cuda.device(s.device):
                _kernel(s.device, mode, s.temperature, s.kept, s.dentropy)
        return run

    return bind


_SOURCES = tuple(Path(m.__file__) for m in (anchor, statistics, common)) + (Path(__file__),)


def _family(op: str, run: Run, key: Callable[..., Key], sample: Callable[..., Any], schedule: Schedule) -> Family:
    return Family(
        op=op, anchor=run, key=key, describe=_describe, device=_device, rows=_rows, sample=sample,
        schedules=(schedule,), sources=(*_SOURCES, build.source_dir() / "cuda" / SOURCE),
    )  # fmt: skip


_forward = ScheduledOp(
    _family(
        "linear_logprob", anchor.forward, _forward_key, _forward_sample,
        Schedule(
            "hopper", _bind(functools.partial(anchor.forward, statistics=_statistics),
                            lambda s: (PROBS if s.probs else STATISTICS,)), _supports,
        ),
    )
)  # fmt: skip
_dz = ScheduledOp(
    _family(
        "linear_logprob_dz", anchor.dz_block, _dz_key, _dz_sample,
        Schedule("hopper", _bind(_dz_block, lambda s: (GRADIENT,)), _supports),
    )
)  # fmt: skip

# ---- the op --------------------------------------------------------------------------------------


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward(hidden, weight, targets, inv_temperature, kept, False)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward(hidden, weight, targets, inv_temperature, kept, True)


linear_logprob_grad_ = functools.partial(
    anchor.gradients, anchor.Products(_dz, products.add_dgrad_, products.wgrad_)
)
