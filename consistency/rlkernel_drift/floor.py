"""Measures the noise floor: one engine against itself with other batches, padding, chunks and orders.

A comparison can be judged against it (`--floor FILE`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor
from rlkernel_drift.capture.request import Request
from rlkernel_drift.diagnose.context import References, context_of
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.model import DTYPES, Layout, ReferenceModel
from rlkernel_drift.statistics import Comparable, TokenStatistics, token_statistics


@dataclass(frozen=True)
class Measured:
    """A measured floor, and the statistics of each permutation."""

    floor: Floor
    permutations: dict[str, TokenStatistics]


def measure_floor(engine: str, request: Request) -> Measured:
    """Runs an engine against itself.

    Args:
        engine: "hf", "rlkernel", "vllm" or "vllm+rlkernel". request: model, prompts or tokens, dtype, device.

    Raises:
        DriftError: the engine is unknown, or there is nothing to score.
    """
    if engine == "hf":
        names = _hf(request)
    elif engine == "rlkernel":
        names = _rlkernel(request)
    elif engine in ("vllm", "vllm+rlkernel"):
        from rlkernel_drift.capture.vllm_engine import permuted

        names = {name: torch.from_numpy(v) for name, v in permuted(request, engine == "vllm+rlkernel").items()}
    else:
        raise DriftError(f"floor does not support engine {engine!r}; use hf, rlkernel, vllm or vllm+rlkernel")
    base = names.pop("as it is")
    whole = np.ones(len(base), np.bool_)
    found = {name: token_statistics(Comparable(base.numpy(), values.numpy(), whole)) for name, values in names.items()}
    worst = lambda key: max((float(getattr(s, key)) for s in found.values()), default=0.0)
    floor = Floor(
        mean=worst("mean"),
        p99=worst("p99"),
        maximum=worst("maximum"),
        k3=max(0.0, worst("k3")),
        tokens=len(base),
        permutations=list(found),
    )
    return Measured(floor, found)


def _hf(request: Request) -> dict[str, Tensor]:
    from rlkernel_drift.capture.hf import capture_hf

    dtype = DTYPES[request.dtype]
    model = ReferenceModel.load(request.model, request.device, request.attention, dtype)
    capsule = capture_hf(request, model)
    stream = capsule.stream
    assert stream is not None
    context = context_of(capsule, References(model), stream, budget=1 << 30)
    predict: Callable[[Layout | None], Tensor] = lambda layout: context.score(context.declared.with_body(layout=layout))
    found = {
        "as it is": predict(None),
        "each sequence alone": predict(Layout("none")),
        "left padding": predict(Layout("left")),
        "padded to multiples of 64": predict(Layout("right", multiple=64)),
        "decoded with a cache": context.score(context.declared.with_body(decoded=True)),
    }
    kernels = model.model.config._attn_implementation
    for other in model.kernels:
        if other != kernels:
            model.model.set_attn_implementation(other)
            found[f"attention {other}"] = predict(None)
    model.model.set_attn_implementation(kernels)
    return {name: values.float() for name, values in found.items()}


def _rlkernel(request: Request) -> dict[str, Tensor]:
    from rlkernel_drift.capture.rlkernel_engine import scored_by_engine, scored_by_training, tokens_of

    capsule: Capsule = tokens_of(request)
    order = list(range(capsule.sequences))
    return {
        "as it is": scored_by_engine(request, capsule, order),
        "other order": scored_by_engine(request, capsule, order[::-1]),
        "each sequence alone": scored_by_engine(request, capsule, order, max_num_seqs=1),
        "chunked prefill": scored_by_engine(request, capsule, order, max_num_batched_tokens=7),
        "no prefix cache": scored_by_engine(request, capsule, order, prefix_caching=False),
        "training forward": torch.from_numpy(scored_by_training(request, capsule)),
    }
