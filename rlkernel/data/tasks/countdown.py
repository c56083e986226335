"""Countdown: reach a target from four numbers, one operation at a time.

The game of Gandhi et al., "Stream of Search" (2024), and of TinyZero. The demonstrations are solutions without the
search: from them a model learns to write valid steps, and from the reward to reach the target.
"""

from __future__ import annotations

import random
import re
from typing import Any

from rlkernel.data.tasks.scratch import ScratchTask

_NUMBERS = 4
_LARGEST = 99
_STEP = re.compile(r"(\d{1,4})([+\-*])(\d{1,4})=(\d{1,4})")


class Countdown(ScratchTask):
    """`3 7 12 5>38=` is solved by `3*7=21,12+5=17,21+17=38`, because the last result is the target.

    Each step takes two of the numbers that are left and puts back their sum, difference or product, which must not be
    negative. Numbers may be left over.
    """

    name = "countdown"
    alphabet = "0123456789 >+-*=,"
    columns = ("numbers", "target")
    longest = 36

    def draw(self, rng: random.Random) -> dict[str, Any]:
        while True:
            numbers = [rng.randint(1, 25) for _ in range(_NUMBERS)]
            steps, target = _random_solution(numbers, rng)
            if 10 <= target <= _LARGEST and target not in numbers:
                return {"prompt": f"{' '.join(map(str, numbers))}>{target}=", "numbers": numbers, "target": target,
                        "solution": steps}  # fmt: skip

    def demonstrate(self, row: dict[str, Any], rng: random.Random) -> str:
        return str(row["solution"])

    def is_right(self, completion: str, row: dict[str, Any]) -> bool:
        left = list(row["numbers"])
        result = None
        for step in completion.split(","):
            match = _STEP.fullmatch(step)
            if match is None:
                return False
            a, b, result = int(match[1]), int(match[3]), int(match[4])
            for number in (a, b):
                if number not in left:
                    return False
                left.remove(number)
            if result != _apply(a, match[2], b):
                return False
            left.append(result)
        return result == row["target"]


def _apply(a: int, operation: str, b: int) -> int:
    return a + b if operation == "+" else a - b if operation == "-" else a * b


def _random_solution(numbers: list[int], rng: random.Random) -> tuple[str, int]:
    """Steps that use all numbers in a random order with random operations, and their last result."""
    left, steps = list(numbers), []
    while len(left) > 1:
        rng.shuffle(left)
        a, b = max(left[:2]), min(left[:2])
        operation = rng.choice("+-*") if a * b <= 200 else rng.choice("+-")
        result = _apply(a, operation, b)
        steps.append(f"{a}{operation}{b}={result}")
        left = [*left[2:], result]
    return ",".join(steps), left[0]
