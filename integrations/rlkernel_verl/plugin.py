"""What the entry point `verl.plugins` imports, in every process of verl. Without the flag it changes no computation.

verl logs an error here at DEBUG and continues; its model configuration then has no field for the flag and refuses it.
"""

from __future__ import annotations

import functools
from typing import Any

import verl.utils.config
import verl.workers.config

from rlkernel_verl.config import ModelConfig


def _add_flag() -> None:
    """verl's configurations name the class by its module, and its modules are imported after the plugin."""
    for module in (verl.workers.config, verl.workers.config.model):
        module.HFModelConfig = ModelConfig


def _check_runs() -> None:
    """`validate_config`, which the trainer's entry point calls, is where the whole configuration can be seen."""
    stock = verl.utils.config.validate_config

    @functools.wraps(stock)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        if config.actor_rollout_ref.model.get("use_rl_kernel_backend", False):
            from rlkernel_verl.checks import check_run

            check_run(config)
        stock(config, *args, **kwargs)

    verl.utils.config.validate_config = validate_config


_add_flag()
_check_runs()
