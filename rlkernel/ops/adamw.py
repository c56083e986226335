"""adamw_ and grad_norm: AdamW on fp32 master weights in one pass over many tensors, and the norm that clips it.

Contract: orders.py, `adamw`. Both have the same bits on every device. Nothing waits for the device: the clip factor and
the decision to skip a step whose gradient is not finite stay there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress, pairwise
from operator import add, attrgetter, le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import stock
from rlkernel.ops._library import check, check_number, define, is_stock

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)


class GradNorm(NamedTuple):
    """Result of `grad_norm`, on the gradients' device.

    Attributes:
        norm: 0-dim fp64, the norm before clipping, with the loss's scale taken out.
        scale: 0-dim fp32, the factor that clips and takes the loss's scale out; NaN where the norm is not finite.
            `adamw_` takes it as it is.
        squares: [n] fp64, sum of squares of each gradient as given: tells which one is not finite.
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
    "adamw",
    fake=lambda *args: None,
)
_grad_norm = define(
    "grad_norm(Tensor[] grads, Tensor? loss_scale, float? max_norm) -> (Tensor, Tensor, Tensor)",
    "adamw",
    fake=_norm_fake,
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

    Square root and division are rounded correctly. What depends on no element (1 - beta1, ...) is computed in fp64 and
    rounded to fp32 once. This is `torch.optim.AdamW`: decoupled weight decay, which here is added to the step before
    both leave the weight, so that lr * weight_decay below 2^-24 is not lost.

    Args:
        params: the model's parameters, contiguous. An fp32 parameter is its own master weight.
        grads, exp_avgs, exp_avg_sqs: of the shapes of params, contiguous: gradients (an fp32 `main_grad`, or the
            parameter's `grad`), first and second moments (zeros before step 1).
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        step: number of this update, from 1: for the bias corrections.
        masters: fp32 master weights; masters[i] is params[i] itself where that is fp32. May be left out where all are.
        scale: factor of all gradients, a tensor on their device: `grad_norm(...).scale`. Where it is not finite, no
            weight and no moment changes.
        zero_grad: sets the gradients to 0 in the same pass, also where the update is skipped.

    Raises:
        ValueError: lists, shapes, devices or numbers do not fit; the message names list and index.
        TypeError: a dtype does not fit, or what must be a tensor is none (a gradient that is None).

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.
    """
    _check_lists("adamw_", params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    check(len(params) > 0, lambda: "adamw_: params is empty; pass at least one parameter")
    if masters is None:
        masters = params
    else:
        _check_lists("adamw_", masters=masters)
    check_number("adamw_", "lr", lr, "finite in float32 and at least 0", 0.0)
    check(
        len(betas) == 2 and all(0 <= b < 1 for b in betas),
        lambda: f"adamw_: betas={betas} must be two numbers in [0, 1)",
    )
    expected = "finite in float32 and at least 1.4e-45, a parameter without a gradient divides by it"
    check_number("adamw_", "eps", eps, expected)
    check_number("adamw_", "weight_decay", weight_decay, "finite in float32 and at least 0", 0.0)
    check(
        isinstance(step, int) and 1 <= step < 1 << 63,
        lambda: f"adamw_: step={step!r} must be a whole number of at least 1, the first update",
    )
    for name, tensors in (
        ("params", params),
        ("grads", grads),
        ("exp_avgs", exp_avgs),
        ("exp_avg_sqs", exp_avg_sqs),
        ("masters", masters),
    ):
        _check_tensors("adamw_", name, tensors)
    shapes, device = [p.shape for p in params], params[0].device
    for name, tensors, dtypes in (
        ("params", params, DTYPES),
        ("grads", grads, DTYPES),
        ("exp_avgs", exp_avgs, FP32),
        ("exp_avg_sqs", exp_avg_sqs, FP32),
        ("masters", masters, FP32),
    ):
        _check_list("adamw_", name, tensors, None if tensors is params else shapes, device, dtypes)
    _check_scalar("adamw_", "scale", scale, device)
    own = [p is w for p, w in zip(params, masters, strict=True)]
    if not torch.compiler.is_compiling():
        # an fp32 parameter and its master may also be two views of one memory
        foreign = [
            None if p is w or (p.dtype == w.dtype and p.data_ptr() == w.data_ptr()) else w
            for p, w in zip(params, masters, strict=True)
        ]
        written = {"params": params, "masters": foreign, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        _check_apart({**written, "grads": grads} if zero_grad else written)
    op = stock.adamw_ if is_stock() else _adamw
    for kind in sorted(set(own)):
        chosen = [o == kind for o in own]
        w, g, m, v, p = (list(compress(ts, chosen)) for ts in (masters, grads, exp_avgs, exp_avg_sqs, params))
        # A parameter that is its own master is written once.
        op(w, g, m, v, [] if kind else p, scale, lr, betas[0], betas[1], eps, weight_decay, step, zero_grad)
    if not torch.compiler.is_compiling():  # autograd then notices a backward through weights that have changed
        torch.autograd.graph.increment_version([*params, *masters])


@torch.no_grad()
def grad_norm(
    grads: Sequence[Tensor],  # fp32, bf16 or fp16
    *,
    max_norm: float | None = None,
    loss_scale: Tensor | None = None,  # [] fp32
) -> GradNorm:
    """Norm of all gradients together, and the factor that clips it to `max_norm`, without waiting for the device.

    Squares are added in fp64, where they are exact and cannot overflow, in an order that depends on the tensors' sizes
    alone. scale = min(1, max_norm / norm) / loss_scale, rounded to fp32 once.

    Args:
        grads: the gradients of a whole model, contiguous, in the order of its parameters.
        max_norm: limit of the norm; None clips nothing.
        loss_scale: what the loss was multiplied by (fp16 training), a tensor on the gradients' device. Positive; its
            value is looked at on a CPU.

    Returns:
        GradNorm(norm, scale, squares). Where a gradient is infinite or NaN, so is the norm, and scale is NaN.

    Raises:
        ValueError: no gradient, different devices, a gradient that is not contiguous, max_norm not above 0, or a
            loss_scale that is not positive (CPU).
        TypeError: a dtype does not fit, or a gradient or loss_scale is no tensor.
    """
    _check_lists("grad_norm", grads=grads)
    check(len(grads) > 0, lambda: "grad_norm: grads is empty; pass at least one gradient")
    if max_norm is not None:
        check_number("grad_norm", "max_norm", max_norm, "above 0 in float32; None is no limit", most=math.inf)
    _check_tensors("grad_norm", "grads", grads)
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
) -> None:
    """Every tensor contiguous, on the device, of its shape in `shapes` (None: any) and of one of `dtypes`."""
    if shapes is not None:
        expected = len(shapes)
        check(len(tensors) == expected, lambda: f"{op}: {name} has {len(tensors)} tensors, params {expected}")
    if (  # comprehensions, since there are hundreds of tensors: the loop below names the first bad one
        all([t.dtype in dtypes for t in tensors])
        and (shapes is None or [t.shape for t in tensors] == shapes)
        and all([t.device == device for t in tensors])
        and all([t.is_contiguous() for t in tensors])
    ):
        return
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    advice = "; pass fp32 master weights as masters" if name == "masters" else ""
    for i, (t, shape) in enumerate(zip(tensors, shapes or [t.shape for t in tensors], strict=True)):
        if t.dtype not in dtypes:
            raise TypeError(f"{op}: {name}[{i}] is {t.dtype}, expected {wanted}{advice}")
        if t.shape != shape:
            raise ValueError(f"{op}: {name}[{i}] is {tuple(t.shape)}, params[{i}] {tuple(shape)}; they must be equal")
        if t.device != device:
            raise ValueError(f"{op}: {name}[{i}] is on {t.device}, others on {device}; move it there")
        if not t.is_contiguous():
            raise ValueError(f"{op}: {name}[{i}] {tuple(t.shape)} is not contiguous; keep it contiguous")


def _check_apart(written: dict[str, Sequence[Tensor | None]]) -> None:
    """Raises ValueError where two of the tensors share memory: each would be updated from the other's results."""
    tensors = [t for ts in written.values() for t in ts if t is not None]
    starts = list(map(Tensor.data_ptr, tensors))  # maps, since there are thousands: the loop below names the first pair
    ends = sorted(map(add, starts, map(attrgetter("nbytes"), tensors)))
    starts.sort()
    if all(map(le, ends, starts[1:])):
        return
    named = [
        (t.data_ptr(), t.nbytes, f"{n}[{i}]")
        for n, ts in written.items()
        for i, t in enumerate(ts)
        if t is not None and t.numel() > 0
    ]
    named.sort()
    for (at, size, one), (start, _, other) in pairwise(named):
        if at + size > start:
            raise ValueError(
                f"adamw_: {one} and {other} share memory; each tensor needs its own, and a parameter that layers share "
                "is passed once"
            )


def _check_scalar(op: str, name: str, x: Tensor | None, device: torch.device) -> None:
    if x is not None:
        check(
            isinstance(x, Tensor),
            lambda: f"{op}: {name}={x!r} is no tensor; expected one float32 on {device}, as torch.tensor() makes it",
            TypeError,
        )
        check(
            x.dtype == torch.float32 and x.numel() == 1 and x.device == device,
            lambda: f"{op}: {name} is {tuple(x.shape)} {x.dtype} on {x.device}, expected one float32 on {device}",
        )
