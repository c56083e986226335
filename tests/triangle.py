"""A question of plane geometry made here: a drawn triangle, a question, a number as the answer."""

from __future__ import annotations

import math
import random
from typing import Any

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 128, 96
_MARGIN = 18
"""Pixels around the triangle, where the labels are."""


def triangle(seed: int) -> dict[str, Any]:
    """A row with `image` (RGB, 128 x 96 pixels), `question` and `answer`: two angles are labelled, x is the third.

    The same seed gives the same triangle; the pixels of the labels depend on Pillow's font.
    """
    rng = random.Random(f"triangle {seed}")
    left, right = rng.randint(40, 75), rng.randint(40, 75)  # degrees
    tangents = math.tan(math.radians(left)), math.tan(math.radians(right))
    apex = tangents[1] / sum(tangents)  # of the base, whose length is 1
    scale = min(WIDTH - 2 * _MARGIN, (HEIGHT - 2 * _MARGIN) / (apex * tangents[0]))
    x, y = (WIDTH - scale) / 2, HEIGHT - _MARGIN
    corners = [(x, y), (x + scale, y), (x + apex * scale, y - apex * tangents[0] * scale)]
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.polygon(corners, outline="black", width=2)
    for (x, y), label, anchor in zip(corners, (f"{left}°", f"{right}°", "x"), ("ra", "la", "mb"), strict=True):
        draw.text((x, y + (2 if anchor != "mb" else -2)), label, fill="black", anchor=anchor)
    return {"image": image, "question": "Find x, in degrees.", "answer": str(180 - left - right)}
