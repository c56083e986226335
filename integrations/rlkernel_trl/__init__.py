"""rlkernel_trl: TRL's trainers with a flag, `use_rl_kernel_backend=True`, that makes training log-probabilities equal
the rollout's, bit for bit.

`from rlkernel_trl import GRPOConfig, GRPOTrainer` (also RLOO, DPO, SFT); `patch()` for scripts that import from trl;
`python -m rlkernel_trl grpo --config x.yaml` for TRL's command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlkernel_trl.errors import ExactnessLostError, MismatchError

if TYPE_CHECKING:
    from rlkernel_trl.config import DPOConfig as DPOConfig
    from rlkernel_trl.config import GRPOConfig as GRPOConfig
    from rlkernel_trl.config import RLOOConfig as RLOOConfig
    from rlkernel_trl.config import SFTConfig as SFTConfig
    from rlkernel_trl.rollout import rollout_func as rollout_func
    from rlkernel_trl.trainer import DPOTrainer as DPOTrainer
    from rlkernel_trl.trainer import GRPOTrainer as GRPOTrainer
    from rlkernel_trl.trainer import RLOOTrainer as RLOOTrainer
    from rlkernel_trl.trainer import SFTTrainer as SFTTrainer

ALGORITHMS = ("GRPO", "RLOO", "DPO", "SFT")
_MODULE_OF = {
    **{f"{name}Config": "config" for name in ALGORITHMS},
    **{f"{name}Trainer": "trainer" for name in ALGORITHMS},
    "rollout_func": "rollout",
}

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "ExactnessLostError",
    "GRPOConfig",
    "GRPOTrainer",
    "MismatchError",
    "RLOOConfig",
    "RLOOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "patch",
    "rollout_func",
    "unpatch",
]

_stock: dict[tuple[str, str], Any] = {}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def patch() -> None:
    """Replaces TRL's trainers and configurations by those of this package; the flag stays off by default.

    Call it before a script imports the names from `trl`, `trl.trainer` or the modules that define them. Safe to call
    again.
    """
    ours = {
        algorithm + kind: __getattr__(algorithm + kind) for algorithm in ALGORITHMS for kind in ("Config", "Trainer")
    }
    for name, value in ours.items():
        for place in _places(name):
            if (place, name) not in _stock:
                _stock[place, name] = getattr(import_module(place), name)
                setattr(import_module(place), name, value)


def unpatch() -> None:
    """Restores TRL's own classes."""
    while _stock:
        (place, name), value = _stock.popitem()
        setattr(import_module(place), name, value)


def _places(name: str) -> tuple[str, ...]:
    """Modules of trl that a script may import a class from."""
    kind = "Config" if name.endswith("Config") else "Trainer"
    return "trl", "trl.trainer", f"trl.trainer.{name.removesuffix(kind).lower()}_{kind.lower()}"
