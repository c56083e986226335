"""Names of our metrics in TRL and verl, so that a dashboard shows the curves of both frameworks in one chart.

Taken from TRL 1.16, with the `train/` and `eval/` that transformers' callbacks add, and from verl's metric_utils.py,
losses.py and sft_trainer.py. A metric without an entry keeps its name, for example where the definitions differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Names = Literal["rlkernel", "trl", "verl"]

_SAME_IN_TRL = (
    "loss", "reward", "reward_std", "entropy", "grad_norm", "accuracy", "margin", "min_reward", "mean_reward",
    "max_reward", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
    "logps/rejected",
)  # fmt: skip
TRL: dict[str, str] = {name: f"train/{name}" for name in _SAME_IN_TRL} | {
    "groups_all_equal": "train/frac_reward_zero_std",
    "length": "train/completions/mean_length",
    "length_max": "train/completions/max_length",
    "truncated": "train/completions/clipped_ratio",
    "kl_ref": "train/kl",
    "clip_fraction_low": "train/clip_ratio/low_mean",
    "clip_fraction_high": "train/clip_ratio/high_mean",
    "drift_mean": "train/sampling/sampling_logp_difference/mean",
    "drift_max": "train/sampling/sampling_logp_difference/max",
    "tis_mean": "train/sampling/importance_sampling_ratio/mean",
    "lr": "train/learning_rate",
    "eval/length": "eval/completions/mean_length",
}
VERL: dict[str, str] = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "length_max": "response_length/max",
    "truncated": "response_length/clip_ratio",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "kl_ref": "actor/kl_loss",
    "kl_old_k1": "actor/ppo_kl",
    "clip_fraction_dual": "actor/pg_clipfrac_lower",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "value_loss": "critic/vf_loss",
    "value_explained": "critic/vf_explained_var",
    "value_grad_norm": "critic/grad_norm",
    "seconds": "timing_s/step",
    "seconds_rollout": "timing_s/gen",
    "seconds_reward": "timing_s/reward",
    "eval/reward": "val-core/heldout/reward/mean@{samples}",
}
VERL_SFT: dict[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "eval/loss": "val/loss",
}
SUMS: dict[str, dict[str, tuple[str, ...]]] = {
    "trl": {"train/clip_ratio/region_mean": ("clip_fraction_low", "clip_fraction_high")},
    "verl": {
        "actor/pg_clipfrac": ("clip_fraction_low", "clip_fraction_high"),
        "timing_s/update_actor": ("seconds_forward", "seconds_backward", "seconds_optimizer"),
    },
}
"""Metrics of the frameworks that are sums of ours; they are logged in addition."""


def renamed(values: Mapping[str, float], names: Names, algorithm: str, samples: int) -> dict[str, float]:
    """The values under the framework's names.

    Args:
        values: by our name; those of an evaluation begin with `eval/`.
        samples: completions per held-out prompt, which is part of a name in verl.
    """
    if names == "rlkernel":
        return dict(values)
    table = TRL if names == "trl" else VERL_SFT if algorithm == "sft" else VERL
    out = {_name(key, names, table).format(samples=samples): value for key, value in values.items()}
    for name, parts in SUMS[names].items():
        if all(part in values for part in parts):
            out[name] = sum(values[part] for part in parts)
    return out


def _name(key: str, names: Names, table: Mapping[str, str]) -> str:
    if key in table or names == "verl":
        return table.get(key, key)
    if key.startswith("reward_"):
        return f"train/rewards/{key.removeprefix('reward_')}/mean"
    if key.startswith("logged/"):
        return f"train/{key.removeprefix('logged/')}"
    return key
