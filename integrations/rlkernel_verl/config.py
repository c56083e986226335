"""verl's model configuration with the flag. A configuration that has it installs the package's classes in its process.

It travels to the trainer's workers and to vLLM's server, so both sides read the same settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config.model import HFModelConfig


@dataclass
class ModelConfig(HFModelConfig):
    """`HFModelConfig` with the settings of `rlkernel_verl`.

    Attributes:
        use_rl_kernel_backend: compute the training forward, the update and vLLM's rollout with rlkernel's ops.
        rl_kernel_strict: raise if a setting loses exactness, or if a sampled token's log-probability or a weight
            differs between rollout and trainer; False logs it and continues.
        rl_kernel_leaves: leaves of the tree in which gradients are added, a power of two, part of the run's identity:
            weights are the same on every number of ranks that divides it.
        rl_kernel_tp_leaves: chunks of row-parallel layers; with vLLM on R tensor-parallel ranks a multiple of R.
        rl_kernel_attention: variant of the attention order, "split" or "fa3".
    """

    use_rl_kernel_backend: bool = False
    rl_kernel_strict: bool = True
    rl_kernel_leaves: int = 8
    rl_kernel_tp_leaves: int = 1
    rl_kernel_attention: str = "split"

    def __post_init__(self) -> None:
        super().__post_init__()
        _install(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a configuration that Ray sends to another process."""
        self.__dict__.update(state)
        _install(self)


def _install(config: ModelConfig) -> None:
    if config.use_rl_kernel_backend:
        from rlkernel_verl.hooks import install

        install()
