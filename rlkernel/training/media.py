"""Prompts with images: the placeholder of each image becomes the ids of its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel import multimodal
from rlkernel.data import images
from rlkernel.data.contents import WHERE
from rlkernel.data.errors import InputError
from rlkernel.data.files import Row
from rlkernel.models.media import Medium
from rlkernel.models.vision_decoder import VisionDecoder
from rlkernel.multimodal import Modality, MultimodalBatch, ProcessorFingerprint, compare_layout, mrope_positions
from rlkernel.multimodal.build import Row as LayoutRow
from rlkernel.multimodal.build import build_batch


@dataclass(frozen=True)
class Prompt:
    """A row of the data with its prompt's token ids, and the media that these name."""

    row: Row
    ids: list[int]
    media: tuple[Medium, ...] = ()


class ImagePrompts:
    """Puts the images of rows into their prompts.

    Args:
        model: its media table receives the images.
        images_of: the images of a row, in the order of their placeholders.
    """

    def __init__(self, model: VisionDecoder, images_of: Callable[[Row], list[Any]]):
        self.table, self.images_of = model.media, images_of
        self.placeholder = model.multimodal.image_token_id
        vision = model.multimodal.vision
        self.sizes = (vision.patch_size, vision.merge_size, vision.temporal_patch_size)
        self.processor = ProcessorFingerprint("rlkernel.data.images", images.settings(*self.sizes))

    def __call__(self, row: Row, ids: list[int]) -> tuple[list[int], tuple[Medium, ...]]:
        """The prompt's ids with media ids, and its media, which live as long as they are held.

        Raises:
            InputError: the row has another number of images than placeholders, or an image that does not fit.
        """
        where = row.get(WHERE, "prompt of the built-in task")
        given, wanted = self.images_of(row), ids.count(self.placeholder)
        if len(given) != wanted:
            raise InputError(
                f"{where}: the prompt has {wanted} image placeholders and the row {len(given)} images; give one of each"
            )
        media: list[Medium] = []
        for i, image in enumerate(given):
            try:
                patches, grid = images.patches_of(image, *self.sizes)
            except ValueError as error:
                raise InputError(f"{where}: image {i}: {error}") from None
            media.append(self.table.register(torch.from_numpy(patches), grid, self.processor))
        left = iter(media)
        out: list[int] = []
        for token in ids:
            out += self.table.ids(next(left)) if token == self.placeholder else [token]
        return out, tuple(media)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Compares the layout that the engine computes with the one that follows from text, grids and the rules of
        mrope: tokens, spans and positions.

        Raises:
            InputError: they differ; the message names the first span.
        """
        batches = [self._batch(prompts, positions) for positions in (self._of_engine, None)]
        layout = compare_layout(*batches)
        if layout.findings:
            raise InputError(f"the layout of rollout and training differs: {layout.findings[0]}")

    def _of_engine(self, prompt: Prompt) -> Tensor:  # [3, L]
        return torch.from_numpy(self.table.axes(np.asarray(prompt.ids)))

    def _batch(self, prompts: Sequence[Prompt], positions: Callable[[Prompt], Tensor] | None) -> MultimodalBatch:
        rows = []
        for prompt in prompts:
            ids = torch.tensor(prompt.ids)
            ids[ids >= self.table.vocab_size] = self.placeholder
            media = [multimodal.Medium(Modality.IMAGE, m.grid, m.key) for m in prompt.media]
            known = None if positions is None else positions(prompt)
            rows.append(LayoutRow(ids, (ids == self.placeholder).long(), media, positions=known))
        batch = build_batch(rows, fingerprint=self.processor, merge_size=self.table.config.merge_size)
        multimodal.validate(batch)
        return batch if positions is not None else replace(batch, positions=mrope_positions(batch))
