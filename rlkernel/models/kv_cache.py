"""The paged key/value cache: for each layer two tensors of pages, addressed by block tables.

A page holds `page_size` consecutive tokens of one sequence. Which pages a sequence gets, and the page size itself,
never change a bit of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.models.config import ModelConfig


class KVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: a tensor [pages, page_size, HK, D] for each layer. They start as zeros: an unused slot must never hold a
            NaN.
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
            num_pages, page_size: number of pages, and tokens a page.
            dtype: dtype of keys and values, default that of the model; another dtype is another number.
            device: where the cache lies.

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
        """Bytes that one page takes over all layers, keys and values together."""
        elements = 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim
        return elements * (dtype or config.dtype).itemsize
