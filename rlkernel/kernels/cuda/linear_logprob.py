"""linear_logprob on CUDA. Schedules: a warp-specialised kernel on Hopper, and cuBLASLt for the two gradients.

The forward is one scheduled op, `_forward`. The backward, `linear_logprob_grad_`, is the loop over blocks in
kernels/triton/linear_logprob_backward.py: `gradients`, which calls three scheduled ops per block, `_dz`, `_dhidden` and
`_dweight`. The anchors of all four are in kernels/triton/linear_logprob.py.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import OpSpec, Run, Schedule, ShapeT
from rlkernel.kernels.cuda import cublaslt, driver, linear_shapes
from rlkernel.kernels.cuda import linear_logprob_shapes as shapes
from rlkernel.kernels.cuda import linear_logprob_sm90 as sm90
from rlkernel.kernels.cuda.linear_logprob_shapes import GradShape, LinearLogprobShape
from rlkernel.kernels.cuda.linear_logprob_sm90 import Pass
from rlkernel.kernels.samples import KINDS, NONFINITE
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton.linear_logprob_rows import Active

CUBLASLT_TOKENS = 4096  # token count in the query to cuBLASLt's heuristic; the algorithm runs with any

# ---- Hopper's kernel -----------------------------------------------------------------------------


def _supports(s: LinearLogprobShape) -> bool:
    return s.many and s.tma and s.dtype == torch.bfloat16 and s.c > 0 and driver.on_hopper(s.device)


def _bind_forward(s: LinearLogprobShape) -> Run:
    which = Pass.PROBABILITIES if s.probs else Pass.STATISTICS
    run = functools.partial(anchor.forward, statistics=sm90.statistics)
    return driver.note_code(run, sm90.kernel(s.device, which, s.temperature, s.kept))


def _bind_dz(s: LinearLogprobShape) -> Run:
    kernel = sm90.kernel(s.device, Pass.DZ, s.temperature, s.kept, s.dentropy)
    return driver.note_code(functools.partial(sm90.dz_block), kernel)


def _supports_grad(s: GradShape) -> bool:
    return s.tma and s.dtype == torch.bfloat16 and driver.on_hopper(s.device)


def _bind_dhidden(s: GradShape) -> Run:
    return driver.note_code(functools.partial(sm90.dhidden_block), sm90.kernel(s.device, Pass.DHIDDEN))


def _bind_dweight(s: GradShape) -> Run:
    return driver.note_code(_in_pieces(s, sm90.dweight_block), sm90.kernel(s.device, Pass.DWEIGHT))


def _in_pieces(s: GradShape, run: Run) -> Run:
    """The weight gradient `run` for blocks of any width. A block wider than the widest that was compared at its token
    count is computed in pieces. No bit changes, because vocabulary entries are independent. `more` is passed on."""
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


def _supports_cublaslt(s: GradShape) -> bool:
    """Calls with fewer tokens than CUBLASLT_MIN_TOKENS run the anchor."""
    return s.row > 0 and s.aligned and shapes.max_tokens(s) >= shapes.CUBLASLT_MIN_TOKENS and _supports_grad(s)


def _cublaslt_dhidden(rank: int) -> Schedule[GradShape]:
    """The gradient of the hidden states by one of cuBLASLt's algorithms, chunk after chunk of the vocabulary."""

    def bind(s: GradShape) -> Run:
        chosen = cublaslt.plan(
            s.device, CUBLASLT_TOKENS, s.c, orders.LOGPROB_DGRAD_CHUNK, 1, s.row, s.c, False, False, s.dtype, s.out,
            False, rank,
        )  # fmt: skip
        launch = cublaslt.launcher(s.device, chosen)

        def dhidden(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> None:
            weight_at = weight.data_ptr()
            if weight_at & 15 or len(dz) < shapes.CUBLASLT_MIN_TOKENS:
                return anchor.dhidden_block(running, dz, weight, fresh, active)
            entries, size = dz.shape[1], dz.element_size()
            with common.on_device(dz):
                space = cublaslt.workspace(chosen, dz.device)
                for low in range(0, entries, orders.LOGPROB_DGRAD_CHUNK):
                    k = min(entries - low, orders.LOGPROB_DGRAD_CHUNK)
                    at = dz.data_ptr() + low * size, weight_at + low * s.c * size
                    launch(len(dz), k, *at, None, not fresh or low > 0, running, space)

        run: Any = dhidden
        run.note = f"; {chosen.algorithm}"
        return run

    return Schedule(f"cublaslt.{rank}", bind, _supports_cublaslt)


def _cublaslt_dweight(rank: int) -> Schedule[GradShape]:
    """The gradient of the weight, a sum over tokens, by one of cuBLASLt's algorithms."""

    def bind(s: GradShape) -> Run:
        chosen = cublaslt.plan(
            s.device, shapes.widest(s, CUBLASLT_TOKENS), s.c, CUBLASLT_TOKENS, 1, s.row, s.c, True, False, s.dtype,
            s.out, False, rank,
        )  # fmt: skip
        launch = cublaslt.launcher(s.device, chosen)

        def piece(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active, space: Tensor | None) -> None:
            hidden_at = hidden.data_ptr()
            if (grad.data_ptr() | hidden_at) & 15 or len(dz) < shapes.CUBLASLT_MIN_TOKENS:
                return anchor.dweight_block(grad, dz, hidden, fresh, active)
            with common.on_device(dz):
                launch(dz.shape[1], len(dz), dz.data_ptr(), hidden_at, None, not fresh, grad, space)

        pieces = _in_pieces(s, piece)

        def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
            pieces(grad, dz, hidden, fresh, active, cublaslt.workspace(chosen, grad.device))

        run: Any = dweight
        run.note = f"; {chosen.algorithm}"
        return run

    return Schedule(f"cublaslt.{rank}", bind, _supports_cublaslt)


# ---- scheduled ops -------------------------------------------------------------------------------


def _op(
    name: str,
    run: Run,
    shape: Callable[..., ShapeT],
    call_key: Callable[..., Hashable],
    rows: Callable[[ShapeT], list[int]],
    sample: Callable[..., tuple[Any, ...]],
    schedules: Sequence[Schedule[ShapeT]],
    mutates: tuple[int, ...] = (),
) -> ScheduledOp[ShapeT]:
    return ScheduledOp(
        OpSpec(
            name, run, shape, rows, sample, schedules, call_key, versions=cublaslt.versions, mutates=mutates,
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
        *(_cublaslt_dhidden(rank) for rank in range(cublaslt.RANKS)),
    ],
    mutates=(0,),
)  # fmt: skip
_dweight = _op(
    "linear_logprob_dweight", anchor.dweight_block, shapes.dweight_shape, shapes.dweight_call, shapes.rows_of_grad,
    shapes.dweight_sample,
    [
        Schedule("hopper", _bind_dweight, _supports_grad),
        *(_cublaslt_dweight(rank) for rank in range(cublaslt.RANKS)),
    ],
    mutates=(0,),
)  # fmt: skip

# ---- implementations of the torch ops ------------------------------------------------------------


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
