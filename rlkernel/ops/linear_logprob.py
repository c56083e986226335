"""linear_logprob: log-probabilities from hidden states and the head's weight; no [T, V] tensor in either direction.

Contract: orders.py, `linear` for the logits and `logprob` for the rest, so the bits are those of
`logprob(linear(hidden, weight, out_dtype=float32), ...)`. The backward computes the logits a second time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkernel.kernels import stock
from rlkernel.ops._library import check, define, is_stock, weight_grad
from rlkernel.ops.kept import check_kept
from rlkernel.ops.logprob import LogProb, check_targets, fake_rows, inverse_temperature


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, entropy, lse, stats = output
    ctx.set_materialize_grads(False)  # a loss that uses logp alone gives no gradient for entropy
    ctx.mark_non_differentiable(lse, stats)
    ctx.save_for_backward(*inputs, stats, entropy)
    ctx.weight = inputs[1]


def _backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dlogp is None and dentropy is None:
        return None, None, None, None, None
    hidden, weight, *rest = ctx.saved_tensors
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    dhidden: list[Tensor] = []

    def accumulate(grad: Tensor | None) -> None:
        dhidden.append(_grad(grad, hidden, weight, *rest, dlogp, dentropy, needs_input))

    dweight = None
    if needs_weight:
        dweight = weight_grad(ctx.weight, accumulate)
    else:
        accumulate(None)
    return dhidden[0] if needs_input else None, dweight, None, None, None


_grad = define(
    "linear_logprob_grad_(Tensor(a!)? grad, Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, "
    "Tensor? kept, Tensor stats, Tensor entropy, Tensor? dlogp, Tensor? dentropy, bool needs_input) -> Tensor",
    "linear_logprob",
    fake=lambda grad, hidden, *rest: hidden.new_empty((hidden.shape[0] if rest[-1] else 0, hidden.shape[1])),
)
_linear_logprob = define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, Tensor? kept) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "linear_logprob",
    fake=lambda hidden, *_: fake_rows(hidden),
    setup_context=_setup,
    backward=_backward,
)


def linear_logprob(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [T] int64
    *,
    temperature: float | Tensor = 1.0,  # or [T] fp32
    kept: Tensor | None = None,  # [T, ceil(V/32)] int32
) -> LogProb:  # logp, entropy, lse: [T] fp32
    """`logprob(linear(hidden, weight, out_dtype=torch.float32), targets, ...)` to the bit, in bounded memory.

    The gradient of the logits is rounded to the weight's dtype, as `linear` does, and its tokens with no upstream
    gradient (or with a dropped target) are left out: a prompt costs nothing in the backward.

    Args:
        hidden: [T, C], fp32, bf16 or fp16.
        weight: [V, C], dtype of hidden. Its fp32 `main_grad`, where set, receives the weight gradient.
        targets, temperature, kept: as in `logprob`.

    Raises:
        ValueError: shapes, dtypes or temperatures do not fit, or V is 0; the message names the argument.
        IndexError: a target outside the vocabulary (CPU).
    """
    check(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        lambda: f"linear_logprob: hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}; need [T, C], [V, C]",
    )
    check(
        hidden.dtype == weight.dtype,
        lambda: f"linear_logprob: hidden is {hidden.dtype}, weight {weight.dtype}; cast one of them",
    )
    t, v = hidden.shape[0], weight.shape[0]
    check(v > 0, lambda: "linear_logprob: weight has a vocabulary of 0 entries; expected V >= 1")
    check_targets("linear_logprob", targets, t)
    check_kept("linear_logprob", kept, t, v)
    inverse = inverse_temperature("linear_logprob", temperature, hidden)
    if is_stock():
        return LogProb(*stock.linear_logprob(hidden, weight, targets, inverse, kept))
    return LogProb(*_linear_logprob(hidden, weight, targets, inverse, kept)[:3])
