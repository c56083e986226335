"""What an engine was asked for: read from vLLM's `additional_config`, or from the environment where a host builds it.

Nothing here imports torch or vLLM: the plugin is loaded by every vLLM process, also by those that never use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLAG = "use_rl_kernel_backend"
MODE = "rl_kernel_mode"
ATTENTION = "rl_kernel_attention"
CONTRACT = "rl_kernel_contract"
ENVIRONMENT = {FLAG: "RLKERNEL_VLLM", MODE: "RLKERNEL_VLLM_MODE", ATTENTION: "RLKERNEL_VLLM_ATTENTION"}

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """Settings of one engine.

    Attributes:
        enabled: whether the engine computes with rlkernel's ops.
        mode: "strict" refuses what cannot be exact; "audit" lets it through, and the report says so.
        attention: variant of the attention order, "split" or "fa3".
        contract: contract id that the engine must have (the trainer's); None: not compared.
    """

    enabled: bool = False
    mode: str = "strict"
    attention: str = "split"
    contract: str | None = None


def read(vllm_config: Any) -> Settings:
    """Settings of a `VllmConfig`; keys of `additional_config` win over the environment.

    Raises:
        ValueError: a value is not one of those expected; the message names the key.
    """
    given = getattr(vllm_config, "additional_config", None)
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else {}

    def value(key: str) -> Any:
        return values[key] if key in values else os.environ.get(ENVIRONMENT.get(key, ""))

    enabled = _boolean(FLAG, value(FLAG))
    mode, attention = value(MODE) or "strict", value(ATTENTION) or "split"
    if mode not in ("strict", "audit"):
        raise ValueError(f"{MODE} is {mode!r}; expected 'strict' or 'audit'")
    if attention not in ("split", "fa3"):
        raise ValueError(f"{ATTENTION} is {attention!r}; expected 'split' or 'fa3'")
    return Settings(enabled, mode, attention, values.get(CONTRACT))


def write(vllm_config: Any, settings: Settings) -> None:
    """Puts the settings into `additional_config`, which travels to workers and counts in the compile cache's key."""
    given = vllm_config.additional_config
    if isinstance(given, dict):
        given.update({FLAG: settings.enabled, MODE: settings.mode, ATTENTION: settings.attention})


def _boolean(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = "" if value is None else str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{key} is {value!r}; expected true or false")
    return text in _TRUE
