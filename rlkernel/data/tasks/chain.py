"""Multi-step arithmetic: sums and differences of five numbers, with the running total as scratch work."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

from rlkernel.data.tasks.scratch import MARK, ScratchTask, answer_of

_NUMBERS = 5


class Chain(ScratchTask):
    """`37+48-15+22-31=` has the answer 61; the scratch work is `85,70,92,61`, a running total per operation."""

    name = "chain"
    alphabet = "0123456789+-=,#"
    columns = ("terms",)
    longest = 5 * _NUMBERS + 5

    def draw(self, rng: random.Random) -> dict[str, Any]:
        terms = [rng.randint(1, 50)] + [rng.choice((-1, 1)) * rng.randint(1, 50) for _ in range(_NUMBERS - 1)]
        return {"prompt": f"{terms[0]}{''.join(f'{term:+d}' for term in terms[1:])}=", "terms": terms}

    def demonstrate(self, row: dict[str, Any], rng: random.Random) -> str:
        totals = [str(total) for total in accumulate(row["terms"])][1:]
        scratch = ",".join(totals) if rng.random() < 0.5 else ""
        return scratch + MARK + totals[-1]

    def is_right(self, completion: str, row: dict[str, Any]) -> bool:
        return answer_of(completion) == str(sum(row["terms"]))
