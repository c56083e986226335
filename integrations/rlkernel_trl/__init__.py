"""rlkernel_trl: TRL's trainers with one flag, `use_rl_kernel_backend=True`: training log-probabilities equal those of
the rollout to the last bit.

`from rlkernel_trl import GRPOConfig, GRPOTrainer` (also RLOO, DPO, SFT); `patch()` for scripts that import from trl;
`python -m rlkernel_trl grpo --config x.yaml` for TRL's command line.
"""

from __future__ import annotations

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
_PLACES = {
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

_stock: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def patch() -> None:
    """Makes `trl.GRPOTrainer`, `trl.GRPOConfig` and the others those of this package; the flag stays off by default.

    Call it before a script imports the names from trl. Safe to call again.
    """
    import trl

    for algorithm in ALGORITHMS:
        for kind in ("Config", "Trainer"):
            name = algorithm + kind
            if name not in _stock:
                _stock[name] = getattr(trl, name)
                setattr(trl, name, __getattr__(name))


def unpatch() -> None:
    """Gives trl its own classes back."""
    import trl

    while _stock:
        name, value = _stock.popitem()
        setattr(trl, name, value)
