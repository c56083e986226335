"""rlkernel_vllm: a plugin that makes vLLM compute with rlkernel's ops, so log-probabilities equal the trainer's bits.

It is inert unless an engine requests it, by `LLM(..., additional_config={"use_rl_kernel_backend": True})`, by
`vllm serve --additional-config`, by `RLKERNEL_VLLM=1`, or by `LLM` below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkernel_vllm.config import UnsupportedError as UnsupportedError
    from rlkernel_vllm.fingerprint import compare as compare
    from rlkernel_vllm.fingerprint import fingerprints as fingerprints
    from rlkernel_vllm.llm import LLM as LLM
    from rlkernel_vllm.report import InactiveError as InactiveError
    from rlkernel_vllm.report import Status as Status
    from rlkernel_vllm.report import assert_active as assert_active
    from rlkernel_vllm.report import status as status

__all__ = [
    "LLM", "InactiveError", "Status", "UnsupportedError", "assert_active", "compare", "fingerprints", "register",
    "status",
]  # fmt: skip

_MODULE_OF = {  # imported on first use, because every process of vLLM loads the plugin
    "LLM": "llm",
    "UnsupportedError": "config",
    "compare": "fingerprint",
    "fingerprints": "fingerprint",
    "InactiveError": "report",
    "Status": "report",
    "assert_active": "report",
    "status": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def register() -> None:
    """Entry point of `vllm.general_plugins`, which vLLM calls in each of its processes. Safe to call again.

    Raises:
        Exception: the environment requests rlkernel, and the plugin's hooks do not fit this vLLM. Without a request
            the plugin logs a warning instead.
    """
    from rlkernel_vllm.plugin import install

    install()
