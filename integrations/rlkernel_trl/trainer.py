"""TRL's trainers with the flag. Off, every method is TRL's own; on, rlkernel computes and compares log-probabilities.

The losses do not change: they get log-probabilities from `model(..., fused_lm_head=True)`, which `forward.py`
replaces, so all of TRL's loss types work.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import trl
from torch import Tensor

from rlkernel_transformers.trainer import ExactUpdates
from rlkernel_trl.backend import Backend


class _Flagged(ExactUpdates):
    """Constructor of all trainers; `ExactUpdates` has their optimizer and the sum of their gradients."""

    _rl_kernel: Backend | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base = next(c for c in type(self).__mro__ if c.__module__.startswith("trl.trainer."))
        signature = inspect.signature(base.__init__)  # type: ignore[misc]
        given = signature.bind(self, *args, **kwargs).arguments
        settings: Any = given.get("args")
        if not getattr(settings, "use_rl_kernel_backend", False):
            super().__init__(*args, **kwargs)
            return
        self._rl_kernel = Backend(settings, given)
        self.gradient_tree = settings.rl_kernel_gradient_tree
        try:
            with self._rl_kernel.construction(base):
                super().__init__(*args, **kwargs)
            self._rl_kernel.attach(self)
        except BaseException:
            self._rl_kernel.undo()
            raise

    def updates_exactly(self) -> bool:
        return self._rl_kernel is not None

    def _rounded_weights(self) -> dict[Tensor, Tensor]:
        return {} if self._rl_kernel is None else self._rl_kernel.masters


class _Sampling(_Flagged):
    """Trainers that sample: GRPO and RLOO."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        backend = self._rl_kernel
        if backend is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        trainer: Any = self
        generation = backend.begin(trainer, self._computes_old(), rows=len(inputs))
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        generation.open = False
        ids = output["completion_ids"]
        generation.take(ids.shape[1], ids.device)
        if generation.sampled is not None:
            output["rl_kernel_sampled"] = generation.sampled
        output["rl_kernel_row"] = torch.arange(ids.shape[0], device=ids.device)
        if generation.skipped:
            # TRL has compared the rollout with itself; the comparison with the training forward replaces that.
            mode = "train" if trainer.model.training else "eval"
            for name in ("mean", "max"):
                values = trainer._metrics[mode].get(f"sampling/sampling_logp_difference/{name}")
                if values:
                    values.pop()
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self
        backend = self._rl_kernel
        if backend is None or not trainer.model.training or not self.sums_in_tree() or trainer._is_vlm:
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        steps = trainer.args.steps_per_generation
        if trainer._step % (steps * trainer.num_iterations) == 0 or trainer._buffered_inputs is None:
            output = self._generate_and_score_completions(generation_batch)
            trainer._buffered_inputs = backend.deal(trainer, output, steps)
        return trainer._buffered_inputs[trainer._step % steps]

    def _sample(self, prompt_ids: Any) -> Any:
        """Completions and log-probabilities by rlkernel's engine; None if another engine computes the rollout."""
        backend = self._rl_kernel
        return None if backend is None or backend.engine is None else backend.engine.sample(prompt_ids, self)

    def _generate(self, prompts: Any) -> Any:
        result = super()._generate(prompts)  # type: ignore[misc]
        if self._rl_kernel is not None and len(result) > 4:  # GRPO's, with tool masks
            generation = self._rl_kernel.generation(self)
            generation.captured, generation.tools = result[4], result[2]
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
        batch = (input_ids, attention_mask, logits_to_keep)
        if backend is None:
            return super()._get_per_token_logps_and_entropies(model, *batch, *args, **kwargs)  # type: ignore[misc]
        generation = backend.generation(self)
        old, generation.expects_old = generation.expects_old, False
        if generation.open:
            generation.take(logits_to_keep, input_ids.device)
        known = not backend.filters.active or generation.kept is not None
        if old and generation.may_skip and generation.sampled is not None and known:
            generation.skipped = True
            return generation.sampled, None, None
        if (
            not known and generation.open and not old
        ):  # TRL scores the reference first, but the policy determines the sets
            with torch.no_grad(), backend.policy(self):
                self._score(self.model, batch, *args, **kwargs)  # type: ignore[attr-defined]
        result = self._score(model, batch, *args, **kwargs)
        tools = generation.tool_mask if backend.inputs is None else backend.inputs.get("tool_mask")
        if tools is not None and backend.filters.active:
            # A tool's tokens may lie outside of the sets, and TRL masks losses by a product, so -inf would become NaN.
            result = (result[0].masked_fill((tools == 0) & result[0].isinf(), 0.0), *result[1:])
        ids, mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        if old and generation.sampled is not None:
            backend.comparison.add(
                generation.sampled,
                result[0],
                mask if generation.tool_mask is None else mask * generation.tool_mask,
                ids,
            )
        inputs = backend.inputs
        # The update's own forward, with the weights that sampled the batch.
        fresh = not self.model.training or self.state.global_step == generation.step  # type: ignore[attr-defined]
        if inputs is not None and "rl_kernel_sampled" in inputs and fresh:
            mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
            backend.comparison.add(inputs["rl_kernel_sampled"], result[0], mask, ids)
        return result

    def _score(self, model: Any, batch: tuple[Tensor, Tensor, int], *args: Any, **kwargs: Any) -> Any:
        """TRL's method; if sampling was filtered, log-probabilities are over the kept sets."""
        backend: Any = self._rl_kernel
        generation, state = backend.generation(self), backend.forward_states[0]
        if backend.filters.active:
            if model is getattr(self, "ref_model", None):
                state = backend.forward_states[1]
            if generation.kept is None:
                state.rebuild = backend.filters
            else:
                rows = (
                    range(len(generation.kept)) if backend.inputs is None else backend.inputs["rl_kernel_row"].tolist()
                )
                state.kept = [generation.kept[i] for i in rows]
        result = super()._get_per_token_logps_and_entropies(model, *batch, *args, **kwargs)  # type: ignore[misc]
        if generation.open and state.rebuilt:
            generation.kept = state.rebuilt
        state.kept, state.rebuild, state.rebuilt = None, None, []
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
            backend.close(self)
        return loss

    def _computes_old(self) -> bool:
        """Whether TRL's first forward of a generation computes old log-probabilities."""
        return True


class GRPOTrainer(_Sampling, trl.GRPOTrainer):
    """`trl.GRPOTrainer`; with `use_rl_kernel_backend` its log-probabilities equal its rollouts', bit for bit."""

    def _computes_old(self) -> bool:
        every = self.args.steps_per_generation * self.num_iterations
        misaligned = self.args.gradient_accumulation_steps % every != 0
        return misaligned or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sampled = self._sample(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs) if sampled is None else sampled


class RLOOTrainer(_Sampling, trl.RLOOTrainer):
    """`trl.RLOOTrainer`; with `use_rl_kernel_backend` as `GRPOTrainer`."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sampled = self._sample(prompt_ids)
        if sampled is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completion_ids, self._rl_kernel.generation(self).captured = sampled  # type: ignore[union-attr]
        return completion_ids


class DPOTrainer(_Flagged, trl.DPOTrainer):
    """`trl.DPOTrainer`; with `use_rl_kernel_backend` its log-probabilities do not depend on the batch."""


class SFTTrainer(_Flagged, trl.SFTTrainer):
    """`trl.SFTTrainer`; with `use_rl_kernel_backend` its log-probabilities do not depend on the batch."""
