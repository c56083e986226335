"""Pages: reference counts, the prefix cache, eviction order, and no wrong hit even where hashes collide."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlkernel.engine.block_manager import ROOT, BlockManager


def test_allocate_and_release_reuse_the_last_freed_page():
    blocks = BlockManager(4)
    pages = blocks.allocate(3)
    assert pages == [0, 1, 2] and blocks.available == 1
    blocks.release([1])
    assert blocks.allocate(1) == [1]
    blocks.release([0, 1, 2])
    blocks.check()
    assert blocks.available == 4


def test_too_many_pages_is_an_error_and_takes_none():
    blocks = BlockManager(2)
    with pytest.raises(RuntimeError, match="3 pages wanted, 2 available"):
        blocks.allocate(3)
    assert blocks.available == 2


def test_registered_page_is_found_after_its_holder_has_gone():
    blocks = BlockManager(2)
    (page,) = blocks.allocate(1)
    node = blocks.register(page, ROOT, b"abcd")
    blocks.release([page])
    assert blocks.lookup(ROOT, b"abcd") == (node, page)
    assert blocks.lookup(node, b"abcd") is None and blocks.lookup(ROOT, b"abce") is None
    blocks.share([page])
    assert blocks.references(page) == 1 and blocks.available == 1
    blocks.release([page])
    blocks.check()


def test_least_recently_used_goes_first_and_children_before_parents():
    blocks = BlockManager(4)
    first = blocks.allocate(2)
    parent = blocks.register(first[0], ROOT, b"a")
    blocks.register(first[1], parent, b"b")
    second = blocks.allocate(2)
    blocks.register(second[0], ROOT, b"c")
    blocks.release(first)
    blocks.release(second)  # second[1] was never registered: it is simply free, and goes first
    assert blocks.allocate(1) == [second[1]]
    assert blocks.allocate(1) == [first[1]], "the child of the older chain"
    assert blocks.lookup(ROOT, b"a") is not None, "a prefix is evicted after its children"
    assert blocks.allocate(2) == [first[0], second[0]]
    assert blocks.stats.evictions == 3 and blocks.lookup(ROOT, b"a") is None


def test_a_hit_makes_a_page_recent():
    blocks = BlockManager(2)
    pages = blocks.allocate(2)
    for page, content in zip(pages, (b"a", b"b"), strict=True):
        blocks.register(page, ROOT, content)
        blocks.release([page])
    blocks.share([pages[0]])
    blocks.release([pages[0]])
    assert blocks.allocate(1) == [pages[1]]


def test_same_content_twice_keeps_the_first_page():
    blocks = BlockManager(3)
    first, second, third = blocks.allocate(3)
    node = blocks.register(first, ROOT, b"a")
    assert blocks.register(second, ROOT, b"a") == node
    blocks.release([second])
    assert blocks.lookup(ROOT, b"a") == (node, first) and blocks.available == 1
    blocks.check([[first, third]])


def test_hash_collision_gives_no_hit():
    """Two keys with one hash: Python hashes an int modulo 2^61 - 1, so node 2^61 - 1 collides with the root."""
    blocks = BlockManager(3)
    blocks._next_node = (1 << 61) - 1
    pages = blocks.allocate(3)
    node = blocks.register(pages[0], ROOT, b"a")
    assert node != ROOT and hash((node, b"b")) == hash((ROOT, b"b"))
    blocks.register(pages[1], ROOT, b"b")
    assert blocks.lookup(node, b"b") is None, "a page after another prefix is not a hit"
    child = blocks.register(pages[2], node, b"b")
    assert blocks.lookup(node, b"b") == (child, pages[2]) and blocks.lookup(ROOT, b"b")[1] == pages[1]


def test_a_child_of_an_evicted_prefix_is_not_found_under_its_successor():
    """The content of the parent is computed again under a new node; children of the old node stay unreachable."""
    blocks = BlockManager(3)
    parent, twin, child = blocks.allocate(3)
    node = blocks.register(parent, ROOT, b"a")
    assert blocks.register(twin, ROOT, b"a") == node
    blocks.register(child, node, b"b")  # its parent node is that of `parent`, although its sequence holds `twin`
    blocks.release([parent])
    assert blocks.allocate(1) == [parent], "evicted"
    renewed = blocks.register(parent, ROOT, b"a")
    assert renewed != node and blocks.lookup(renewed, b"b") is None


def test_clear_cache_frees_unheld_pages_and_keeps_held_ones():
    blocks = BlockManager(3)
    pages = blocks.allocate(2)
    for page, content in zip(pages, (b"a", b"b"), strict=True):
        blocks.register(page, ROOT, content)
    blocks.release([pages[0]])
    blocks.clear_cache()
    assert blocks.lookup(ROOT, b"a") is None and blocks.lookup(ROOT, b"b") is None
    assert blocks.available == 2
    blocks.check([[pages[1]]])


def test_without_prefix_caching_nothing_is_found():
    blocks = BlockManager(1, prefix_caching=False)
    assert blocks.lookup(ROOT, b"a") is None


def test_bad_size():
    with pytest.raises(ValueError, match="num_pages=0"):
        BlockManager(0)


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a model that holds, for each page, its holders and the whole prefix it stands for.

    Holders are chains, as sequences are: pages in order, each full one registered under its parent.
    """

    SIZE = 6

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(self.SIZE)
        self.chains: list[tuple[list[int], tuple[bytes, ...]]] = []
        self.content: dict[int, tuple[bytes, ...]] = {}  # page -> prefix that its registration promises

    @rule(letters=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=4), tail=st.booleans())
    def start(self, letters, tail):
        """Starts a sequence: shares the pages it finds, registers the other full ones, takes one that is not full."""
        node, pages, found = ROOT, [], True
        for i, letter in enumerate(letters):
            hit = self.blocks.lookup(node, letter) if found else None
            if hit is None:
                found = False
                break
            node, page = hit
            assert self.content[page] == tuple(letters[: i + 1]), "a hit on another prefix"
            pages.append(page)
        self.blocks.share(pages)
        need = len(letters) - len(pages) + int(tail)
        if need > self.blocks.available:
            self.blocks.release(pages)
            return
        fresh = self.blocks.allocate(need)
        for page in fresh:
            self.content.pop(page, None)
        hits = len(pages)
        pages += fresh
        for i in range(hits, len(letters)):
            before = self.blocks.lookup(node, letters[i])
            node = self.blocks.register(pages[i], node, letters[i])
            if before is None:
                self.content[pages[i]] = tuple(letters[: i + 1])
        self.chains.append((pages, tuple(letters)))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def finish(self, data):
        pages, _ = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.blocks.release(pages)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def fork(self, data):
        pages, letters = data.draw(st.sampled_from(self.chains))
        shared = pages[: len(letters)]
        self.blocks.share(shared)
        self.chains.append((shared, letters))

    @rule()
    def new_weights(self):
        self.blocks.clear_cache()
        self.content.clear()

    @invariant()
    def books_balance(self):
        self.blocks.check([pages for pages, _ in self.chains])
        held = {page for pages, _ in self.chains for page in pages}
        assert self.blocks.available == self.SIZE - len(held)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
