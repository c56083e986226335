"""attention in Triton without a GPU: accuracy in the interpreter, and compiled layouts that keep a row's order.

The interpreter is chosen when a kernel is defined, so this file runs its tests again in a subprocess. Matrix products
there are numpy's, so bits are compared only between launches that give numpy the same products.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import run

pytest.importorskip("triton")

from rlkernel.contract import assert_accurate, assert_bitwise, compare_bitwise

if os.environ.get("TRITON_INTERPRET") != "1":
    import aot
    from aot import attention as table

    from rlkernel.kernels.triton.attention_tiles import DECODE_ROWS, Tile, forward_tile

    def test_in_the_interpreter() -> None:
        run(__file__)

    def tiles(family: str, d: int) -> set[Tile]:
        return {forward_tile(rows, d, 2, family) for rows in (1, 16, 17, 64, 65, 128, 10**6)}

    @pytest.mark.parametrize("family,target", (("hopper", "sm_90"), ("ampere", "sm_80")))
    @pytest.mark.parametrize("d", (64, 80, 128, 256))
    def test_a_row_stays_in_its_warp(family: str, target: str, d: int) -> None:
        """Several tiles agree to the bit only if none spreads a row's sum over warps."""
        several = len(tiles(family, d)) > 1
        for tile in tiles(family, d):
            variant = table._variant("layout", "bf16", tile, d, (target,), paged=tile.rows == DECODE_ROWS)
            ttgir = aot.compile_variant(variant, target).ttgir
            warps = re.findall(r"#ttg\.nvidia_mma<\{[^}]*warpsPerCTA = \[(\d+), (\d+)\]", ttgir)
            assert warps
            assert not several or all(columns == "1" for _, columns in warps), f"{tile} D={d}: {warps}"

    def test_sees_a_row_spread_over_warps() -> None:
        """Control: mma.sync with a tile wider than tall."""
        variant = table._variant("wide", "bf16", Tile(64, 4, 3), 128, ("sm_80",))
        assert "warpsPerCTA = [1, 4]" in aot.compile_variant(variant, "sm_80").ttgir

    @pytest.mark.parametrize("family", ("amd", "blackwell"))
    def test_one_tile_where_layouts_are_not_known_to_agree(family: str) -> None:
        for d in (64, 128, 256):
            assert len(tiles(family, d)) == 1
        assert len({forward_tile(rows, 64, 4, family) for rows in (1, 10**6)}) == 1

else:
    from rlkernel.kernels.reference import attention as reference
    from rlkernel.kernels.triton import attention as forward
    from rlkernel.kernels.triton import attention_backward as backward
    from rlkernel.kernels.triton import attention_shared
    from rlkernel.kernels.triton.attention import attention, paged_attention
    from rlkernel.kernels.triton.attention_backward import attention_backward
    from rlkernel.kernels.triton.attention_pages import store_kv_
    from rlkernel.kernels.triton.attention_tiles import Tile

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
    by_dtype = pytest.mark.parametrize(
        "dtype,family", ((torch.float32, "ampere"), (torch.float16, "hopper")), ids=("fp32", "fp16")
    )  # each with one of the two loops over blocks
    by_case = pytest.mark.parametrize(
        "case",
        (
            (2, 1, 16, None, 64, [70, 5], [130, 5]),
            (3, 1, 24, 20, 64, [3, 40], [100, 40]),
            (1, 2, 32, None, 2048, [20, 0, 1], [20, 3, 70]),
            (1, 1, 16, 70, 128, [1, 1], [200, 7]),
            (2, 1, 16, None, 64, [3, 1], [200, 7]),
        ),
    )

    def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def cu(lens: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)

    def arguments(
        group: int, hk: int, d: int, window: int | None, split: int, queries: list[int], keys: list[int],
        dtype: torch.dtype,
    ) -> tuple[Any, ...]:  # fmt: skip
        q = rand(0, sum(queries), group * hk, d, dtype=dtype)
        k, v = rand(1, sum(keys), hk, d, dtype=dtype), rand(2, sum(keys), hk, d, dtype=dtype)
        return q, k, v, cu(queries), cu(keys), max(queries), max(keys), d**-0.5, window, split

    @pytest.fixture
    def as_on(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
        for module in (forward, backward, attention_shared):
            monkeypatch.setattr(module, "family", lambda t: family)

    @by_dtype
    @by_case
    @pytest.mark.usefixtures("as_on")
    def test_forward_and_backward(dtype: torch.dtype, family: str, case: tuple[Any, ...]) -> None:
        given = arguments(*case, dtype)
        out, lse = reference.attention(*given)
        for tile in (None, Tile(16, 1, 1), Tile(64, 4, 1, tma=False), Tile(128, 8, 1)):
            o, top = attention(*given, tile=tile)
            assert o.dtype == dtype
            assert_accurate(o, out, None, f"out {tile}")
            assert_accurate(top, lse, None, f"lse {tile}")
        q, k, v = given[:3]
        rest = (rand(3, *q.shape, dtype=dtype), q, k, v, out, lse, *given[3:9])
        wanted = reference.attention_backward(*rest)
        for tiles in (None, 2 * ({"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1},)):
            for name, a, b in zip(("dq", "dk", "dv"), attention_backward(*rest, tiles=tiles), wanted, strict=True):
                assert_accurate(a, b, None, f"{name} {tiles}")

    @by_dtype
    @pytest.mark.parametrize("split, ends", ((64, [150, 131, 200]), (128, [150, 129, 300]), (2048, [150, 131, 200])))
    @pytest.mark.usefixtures("as_on")
    def test_a_shared_prefix_changes_no_bit(dtype: torch.dtype, family: str, split: int, ends: list[int]) -> None:
        """Groups of three and two, a sequence of its own, a padded row; the prefix ends inside or after a split."""
        hk, d, page = 2, 16, 16
        lens = torch.tensor([*ends, 96, 70, 40, 1], dtype=torch.int32)
        prefix = torch.tensor([128, 128, 128, 69, 69, 0, 0], dtype=torch.int32)
        k, v = (rand(i, 120, page, hk, d, dtype=dtype) for i in (1, 2))
        table = torch.randperm(120, generator=torch.Generator().manual_seed(3)).int()[: 7 * 16].view(7, -1)
        table = torch.cat((table, torch.zeros(7, 8, dtype=torch.int32)), 1)
        table[1:3, :8], table[4, :5] = table[0, :8], table[3, :5]
        table[2, 16:19] = torch.arange(117, 120).int()
        q = rand(0, 7, 2 * hk, d, dtype=dtype)
        sizes = (int(lens.max()), d**-0.5)
        alone = paged_attention(q, k, v, table, cu([1] * 7), lens, 1, sizes[0], sizes[1], None, split)

        def shared(prefix: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
            groups = torch.tensor([0, 3, 5, 5], dtype=torch.int32)
            return attention_shared.shared_paged_attention(
                q, k, v, table, cu([1] * 7), lens, groups, prefix, 3, 128, *sizes, split, tile
            )

        for found in (shared(prefix), shared(prefix, Tile(64, 4, 1)), shared(torch.zeros_like(prefix))):
            for name, a, b in zip(("out", "lse"), found, alone, strict=True):
                assert_bitwise(a, b, f"{name}: shared against unshared")
        table[0, 0] = table[5, 0]  # control: the group now reads another page
        assert compare_bitwise(shared(prefix)[0][1:3], alone[0][1:3]).mismatches

    @by_dtype
    @pytest.mark.parametrize(
        "case", ((1, 2, 24, None, 64, [70, 5, 0, 1], [70, 5, 0, 1]), (2, 1, 16, None, 128, [3], [150]))
    )
    @pytest.mark.usefixtures("as_on")
    def test_bidirectional(dtype: torch.dtype, family: str, case: tuple[Any, ...]) -> None:
        given = (*arguments(*case, dtype), False)
        out, lse = reference.attention(*given)
        for tile in (None, Tile(128, 8, 1)):
            o, top = attention(*given, tile=tile)
            assert_accurate(o, out, None, f"out {tile}")
            assert_accurate(top, lse, None, f"lse {tile}")
        q, k, v = given[:3]
        rest = (rand(3, *q.shape, dtype=dtype), q, k, v, out, lse, *given[3:9], False)
        wanted = reference.attention_backward(*rest)
        for name, a, b in zip(("dq", "dk", "dv"), attention_backward(*rest), wanted, strict=True):
            assert_accurate(a, b, None, name)

    @pytest.mark.parametrize("family", ("hopper", "ampere"))
    @pytest.mark.usefixtures("as_on")
    def test_what_takes_long_prefill(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long prefill: packed keys or gathered pages that TMA can load, with enough rows and without a window."""
        monkeypatch.setattr(forward, "LONG_PREFILL_ROWS", 20)
        seen: list[tuple[Any, ...]] = []

        def long(*given: Any) -> None:
            seen.append(given)
            forward.prefill(*given)

        def run(op: Any, *given: Any) -> None:
            seen.clear()
            for a, b in zip(op(*given, long=long), op(*given), strict=True):
                assert_bitwise(a, b, "written by the one that was called")

        on_hopper = family == "hopper"
        for split in (64, 2048):
            q, k, v, cu_q, cu_k, *rest = given = arguments(2, 1, 16, None, split, [70, 5], [130, 5], torch.float16)
            run(attention, *given)
            assert len(seen) == on_hopper and all(x[5:7] == (70, 130) and x[8:10] == (split, 0) for x in seen)
            run(attention, q[:5], k, v, torch.tensor([0, 5], dtype=torch.int32), cu_k[[0, 1]], 5, *rest[1:])
            run(attention, *given[:8], 20, split)
            run(attention, *(x.float() for x in (q, k, v)), cu_q, cu_k, *rest)
            assert not seen, "few rows, a window, another dtype"
        pages = (torch.cat((x, x[:1])).view(17, 8, 1, 16) for x in (k, v))
        table, lens = torch.arange(17, dtype=torch.int32)[None], torch.tensor([130]).int()
        paged = (q[:70], *pages, table, cu([70]), lens, 70, 130, 0.25, None, 64)
        run(paged_attention, *paged)
        assert not seen
        monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
        monkeypatch.setattr(forward, "GATHER_KEYS", 1)
        monkeypatch.setattr(forward, "can_tma_load_keys", lambda q: True)
        run(paged_attention, *paged)
        assert len(seen) == on_hopper and all(x[9] == 192 for x in seen), "capacity in keys"

    @pytest.mark.parametrize("window", (None, 90))
    def test_a_sequence_does_not_see_the_next_one(window: int | None) -> None:
        """TMA reads past a sequence's end; the values there, also NaN, must not change the result."""
        given = arguments(2, 1, 16, window, 64, [70, 20], [130, 20], torch.float16)
        q, k, v, *rest = given
        dout = rand(3, *q.shape, dtype=q.dtype)
        for x, first in ((q, 70), (k, 130), (v, 130), (dout, 70)):
            x[first:] = torch.nan
        out, lse = attention(*given)
        grads = attention_backward(dout, q, k, v, out, lse, *rest[:6])
        a = slice(0, 70)
        alone = (q[a], k[:130], v[:130], cu([70]), cu([130]), *rest[2:])
        expected = attention(*alone)
        wanted = attention_backward(dout[a], *alone[:3], *expected, *alone[3:9])
        found = (out[a], lse[a], grads[0][a], grads[1][:130], grads[2][:130])
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, (*expected, *wanted), strict=True):
            assert torch.isfinite(x).all(), name
            assert_bitwise(x, y, name)

    @by_dtype
    @pytest.mark.parametrize("page", (8, 48))
    @by_case
    @pytest.mark.usefixtures("as_on")
    def test_pages_hold_the_same_keys(
        dtype: torch.dtype, family: str, page: int, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v, cu_q, cu_k, max_q, max_k, scale, window, split = given = arguments(*case, dtype)
        lens = cu_k.diff()
        needed = [-(-n // page) for n in lens.tolist()]
        shuffled = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(0)).int()
        table = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
        slots = []
        for b, first in enumerate([0, *itertools.accumulate(needed)][:-1]):
            table[b, : needed[b]] = shuffled[first : first + needed[b]]
            j = torch.arange(int(lens[b]))
            slots.append(table[b, j // page] * page + j % page)
        caches = [torch.full((sum(needed) + 2, page, *k.shape[1:]), torch.nan, dtype=dtype) for _ in range(2)]
        where = torch.cat(slots).long()
        where[::3] *= -1  # skipped here, written by the second call
        store_kv_(*caches, k, v, where)
        fused = torch.cat((k, v), dim=1)[::3]
        store_kv_(*caches, fused[:, : k.shape[1]], fused[:, k.shape[1] :], where[::3].abs())
        found = paged_attention(q, *caches, table, cu_q, lens, max_q, max_k, scale, window, split)
        for name, a, b in zip(("out", "lse"), found, attention(*given), strict=True):
            assert_bitwise(a, b, f"{name} from pages")
        monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
        monkeypatch.setattr(forward, "GATHER_KEYS", 1)
        monkeypatch.setattr(forward, "can_tma_load_keys", lambda q: True)
        gathered = paged_attention(q, *caches, table, cu_q, lens, max_q, max_k, scale, window, split)
        for name, a, b in zip(("out", "lse"), gathered, found, strict=True):
            assert_bitwise(a, b, f"{name} from gathered pages")

    @pytest.mark.parametrize("d", (16, 24))
    @pytest.mark.parametrize(
        "dtype,family", ((torch.float32, "hopper"), (torch.float16, "ampere")), ids=("hopper", "ampere")
    )
    @pytest.mark.usefixtures("as_on")
    def test_full_blocks_without_tma(dtype: torch.dtype, family: str, d: int) -> None:
        """The other loop of each dtype, with blocks and heads that need a mask and that need none."""
        given = arguments(2, 1, d, None, 2048, [3, 35], [76, 128], dtype)
        (out, lse), (o, top) = reference.attention(*given), attention(*given)
        assert_accurate(o, out, None, "out")
        assert_accurate(top, lse, None, "lse")
        rest = (rand(3, *given[0].shape, dtype=dtype), *given[:3], out, lse, *given[3:9])
        wanted = reference.attention_backward(*rest)
        for name, a, b in zip(("dq", "dk", "dv"), attention_backward(*rest), wanted, strict=True):
            assert_accurate(a, b, None, name)

    @pytest.mark.parametrize("window", (None, 70))
    def test_decode_merges_splits(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sequences across splits, inside one, without keys; heads in steps of 8; one or several splits per program."""
        given = arguments(6, 2, 16, window, 64, [2, 1, 0, 1], [330, 7, 0, 130], torch.float32)
        expected = reference.attention(*given)
        found = []
        for partial, merges in ((4096, 1024), (4096, 1), (1, 1024)):
            monkeypatch.setattr(forward, "PARTIAL_GRID", partial)
            monkeypatch.setattr(forward, "MERGE_GRID", merges)
            found.append(attention(*given))
            for name, a, b, wanted in zip(("out", "lse"), found[-1], found[0], expected, strict=True):
                assert_bitwise(a, b, f"{name} with {partial}, {merges}")
                assert_accurate(a, wanted, None, name)

    @pytest.mark.parametrize("halves", (False, True), ids=("separate", "halves"))
    def test_caches_of_other_strides(halves: bool) -> None:
        """Caches whose slots are not contiguous are copied; those with a head's key next to its value are not."""
        q, (k, v) = rand(0, 2, 4, 16), (rand(i, 5, 8, 2, 16) for i in (1, 2))
        table, lens = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32), torch.tensor([13, 2], dtype=torch.int32)
        rest = (table, cu([1, 1]), lens, 1, 13, 0.25, None, 64)
        other = (
            torch.cat((k, v), 3).split(16, 3)
            if halves
            else [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        )
        for name, a, b in zip(
            ("out", "lse"), paged_attention(q, *other, *rest), paged_attention(q, k, v, *rest), strict=True
        ):
            assert_bitwise(a, b, name)

    def test_pages_of_three_heads_are_gathered_up_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = rand(0, 2, 3, 16), rand(1, 16, 8, 3, 16), rand(2, 16, 8, 3, 16)
        table = torch.arange(16, dtype=torch.int32).view(2, 8)
        given = (q, k, v, table, cu([1, 1]), torch.tensor([64, 64], dtype=torch.int32), 1, 64, 0.25, None, 64)
        found = paged_attention(*given)
        monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
        monkeypatch.setattr(forward, "GATHER_KEYS", 1)
        monkeypatch.setattr(forward, "can_tma_load_keys", lambda q: True)
        for name, a, b in zip(("out", "lse"), paged_attention(*given), found, strict=True):
            assert_accurate(a, b, None, name)

    @pytest.mark.parametrize("splits", (64, 2048))
    @pytest.mark.parametrize("queries", (1, 20))
    def test_lengths_that_contradict_each_other_stay_inside_the_tensors(queries: int, splits: int) -> None:
        """More queries than `max_seqlen_q` or than keys: undefined values, but no access outside the tensors."""
        for keys in ([100, 90], [3, 0]):
            q, k, v = rand(0, 60, 2, 16), rand(1, sum(keys), 1, 16), rand(2, sum(keys), 1, 16)
            given = (q, k, v, cu([30, 30]), cu(keys), queries, max(keys), 0.25, None, splits)
            out, lse = attention(*given)
            attention_backward(rand(3, 60, 2, 16), q, k, v, out, lse, *given[3:9])

    def test_split_programs_merge_as_one_program_does() -> None:
        """64 rows are one tile, with a program per split; 65 rows are two, whose programs loop over the splits."""
        q, k, v = rand(0, 65, 1, 16), rand(1, 300, 1, 16), rand(2, 300, 1, 16)
        tile = Tile(64, 4, 1)
        fixed = (16**-0.5, None, 64, tile)
        one = attention(q, k, v, cu([65]), cu([300]), 65, 300, *fixed)
        many = attention(q[:64], k[:299], v[:299], cu([64]), cu([299]), 64, 299, *fixed)
        for name, a, b in zip(("out", "lse"), many, one, strict=True):
            assert_bitwise(a, b[:64], name)

    @pytest.mark.parametrize(
        "keys,most,grid", ((200, 64, 4096), (200, 128, 4096), (400, 192, 1)), ids=("no parts", "parts", "turns")
    )
    def test_a_length_that_is_too_small_stays_inside_its_buffers(
        keys: int, most: int, grid: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A wrong `max_seqlen_k` gives wrong numbers, but no access outside the buffers."""
        guards, empty = [], torch.empty

        def guarded(*shape: int, **options: Any) -> Tensor:
            n = torch.Size(shape).numel()
            whole = torch.full((n + 4096,), torch.nan, **options)
            guards.append(whole[n:])
            return whole[:n].view(shape)

        monkeypatch.setattr(forward, "PARTIAL_GRID", grid)
        k, v = (rand(i, -(-keys // 48), 48, 1, 16) for i in (1, 2))
        table = torch.arange(k.shape[0], dtype=torch.int32)[None]
        lens = torch.tensor([keys], dtype=torch.int32)
        monkeypatch.setattr(torch, "empty", guarded)
        for gathered in (False, True):
            if gathered:
                monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
                monkeypatch.setattr(forward, "GATHER_KEYS", 1)
                monkeypatch.setattr(forward, "can_tma_load_keys", lambda q: True)
            out, lse = paged_attention(rand(0, 1, 1, 16), k, v, table, cu([1]), lens, 1, most, 0.25, None, 64)
            assert torch.isfinite(out).all() and torch.isfinite(lse).all()
        monkeypatch.setattr(torch, "empty", empty)
        assert guards and all(guard.isnan().all() for guard in guards)

    def framed(x: Tensor, fill: float) -> Tensor:
        """The same values in a larger buffer that is filled with `fill`."""
        whole = torch.full((x.numel() + 8192,), fill, dtype=x.dtype)
        inner = whole[4096 : 4096 + x.numel()].view(x.shape)
        return inner.copy_(x)

    @pytest.fixture
    def frames(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        """The memory on both sides of every new tensor of floats: NaN, unless it was written."""
        kept: list[Tensor] = []
        empty = torch.empty

        def guarded(*shape: Any, **options: Any) -> Tensor:
            if options["dtype"].is_floating_point:
                inner = framed(empty(*shape, **options).zero_(), torch.nan)
                whole = inner.new_tensor(()).set_(inner.untyped_storage())
                kept.extend((whole[:4096], whole[4096 + inner.numel() :]))
                return inner
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", guarded)
        return kept

    @pytest.mark.parametrize("bad", ("table", "lens"))
    @pytest.mark.parametrize("page", (16, 24))
    @pytest.mark.parametrize("gathered", (False, True), ids=("from pages", "gathered"))
    def test_pages_that_do_not_exist_are_not_read(
        bad: str, page: int, gathered: bool, frames: list[Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GPU cannot raise, so invalid page numbers and lengths read other values, but only from the cache."""
        if gathered:
            monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
            monkeypatch.setattr(forward, "GATHER_KEYS", 1)
            monkeypatch.setattr(forward, "can_tma_load_keys", lambda q: True)
        k, v = (framed(rand(i, 6, page, 1, 16), torch.nan) for i in (1, 2))
        table, lens = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([3 * page, 3 * page - 5]).int()
        if bad == "table":
            table[0, 0], table[0, 2], table[1, 0], table[1, 1] = -1, 6, -(2**31), 2**31 - 1
        else:
            lens += 1000
        for queries in (1, 20):  # one program per split; several tiles of rows
            q = rand(0, 2 * queries, 1, 16)
            most = int(lens.max())
            tile = None if queries == 1 else Tile(16, 1, 1)
            given = (cu([queries, queries]), lens, queries, most, 0.25, None, 64)
            for x in paged_attention(q, k, v, framed(table, 2**30), *given, tile=tile):
                assert torch.isfinite(x).all()
        assert all(frame.isnan().all() for frame in frames)

    @pytest.mark.parametrize("family", ("ampere", "hopper"))
    @pytest.mark.parametrize(
        "queries,keys",
        (
            ([0, 9], [0, 90]),
            ([-3, 6], [-40, 70]),
            ([6, 3], [70, 30]),
            ([7, 2**31 - 1], [80, 2**31 - 1]),
            ([-(2**31), 6], [0, 70]),
        ),
        ids=str,
    )
    @pytest.mark.usefixtures("as_on")
    def test_invalid_cu_seqlens_stay_inside_the_tensors(
        queries: list[int], keys: list[int], frames: list[Tensor]
    ) -> None:
        """Undefined values, but no access outside the buffers, forward and backward."""
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (queries, keys))
        q, dout = (framed(rand(i, 6, 2, 16), torch.nan) for i in (0, 3))
        k, v = (framed(rand(i, 70, 1, 16), torch.nan) for i in (1, 2))
        rest = (cu_q, cu_k, 6, 70, 0.25, None)
        for tile in (None, Tile(16, 1, 1, tma=False)):
            out, lse = attention(q, k, v, *rest, 64, tile=tile)
            tiles = None if tile is None else 2 * ({"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1},)
            grads = attention_backward(dout, q, k, v, out, lse, *rest, tiles=tiles)
            assert all(not x.isnan().any() for x in (out, *grads))
        assert all(frame.isnan().all() for frame in frames)

    def test_a_grid_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton's grid size is an int; above it, no program would start and the result would be uninitialised."""
        q, k, v, *rest = arguments(2, 1, 16, None, 64, [7, 9], [7, 9], torch.float32)
        out, lse = attention(q, k, v, *rest)
        monkeypatch.setattr(backward, "MAX_PROGRAMS", 1)
        with pytest.raises(ValueError, match=r"max_seqlen_q=9 need 4 programs; a GPU takes at most 1 per call"):
            attention(q, k, v, *rest)
        with pytest.raises(ValueError, match=r"max_seqlen_q=9, max_seqlen_k=9 need \d+ programs"):
            attention_backward(torch.ones_like(out), q, k, v, out, lse, *rest[:5], None)

    @pytest.mark.parametrize(
        "n,keys,bytes_",
        ((2, 2100, 4 * 2 * (3 * 2) * 2 * (16 + 1)), (70, 300, 3 * 2 * 320 * 16 * 2)),
        ids=("splits", "gathered"),
    )
    def test_scratch_memory_is_within_scratch_bytes(
        n: int, keys: int, bytes_: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An engine reserves `scratch_bytes`. A call that would need more uses another way with the same bits."""
        batch, page = 3, 16
        pages = -(-keys // page)
        q = rand(0, batch * n, 2, 16, dtype=torch.float16)
        k, v = (rand(i, pages, page, 1, 16, dtype=torch.float16) for i in (1, 2))
        table, lens = torch.arange(pages, dtype=torch.int32).expand(batch, -1), torch.tensor([keys, 99, 200]).int()
        if n > 2:
            monkeypatch.setattr(forward, "GATHER_QUERIES", 1)
            monkeypatch.setattr(forward, "GATHER_KEYS", 1)
        empty = torch.empty

        def run() -> tuple[int, tuple[Tensor, Tensor]]:
            taken: list[Tensor] = []

            def counted(*shape: int, **options: Any) -> Tensor:
                taken.append(empty(*shape, **options))
                return taken[-1]

            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", counted)
                found = paged_attention(q, k, v, table, cu([n] * batch), lens, n, keys, 0.25, None, 2048)
            return sum(t.nbytes for t in taken if all(t is not x for x in found)), found

        reserved = lambda: forward.scratch_bytes(q, k, len(q), batch, keys)
        taken, wanted = run()
        assert taken == bytes_ == reserved()
        monkeypatch.setattr(forward, "SCRATCH_BYTES", bytes_ - 1)
        taken, found = run()
        assert taken == 0 and reserved() < bytes_
        for name, a, b in zip(("out", "lse"), found, wanted, strict=True):
            assert_bitwise(a, b, name)

    def test_a_window_of_more_keys_than_there_are() -> None:
        """The backward computes the last row that sees a key from the window, in 32 bits."""
        q, k, v, *rest = arguments(2, 1, 16, None, 64, [70], [130], torch.float32)
        dout = rand(3, *q.shape)
        wanted = attention_backward(dout, q, k, v, *attention(q, k, v, *rest), *rest[:5], None)
        for window in (130, 2**30, 2**31 - 1):
            out, lse = attention(q, k, v, *rest[:5], window, 64)
            for a, b in zip(attention_backward(dout, q, k, v, out, lse, *rest[:5], window), wanted, strict=True):
                assert_bitwise(a, b, f"window {window}")

    def test_more_sequences_than_a_grid_has() -> None:
        borders = torch.arange(65_537, dtype=torch.int32)
        q = torch.zeros(1, 1, 16).expand(65_536, 1, 16)
        refused = pytest.raises(ValueError, match=r"cu_seqlens_q has 65536 sequences; .* split the batch")
        with refused:
            attention(q, q, q, borders, borders, 1, 1, 0.25, None, 64)
        lse = torch.zeros(1, 1).expand(65_536, 1)
        with refused:
            attention_backward(q, q, q, q, q, lse, borders, borders, 1, 1, 0.25, None)
