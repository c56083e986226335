"""logprob, linear_logprob and sample in Triton's interpreter: accurate, and independent of kernels and tiles.

As in test_triton_interpret.py, tests run in a subprocess with exact sums and without bf16 products.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor
from triton_interpreter import run

pytest.importorskip("triton")

from kernels.interpreter_checks import by_dtype, close, whole
from ops.op_checks import rand

from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import VOCAB_TILE

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter() -> None:
        run(__file__)

else:
    import triton.language as tl

    from rlkernel.kernels.reference import linear_logprob as linear_logprob_reference
    from rlkernel.kernels.reference import logprob as logprob_reference
    from rlkernel.kernels.reference import sample as sample_reference
    from rlkernel.kernels.triton import (
        linear,
        linear_grad,
        linear_logprob,
        linear_logprob_backward,
        linear_logprob_rows,
        logprob,
        logprob_backward,
        sample,
        sample_threshold,
    )
    from rlkernel.kernels.triton.linear_logprob_rows import Active
    from rlkernel.kernels.triton.matrix import Tile
    from rlkernel.ops import unpack_kept

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

    def scored(v: int, temperature: bool, masked: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Targets, 1/T and a kept mask of six rows; row 1's target is dropped, row 2 keeps nothing."""
        generator = torch.Generator().manual_seed(7)
        targets = torch.randint(0, v, (6,), generator=generator)
        mask = torch.rand(6, v, generator=generator) < 0.5
        mask[torch.arange(6), targets] = True
        mask[1, targets[1]] = False
        mask[2] = False
        inverse = 1.0 / (0.5 + torch.rand(6, generator=generator))
        return targets, inverse if temperature else None, sample_reference.pack_bits(mask) if masked else None

    options = pytest.mark.parametrize("temperature,masked", ((False, False), (True, True)))

    def test_more_tokens_than_the_tile_statistics_hold(monkeypatch: pytest.MonkeyPatch) -> None:
        logits, w, targets = whole(0, 130, 40), torch.eye(40), torch.arange(130) % 40
        at_once = logprob.logprob(logits, targets, None, None)
        monkeypatch.setattr(logprob, "SCRATCH", 1)
        assert logprob.TileBuffers(130, 40, logits.device).tokens == 128
        for ours in (
            logprob.logprob(logits, targets, None, None),
            linear_logprob.forward(logits, w, targets, None, None),
        ):
            for o, a in zip(ours, at_once, strict=True):
                assert_bitwise(o, a, "in turns")

    @options
    def test_a_target_outside_the_vocabulary_reads_nothing_there(temperature: bool, masked: bool) -> None:
        v = VOCAB_TILE + 44
        x, w, g = whole(0, 6, 16), whole(1, v, 16) / 8, rand(2, 6)
        logits = x @ w.t()
        _, inverse, kept = scored(v, temperature, masked)
        targets = torch.tensor([-1, -100, v, 2**40, -(2**40), 3])
        for ours in (
            logprob.logprob(logits, targets, inverse, kept), linear_logprob.forward(x, w, targets, inverse, kept)
        ):  # fmt: skip
            assert (ours[0][:5] == -torch.inf).all()
            _, entropy, _, stats = ours
            logprob_backward.logprob_dgrad(logits, targets, inverse, kept, stats, entropy, g, g)
            rest = (targets, inverse, kept, stats, entropy, g, g, None, None, None, False, True, True)
            linear_logprob.linear_logprob_grad_(None, x, w, *rest)

    @by_dtype
    @options
    def test_logprob(temperature: bool, masked: bool, dtype: torch.dtype) -> None:
        v = 2 * VOCAB_TILE + 44
        logits = rand(0, 6, v, dtype=dtype) * 4
        logits[0, VOCAB_TILE : 2 * VOCAB_TILE] = -torch.inf
        logits[3, 7], logits[4, 9] = torch.nan, torch.inf
        targets, inverse, kept = scored(v, temperature, masked)
        ours = logprob.logprob(logits, targets, inverse, kept)
        reference = logprob_reference.logprob(logits, targets, inverse, kept)
        for name, o, r in zip(("logp", "entropy", "lse", "stats"), ours, reference, strict=True):
            close(o, r, name)
        one = lambda t, i: None if t is None else t[i : i + 1]
        for i in range(6):
            alone = logprob.logprob(logits[i : i + 1], targets[i : i + 1], one(inverse, i), one(kept, i))
            for o, a in zip(ours, alone, strict=True):
                assert_bitwise(a, o[i : i + 1], f"row {i} alone")
        logits[3, 7] = logits[4, 9] = 0.0
        _, entropy, _, stats = logprob_reference.logprob(logits, targets, inverse, kept)
        g, h = rand(1, 6), rand(2, 6)
        g[5] = h[5] = 0.0
        for upstream in ((g, h), (g, None), (None, h)):
            rest = (logits, targets, inverse, kept, stats, entropy, *upstream)
            close(logprob_backward.logprob_dgrad(*rest), logprob_reference.logprob_dgrad(*rest), "gradient")

    @by_dtype
    @options
    def test_linear_logprob(
        temperature: bool, masked: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        v, c = 2 * VOCAB_TILE + 44, 40
        x, w = whole(0, 6, c, dtype=dtype) / 8, whole(1, v, c, dtype=dtype) / 8
        targets, inverse, kept = scored(v, temperature, masked)
        logits = linear.linear(x, w, None, 1, 1, torch.float32)
        expected = logprob.logprob(logits, targets, inverse, kept)
        for tile in (None, Tile(16, 128, 32, 4, 2, tma=False), Tile(32, 256, 16, 4, 2)):
            ours = linear_logprob.forward(x, w, targets, inverse, kept, tile=tile)
            for o, e in zip(ours, expected, strict=True):
                assert_bitwise(o, e, f"linear_logprob against logprob of linear, {tile}")
        _, entropy, _, stats = expected
        g, h = rand(2, 6), rand(3, 6)
        g[5] = h[5] = 0.0
        for name in ("recomputed", "blocks", "kept"):
            if name == "blocks":
                for module in (linear_logprob_backward, linear_logprob):
                    monkeypatch.setattr(module, "LOGPROB_DGRAD_CHUNK", VOCAB_TILE)
                monkeypatch.setattr(linear_logprob_backward, "DZ_ENTRIES", 1)
                monkeypatch.setattr(linear_logprob_backward, "PROBS_ENTRIES", 1)
                monkeypatch.setattr(linear_logprob_backward, "WGRAD_TOKENS", 4)
            probs: tuple[Tensor | None, ...] = (None, None, None)
            entropy_gradient: Tensor | None = h
            if name == "kept":
                *expected_rows, p, tile_max = linear_logprob.linear_logprob_probs(x, w, targets, inverse, kept)
                for o, e in zip(expected_rows, expected, strict=True):
                    assert_bitwise(o, e, "with kept probabilities")
                close(p, linear_logprob_reference.linear_logprob_probs(x, w, targets, inverse, kept)[4], "probs", dtype)
                probs, entropy_gradient = (p, tile_max, None), None
            rest = (x, w, targets, inverse, kept, stats, entropy, g, entropy_gradient, *probs)
            ours, reference = rand(4, v, c), rand(4, v, c)
            dx, _ = linear_logprob.linear_logprob_grad_(ours, *rest, False, True, True)
            wanted, _ = linear_logprob_reference.linear_logprob_grad_(reference, *rest, False, True, True)
            close(dx, wanted, "input gradient")
            close(ours, reference, "weight gradient", dtype)
            for width in () if name == "kept" else (VOCAB_TILE, 2 * VOCAB_TILE, 4 * VOCAB_TILE):
                *rows, z = linear_logprob.linear_logprob_logits(x, w, targets, inverse, kept, width)
                for o, e in zip(rows, expected, strict=True):
                    assert_bitwise(o, e, f"with {width} kept logits")
                again = rand(4, v, c)
                dx_kept, _ = linear_logprob.linear_logprob_grad_(again, *rest[:-1], z, False, True, True)
                assert_bitwise(dx_kept, dx, f"input gradient with {width} kept logits")
                assert_bitwise(again, ours, f"weight gradient with {width} kept logits")
            _, dw = linear_logprob.linear_logprob_grad_(None, *rest, False, False, True)
            fresh = linear_logprob_reference.linear_logprob_grad_(None, *rest, False, False, True)[1]
            close(dw, fresh, "weight gradient in its dtype", dtype)
        none = linear_logprob.linear_logprob_grad_(None, *rest, False, False, False)
        assert none[0].shape == none[1].shape == (0, c)

    @pytest.mark.parametrize("tokens", (1, 15, 16, 70, 230))
    @pytest.mark.parametrize("masked", (False, True))
    def test_tokens_without_a_gradient_go_last(tokens: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Groups of 16 tokens move; the last one of a block may be short. Their hidden states are never read."""
        v, block = 40, 112
        monkeypatch.setattr(linear_logprob_backward, "WGRAD_TOKENS", block)
        x, w, g = whole(0, tokens, 24) / 8, whole(1, v, 24) / 8, rand(2, tokens)
        g[tokens // 5 : tokens // 2], g[3 * tokens // 4 :: 3] = 0.0, 0.0
        targets, kept = torch.arange(tokens) % v, None
        if masked:
            kept = torch.full((tokens, 2), -1, dtype=torch.int32)
            kept[::5, 0] = ~(1 << 3)
            targets[7::9] = v + 5  # outside the vocabulary, but inside the last word of the mask
        _, entropy, _, stats = linear_logprob.linear_logprob(x, w, targets, None, kept)
        has = g != 0
        if kept is not None:
            has &= ~((torch.arange(tokens) % 5 == 0) & (targets == 3)) & (targets < v)
        made = linear_logprob_rows.row_order(targets, kept, stats, g, None, v, block)
        for i in range(-(-tokens // block)):
            here = has[i * block : (i + 1) * block]
            groups = list(torch.arange(len(here)).split(16))
            groups.sort(key=lambda group: not here[group].any())
            wanted = torch.cat(groups)
            some = made.active(i * block, i * block + len(here))
            assert torch.where(some.order < 0, -1 - some.order, some.order).tolist() == wanted.tolist()
            assert ((some.order >= 0) == here[wanted]).all()
            assert some.count.tolist() == [sum(len(group) for group in groups if here[group].any())]
        x[~has] = torch.nan
        rest = (None, kept, stats, entropy), (None, None, None, None, False, True, True)
        calls: list[tuple[str, int]] = []

        def noted(name: str) -> Callable[..., None]:
            product = getattr(linear_logprob, name)
            return lambda *given: (
                calls.append((name, next(int(some.count) for some in given if isinstance(some, Active)))),
                product(*given),
            )[1]

        products = linear_logprob.ANCHORS._replace(
            **{name.removesuffix("_block"): noted(name) for name in ("dz_block", "dhidden_block", "dweight_block")}
        )
        # sums that do not depend on the row, which a matrix library does not guarantee
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: numpy.einsum("ik,kj->ij", a, b).astype(dtype))
        for grad in (None, rand(3, v, 24)):
            run = functools.partial(linear_logprob_backward.gradients, products)
            ours, expected = (None if grad is None else grad.clone() for _ in range(2))
            calls.clear()
            dx, dw = run(ours, x, w, targets, *rest[0], g, *rest[1])
            assert sorted(calls) == sorted(
                (f"{name}_block", n) for name in ("dz", "dhidden", "dweight") for n in made.counts.tolist()
            ), "what the products are asked for"
            fresh_dx, fresh = linear_logprob_reference.linear_logprob_grad_(
                expected, x, w, targets % v, *rest[0], g * has, *rest[1]
            )
            close(dx, fresh_dx, "input gradient")
            assert_bitwise(dx[~has], torch.zeros_like(dx[~has]), "none of a token without a gradient")
            close(dw if ours is None else ours, fresh if expected is None else expected, "weight gradient")
            again = None if grad is None else grad.clone()
            dense = run(again, x, w, targets, *rest[0], g, *rest[1][:-3], True, True, True)
            for a, b in zip((dx, dw, ours), (*dense, again), strict=True):
                if a is not None and b is not None:
                    assert_bitwise(a, b, "the bits do not depend on the hint")
            alone, _ = run(None, x, w, targets, *rest[0], g, *rest[1][:-2], True, False)
            assert_bitwise(alone, dx, "without a gradient of the weight")
            _, alone = run(None, x, w, targets, *rest[0], g, *rest[1][:-2], False, True)
            if grad is None:
                assert_bitwise(alone, dw, "without a gradient of the input")

    def test_chunks_that_are_added_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
        a, b, start = whole(0, 4, 96), whole(1, 96, 32), rand(2, 4, 32)
        runs = lambda: linear_grad.ascending(a, b, torch.zeros(4, 32), 32, start=start)
        parallel, plain, refused = runs(), torch.empty, []

        def empty(*size: int, **rest: object) -> Tensor:
            if size == (3, 4, 32):
                refused.append(size)
                raise torch.OutOfMemoryError("out of memory")
            return plain(*size, **rest)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(torch, "empty", empty)
        assert_bitwise(runs(), parallel, "one chunk after another")
        assert refused
        tile = linear_grad.ascending_tile(4, 32, 4, 3)
        assert tile.split == 3
        with pytest.raises(torch.OutOfMemoryError):  # with a schedule's tile, whose dispatcher then runs the anchor
            linear_grad.ascending(a, b, torch.zeros(4, 32), 32, start=start, tile=tile)

    @pytest.mark.parametrize("tokens", (20, 70, 520))
    def test_linear_logprob_of_many_tokens(tokens: int) -> None:
        v = VOCAB_TILE + 44
        x, w = whole(0, tokens, 16).half() / 8, whole(1, v, 16).half() / 8
        targets = torch.arange(tokens) % v
        expected = logprob.logprob(x.float() @ w.float().t(), targets, None, None)
        for o, e in zip(linear_logprob.linear_logprob(x, w, targets, None, None), expected, strict=True):
            assert_bitwise(o, e, "linear_logprob")

    @pytest.mark.parametrize("k", (None, (30, 2, 0, 400, 50, 10)))
    @pytest.mark.parametrize("p", (None, (0.5, 0.9, 1.0, 0.01, 0.999, 0.9)))
    @pytest.mark.parametrize("m", (None, 0.05))
    def test_sample(k: tuple[int, ...] | None, p: tuple[float, ...] | None, m: float | None) -> None:
        logits = rand(0, 6, 300) * 4
        logits[0] = logits[0].round()
        logits[4, ::3] = -torch.inf
        logits[5, :2] = torch.tensor([0.0, -0.0])
        seeds = torch.tensor([1, -5, 2**40 + 3, 7, 8, 9])
        positions = torch.tensor([0, 1, 2**33, 4, 5, 6])
        temperature = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.7])
        top_k = None if k is None else torch.tensor(k, dtype=torch.int32)
        top_p = None if p is None else torch.tensor(p)
        min_p = None if m is None else torch.full((6,), m)
        rest = (temperature, top_k, top_p, min_p)
        tokens, kept, logp, full = sample.sample(logits, seeds, positions, *rest, sample.FULL)
        wanted = sample_reference.sample(logits, seeds, positions, *rest, sample.FULL)
        assert_bitwise(tokens, wanted[0], "tokens")
        assert_bitwise(kept, wanted[1], "kept")
        inverse = sample_reference.inverse_of(temperature)
        over = logprob.logprob(logits, tokens, inverse, kept if len(kept) else None)[0]
        assert_bitwise(logp, over, "logp over the kept set")
        assert_bitwise(full, logprob.logprob(logits, tokens, inverse, None)[0], "logp over all tokens")
        close(logp, wanted[2], "logp")
        for scores in (sample.NOTHING, sample.KEPT):
            some = sample.sample(logits, seeds, positions, *rest, scores)
            assert_bitwise(some[0], tokens, "tokens")
            assert_bitwise(some[1], kept, "kept")
            assert_bitwise(some[2], logp[: len(some[2])], "logp")
        wide = logits.clone()
        sample.filter_logits_(wide, *rest)
        mask = torch.ones(logits.shape, dtype=torch.bool) if not len(kept) else unpack_kept(kept, 300)
        assert_bitwise(wide, (logits * inverse[:, None]).masked_fill(~mask, -torch.inf), "filtered logits")

    @pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
    @pytest.mark.parametrize("filtered", (False, True))
    def test_a_bad_row_gives_a_token_of_the_vocabulary(bad: float, filtered: bool) -> None:
        """The token is undefined, but the next step can look it up."""
        logits = rand(0, 3, 2100)
        logits[0], logits[1, ::2] = bad, bad
        rest = (torch.arange(3), torch.arange(3), torch.ones(3))
        filters = (torch.full((3,), 5, dtype=torch.int32), torch.full((3,), 0.9), torch.full((3,), 0.1))
        tokens = sample.sample(logits, *rest, *(filters if filtered else (None, None, None)), sample.KEPT)[0]
        assert tokens.min() >= 0 and tokens.max() < 2100

    @pytest.mark.parametrize(
        "fits, direct, values", ((4096, 64, "random"), (32, 4, "random"), (32, 4, "tied"), (32, 4, "narrow"))
    )
    def test_sample_of_a_large_vocabulary(fits: int, direct: int, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Several programs per row, thresholds found directly and by narrowing, strided rows, invalid settings."""
        monkeypatch.setattr(sample_threshold, "REGISTER_KEYS", tl.constexpr(fits))
        monkeypatch.setattr(sample_threshold, "FEW_TILES", tl.constexpr(direct))
        logits = rand(0, 4, 8300)[:, :8230]
        if values == "tied":
            logits = logits.round()
            logits[2, 1000:] = -torch.inf
        elif values == "narrow":
            logits = 1000.0 + logits * 1e-2
        seeds, positions = torch.tensor([1, -5, 2**40 + 3, 7]), torch.tensor([0, 1, 2**33, 4])
        rest = (torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([30, 2, 8229, 0], dtype=torch.int32))
        rest = (*rest, torch.tensor([0.5, 0.9, 0.99, 0.7]), torch.full((4,), 1e-3))
        for temperature, k, p, m in (rest, (*rest[:2], None, None), (rest[0], None, rest[2], None)):
            given = logits, seeds, positions, temperature, k, p, m
            tokens, kept, logp, _ = sample.sample(*given, sample.KEPT)
            wanted = sample_reference.sample(*given, sample.NOTHING)
            assert_bitwise(tokens, wanted[0], "tokens")
            assert_bitwise(kept, wanted[1], "kept")
            inverse = sample_reference.inverse_of(temperature)
            assert_bitwise(logp, logprob.logprob(logits, tokens, inverse, kept)[0], "logp")
        if values != "random":
            return
        bad = torch.tensor([torch.nan, -1.0, torch.inf, -torch.inf])
        for k in (-1, 2**31 - 1):
            k_of_all = torch.full_like(rest[1], k)
            tokens = sample.sample(logits, seeds, positions, bad, k_of_all, bad, bad, sample.KEPT)[0]
            assert tokens.shape == (4,)
