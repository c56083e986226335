"""Images as input ids: `vocab_size + row` is a row of the features of all registered media.

A prompt's ids therefore name its media: equal prompts with other images share no page of a prefix cache, and batches,
requests and trajectories need no other field. `MediaTable` computes a medium's features once until the weights change.
A temporal patch of a Qwen3-VL video is a medium like an image: the text of its timestamp stands before its ids.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel.models.vision import Features, Grid, MediaError, check_grids, num_features
from rlkernel.models.vision_config import VisionConfig
from rlkernel.multimodal import ProcessorFingerprint, digest_of_pixels

Encode = Callable[[Sequence[Tensor], Sequence[Grid]], Features]
"""The encoder, on the patches and the grid of each medium."""


@dataclass(eq=False)
class Medium:
    """One image, or one temporal patch of a video. The table refers to it weakly: keep it while its ids are in use.

    Attributes:
        key: see `ProcessorFingerprint.key`.
        first: its first row; its ids are vocab_size + first and the following.
        count: number of features.
        patches: [N, patch_elements], on the CPU.
    """

    key: str
    first: int
    count: int
    patches: Tensor
    grid: Grid


@dataclass
class MediaStats:
    """Media whose features were computed, and uses of features that were known, since the table was created."""

    computed: int = 0
    reused: int = 0


class _Registry:
    """Media by key and by first row, shared by the copies of a model, whose input ids are the same."""

    def __init__(self) -> None:
        self.by_key: weakref.WeakValueDictionary[str, Medium] = weakref.WeakValueDictionary()
        self.by_first: weakref.WeakValueDictionary[int, Medium] = weakref.WeakValueDictionary()
        self.next = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Registry:
        return self


class MediaTable:
    """The media that a model's input ids can name, and their features with its current weights.

    Args:
        config: the encoder.
        vocab_size: of the text model; the first id of a feature.
        encode: the encoder, on the model's device.
    """

    def __init__(self, config: VisionConfig, vocab_size: int, encode: Encode) -> None:
        self.config, self.vocab_size, self.encode = config, vocab_size, encode
        self.stats = MediaStats()
        self._media = _Registry()
        self._known: weakref.WeakKeyDictionary[Medium, Features] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> MediaTable:
        made = MediaTable(self.config, self.vocab_size, copy.deepcopy(self.encode, memo))
        made._media = self._media
        return made

    @property
    def limit(self) -> int:
        """Input ids are below it."""
        return self.vocab_size + self._media.next

    def register(self, patches: Tensor, grid: Grid, processor: ProcessorFingerprint) -> Medium:
        """The medium of these pixels; the known one if it is registered.

        Raises:
            MediaError: patches and grid do not fit, the grid has several temporal patches, or there are no ids left,
                which are not used again because a prefix cache may hold keys under them.
        """
        check_grids(self.config, [grid], patches)
        if grid[0] != 1:
            raise MediaError(
                f"a medium has {grid[0]} temporal patches; register each as a medium of grid {(1, *grid[1:])}, with "
                "its timestamp before its ids (Qwen3-VL). Videos of Qwen2.5-VL need transformers or vLLM"
            )
        key = processor.key(digest_of_pixels(patches), grid)
        known = self._media.by_key.get(key)
        if known is not None:
            return known
        medium = Medium(key, self._media.next, num_features(self.config, grid), patches, grid)
        if self.limit + medium.count > 1 << 31:
            raise MediaError(
                f"ids are int32, and {self._media.next:,} features have had one in this process; go on in a new one "
                "(`rlkernel train --resume auto`)"
            )
        self._media.next += medium.count
        self._media.by_key[key] = self._media.by_first[medium.first] = medium
        return medium

    def ids(self, medium: Medium) -> list[int]:
        """Input ids of a medium's features."""
        return list(range(self.vocab_size + medium.first, self.vocab_size + medium.first + medium.count))

    def forget(self) -> None:
        """Drops all features, because the encoder's weights have changed."""
        self._known.clear()

    def of_rows(self, rows: npt.NDArray[Any]) -> list[Medium]:
        """The media that contain these rows, ascending.

        Raises:
            MediaError: a row's medium is no longer held.
        """
        firsts = np.fromiter(sorted(self._media.by_first), np.int64)
        found = np.searchsorted(firsts, np.unique(rows), side="right") - 1
        media = [self._media.by_first[int(firsts[i])] for i in np.unique(found) if i >= 0]
        covered = sum(int(((rows >= m.first) & (rows < m.first + m.count)).sum()) for m in media)
        if covered != len(rows):
            raise MediaError("a prompt names media that were dropped; keep its Medium objects while it is in use")
        return media

    def features(self, media: Sequence[Medium]) -> Features:
        """Features of the media, in their order. With gradients enabled the encoder runs, once for all; without, only
        on media whose features are not known. The bits are the same."""
        if torch.is_grad_enabled():
            self.stats.computed += len(media)
            return self.encode([m.patches for m in media], [m.grid for m in media])
        missing = [m for m in media if m not in self._known]
        self.stats.computed += len(missing)
        self.stats.reused += len(media) - len(missing)
        if missing:
            found = self.encode([m.patches for m in missing], [m.grid for m in missing])
            counts = [m.count for m in missing]
            levels = [level.split(counts) for level in found.deepstack]
            for i, (medium, merged) in enumerate(zip(missing, found.merged.split(counts), strict=True)):
                self._known[medium] = Features(merged.clone(), tuple(level[i].clone() for level in levels))
        known = [self._known[m] for m in media]
        levels_of = zip(*(one.deepstack for one in known), strict=True)
        return Features(torch.cat([one.merged for one in known]), tuple(torch.cat(level) for level in levels_of))

    def axes(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:  # [L] -> [3, L]
        """Positions in time, height and width of a sequence's tokens, as `multimodal.mrope_positions` counts them.

        Raises:
            MediaError: a medium was dropped, or its ids are not in order from the first. Only the sequence's end may
                cut them.
        """
        rows = ids.astype(np.int64) - self.vocab_size
        out = np.empty((3, len(ids)), np.int64)
        at = position = 0
        while at < len(ids):
            if rows[at] < 0:
                text = rows[at:] >= 0
                count = int(text.argmax()) if text.any() else len(ids) - at
                out[:, at : at + count] = position + np.arange(count)
                position += count
            else:
                (medium,) = self.of_rows(rows[at : at + 1])
                h, w = (n // self.config.merge_size for n in medium.grid[1:])
                count = min(medium.count, len(ids) - at)
                if (rows[at : at + count] != medium.first + np.arange(count)).any():
                    raise MediaError(
                        f"tokens {at} to {at + count - 1} are not the ids of one medium in their order; put "
                        "`MediaTable.ids` of each medium into the prompt as they are"
                    )
                out[:, at : at + count] = position + np.indices((1, h, w)).reshape(3, -1)[:, :count]
                position = int(out[:, at : at + count].max()) + 1
            at += count
        return out
