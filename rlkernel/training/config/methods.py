"""Published methods as settings: `rlkernel train grpo method=NAME` starts from them, and the user's settings win.

The formulas are in docs/guides/losses.md, the sources of the numbers in docs/guides/grpo.md.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[Any, dict[str, Any]] = {
    "grpo": {"loss.type": "grpo", "loss.kl_coef": 0.04, "loss.kl_type": "k3"},
    "bnpo": {"loss.type": "bnpo"},
    "dr_grpo": {"loss.type": "dr_grpo", "advantages.normalize_std": False},
    "dapo": {
        "loss.type": "dapo",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "rollout.overlong_buffer": 0.2,
        "rollout.overlong_penalty": 1.0,
    },
    "cispo": {"loss.type": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    "gspo": {"loss.type": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    "rloo": {"loss.type": "reinforce", "advantages.mode": "leave_one_out", "kl.coef": 0.05},
    "reinforce++": {"loss.type": "bnpo", "advantages.mode": "returns", "kl.coef": 0.01},
}
"""Settings of each method that differ from the library's defaults, or that define it."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        "rollout.prompts": 128,
        "rollout.group_size": 1,
        "loss.type": "bnpo",
        "kl.coef": 0.05,
        "train.epochs": 4,
    },
}
"""Defaults of an algorithm that differ from those in `sections.py`."""
