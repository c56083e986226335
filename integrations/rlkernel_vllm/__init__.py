"""rlkernel_vllm: vLLM computes a rollout with rlkernel's ops, so its log-probabilities are a trainer's, to the bit.

Installed with rlkernel as a plugin of vLLM, and inert unless an engine asks for it: `LLM(..., additional_config=
{"use_rl_kernel_backend": True})`, the same through `vllm serve --additional-config`, `RLKERNEL_VLLM=1`, or `LLM` below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkernel_vllm.settings import ATTENTION, FLAG, MODE

if TYPE_CHECKING:
    from rlkernel_vllm.fingerprint import compare as compare
    from rlkernel_vllm.fingerprint import fingerprints as fingerprints
    from rlkernel_vllm.report import InactiveError as InactiveError
    from rlkernel_vllm.report import Status as Status
    from rlkernel_vllm.report import assert_active as assert_active
    from rlkernel_vllm.report import status as status

__all__ = ["LLM", "InactiveError", "Status", "assert_active", "compare", "fingerprints", "register", "status"]

_PLACES = {
    "compare": "fingerprint",
    "fingerprints": "fingerprint",
    "InactiveError": "report",
    "Status": "report",
    "assert_active": "report",
    "status": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes. Safe to call again."""
    from rlkernel_vllm.plugin import install

    install()


class LLM:
    """`vllm.LLM` that takes `use_rl_kernel_backend`; what it makes is a plain `vllm.LLM`.

    Args:
        use_rl_kernel_backend: whether the engine computes with rlkernel's ops.
        rl_kernel_mode: "strict": a setting that cannot be exact is an error; "audit": it is reported.
        rl_kernel_attention: variant of the attention order, "split" or "fa3", the same as in the trainer.
        Everything else: as in `vllm.LLM`.

    Raises:
        UnsupportedError: strict mode, and a setting or a part of the model cannot be made exact; all are named.
        InactiveError: vLLM did not load the plugin (see `VLLM_PLUGINS`).
    """

    def __new__(
        cls,
        *args: Any,
        use_rl_kernel_backend: bool = False,
        rl_kernel_mode: str = "strict",
        rl_kernel_attention: str = "split",
        additional_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        import vllm

        if use_rl_kernel_backend:
            asked = {FLAG: True, MODE: rl_kernel_mode, ATTENTION: rl_kernel_attention}
            additional_config = {**(additional_config or {}), **asked}
        if additional_config is not None:
            kwargs["additional_config"] = additional_config
        llm = vllm.LLM(*args, **kwargs)
        if use_rl_kernel_backend:
            from rlkernel_vllm.report import assert_active

            assert_active(llm)
        return llm
