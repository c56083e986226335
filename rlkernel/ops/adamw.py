"""adamw_ and grad_norm: AdamW on fp32 master weights in one pass over many tensors, and the norm for clipping.

Contract: orders.py, `adamw`. Both have the same bits on every device. The clip factor and the decision to skip a step
with a non-finite gradient stay on the device, so nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, compress
from operator import add, is_, le
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.kernels.adamw import AdamwInputs
from rlkernel.ops.checks import check, check_flag, check_number, is_int
from rlkernel.ops.define import PLAIN, define
from rlkernel.ops.stock_switch import is_stock

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)
_LISTS = ("params", "masters", "exp_avgs", "exp_avg_sqs", "grads")


class GradNorm(NamedTuple):
    """Result of `grad_norm`, on the gradients' device.

    Attributes:
        norm: 0-dim fp64, the norm before clipping, divided by the loss scale.
        scale: 0-dim fp32, the factor that clips and divides by the loss scale, for `adamw_`; NaN if the norm is not
            finite.
        squares: [n] fp64, sum of squares of each gradient (with the loss scale), which shows which one is not finite.
    """

    norm: Tensor
    scale: Tensor
    squares: Tensor


def _norm_fake(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> Any:
    fp64 = grads[0].new_empty((), dtype=torch.float64)
    return fp64, grads[0].new_empty((), dtype=torch.float32), fp64.new_empty((len(grads),))


_adamw = define(
    "adamw_(Tensor(a!)[] masters, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] params, Tensor? scale, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "bool zero_grad) -> ()",
    fake=lambda *args: None,
    inputs=AdamwInputs._make,
    reference=lambda: reference.adamw.adamw_,
    cpu=lambda: cpu.adamw.adamw_,
    triton=lambda: triton.adamw.adamw_,
)
_grad_norm = define(
    "grad_norm(Tensor[] grads, Tensor? loss_scale, float? max_norm) -> (Tensor, Tensor, Tensor)",
    fake=_norm_fake,
    reference=lambda: reference.adamw.grad_norm,
    cpu=lambda: cpu.adamw.grad_norm,
    triton=lambda: triton.adamw.grad_norm,
)


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],  # fp32, bf16 or fp16
    grads: Sequence[Tensor],  # fp32, bf16 or fp16
    exp_avgs: Sequence[Tensor],  # fp32
    exp_avg_sqs: Sequence[Tensor],  # fp32
    *,
    lr: float,
    step: int,
    masters: Sequence[Tensor] | None = None,  # fp32
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    scale: Tensor | None = None,  # [] fp32
    zero_grad: bool = False,
) -> None:
    """One AdamW update of many tensors, in place, each byte read and written once.

    In fp32, for each element with gradient `grad`, master weight w and moments m, v:

        g = scale * grad
        m = fma(1 - beta1, g - m, m)                        beta1 <= 1/2: fma(beta1, m - g, g)
        v = fma((1 - beta2) * g, g, beta2 * v)
        u = m / fma(sqrt(v), 1 / sqrt(1 - beta2^step), eps)
        w = w - fma(lr / (1 - beta1^step), u, (lr * weight_decay) * w)
        param = round(w)

    Square root and division are correctly rounded. Scalars (1 - beta1, ...) are computed in fp64 and rounded to fp32
    once. This is `torch.optim.AdamW` with one difference: weight decay is added to the step before the weight is
    updated, so that lr * weight_decay below 2^-24 is not lost.

    Args:
        params: the model's parameters, contiguous. An fp32 parameter is its own master weight.
        grads, exp_avgs, exp_avg_sqs: of the shapes of params, contiguous: gradients (an fp32 `main_grad`, or the
            parameter's `grad`), first and second moments (zeros before step 1).
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        step: number of this update, from 1, for the bias corrections.
        masters: fp32 master weights; masters[i] is params[i] itself if that is fp32. Optional if all parameters are.
        scale: factor of all gradients, a tensor on their device: `grad_norm(...).scale`. If it is not finite, weights
            and moments do not change.
        zero_grad: sets the gradients to 0 in the same pass, also if the update is skipped.

    Raises:
        ValueError: a list, shape, device or number is invalid, or two written tensors share memory; the message names
            list and index. Nothing is written.
        TypeError: a dtype is wrong, an element is not a tensor (a gradient that is None) or has no memory of its own (a
            DTensor), or zero_grad is not True or False.

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.
    """
    calls = checked(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        step=step,
        masters=masters,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
        zero_grad=zero_grad,
    )
    run(calls)


def checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    step: int,
    masters: Sequence[Tensor] | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Tensor | None,
    zero_grad: bool,
) -> list[AdamwInputs]:
    """The calls of the torch op that make up `adamw_`, for `run`. Raises the errors of `adamw_` and writes nothing."""
    _check_lists("adamw_", params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    check(len(params) > 0, lambda: "adamw_: params is empty; pass at least one parameter")
    if masters is None:
        masters = params
    else:
        _check_lists("adamw_", masters=masters)
    check_flag("adamw_", "zero_grad", zero_grad)
    lr = check_number("adamw_", "lr", lr, "finite in float32 and at least 0", 0.0)
    try:
        fits = len(betas) == 2 and all(not isinstance(b, bool) and 0 <= b < 1 for b in betas)
    except TypeError:
        raise TypeError(f"adamw_: betas={betas!r}; expected two numbers in [0, 1)") from None
    check(fits, lambda: f"adamw_: betas={betas} must be two numbers in [0, 1)")
    expected = "finite in float32 and at least 1.4e-45, a parameter without a gradient divides by it"
    eps = check_number("adamw_", "eps", eps, expected)
    weight_decay = check_number("adamw_", "weight_decay", weight_decay, "finite in float32 and at least 0", 0.0)
    check(
        is_int(step) and 1 <= step < 1 << 63,
        lambda: f"adamw_: step={step!r} must be a whole number of at least 1, the first update",
    )
    _check_tensors("adamw_", "params", params[:1])
    device = params[0].device
    dtypes = _check_list("adamw_", "params", params, None, device, DTYPES)
    shapes = [p.shape for p in params]
    dtypes += _check_list("adamw_", "grads", grads, shapes, device, DTYPES)
    _check_list("adamw_", "exp_avgs", exp_avgs, shapes, device, FP32)
    _check_list("adamw_", "exp_avg_sqs", exp_avg_sqs, shapes, device, FP32)
    if masters is not params or set(dtypes[: len(params)]) != {torch.float32}:
        _check_list("adamw_", "masters", masters, shapes, device, FP32)
    _check_scalar("adamw_", "scale", scale, device)
    own = list(map(is_, params, masters))
    if _lies_in_memory(params[0]):
        lists = (params, () if all(own) else masters, exp_avgs, exp_avg_sqs, grads)
        shared = _shared(tuple([_starts(t) for t in lists]), tuple(shapes), tuple(dtypes), bool(zero_grad))
        if shared is not None:
            raise ValueError(
                f"adamw_: {shared[0]} and {shared[1]} share memory; each tensor needs its own, and a parameter that "
                "layers share is passed once"
            )
    beta1, beta2 = map(float, betas)
    calls = []
    for kind in sorted(set(own)):
        chosen = [o == kind for o in own]
        w, g, m, v, p = (list(compress(ts, chosen)) for ts in (masters, grads, exp_avgs, exp_avg_sqs, params))
        p = [] if kind else p  # a parameter that is its own master is written once
        calls.append(AdamwInputs(w, g, m, v, p, scale, lr, beta1, beta2, eps, weight_decay, step, zero_grad))
    return calls


@torch.no_grad()
def run(calls: Sequence[AdamwInputs]) -> None:
    """Runs the calls that `checked` returned."""
    for call in calls:
        if is_stock():
            stock.adamw_(call)
        else:
            _adamw(*call)
        if not torch.compiler.is_compiling():  # makes autograd reject a backward through tensors that have changed
            zeroed = call.grads if call.zero_grad else ()
            written = (*call.masters, *call.exp_avgs, *call.exp_avg_sqs, *call.params, *zeroed)
            torch.autograd.graph.increment_version(written)


@torch.no_grad()
def grad_norm(
    grads: Sequence[Tensor],  # fp32, bf16 or fp16
    *,
    max_norm: float | None = None,
    loss_scale: Tensor | None = None,  # [] fp32
) -> GradNorm:
    """Norm of all gradients, and the factor that clips it to `max_norm`, without waiting for the device.

    Squares are added in fp64, where they are exact and cannot overflow, in an order that depends only on the tensors'
    sizes. scale = min(1, max_norm / norm) / loss_scale, rounded to fp32 once.

    Args:
        grads: the gradients of a whole model, contiguous, in the order of its parameters.
        max_norm: limit of the norm; None disables clipping.
        loss_scale: positive factor of the loss (fp16 training), a tensor on the gradients' device; checked on a CPU.

    Returns:
        GradNorm(norm, scale, squares). If a gradient is infinite or NaN, so is the norm, and scale is NaN.

    Raises:
        ValueError: no gradient, different devices, a gradient that is not contiguous, max_norm not above 0, or a
            loss_scale that is not positive (CPU).
        TypeError: a dtype is wrong, a gradient or loss_scale is not a tensor, or a gradient is a DTensor.
    """
    _check_lists("grad_norm", grads=grads)
    check(len(grads) > 0, lambda: "grad_norm: grads is empty; pass at least one gradient")
    if max_norm is not None:
        expected = "above 0 in float32; None is no limit"
        max_norm = check_number("grad_norm", "max_norm", max_norm, expected, high=math.inf)
    _check_tensors("grad_norm", "grads", grads[:1])
    device = grads[0].device
    _check_list("grad_norm", "grads", grads, None, device, DTYPES)
    _check_scalar("grad_norm", "loss_scale", loss_scale, device)
    if loss_scale is not None and loss_scale.device.type == "cpu" and not torch.compiler.is_compiling():
        check_number("grad_norm", "loss_scale", loss_scale.item(), "positive and finite")
    op = stock.grad_norm if is_stock() else _grad_norm
    return GradNorm(*op(list(grads), loss_scale, max_norm))


def _check_lists(op: str, **lists: Any) -> None:
    for name, found in lists.items():
        if not hasattr(found, "__len__") or isinstance(found, Tensor):
            raise TypeError(f"{op}: {name} is of type {type(found).__name__}; expected a list of tensors")


def _check_tensors(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    if all([isinstance(t, Tensor) for t in tensors]):
        return
    i = next(i for i, t in enumerate(tensors) if not isinstance(t, Tensor))
    advice = ""
    if name == "grads" and tensors[i] is None:
        others = "" if op == "grad_norm" else ", with its moments and master weight,"
        advice = f"; leave a parameter without a gradient{others} out, or pass zeros"
    raise TypeError(f"{op}: {name}[{i}] is {type(tensors[i]).__name__}, expected a tensor{advice}")


def _check_list(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    shapes: Sequence[torch.Size] | None,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> list[torch.dtype]:
    """Dtypes of the tensors; raises unless all are contiguous, on `device`, of `dtypes` and of `shapes` (None: any)."""
    if shapes is not None:
        expected = len(shapes)
        check(len(tensors) == expected, lambda: f"{op}: {name} has {len(tensors)} tensors, params {expected}")
    try:
        found = [t.dtype for t in tensors]
        if (  # comprehensions, because there are hundreds of tensors; the loop below names the first invalid one
            set(found) <= set(dtypes)
            and {type(t) for t in tensors}.issubset(PLAIN)
            and (shapes is None or [t.shape for t in tensors] == shapes)
            and [t.device for t in tensors] == [device] * len(tensors)
            and all([t.is_contiguous() for t in tensors])
        ):
            return found
    except AttributeError:  # not a tensor
        pass
    _check_tensors(op, name, tensors)
    for i, t in enumerate(tensors):
        if is_traceable_wrapper_subclass(t):
            kind = type(t).__name__
            advice = "its local shard, x.to_local()" if kind == "DTensor" else "the tensors that it is made of"
            raise TypeError(f"{op}: {name}[{i}] is a {kind}; pass {advice}")
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    advice = "; pass fp32 master weights as masters" if name == "masters" else ""
    found = [t.dtype for t in tensors]
    for i, (t, shape) in enumerate(zip(tensors, shapes or [t.shape for t in tensors], strict=True)):
        if t.dtype not in dtypes:
            raise TypeError(f"{op}: {name}[{i}] is {t.dtype}, expected {wanted}{advice}")
        if t.layout != torch.strided:
            raise TypeError(f"{op}: {name}[{i}] is {t.layout}; expected a dense tensor, pass x.to_dense()")
        if t.shape != shape:
            raise ValueError(f"{op}: {name}[{i}] is {tuple(t.shape)}, params[{i}] {tuple(shape)}; they must be equal")
        if t.device != device:
            raise ValueError(f"{op}: {name}[{i}] is on {t.device}, others on {device}; move it there")
        if not t.is_contiguous():
            raise ValueError(f"{op}: {name}[{i}] {tuple(t.shape)} is not contiguous; keep it contiguous")
    return found


def _lies_in_memory(x: Tensor) -> bool:
    """Whether tensors like x have addresses, which traced and meta tensors do not."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def _starts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


@lru_cache(maxsize=64)  # every step passes the same tensors, and a lookup takes a fifth of the sort's time
def _shared(
    starts: tuple[tuple[int, ...], ...],  # addresses of the tensors of _LISTS; masters may be empty (the parameters)
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],  # of params, then of grads; the others are fp32
    zero_grad: bool,
) -> tuple[str, str] | None:
    """Names of two tensors that share memory, if the update writes it; None if there are none."""
    sizes, own = [s.numel() for s in shapes], dtypes[: len(shapes)]
    fp32 = [4 * n for n in sizes]
    lengths = [[n * d.itemsize for n, d in zip(sizes, ds, strict=True)] for ds in (own, dtypes[len(shapes) :])]
    ends = [list(map(add, at, n)) for at, n in zip(starts, (lengths[0], fp32, fp32, fp32, lengths[1]), strict=True)]
    if all(map(le, sorted(chain(*ends)), sorted(chain(*starts))[1:])):
        return None
    spans = [
        (start, end, k, i)
        for k, (at, to) in enumerate(zip(starts, ends, strict=True))
        for i, (start, end) in enumerate(zip(at, to, strict=True))
        if start < end
    ]
    spans.sort()
    reach, written_reach = [(0, 0, 0)] * 2  # largest end of the earlier spans, and which span that is
    for start, end, k, i in spans:
        # an fp32 parameter and its master may be two views of the same memory
        if _LISTS[k] == "masters" and own[i] == torch.float32 and start == starts[0][i]:
            continue
        written = zero_grad or _LISTS[k] != "grads"
        before = reach if written else written_reach
        if before[0] > start:
            return f"{_LISTS[before[1]]}[{before[2]}]", f"{_LISTS[k]}[{i}]"
        reach = max(reach, (end, k, i))
        if written:
            written_reach = max(written_reach, (end, k, i))
    return None


def _check_scalar(op: str, name: str, x: Tensor | None, device: torch.device) -> None:
    if x is not None:
        check(
            isinstance(x, Tensor),
            lambda: f"{op}: {name}={x!r} is not a tensor; expected one float32 on {device}, as torch.tensor() makes it",
            TypeError,
        )
        check(
            x.dtype == torch.float32 and x.numel() == 1 and x.device == device,
            lambda: f"{op}: {name} is {tuple(x.shape)} {x.dtype} on {x.device}, expected one float32 on {device}",
        )
