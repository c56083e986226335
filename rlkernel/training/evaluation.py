"""pass@k of held-out prompts, from several completions of each."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that at least one of `k` completions solves the prompt, estimated from `samples` >= k of them.

    The estimator 1 - C(samples - solved, k) / C(samples, k) is unbiased (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1).
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def pass_rates(rewards: Sequence[float | None], samples: int, ks: Sequence[int], solved_at: float) -> dict[str, float]:
    """pass@k for each `k`, averaged over the prompts, with keys such as "pass@4".

    Args:
        rewards: of all completions, the `samples` of one prompt next to each other. One without a reward (None) is
            not counted; a prompt with fewer than k rewards is left out of pass@k.
        solved_at: a completion with at least this reward solves its prompt.
    """
    prompts = [[r for r in rewards[i : i + samples] if r is not None] for i in range(0, len(rewards), samples)]
    rates = {}
    for k in ks:
        of_prompts = [pass_at_k(len(p), sum(r >= solved_at for r in p), k) for p in prompts if len(p) >= k]
        if of_prompts:
            rates[f"pass@{k}"] = math.fsum(of_prompts) / len(of_prompts)
    return rates
