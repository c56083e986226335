"""linear_logprob on CUDA: a warp-specialised kernel on Hopper, forward and backward, where it equals the Triton anchor.

The anchor and the order of the backward are those of kernels/triton/linear_logprob.py; here are the schedules that
may take the place of its products (linear_logprob_hopper.py; cuBLASLt for the two gradients, where nearly all tokens
have one) and their certification.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import (
    KINDS,
    NONFINITE,
    Family,
    Key,
    Run,
    Schedule,
    Warm,
    beside_captures,
    describe,
    device_of,
)
from rlkernel.kernels.cuda import cublaslt, driver, linear_shapes
from rlkernel.kernels.cuda import linear_logprob_hopper as hopper
from rlkernel.kernels.cuda import linear_logprob_shapes as shapes
from rlkernel.kernels.cuda.linear_logprob_shapes import GradShape, Shape
from rlkernel.kernels.errors import FinishedError, LaunchError
from rlkernel.kernels.schedule import ScheduledOp, settle_before
from rlkernel.kernels.triton import common, launch, linear_grad, matrix, streams
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton import linear_logprob_rows as token_rows
from rlkernel.kernels.triton import logprob as statistics
from rlkernel.kernels.triton import logprob_backward as gradient
from rlkernel.kernels.triton.linear_logprob_rows import Active, Guess

CUBLASLT_TOKENS = 4096  # that cuBLASLt's heuristic is asked for; any number runs
SPREAD_CHANNELS = 1200  # moving dz's rows from one order to the other takes as long as a product of so many
GATHER_CHANNELS = 64  # the same of the hidden states in another order, and of that order
CLUSTER = 256  # rows of dz and of dhidden that Hopper's kernel computes together, or leaves out

# ---- Hopper's kernel -----------------------------------------------------------------------------


def _supports(key: Key) -> bool:
    s = Shape(*key)  # type: ignore[arg-type]
    return s.many and s.dense and s.dtype == torch.bfloat16 and s.c > 0 and driver.on_hopper(s.device)


def _bind(run: Run, modes: Callable[[Shape], tuple[int, ...]]) -> Callable[[Key], Run]:
    def bind(key: Key) -> Run:
        s = Shape(*key)  # type: ignore[arg-type]
        with torch.cuda.device(s.device):
            kernels = [hopper.kernel(s.device, mode, s.temperature, s.kept, s.dentropy) for mode in modes(s)]
        return driver.noted(functools.partial(run), *kernels)

    return bind


def _supports_grad(key: Key) -> bool:
    s = GradShape(*key)  # type: ignore[arg-type]
    return s.dense and s.dtype == torch.bfloat16 and driver.on_hopper(s.device)


def _bind_grad(run: Run, mode: int) -> Callable[[Key], Run]:
    def bind(key: Key) -> Run:
        with torch.cuda.device(device_of(key)):
            kernel = hopper.kernel(device_of(key).index, mode, False, False, False)
        by_entries = mode == hopper.DWEIGHT
        bound = _in_pieces(GradShape(*key), run) if by_entries else functools.partial(run)  # type: ignore[arg-type]
        return driver.noted(bound, kernel)

    return bind


def _in_pieces(s: GradShape, run: Run) -> Run:
    """`run` of the weight gradient for blocks of any width: with more entries than were compared at as many tokens, in
    pieces. Entries are independent, so no bit changes by it."""
    counts, widths = zip(*shapes.compared(s), strict=True)
    widths = (*widths, 0)  # more tokens than a block has

    def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
        tokens, entries = dz.shape
        most = widths[bisect_left(counts, tokens)]
        if entries <= most:
            return run(grad, dz, hidden, fresh, active)
        if most == 0:
            return anchor.dweight_block(grad, dz, hidden, fresh, active)
        for part in linear_shapes.cut(entries, most):
            piece = (grad[part], dz[:, part], hidden, fresh, active)
            try:
                run(*piece)
            except LaunchError as error:
                if part.start == 0:
                    raise
                # The pieces before are written: the call cannot begin anew.
                anchor.dweight_block(grad[part.start :], dz[:, part.start :], hidden, fresh, active)
                raise FinishedError(str(error)) from error

    return dweight


# ---- cuBLASLt for the two gradients ---------------------------------------------------------------


def _cublaslt(rank: int, by_tokens: bool) -> Schedule:
    """One of cuBLASLt's algorithms; `by_tokens`: for the weight gradient, whose contraction runs over the tokens. Of
    fewer than FEW_TOKENS the anchor computes both."""

    def supports(key: Key) -> bool:
        s = GradShape(*key)  # type: ignore[arg-type]
        enough = shapes.most_tokens(s) >= shapes.FEW_TOKENS  # of fewer it computes nothing itself
        return s.row > 0 and s.whole and enough and _supports_grad(key)  # as `linear`, which asks for multiples of 8

    def bind(key: Key) -> Run:
        s = GradShape(*key)  # type: ignore[arg-type]
        rows, span = CUBLASLT_TOKENS, orders.LOGPROB_DGRAD_CHUNK
        if by_tokens:
            rows, span = shapes.widest(s, CUBLASLT_TOKENS), CUBLASLT_TOKENS
        chosen = cublaslt.plan(
            s.device, rows, s.c, span, 1, s.row, s.c, by_tokens, False, s.dtype, s.out, False, rank
        )  # fmt: skip
        launch = cublaslt.launcher(s.device, chosen)

        def dhidden(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> None:
            weight_at = weight.data_ptr()
            if weight_at & 15 or len(dz) < shapes.FEW_TOKENS:
                return anchor.dhidden_block(running, dz, weight, fresh, active)
            entries, size = dz.shape[1], dz.element_size()
            with common.on_device(dz):
                for low in range(0, entries, orders.LOGPROB_DGRAD_CHUNK):
                    k = min(entries - low, orders.LOGPROB_DGRAD_CHUNK)
                    at = dz.data_ptr() + low * size, weight_at + low * s.c * size
                    try:
                        launch(len(dz), k, *at, None, not fresh or low > 0, running)
                    except LaunchError as error:
                        if low == 0:
                            raise
                        # The chunks before are added: the call cannot begin anew.
                        anchor.dhidden_block(running, dz[:, low:], weight[low:], False, active)
                        raise FinishedError(str(error)) from error

        def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
            hidden_at = hidden.data_ptr()
            if (grad.data_ptr() | hidden_at) & 15 or len(dz) < shapes.FEW_TOKENS:
                return anchor.dweight_block(grad, dz, hidden, fresh, active)
            with common.on_device(dz):
                launch(dz.shape[1], len(dz), dz.data_ptr(), hidden_at, None, not fresh, grad)

        run: Any = _in_pieces(s, dweight) if by_tokens else dhidden
        run.note = f"; {chosen.algorithm}"
        return run

    return Schedule(f"cublaslt.{rank}", bind, supports)


class _Guess:
    """What the last count that has arrived, of an earlier backward, says of the tokens.

    `counts` [blocks, 2] is memory of the host that the GPU writes. A count that is not there yet shows as a negative
    one: asking an event for it would end a graph capture of another thread.
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._blocks = self._tokens = 0  # of the count that is under way
        self._last = 1, 0, 0  # tokens, those in groups in which one has a gradient, and those that have one

    def __call__(self, counts: Tensor, tokens: int, channels: float, moved: bool) -> Guess:
        if self._tokens and int((found := self._counts[: self._blocks]).min()) >= 0:
            grouped, single = found.sum(0).tolist()
            self._last = self._tokens, grouped, single
            self._tokens = 0
        if not self._tokens and 0 < len(counts) <= len(self._counts):
            self._blocks, self._tokens = len(counts), tokens
            self._counts[: self._blocks].fill_(-1).copy_(counts, non_blocking=True)
        of, grouped, single = self._last
        of_groups, of_tokens = (-(-n // CLUSTER) * CLUSTER for n in (grouped, single))
        if single and (of_groups - of_tokens) * channels >= (SPREAD_CHANNELS if moved else GATHER_CHANNELS) * of_groups:
            return Guess.SINGLE
        return Guess.ALL if 32 * (of - grouped) <= of else Guess.GROUPS


@functools.cache
def _guess_of(device: int) -> _Guess:
    with beside_captures(torch.device("cuda", device)):
        return _Guess(torch.empty(64, 2, dtype=torch.int32, pin_memory=True))


def guess(hidden: Tensor, counts: Tensor, saved: float, moved: bool) -> Guess:
    """What `Rows.counts` of an earlier backward says of the tokens of `hidden` [T, C]; under graph capture nothing.

    counts [blocks, 2] int32 on the GPU is on its way to the host for a later call; nothing waits for it. `saved`
    products of C channels may leave single tokens out, for which dz is `moved` from one order to another; where no
    schedule leaves rows out, never.
    """
    if not counts.is_cuda:
        return Guess.GROUPS
    with torch.cuda.device(counts.device):
        if torch.cuda.is_current_stream_capturing():
            return Guess.GROUPS
        found = _guess_of(counts.get_device())(counts, len(hidden), saved * hidden.shape[1], moved)
    leaves_out = hidden.dtype == torch.bfloat16 and driver.on_hopper(counts.get_device())
    return found if leaves_out or found is not Guess.SINGLE else Guess.GROUPS


# ---- families ------------------------------------------------------------------------------------

_SOURCES = (
    Path(__file__),
    *(
        Path(m.__file__)
        for m in (
            anchor,
            loop,
            token_rows,
            statistics,
            gradient,
            launch,
            linear_grad,
            linear_shapes,
            matrix,
            common,
            streams,
            hopper,
            shapes,
            cublaslt,
            driver,
            orders,
        )
        if m.__file__
    ),
    *driver.sources(hopper.SOURCE, cublaslt.SOURCE),
)


def _op(
    op: str,
    run: Run,
    key: Callable[..., Key],
    warm: Warm,
    sample: Callable[..., tuple[Any, ...]],
    *schedules: Schedule,
    grad: bool = False,
    rows: Callable[[Key], list[int]] = shapes.rows_of,
    mutates: tuple[int, ...] = (),
    beside: Callable[..., list[Key]] = lambda *args: [],
) -> ScheduledOp:
    return ScheduledOp(
        Family(
            op=op, anchor=run, key=key, warm=warm, describe=functools.partial(describe, GradShape if grad else Shape),
            device=device_of, rows=rows, sample=sample,
            schedules=schedules, sources=_SOURCES, versions=cublaslt.versions, mutates=mutates,
            kinds=(*KINDS, NONFINITE), beside=beside,
        )
    )  # fmt: skip


_HOPPER_FORWARD = functools.partial(anchor.forward, statistics=hopper.statistics)
_forward = _op(
    "linear_logprob", anchor.forward, shapes.forward_key, shapes.forward_warm, shapes.forward_sample,
    Schedule("hopper", _bind(_HOPPER_FORWARD, lambda s: (hopper.PROBS if s.probs else hopper.STATISTICS,)), _supports),
)  # fmt: skip
_dz = _op(
    "linear_logprob_dz", anchor.dz_block, shapes.dz_key, shapes.dz_warm, shapes.dz_sample,
    Schedule("hopper", _bind(hopper.dz_block, lambda s: (hopper.GRADIENT,)), _supports), mutates=(0,),
)  # fmt: skip
_dhidden = _op(
    "linear_logprob_dhidden", anchor.dhidden_block, shapes.dhidden_key, shapes.dhidden_warm, shapes.dhidden_sample,
    Schedule("hopper", _bind_grad(hopper.dhidden_block, hopper.DHIDDEN), _supports_grad),
    *(_cublaslt(rank, False) for rank in range(cublaslt.RANKS)), grad=True, rows=shapes.rows_of_dhidden, mutates=(0,),
    beside=shapes.dhidden_beside,
)  # fmt: skip
_dweight = _op(
    "linear_logprob_dweight", anchor.dweight_block, shapes.dweight_key, shapes.dweight_warm, shapes.dweight_sample,
    Schedule("hopper", _bind_grad(hopper.dweight_block, hopper.DWEIGHT), _supports_grad),
    *(_cublaslt(rank, True) for rank in range(cublaslt.RANKS)), grad=True, rows=shapes.rows_of_grad, mutates=(0,),
    beside=shapes.dweight_beside,
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


PRODUCTS = loop.Products(
    _dz.call, _dhidden.call, _dweight.call, guess, functools.partial(settle_before, (_dz, _dhidden, _dweight))
)
linear_logprob_grad_ = functools.partial(loop.gradients, PRODUCTS)
