"""Pixels of images as the patches that Qwen's vision encoders read. Resizing and decoding are the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN = STD = 0.5
"""Pixels of 0 to 1 minus MEAN, over STD: the normalisation of Qwen3-VL."""


def settings(patch: int, merge: int, frames: int) -> dict[str, Any]:
    """What decides the patches of an image, for the processor's fingerprint."""
    return {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames, "mean": MEAN, "std": STD}


def patches_of(
    image: Image, patch: int, merge: int, frames: int
) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """Patches [h w, 3 frames patch^2] fp32 of an image, and its grid (1, h, w).

    The order is that of transformers' Qwen2VLImageProcessor: merged blocks by rows, the patches of a block, then
    channel, frame, row and column. An image is `frames` equal frames.

    Raises:
        ValueError: its sides are not positive multiples of patch * merge.
    """
    width, height = image.size
    side = patch * merge
    if width < side or height < side or width % side or height % side:
        raise ValueError(f"an image has {width} x {height} pixels; resize both sides to positive multiples of {side}")
    pixels = (np.asarray(image.convert("RGB"), np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    h, w = height // patch, width // patch
    blocks = pixels.reshape(h // merge, merge, patch, w // merge, merge, patch, 3)
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3, 1, patch, patch)
    return np.repeat(ordered, frames, axis=2).reshape(h * w, -1), (1, h, w)
