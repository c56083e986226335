"""A model directory as an input: its engine samples, or scores the other side's tokens; both results are capsules."""

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
        prompts: file; None: random token ids. dtype: "" is the other side's, or the model's own.
        operators: what is recorded of them, where both sides are engines.
        engine: further arguments of vLLM's engine.
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
    """Both sources with capsules where they are models; the rollout samples where both are.

    Raises:
        DriftError: an engine does not run, or the other side of a model has no tokens to score.
    """
    if rollout.model is not None and train.model is not None:
        rollout = _sampled(rollout, rollout.model, train.model, engines)
    return scored(rollout, train, engines), scored(train, rollout, engines)


def _sampled(source: Source, model: Model, scorer: Model, engines: Engines) -> Source:
    from rlkernel_drift.capture.request import Request, own_dtype, random_prompts, sampling_of
    from rlkernel_drift.cli.capture import capture

    longest = engines.engine.get("max_model_len")
    paths = [model.path, scorer.path]
    prompts = engines.prompts or random_prompts(
        paths, engines.seed, engines.max_tokens, longest if isinstance(longest, int) else None
    )
    request = Request(
        model=model.path,
        prompts=prompts,
        seed=engines.seed,
        max_tokens=engines.max_tokens,
        sampling=sampling_of(temperature=engines.temperature),
        dtype=engines.dtype or own_dtype(model.path),
        device=engines.device,
        operators=engines.operators,
        weights=engines.weights,
        engine=engines.engine,
        command=list(engines.command),
    )
    return replace(source, capsule=capture(model.engine, request))


def scored(source: Source, other: Source, engines: Engines | None = None) -> Source:
    """The source with a capsule; other kinds of sources come back as they are.

    The engine runs in the dtype that the other side declares, at its sampling settings, and records the operators
    that it recorded.

    Raises:
        DriftError: the other side has no tokens to score.
    """
    engines = engines or Engines()
    if source.model is None or source.capsule is not None:
        return source
    if other.capsule is None:
        raise DriftError(f"{source.label} is a model: the other side must have tokens, a capsule, or be a model too")
    from rlkernel_drift.capture.request import Request, own_dtype
    from rlkernel_drift.cli.capture import capture

    manifest = other.capsule.manifest
    starts = other.capsule.cu_seqlens[:-1]
    if other.capsule.stream is not None and other.capsule.mask[starts].any():
        raise DriftError(
            f"{other.label} has no prompt of sequence {int(other.capsule.mask[starts].argmax())}: its first token "
            f"counts, and {source.label} can score no token without those before it; record prompt_token_ids"
        )
    request = Request(
        model=source.model.path,
        tokens=other.capsule,
        side="train",
        sampling=manifest.sampling,
        dtype=engines.dtype or manifest.dtype or own_dtype(source.model.path),
        device=engines.device,
        operators=_recorded(other),
        operator_sequences=1 << 30,
        weights=engines.weights,
        engine=engines.engine if source.model.engine.startswith("vllm") else {},
        command=list(engines.command),
    )
    return replace(source, capsule=capture(source.model.engine, request))


def _recorded(other: Source) -> Literal["none", "rows", "fingerprint"]:
    """The same tokens' operators as the other side recorded."""
    kinds = {operator.kind for operator in other.capsule.manifest.operators} if other.capsule is not None else set()
    if not kinds:
        return "none"
    return "fingerprint" if kinds == {"fingerprint"} else "rows"
