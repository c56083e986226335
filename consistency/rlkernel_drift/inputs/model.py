"""Model directories as inputs: an engine samples, or scores the tokens of the other side; both give capsules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs import Model, Source


@dataclass(frozen=True)
class Engines:
    """How engines are run.

    Attributes:
        prompts: file; None for random token ids.
        dtype: "" is that of the other side, or else of the model.
        operators: form of the recording where both sides are engines.
        engine: further arguments of `vllm.LLM`.
    """

    prompts: Path | None = None
    seed: int = 0
    max_tokens: int = 64
    temperature: float = 1.0
    dtype: str = ""
    device: str = "cpu"
    operators: Literal["none", "full", "rows", "fingerprint"] = "full"
    weights: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


def opened(rollout: Source, train: Source, engines: Engines) -> tuple[Source, Source]:
    """Both sources, with a capsule for each that is a model; if both are, the rollout samples.

    Raises:
        DriftError: an engine does not run, or the other side of a model has no tokens to score.
    """
    if rollout.model is not None and train.model is not None:
        rollout = _sampled(rollout, rollout.model, train.model, engines)
    return scored(rollout, train, engines), scored(train, rollout, engines)


def _sampled(source: Source, model: Model, scorer: Model, engines: Engines) -> Source:
    from rlkernel_drift.capture.request import own_dtype, random_prompts, sampling_of

    longest = engines.engine.get("max_model_len")
    limit = longest if isinstance(longest, int) else None
    return _captured(
        source,
        model,
        engines,
        prompts=engines.prompts or random_prompts([model.path, scorer.path], engines.seed, engines.max_tokens, limit),
        sampling=sampling_of(temperature=engines.temperature),
        dtype=engines.dtype or own_dtype(model.path),
        operators=engines.operators,
    )


def _captured(source: Source, model: Model, engines: Engines, **fields: Any) -> Source:
    from rlkernel_drift.capture import run_engine
    from rlkernel_drift.capture.request import Request

    request = Request(
        model=model.path,
        seed=engines.seed,
        max_tokens=engines.max_tokens,
        device=engines.device,
        weights=engines.weights,
        engine=engines.engine if model.engine.startswith("vllm") else {},
        command=list(engines.command),
        **fields,
    )
    return replace(source, capsule=run_engine(model.engine, request))


def scored(source: Source, other: Source, engines: Engines | None = None) -> Source:
    """A model with the capsule of the other side's tokens; other sources are returned unchanged.

    The engine uses the dtype and sampling settings of the other side, and records the same operators.

    Raises:
        DriftError: the other side has no tokens to score, or lacks its prompts.
    """
    engines = engines or Engines()
    if source.model is None or source.capsule is not None:
        return source
    if other.capsule is None:
        raise DriftError(f"{source.label} is a model, so the other side must be a capsule or a model")
    from rlkernel_drift.capture.request import own_dtype

    manifest = other.capsule.manifest
    starts = other.capsule.cu_seqlens[:-1]
    if other.capsule.stream is not None and other.capsule.mask[starts].any():
        raise DriftError(
            f"{other.label} has no prompt of sequence {int(other.capsule.mask[starts].argmax())}: its first token "
            f"counts, and {source.label} cannot score it without the tokens before it; record prompt_token_ids"
        )
    kinds = {operator.kind for operator in manifest.operators}
    return _captured(
        source,
        source.model,
        engines,
        tokens=other.capsule,
        side="train",
        sampling=manifest.sampling,
        dtype=engines.dtype or manifest.dtype or own_dtype(source.model.path),
        operators="none" if not kinds else "fingerprint" if kinds == {"fingerprint"} else "rows",
        operator_sequences=1 << 30,
    )
