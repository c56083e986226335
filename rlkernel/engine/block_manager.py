"""Pages of the KV cache: reference counts, prefix cache, and least-recently-used eviction.

A full page may be registered under (parent node, token ids). It stays in the prefix cache after its last reference is
dropped, until it is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = 0
"""Chain node of the empty prefix."""


@dataclass
class CacheStats:
    """Counts since the manager was created."""

    hits: int = 0
    evictions: int = 0


class BlockManager:
    """Reference-counted pages with a prefix cache.

    A node is a number that identifies one exact prefix of full pages; it is never reused. The cache is a dict with keys
    (parent node, bytes of the page's token ids). A dict compares keys, not only their hashes, and the parent identifies
    all tokens before the page, so a hit means equal token ids from position 0: a hash collision cannot give wrong KV.

    Args:
        num_pages: pages in the pool, >= 1.
        prefix_caching: enables the prefix cache; without it every lookup misses.
    """

    def __init__(self, num_pages: int, prefix_caching: bool = True) -> None:
        if num_pages < 1:
            raise ValueError(f"BlockManager: num_pages={num_pages}; expected at least 1")
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self._next_node = ROOT + 1
        self.reset()

    def reset(self) -> None:
        """Makes all pages free and unregistered, whoever holds references to them. Counts in `stats` stay."""
        self._references = [0] * self.num_pages
        # a stack: recently freed pages, which may be in the L2 cache, come first
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered, without references; least recent first
        self._nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # (parent, token ids) -> (node, page)
        self._keys: dict[int, tuple[int, bytes]] = {}  # page -> its key in _nodes

    @property
    def available(self) -> int:
        """Pages that `allocate` can return: free ones, and registered ones without references."""
        return len(self._free) + len(self._unused)

    def references(self, page: int) -> int:
        """References to a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Returns `count` unregistered pages with one reference each; evicts registered pages if needed.

        Raises:
            RuntimeError: fewer than `count` pages are available; the scheduler checks `available` first.
        """
        if count > self.available:
            raise RuntimeError(f"KV cache: {count} pages wanted, {self.available} available; this is a scheduler bug")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._nodes[self._keys.pop(page)]
        self.stats.evictions += 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; each must be referenced or registered."""
        for page in pages:
            if self._references[page] == 0:
                del self._unused[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference to each page of a sequence, given in order.

        They are released in reverse order, so that later pages of a sequence are evicted before their parents.
        """
        for page in reversed(list(pages)):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def lookup(self, parent: int, token_ids: bytes) -> tuple[int, int] | None:
        """(node, page) of the page with these token ids after the prefix `parent`, or None. Adds no reference.

        Args:
            parent: node of the prefix before the page, `ROOT` at position 0.
            token_ids: the page's token ids as int32 bytes.
        """
        return self._nodes.get((parent, token_ids)) if self.prefix_caching else None

    def register(self, page: int, parent: int, token_ids: bytes) -> int:
        """Adds a referenced, full page to the prefix cache; returns its node.

        If the same prefix is registered already, this page stays private and the existing node is returned. The caller
        must not write to the page again.
        """
        key = (parent, token_ids)
        known = self._nodes.get(key)
        if known is not None:
            return known[0]
        node = self._next_node
        self._next_node += 1
        self._nodes[key] = (node, page)
        self._keys[page] = key
        return node

    def clear_cache(self) -> None:
        """Unregisters all pages, because weights have changed. Referenced pages become private."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(sorted(self._unused, reverse=True))
        self._unused.clear()

    def check(self, holders: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError unless the state is consistent. For tests and debugging; visits every page.

        Args:
            holders: page lists of all sequences.
        """
        counted = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counted[page] += 1
        assert counted == self._references, "references differ from the holders' pages"
        idle = sorted([*self._free, *self._unused])
        assert idle == [p for p in range(self.num_pages) if counted[p] == 0], "a page is lost or free twice"
        assert all(page in self._keys for page in self._unused), "an unheld page outside the free list is unregistered"
        assert {p: k for k, (_, p) in self._nodes.items()} == self._keys, "the two directions of the cache differ"
        assert not set(self._free) & set(self._keys), "a free page is registered"
