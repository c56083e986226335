"""sample: one token per row by Gumbel-max, with noise keyed by request seed, position and token id.

Contract: orders.py, `sample`, and docs/ops/sample.md. Temperature, top-k, top-p and min-p determine the kept set. The
log-probability is that of `logprob` over this set, so a trainer that passes the set to `logprob` gets the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.autograd import bump_versions
from rlkernel.ops.checks import check, check_flag, check_float, check_optional, check_tensors
from rlkernel.ops.define import define, gpu_kernel
from rlkernel.ops.kept import kept_words, unpack_kept
from rlkernel.ops.logprob import check_vocabulary
from rlkernel.ops.stock_switch import is_stock


class Sample(NamedTuple):
    """Result of `sample`: token ids, their log-probabilities over the kept set, and that set (None: every token).

    `full_logp` has the log-probabilities over all tokens at the same temperature, if `return_full` was set.
    """

    tokens: Tensor  # [B] int64
    logp: Tensor  # [B] fp32
    kept: Tensor | None  # [B, ceil(V/32)] int32
    full_logp: Tensor | None = None  # [B] fp32


NOTHING, KEPT, FULL = 0, 1, 2
"""Values of the op's `scores`: no log-probability, that over the kept set, or also that over all tokens."""


def _fake(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    scores: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, v = logits.shape
    filtered = (top_k, top_p, min_p) != (None, None, None)
    return (
        logits.new_empty((b,), dtype=torch.int64),
        logits.new_empty((b if filtered else 0, kept_words(v)), dtype=torch.int32),
        logits.new_empty((b if scores else 0,), dtype=torch.float32),
        logits.new_empty((b if scores == FULL else 0,), dtype=torch.float32),
    )


_sample = define(
    "sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, int scores) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    reference=lambda: reference.sample.sample,
    cpu=lambda: cpu.sample.sample,
    triton=lambda: triton.sample.sample,
)


@torch.no_grad()
def sample(
    logits: Tensor,  # [B, V] fp32
    seeds: Tensor,  # [B] int64
    positions: Tensor,  # [B] int64
    *,
    temperature: Tensor,  # [B] fp32
    top_k: Tensor | None = None,  # [B] int32
    top_p: Tensor | None = None,  # [B] fp32
    min_p: Tensor | None = None,  # [B] fp32
    return_kept: bool = False,
    return_full: bool = False,
) -> Sample:
    """Samples one token per row from `softmax(logits / temperature)`, filtered by top-k, then top-p, then min-p.

    The noise of a token depends on (seed, position, token id) alone, not on the row, the batch or the machine's
    threads. On equal scores the lowest id wins.

    Args:
        logits: [B, V], fp32, bf16 or fp16; widened to fp32 first.
        seeds: [B] int64, the request's seed; any value.
        positions: [B] int64, position of the sampled token in its sequence.
        temperature: [B] fp32 >= 0; 0 is greedy: the first largest logit, filters ignored, logp at temperature 1.
        top_k: [B] int32, keeps the k largest logits; 0 is off.
        top_p: [B] fp32 in (0, 1], keeps the smallest set of most probable tokens whose probabilities sum to this share
            of the total after top-k; 1 is off.
        min_p: [B] fp32 in [0, 1], keeps probabilities of at least this fraction of the largest one; 0 is off.
            All three filters also keep every token that ties with the last kept one.
        return_kept: also return the kept set as a bit mask, or None if no filter is given and all tokens are kept.
        return_full: also return the log-probability over all tokens.

    Values are checked on the CPU; on CUDA an invalid value gives an undefined token of the vocabulary, because a check
    would wait for the device.

    Raises:
        ValueError: shapes, dtypes, temperatures or filters do not fit, V is 0, or a row of logits has a NaN or +inf or
            only -inf; the message names the argument and the row.
        TypeError: an argument is not a tensor, logits has another dtype, or a flag is not True or False.

    Source: Gumbel-max trick: Maddison, Tarlow and Minka, A* Sampling, 2014.
    """
    check_tensors("sample", logits=logits, seeds=seeds, positions=positions, temperature=temperature)
    check_optional("sample", top_k=top_k, top_p=top_p, min_p=min_p)
    check(logits.dim() == 2, lambda: f"sample: logits is {tuple(logits.shape)}; expected [B, V]")
    check_float("sample", "logits", logits)
    b, v = logits.shape
    check_vocabulary("sample", "logits", v)
    for name, value, dtype in (
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        check(
            value is None or (value.shape == (b,) and value.dtype == dtype),
            lambda name=name, value=value, dtype=dtype: (  # type: ignore[misc]
                f"sample: {name} is {tuple(value.shape)} {value.dtype}; expected [B={b}] {dtype}"
            ),
        )
    check_flag("sample", "return_kept", return_kept)
    check_flag("sample", "return_full", return_full)
    if is_stock():
        tokens, logp, mask, full = stock.sample(logits.float(), temperature, top_k, top_p, min_p)
        return Sample(tokens, logp, mask if return_kept else None, full if return_full else None)
    scores = FULL if return_full else KEPT
    tokens, mask, logp, full = _sample(logits, seeds, positions, temperature, top_k, top_p, min_p, scores)
    returned = return_kept and (top_k, top_p, min_p) != (None, None, None)
    return Sample(tokens, logp, mask if returned else None, full if return_full else None)


def draw(
    logits: Tensor,  # [B, V]
    seeds: Tensor,  # [B] int64
    positions: Tensor,  # [B] int64
    temperature: Tensor,  # [B] fp32
    top_k: Tensor | None = None,  # [B] int32
    top_p: Tensor | None = None,  # [B] fp32
    min_p: Tensor | None = None,  # [B] fp32
) -> Tensor:  # [B] int64
    """Tokens of `sample` without their log-probabilities. The arguments are not checked."""
    tokens: Tensor = _sample(logits, seeds, positions, temperature, top_k, top_p, min_p, NOTHING)[0]
    return tokens


@torch.no_grad()
def kept_set(
    logits: Tensor,  # [B, V] fp32
    *,
    temperature: Tensor,  # [B] fp32
    top_k: Tensor | None = None,  # [B] int32
    top_p: Tensor | None = None,  # [B] fp32
    min_p: Tensor | None = None,  # [B] fp32
) -> Tensor:  # [B, ceil(V/32)] int32
    """The set of tokens that `sample` keeps, as a bit mask. At least one filter is given; arguments are not checked."""
    zeros = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    mask: Tensor = _sample(logits, zeros, zeros, temperature, top_k, top_p, min_p, NOTHING)[1]
    return mask


@torch.no_grad()
def filter_logits_(
    logits: Tensor,  # [B, V] fp32
    temperature: Tensor,  # [B] fp32
    top_k: Tensor | None = None,  # [B] int32
    top_p: Tensor | None = None,  # [B] fp32
    min_p: Tensor | None = None,  # [B] fp32
) -> Tensor:  # [B, V] fp32
    """Multiplies logits by 1/T, in place, and writes -inf where `sample` keeps no token. Arguments are not checked."""
    filtered = (top_k, top_p, min_p) != (None, None, None)
    if gpu_kernel("sample", logits.device.type) is not None and logits.stride(1) == 1:
        from rlkernel.kernels.triton.sample import filter_logits_ as kernel

        kernel(logits, temperature, top_k, top_p, min_p)
        bump_versions(logits)
        return logits
    kept = None
    if filtered:
        kept = kept_set(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits.mul_(reference.sample.inverse_of(temperature)[:, None])
    return logits if kept is None else logits.masked_fill_(~unpack_kept(kept, logits.shape[1]), float("-inf"))
