"""rlkernel_verl: verl with a flag, `use_rl_kernel_backend=True`, that makes training log-probabilities equal the
rollout's, bit for bit.

    python -m verl.trainer.main_ppo +actor_rollout_ref.model.use_rl_kernel_backend=True \
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=vllm ...

verl loads the plugin in each of its processes (entry point `verl.plugins`). Without it the flag is an unknown key of
verl's model configuration, so a run that lost the plugin does not start.
"""

import verl  # noqa: F401  # first: its last lines load the plugin, which imports this package again

from rlkernel.contract import MismatchError
from rlkernel_transformers.comparison import ExactnessLostError

__all__ = ["ExactnessLostError", "MismatchError"]
