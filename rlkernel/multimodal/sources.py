"""Opens image files, and checks images and frames before a processor sees them. Needs Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
"""Largest image that is decoded; a processor resizes it to a small share of that."""


def open_image(source: str | Path | bytes, *, sample: str, index: int = 0, max_pixels: int = MAX_PIXELS) -> Image:
    """Decodes an image as RGB. Its size is checked before its pixels are decoded.

    Args:
        source: a path, or the bytes of a file.
        sample, index: for messages: the sample, and the number of the image in it.

    Raises:
        ValueError: the file is missing or corrupt, or the image is empty or larger than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError

    where = f"sample {sample!r}, image {index}"
    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),  # max_pixels decides
            Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image,
        ):
            check_size(*image.size, where=where, max_pixels=max_pixels)
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
        unknown = isinstance(error, UnidentifiedImageError)  # whose own words are the address of a buffer
        words = "no image format that Pillow knows, or no pixels" if unknown else error
        raise ValueError(f"{where}: {name} cannot be decoded ({words}); replace the file, or drop the sample") from None


def check_size(width: int, height: int, *, where: str, max_pixels: int = MAX_PIXELS) -> None:
    """Raises ValueError if an image is empty or larger than `max_pixels`; `where` begins the message."""
    if width <= 0 or height <= 0:
        raise ValueError(f"{where}: the image has {width}x{height} pixels; replace it, or drop the sample")
    if width * height > max_pixels:
        raise ValueError(
            f"{where}: the image has {width}x{height} pixels, more than {max_pixels}; resize it, or raise max_pixels"
        )


def check_frames(frames: Sequence[Any], *, sample: str, index: int = 0, max_pixels: int = MAX_PIXELS) -> None:
    """Raises ValueError if a video has no frames, or frames [H, W, 3] of different, empty or too large sizes."""
    where = f"sample {sample!r}, video {index}"
    if len(frames) == 0:
        raise ValueError(f"{where}: the video has no frames; check the sampling rate and the file")
    sizes = [tuple(getattr(f, "shape", None) or (*f.size[::-1], 3))[:2] for f in frames]
    check_size(*sizes[0][::-1], where=f"{where}, frame 0", max_pixels=max_pixels)
    other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise ValueError(f"{where}: frame {other} is {sizes[other]}, frame 0 {sizes[0]}; resize frames to one size")
