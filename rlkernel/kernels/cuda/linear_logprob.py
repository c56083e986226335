"""Schedules of linear_logprob's products: a warp-specialised kernel on Hopper, and cuBLASLt for the two gradients.

The anchors are in kernels/triton/linear_logprob.py, the backward's loop in linear_logprob_backward.py.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule, ShapeT
from rlkernel.kernels.cuda import cublaslt, driver, linear_shapes
from rlkernel.kernels.cuda import linear_logprob_shapes as shapes
from rlkernel.kernels.cuda import linear_logprob_sm90 as sm90
from rlkernel.kernels.cuda.linear_logprob_shapes import GradShape, LinearLogprobShape
from rlkernel.kernels.cuda.linear_logprob_sm90 import Pass
from rlkernel.kernels.samples import KINDS, NONFINITE
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton.linear_logprob_rows import Active

CUBLASLT_TOKENS = 4096  # token count in the query to cuBLASLt's heuristic; the algorithm runs with any

# ---- Hopper's kernel -----------------------------------------------------------------------------


def _supports(s: LinearLogprobShape) -> bool:
    return s.many and s.dense and s.dtype == torch.bfloat16 and s.c > 0 and driver.on_hopper(s.device)


def _bind_forward(s: LinearLogprobShape) -> Run:
    which = Pass.PROBABILITIES if s.probs else Pass.STATISTICS
    run = functools.partial(anchor.forward, statistics=sm90.statistics)
    return driver.noted(run, sm90.kernel(s.device, which, s.temperature, s.kept))


def _bind_dz(s: LinearLogprobShape) -> Run:
    kernel = sm90.kernel(s.device, Pass.DZ, s.temperature, s.kept, s.dentropy)
    return driver.noted(functools.partial(sm90.dz_block), kernel)


def _supports_grad(s: GradShape) -> bool:
    return s.dense and s.dtype == torch.bfloat16 and driver.on_hopper(s.device)


def _bind_dhidden(s: GradShape) -> Run:
    return driver.noted(functools.partial(sm90.dhidden_block), sm90.kernel(s.device, Pass.DHIDDEN))


def _bind_dweight(s: GradShape) -> Run:
    return driver.noted(_in_pieces(s, sm90.dweight_block), sm90.kernel(s.device, Pass.DWEIGHT))


def _in_pieces(s: GradShape, run: Run) -> Run:
    """The weight gradient `run` for blocks of any width: a block wider than what was compared at that token count is
    computed in pieces, which changes no bit because vocabulary entries are independent. `more` goes to each piece."""
    counts, widths = zip(*shapes.compared(s), strict=True)
    widths = (*widths, 0)  # more tokens than were compared: the anchor

    def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active, *more: Any) -> None:
        tokens, entries = dz.shape
        most = widths[bisect_left(counts, tokens)]
        if most == 0:
            anchor.dweight_block(grad, dz, hidden, fresh, active)
        elif entries <= most:
            run(grad, dz, hidden, fresh, active, *more)
        else:
            for part in linear_shapes.cut(entries, most):
                run(grad[part], dz[:, part], hidden, fresh, active, *more)

    return dweight


# ---- cuBLASLt for the two gradients ---------------------------------------------------------------


def _cublaslt(rank: int, by_tokens: bool) -> Schedule[GradShape]:
    """One of cuBLASLt's algorithms for the gradient of the hidden states or (`by_tokens`) of the weight, a sum over
    tokens. Below FEW_TOKENS the anchor computes both."""

    def supports(s: GradShape) -> bool:
        enough = shapes.most_tokens(s) >= shapes.FEW_TOKENS
        return s.row > 0 and s.whole and enough and _supports_grad(s)

    def bind(s: GradShape) -> Run:
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
                space = cublaslt.workspace(chosen, dz.device)
                for low in range(0, entries, orders.LOGPROB_DGRAD_CHUNK):
                    k = min(entries - low, orders.LOGPROB_DGRAD_CHUNK)
                    at = dz.data_ptr() + low * size, weight_at + low * s.c * size
                    launch(len(dz), k, *at, None, not fresh or low > 0, running, space)

        def piece(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active, space: Tensor | None) -> None:
            hidden_at = hidden.data_ptr()
            if (grad.data_ptr() | hidden_at) & 15 or len(dz) < shapes.FEW_TOKENS:
                return anchor.dweight_block(grad, dz, hidden, fresh, active)
            with common.on_device(dz):
                launch(dz.shape[1], len(dz), dz.data_ptr(), hidden_at, None, not fresh, grad, space)

        if by_tokens:
            pieces = _in_pieces(s, piece)
            run: Any = lambda *given: pieces(*given, cublaslt.workspace(chosen, given[0].device))
        else:
            run = dhidden
        run.note = f"; {chosen.algorithm}"
        return run

    return Schedule(f"cublaslt.{rank}", bind, supports)


# ---- families ------------------------------------------------------------------------------------


def _op(
    op: str,
    run: Run,
    shape: Callable[..., ShapeT],
    call_key: Callable[..., Hashable],
    rows: Callable[[ShapeT], list[int]],
    sample: Callable[..., tuple[Any, ...]],
    schedules: Sequence[Schedule[ShapeT]],
    mutates: tuple[int, ...] = (),
) -> ScheduledOp[ShapeT]:
    return ScheduledOp(
        Family(
            op, run, shape, rows, sample, schedules, call_key, versions=cublaslt.versions, mutates=mutates,
            kinds=(*KINDS, NONFINITE),
        )
    )  # fmt: skip


_forward = _op(
    "linear_logprob", anchor.forward, shapes.forward_shape, shapes.forward_call, shapes.rows_of, shapes.forward_sample,
    [Schedule("hopper", _bind_forward, _supports)],
)  # fmt: skip
_dz = _op(
    "linear_logprob_dz", anchor.dz_block, shapes.dz_shape, shapes.dz_call, shapes.rows_of, shapes.dz_sample,
    [Schedule("hopper", _bind_dz, _supports)], mutates=(0,),
)  # fmt: skip
_dhidden = _op(
    "linear_logprob_dhidden", anchor.dhidden_block, shapes.dhidden_shape, shapes.dhidden_call, shapes.rows_of_dhidden,
    shapes.dhidden_sample,
    [
        Schedule("hopper", _bind_dhidden, _supports_grad),
        *(_cublaslt(rank, False) for rank in range(cublaslt.RANKS)),
    ],
    mutates=(0,),
)  # fmt: skip
_dweight = _op(
    "linear_logprob_dweight", anchor.dweight_block, shapes.dweight_shape, shapes.dweight_call, shapes.rows_of_grad,
    shapes.dweight_sample,
    [
        Schedule("hopper", _bind_dweight, _supports_grad),
        *(_cublaslt(rank, True) for rank in range(cublaslt.RANKS)),
    ],
    mutates=(0,),
)  # fmt: skip

# ---- the op --------------------------------------------------------------------------------------


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward(hidden, weight, targets, inv_temperature, kept, False, 0)


def linear_logprob_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None, width: int
) -> tuple[Tensor, ...]:
    return _forward(hidden, weight, targets, inv_temperature, kept, False, width)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return _forward(hidden, weight, targets, inv_temperature, kept, True, 0)


PRODUCTS = loop.Products(_dz, _dhidden, _dweight)
linear_logprob_grad_ = functools.partial(loop.gradients, PRODUCTS)
