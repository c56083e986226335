"""policy_loss on CUDA: clipped losses of many tokens by Hopper's own kernel, where it has the Triton kernels' bits.

The anchor is that of kernels/triton/policy_loss.py, which also computes every other form; here are the schedules that
may take its place (cuda/policy_loss_hopper.py) and their certification.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels import policy_loss as shared
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, policy_loss_hopper
from rlkernel.kernels.samples import KINDS, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import policy_loss as anchor

LEAST, MOST = 18, 24  # powers of two of the tokens by which classes differ, every second one; fewer have no schedule
SHORTEST, LONGEST = 8, 14  # the same of a sequence's average
RAGGED = (700, 1, 0, 1024, 1500, 37, 5000, 1025, 3, 4, 0, 1023, 130, 2048, 17000)
TIMES = (1, 2)  # that the ragged sequences are compared: with the class's own, more samples than a class has forms
WAYS = ("count", "number", "tensor")  # by which the sum is divided: an own count, what a caller says

CLIPS = ((0.2, 0.28), (0.0, 0.1), (0.3, math.inf), (math.inf, 0.0))  # clip_low and clip_high; the first are timed

# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of policy_loss. The bits of a token's gradient know neither T nor B beyond the denominator."""

    device: int  # index, -1 for the CPU
    plain: bool  # a clipped loss of tokens, an advantage a sequence, no further vectors or bounds
    masked: bool
    mean: bool  # over a sequence's tokens
    tokens: int  # at most, of the powers of two; 0: fewer than have a schedule
    length: int  # of a sequence on average, at most


def _power(x: int, least: int, most: int) -> int:
    """The power of two, every second one from 2^least to 2^most, that is at least x where one is."""
    bits = (x - 1).bit_length()
    return int(1 << min(max(bits + (bits - least) % 2, least), most))


def shape_of(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, cu_seqlens: Tensor, mask: Tensor | None,
    ref_logp: Tensor | None, entropy: Tensor | None, rollout_logp: Tensor | None, normalizer: Tensor | None,
    loss_type: str, sequence_ratio: bool, clip_low: float, clip_high: float, clip_dual: float | None,
    kl_coef: float, kl_type: str, entropy_coef: float, tis_cap: float | None, divisor: float | None,
) -> Shape:  # fmt: skip
    tokens, batch = logp.shape[0], cu_seqlens.shape[0] - 1
    plain = (
        ref_logp is None and entropy is None and rollout_logp is None and clip_dual is None and tis_cap is None
        and not sequence_ratio and shared.form_code(loss_type) == shared.CLIPPED and advantages.shape[0] == batch
        and tokens > 1 << (LEAST - 2) and tokens <= policy_loss_hopper.MOST_TOKENS
        and 0 < batch <= policy_loss_hopper.MOST_SEQUENCES
    )  # fmt: skip
    if not plain:
        return Shape(logp.get_device(), False, False, False, 0, 0)
    length = _power(common.cdiv(tokens, batch), SHORTEST, LONGEST)
    mean = shared.sequence_mean(loss_type)
    return Shape(logp.get_device(), True, mask is not None, mean, _power(tokens, LEAST, MOST), length)


def call_key(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, cu_seqlens: Tensor, mask: Tensor | None,
    ref_logp: Tensor | None, entropy: Tensor | None, rollout_logp: Tensor | None, normalizer: Tensor | None,
    loss_type: str, sequence_ratio: bool, clip_low: float, clip_high: float, clip_dual: float | None,
    kl_coef: float, kl_type: str, entropy_coef: float, tis_cap: float | None, divisor: float | None,
) -> Hashable:  # fmt: skip
    return (
        logp.numel(), cu_seqlens.numel(), advantages.numel(), logp.get_device(), mask is None, loss_type,
        sequence_ratio, ref_logp is entropy is rollout_logp is clip_dual is tis_cap is None,
    )  # fmt: skip


def rows_of(s: Shape) -> list[int]:
    return [*(n * sum(RAGGED) for n in TIMES), s.tokens - 13]


def forms_of(s: Shape) -> list[tuple[str, str]]:
    """Loss types that a class admits, with each of `WAYS`."""
    types = [
        x for x in shared.LOSS_TYPES if shared.form_code(x) == shared.CLIPPED and shared.sequence_mean(x) == s.mean
    ]
    types.sort(key=lambda x: x not in ("grpo", "dapo"))  # the usual ones are timed
    return list(product(types, WAYS))


def _form(s: Shape, times: int, kind: str) -> tuple[str, str, tuple[float, float]]:
    """The form of a sample, and its bounds. Whatever is drawn, all of both have a sample of finite sums."""
    finite = [k for k in KINDS if k != "wide"]
    forms, turn = forms_of(s), 0 if kind == "wide" else finite.index(kind)
    return *forms[(times * len(finite) + turn) % len(forms)], CLIPS[(times + turn) % len(CLIPS)]


def sample(s: Shape, tokens: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    times = next((n for n in TIMES if tokens == n * sum(RAGGED)), 0)
    if times:
        sizes = torch.tensor(RAGGED * times)
    else:  # between nothing and twice the average
        sizes = torch.rand(common.cdiv(tokens, s.length), device=device, generator=generator).cpu()
    ends = sizes.double().cumsum(0)  # on the host: of a GPU's, torch's deterministic mode has none
    cu_seqlens = torch.cat((ends[:1] * 0, ends * (tokens / ends[-1]))).round().to(device, torch.int32)
    batch = len(sizes)
    apart, logp = (values(kind, 1, tokens, torch.float32, generator)[0] for _ in range(2))
    old_logp = logp - (apart if kind == "wide" else apart.clamp(-60.0, 60.0)) * 0.3  # ratios beyond fp32 are for "wide"
    odd = torch.arange(7, tokens, 4099, device=device)
    if s.masked or kind == "wide":
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            logp[odd[i::4]] = value
        old_logp[odd[2::6]] = float("-inf")
    advantages = torch.randn(batch, dtype=torch.float32, device=device, generator=generator)
    advantages[::5] = 0.0
    mask = None
    if s.masked:
        mask = torch.rand(tokens, device=device, generator=generator) < 0.8
        mask[int(cu_seqlens[batch // 2]) : int(cu_seqlens[batch // 2 + 1])] = False
        if kind != "wide":
            mask[odd] = False  # else the batch's sums are NaN
    loss_type, way, clips = _form(s, times, kind)
    normalizer = torch.full((), 0.37 * tokens, dtype=torch.float32, device=device) if way == "tensor" else None
    return (
        logp, old_logp, advantages, cu_seqlens, mask, None, None, None, normalizer, loss_type, False, *clips, None,
        0.0, "k3", 0.0, None, 0.61 * tokens if way == "number" else None,
    )  # fmt: skip


# ---- schedules -----------------------------------------------------------------------------------


def _hopper(setting: policy_loss_hopper.Setting) -> Schedule[Shape]:
    def supports(s: Shape) -> bool:
        return s.plain and driver.on_hopper(s.device) and (s.length > orders.SEGMENT or not setting.team)

    def bind(s: Shape) -> Run:
        return policy_loss_hopper.launcher(s.device, s.masked, setting)

    name = f"team{setting.warps}" if setting.team else f"{setting.warps}x{setting.stages}"
    return Schedule(f"hopper.{name}", bind, supports)


policy_loss = ScheduledOp(
    Family(
        op="policy_loss", anchor=anchor.policy_loss, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=lambda: {"cuda compiler": driver.compiler()},
        schedules=tuple(map(_hopper, (*policy_loss_hopper.SETTINGS, *policy_loss_hopper.TEAMS))),
    )
)  # fmt: skip
