"""pass@k against its definition: the share of all subsets of k completions that hold a solved one."""

from __future__ import annotations

import itertools

import pytest

from rlkernel.data.errors import InputError
from rlkernel.training.config import resolve
from rlkernel.training.evaluation import pass_at_k, pass_rates


def test_pass_at_k_is_the_share_of_subsets_with_a_solution() -> None:
    for samples, solved in itertools.product(range(1, 7), range(7)):
        for k in range(1, samples + 1) if solved <= samples else ():
            subsets = list(itertools.combinations([i < solved for i in range(samples)], k))
            assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_rates_are_means_over_prompts() -> None:
    rewards = [1.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert pass_rates(rewards, 4, [1, 4], 1.0) == {"pass@1": 0.125, "pass@4": 0.5}
    assert pass_rates(rewards, 4, [1], 0.1) == {"pass@1": 0.25} and pass_rates(rewards, 4, [], 1.0) == {}
    dropped = [None, None, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert pass_rates(dropped, 4, [1, 2, 4], 1.0) == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 0.0}
    assert pass_rates([None, 0.0], 2, [1, 2], 1.0) == {"pass@1": 0.0}


def test_settings_that_cannot_estimate_it_are_refused() -> None:
    with pytest.raises(InputError, match=r"gives the same completion 4 times; set eval\.temp"):
        resolve("grpo", overrides=["eval.samples=4", "eval.temperature=0"])
    with pytest.raises(InputError, match=r"eval\.pass_at=\[1, 8\] needs eval\.samples=8 or more"):
        resolve("grpo", overrides=["eval.samples=4", "eval.temperature=1", "eval.pass_at=[1, 8]"])
