"""Held-out rows, and the order in which rows are drawn; both depend on the data and the seed only."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import TypeVar

from rlkernel.data.files import Row

T = TypeVar("T")


def prompt_key(row: Row) -> str:
    """Text that is equal for rows with equal prompts."""
    return json.dumps(row["prompt"], sort_keys=True)


def count_prompts(rows: list[Row]) -> int:
    """Number of different prompts."""
    return len({prompt_key(row) for row in rows})


def split_heldout(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): `count` rows drawn with a fixed seed, both parts in the file's order.

    The training part has no row whose prompt was drawn, duplicates included.
    """
    if count <= 0:
        return rows, []
    drawn = sorted(random.Random(0).sample(range(len(rows)), min(count, len(rows))))
    heldout = [rows[i] for i in drawn]
    kept_out = {prompt_key(row) for row in heldout}
    return [row for row in rows if prompt_key(row) not in kept_out], heldout


def shuffled(items: list[T], seed: int) -> Iterator[T]:
    """Endless stream over the items, each pass in a new order that depends on the seed only."""
    generator = random.Random(seed)
    while True:
        order = list(range(len(items)))
        generator.shuffle(order)
        for i in order:
            yield items[i]
