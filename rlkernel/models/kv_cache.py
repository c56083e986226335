"""The paged key/value cache: two tensors of pages per layer, addressed by block tables.

A page holds `page_size` consecutive tokens of one sequence. Page size and choice of pages change no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.models.config import ModelConfig


class KVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: for each layer a tensor [pages, page_size, HK, D], initially zero, because an unused slot must not be NaN.
    """

    k: list[Tensor]
    v: list[Tensor]

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates the cache.

        Args:
            config: the model's configuration.
            num_pages, page_size: number of pages, and tokens per page.
            dtype: dtype of keys and values; default that of the model; another one changes the results.
            device: device of the cache.

        Raises:
            ValueError: a size is not positive.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"KVCache: num_pages={num_pages} and page_size={page_size} must be positive")
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype = dtype or config.dtype
        shape = (2, config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        storage = torch.zeros(shape, dtype=self.dtype, device=device)
        self.k, self.v = list(storage[0].unbind(0)), list(storage[1].unbind(0))

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of one page: keys and values of all layers."""
        elements = 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim
        return elements * (dtype or config.dtype).itemsize
