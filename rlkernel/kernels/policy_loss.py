"""What every implementation of policy_loss shares: names, codes and the check of cu_seqlens.

The codes are those of `csrc/cpu/policy_loss.cpp` and `kernels/triton/policy_loss.py`.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "reinforce")
KL_TYPES = ("k1", "k2", "k3")

CLIPPED, CISPO, REINFORCE = 0, 1, 2
"""How a token's loss is formed: clipped surrogate, stop-gradient weight, plain log-probability."""

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
"""Order of the fp32 statistics: means over the counted tokens, extremes, shares of the counted tokens."""
COUNTS = ("tokens", "sequences", "clip_low", "clip_high", "clip_dual", "tis_clipped")
"""Order of the int64 counts."""

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
    """How a token's loss is formed under a loss type."""
    return {"cispo": CISPO, "reinforce": REINFORCE}.get(loss_type, CLIPPED)


def sequence_mean(loss_type: str) -> bool:
    """Whether a sequence enters the batch sum by its mean (grpo, gspo) or by its sum."""
    return loss_type in ("grpo", "gspo")


def divides_by_tokens(loss_type: str) -> bool:
    """Whether the default denominator is the number of counted tokens; it is the number of sequences otherwise."""
    return loss_type in ("bnpo", "dapo", "cispo")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The borders as a list.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, or does not end at the number of tokens.
    """
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens or any(a > b for a, b in pairwise(borders)):
        raise ValueError(
            f"policy_loss: cu_seqlens must start at 0, never decrease and end at T={tokens}; it is {borders[:8]}"
            f"{'...' if len(borders) > 8 else ''}, ending at {borders[-1]}"
        )
    return borders
