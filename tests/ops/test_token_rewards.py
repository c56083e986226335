"""Rewards to tokens, turn advantages, length penalty and the constraint of a cost."""

from __future__ import annotations

import pytest
import torch
from op_checks import rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise

SPANS = torch.tensor([[2, 4], [6, 7], [12, 15]])  # two turns of sequence 0, none of 1, one of 2
CU = torch.tensor([0, 8, 10, 16], dtype=torch.int32)


def test_terms_reach_their_tokens() -> None:
    sequence, turns = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0.5, 0.25, 2.0])
    regions = torch.tensor([[3, 4], [13, 15]]), torch.tensor([10.0, 20.0])
    values = ops.token_rewards(SPANS, CU, sequence=sequence, turns=turns, regions=regions)
    assert values.tolist() == [1.5, 11.5, 1.25, 5.0, 25.0, 25.0]
    assert ops.token_rewards(SPANS, CU).tolist() == [0.0] * 6
    assert ops.token_rewards(SPANS[:0], CU, sequence=sequence).tolist() == []
    with pytest.raises(ValueError, match="region row 4 is in no loss span"):
        ops.token_rewards(SPANS, CU, regions=(torch.tensor([[3, 5]]), torch.ones(1)))
    with pytest.raises(ValueError, match=r"turns is \(2,\)"):
        ops.token_rewards(SPANS, CU, turns=torch.ones(2))
    beyond = torch.tensor([[2, int(CU[-1]) + 1]])
    for call in (lambda: ops.token_rewards(beyond, CU), lambda: ops.overlong_penalty(beyond, CU, 8, 2)):
        with pytest.raises(ValueError, match=rf"span 0 is \[2, {int(CU[-1]) + 1}\], after row 0 of {int(CU[-1])};"):
            call()


def test_overlong_penalty() -> None:
    spans = torch.tensor([[0, 6], [6, 8], [20, 31]])
    cu = torch.tensor([0, 6, 18, 40], dtype=torch.int32)
    assert ops.overlong_penalty(spans, cu, 10, 5).tolist() == pytest.approx([-0.2, 0.0, -1.0])
    with pytest.raises(ValueError, match="buffer=11"):
        ops.overlong_penalty(spans, cu, 10, 11)


def _process_supervision(rewards: torch.Tensor, turns: list[int], group: int, eps: float) -> torch.Tensor:
    """The definition of arXiv:2402.03300, section 4.1.3, in fp64."""
    out = []
    parts = rewards.double().split(turns)
    for g in range(0, len(turns), group):
        mine = parts[g : g + group]
        every = torch.cat(mine)
        scale = every.std() + eps if len(every) > 1 else 1.0
        out += [((p - every.mean()) / scale).flip(0).cumsum(0).flip(0) for p in mine]
    return torch.cat(out)


def test_turn_advantages() -> None:
    turns = [3, 1, 0, 2, 5, 1]
    rewards = rand(0, sum(turns))
    found = ops.turn_advantages(rewards, turns, 2)
    assert torch.allclose(found.double(), _process_supervision(rewards, turns, 2, 1e-4), atol=1e-5)
    # a group alone has the same bits, also in a batch whose other groups have more turns
    for g in range(0, 6, 2):
        begin, mine = sum(turns[:g]), turns[g : g + 2]
        alone = ops.turn_advantages(rewards[begin : begin + sum(mine)], mine, 2)
        assert_bitwise(found[begin : begin + sum(mine)], alone, f"group {g // 2}")
    assert not torch.equal(found, _process_supervision(rewards, turns, 2, 1e-4).float())  # the comparison can fail
    assert ops.turn_advantages(torch.full((3,), 0.1), [1, 2], 2).tolist() == [0.0] * 3
    assert ops.turn_advantages(torch.zeros(0), [0, 0], 2).tolist() == []
    with pytest.raises(ValueError, match=r"rewards is \(11,\)"):
        ops.turn_advantages(rand(0, 11), turns, 2)
    with pytest.raises(ValueError, match="divide B=6"):
        ops.turn_advantages(rewards, turns, 4)


def test_constrained_advantages_hold_the_limit() -> None:
    """A bandit of two arms: the better reward costs more than the limit allows. Dual ascent finds the mixture."""
    gain, zero = ops.group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]), 4), torch.zeros(())
    assert_bitwise(ops.constrained_advantages(gain, rand(0, 4), zero), gain, "no constraint")
    assert (ops.constrained_advantages(gain, gain, torch.tensor(3.0))[0] < 0).item()
    share = {}
    for limit in (0.25, 2.0):  # the second never binds
        torch.manual_seed(0)
        logit, multiplier, late = torch.zeros((), requires_grad=True), torch.zeros(()), []
        optimizer = torch.optim.SGD([logit], lr=0.2)
        for step in range(500):
            arm = torch.bernoulli(torch.sigmoid(logit.detach()).expand(64))
            gain = ops.group_advantages(arm, 64)
            advantages = ops.constrained_advantages(gain, gain, multiplier)
            logp = torch.where(arm == 1, torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit))
            ops.policy_loss(logp, None, advantages, torch.arange(65, dtype=torch.int32)).loss.backward()
            optimizer.step(), optimizer.zero_grad()
            multiplier = ops.update_multiplier(multiplier, arm, limit, lr=0.05)
            late += [float(arm.mean())] if step >= 250 else []
        share[limit] = sum(late) / len(late)
        assert float(multiplier) >= 0
    assert abs(share[0.25] - 0.25) < 0.1 and share[2.0] > 0.9, share
    with pytest.raises(ValueError, match="expected a 0-dim tensor"):
        ops.constrained_advantages(gain, gain, torch.ones(1))
    with pytest.raises(ValueError, match="lr=-1"):
        ops.update_multiplier(zero, gain, 0.1, lr=-1.0)
