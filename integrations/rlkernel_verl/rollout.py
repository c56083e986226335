"""verl's vLLM rollout with the plugin: the server is started with it, and every delivery of weights is verified."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter as VLLMAdapter

from rlkernel import ops
from rlkernel.contract import MismatchError
from rlkernel_verl import checks
from rlkernel_verl.weights import SyncedWeights
from rlkernel_vllm.settings import ATTENTION, CONTRACT, FLAG, LEAVES, MODE, merged


class Replica(vLLMReplica):
    """verl's vLLM servers; those of a policy with the flag run the plugin."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ):
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        policy = not (is_reward_model or is_teacher_model)
        if policy and model_config.get("use_rl_kernel_backend", False):
            engine = self.config.engine_kwargs.setdefault("vllm", {})
            engine["additional_config"] = merged(engine.get("additional_config"), plugin_settings(model_config))


def plugin_settings(model_config: Any) -> dict[str, Any]:
    """vLLM's `additional_config` for a policy with the flag."""
    attention = model_config.get("rl_kernel_attention", "split")
    return {
        FLAG: True,
        MODE: "strict" if model_config.get("rl_kernel_strict", True) else "audit",
        ATTENTION: attention,
        CONTRACT: ops.attention_contract(attention),
        LEAVES: model_config.get("rl_kernel_tp_leaves", 1),
    }


class ServerAdapter(VLLMAdapter):
    """verl's side of the server in a trainer's worker; it verifies deliveries of a policy with the flag."""

    def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, model_config, *args, **kwargs)
        self.exact = self.model_config.use_rl_kernel_backend
        self.strict = self.model_config.rl_kernel_strict
        if self.exact:
            checks.report_inexact(self.strict, list(checks.of_rollout(self.config)))

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Delivers weights, and compares their fingerprints in the trainer and in vLLM.

        Raises:
            ExactnessLostError: the trainer's engine is not rlkernel's, or vLLM runs without the plugin, in strict mode.
            MismatchError: vLLM holds other weights, in strict mode.
        """
        ours = isinstance(weights, SyncedWeights)
        if self.exact and not ours:
            reason = "the trainer's engine is not rlkernel's; use strategy=fsdp2 on NVIDIA GPUs"
            checks.report_inexact(self.strict, [("actor_rollout_ref.actor.strategy", reason)])
        await super().update_weights(weights, *args, **kwargs)
        if self.exact and ours:
            weights.confirmed = await self._confirm(weights)

    async def _confirm(self, weights: SyncedWeights) -> bool:
        try:
            await self._execute_method("rlkernel_confirm", args=(weights.fingerprints,))
        except Exception as error:  # Ray and vLLM wrap a worker's error in their own
            text = str(error)
            if "rlkernel_confirm" in text and "rlkernel: " not in text:
                reason = "its workers run without rlkernel's plugin; if VLLM_PLUGINS is set, does it name rlkernel?"
                checks.report_inexact(self.strict, [("vLLM", reason)])
                return False
            if "rlkernel: " not in text:
                raise
            found = text[text.index("rlkernel: ") :].splitlines()[0]
            if self.strict:
                raise MismatchError(found) from None
            checks.logger.warning("%s", found)
            return False
        return True
