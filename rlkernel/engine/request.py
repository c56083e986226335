"""Requests, their sequences, their outputs, and the detection of stop strings.

A request with n samples becomes n sequences of one prompt. The state of a running sequence is in its row of the
sequence table, that of a waiting one in its `Sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel.engine.sampling_params import SamplingParams, mix_seed

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Decode = Callable[[list[int]], str]


class RequestError(ValueError):
    """A request that the engine cannot serve; nothing of it was started."""


class EmptyPromptError(RequestError):
    """The prompt has no token."""


class PromptTooLongError(RequestError):
    """The prompt leaves no space for a new token in the context."""


class TokenOutOfRangeError(RequestError):
    """A token id is negative or not below the model's vocabulary size."""


class CacheTooSmallError(RequestError):
    """The KV cache has fewer pages than this request alone may need."""


class TokenizerMissingError(RequestError):
    """The request has text or stop strings, and the engine has no tokenizer."""


@dataclass
class CompletionOutput:
    """One completion.

    Attributes:
        index: index of the sample, 0 <= index < n.
        token_ids: sampled ids, including the end-of-sequence or stop id that ended the completion.
        text: their text without special tokens, the stop id and the stop string; "" without a tokenizer.
        logprobs: natural log-probabilities of `token_ids` under the sampling distribution (temperature, kept set).
        logprobs_tensor: the same numbers, [len(token_ids)] fp32 on the CPU, with the bits of the training forward.
        finish_reason: "stop" (end-of-sequence id, stop id or stop string) or "length" (max_tokens or the context).
        stop_reason: the id or the string that ended the completion; None for "length".
        kept: [len(token_ids), ceil(V/32)] int32 bit masks of the tokens sampled from (bit v & 31 of word v >> 5), with
            `return_kept` and an active filter; None means that all were kept.
        seed: the sample's seed, as `ops.sample` takes it.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    logprobs_tensor: Tensor
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    kept: Tensor | None
    seed: int


@dataclass
class RequestOutput:
    """Result of one prompt.

    Attributes:
        request_id: id returned by `LLM.add_request`.
        prompt: the text, if the prompt was given as text.
        prompt_token_ids: the prompt's ids.
        outputs: the n completions in the order of their index.
        num_cached_tokens: prompt tokens, summed over the samples, whose KV was cached or shared instead of computed.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


@dataclass(eq=False)
class Request:
    """One prompt in the engine; it is scored, and nothing sampled, if `score_temperature` is set."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    score_temperature: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0

    def spawn(self, decode: Decode | None, share_by_content: bool) -> list[Sequence]:
        """Creates the request's sequences. `share_by_content`: requests with equal prompts share its KV."""
        tokens = np.asarray(self.prompt_token_ids, dtype=np.int32)
        group = tokens.tobytes() if share_by_content else self.request_id
        for i in range(self.params.n):
            stop_matcher = None
            if self.params.stop_strings and decode is not None:
                stop_matcher = StopStringMatcher(decode, self.params.stop_strings)
            self.sequences.append(Sequence(self, i, mix_seed(self.seed, i), tokens, group, stop_matcher))
        self.unfinished = len(self.sequences)
        return self.sequences


@dataclass(eq=False)
class Sequence:
    """One sample of a request.

    Attributes:
        tokens: [L] known ids, valid while the sequence waits.
        logps: [L] log-probabilities of `tokens`, 0 where none was computed; valid while the sequence waits.
        group: sequences with equal groups have equal prompts and may share the prompt's KV.
        kept: one mask row per sampled token, if they are returned.
        row: row of the sequence table while running, else -1.
    """

    request: Request
    index: int
    seed: int
    tokens: Int32
    group: bytes | int
    stop_matcher: StopStringMatcher | None = None
    logps: Float32 | None = None
    kept: list[Int32] = field(default_factory=list)
    row: int = -1
    cached_tokens: int = 0
    finish_reason: Literal["stop", "length"] = "length"
    stop_reason: int | str | None = None

    @property
    def scoring(self) -> bool:
        """Whether the prompt is scored and nothing is sampled."""
        return self.request.score_temperature is not None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def fresh(self) -> bool:
        """Whether nothing was sampled yet (valid while waiting)."""
        return len(self.tokens) == self.prompt_len

    def output(self, decode: Decode | None) -> CompletionOutput:
        """The completion of a finished sequence."""
        ids = self.tokens[self.prompt_len :].tolist()
        logps = np.zeros(0, np.float32) if self.logps is None else self.logps[self.prompt_len :].copy()
        text = ""
        if isinstance(self.stop_reason, str) and self.stop_matcher is not None:
            text = self.stop_matcher.text
        elif decode is not None:
            text = decode(ids[:-1] if self.stop_reason is not None else ids)
        return CompletionOutput(
            index=self.index,
            token_ids=ids,
            text=text,
            logprobs=logps.tolist(),
            logprobs_tensor=torch.from_numpy(logps),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            kept=torch.from_numpy(np.stack(self.kept)) if self.kept else None,
            seed=self.seed,
        )


class StopStringMatcher:
    """Decodes a growing completion token by token and finds stop strings across token borders.

    A token's text can depend on earlier tokens (word-start markers) and be incomplete (bytes of a longer character).
    New text is therefore the difference of two decodings of a window that starts before the last complete piece, and a
    piece that ends in the replacement character waits for the next token.

    Args:
        decode: token ids -> text.
        stops: the stop strings, none empty.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...]) -> None:
        self.text = ""
        self._decode = decode
        self._stops = stops
        self._overlap = max(len(stop) for stop in stops) - 1
        self._ids: list[int] = []
        self._window = 0  # the window's first token
        self._read = 0  # tokens whose text is in `text`

    def push(self, token: int) -> str | None:
        """Adds a token; returns the stop string that it completes, if any, and then cuts `text` before it."""
        self._ids.append(token)
        whole = self._decode(self._ids[self._window :])
        if whole.endswith("\ufffd"):
            return None
        known = self._decode(self._ids[self._window : self._read])
        start = max(0, len(self.text) - self._overlap)
        self.text += whole[len(known) :]
        self._window, self._read = self._read, len(self._ids)
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop
