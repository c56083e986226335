"""The sampler of vLLM's V2 model runner (GPUs).

vLLM computes log-probabilities through one function of a module. It is replaced, once, by one that asks whether the
caller is a sampler of ours; all else is changed in this runner's objects.
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

from rlkernel_vllm.sampling import keep, token_log_probabilities

_current: list[Any] = []  # samplers and prompt workers of ours whose call is under way


class ExactStates(SamplingStates):
    """Temperature and kept sets of rlkernel. All filters are applied in one step, where vLLM applies min-p."""

    rlkernel_deferred = False  # the temperature is left to the kernel that draws

    def apply_temperature(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> None:
        return

    def apply_min_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> None:
        temperature = self.temperature.np[idx_mapping_np]
        ready = self.rlkernel_deferred or np.all((temperature == 0.0) | (temperature == 1.0))
        filters = {
            "top_k": np.any(self.top_k.np[idx_mapping_np] != self.vocab_size),
            "top_p": np.any(self.top_p.np[idx_mapping_np] != 1.0),
            "min_p": np.any(self.min_p.np[idx_mapping_np] != 0.0),
        }
        if ready and not any(filters.values()):
            return
        rows = expanded_idx_mapping
        given = {name: getattr(self, name).gpu[rows] if on else None for name, on in filters.items()}
        if given["top_k"] is not None:
            given["top_k"] = torch.where(given["top_k"] < self.vocab_size, given["top_k"], 0)
        keep(logits, self.temperature.gpu[rows], given["top_k"], given["top_p"], given["min_p"])
        self.rlkernel_deferred = False

    def get_top_k_top_p(self, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> tuple[None, None]:
        return None, None

    def apply_top_k_top_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any) -> Tensor:
        return logits


class ExactSampler(Sampler):
    """vLLM's sampler with rlkernel's log-probabilities, temperature, kept sets and noise.

    The noise of `ops.sample` is keyed by the request's seed, the position and the token, as vLLM's is by seed and
    position, and costs less.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _current.append(self.sampling_states)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _current.pop()

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Where nobody reads the scaled logits, the kernel that draws applies the temperature: one pass less.
        processed = self.logprobs_mode in ("processed_logprobs", "processed_logits")
        self.sampling_states.rlkernel_deferred = not (processed and kwargs.get("return_logprobs"))
        try:
            return super().sample(logits, *args, **kwargs)
        finally:
            self.sampling_states.rlkernel_deferred = False


class ExactPromptLogprobs(PromptLogprobsWorker):
    """Prompt log-probabilities through the same function: of the prompt's tokens, and of ids that a request names."""

    def compute_prompt_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        _current.append(self)
        try:
            return super().compute_prompt_logprobs(*args, **kwargs)
        finally:
            _current.pop()

    def compute_prompt_token_id_logprobs(self, *args: Any, **kwargs: Any) -> Any:  # vLLM from 0.31 on
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
        scale = temperature.index_select(0, rows)
        if not getattr(_current[-1], "rlkernel_deferred", False):  # applied already
            scale = (scale > 0).float()
        seeds = seed.index_select(0, rows)
        return torch.ops.rlkernel.sample.default(logits.float(), seeds, pos.long(), scale, None, None, None)[0]

    sampler_module.gumbel_sample = gumbel_sample


def take_over(runner: Any) -> bool:
    """Changes a runner's sampler, its states and its prompt worker; False: the sampler is not vLLM's own, and stays."""
    _install()
    sampler = runner.sampler
    runner.prompt_logprobs_worker.__class__ = ExactPromptLogprobs
    if type(sampler) is not Sampler or type(sampler.sampling_states) is not SamplingStates:
        return False
    sampler.__class__ = ExactSampler
    sampler.sampling_states.__class__ = ExactStates
    return True
