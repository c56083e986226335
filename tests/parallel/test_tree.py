"""`tree_sum` and `TreeSum`: one balanced tree, for leaves together and one after another."""

from __future__ import annotations

import pytest
import torch

from rlkernel.contract import assert_bitwise
from rlkernel.parallel.tree import TreeSum, tree_sum


@pytest.mark.parametrize("count", (1, 2, 4, 8, 16))
def test_leaves_and_subtrees(count: int) -> None:
    torch.manual_seed(count)
    leaves = list(torch.randn(count, 1000))
    expected = tree_sum(leaves)
    for ranks in (r for r in (1, 2, 4, 8) if count % r == 0):
        total = TreeSum()
        for round_start in range(0, count, ranks):
            total.push(tree_sum(leaves[round_start : round_start + ranks]), owned=False)
        assert_bitwise(total.result(), expected, f"{count} leaves on {ranks} ranks")


@pytest.mark.parametrize("count", (3, 6, 12, 20))
def test_counts_that_are_no_power_of_two(count: int) -> None:
    leaves = list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(count)))
    found = []
    for ranks in (r for r in (1, 2, 4) if count % r == 0):
        total = TreeSum()
        for start in range(0, count, ranks):
            total.push(tree_sum(leaves[start : start + ranks]).clone())
        found.append(total.result())
    for other in found[1:]:
        assert_bitwise(other, found[0])
    torch.testing.assert_close(found[0], torch.stack(leaves).sum(0))


def test_the_tree() -> None:
    a, b, c, d = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    assert_bitwise(tree_sum([a, b, c, d]), (a + b) + (c + d))
    total = TreeSum()
    for leaf in (a, b, c):
        total.push(leaf, owned=False)
    assert_bitwise(total.result(), (a + b) + c)
    assert not torch.equal(tree_sum([a, b, c, d]), ((a + b) + c) + d)  # the control: another order, other bits
    assert tree_sum([a.bfloat16(), b.bfloat16()]).dtype == torch.float32


def test_refusals() -> None:
    with pytest.raises(ValueError, match="number of tensors is 3; expected a power of two"):
        tree_sum([torch.zeros(1)] * 3)
    with pytest.raises(ValueError, match="there are no leaves"):
        TreeSum().result()
