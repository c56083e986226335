"""The libraries that the figures are measured against, called as their own trainers call them.

A library that is not installed, or does not run here, is left out: `MISSING` says which and why, for the printed output
and the result file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

TRL_CHUNK = 32768
"""Vocabulary entries of a tile: the width that TRL 1.16's trainers pass."""

MISSING: list[str] = []
"""One sentence for each library that is left out."""


def missing(reason: str) -> None:
    """Notes a library or a case that is left out."""
    MISSING.append(reason)
    print(f"note: {reason}", flush=True)


def _find(package: str, load: Callable[[], Any]) -> tuple[str, Any] | None:
    """(version, what `load` returns), or None, with a note."""
    try:
        return metadata.version(package), load()
    except metadata.PackageNotFoundError:
        missing(f"{package} is not installed: its rows are left out")
    except Exception as error:
        missing(f"{package} does not run here: {error!r:.200}; its rows are left out")
    return None


@functools.cache
def trl() -> tuple[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] | None:
    """(name, f(hidden, weight, targets) -> (logp, entropy)): TRL's chunked log-probability.

    Its GRPO trainer asks for both outputs, and passes the tokens that count alone.
    """

    def load() -> Any:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer import utils  # noqa: F401  (its backward imports it)

        def logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            found = ChunkedLogProbFunction.apply(
                hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("log_probs", "entropy")
            )
            return found[0], found[1]

        return logprob

    found = _find("trl", load)
    return found and (f"TRL {found[0]} chunked", found[1])


@functools.cache
def liger(reduction: str) -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]] | None:
    """(name, f(hidden, weight, targets) -> loss): Liger's fused linear cross-entropy with its defaults.

    "none" takes an upstream gradient a token, as reinforcement learning needs; with "mean" the gradients are made in
    the forward, which a scalar upstream gradient allows.
    """

    def load() -> Any:
        if not torch.cuda.is_available():
            raise RuntimeError("it needs a GPU")
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            return LigerFusedLinearCrossEntropyFunction.apply(
                hidden, weight, targets, None, None, -100, 0.0, 0.0, reduction
            )[0]

        return loss

    found = _find("liger-kernel", load)
    return found and (f"Liger {found[0]}" + ("" if reduction == "none" else ", mean loss"), found[1])


def materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities by plain torch: bf16 logits, widened, log-sum-exp, gather."""
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)
