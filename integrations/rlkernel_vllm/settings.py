"""Settings of the plugin, from vLLM's `additional_config` or, where another program builds the engine, the environment.

Nothing here imports torch or vLLM, because every vLLM process loads the plugin, also those that never use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BACKEND = "rlkernel_vllm.attention_cuda.Backend"
hook_error = ""  # why the plugin's hooks do not fit this vLLM
FLAG = "use_rl_kernel_backend"
MODE = "rl_kernel_mode"
ATTENTION = "rl_kernel_attention"
CONTRACT = "rl_kernel_contract"
LEAVES = "tp_leaves"
KEYS = (FLAG, MODE, ATTENTION, CONTRACT, LEAVES)
REFUSAL = "RLKERNEL_VLLM_REFUSAL"  # a file to which a worker writes the message of its UnsupportedError
ENVIRONMENT = {
    FLAG: "RLKERNEL_VLLM",
    MODE: "RLKERNEL_VLLM_MODE",
    ATTENTION: "RLKERNEL_VLLM_ATTENTION",
    LEAVES: "RLKERNEL_VLLM_TP_LEAVES",
}

# Prefixes of the plugin's keys, and of mistyped ones.
_OURS = ("rl_kernel", "use_rl_kernel", "use_rlkernel", "rlkernel_vllm", "tp_lea", "rlkernel_tp")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """Settings of one engine.

    Attributes:
        enabled: whether the engine computes with rlkernel's ops.
        mode: "strict" refuses what cannot be exact; "audit" admits and reports it.
        attention: variant of the attention order, "split" or "fa3".
        contract: contract id that the engine must have (the trainer's); None: not compared.
        tp_leaves: chunks of K in row-parallel layers, as in the trainer; `tensor_parallel_size` must divide it.
    """

    enabled: bool = False
    mode: str = "strict"
    attention: str = "split"
    contract: str | None = None
    tp_leaves: int = 1


def read(vllm_config: Any) -> Settings:
    """Settings of a `VllmConfig`; as `of`."""
    given = getattr(vllm_config, "additional_config", None)
    return of(given if isinstance(given, Mapping) else {})


def of(values: Mapping[str, Any]) -> Settings:
    """Settings of an `additional_config`, whose keys take precedence over the environment.

    Raises:
        ValueError: a value is unknown, or a key with one of our prefixes; the message names the key or the variable.
    """
    unknown = [
        key for key in values if key not in KEYS and (_plain(key).startswith(_OURS) or _plain(key) == "rlkernel")
    ]
    if unknown:
        raise ValueError(f"additional_config has {', '.join(unknown)}; rlkernel's keys are {', '.join(KEYS)}")

    def value(key: str) -> tuple[str, Any]:
        """Where the setting was made, and its value."""
        variable = ENVIRONMENT[key]
        return (key, values[key]) if key in values else (f"environment variable {variable}", os.environ.get(variable))

    enabled = _boolean(*value(FLAG))
    mode = _one_of(*value(MODE), ("strict", "audit"))
    attention = _one_of(*value(ATTENTION), ("split", "fa3"))
    leaves = _one_of(*value(LEAVES), ("1", "2", "4", "8"))
    return Settings(enabled, mode, attention, values.get(CONTRACT), int(leaves))


def _plain(key: Any) -> str:
    """A key in lower case with underscores: command lines use hyphens, environment variables capitals."""
    return str(key).lower().replace("-", "_")


def merged(additional_config: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`additional_config` with the arguments that are not None.

    Raises:
        ValueError: both have a key, with different values.
        TypeError: `additional_config` is not a mapping.
    """
    if additional_config is not None and not isinstance(additional_config, Mapping):
        raise TypeError(f"additional_config is a {type(additional_config).__name__}; expected a dict")
    out = dict(additional_config or {})
    for key, value in arguments.items():
        if value is None:
            continue
        argument = _boolean(key, value) if key == FLAG else value
        if key in out and (_boolean(key, out[key]) if key == FLAG else out[key]) != argument:
            raise ValueError(f"{key} is {value!r} as an argument and {out[key]!r} in additional_config; give it once")
        out[key] = argument
    return out


def write(vllm_config: Any, settings: Settings) -> None:
    """Writes the settings into `additional_config`, which is sent to workers and part of the compile cache's key."""
    given = vllm_config.additional_config
    if isinstance(given, dict):
        mine = {MODE: settings.mode, ATTENTION: settings.attention, LEAVES: settings.tp_leaves}
        given.update({FLAG: settings.enabled, **mine})


def _boolean(where: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = "" if value is None else str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{where} is {value!r}; expected true or false")
    return text in _TRUE


def _one_of(where: str, value: Any, expected: tuple[str, ...]) -> str:
    """The value, or the first of `expected` if it is not set."""
    if not value:
        return expected[0]
    if str(value) not in expected:
        raise ValueError(f"{where} is {value!r}; expected {' or '.join(map(repr, expected))}")
    return str(value)
