"""logprob: selected log-probability, entropy and log-sum-exp of given logits, over vocabulary tiles of fixed size.

Contract: orders.py, `logprob`, and docs/ops/logprob.md. `linear_logprob` returns the same bits without the logits. The
forward saves two numbers per row (maximum, log of the sum), so that the backward repeats no reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import MAX_VOCAB
from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.autograd import no_gradient
from rlkernel.ops.checks import check, check_float, check_number, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.kept import check_kept
from rlkernel.ops.spans import span_rows
from rlkernel.ops.stock_switch import is_stock

MIN_TEMPERATURE, MAX_TEMPERATURE = 2.0**-126, 2.0**126
"""Between these limits a number and its inverse are normal fp32 numbers."""
_TEMPERATURES = f"positive, {MIN_TEMPERATURE:.3g} to {MAX_TEMPERATURE:.3g} (0, greedy, is for sample only)"


class LogProb(NamedTuple):
    """Per token, fp32: natural-log probability of its target, entropy of its distribution, log-sum-exp."""

    logp: Tensor  # [T]
    entropy: Tensor  # [T]
    lse: Tensor  # [T], not differentiable


def inverse_temperature(op: str, temperature: float | Tensor, logits: Tensor) -> Tensor | None:
    """1 / temperature, the kernels' argument: fp32 [T], divided in fp32; None for a temperature of 1.

    `logits` (or hidden states) gives the number of tokens and the device. A tensor's values are checked by the CPU
    kernels; on CUDA a check would wait for the device.

    Raises:
        ValueError: the temperature is not positive, or infinite. RuntimeError: it requires a gradient.
    """
    tokens = logits.shape[0]
    if not isinstance(temperature, Tensor):
        temperature = check_number(op, "temperature", temperature, _TEMPERATURES, MIN_TEMPERATURE, MAX_TEMPERATURE)
        if temperature == 1.0:
            return None
        temperature = torch.full((tokens,), temperature, dtype=torch.float32, device=logits.device)
    check(
        temperature.shape == (tokens,) and temperature.dtype == torch.float32,
        lambda: (
            f"{op}: temperature is {tuple(temperature.shape)} {temperature.dtype}; "
            f"expected a number or [T={tokens}] float32"
        ),
    )
    if temperature.requires_grad and torch.is_grad_enabled():
        raise no_gradient(op, "temperature")
    return torch.ones_like(temperature) / temperature


def check_vocabulary(op: str, name: str, size: int) -> None:
    """Raises ValueError unless `size`, a dimension of the argument `name`, is a supported vocabulary size."""
    check(
        0 < size <= MAX_VOCAB,
        lambda: f"{op}: {name} has a vocabulary of {size} entries; expected 1 <= V <= {MAX_VOCAB}",
    )


def check_targets(op: str, targets: Tensor, tokens: int) -> None:
    """Raises ValueError unless `targets` is int64 [tokens]."""
    check(
        targets.shape == (tokens,) and targets.dtype == torch.int64,
        lambda: f"{op}: targets is {tuple(targets.shape)} {targets.dtype}; expected [T={tokens}] int64",
    )


def check_values(op: str, targets: Tensor, size: int, inverse: Tensor | None) -> None:
    """Raises IndexError for a target outside the vocabulary and ValueError for a temperature that is not positive, on a
    CPU. The kernels check the same; this is for callers that must raise before the kernel runs."""
    reference.logprob.check_values(op, targets, size, inverse)


def fake_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fakes of logp, entropy, lse [T] and stats [T, 2], for `rows` [T, ...]."""
    t = rows.shape[0]
    vector = lambda: rows.new_empty((t,), dtype=torch.float32)
    return vector(), vector(), vector(), rows.new_empty((t, 2), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, entropy, lse, stats = output
    ctx.set_materialize_grads(False)  # a loss that uses logp alone gives no gradient for entropy
    ctx.mark_non_differentiable(lse, stats)
    ctx.save_for_backward(*inputs, stats, entropy)


def _backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dlogp is None and dentropy is None:
        return None, None, None, None
    return logprob_dgrad(*ctx.saved_tensors, dlogp, dentropy), None, None, None


logprob_dgrad = define(
    "logprob_dgrad(Tensor logits, Tensor targets, Tensor? inv_temperature, Tensor? kept, Tensor stats, Tensor entropy, "
    "Tensor? dlogp, Tensor? dentropy) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape),
    reference=lambda: reference.logprob.logprob_dgrad,
    cpu=lambda: cpu.logprob.logprob_dgrad,
    triton=lambda: triton.logprob_backward.logprob_dgrad,
)
logprob_unchecked = define(
    "logprob(Tensor logits, Tensor targets, Tensor? inv_temperature, Tensor? kept) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda logits, *_: fake_rows(logits),
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.logprob.logprob,
    cpu=lambda: cpu.logprob.logprob,
    triton=lambda: triton.logprob.logprob,
)


def logprob(
    logits: Tensor,  # [T, V]
    targets: Tensor,  # [T] int64
    *,
    temperature: float | Tensor = 1.0,  # or [T] fp32
    kept: Tensor | None = None,  # [T, ceil(V/32)] int32
    loss_spans: Tensor | None = None,  # [K, 2] int64, on the CPU
) -> LogProb:  # logp, entropy, lse: [T] fp32, or [N] of loss_spans
    """Log-probability of each row's target, with entropy and log-sum-exp, of `softmax(logits / temperature)`.

    All in fp32 and natural logarithms; a row's result depends on that row alone. logp and entropy are differentiable
    in logits, lse is not.

    Args:
        logits: [T, V], fp32, bf16 or fp16; widened to fp32 first.
        targets: [T] int64 in [0, V). Checked on the CPU; on CUDA a target outside gives undefined values (a check would
            wait for the device).
        temperature: a number or one per row, > 0. The logits are multiplied by 1/T, divided once in fp32.
        kept: bit mask of the tokens that the distribution is over (see `pack_kept`); None keeps all. If the target was
            dropped, logp is -inf and the row has no gradient. If no token is kept, lse is -inf and entropy 0.
        loss_spans: begin and end of the rows to score, ascending, without overlap. The results have the N rows of the
            spans; other rows are not read, and their gradient is 0.

    A row with a kept logit of NaN or +inf is NaN in all three results.

    Raises:
        ValueError: shapes, dtypes or temperatures do not fit, or V is not in [1, 2^23); the message names it.
        TypeError: logits or targets is not a tensor, or logits has another dtype.
        IndexError: a target outside the vocabulary (CPU).
        RuntimeError: temperature requires a gradient.
    """
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        raise not_tensor("logprob", logits=logits, targets=targets)
    check(logits.dim() == 2, lambda: f"logprob: logits is {tuple(logits.shape)}; expected [T, V]")
    t, v = logits.shape
    check_vocabulary("logprob", "logits", v)
    check_targets("logprob", targets, t)
    check_kept("logprob", kept, t, v)
    if loss_spans is not None:
        rows = span_rows("logprob", loss_spans, t, logits.device)
        logits, targets = logits.index_select(0, rows), targets.index_select(0, rows)
        temperature, kept = select_rows("logprob", rows, t, temperature, kept)
    inverse = inverse_temperature("logprob", temperature, logits)
    if is_stock():
        return LogProb(*stock.logprob(logits, targets, inverse, kept))
    check_float("logprob", "logits", logits)
    return LogProb(*logprob_unchecked(logits, targets, inverse, kept)[:3])


def select_rows(
    op: str, rows: Tensor, tokens: int, temperature: float | Tensor, kept: Tensor | None
) -> tuple[float | Tensor, Tensor | None]:
    """Temperature and kept sets of the rows of `loss_spans`."""
    given = {"temperature": temperature, "kept": kept}
    sizes = {name: len(x) for name, x in given.items() if isinstance(x, Tensor) and x.dim()}
    check(
        all(size == tokens for size in sizes.values()),
        lambda: f"{op}: {sizes} rows; with loss_spans temperature and kept belong to all T={tokens} tokens",
    )
    if isinstance(temperature, Tensor) and temperature.dim() == 1:
        temperature = temperature.index_select(0, rows)
    return temperature, None if kept is None else kept.index_select(0, rows)


def logprob_stats(
    logits: Tensor,  # [T, V]
) -> Tensor:  # [T, 2] fp32
    """Maximum M of each row and log of the sum of `exp(z - M)`, as `logprob` computes them.

    `(z - M) - log S` is `logprob(...).logp` of any token z of the row, to the bit. The arguments are not checked.
    """
    any_token = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    stats: Tensor = logprob_unchecked(logits, any_token, None, None)[3]
    return stats
