"""Every launch of linear_logprob's gradient products was compared before: classes, pieces, wrong kernels refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.linear_checks import GRAD, MOST, as_they_come, at, dhidden, dweight, rand

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import certification
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import cublaslt
from rlkernel.kernels.cuda import linear_logprob as scoring
from rlkernel.kernels.cuda import linear_logprob_shapes as scored


def dhidden_of_eights(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Any) -> None:
    dhidden(running, dz, weight, fresh, active)
    if dz.shape[1] % 8:
        running += 1


def dweight_of_eights(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Any) -> None:
    dweight(grad, dz, hidden, fresh, active)
    if dz.shape[1] % 8:
        grad += 1


def dweight_of_8192(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Any) -> None:
    dweight(grad, dz, hidden, fresh, active)
    grad[8192:] = 7


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that samples are small, and tokens in their given order."""
    monkeypatch.setattr(scored, "WGRAD_TOKENS", 256)
    monkeypatch.setattr(scored.loop, "PROBS_ENTRIES", 1 << 21)
    monkeypatch.setattr(scored, "SAMPLE_BYTES", 1 << 22)
    monkeypatch.setattr(scored, "_active", as_they_come)


def judged(op: Any, s: Any, run: Callable[..., None]) -> Any:
    """The trial of a schedule of dhidden or dweight with plain products as the anchor."""
    anchor = dhidden if op is scoring._dhidden else dweight
    planted = (Schedule("planted", lambda key: run),)
    spec = dataclasses.replace(op.spec, anchor=anchor, schedules=planted, kinds=("normal",))
    return certification.certify(spec, s, seed=0)[0].trials[0]


@pytest.mark.parametrize("row", (0, 8192, 16384))
@pytest.mark.usefixtures("small", "cache")
def test_a_gradient_that_is_wrong_where_no_call_was_compared_is_refused(row: int) -> None:
    """Odd contraction lengths and block widths, and result rows beyond one chunk."""
    aligned, odd = GRAD._replace(row=row), GRAD._replace(row=row, aligned=False)
    for op, right, of_eights in (
        (scoring._dhidden, dhidden, dhidden_of_eights), (scoring._dweight, dweight, dweight_of_eights),
    ):  # fmt: skip
        assert judged(op, aligned, right).certified and judged(op, odd, right).certified
        assert judged(op, aligned, of_eights).certified, "never called with others"
        refused = judged(op, odd, of_eights)
        assert not refused.certified and refused.first["mismatches"]
    for s in (aligned, odd):
        assert judged(scoring._dweight, s, dweight_of_8192).certified == (row == 8192)


@pytest.mark.usefixtures("small", "cache")
def test_a_gradient_that_is_wrong_for_a_few_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any token count occurs in calls; no sample has only zero gradients, which would hide an omitted product."""

    def leaves_out(tokens: int, right: Callable[..., None]) -> Callable[..., None]:
        def run(to: Tensor, *given: Any) -> None:
            operands = given[:2]
            if len(operands[0]) != tokens:
                right(to, *given)
            elif given[-2]:
                to.zero_()

        return run

    for row, aligned, fresh in itertools.product((0, 16384), (True, False), (True, False)):
        s = GRAD._replace(row=row, aligned=aligned, fresh=fresh)
        for op, right, counts in ((scoring._dhidden, dhidden, (1,)), (scoring._dweight, dweight, (1, 9))):
            s = s._replace(few=op is scoring._dhidden)
            assert judged(op, s, leaves_out(0, right)).certified
            for tokens in counts:
                refused = judged(op, s, leaves_out(tokens, right))
                assert not refused.certified and refused.first["rows"] == tokens, (s, tokens)


@pytest.mark.parametrize("tokens", (1, 76, 77))
def test_few_tokens_are_the_anchors_and_not_cublaslts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were compared with it only at 77 tokens and more."""
    ran: list[str] = []
    for name in ("dhidden_block", "dweight_block"):
        monkeypatch.setattr(scoring.anchor, name, lambda *_: ran.append("anchor"))
    monkeypatch.setattr(cublaslt, "plan", lambda *_: cublaslt.Plan(0, 0, "none"))
    monkeypatch.setattr(cublaslt, "launcher", lambda *_: lambda *_: ran.append("cublaslt"))
    dz, weight, hidden = at(0, tokens, 48), at(0, 48, 64), at(0, tokens, 64)
    sums, grad = torch.zeros(tokens, 64), torch.zeros(48, 64)
    key = scored.dhidden_shape(sums, dz, weight, True, MOST)._replace(device=0)
    scoring._cublaslt_dhidden(0).bind(key)(sums, dz, weight, True, MOST)
    key = scored.dweight_shape(grad, dz, hidden, True, MOST)._replace(device=0)
    scoring._cublaslt_dweight(0).bind(key)(grad, dz, hidden, True, MOST)
    assert ran == ["cublaslt" if tokens >= 77 else "anchor"] * 2


def test_cublaslt_computes_multiples_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for op in (scoring._dhidden, scoring._dweight):
        names = lambda s, op=op: [x.name for x in op.spec.schedules if x.supports(s)]
        here = GRAD._replace(device=0)
        assert names(here) == ["hopper", *(f"cublaslt.{rank}" for rank in range(cublaslt.RANKS))]
        assert names(here._replace(aligned=False)) == names(here._replace(row=0)) == ["hopper"]


@pytest.mark.usefixtures("small")
def test_what_is_no_multiple_of_8_is_a_class_of_its_own() -> None:
    running, grad, x = torch.zeros(9, 64), torch.zeros(48, 64), rand(9, 64)
    for entries in range(40, 49):
        dz, some = rand(9, 48)[:, :entries], MOST
        for key in (
            scored.dhidden_shape(running, dz, rand(entries, 64), True, some),
            scored.dweight_shape(grad[:entries], dz, x, True, some),
        ):
            s = key
            assert s.aligned == (entries % 8 == 0) and s.row == 48
            generator = torch.Generator().manual_seed(0)
            for m in scored.rows_of_grad(key):
                dz_ = scored.dweight_sample(key, m, "normal", generator)[1]
                assert (dz_.shape[1] % 8 == 0) == (s.aligned or m == scored.CUBLASLT_MIN_TOKENS)
            for few in (False, True):
                key = s._replace(few=few)
                for m in scored.rows_of_dhidden(key):
                    assert (scored.dhidden_sample(key, m, "normal", generator)[1].shape[1] % 8 == 0) == s.aligned


@pytest.mark.usefixtures("small")
def test_no_schedule_of_dweight_gets_more_rows_than_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring.anchor, "dweight_block", lambda *given: (ran.append("anchor"), dweight(*given)))
    ran: list[Any] = []
    integers = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    for aligned, row in itertools.product((True, False), (0, 16384)):
        s = GRAD._replace(aligned=aligned, row=row)
        compared = {m: len(scored.dweight_sample(s, m, "normal", torch.Generator())[0])
                    for m in scored.rows_of_grad(s) if m not in scored.NARROW}  # fmt: skip
        assert max(compared) == scored.max_tokens(s) == 256
        run = scoring._in_pieces(s, lambda *given: (ran.append(given[1].shape), dweight(*given)))
        for tokens, entries in itertools.product((1, 129, 130, 256), (5, 8192, 16384 - (not aligned))):
            dz, x, grad = integers(tokens, 16384)[:, :entries], integers(tokens, 16), torch.ones(entries, 16)
            run(grad, dz, x, False, MOST)
            assert_bitwise(grad, dz.float().t() @ x.float() + 1, f"{tokens} x {entries}")
            most = next(n for m, n in sorted(compared.items()) if tokens <= m)
            assert sum(n for _, n in ran) == entries and max(n for _, n in ran) <= most
            assert len(ran) == 1 or entries > most - 8, "no more pieces than needed"
            ran.clear()
        run(torch.ones(8, 16), integers(257, 8), integers(257, 16), False, MOST)
        assert ran.pop() == "anchor", "more tokens than were compared"


@pytest.mark.parametrize("entries", (scored.loop.DZ_ENTRIES, scored.loop.PROBS_ENTRIES))
@pytest.mark.parametrize("vocab", (1000, 8192, 50257, 151936, 262144))
def test_blocks_of_dz_have_no_more_tokens_than_are_compared(vocab: int, entries: int) -> None:
    from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK, VOCAB_TILE

    for tokens in {*range(1, 8193, 97), *(1 << n for n in range(14)), *((1 << n) - 1 for n in range(1, 14)), 8192}:
        chunks = scored.loop.chunks_of_dz(tokens, entries)
        row = min(-(-vocab // VOCAB_TILE) * VOCAB_TILE, chunks * LOGPROB_DGRAD_CHUNK)
        s = GRAD._replace(c=4096, row=row)
        assert tokens <= scored.max_tokens(s) == max(scored.rows_of_grad(s))
        for m in scored.rows_of_grad(s):
            assert m * row <= 1 << 28, "at most half a GiB of dz"
            assert scored.widest(s, m) * max(2 * m, 4 * s.c) <= scored.SAMPLE_BYTES
        if tokens >= 2048 and entries == scored.loop.DZ_ENTRIES:
            assert all(scored.widest(s, m) == row for m in scored.rows_of_grad(s)), "the real width"


# ---- dhidden: parallel chunks ---------------------------------------------------------------------
