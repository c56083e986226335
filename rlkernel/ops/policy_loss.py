"""policy_loss: the reinforcement-learning loss of log-probability vectors, its gradients and statistics in one pass.

Contract: orders.py, `policy_loss`. The forward pass computes the gradients; backward scales them in place. On a GPU it
reads no gradient if both factors are 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.kernels.policy_loss import COUNTS, KL_TYPES, LOSS_TYPES, STATS, Outputs, PolicyLossInputs
from rlkernel.ops.autograd import refuse_gradient
from rlkernel.ops.checks import FP32_MAX, check, check_int, check_number, check_optional, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.spans import scored_seqlens
from rlkernel.ops.stock_switch import is_stock


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`.

    Attributes:
        loss: fp32 scalar, differentiable in logp and entropy.
        stats: 0-dim tensors without gradient, see `policy_loss`.
    """

    loss: Tensor
    stats: dict[str, Tensor]


POSITIVE = "positive and finite in float32"
LONGEST = (1 << 31) - 1  # tokens of a completion: cu_seqlens is int32
_CONSTANTS = ("old_logp", "advantages", "ref_logp", "rollout_logp", "normalizer")
_TENSORS = PolicyLossInputs._fields.index("normalizer") + 1  # the tensors come first among the op's arguments


def _fake(*args: Any) -> Outputs:
    x = PolicyLossInputs(*args)
    return (
        x.logp.new_empty(()),
        x.logp.new_empty(x.logp.shape),
        x.logp.new_empty(x.logp.shape if x.has_bonus else (0,)),
        x.logp.new_empty(()),
        x.logp.new_empty((len(STATS),)),
        x.logp.new_empty((len(COUNTS),), dtype=torch.int64),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    _, dlogp, dentropy, scale, stats, counts = output
    ctx.mark_non_differentiable(dlogp, dentropy, scale, stats, counts)
    ctx.set_materialize_grads(False)
    ctx.gradients = dlogp, dentropy, scale  # not saved tensors, because backward changes them
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.rest = inputs[_TENSORS:]


def _backward(ctx: Any, dloss: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    x = PolicyLossInputs(*ctx.saved_tensors, *ctx.rest)
    needs = PolicyLossInputs(*ctx.needs_input_grad)
    grads: dict[str, Tensor | None] = dict.fromkeys(PolicyLossInputs._fields)
    if dloss is not None:
        if ctx.gradients is None:  # a second backward pass: the first returned its gradients and changed them
            _, *again, _, _ = _policy_loss(*x)
            ctx.gradients = tuple(again)
        dlogp, dentropy, scale = ctx.gradients
        ctx.gradients = None
        if type(dlogp) is Tensor:
            _scale(dlogp, dentropy, scale, dloss)
        else:  # traced by torch.compile, which may return the forward's outputs to other users
            dlogp, dentropy = dlogp * scale * dloss, dentropy * scale * dloss
        if needs.logp:
            grads["logp"] = dlogp
        if needs.entropy and x.has_bonus:
            grads["entropy"] = dentropy
    return tuple(grads.values())


_scale = define(
    "policy_loss_scale_(Tensor(a!) dlogp, Tensor(b!) dentropy, Tensor scale, Tensor dloss) -> ()",
    fake=lambda dlogp, dentropy, scale, dloss: None,
    reference=lambda: reference.policy_loss.policy_loss_scale_,
    cpu=lambda: cpu.policy_loss.policy_loss_scale_,
    triton=lambda: triton.policy_loss.policy_loss_scale_,
)
_policy_loss = define(
    "policy_loss(Tensor logp, Tensor old_logp, Tensor advantages, Tensor cu_seqlens, Tensor? mask, Tensor? ref_logp, "
    "Tensor? entropy, Tensor? rollout_logp, Tensor? normalizer, str loss_type, bool sequence_ratio, float clip_low, "
    "float clip_high, float? clip_dual, float kl_coef, str kl_type, float entropy_coef, float? tis_cap, "
    "float? divisor) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
    inputs=PolicyLossInputs._make,
    reference=lambda: reference.policy_loss.policy_loss,
    cpu=lambda: cpu.policy_loss.policy_loss,
    triton=lambda: triton.policy_loss.policy_loss,
)


def policy_loss(
    logp: Tensor,  # [T] fp32
    old_logp: Tensor | None,  # [T] fp32
    advantages: Tensor,  # [B] or [T] fp32
    cu_seqlens: Tensor,  # [B + 1] int32
    *,
    loss_spans: Tensor | None = None,  # [K, 2] int64, on the CPU
    mask: Tensor | None = None,  # [T] bool
    ref_logp: Tensor | None = None,  # [T] fp32
    entropy: Tensor | None = None,  # [T] fp32
    rollout_logp: Tensor | None = None,  # [T] fp32
    loss_type: str = "grpo",
    ratio_level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    entropy_coef: float = 0.0,
    tis_cap: float | None = None,
    max_completion_length: int | None = None,
    normalizer: float | Tensor | None = None,
) -> PolicyLoss:
    """Policy-gradient loss of packed completions, with its gradients and statistics in one pass.

    With the ratio r = exp(logp - old_logp), or at sequence level exp of its mean over the sequence's counted tokens
    (every token of the sequence then receives gradient), the loss of a token is

        grpo, bnpo, dr_grpo, dapo, gspo:   -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        cispo:                             -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logp
        reinforce:                         -A logp

    times min(exp(old_logp - rollout_logp), tis_cap) if `tis_cap` is given, plus kl_coef KL, minus
    entropy_coef entropy. The batch's loss is

        grpo, gspo:           sum over sequences of the mean over counted tokens / B
        bnpo, dapo, cispo:    sum over counted tokens / number of counted tokens
        dr_grpo:              sum over counted tokens / (B max_completion_length)
        reinforce:            sum over counted tokens / B

    B counts every sequence, also those without counted tokens. If no token counts, loss and gradients are 0.

    Args:
        logp: log-probabilities of the completion tokens under the policy; the gradient flows here.
        old_logp: the same under the policy before the update, a constant. None: logp itself (ratio exactly 1).
        advantages: one per sequence [B] or one per token [T], a constant. If T equals B, it is read as [B].
        cu_seqlens: offsets of the sequences, from 0 to T. Prompt tokens are left out or masked.
        loss_spans: the `loss_spans` that were passed to `linear_logprob`. logp and the other vectors then have only the
            N tokens of the spans, while cu_seqlens counts all tokens, including those of prompts and images.
        mask: True where a token counts. Other tokens contribute nothing, even if their values are NaN or -inf.
        ref_logp: log-probabilities under the reference policy, a constant.
        entropy: entropy of the policy at each token, in nats; receives gradient if entropy_coef is not 0.
        rollout_logp: log-probabilities that the rollout engine reported, a constant, for drift statistics and TIS.
        loss_type: see above. "gspo" is "grpo" with ratio_level "sequence".
        ratio_level: "token" or "sequence".
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; inf turns a bound off.
        clip_dual: for A < 0, ratios above clip_dual are replaced by it and have no gradient (dual clip). It must
            exceed 1 + clip_high.
        kl_coef, kl_type: coefficient and form of the KL against ref_logp, with d = logp - ref_logp: "k1" d,
            "k2" d^2 / 2, "k3" exp(-d) - 1 + d. Differentiated as written.
        entropy_coef: coefficient of the entropy bonus, averaged by the rule of the loss type.
        tis_cap: upper bound of the truncated importance weight between old_logp and rollout_logp; no gradient.
        max_completion_length: denominator of "dr_grpo", a whole number of tokens.
        normalizer: replaces the denominator of the batch (B, number of counted tokens, B max_completion_length), so
            that the losses of micro-batches add up to that of the batch. A positive number, or a 0-dim tensor on the
            device of logp (checked only on a CPU, because reading it on CUDA would wait for the device).

    Returns:
        PolicyLoss(loss, stats). stats, over counted tokens, fp32 unless noted: tokens, sequences (int64
        counts), clip_fraction_low, clip_fraction_high, clip_fraction_dual, ratio_mean, ratio_min, ratio_max,
        kl_old_k1, kl_old_k3 (KL of the old policy from this one, token level); with ref_logp kl_ref (of kl_type);
        with entropy entropy; with rollout_logp drift_mean, drift_max of |logp - rollout_logp|; with tis_cap
        tis_mean, tis_fraction. All 0 if no token counts.

    Raises:
        ValueError: a shape, name, range or combination is invalid; the message names the argument.
        TypeError: a vector is not fp32, cu_seqlens not int32, mask not bool, one of them not a tensor, or
            max_completion_length not an integer.
        RuntimeError: a constant (old_logp, advantages, ref_logp, rollout_logp, normalizer) requires a gradient.

    Source:
        PPO arXiv:1707.06347, dual clip 1912.09729, GRPO 2402.03300, RLOO 2402.14740, Dr. GRPO 2503.20783, DAPO
        2503.14476, CISPO 2506.13585, GSPO 2507.18071, KL forms http://joschu.net/blog/kl-approx.html.
    """
    if not (isinstance(logp, Tensor) and isinstance(advantages, Tensor) and isinstance(cu_seqlens, Tensor)):
        raise not_tensor("policy_loss", logp=logp, advantages=advantages, cu_seqlens=cu_seqlens)
    check_optional(
        "policy_loss", old_logp=old_logp, mask=mask, ref_logp=ref_logp, entropy=entropy, rollout_logp=rollout_logp
    )
    if torch.is_grad_enabled():
        refuse_gradient("policy_loss", _CONSTANTS, (old_logp, advantages, ref_logp, rollout_logp, normalizer))
    tokens, batch = logp.shape[0] if logp.dim() == 1 else -1, cu_seqlens.numel() - 1
    _check_choice("loss_type", loss_type, LOSS_TYPES)
    _check_choice("ratio_level", ratio_level, ("token", "sequence"))
    _check_choice("kl_type", kl_type, KL_TYPES)
    check(
        tokens >= 0, lambda: f"policy_loss: logp has {logp.dim()} dimensions, expected [T]; pack the completions first"
    )
    if old_logp is None:
        old_logp = logp.detach()
    vectors = {
        "logp": logp,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "entropy": entropy,
        "rollout_logp": rollout_logp,
    }
    for name, x in (*vectors.items(), ("mask", mask)):
        if x is not None:
            _check_vector(name, x, (tokens,), torch.bool if name == "mask" else torch.float32, logp.device)
    check(
        cu_seqlens.dim() == 1 and batch >= 0,
        lambda: f"policy_loss: cu_seqlens is {tuple(cu_seqlens.shape)}, expected [B + 1]",
    )
    _check_vector("cu_seqlens", cu_seqlens, (batch + 1,), torch.int32, logp.device)
    if loss_spans is not None:
        cu_seqlens = scored_seqlens(loss_spans, cu_seqlens, tokens)
    check(
        # not `in`, which torch.compile evaluates to False if one of them is dynamic
        advantages.dim() == 1 and (advantages.shape[0] == batch or advantages.shape[0] == tokens),
        lambda: f"policy_loss: advantages is {tuple(advantages.shape)}, expected [B]=[{batch}] or [T]=[{tokens}]",
    )
    _check_vector("advantages", advantages, advantages.shape, torch.float32, logp.device)
    clip_low, clip_high, clip_dual, kl_coef, entropy_coef, tis_cap = _checked_options(
        loss_type, clip_low, clip_high, clip_dual, kl_coef, entropy_coef, tis_cap, vectors
    )
    if max_completion_length is not None:
        max_completion_length = _checked_length(max_completion_length)
    if loss_type == "dr_grpo" and normalizer is None:
        if max_completion_length is None:
            raise ValueError("policy_loss: dr_grpo needs max_completion_length or a normalizer; pass one of them")
        normalizer = float(max(1, batch) * max_completion_length)
    tensor, divisor = _denominator(normalizer, logp, mask)
    if entropy is not None and entropy_coef == 0.0:
        entropy = entropy.detach()  # only for statistics, so the log-probability kernel skips its entropy gradient

    inputs = PolicyLossInputs(
        logp,
        old_logp,
        advantages,
        cu_seqlens,
        mask,
        ref_logp,
        entropy,
        rollout_logp,
        tensor,
        loss_type,
        ratio_level == "sequence" or loss_type == "gspo",
        clip_low,
        clip_high,
        clip_dual,
        kl_coef,
        kl_type,
        entropy_coef,
        tis_cap,
        divisor,
    )
    loss, *_, stats, counts = stock.policy_loss(inputs) if is_stock() else _policy_loss(*inputs)
    return PolicyLoss(loss, _named(stats, counts, inputs))


def _named(stats: Tensor, counts: Tensor, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """The statistics by name, without those of absent inputs."""
    value = dict(zip(STATS, stats.unbind(), strict=True))
    count = dict(zip(COUNTS, counts.unbind(), strict=True))
    out = {"tokens": count["tokens"], "sequences": count["sequences"]}
    shared = ["clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"]
    shared += ["ratio_mean", "ratio_min", "ratio_max", "kl_old_k1", "kl_old_k3"]
    out |= {name: value[name] for name in shared}
    if inputs.ref_logp is not None:
        out["kl_ref"] = value["kl_ref"]
    if inputs.entropy is not None:
        out["entropy"] = value["entropy"]
    if inputs.rollout_logp is not None:
        out |= {name: value[name] for name in ("drift_mean", "drift_max")}
    if inputs.tis_cap is not None:
        out |= {name: value[name] for name in ("tis_mean", "tis_fraction")}
    return out


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    check(value in choices, lambda: f"policy_loss: {name}={value!r} is unknown; expected one of {', '.join(choices)}")


def _check_vector(name: str, x: Tensor, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
    check(
        x.dtype == dtype,
        lambda: (
            f"policy_loss: {name} is {x.dtype}, expected {dtype}; pass it as {dtype}"
            + (", a ratio of log-probabilities rounded to fewer bits is noise" if name.endswith("logp") else "")
        ),
        TypeError,
    )
    check(tuple(x.shape) == tuple(shape), lambda: f"policy_loss: {name} is {tuple(x.shape)}, expected {tuple(shape)}")
    check(x.device == device, lambda: f"policy_loss: {name} is on {x.device}, logp on {device}; move one of them")


def _checked_length(value: Any) -> int:
    expected = f"a whole number of tokens from 1 to {LONGEST}, or None"
    length = check_int("policy_loss", "max_completion_length", value, expected, 1, LONGEST)
    # compiled, check_int treats every int as symbolic; dynamo may compile it alone, so both cases check the range
    if torch.compiler.is_compiling() or isinstance(length, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_true  # takes 0.6 s

        fits = guard_or_true(length >= 1) and guard_or_true(length <= LONGEST)
    else:
        fits = 1 <= length <= LONGEST
    check(fits, lambda: f"policy_loss: max_completion_length={value} must be {expected}")
    return length


def _checked_options(
    loss_type: str,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
    kl_coef: float,
    entropy_coef: float,
    tis_cap: float | None,
    vectors: dict[str, Tensor | None],
) -> tuple[float, float, float | None, float, float, float | None]:
    """The options as floats; raises if one is invalid."""
    expected = "at least 0; inf switches it off"
    clip_low = check_number("policy_loss", "clip_low", clip_low, expected, 0.0, math.inf)
    clip_high = check_number("policy_loss", "clip_high", clip_high, expected, 0.0, math.inf)
    off = "0 switches the term off"
    kl_coef = check_number("policy_loss", "kl_coef", kl_coef, f"finite in float32 and at least 0; {off}", 0.0)
    entropy_coef = check_number("policy_loss", "entropy_coef", entropy_coef, f"finite in float32; {off}", -FP32_MAX)
    if clip_dual is not None:
        check(
            loss_type not in ("cispo", "reinforce"),
            lambda: f"policy_loss: {loss_type} has no dual clip; leave clip_dual out",
        )
        expected = f"above 1 + clip_high = {1.0 + clip_high}; None switches it off"
        clip_dual = check_number("policy_loss", "clip_dual", clip_dual, expected, high=math.inf)
        check(
            clip_dual > 1.0 + clip_high,
            lambda: f"policy_loss: clip_dual={clip_dual} must exceed 1 + clip_high = {1.0 + clip_high}",
        )
    check(
        kl_coef == 0.0 or vectors["ref_logp"] is not None,
        lambda: f"policy_loss: kl_coef={kl_coef} needs ref_logp; pass it or set kl_coef=0",
    )
    check(
        entropy_coef == 0.0 or vectors["entropy"] is not None,
        lambda: f"policy_loss: entropy_coef={entropy_coef} needs entropy; pass it or set entropy_coef=0",
    )
    if tis_cap is not None:
        expected = "positive in float32; None leaves it out"
        tis_cap = check_number("policy_loss", "tis_cap", tis_cap, expected, high=math.inf)
        check(
            vectors["rollout_logp"] is not None,
            lambda: f"policy_loss: tis_cap={tis_cap} needs rollout_logp; pass it or leave tis_cap out",
        )
    return clip_low, clip_high, clip_dual, kl_coef, entropy_coef, tis_cap


def _denominator(
    normalizer: float | Tensor | None, logp: Tensor, mask: Tensor | None
) -> tuple[Tensor | None, float | None]:
    """The normalizer as a tensor or as a number, which needs no launch."""
    if normalizer is None:
        return None, None
    if isinstance(normalizer, Tensor):
        check(
            normalizer.numel() == 1,
            lambda: f"policy_loss: normalizer is {tuple(normalizer.shape)}, expected a number or a 0-dim tensor",
        )
        check(
            normalizer.device == logp.device,
            lambda: (
                f"policy_loss: normalizer is on {normalizer.device}, logp on {logp.device}; move it once, outside the "
                "step, or pass a number"
            ),
        )
        if normalizer.device.type == "cpu" and not torch.compiler.is_compiling():
            value = normalizer.item()
            if logp.numel() > 0 if mask is None else bool(mask.any()):  # otherwise it is not used
                check_number("policy_loss", "normalizer", value, POSITIVE)
        return normalizer.detach().reshape(()).to(torch.float32), None
    return None, check_number("policy_loss", "normalizer", normalizer, POSITIVE)
