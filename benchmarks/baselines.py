"""The libraries that rlkernel is compared with, called as their own trainers call them.

A library that is not installed or does not run here is left out; `MISSING` lists the reasons for the result file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

TRL_CHUNK = 32768
"""Vocabulary entries per tile, as TRL 1.16's trainers pass it."""

MISSING: list[str] = []
"""One sentence per library that is left out."""


def missing(reason: str) -> None:
    """Records and prints that a library or a case is left out."""
    MISSING.append(reason)
    print(f"note: {reason}", flush=True)


def _find(package: str, load: Callable[[], Any]) -> tuple[str, Any] | None:
    """(version, result of `load`), or None after recording the reason."""
    try:
        return metadata.version(package), load()
    except metadata.PackageNotFoundError:
        missing(f"{package} is not installed: its rows are left out")
    except Exception as error:
        missing(f"{package} does not run here: {error!r:.200}; its rows are left out")
    return None


Sampler = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""f(logits [B, V] fp32, temperature [B], top_k [B] int32, top_p [B]) -> token ids [B]."""


def _vllm_sampler() -> Sampler:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    def sample(logits: Tensor, temperature: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        kept = apply_top_k_top_p(logits / temperature[:, None], k, p)  # masks the quotient in place
        return random_sample(kept.softmax(-1), {})

    return sample


def _flashinfer_sampler() -> Sampler:
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sample

    return lambda logits, temperature, k, p: flashinfer_sample(logits / temperature[:, None], k, p)


@functools.cache
def samplers() -> dict[str, Sampler]:
    """Samplers of vLLM by name: its own and FlashInfer's, as it calls them; none computes log-probabilities."""
    found = {
        "vLLM": _find("vllm", _vllm_sampler),
        "FlashInfer": _find("flashinfer-python", _flashinfer_sampler),
    }
    return {f"{name} {given[0]}": given[1] for name, given in found.items() if given}


@functools.cache
def trl() -> tuple[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] | None:
    """(name, f(hidden, weight, targets) -> (logp, entropy)): TRL's chunked log-probability.

    Its GRPO trainer requests both outputs and passes only the tokens that count.
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

    "none" takes one upstream gradient per token, as reinforcement learning needs. "mean" computes the gradients in the
    forward, which a scalar upstream gradient allows.
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
    """Log-probabilities in plain torch: bf16 logits, converted to fp32, log-sum-exp, gather."""
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)
