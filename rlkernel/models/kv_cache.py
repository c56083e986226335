"""The paged key/value cache: two tensors of pages per layer, addressed by block tables.

A page holds `page_size` consecutive tokens of one sequence. Page size and choice of pages change no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.models.config import ModelConfig


class KVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: for each layer a tensor [pages, page_size, HK, D], initially zero, because an unused slot must not be NaN;
            no tensor after `release`.
        num_pages, page_size: number of pages, and tokens per page.
    """

    k: list[Tensor]
    v: list[Tensor]
    num_pages: int

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        memory: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Allocates the cache.

        Args:
            config: the model's configuration.
            num_pages, page_size: number of pages, and tokens per page.
            dtype: dtype of keys and values; default that of the model; another one changes the results.
            device: device of the cache.
            memory: returns at least this many zeroed bytes on the device as a uint8 tensor; default torch's allocator.

        Raises:
            ValueError: a size is not positive.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"KVCache: num_pages={num_pages} and page_size={page_size} must be positive")
        self.page_size, self.dtype = page_size, dtype or config.dtype
        self._config = config
        self._memory = memory or (lambda size: torch.zeros(size, dtype=torch.uint8, device=device))
        self.allocate(num_pages)

    def allocate(self, num_pages: int) -> None:
        """Allocates `num_pages` zeroed pages in place of the present ones.

        Raises:
            torch.OutOfMemoryError: the memory does not suffice; the cache then has no pages.
        """
        self.release()
        config, size = self._config, num_pages * self.page_bytes(self._config, self.page_size, self.dtype)
        shape = (2, config.num_layers, num_pages, self.page_size, config.num_kv_heads, config.head_dim)
        storage = self._memory(size)[:size].view(self.dtype).view(shape)
        self.k, self.v = list(storage[0].unbind(0)), list(storage[1].unbind(0))
        self.num_pages = num_pages

    def release(self) -> None:
        """Drops all pages."""
        self.k, self.v, self.num_pages = [], [], 0

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of one page: keys and values of all layers."""
        elements = 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim
        return elements * (dtype or config.dtype).itemsize
