"""rlkernel: reinforcement learning of language models with rollout and training equal to the last bit.

The engine, the models and the operators are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "contract", "ops"]

_LAZY = {
    "LLM": ("rlkernel.engine", "LLM"),
    "SamplingParams": ("rlkernel.engine", "SamplingParams"),
    "ops": ("rlkernel.ops", None),
    "contract": ("rlkernel.contract", None),
}

if TYPE_CHECKING:
    from rlkernel import contract, ops
    from rlkernel.engine import LLM, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlkernel' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)
