"""The sampler of vLLM's V2 model runner, used on GPUs.

vLLM computes log-probabilities, and draws, through functions of modules. They are replaced once, by functions that
check whether the caller is a sampler of ours; everything else changes objects of this runner.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from rlkernel.ops.sample import draw as draw_exactly
from rlkernel.ops.sample import filter_logits_
from rlkernel_vllm.sampling import token_log_probabilities

_current: list[Any] = []  # sampling states and prompt workers of ours that are being called


class ExactStates(SamplingStates):
    """Temperature and kept sets of rlkernel. All filters are applied in one step, where vLLM applies min-p."""

    rlkernel_returns_processed = False  # vLLM returns log-probabilities of the logits after temperature and filters
    rlkernel_needs_processed = False  # this step reads those logits, so temperature and filters must change them
    rlkernel_defers_temperature = False  # the sampling kernel applies the temperature
    rlkernel_deferred_filters: tuple[Tensor | None, ...] = (None, None, None)  # top_k, top_p, min_p of that kernel
    rlkernel_draw_arguments: tuple[Tensor, Tensor] | None = None  # temperatures and seeds of the last step's rows

    def add_request(self, slot: int, *args: Any, **kwargs: Any) -> Any:
        changes = super().add_request(slot, *args, **kwargs)
        # From 0.31 on vLLM copies logits that a request changes, which a deferred temperature does not.
        return changes if self.rlkernel_returns_processed else self.rlkernel_has_filters(slot)

    def rlkernel_has_filters(self, slot: int) -> bool:
        return bool(self.top_k.np[slot] != self.vocab_size or self.top_p.np[slot] != 1.0 or self.min_p.np[slot] != 0.0)

    def apply_temperature(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> None:
        return

    def apply_min_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> None:
        temperature = self.temperature.np[idx_mapping_np]
        ready = self.rlkernel_defers_temperature or np.all((temperature == 0.0) | (temperature == 1.0))
        filters = {
            "top_k": np.any(self.top_k.np[idx_mapping_np] != self.vocab_size),
            "top_p": np.any(self.top_p.np[idx_mapping_np] != 1.0),
            "min_p": np.any(self.min_p.np[idx_mapping_np] != 0.0),
        }
        if ready and not any(filters.values()):
            return
        rows = expanded_idx_mapping
        values = {name: getattr(self, name).gpu[rows] if on else None for name, on in filters.items()}
        if values["top_k"] is not None:
            values["top_k"] = torch.where(values["top_k"] < self.vocab_size, values["top_k"], 0)
        if self.rlkernel_defers_temperature and not self.rlkernel_needs_processed:
            self.rlkernel_deferred_filters = tuple(values.values())
            return
        filter_logits_(logits, self.temperature.gpu[rows], **values)
        self.rlkernel_defers_temperature = False

    def get_top_k_top_p(self, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> tuple[None, None]:
        return None, None

    def apply_top_k_top_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> Tensor:
        return logits


class ExactSampler(Sampler):
    """vLLM's sampler with rlkernel's log-probabilities, temperature, kept sets and noise.

    The noise of `ops.sample` is keyed by the request's seed, the position and the token; vLLM's by seed and position.
    Values that depend only on a step's requests are cached while the requests stay the same.
    """

    rlkernel_has_new_requests = True  # a request was added since settings were last copied to the GPU
    rlkernel_last_slots: bytes | None = None  # slots of the last step's requests, to which the next two refer
    rlkernel_only_temperature = False  # nothing except temperatures changes their logits
    rlkernel_has_temperature = True  # a temperature changes their logits
    rlkernel_changes_logits: Any  # [slots] bool: something other than a temperature changes the request's logits

    def add_request(self, slot: int, *args: Any, **kwargs: Any) -> None:
        super().add_request(slot, *args, **kwargs)
        self.rlkernel_changes_logits[slot] = _changes_logits(self, slot)
        self.rlkernel_has_new_requests, self.rlkernel_last_slots = True, None

    def apply_staged_writes(self) -> None:
        if self.rlkernel_has_new_requests:
            super().apply_staged_writes()
            processors = getattr(self, "logits_processors", ())  # a user's may write at every step
            self.rlkernel_has_new_requests = not all(type(p).__module__.startswith("vllm.") for p in processors)

    def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        slots = input_batch.idx_mapping_np
        requests = slots.tobytes()
        if requests != self.rlkernel_last_slots:
            self.rlkernel_last_slots = requests
            self.rlkernel_only_temperature = not self.rlkernel_changes_logits[slots].any()
            temperature = self.sampling_states.temperature.np[slots]
            self.rlkernel_has_temperature = bool(((temperature != 0.0) & (temperature != 1.0)).any())
            self.sampling_states.rlkernel_draw_arguments = None
        _current.append(self.sampling_states)
        try:
            return super().__call__(logits, input_batch, *args, **kwargs)
        finally:
            _current.pop()

    def apply_sampling_params(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.sampling_states.rlkernel_defers_temperature and self.rlkernel_only_temperature:
            return logits  # vLLM would copy them, to divide by temperatures
        return super().apply_sampling_params(logits, *args, **kwargs)

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # If the processed logits are not returned, the sampling kernel applies temperature and filters, which saves
        # a pass that writes them.
        states = self.sampling_states
        states.rlkernel_needs_processed = bool(states.rlkernel_returns_processed and kwargs.get("return_logprobs"))
        states.rlkernel_defers_temperature = not (states.rlkernel_needs_processed and self.rlkernel_has_temperature)
        try:
            return super().sample(logits, *args, **kwargs)
        finally:
            states.rlkernel_defers_temperature, states.rlkernel_deferred_filters = False, (None, None, None)


def _changes_logits(sampler: Any, slot: int) -> bool:
    """Whether anything except its temperature changes a request's logits before a token is drawn."""
    states = sampler.sampling_states
    if hasattr(sampler, "logits_processors"):  # from vLLM 0.31
        return bool(sampler.needs_logits_processing[slot])
    thinking = getattr(sampler, "thinking_budget_state", None)
    return bool(
        states.rlkernel_has_filters(slot)
        or sampler.logit_bias_state.use_logit_bias[slot]
        or sampler.penalties_state.use_penalty[slot]
        or sampler.bad_words_state.num_bad_words.np[slot]
        or (thinking is not None and thinking.enabled and thinking.use_thinking_budget[slot])
    )


class ExactPromptLogprobs(PromptLogprobsWorker):
    """Prompt log-probabilities by rlkernel: of the prompt's tokens, and of ids that a request names."""

    def compute_prompt_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_progress_prompt_logprobs:
            return {}
        _current.append(self)
        try:
            return super().compute_prompt_logprobs(*args, **kwargs)
        finally:
            _current.pop()

    def compute_prompt_token_id_logprobs(self, *args: Any, **kwargs: Any) -> Any:  # from vLLM 0.31
        _current.append(self)
        try:
            return super().compute_prompt_token_id_logprobs(*args, **kwargs)
        finally:
            _current.pop()


def _install() -> None:
    stock = logprob.compute_token_logprobs
    if getattr(stock, "rlkernel", False):
        return

    @wraps(stock)
    def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        return token_log_probabilities(logits, token_ids) if _current else stock(logits, token_ids)

    compute_token_logprobs.rlkernel = True  # type: ignore[attr-defined]
    for module in (logprob, prompt_logprob):
        if hasattr(module, "compute_token_logprobs"):
            module.compute_token_logprobs = compute_token_logprobs

    draw = sampler_module.gumbel_sample

    @wraps(draw)
    def gumbel_sample(
        logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not _current:
            return draw(logits, rows, temperature, seed, pos, *args, **kwargs)
        states = _current[-1]
        if states.rlkernel_draw_arguments is None:
            states.rlkernel_draw_arguments = (temperature.index_select(0, rows), seed.index_select(0, rows))
        temperatures, seeds = states.rlkernel_draw_arguments
        if not states.rlkernel_defers_temperature:  # already applied
            temperatures = (temperatures > 0).float()
        return draw_exactly(logits, seeds, pos.long(), temperatures, *states.rlkernel_deferred_filters)

    sampler_module.gumbel_sample = gumbel_sample


def replace_sampler(runner: Any) -> bool:
    """Replaces a runner's sampler, its states and its prompt worker; False if the sampler is not vLLM's own."""
    _install()
    sampler = runner.sampler
    runner.prompt_logprobs_worker.__class__ = ExactPromptLogprobs
    if type(sampler) is not Sampler or type(sampler.sampling_states) is not SamplingStates:
        return False
    sampler.__class__ = ExactSampler
    states = sampler.sampling_states
    states.__class__ = ExactStates
    states.rlkernel_returns_processed = sampler.logprobs_mode in ("processed_logprobs", "processed_logits")
    sampler.rlkernel_changes_logits = np.zeros(states.max_num_reqs, dtype=bool)
    return True
