"""TRL's trainers with the flag. Off, every method is TRL's own; on, the log-probability op is ours and is compared.

The losses are not touched: they get their log-probabilities from `model(..., fused_lm_head=True)`, which `forward`
replaces, and all of TRL's loss types keep working.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import trl
from torch import Tensor

from rlkernel_trl.backend import Backend
from rlkernel_trl.optimizer import STANDARD, MasterAdamW


class _Flagged:
    """Constructor, optimizer and gradient norm; common to all trainers."""

    _rl_kernel: Backend | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base = next(c for c in type(self).__mro__ if c.__module__.startswith("trl."))
        given = inspect.signature(base.__init__).bind(self, *args, **kwargs).arguments  # type: ignore[misc]
        settings = given.get("args")
        if not getattr(settings, "use_rl_kernel_backend", False):
            super().__init__(*args, **kwargs)
            return
        self._rl_kernel = Backend(settings, given)
        with self._rl_kernel.construction(base):
            super().__init__(*args, **kwargs)
        self._rl_kernel.attach(self)

    def create_optimizer(self, model: Any = None) -> Any:
        trainer: Any = self
        if self._rl_kernel is None or trainer.optimizer is not None or trainer.args.optim not in STANDARD:
            return super().create_optimizer(model)  # type: ignore[misc]
        trainer.optimizer = self._rl_kernel.optimizer(trainer, trainer.model if model is None else model)
        return trainer.optimizer

    def _master_adamw(self) -> MasterAdamW | None:
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        return inner if isinstance(inner, MasterAdamW) else None

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer = self._master_adamw()
        if optimizer is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return optimizer.clip(self.args.max_grad_norm)  # type: ignore[attr-defined]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        optimizer = self._master_adamw()
        if optimizer is not None and grad_norm is None:
            grad_norm = optimizer.clip(None)
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]


class _Sampling(_Flagged):
    """Trainers that sample: GRPO and RLOO."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        backend = self._rl_kernel
        if backend is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        trainer: Any = self
        backend.begin(trainer, self._computes_old())
        try:
            output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            backend.end()
        ids = output["completion_ids"]
        if backend.sampled is None:
            backend.take(ids.shape[1], ids.device)
        if backend.sampled is not None:
            output["rl_kernel_sampled"] = backend.sampled
        output["rl_kernel_row"] = torch.arange(ids.shape[0], device=ids.device)
        if backend.skipped:
            # TRL has compared the rollout with itself; the training forward's comparison takes the place of that.
            mode = "train" if trainer.model.training else "eval"
            for name in ("mean", "max"):
                values = trainer._metrics[mode].get(f"sampling/sampling_logp_difference/{name}")
                if values:
                    values.pop()
        return output

    def _generate(self, prompts: Any) -> Any:
        result = super()._generate(prompts)  # type: ignore[misc]
        if self._rl_kernel is not None and len(result) > 4:  # GRPO's, with masks of tool results
            self._rl_kernel.captured, self._rl_kernel.tools = result[4], result[2]
        return result

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        backend = self._rl_kernel
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if backend is None:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        trainer: Any = self
        policy = backend.calls[0]
        ids, mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        old = backend.expects_old
        backend.expects_old = False
        if backend.generating and backend.sampled is None:
            backend.take(logits_to_keep, input_ids.device)
        if old and backend.may_skip and backend.sampled is not None and self._sets_known():
            backend.skipped = True
            return backend.sampled, None, None
        if backend.filters.active:
            call = policy if model is not getattr(trainer, "ref_model", None) else backend.calls[1]
            self._choose_sets(call, policy, (input_ids, attention_mask, logits_to_keep, args, kwargs))
        result = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        for call in backend.calls:
            call.kept = call.rebuild = None
        if policy.made:
            if backend.generating:
                backend.kept = policy.made
            policy.made = []
        if old and backend.sampled is not None:
            if backend.tool_mask is not None:
                mask = mask * backend.tool_mask
            backend.compare(backend.sampled, result[0], mask, ids)
        inputs = backend.inputs
        if inputs is not None and "rl_kernel_sampled" in inputs and self._on_policy():
            if "tool_mask" in inputs:
                mask = mask * inputs["tool_mask"]
            backend.compare(inputs["rl_kernel_sampled"], result[0], mask, ids)
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        backend = self._rl_kernel
        if backend is None:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        backend.inputs = inputs
        try:
            loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            backend.inputs = None
        if not self.model.training:  # type: ignore[attr-defined]
            backend.close(self, "eval")
        return loss

    def _computes_old(self) -> bool:
        """Whether TRL's first forward in a generation is that for old log-probabilities."""
        return True

    def _on_policy(self) -> bool:
        """Whether the weights are those that sampled the batch at hand."""
        backend: Any = self._rl_kernel
        return not self.model.training or self.state.global_step == backend.generated_at  # type: ignore[attr-defined]

    def _sets_known(self) -> bool:
        backend: Any = self._rl_kernel
        return not backend.filters.active or backend.kept is not None

    def _choose_sets(self, call: Any, policy: Any, batch: tuple[Any, ...]) -> None:
        """Tells the next forward which tokens its log-probabilities are over."""
        backend: Any = self._rl_kernel
        if backend.kept is not None:
            rows = range(len(backend.kept))
            if backend.inputs is not None:
                rows = backend.inputs["rl_kernel_row"].tolist()
            call.kept = [backend.kept[i] for i in rows]
        elif call is policy:
            call.rebuild = backend.filters
        else:
            input_ids, attention_mask, width, args, kwargs = batch
            policy.rebuild = backend.filters
            with torch.no_grad():
                super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
                    self.model,  # type: ignore[attr-defined]
                    input_ids,
                    attention_mask,
                    width,
                    *args,
                    **kwargs,
                )
            backend.kept, policy.made = policy.made, []
            call.kept = list(backend.kept)


class GRPOTrainer(_Sampling, trl.GRPOTrainer):
    """`trl.GRPOTrainer`; with `use_rl_kernel_backend` its log-probabilities equal its rollouts', bit for bit."""

    def _computes_old(self) -> bool:
        every = self.args.steps_per_generation * self.num_iterations
        misaligned = self.args.gradient_accumulation_steps % every != 0
        return misaligned or (self.use_vllm and self.vllm_importance_sampling_correction)


class RLOOTrainer(_Sampling, trl.RLOOTrainer):
    """`trl.RLOOTrainer`; with `use_rl_kernel_backend` as `GRPOTrainer`."""


class DPOTrainer(_Flagged, trl.DPOTrainer):
    """`trl.DPOTrainer`; with `use_rl_kernel_backend` its log-probabilities do not depend on the batch."""


class SFTTrainer(_Flagged, trl.SFTTrainer):
    """`trl.SFTTrainer`; with `use_rl_kernel_backend` its log-probabilities do not depend on the batch."""
