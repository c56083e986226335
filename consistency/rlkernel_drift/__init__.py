"""rlkernel-drift compares rollout and training log-probabilities: whether they drift, where, why, and at what cost.

Reads capsules (`rlkernel.trace/1`), run folders and metrics files without importing an engine. See docs/drift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkernel_drift.capsule import Capsule as Capsule
    from rlkernel_drift.capsule import read_capsule as read_capsule
    from rlkernel_drift.capsule import write_capsule as write_capsule
    from rlkernel_drift.compare import compare as compare

__version__ = "0.1.0"

_HOMES = {
    "Capsule": "rlkernel_drift.capsule",
    "read_capsule": "rlkernel_drift.capsule",
    "write_capsule": "rlkernel_drift.capsule",
    "compare": "rlkernel_drift.compare",
}
__all__ = ["Capsule", "compare", "read_capsule", "write_capsule"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `rlkernel-drift --help` imports neither numpy nor pydantic.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
