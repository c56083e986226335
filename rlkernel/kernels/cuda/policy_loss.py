"""Schedules of policy_loss for clipped losses of many tokens on Hopper (policy_loss_sm90.py).

The anchor, kernels/triton/policy_loss.py, also computes every other form.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import product
from typing import NamedTuple

import torch

from rlkernel.contract import orders
from rlkernel.kernels import policy_loss as shared
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, policy_loss_sm90
from rlkernel.kernels.policy_loss import PolicyLossInputs
from rlkernel.kernels.samples import KINDS, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import policy_loss as anchor

LEAST, MOST = 18, 24  # buckets of tokens: up to 2^18, 2^20, ..., 2^24; at most 2^16 tokens have no schedule
SHORTEST, LONGEST = 8, 14  # the same for the average sequence length
RAGGED = (700, 1, 0, 1024, 1500, 37, 5000, 1025, 3, 4, 0, 1023, 130, 2048, 17000)
TIMES = (1, 2)  # repetitions of RAGGED in the first samples, which give more samples than a class has forms
WAYS = ("count", "number", "tensor")  # denominators: counted by the kernel, given as a number, given as a tensor

CLIPS = ((0.2, 0.28), (0.0, 0.1), (0.3, math.inf), (math.inf, 0.0))  # (clip_low, clip_high); the first is timed

# ---- shape classes -------------------------------------------------------------------------------


class PolicyLossShape(NamedTuple):
    """Shape class. A token's gradient depends on T and B only through the denominator."""

    device: int  # index, -1 for the CPU
    plain: bool  # token-level clipped loss, one advantage per sequence, no further vectors or bounds
    masked: bool
    mean: bool  # per-sequence means
    tokens: int  # upper bound, a power of two; 0 if not plain
    length: int  # upper bound of the average sequence length


def _power(x: int, least: int, most: int) -> int:
    """The smallest of 2^least, 2^(least + 2), ..., 2^most that is at least x, or 2^most."""
    bits = (x - 1).bit_length()
    return int(1 << min(max(bits + (bits - least) % 2, least), most))


def shape_of(x: PolicyLossInputs) -> PolicyLossShape:
    tokens, batch = x.logp.shape[0], x.cu_seqlens.shape[0] - 1
    plain = (
        x.ref_logp is x.entropy is x.rollout_logp is x.clip_dual is x.tis_cap is None and not x.sequence_ratio
        and shared.form_code(x.loss_type) == shared.CLIPPED and x.advantages.shape[0] == batch
        and tokens > 1 << (LEAST - 2) and tokens <= policy_loss_sm90.MOST_TOKENS
        and 0 < batch <= policy_loss_sm90.MOST_SEQUENCES
    )  # fmt: skip
    if not plain:
        return PolicyLossShape(x.logp.get_device(), False, False, False, 0, 0)
    length = _power(common.cdiv(tokens, batch), SHORTEST, LONGEST)
    mean = shared.sequence_mean(x.loss_type)
    return PolicyLossShape(x.logp.get_device(), True, x.mask is not None, mean, _power(tokens, LEAST, MOST), length)


def call_key(x: PolicyLossInputs) -> Hashable:
    return (
        x.logp.numel(), x.cu_seqlens.numel(), x.advantages.numel(), x.logp.get_device(), x.mask is None, x.loss_type,
        x.sequence_ratio, x.ref_logp is x.entropy is x.rollout_logp is x.clip_dual is x.tis_cap is None,
    )  # fmt: skip


def rows_of(s: PolicyLossShape) -> list[int]:
    return [*(n * sum(RAGGED) for n in TIMES), s.tokens - 13]


def forms_of(s: PolicyLossShape) -> list[tuple[str, str]]:
    """The loss types of a class with each of `WAYS`."""
    types = [
        x for x in shared.LOSS_TYPES if shared.form_code(x) == shared.CLIPPED and shared.sequence_mean(x) == s.mean
    ]
    types.sort(key=lambda x: x not in ("grpo", "dapo"))  # the most used ones are timed
    return list(product(types, WAYS))


def _form(s: PolicyLossShape, times: int, kind: str) -> tuple[str, str, tuple[float, float]]:
    """The form and the clip bounds of a sample. Each of them occurs in a sample with finite sums."""
    finite = [k for k in KINDS if k != "wide"]
    forms, turn = forms_of(s), 0 if kind == "wide" else finite.index(kind)
    return *forms[(times * len(finite) + turn) % len(forms)], CLIPS[(times + turn) % len(CLIPS)]


def sample(s: PolicyLossShape, tokens: int, kind: str, generator: torch.Generator) -> tuple[PolicyLossInputs]:
    device = generator.device
    times = next((n for n in TIMES if tokens == n * sum(RAGGED)), 0)
    if times:
        sizes = torch.tensor(RAGGED * times)
    else:  # lengths from zero to twice the average
        sizes = torch.rand(common.cdiv(tokens, s.length), device=device, generator=generator).cpu()
    ends = sizes.double().cumsum(0)  # on the host: a GPU cumsum has no deterministic version
    cu_seqlens = torch.cat((ends[:1] * 0, ends * (tokens / ends[-1]))).round().to(device, torch.int32)
    batch = len(sizes)
    apart, logp = (values(kind, 1, tokens, torch.float32, generator)[0] for _ in range(2))
    old_logp = (
        logp - (apart if kind == "wide" else apart.clamp(-60.0, 60.0)) * 0.3
    )  # only "wide" has ratios beyond fp32
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
            mask[odd] = False  # else the sums over the batch are NaN
    loss_type, way, clips = _form(s, times, kind)
    normalizer = torch.full((), 0.37 * tokens, dtype=torch.float32, device=device) if way == "tensor" else None
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, cu_seqlens, mask, None, None, None, normalizer, loss_type, False, *clips, None,
        0.0, "k3", 0.0, None, 0.61 * tokens if way == "number" else None,
    )  # fmt: skip
    return (inputs,)


# ---- schedules -----------------------------------------------------------------------------------


def _hopper(setting: policy_loss_sm90.Setting) -> Schedule[PolicyLossShape]:
    def supports(s: PolicyLossShape) -> bool:
        return s.plain and driver.on_hopper(s.device) and (s.length > orders.SEGMENT or not setting.team)

    def bind(s: PolicyLossShape) -> Run:
        return policy_loss_sm90.launcher(s.device, s.masked, setting)

    name = f"team{setting.warps}" if setting.team else f"{setting.warps}x{setting.stages}"
    return Schedule(f"hopper.{name}", bind, supports)


policy_loss = ScheduledOp(
    Family(
        op="policy_loss", anchor=anchor.policy_loss, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=driver.versions,
        schedules=tuple(map(_hopper, (*policy_loss_sm90.SETTINGS, *policy_loss_sm90.TEAMS))),
    )
)  # fmt: skip
