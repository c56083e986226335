"""Rewards of sequences, turns and regions as advantages of scored tokens, and the constraint of a cost.

Compositions of elementwise fp32 torch ops in a fixed order: the same bits on every device, and no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernel.ops.checks import check, check_number, check_tensors
from rlkernel.ops.spans import known_tokens, scored_seqlens, seqlens_of_rows, span_rows, to_device


def token_rewards(
    loss_spans: Tensor,  # [K, 2] int64, on the CPU
    cu_seqlens: Tensor,  # [B + 1] int32
    *,
    sequence: Tensor | None = None,  # [B] fp32
    turns: Tensor | None = None,  # [K] fp32
    regions: tuple[Tensor, Tensor] | None = None,  # [R, 2] int64 on the CPU, [R] fp32
) -> Tensor:  # [N] fp32
    """The value of each scored token: its sequence's, plus its turn's, plus its region's, in that order.

    Pass rewards, or the advantages of `group_advantages` and `turn_advantages`; the result is the per-token
    `advantages` of `policy_loss(loss_spans=...)`.

    Args:
        loss_spans: the scored tokens, one span per turn, as in `linear_logprob`.
        cu_seqlens: offsets of the sequences among all T tokens; its device is that of the result.
        sequence: one value per sequence; add terms of verifiers and of length to it before.
        turns: one value per loss span.
        regions: spans inside the loss spans, such as the tokens of one box, and their values.

    Raises:
        ValueError: shapes do not fit, or a region is not scored. TypeError: not a tensor.
    """
    device = cu_seqlens.device
    rows = span_rows("token_rewards", loss_spans, known_tokens(cu_seqlens), torch.device("cpu"))
    total = torch.zeros(len(rows), dtype=torch.float32, device=device)
    if sequence is not None:
        check_tensors("token_rewards", sequence=sequence)
        _check_values("sequence", sequence, cu_seqlens.numel() - 1)
        begin = seqlens_of_rows(to_device(rows, device), cu_seqlens)
        index = torch.searchsorted(begin[1:], torch.arange(len(rows), device=device, dtype=torch.int32), right=True)
        total = total + sequence.index_select(0, index)
    if turns is not None:
        _check_values("turns", turns, len(loss_spans))
        total = total + turns.index_select(0, to_device(_span_of_row(loss_spans), device))
    if regions is not None:
        spans, values = regions
        _check_values("regions", values, len(spans))
        region_rows = span_rows("token_rewards regions", spans, None, torch.device("cpu"))
        at = torch.searchsorted(rows, region_rows)
        scored = rows[at.clamp(max=max(len(rows) - 1, 0))] == region_rows if len(rows) else region_rows < 0
        check(
            bool(scored.all()),
            lambda: f"token_rewards: region row {int(region_rows[~scored][0])} is in no loss span; pass scored tokens",
        )
        at, index = to_device(at, device), to_device(_span_of_row(spans), device)
        total = total.index_copy(0, at, total.index_select(0, at) + values.index_select(0, index))
    return total


def overlong_penalty(loss_spans: Tensor, cu_seqlens: Tensor, max_length: int, buffer: int) -> Tensor:  # [B] fp32
    """Length term of each sequence: 0 up to `max_length - buffer` scored tokens, then falling linearly to -1 at
    `max_length`.

    Raises:
        ValueError: not 0 < buffer <= max_length.

    Source:
        DAPO arXiv:2503.14476, equation 13.
    """
    check(
        0 < buffer <= max_length,
        lambda: f"overlong_penalty: buffer={buffer} must be positive and at most max_length={max_length}",
    )
    lengths = scored_seqlens(loss_spans, cu_seqlens).diff().float()
    return ((max_length - buffer - lengths) / torch.full_like(lengths, buffer)).clamp(-1.0, 0.0)


def turn_advantages(
    rewards: Tensor,  # [K] fp32
    turns: Sequence[int],  # B
    group_size: int,
    *,
    normalize_std: bool = True,
    eps: float = 1e-4,
) -> Tensor:  # [K] fp32
    """Advantages of turns: rewards are normalised over all turns of the group, then summed from each turn to the last.

    Equal rewards have advantage exactly 0. A group's advantages depend on that group alone.

    Args:
        rewards: one per turn, sequence by sequence, finite. Constants: no gradient.
        turns: number of turns of each sequence.
        group_size: sequences per prompt, divides B.
        normalize_std: False omits the division by the standard deviation (divisor n - 1, plus eps).

    Raises:
        ValueError: the numbers of turns do not fit the rewards, or B is not a multiple of group_size.

    Source:
        process supervision of GRPO, arXiv:2402.03300, section 4.1.3.
    """
    check_tensors("turn_advantages", rewards=rewards)
    _check_values("rewards", rewards, sum(turns))
    check(
        group_size >= 1 and len(turns) % group_size == 0,
        lambda: f"turn_advantages: group_size={group_size} must be positive and divide B={len(turns)}",
    )
    eps = check_number("turn_advantages", "eps", eps, "above 0, because a group of equal rewards divides by it")
    groups = [sum(turns[g : g + group_size]) for g in range(0, len(turns), group_size)]
    index, place = _ragged(groups, rewards.device)
    there, count = index < len(rewards), to_device(torch.tensor(groups, device="cpu"), rewards.device).unsqueeze(1)
    padded = torch.cat([rewards.detach(), rewards.new_zeros(1)]).take(index)
    difference = torch.where(there, padded - padded[:, :1], 0.0)  # of equal rewards exactly 0
    centred = torch.where(there, difference - _tree_sum(difference) / count.clamp(min=1), 0.0)
    if normalize_std:
        centred = centred / ((_tree_sum(centred * centred) / (count - 1).clamp(min=1)).sqrt() + eps)
    flat = centred.take(place)

    index, place = _ragged(turns, rewards.device)
    columns = list(torch.cat([flat, flat.new_zeros(1)]).take(index).unbind(1))
    for k in range(len(columns) - 2, -1, -1):  # from the last turn to the first
        columns[k] = columns[k] + columns[k + 1]
    return torch.stack(columns, 1).take(place)


def constrained_advantages(
    advantages: Tensor,  # [B] fp32
    cost_advantages: Tensor,  # [B] fp32
    multiplier: Tensor,  # scalar fp32
) -> Tensor:  # [B] fp32
    """Advantages of a reward under a constraint on a cost: `(A_reward - multiplier A_cost) / (1 + multiplier)`.

    `update_multiplier` raises the multiplier while the mean cost exceeds its limit.

    Args:
        advantages, cost_advantages: `group_advantages` of the rewards and of the costs, normalised separately.
        multiplier: 0-dim tensor, at least 0, on the device of the advantages. It is not read on the host.

    Raises:
        ValueError, TypeError: an argument is not a tensor of the shape and dtype above.

    Source:
        PPO-Lagrangian (Ray et al. 2019, Benchmarking Safe Exploration); Safe RLHF arXiv:2310.12773, equation 11.
    """
    check_tensors(
        "constrained_advantages", advantages=advantages, cost_advantages=cost_advantages, multiplier=multiplier
    )
    check(
        multiplier.dim() == 0,
        lambda: f"constrained_advantages: multiplier is {tuple(multiplier.shape)}; expected a 0-dim tensor",
    )
    _check_values("advantages", advantages, advantages.numel())
    _check_values("cost_advantages", cost_advantages, advantages.numel())
    weight = multiplier.detach().float()
    return (advantages - weight * cost_advantages) / (1.0 + weight)


def update_multiplier(
    multiplier: Tensor,  # scalar fp32
    costs: Tensor,  # [B] fp32
    limit: float,
    lr: float,
    largest: float = 100.0,
) -> Tensor:  # scalar fp32
    """The multiplier after a step of dual ascent: `clip(multiplier + lr (mean cost - limit), 0, largest)`.

    Raises:
        TypeError: not a tensor. ValueError: costs is not [B], or lr or largest is not positive.
    """
    check_tensors("update_multiplier", multiplier=multiplier, costs=costs)
    _check_values("costs", costs, costs.numel())
    lr, largest = (
        check_number("update_multiplier", name, value, "positive") for name, value in (("lr", lr), ("largest", largest))
    )
    total = _tree_sum(costs.detach().unsqueeze(0)).reshape(())
    mean = total / torch.full_like(total, costs.numel())  # torch multiplies by the reciprocal of a number on a GPU
    return (multiplier.detach().float() + lr * (mean - limit)).clamp(0.0, largest)


def _span_of_row(spans: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(spans), device="cpu"), spans.long().diff(dim=1).flatten())


def _check_values(name: str, x: Tensor, size: int) -> None:
    check(
        isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape == (size,),
        lambda: f"{name} is {tuple(x.shape)} {x.dtype}; expected [{size}] torch.float32",
    )


def _ragged(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of a padded matrix [rows, width] into sum(sizes) values and one zero, and that of the values into it.

    A row's own values come first, so that the padding changes no sum of `_tree_sum`.
    """
    lengths, width = torch.tensor(sizes, dtype=torch.int64, device="cpu"), max([1, *sizes])
    column = torch.arange(width, device="cpu").expand(len(sizes), -1)
    first = (lengths.cumsum(0) - lengths).unsqueeze(1)
    there = column < lengths.unsqueeze(1)
    index = torch.where(there, first + column, int(lengths.sum()))
    return to_device(index, device), to_device(torch.nonzero(there.flatten()).flatten(), device)


def _tree_sum(x: Tensor) -> Tensor:  # [rows, width] -> [rows, 1]
    """Sums of rows in a balanced binary tree, neighbours first; trailing zeros do not change a sum."""
    while x.shape[1] > 1:
        if x.shape[1] % 2:
            x = torch.cat([x, x.new_zeros(len(x), 1)], 1)
        x = x[:, ::2] + x[:, 1::2]
    return x
