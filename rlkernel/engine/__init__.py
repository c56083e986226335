"""Rollout engine: continuous batching over one decoder, with completions that do not depend on the batch."""

from rlkernel.engine.llm import LLM
from rlkernel.engine.request import (
    CacheTooSmallError,
    CompletionOutput,
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    RequestOutput,
    TokenizerMissingError,
    TokenOutOfRangeError,
)
from rlkernel.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CacheTooSmallError",
    "CompletionOutput",
    "EmptyPromptError",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenOutOfRangeError",
    "TokenizerMissingError",
]
