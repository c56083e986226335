"""linear_logprob: log-probabilities from hidden states and the head's weight, block by block, never all logits at once.

Contract: orders.py, `linear` and `logprob`; the bits are those of `logprob(linear(hidden, weight, out_dtype=float32),
...)`. The forward is one of three torch ops, which save nothing, some logits or all probabilities for the backward. The
backward of all three is `linear_logprob_grad_`, which recomputes the logits that were not saved. On CUDA forward and
backward continue in kernels/cuda/linear_logprob.py.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels import cpu, cuda, reference, stock, triton
from rlkernel.ops.autograd import gradient_target, has_main_grad, main_grad_lock, outside_graph
from rlkernel.ops.checks import check, check_flag, check_float, check_number, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.kept import check_kept
from rlkernel.ops.logprob import (
    LogProb,
    check_targets,
    check_vocabulary,
    fake_rows,
    inverse_temperature,
    select_rows,
)
from rlkernel.ops.spans import span_rows
from rlkernel.ops.stock_switch import is_stock

KEEP_BYTES = 1136 << 20
"""Default of `keep_bytes`: with 8192 tokens of 4096 channels the backward needs < 1.5 GiB besides its results."""
KEEP_CHANNELS = 768
"""With fewer channels, recomputing a logit is cheaper than writing and reading it."""


def saved_width(tokens: int, channels: int, vocab: int, keep_bytes: float) -> int:
    """Vocabulary entries, in pairs of tiles, whose fp32 logits of all tokens fit into `keep_bytes`; inf: all."""
    pair = 2 * VOCAB_TILE
    if tokens == 0 or channels < KEEP_CHANNELS:
        return 0
    pairs = -(-vocab // pair)
    return pair * (pairs if keep_bytes == math.inf else min(int(keep_bytes) // (4 * pair * tokens), pairs))


def check_rows(op: str, rows: Tensor) -> None:
    """Raises TypeError or ValueError unless `rows` is an index of tokens."""
    if not isinstance(rows, Tensor):
        raise not_tensor(op, rows=rows)
    check(
        rows.dim() == 1 and rows.dtype == torch.int64,
        lambda: f"{op}: rows is {tuple(rows.shape)} {rows.dtype}; expected [N] int64, the tokens to score",
    )


# The ops' argument `dense` says that nearly all tokens have a gradient, as with `rows`. On GPUs it allows schedules of
# the backward that cannot skip the others; it changes no bit.


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, entropy, lse, stats, *saved = output
    ctx.set_materialize_grads(False)  # a loss that uses logp alone gives no gradient for entropy
    ctx.mark_non_differentiable(lse, stats, *saved)
    logits = saved[0] if len(saved) == 1 else None
    probs, tile_max = saved if len(saved) == 2 else (None, None)
    ctx.save_for_backward(*inputs[:5], stats, entropy, probs, tile_max, logits)
    ctx.weight, ctx.dense, ctx.arguments = inputs[1], inputs[-1], len(inputs)


def _backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (ctx.arguments - 2)
    if dlogp is None and dentropy is None:
        return None, None, *nothing
    *saved, stats, entropy, probs, tile_max, logits = ctx.saved_tensors
    needs_input = ctx.needs_input_grad[0]
    needs_weight, main_grad = gradient_target("linear_logprob", ctx, 1, ctx.weight)
    with contextlib.nullcontext() if main_grad is None else main_grad_lock:
        dhidden, dweight = _linear_logprob_grad(
            main_grad, *saved, stats, entropy, dlogp, dentropy, probs, tile_max, logits, ctx.dense, needs_input,
            needs_weight,
        )  # fmt: skip
    return dhidden if needs_input else None, dweight if needs_weight and main_grad is None else None, *nothing


def _fake_grad(grad: Tensor | None, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    needs_input, needs_weight = rest[-2:]
    rows = hidden.shape[0] if needs_input else 0
    entries = weight.shape[0] if needs_weight and grad is None else 0
    return hidden.new_empty((rows, hidden.shape[1])), weight.new_empty((entries, weight.shape[1]))


def _fake_probs(hidden: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    (tokens, _c), vocab = hidden.shape, weight.shape[0]
    tile_max = hidden.new_empty((tokens, -(-vocab // VOCAB_TILE)), dtype=torch.float32)
    return (*fake_rows(hidden), weight.new_empty((tokens, vocab)), tile_max)


def _fake_logits(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    width = rest[-2]
    return (*fake_rows(hidden), hidden.new_empty((hidden.shape[0], width), dtype=torch.float32))


_linear_logprob_grad = define(
    "linear_logprob_grad_(Tensor(a!)? grad, Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, "
    "Tensor? kept, Tensor stats, Tensor entropy, Tensor? dlogp, Tensor? dentropy, Tensor? probs, Tensor? tile_max, "
    "Tensor? logits, bool dense, bool needs_input, bool needs_weight) -> (Tensor, Tensor)",
    fake=_fake_grad,
    reference=lambda: reference.linear_logprob.linear_logprob_grad_,
    cpu=lambda: cpu.linear_logprob.linear_logprob_grad_,
    triton=lambda: triton.linear_logprob.linear_logprob_grad_,
    cuda=lambda: cuda.linear_logprob.linear_logprob_grad_,
)
_linear_logprob = define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, Tensor? kept, "
    "bool dense) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda hidden, *_: fake_rows(hidden),
    setup_context=_setup,
    backward=_backward,
    for_backward=1,
    reference=lambda: reference.linear_logprob.linear_logprob,
    cpu=lambda: cpu.linear_logprob.linear_logprob,
    triton=lambda: triton.linear_logprob.linear_logprob,
    cuda=lambda: cuda.linear_logprob.linear_logprob,
)
_linear_logprob_logits = define(
    "linear_logprob_logits(Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, Tensor? kept, "
    "SymInt width, bool dense) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_logits,
    setup_context=_setup,
    backward=_backward,
    for_backward=1,
    reference=lambda: reference.linear_logprob.linear_logprob_logits,
    cpu=lambda: cpu.linear_logprob.linear_logprob_logits,
    triton=lambda: triton.linear_logprob.linear_logprob_logits,
    cuda=lambda: cuda.linear_logprob.linear_logprob_logits,
)
_linear_logprob_probs = define(
    "linear_logprob_probs(Tensor hidden, Tensor weight, Tensor targets, Tensor? inv_temperature, Tensor? kept, "
    "bool dense) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_probs,
    setup_context=_setup,
    backward=_backward,
    for_backward=1,
    reference=lambda: reference.linear_logprob.linear_logprob_probs,
    cpu=lambda: cpu.linear_logprob.linear_logprob_probs,
    triton=lambda: triton.linear_logprob.linear_logprob_probs,
    cuda=lambda: cuda.linear_logprob.linear_logprob_probs,
)


def linear_logprob(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [N] int64; [T] with loss_spans
    *,
    rows: Tensor | None = None,  # [N] int64, each at most once; None: all T
    loss_spans: Tensor | None = None,  # [K, 2] int64, on the CPU
    temperature: float | Tensor = 1.0,  # or [N] fp32; [T] with loss_spans
    kept: Tensor | None = None,  # [N, ceil(V/32)] int32; [T, ...] with loss_spans
    keep_probs: bool = False,
    keep_bytes: float = KEEP_BYTES,  # an integer or inf
) -> LogProb:  # logp, entropy, lse: [N] fp32
    """`logprob(linear(hidden[rows], weight, out_dtype=torch.float32), targets, ...)` to the bit, block by block.

    The gradient of the logits is rounded to the weight's dtype, as `linear` does. Pass the tokens that the loss uses as
    `rows`: forward and backward then compute nothing for the others, and the backward may use kernels that need every
    token's gradient. Without `rows`, tokens without an upstream gradient (or with a dropped target) still cost a
    forward; the backward skips each of them on a CPU and, in bf16 on Hopper, aligned groups of 16, as in prompts.

    Args:
        hidden: [T, C], fp32, bf16 or fp16.
        weight: [V, C], dtype of hidden. If it has an fp32 `main_grad`, the weight gradient is added to that.
        rows: indices of the tokens to score; the other arguments and the results belong to these. A loss over all
            tokens may pass None. A weight gradient sums over `rows` in the given order.
        loss_spans: begin and end of the tokens to score, ascending, without overlap: the alternative to `rows` for
            packed samples. targets, temperature and kept then have all T tokens, the results the N in the spans.
        targets, temperature, kept: as in `logprob`.
        keep_probs: save the probabilities [T, V], rounded to the weight's dtype, for the backward, which then computes
            no logits: three matrix products instead of four, for 2 T V bytes (fp32: 4 T V). The gradients come from
            rounded probabilities, so their bits differ; those of logp are the same. It has no effect without autograd
            or for an entropy gradient.
        keep_bytes: save the fp32 logits of as many vocabulary entries as fit into this many bytes for the backward,
            which recomputes the others; an integer, or inf for all. It changes no bit. It has no effect without
            autograd, with `keep_probs`, on the CPU, or below 768 channels, where recomputing is cheaper.

    Raises:
        ValueError: shapes, dtypes or temperatures do not fit, rows is not [N] int64, V is not in [1, 2^23), or
            keep_bytes is negative or a fraction; the message names the argument.
        TypeError: an argument is not a tensor, hidden has another dtype, or keep_probs is not True or False.
        IndexError: a target outside the vocabulary (CPU).
        RuntimeError: temperature requires a gradient.
    """
    if is_dynamo_compiling() and has_main_grad(weight):
        options = {"temperature": temperature, "kept": kept, "keep_probs": keep_probs, "keep_bytes": keep_bytes}
        options |= {"rows": rows, "loss_spans": loss_spans}
        return outside_graph("linear_logprob", linear_logprob, hidden, weight, targets, **options)
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor) and isinstance(targets, Tensor)):
        raise not_tensor("linear_logprob", hidden=hidden, weight=weight, targets=targets)
    check(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        lambda: f"linear_logprob: hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}; need [T, C], [V, C]",
    )
    check(
        hidden.dtype == weight.dtype,
        lambda: f"linear_logprob: hidden is {hidden.dtype}, weight {weight.dtype}; cast one of them",
    )
    check_float("linear_logprob", "hidden", hidden)
    if loss_spans is not None:
        check(rows is None, lambda: "linear_logprob: rows and loss_spans both say which tokens to score; pass one")
        tokens = hidden.shape[0]
        check_targets("linear_logprob", targets, tokens)
        rows = span_rows("linear_logprob", loss_spans, tokens, hidden.device)
        targets = targets.index_select(0, rows)
        temperature, kept = select_rows("linear_logprob", rows, tokens, temperature, kept)
    if rows is not None:
        check_rows("linear_logprob", rows)
        hidden = hidden.index_select(0, rows)
    dense, t, v = rows is not None, hidden.shape[0], weight.shape[0]
    check_vocabulary("linear_logprob", "weight", v)
    check_targets("linear_logprob", targets, t)
    check_kept("linear_logprob", kept, t, v)
    check_flag("linear_logprob", "keep_probs", keep_probs)
    expected = "an integer of at least 0, or inf, which keeps all"
    check_number("linear_logprob", "keep_bytes", keep_bytes, expected, 0, math.inf)
    check(
        keep_bytes == math.inf or keep_bytes == int(keep_bytes),
        lambda: f"linear_logprob: keep_bytes={keep_bytes} must be {expected}",
    )
    inverse = inverse_temperature("linear_logprob", temperature, hidden)
    if is_stock():
        return LogProb(*stock.linear_logprob(hidden, weight, targets, inverse, kept))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        if keep_probs:
            return LogProb(*_linear_logprob_probs(hidden, weight, targets, inverse, kept, dense)[:3])
        width = saved_width(t, weight.shape[1], v, keep_bytes) if hidden.is_cuda else 0
        if width > 0:
            return LogProb(*_linear_logprob_logits(hidden, weight, targets, inverse, kept, width, dense)[:3])
    return LogProb(*_linear_logprob(hidden, weight, targets, inverse, kept, dense)[:3])


def linear_logprob_top1(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [T] int64
    inv_temperature: Tensor | None,  # [T] fp32, of `inverse_temperature`
    kept: Tensor | None,  # [T, ceil(V/32)] int32
    keep_probs: bool,
) -> tuple[LogProb, Tensor]:  # logp, entropy, lse: [T] fp32; [T] bool
    """`linear_logprob`, and whether each target has the largest logit. The arguments are not checked."""
    if is_stock():
        logits = stock.linear(hidden, weight, None, torch.float32)
        result = LogProb(*stock.logprob(logits, targets, inv_temperature, kept))
        return result, logits.argmax(-1) == targets
    keep_probs = keep_probs and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    op = _linear_logprob_probs if keep_probs else _linear_logprob
    logp, entropy, lse, stats, *_ = op(hidden, weight, targets, inv_temperature, kept, True)
    return LogProb(logp, entropy, lse), logp.detach() == -stats[:, 1]  # logp is (logit - largest) - stats[:, 1]
