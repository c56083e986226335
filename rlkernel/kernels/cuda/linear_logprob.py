"""linear_logprob on CUDA: a warp-specialised kernel on Hopper, forward and backward, where it equals the Triton anchor.

The anchor and the order of the backward are those of kernels/triton/linear_logprob.py; here are the schedules that
may take the place of its products (csrc/cuda/linear_logprob_sm90.cu; cuBLASLt for the two gradients, where nearly all
tokens have one) and their certification.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels import build
from rlkernel.kernels.certification import Family, First, Instead, Key, Run, Runs, Schedule, Warm, values
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda import linear as cublaslt
from rlkernel.kernels.cuda.driver import Kernel, TensorMap, compile_cuda, tensor_map
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import common, linear_grad, matrix
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton import logprob as statistics
from rlkernel.kernels.triton.linear_logprob_backward import Active
from rlkernel.kernels.triton.logprob import TileBuffers

SOURCE = "linear_logprob_sm90.cu"
LEAST_TOKENS = 129  # fewer leave half of a cluster's tokens empty; the anchor has tiles for them
STATISTICS, GRADIENT, PROBS, DHIDDEN, DWEIGHT = range(5)  # MODE of the source
SHARED_BYTES = 4 * 48 * 1024 + 1024 + 64  # four pieces of both operands, barriers, and alignment
STAGING_BYTES = 4 * 8192  # pieces of output on their way to memory
SAMPLE_ENTRIES = 12328  # vocabulary that certification compares: whole tiles, and a last one in part
SAMPLE_BLOCK = 8192  # the same for a block of the backward: its real size, as the fastest is chosen by it
SAMPLE_WIDTH = 4096  # entries whose logits are kept
CUBLASLT_TOKENS = 4096  # that cuBLASLt's heuristic is asked for; any number runs


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "targets", "inv_temperature", "kept", "tile_max", "tile_sum", "tile_entropy", "target_z",
            "logits", "stats", "entropy", "dlogp", "dentropy", "active", "blocks", "count", "sum", "rounded",
        )),
        *((name, ctypes.c_int) for name in ("fresh", "tokens", "vocab", "pieces", "tiles", "words", "first", "width")),
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(device: int, mode: int, temperature: bool, kept: bool, dentropy: bool) -> Kernel:
    macros = {"MODE": mode, "HAS_TEMPERATURE": temperature, "HAS_KEPT": kept, "HAS_DENTROPY": dentropy}
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", {name: int(v) for name, v in macros.items()})
    return Kernel(cubin, "rlk_linear_logprob", SHARED_BYTES + (STAGING_BYTES if mode in (GRADIENT, PROBS) else 0))


def _launch(
    kernel: Kernel, shape: tuple[int, int, int], device: torch.device, maps: tuple[TensorMap, ...], **rest: Any
) -> None:
    """A result of shape[0] rows and shape[1] columns from shape[2] products each."""
    given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in rest.items() if v is not None}
    clusters = -(-shape[0] // 256) * -(-shape[1] // 256)
    most = _multiprocessors(device.index) // 2
    arguments = Arguments(tokens=shape[0], vocab=shape[1], pieces=-(-shape[2] // 64), **given)
    maps = (*maps, TensorMap())[:3]
    kernel(2 * min(clusters, most), 384, *maps, arguments)


# ---- schedules -----------------------------------------------------------------------------------


def _statistics(
    buffers: TileBuffers,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
    logits: Tensor | None,
) -> None:
    if (hidden.data_ptr() | weight.data_ptr()) & 15:
        return anchor.tile_statistics(buffers, hidden, weight, targets, inv_temperature, kept, probs, logits)
    maps = [tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64)]
    if probs is not None:
        maps.append(tensor_map(probs, 64, 64))
    mode = STATISTICS if probs is None else PROBS
    _launch(
        _kernel(hidden.get_device(), mode, inv_temperature is not None, kept is not None, False),
        (len(hidden), *weight.shape), hidden.device, tuple(maps), targets=targets, inv_temperature=inv_temperature,
        kept=kept, tile_max=buffers.maximum, tile_sum=buffers.sum, tile_entropy=buffers.entropy,
        target_z=buffers.target, logits=logits, width=None if logits is None else logits.shape[1],
        tiles=buffers.tiles, words=-(-len(weight) // 32),
    )  # fmt: skip


def _dz_block(
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
            _kernel(
                hidden.get_device(), GRADIENT, inv_temperature is not None, kept is not None, dentropy is not None
            ),
            (len(hidden), *weight.shape), hidden.device,
            (tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64), tensor_map(dz, 64, 64)),
            targets=targets, inv_temperature=inv_temperature, kept=kept, stats=stats, entropy=entropy, dlogp=dlogp,
            dentropy=dentropy, active=active.flags, words=-(-vocab_size // 32), first=first,
        )  # fmt: skip


def _dhidden_block(
    running: Tensor, rounded: Tensor | None, dz: Tensor, weight: Tensor, fresh: bool, active: Active
) -> None:
    if weight.data_ptr() & 15:
        return anchor.dhidden_block(running, rounded, dz, weight, fresh, active)
    with common.on_device(dz):
        _launch(
            _kernel(dz.get_device(), DHIDDEN, False, False, False), (*running.shape, len(weight)), dz.device,
            (tensor_map(dz, 128, 64), tensor_map(weight, 64, 64)),
            active=active.flags, sum=running, rounded=rounded, fresh=fresh,
        )  # fmt: skip


def _dweight_block(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
    if (grad.data_ptr() | hidden.data_ptr()) & 15:
        return anchor.dweight_block(grad, dz, hidden, fresh, active)
    rounded = grad.dtype != torch.float32
    with common.on_device(dz):
        _launch(
            _kernel(dz.get_device(), DWEIGHT, False, False, False), (*grad.shape, len(hidden)), dz.device,
            (tensor_map(dz, 64, 64), tensor_map(hidden, 64, 64)),
            blocks=active.blocks, count=active.number, sum=None if rounded else grad,
            rounded=grad if rounded else None, fresh=fresh,
        )  # fmt: skip


# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of both ops. The kernel's arithmetic knows neither T nor V, so they are no part of it."""

    device: int  # index, -1 for the CPU
    many: bool  # at least LEAST_TOKENS
    c: int
    dtype: torch.dtype
    dense: bool  # at 16-byte addresses the copy engine can fetch both operands and store the output
    temperature: bool
    kept: bool
    probs: bool
    logits: bool
    dlogp: bool
    dentropy: bool


def _fetchable(*matrices: Tensor) -> bool:
    """Whether the copy engine reads these matrices, where they begin at 16-byte addresses: dense rows that do not
    overlap."""
    return all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] for t in matrices)


def _forward_key(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    keep_probs: bool, width: int,
) -> Key:  # fmt: skip
    dense = _fetchable(hidden, weight) and not (keep_probs and weight.shape[0] % 8)
    return (
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype, dense,
        inv_temperature is not None, kept is not None, keep_probs, width > 0, False, False,
    )  # fmt: skip


def _dz_key(
    dz: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, active: Active, first: int,
    vocab_size: int,
) -> Key:  # fmt: skip
    return (
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype,
        _fetchable(hidden, weight), inv_temperature is not None, kept is not None, False, False,
        dlogp is not None, dentropy is not None,
    )  # fmt: skip


# Dispatch of a warm call, as in `cuda/linear.py`. What decides `_fetchable` is, of contiguous operands, their shapes;
# else their strides count too.


def _strides(*matrices: Tensor) -> Hashable:
    return tuple(t.stride() for t in matrices)


def _forward_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_logprob(
        hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
        keep_probs: bool, width: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        call = (
            hidden.shape, hidden.dtype, hidden.get_device(), inv_temperature is None, kept is None,
            keep_probs and weight.shape, width > 0,
            (hidden.is_contiguous() and weight.is_contiguous()) or _strides(hidden, weight),
        )  # fmt: skip
        run = runs.get(call) or first(call, hidden, weight, targets, inv_temperature, kept, keep_probs, width)
        try:
            return run(hidden, weight, targets, inv_temperature, kept, keep_probs, width)
        except Exception as error:
            return instead(error, run, hidden, weight, targets, inv_temperature, kept, keep_probs, width)

    return linear_logprob


def _dz_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_logprob_dz(
        dz: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None,
        kept: Tensor | None, stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None,
        active: Active, start: int, vocab_size: int,
    ) -> None:  # fmt: skip
        call = (
            hidden.shape, hidden.dtype, hidden.get_device(), inv_temperature is None, kept is None,
            dlogp is None, dentropy is None,
            (hidden.is_contiguous() and weight.is_contiguous()) or _strides(hidden, weight),
        )  # fmt: skip
        run = runs.get(call) or first(
            call, dz, hidden, weight, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, active, start,
            vocab_size,
        )  # fmt: skip
        try:
            run(
                dz, hidden, weight, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, active, start,
                vocab_size,
            )  # fmt: skip
        except Exception as error:
            instead(
                error, run, dz, hidden, weight, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy,
                active, start, vocab_size,
            )  # fmt: skip

    return linear_logprob_dz


def _describe(key: Key) -> dict[str, Any]:
    s = Shape(*key)  # type: ignore[arg-type]
    plain = {**s._asdict(), "dtype": str(s.dtype).removeprefix("torch.")}
    del plain["device"]
    return plain


def _device(key: Key) -> torch.device:
    index = int(key[0])  # type: ignore[call-overload]
    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")


def _rows(key: Key) -> list[int]:
    return [LEAST_TOKENS, 1000, 4096] if key[1] else [1, 77, LEAST_TOKENS - 1]


def _forward_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s, device = Shape(*key), generator.device  # type: ignore[arg-type]
    hidden = values(kind, m, s.c, s.dtype, generator)
    weight = values(kind, SAMPLE_ENTRIES, s.c, s.dtype, generator, second=True) * (4 * s.c**-0.5)
    targets = torch.randint(0, SAMPLE_ENTRIES, (m,), device=device, generator=generator)
    inverse, kept = None, None
    if s.temperature:
        inverse = 0.5 + torch.rand(m, dtype=torch.float32, device=device, generator=generator)
    if s.kept:
        shape = (m, -(-SAMPLE_ENTRIES // 32))
        kept = torch.randint(-(2**31), 2**31, shape, device=device, generator=generator).to(torch.int32)
    return hidden, weight, targets, inverse, kept, s.probs, SAMPLE_WIDTH * s.logits


def _upstream(m: int, generator: torch.Generator, most: bool = False) -> Tensor:
    """Gradients of which every seventh is zero, and a run of blocks of tokens as well unless `most` have one."""
    g = torch.randn(m, dtype=torch.float32, device=generator.device, generator=generator)
    g[::7] = 0.0
    if not most:
        g[m // 3 : m // 3 + 500] = 0.0
    return g


def _active(
    targets: Tensor, kept: Tensor | None, stats: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, row: int
) -> Active:
    flags, blocks, number = loop.active_blocks(targets, kept, stats, dlogp, dentropy, len(targets))
    return Active(flags[0], blocks[0], number, row)


def _dz_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = Shape(*key)  # type: ignore[arg-type]
    hidden, weight, targets, inverse, kept, *_ = _forward_sample(key, m, kind, generator)
    _, entropy, _, stats = anchor.forward(hidden, weight, targets, inverse, kept)
    g = _upstream(m, generator)
    up = (g if s.dlogp else None, 2.0 * g if s.dentropy else None)
    first = SAMPLE_ENTRIES // VOCAB_TILE * VOCAB_TILE - SAMPLE_BLOCK  # a block inside the vocabulary that ends with it
    dz = torch.full((m, SAMPLE_ENTRIES - first), float("nan"), dtype=s.dtype, device=hidden.device)
    active = _active(targets, kept, stats, *up, 0)
    return dz, hidden, weight[first:], targets, inverse, kept, stats, entropy, *up, active, first, SAMPLE_ENTRIES


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


# ---- shape classes of the two gradients ----------------------------------------------------------


class GradShape(NamedTuple):
    """Shape class of dhidden and dweight: C, and the dtype of what receives the result."""

    device: int
    c: int
    dtype: torch.dtype
    out: torch.dtype
    dense: bool
    fresh: bool
    rounded: bool
    row: int  # `Active.row` where the other operand is contiguous: cuBLASLt's choice may depend on it


def _dhidden_key(
    running: Tensor, rounded: Tensor | None, dz: Tensor, weight: Tensor, fresh: bool, active: Active
) -> Key:
    dense = weight.shape[1] % 8 == 0 and _fetchable(weight)
    row = active.row if weight.is_contiguous() else 0
    return dz.get_device(), weight.shape[1], dz.dtype, torch.float32, dense, fresh, rounded is not None, row


def _dweight_key(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> Key:
    dense = grad.shape[1] % 8 == 0 and grad.is_contiguous() and _fetchable(hidden)
    row = active.row if hidden.is_contiguous() else 0
    return dz.get_device(), hidden.shape[1], dz.dtype, grad.dtype, dense, fresh, grad.dtype != torch.float32, row


# The sums, what they are rounded into, and dz are made by the backward's loop, one way alone: nothing is asked of them,
# in `_dz_key` neither.


def _dhidden_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_logprob_dhidden(
        running: Tensor, rounded: Tensor | None, dz: Tensor, weight: Tensor, fresh: bool, active: Active
    ) -> None:
        call = (
            weight.shape[1], weight.dtype, fresh, weight.get_device(), active.row, rounded is None,
            weight.is_contiguous() or weight.stride(),
        )  # fmt: skip
        run = runs.get(call) or first(call, running, rounded, dz, weight, fresh, active)
        try:
            run(running, rounded, dz, weight, fresh, active)
        except Exception as error:
            instead(error, run, running, rounded, dz, weight, fresh, active)

    return linear_logprob_dhidden


def _dweight_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_logprob_dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
        call = (
            grad.shape[1], hidden.dtype, grad.dtype, fresh, grad.get_device(), active.row,
            (grad.is_contiguous() and hidden.is_contiguous()) or _strides(grad, hidden),
        )  # fmt: skip
        run = runs.get(call) or first(call, grad, dz, hidden, fresh, active)
        try:
            run(grad, dz, hidden, fresh, active)
        except Exception as error:
            instead(error, run, grad, dz, hidden, fresh, active)

    return linear_logprob_dweight


def _describe_grad(key: Key) -> dict[str, Any]:
    s = GradShape(*key)  # type: ignore[arg-type]
    name = lambda dtype: str(dtype).removeprefix("torch.")
    plain = {**s._asdict(), "dtype": name(s.dtype), "out": name(s.out)}
    del plain["device"]
    return plain


def _rows_of_grad(key: Key) -> list[int]:
    return [LEAST_TOKENS, 1000, 4096]


def _supports_grad(key: Key) -> bool:
    s = GradShape(*key)  # type: ignore[arg-type]
    if not (s.dense and s.dtype == torch.bfloat16 and s.device >= 0):
        return False
    return not common.IS_HIP and torch.cuda.get_device_capability(s.device) == (9, 0)


def _blocks_of_dz(s: GradShape, tokens: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Active]:
    """A gradient of logits with rows of zeros, some of them whole blocks, and the blocks that are not."""
    g = _upstream(tokens, generator, s.row > 0)
    row = s.row or SAMPLE_BLOCK + 56
    entries = min(row, SAMPLE_BLOCK if tokens == _rows_of_grad(())[-1] else SAMPLE_BLOCK - 56)
    dz = torch.zeros(tokens, row, dtype=s.dtype, device=g.device)[:, :entries]
    dz.copy_(torch.where((g != 0)[:, None], values(kind, tokens, entries, s.dtype, generator), 0.0))
    targets = torch.zeros(tokens, dtype=torch.int64, device=g.device)
    stats = torch.zeros(tokens, 2, dtype=torch.float32, device=g.device)
    return dz, _active(targets, None, stats, g, None, s.row)


def _dhidden_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = GradShape(*key)  # type: ignore[arg-type]
    dz, active = _blocks_of_dz(s, m, kind, generator)
    weight = values(kind, dz.shape[1], s.c, s.dtype, generator, second=True)
    running = torch.randn(m, s.c, dtype=torch.float32, device=dz.device, generator=generator)
    return running, torch.empty_like(running, dtype=s.dtype) if s.rounded else None, dz, weight, s.fresh, active


def _dweight_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = GradShape(*key)  # type: ignore[arg-type]
    dz, active = _blocks_of_dz(s, m, kind, generator)
    hidden = values(kind, m, s.c, s.dtype, generator, second=True)
    grad = torch.randn(dz.shape[1], s.c, dtype=torch.float32, device=dz.device, generator=generator).to(s.out)
    return grad, dz, hidden, s.fresh, active


def _bind_grad(run: Run, mode: int) -> Callable[[Key], Run]:
    def bind(key: Key) -> Run:
        with torch.cuda.device(_device(key)):
            _kernel(_device(key).index, mode, False, False, False)
        return run

    return bind


# ---- cuBLASLt for the two gradients ---------------------------------------------------------------


def _cublaslt(rank: int, by_tokens: bool) -> Schedule:
    """One of cuBLASLt's algorithms; `by_tokens`: for the weight gradient, whose contraction runs over the tokens."""

    def supports(key: Key) -> bool:
        s = GradShape(*key)  # type: ignore[arg-type]
        return s.row > 0 and _supports_grad(key)

    def bind(key: Key) -> Run:
        s = GradShape(*key)  # type: ignore[arg-type]
        rows, span = (s.row, CUBLASLT_TOKENS) if by_tokens else (CUBLASLT_TOKENS, orders.LOGPROB_DGRAD_CHUNK)
        chosen = cublaslt.plan(
            s.device, rows, s.c, span, 1, s.row, s.c, by_tokens, False, s.dtype, s.out, False, rank
        )  # fmt: skip
        launch = cublaslt.launcher(s.device, chosen)

        def dhidden(
            running: Tensor, rounded: Tensor | None, dz: Tensor, weight: Tensor, fresh: bool, active: Active
        ) -> None:
            weight_at = weight.data_ptr()
            if weight_at & 15:
                return anchor.dhidden_block(running, rounded, dz, weight, fresh, active)
            with common.on_device(dz):
                launch(len(dz), dz.shape[1], dz.data_ptr(), weight_at, None, not fresh, running)
                if rounded is not None:
                    rounded.copy_(running)

        def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
            hidden_at = hidden.data_ptr()
            if (grad.data_ptr() | hidden_at) & 15:
                return anchor.dweight_block(grad, dz, hidden, fresh, active)
            with common.on_device(dz):
                launch(dz.shape[1], len(dz), dz.data_ptr(), hidden_at, None, not fresh, grad)

        run: Any = dweight if by_tokens else dhidden
        run.note = f"; {chosen.algorithm}"
        return run

    return Schedule(f"cublaslt.{rank}", bind, supports)


class _Guess:
    """Whether nearly all blocks of tokens had a gradient in the last backward whose count has arrived."""

    def __init__(self, device: int) -> None:
        self._counts = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._arrived = torch.cuda.Event()
        self._blocks = 0  # of the count that is under way
        self._most = False

    def __call__(self, number: Tensor, blocks: int) -> bool:
        if self._blocks and self._arrived.query():
            self._most = 32 * (self._blocks - int(self._counts.sum())) <= self._blocks
            self._blocks = 0
        if not self._blocks and len(number) <= len(self._counts):
            self._counts.zero_()
            self._counts[: len(number)].copy_(number, non_blocking=True)
            self._arrived.record()
            self._blocks = blocks
        return self._most


_guess_of = functools.cache(_Guess)


def guess(number: Tensor, blocks: int) -> bool:
    """Whether nearly all of the blocks have a gradient, by an earlier count; under graph capture: no.

    number [groups] int32 on the GPU is on its way to the host for a later call; nothing waits for it.
    """
    if not number.is_cuda:
        return False
    with torch.cuda.device(number.device):
        if torch.cuda.is_current_stream_capturing():
            return False
        return _guess_of(number.get_device())(number, blocks)


# ---- families ------------------------------------------------------------------------------------

_SOURCES = (
    Path(__file__),
    *(
        Path(m.__file__)
        for m in (anchor, loop, statistics, linear_grad, matrix, common, cublaslt, driver, orders)
        if m.__file__
    ),
    build.source_dir() / "cuda" / SOURCE,
    build.source_dir() / "cuda" / "linear_cublaslt.cpp",
)


def _op(
    op: str,
    run: Run,
    key: Callable[..., Key],
    warm: Warm,
    sample: Callable[..., tuple[Any, ...]],
    *schedules: Schedule,
    grad: bool = False,
    mutates: tuple[int, ...] = (),
) -> ScheduledOp:
    return ScheduledOp(
        Family(
            op=op, anchor=run, key=key, warm=warm, describe=_describe_grad if grad else _describe, device=_device,
            rows=_rows_of_grad if grad else _rows, sample=sample, schedules=schedules, sources=_SOURCES,
            versions=cublaslt.versions, mutates=mutates,
        )
    )  # fmt: skip


_HOPPER_FORWARD = functools.partial(anchor.forward, statistics=_statistics)
_forward = _op(
    "linear_logprob", anchor.forward, _forward_key, _forward_warm, _forward_sample,
    Schedule("hopper", _bind(_HOPPER_FORWARD, lambda s: (PROBS if s.probs else STATISTICS,)), _supports),
)  # fmt: skip
_dz = _op(
    "linear_logprob_dz", anchor.dz_block, _dz_key, _dz_warm, _dz_sample,
    Schedule("hopper", _bind(_dz_block, lambda s: (GRADIENT,)), _supports), mutates=(0,),
)  # fmt: skip
_dhidden = _op(
    "linear_logprob_dhidden", anchor.dhidden_block, _dhidden_key, _dhidden_warm, _dhidden_sample,
    Schedule("hopper", _bind_grad(_dhidden_block, DHIDDEN), _supports_grad),
    *(_cublaslt(rank, False) for rank in range(cublaslt.RANKS)), grad=True, mutates=(0, 1),
)  # fmt: skip
_dweight = _op(
    "linear_logprob_dweight", anchor.dweight_block, _dweight_key, _dweight_warm, _dweight_sample,
    Schedule("hopper", _bind_grad(_dweight_block, DWEIGHT), _supports_grad),
    *(_cublaslt(rank, True) for rank in range(cublaslt.RANKS)), grad=True, mutates=(0,),
)  # fmt: skip

# ---- the op --------------------------------------------------------------------------------------


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward.call(hidden, weight, targets, inv_temperature, kept, False, 0)


def linear_logprob_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None, width: int
) -> tuple[Tensor, ...]:
    return _forward.call(hidden, weight, targets, inv_temperature, kept, False, width)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward.call(hidden, weight, targets, inv_temperature, kept, True, 0)


linear_logprob_grad_ = functools.partial(loop.gradients, loop.Products(_dz.call, _dhidden.call, _dweight.call, guess))
