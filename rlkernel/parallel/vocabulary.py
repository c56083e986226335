"""Layers whose vocabulary is split over ranks, with the bits of one device: embedding and log-probabilities.

Each rank holds n neighbouring entries, rank 0 the first. Ranks exchange logits by token, so that each row's log-sum-exp
is computed by one rank from the whole row: no number of ranks, and no `tp_leaves`, changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from rlkernel import ops
from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK, WGRAD_TOKENS
from rlkernel.ops import LogProb
from rlkernel.ops.all_reduce import group_of
from rlkernel.ops.autograd import (
    gradient_target,
    has_main_grad,
    main_grad_lock,
    once_differentiable,
    outside_graph,
    weight_grad,
)
from rlkernel.ops.checks import check, check_tensors
from rlkernel.ops.define import define
from rlkernel.ops.embedding import check_ids, embedding_wgrad, embedding_wgrad_
from rlkernel.ops.kept import check_kept
from rlkernel.ops.linear import linear_wgrad_
from rlkernel.ops.linear_logprob import check_rows
from rlkernel.ops.logprob import (
    check_targets,
    check_values,
    check_vocabulary,
    inverse_temperature,
    logprob_dgrad,
    logprob_unchecked,
)
from rlkernel.parallel.collectives import all_to_all
from rlkernel.parallel.tensor import columns_of_all_rows, gather, over_columns

BLOCK = 1 << 26
"""Logits of the whole vocabulary that ranks exchange at a time, at most; it bounds the scratch memory."""

# ---- embedding -----------------------------------------------------------------------------------


def _owned(ids: Tensor, rows: int, first: int) -> tuple[Tensor, Tensor]:
    """Row of each id on this rank, 0 for ids of other ranks, and which ids are of other ranks."""
    own = ids - first
    elsewhere = (own < 0) | (own >= rows)
    return own.masked_fill(elsewhere, 0), elsewhere[:, None]


def _embedding(ids: Tensor, weight: Tensor, first: int, group_name: str) -> Tensor:
    group = group_of(group_name)
    check_ids(ids, group.size() * weight.shape[0])  # before the exchange, on every rank
    own, elsewhere = _owned(ids, weight.shape[0], first)
    rows = ops.embedding(own, weight.detach()).masked_fill_(elsewhere, 0)
    # One rank has a row's bits and the others zeros. Their sum as integers is those bits, also of -0.
    dist.all_reduce(rows.view(torch.int8), group=group)
    return rows


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, ctx.weight, ctx.first, _ = inputs
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    own, elsewhere = _owned(ids, ctx.weight.shape[0], ctx.first)
    dy = dy.masked_fill(elsewhere, -0.0)  # adds nothing to row 0, and keeps the tokens' places in the order of the sum
    compute = lambda: embedding_wgrad(dy, own, ctx.weight.shape[0])
    return (
        None,
        weight_grad("embedding", ctx, 1, ctx.weight, lambda g: embedding_wgrad_(g, dy, own), compute),
        None,
        None,
    )


_embedding_op = define(
    "parallel_embedding(Tensor ids, Tensor weight, int first, str group_name) -> Tensor",
    fake=lambda ids, weight, first, group_name: weight.new_empty((ids.shape[0], weight.shape[1])),
    compute=_embedding,
    setup_context=_embedding_setup,
    backward=_embedding_backward,
)


def parallel_embedding(
    ids: Tensor,  # [...] int64
    weight: Tensor,  # [rows, C]
    first: int,
    group: str,
) -> Tensor:  # [..., C]
    """`ops.embedding` of a vocabulary split over the ranks of a group; every rank gets all rows, and their gradient.

    Args:
        ids: any ids of the vocabulary, equal on all ranks.
        weight: this rank's rows, as many on every rank, of ids `first` and on.
        group: name of the group, from `register_group`.

    Raises:
        IndexError: an id that no rank has (CPU); on CUDA it is a row of zeros.
    """
    if is_dynamo_compiling() and has_main_grad(weight):
        return outside_graph("embedding", parallel_embedding, ids, weight, first, group)
    out: Tensor = _embedding_op(ids.reshape(-1), weight, first, group)
    return out.view(*ids.shape, weight.shape[1])


# ---- log-probabilities ---------------------------------------------------------------------------


def parallel_linear_logprob(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [n, C]
    targets: Tensor,  # [N] int64
    group: ProcessGroup,
    *,
    rows: Tensor | None = None,  # [N] int64
    temperature: float | Tensor = 1.0,  # or [N] fp32
    kept: Tensor | None = None,  # [N, ceil(V/32)] int32
    vocabulary: int | None = None,
) -> LogProb:  # logp, entropy, lse: [N] fp32
    """`ops.linear_logprob` with the head's rows split over the ranks of a group; every rank gets all results.

    Every rank holds the whole input gradient, and the weight gradient of its rows. The gradients of the results are
    equal on all ranks.

    Args:
        hidden, targets, rows, temperature, kept: as in `ops.linear_logprob`, equal on all ranks.
        weight: this rank's rows, n on every rank, of entries rank * n and on. Its `main_grad`, where set, receives the
            gradient.
        group: R ranks; R divides C.
        vocabulary: V, the number of entries that have a probability, from 0; None: R * n.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as `ops.linear_logprob`; or V exceeds R * n.
    """
    if is_dynamo_compiling() and has_main_grad(weight):
        options = {"rows": rows, "temperature": temperature, "kept": kept, "vocabulary": vocabulary}
        return outside_graph(
            "parallel_linear_logprob", parallel_linear_logprob, hidden, weight, targets, group, **options
        )
    check_tensors("parallel_linear_logprob", hidden=hidden, weight=weight, targets=targets)
    check(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1] and hidden.dtype == weight.dtype,
        lambda: (
            f"parallel_linear_logprob: hidden is {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} "
            f"{weight.dtype}; expected [T, C] and [n, C] of one dtype"
        ),
    )
    if rows is not None:
        check_rows("parallel_linear_logprob", rows)
        hidden = hidden.index_select(0, rows)
    inputs = _checked_inputs(
        "parallel_linear_logprob", "weight", hidden, weight.shape[0], targets, group, temperature, kept, vocabulary
    )
    return LogProb(*_LinearLogprob.apply(hidden, weight, inputs))


def parallel_logprob(
    logits: Tensor,  # [T, n]
    targets: Tensor,  # [T] int64
    group: ProcessGroup,
    *,
    temperature: float | Tensor = 1.0,  # or [T] fp32
    kept: Tensor | None = None,  # [T, ceil(V/32)] int32
    vocabulary: int | None = None,
) -> LogProb:  # logp, entropy, lse: [T] fp32
    """`ops.logprob` of logits whose vocabulary is split over the ranks of a group; every rank gets all results.

    Args:
        logits: this rank's entries, n on every rank, from rank * n on.
        targets, temperature, kept: as in `ops.logprob`, equal on all ranks.
        group, vocabulary: as in `parallel_linear_logprob`.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as `ops.logprob`; or V exceeds R * n.
    """
    check_tensors("parallel_logprob", logits=logits, targets=targets)
    check(logits.dim() == 2, lambda: f"parallel_logprob: logits is {tuple(logits.shape)}; expected [T, n]")
    inputs = _checked_inputs(
        "parallel_logprob", "logits", logits, logits.shape[1], targets, group, temperature, kept, vocabulary
    )
    return LogProb(*_Logprob.apply(logits, inputs))


@dataclass(frozen=True)
class _Inputs:
    """Checked arguments of tokens to score; this rank has the vocabulary's entries [first, first + columns)."""

    targets: Tensor
    inverse: Tensor | None  # [T] fp32, 1 / temperature
    kept: Tensor | None
    group: ProcessGroup
    columns: int
    vocabulary: int

    @property
    def first(self) -> int:
        return self.columns * self.group.rank()

    def blocks(self, start: int, stop: int) -> Iterator[slice]:
        """Tokens whose logits are exchanged together, a multiple of the number of ranks except at the end."""
        ranks = self.group.size()
        step = max(1, BLOCK // (ranks * ranks * self.columns)) * ranks
        return (slice(i, min(i + step, stop)) for i in range(start, stop, step))

    def of_rows(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Targets, inverse temperatures and masks of some tokens."""
        part = lambda t: None if t is None else t[rows]
        return self.targets[rows], part(self.inverse), part(self.kept)


def _checked_inputs(
    op: str,
    name: str,
    states: Tensor,
    columns: int,
    targets: Tensor,
    group: ProcessGroup,
    temperature: float | Tensor,
    kept: Tensor | None,
    vocabulary: int | None,
) -> _Inputs:
    """The checked arguments. `name` is the argument whose `columns` entries of the vocabulary this rank holds."""
    held = columns * group.size()
    vocabulary = held if vocabulary is None else vocabulary
    check(
        0 < vocabulary <= held,
        lambda: f"{op}: vocabulary is {vocabulary}; expected 1 to {held}, the entries of {group.size()} ranks",
    )
    check_vocabulary(op, name, vocabulary)
    check_targets(op, targets, states.shape[0])
    check_kept(op, kept, states.shape[0], vocabulary)
    inverse = inverse_temperature(op, temperature, states)
    check_values(op, targets, vocabulary, inverse)  # on every rank: one alone would leave the others waiting
    return _Inputs(targets, inverse, kept, group, columns, vocabulary)


def _whole_rows(z: Tensor, group: ProcessGroup) -> Tensor:  # [B, n] -> [ceil(B / R), R * n]
    """Whole rows of the r-th part of the tokens, on rank r; the last rows may be padding."""
    ranks, (tokens, n) = group.size(), z.shape
    padded = torch.nn.functional.pad(z, (0, 0, 0, -tokens % ranks))
    return all_to_all(padded.view(ranks, -1, n), group).transpose(0, 1).reshape(-1, ranks * n)


def _forward(inputs: _Inputs, logits: Callable[[slice], Tensor], tokens: int, device: torch.device) -> list[Tensor]:
    """logp, entropy, lse [T] and stats [T, 2] from this rank's columns of the logits of given tokens."""
    group = inputs.group
    found = [torch.empty(0, 5, dtype=torch.float32, device=device)]
    for block in inputs.blocks(0, tokens):
        rows = _whole_rows(logits(block), group)
        start = min(block.start + group.rank() * len(rows), block.stop)
        mine = slice(start, min(start + len(rows), block.stop))
        whole = rows[: mine.stop - mine.start, : inputs.vocabulary]
        logp, entropy, lse, stats = logprob_unchecked(whole, *inputs.of_rows(mine))
        results = torch.cat((logp[:, None], entropy[:, None], lse[:, None], stats), 1)
        padded = torch.nn.functional.pad(results, (0, 0, 0, len(rows) - len(results)))
        found.append(gather(padded, group).view(-1, 5)[: block.stop - block.start])
    logp, entropy, lse, *stats = torch.cat(found).unbind(1)
    return [logp.contiguous(), entropy.contiguous(), lse.contiguous(), torch.stack(stats, 1)]


def _dlogits(
    inputs: _Inputs,
    z: Tensor,  # [B, n]
    rows: slice,
    stats: Tensor,  # [T, 2]
    entropy: Tensor,  # [T]
    dlogp: Tensor | None,  # [T]
    dentropy: Tensor | None,  # [T]
) -> Tensor:  # [B, n]
    """Gradient of this rank's columns z of the logits of tokens `rows`."""
    targets, inverse, kept = inputs.of_rows(rows)
    up = [None if g is None else g[rows] for g in (dlogp, dentropy)]
    columns = max(0, min(inputs.columns, inputs.vocabulary - inputs.first))  # that have a probability
    if kept is not None:  # a row whose target was dropped has no gradient
        word = kept.gather(1, targets[:, None] >> 5)[:, 0]
        dropped = (word >> (targets & 31)) & 1 == 0
        up = [None if g is None else g.masked_fill(dropped, 0) for g in up]
    dz = logprob_dgrad(z, targets - inputs.first, inverse, None, stats[rows], entropy[rows], *up)
    dz[:, columns:] = 0
    if kept is not None:
        mask = ops.unpack_kept(kept, inputs.vocabulary)[:, inputs.first : inputs.first + columns]
        dz[:, :columns].masked_fill_(~mask, 0)
    return dz


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, inputs: _Inputs) -> tuple[Tensor, ...]:
        logp, entropy, lse, stats = _forward(inputs, lambda rows: logits[rows], logits.shape[0], logits.device)
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(logits, stats, entropy)
        return logp, entropy, lse

    @staticmethod
    @partial(once_differentiable, "parallel_logprob")
    def backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if dlogp is None and dentropy is None:
            return None, None
        logits, stats, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        for block in ctx.inputs.blocks(0, len(logits)):
            out[block] = _dlogits(ctx.inputs, logits[block], block, stats, entropy, dlogp, dentropy)
        return out, None


class _LinearLogprob(torch.autograd.Function):
    """Saves no logits: the backward computes this rank's columns again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, inputs: _Inputs) -> tuple[Tensor, ...]:
        logits = lambda rows: ops.linear(hidden[rows], weight, out_dtype=torch.float32)
        logp, entropy, lse, stats = _forward(inputs, logits, hidden.shape[0], hidden.device)
        ctx.inputs, ctx.weight = inputs, weight
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(hidden, weight, stats, entropy)
        return logp, entropy, lse

    @staticmethod
    @partial(once_differentiable, "parallel_linear_logprob")
    def backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dlogp is None and dentropy is None:
            return None, None, None
        hidden, weight, stats, entropy = ctx.saved_tensors
        inputs: _Inputs = ctx.inputs
        needs_weight, main_grad = gradient_target("parallel_linear_logprob", ctx, 1, ctx.weight)
        total = main_grad
        if needs_weight and total is None:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weights = None if dhidden is None else columns_of_all_rows(weight, [weight.shape[0]], inputs.group)
        for start in range(0, len(hidden), WGRAD_TOKENS):
            rows = slice(start, min(start + WGRAD_TOKENS, len(hidden)))
            dz = torch.empty(rows.stop - rows.start, len(weight), dtype=weight.dtype, device=weight.device)
            for block in inputs.blocks(rows.start, rows.stop):
                z = ops.linear(hidden[block], weight, out_dtype=torch.float32)
                own = dz[block.start - start : block.stop - start]
                own.copy_(_dlogits(inputs, z, block, stats, entropy, dlogp, dentropy))
                if dhidden is not None and weights is not None:
                    dhidden[block] = over_columns(own, weights, [len(weight)], inputs.group, _dhidden)
            if total is not None:
                with main_grad_lock:
                    linear_wgrad_(total, dz, hidden[rows])
        dweight = None if total is None or total is main_grad else total.to(weight.dtype)
        return dhidden, dweight, None


def _dhidden(dz: Tensor, weight: Tensor) -> Tensor:  # [B, V], [V, K] -> [B, K]
    """Input gradient in the order of `ops.linear_logprob`."""
    chunk = LOGPROB_DGRAD_CHUNK if dz.is_cuda else len(weight)
    total: Tensor | None = None
    for columns, rows in zip(dz.split(chunk, 1), weight.split(chunk), strict=True):
        part = ops.linear(columns, rows.t(), out_dtype=torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dz.dtype)
