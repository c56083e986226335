"""Settings of a run: their sections, the checks that span sections, and the sources that `resolve` merges."""

from rlkernel.training.config.sections import (
    AdvantageSettings,
    DPOSettings,
    EvalSettings,
    KLSettings,
    LossSettings,
    OptimizerSettings,
    RewardModelSettings,
    RewardSettings,
    RolloutSettings,
    clip_range,
)
from rlkernel.training.config.settings import PREFERENCES, Settings
from rlkernel.training.config.sources import dotted_keys, leaves, located, nearest, resolve, to_yaml

__all__ = [
    "PREFERENCES",
    "AdvantageSettings",
    "DPOSettings",
    "EvalSettings",
    "KLSettings",
    "LossSettings",
    "OptimizerSettings",
    "RewardModelSettings",
    "RewardSettings",
    "RolloutSettings",
    "Settings",
    "clip_range",
    "dotted_keys",
    "leaves",
    "located",
    "nearest",
    "resolve",
    "to_yaml",
]
