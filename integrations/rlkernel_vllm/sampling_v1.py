"""The sampler of vLLM's V1 model runner, used on CPUs and, on request, on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.sampler import Sampler

from rlkernel.ops.sample import filter_logits_
from rlkernel_vllm.sampling import log_probabilities

GREEDY = 1e-5  # vLLM takes a temperature below it as 0


class Generator(torch.Generator):
    """A CPU generator that can undo its last draw.

    vLLM undoes a draw if a prompt has more chunks to come, by resetting the offset, which CPU generators do not have.
    """

    before: Tensor  # state before the last draw

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.set_state(self.before)


class ExactSampler(Sampler):
    """vLLM's sampler with rlkernel's log-probabilities, temperature and kept sets."""

    rlkernel_runner: Any

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return log_probabilities(logits)

    def sample(
        self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Any, Tensor | None]:
        m = sampling_metadata
        mode = logprobs_mode_override or self.logprobs_mode
        wanted = m.max_num_logprobs is not None or getattr(m, "logprob_token_ids", None)
        greedy = None if m.all_random else logits.argmax(dim=-1).view(-1)
        drawn = None
        if not m.all_greedy:
            temperature = torch.where(m.temperature < GREEDY, 0.0, m.temperature)
            min_p = None
            for processor in m.logitsprocs.argmax_invariant:
                if not isinstance(processor, MinPLogitsProcessor):
                    logits = processor.apply(logits)
                elif processor.min_p_count:
                    min_p = processor.min_p.flatten()
            logits = filter_logits_(logits, temperature, _off_is_zero(m.top_k, logits.shape[1]), m.top_p, min_p)
            if logits.device.type == "cpu" and m.generators is self.rlkernel_runner.input_batch.generators:
                self._save_states(m.generators)  # not in vLLM's profiling runs, which have no requests
            drawn = self.topk_topp_sampler(logits, m.generators, None, None)[0]
        processed = None
        if wanted and mode == "processed_logits":
            processed = logits
        elif wanted and mode == "processed_logprobs":
            processed = log_probabilities(logits)
        if greedy is None or drawn is None:
            return drawn if greedy is None else greedy, processed
        return torch.where(m.temperature < GREEDY, greedy, drawn), processed

    def _save_states(self, generators: dict[int, torch.Generator]) -> None:
        """Saves the states before a draw, in generators of ours that replace vLLM's."""
        ids, requests = self.rlkernel_runner.input_batch.req_ids, self.rlkernel_runner.requests
        for row, given in generators.items():
            ours = given
            if not isinstance(ours, Generator):
                ours = Generator()
                ours.set_state(given.get_state())
                generators[row] = requests[ids[row]].generator = ours  # the request keeps it after a preemption
            ours.before = ours.get_state()


def _off_is_zero(top_k: Tensor | None, vocabulary: int) -> Tensor | None:
    """vLLM's top-k, which is off at the vocabulary's size, as that of `ops.sample`, which is off at 0."""
    return None if top_k is None else torch.where(top_k < vocabulary, top_k, 0).to(torch.int32)


def replace_sampler(runner: Any) -> bool:
    """Replaces a runner's sampler; False, without a change, if it is not vLLM's own."""
    sampler = runner.sampler
    if type(sampler) is not Sampler:
        return False
    sampler.__class__ = ExactSampler
    sampler.rlkernel_runner = runner
    # It only draws; ExactSampler computes log-probabilities.
    sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
    return True
