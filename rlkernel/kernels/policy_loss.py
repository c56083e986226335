"""Shared by every implementation of policy_loss: its inputs, names and codes.

`csrc/cpu/policy_loss.cpp` and `kernels/triton/policy_loss_tokens.py` use the same codes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "reinforce")
KL_TYPES = ("k1", "k2", "k3")

CLIPPED, CISPO, REINFORCE = 0, 1, 2
"""Form of a token's loss: clipped surrogate, stop-gradient weight, plain log-probability."""

STATS = (
    "ratio_mean",
    "kl_old_k1",
    "kl_old_k3",
    "kl_ref",
    "entropy",
    "tis_mean",
    "drift_mean",
    "ratio_min",
    "ratio_max",
    "drift_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "clip_fraction_dual",
    "tis_fraction",
)
"""Order of the fp32 statistics: means over the counted tokens, extremes, fractions of the counted tokens."""
COUNTS = ("tokens", "sequences", "clip_low", "clip_high", "clip_dual", "tis_clipped")
"""Order of the int64 counts."""

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""loss [], dlogp [T], dentropy [T] or [0], scale [], statistics [len(STATS)], counts [len(COUNTS)] int64.

The gradient of the loss is dlogp * scale and dentropy * scale: a GPU knows some denominators only after the last token.
"""


class PolicyLossInputs(NamedTuple):
    """Arguments of the torch op `policy_loss`, checked by `ops.policy_loss`; `None` means that an input is absent."""

    logp: Tensor  # [T] fp32
    old_logp: Tensor  # [T] fp32
    advantages: Tensor  # [B] or [T] fp32; [B] if B = T
    cu_seqlens: Tensor  # [B + 1] int32
    mask: Tensor | None  # [T] bool
    ref_logp: Tensor | None  # [T] fp32
    entropy: Tensor | None  # [T] fp32
    rollout_logp: Tensor | None  # [T] fp32
    normalizer: Tensor | None  # [] fp32, the denominator of the batch's sum
    loss_type: str
    sequence_ratio: bool  # whether the ratio is that of the sequence
    clip_low: float
    clip_high: float
    clip_dual: float | None
    kl_coef: float
    kl_type: str
    entropy_coef: float
    tis_cap: float | None
    divisor: float | None  # the denominator as a number

    @property
    def has_kl(self) -> bool:
        """Whether the KL against ref_logp is part of the loss."""
        return self.ref_logp is not None and self.kl_coef != 0.0

    @property
    def has_bonus(self) -> bool:
        """Whether the entropy is part of the loss."""
        return self.entropy is not None and self.entropy_coef != 0.0


# phi(x) = e^x - 1 - x = x^2 * poly(x) on |x| <= 1/2: 1 / (k + 2)!, highest power first; truncated below 5e-8 relative.
PHI_COEFFICIENTS = (
    2.7557319e-6,
    2.4801587e-5,
    1.9841270e-4,
    1.3888889e-3,
    8.3333333e-3,
    4.1666667e-2,
    1.6666667e-1,
    0.5,
)


def form_code(loss_type: str) -> int:
    """Form of a token's loss under a loss type."""
    return {"cispo": CISPO, "reinforce": REINFORCE}.get(loss_type, CLIPPED)


def sequence_mean(loss_type: str) -> bool:
    """Whether the batch adds the means of its sequences (grpo, gspo) instead of their sums."""
    return loss_type in ("grpo", "gspo")


def divides_by_tokens(loss_type: str) -> bool:
    """Whether the default denominator is the number of counted tokens instead of the number of sequences."""
    return loss_type in ("bnpo", "dapo", "cispo")
