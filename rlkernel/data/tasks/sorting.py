"""Sorting ten numbers, with the steps of an insertion sort as scratch work."""

from __future__ import annotations

import random
from typing import Any

from rlkernel.data.tasks.scratch import MARK, ScratchTask, answer_of

_NUMBERS = 10


class Sorting(ScratchTask):
    """`52 17 93=` has the answer `17 52 93`; the scratch work is the sorted list after each number: `52,17 52,`..."""

    name = "sorting"
    alphabet = "0123456789 =,#"
    columns = ("numbers",)
    longest = 3 * _NUMBERS * (_NUMBERS + 1) // 2 + 3 * _NUMBERS + 2

    def draw(self, rng: random.Random) -> dict[str, Any]:
        numbers = [rng.randint(10, 99) for _ in range(_NUMBERS)]
        return {"prompt": f"{_joined(numbers)}=", "numbers": numbers}

    def demonstrate(self, row: dict[str, Any], rng: random.Random) -> str:
        numbers = row["numbers"]
        scratch = ""
        if rng.random() < 0.5:
            scratch = ",".join(_joined(sorted(numbers[: i + 1])) for i in range(len(numbers)))
        return scratch + MARK + _joined(sorted(numbers))

    def is_right(self, completion: str, row: dict[str, Any]) -> bool:
        return answer_of(completion) == _joined(sorted(row["numbers"]))


def _joined(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
