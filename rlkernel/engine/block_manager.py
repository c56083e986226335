"""Pages of the KV cache: who holds each one, which full ones can be found again, which goes next when none is free.

A page is held by counted references. A full page may be registered under (its parent in the chain, its token ids); it
stays findable after its last holder has gone, until memory is needed and it is the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = 0
"""Chain node of the empty prefix."""


@dataclass
class CacheStats:
    """Counts since the manager was made."""

    hits: int = 0
    evictions: int = 0


class BlockManager:
    """Reference-counted pages with a prefix cache.

    A node is a number that stands for one exact prefix of whole pages; it is never given twice. The cache is a dict
    with keys (parent node, bytes of the page's token ids). A dict compares keys and not only their hashes, and a node
    stands for the whole prefix before it, so a hit means equal token ids from position 0: a hash collision cannot give
    wrong KV.

    Args:
        num_pages: pages in the pool, >= 1.
        prefix_caching: register full pages; without it every lookup misses.
    """

    def __init__(self, num_pages: int, prefix_caching: bool = True) -> None:
        if num_pages < 1:
            raise ValueError(f"BlockManager: num_pages={num_pages}; expected at least 1")
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: low and recently freed pages first, warm in cache
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered, held by nobody; first in, first evicted
        self._nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # (parent, token ids) -> (node, page)
        self._keys: dict[int, tuple[int, bytes]] = {}  # page -> its key in _nodes
        self._next_node = ROOT + 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now: free ones and registered ones that nobody holds."""
        return len(self._free) + len(self._unused)

    def references(self, page: int) -> int:
        """Number of holders of a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each and no registration; evicts unheld registered pages where needed.

        Raises:
            RuntimeError: fewer than `count` pages are available; the scheduler asks `available` first.
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
        """Adds a reference to each page, all of them held or registered."""
        for page in pages:
            if self._references[page] == 0:
                del self._unused[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page, given from the first to the last of a sequence.

        They are let go from the last to the first: of one sequence, later pages are evicted before those they hang on.
        """
        for page in reversed(list(pages)):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def lookup(self, parent: int, token_ids: bytes) -> tuple[int, int] | None:
        """(node, page) of the page with these token ids after the prefix `parent`, or None. Takes no reference.

        Args:
            parent: node of the prefix before the page, `ROOT` at position 0.
            token_ids: the page's token ids as int32 bytes.
        """
        return self._nodes.get((parent, token_ids)) if self.prefix_caching else None

    def register(self, page: int, parent: int, token_ids: bytes) -> int:
        """Makes a held, full page findable; returns its node.

        Where the same prefix is registered already, that page stays, this one remains private, and the existing node is
        returned. The caller never writes to the page again.
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
        """Forgets every registered page: weights have changed. Held pages stay held and become private."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(sorted(self._unused, reverse=True))
        self._unused.clear()

    def check(self, holders: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError unless the books balance; `holders` are the page lists of all that hold pages.

        For tests and for hunting a bug: walks every page.
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
