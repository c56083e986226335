"""Registers this package's engine, vLLM replica and weight delivery with verl, in the registries that verl offers.

Each of them is verl's own class unless the configuration that it is built for has the flag.
"""

from __future__ import annotations

from typing import Any

_installed = False


def install() -> None:
    """Registers, once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    _register_engines()
    _register_rollout()


def _register_engines() -> None:
    from verl.workers.engine import EngineRegistry

    from rlkernel_verl.critic import ExactCritic
    from rlkernel_verl.engine import ExactEngine

    # verl registers its own for a device alone, and looks for one of the device's vendor first.
    for model_type, engine in (("language_model", ExactEngine), ("value_model", ExactCritic)):
        EngineRegistry.register(model_type=model_type, backend="fsdp2", device="cuda", vendor="nvidia")(engine)


def _register_rollout() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY[("vllm", "async")] = "rlkernel_verl.rollout.ServerAdapter"
    RolloutReplicaRegistry.register("vllm", _replica)


def _replica() -> Any:
    from rlkernel_verl.rollout import Replica

    return Replica
