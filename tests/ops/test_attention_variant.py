"""Variants of attention in the ops: choice, errors, gradients, contract ids, with a fake FlashAttention-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ops.attention_paths import cu, gradients, packed, rand, sequences
from ops.fake_fa3 import fake, install
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import CONTRACT_ID, assert_bitwise, compare_bitwise
from rlkernel.kernels.errors import VariantError

LENS = [40, 1, 23]
BF16 = torch.bfloat16


@pytest.fixture
def fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)


def inputs(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat(parts) for parts in zip(*sequences(LENS, 2, 2, 8, dtype), strict=True))
    return q, k, v, cu(LENS)


@pytest.mark.usefixtures("fa3")
def test_the_choice() -> None:
    q, k, v, at = inputs()
    run = lambda **options: ops.attention(q, k, v, at, max_seqlen_q=40, **options)[0]
    assert ops.current_attention_variant() == "split"
    plain, other = run(), run(variant="fa3")
    assert compare_bitwise(other, plain).mismatches > 0
    assert_bitwise(run(variant="split"), plain)
    with ops.attention_variant("fa3"):
        assert_bitwise(run(), other)
        assert_bitwise(run(variant="fa3"), other)
        with ops.attention_variant("split"):
            assert_bitwise(run(), plain)
        with pytest.raises(VariantError, match="'split' was requested in a process that is set to 'fa3'"):
            run(variant="split")
        with ops.stock():
            assert ops.current_attention_variant() == "fa3"
            run()
    ops.set_attention_variant("fa3")
    try:
        assert_bitwise(run(), other)
    finally:
        ops.set_attention_variant(None)
    assert_bitwise(run(), plain)
    for name in ("fa2", ""):
        with pytest.raises(ValueError, match=f"variant is {name!r}; expected one of split, fa3"):
            run(variant=name)
        with pytest.raises(ValueError, match="expected one of split, fa3"):
            ops.set_attention_variant(name)


@pytest.mark.usefixtures("fa3")
def test_pages_and_packing_agree_and_lse_is_ours() -> None:
    batch = sequences(LENS, 2, 2, 8, BF16)
    together = packed(batch, variant="fa3")
    for one, (out, lse) in zip(batch, together, strict=True):
        assert out.shape == one.q.shape and lse.shape == one.q.shape[:2] and lse.dtype == torch.float32
        alone_out, alone_lse = packed([one], variant="fa3")[0]
        assert_bitwise(alone_out, out)
        assert_bitwise(alone_lse, lse)
    s, n = batch[0], LENS[0]
    k_cache, v_cache = (torch.zeros(4, 16, 2, 8, dtype=BF16) for _ in range(2))
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = torch.tensor([[2, 0, 3][j // 16] * 16 + j % 16 for j in range(n)])
    ops.store_kv_(k_cache, v_cache, s.k, s.v, slots)
    for first in (0, 7, n - 1):
        out, lse = ops.paged_attention(
            s.q[first:], k_cache, v_cache, table, cu([n - first]), torch.tensor([n], dtype=torch.int32),
            max_seqlen_q=n - first, max_seqlen_k=n, variant="fa3",
        )  # fmt: skip
        assert_bitwise(out, together[0][0][first:])
        assert_bitwise(lse, together[0][1][first:])


def test_gradients_are_ours_on_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fake has our order, gradients have our bits, so the LSE has the right layout and base."""
    install(monkeypatch, tmp_path, fake(lambda paged, longest, batch: 1.0))
    batch = sequences(LENS, 2, 2, 8, BF16)
    douts = [rand(9 + i, *s.q.shape, dtype=BF16) for i, s in enumerate(batch)]
    ours, theirs = gradients(batch, douts), gradients(batch, douts, variant="fa3")
    for a, b in zip(ours, theirs, strict=True):
        for name, x, y in zip(("dq", "dk", "dv"), a, b, strict=True):
            assert_bitwise(y, x, name)


@pytest.mark.usefixtures("fa3")
def test_errors() -> None:
    q, k, v, at = inputs()
    run = lambda *tensors, **options: ops.attention(*tensors, at, max_seqlen_q=40, variant="fa3", **options)
    with pytest.raises(VariantError, match="does not support window=5; use variant 'split'"):
        run(q, k, v, window=5)
    with pytest.raises(VariantError, match="does not support split=64"):
        run(q, k, v, split=64)
    with pytest.raises(VariantError, match="not float32; cast the model"):
        run(q.float(), k.float(), v.float())
    with pytest.raises(VariantError, match="does not support window"):
        ops.check_attention_variant("fa3", q.device, BF16, heads=4, kv_heads=2, head_dim=8, window=3)
    ops.check_attention_variant("split", q.device, torch.float32, heads=4, kv_heads=2, head_dim=8, window=3)
    ops.check_attention_variant("fa3", q.device, BF16, heads=4, kv_heads=2, head_dim=8, page_size=5)


def test_a_refusal_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, fake(lambda paged, longest, batch: 1 + paged / 64))
    q, k, v, at = inputs()
    with pytest.raises(VariantError, match=r"refused for .*, 'H': 4, 'HK': 2.*first: normal values, .*dense"):
        ops.attention(q, k, v, at, max_seqlen_q=40, variant="fa3")


def test_ids() -> None:
    assert ops.attention_contract() == ops.attention_contract("split") == CONTRACT_ID
    assert ops.attention_contract("fa3") == f"{CONTRACT_ID}+fa3"
    with ops.attention_variant("fa3"):
        assert ops.attention_contract() == f"{CONTRACT_ID}+fa3"
    with pytest.raises(ValueError, match="expected one of"):
        ops.attention_contract("fa2")


@pytest.mark.usefixtures("fa3")
def test_registration() -> None:
    q, k, v, at = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.rlkernel.attention_fa3.default, (*leaves, at, at, 40, 40, 0.3))
    pages = [torch.randn(4, 16, 2, 8).to(BF16) for _ in range(2)]
    table, lens = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), torch.tensor([20, 17], dtype=torch.int32)
    arguments = (q.detach()[:5], *pages, table, cu([2, 3]), lens, 3, 20, 0.3)
    torch.library.opcheck(torch.ops.rlkernel.paged_attention_fa3.default, arguments)
