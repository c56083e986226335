"""Sampling settings of one request, checked on construction.

The defaults sample the model's own distribution, so that a rollout with `SamplingParams()` is on-policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MIN_TEMPERATURE = 1e-5
"""Smallest temperature other than 0; a smaller one would make scaled logits overflow fp32."""
_WORD = (1 << 64) - 1


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Attributes:
        temperature: 0, or at least `MIN_TEMPERATURE`; 0 is greedy and ignores the filters (log-probabilities are those
            of temperature 1).
        top_k: sample among the k most probable tokens; 0 keeps all.
        top_p: sample among the fewest tokens whose probabilities sum to at least top_p, 0 < top_p <= 1.
        min_p: drop tokens less probable than min_p times the most probable one, 0 <= min_p <= 1.
        max_tokens: most tokens to sample, >= 1; the end of the model's context ends a completion earlier.
        n: completions of the prompt, >= 1; each has its own seed and shares the prompt's KV pages.
        seed: 0 <= seed < 2^64; the same seed gives the same completions in any batch. None: derived from the engine's
            seed and the request id.
        stop: strings that end a completion; the text is cut before the string. Needs a tokenizer.
        stop_token_ids: token ids that end a completion, in addition to the model's end-of-sequence ids.
        ignore_eos: continue after an end-of-sequence id.
        return_kept: return the sets of kept tokens (top_k, top_p, min_p), for a trainer that scores over them.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    return_kept: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            (
                "temperature",
                _number(self.temperature) and (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE),
                f"0 (greedy) or a finite number >= {MIN_TEMPERATURE}",
            ),
            ("top_k", _integer(self.top_k) and 0 <= self.top_k < 1 << 31, "an integer >= 0 (0 keeps all tokens)"),
            ("top_p", _number(self.top_p) and 1e-30 < self.top_p <= 1, "a number in (0, 1] (1 keeps all tokens)"),
            ("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1] (0 keeps all tokens)"),
            ("max_tokens", _integer(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1"),
            ("n", _integer(self.n) and self.n >= 1, "an integer >= 1"),
            (
                "seed",
                self.seed is None or (_integer(self.seed) and 0 <= self.seed <= _WORD),
                "None or 0 <= seed < 2^64",
            ),
            ("stop", all(isinstance(s, str) and s for s in stop), "non-empty strings"),
            *((flag, isinstance(getattr(self, flag), bool), "True or False") for flag in ("ignore_eos", "return_kept")),
            ("stop_token_ids", all(_integer(i) and i >= 0 for i in self.stop_token_ids), "integers >= 0"),
        )
        for name, right, expected in checks:
            if not right:
                raise ValueError(f"SamplingParams: {name}={getattr(self, name)!r}; expected {expected}")
        # Converted to Python integers, because numpy integers would overflow in `mix_seed`.
        for name in ("top_k", "max_tokens", "n", "seed"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))

    @property
    def filters(self) -> bool:
        """Whether some tokens may be dropped before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop)


def mix_seed(seed: int, index: int) -> int:
    """Seed of stream `index` under `seed`, as a signed 64-bit number (splitmix64 of seed + (index + 1) * golden ratio).

    The engine derives request seeds from (engine seed, request id) and sample seeds from (request seed, sample index).
    For a fixed seed the map is a bijection of the index modulo 2^64, so no two samples share a stream.
    """
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z
