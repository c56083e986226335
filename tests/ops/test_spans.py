"""Spans: gather and scatter, and `loss_spans` of the ops: results of the rows alone, nothing from other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, differs, rand
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise

properties = settings(max_examples=30, deadline=None, derandomize=True)
SPANS = torch.tensor([[3, 7], [7, 8], [20, 29]])
ROWS = torch.tensor([*range(3, 8), *range(20, 29)])
T, C, V = 32, 64, 300


@properties
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=6), st.sampled_from((*DTYPES, torch.int64)))
def test_round_trip(parts: list[tuple[int, int]], dtype: torch.dtype) -> None:
    at, spans = 0, []
    for gap, length in parts:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    table = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
    x = (10 * rand(0, at + 2, 3)).to(dtype)
    flat, cu_seqlens, positions = ops.pack_spans(x, table)
    assert cu_seqlens.diff().tolist() == [length for _, length in parts] and cu_seqlens.dtype == torch.int32
    assert positions.tolist() == [i for _, length in parts for i in range(length)]
    for part, (begin, end) in zip(ops.unpack(flat, cu_seqlens), spans, strict=True):
        assert_bitwise(part, x[begin:end], "span")
    assert_bitwise(ops.unpack_spans(flat, table, x), x, "unpacked into its own")
    other = ops.unpack_spans(flat, table, torch.zeros_like(x))
    assert_bitwise(ops.pack_spans(other, table).flat, flat, "packed again")
    assert int((other != 0).any(1).sum()) <= len(flat)


def test_gradients_pass_through() -> None:
    x, base = rand(0, T, 2).requires_grad_(), rand(1, T, 2).requires_grad_()
    ops.unpack_spans(2 * ops.pack_spans(x, SPANS).flat, SPANS, base).sum().backward()
    inside = torch.zeros(T, 1).index_fill(0, ROWS, 1.0).expand(-1, 2)
    assert x.grad is not None and base.grad is not None
    assert_bitwise(x.grad, 2 * inside, "packed")
    assert_bitwise(base.grad, 1 - inside, "base")


def _linear(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: dict[str, Tensor], spans: Tensor | None
) -> Tensor:
    return torch.stack(ops.linear_logprob(hidden, weight, targets, loss_spans=spans, **options))


def _logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: dict[str, Tensor], spans: Tensor | None
) -> Tensor:
    return torch.stack(ops.logprob(ops.linear(hidden, weight), targets, loss_spans=spans, **options))


@pytest.mark.parametrize("score", (_linear, _logits))
def test_only_the_spans_are_computed(score: Callable[..., Tensor]) -> None:
    hidden, weight = rand(0, T, C), rand(1, V, C)
    targets = torch.arange(T) * 7 % V
    kept = ops.pack_kept(rand(2, T, V) > -1.5)
    options = {"temperature": 1.0 + rand(3, T).abs(), "kept": kept}
    every = score(hidden, weight, targets, options, None)
    assert_bitwise(score(hidden, weight, targets, options, SPANS), every[:, ROWS], "rows of the spans")

    poisoned = torch.full_like(hidden, float("nan")).index_copy(0, ROWS, hidden[ROWS]).requires_grad_()
    w, some = weight.clone().requires_grad_(), rand(4, len(ROWS))
    if score is _logits:
        poisoned = hidden.clone().requires_grad_()  # the product with the head has every row
    (score(poisoned, w, targets, options, SPANS)[0] * some).sum().backward()
    rows, w_rows = hidden[ROWS].clone().requires_grad_(), weight.clone().requires_grad_()
    picked = {name: x[ROWS] for name, x in options.items()}
    (score(rows, w_rows, targets[ROWS], picked, None)[0] * some).sum().backward()
    assert poisoned.grad is not None and rows.grad is not None and w.grad is not None and w_rows.grad is not None
    assert_bitwise(poisoned.grad, torch.zeros(T, C).index_copy(0, ROWS, rows.grad), "gradient, 0 outside")
    if score is _linear:
        assert_bitwise(w.grad, w_rows.grad, "weight gradient")
    with ops.stock():
        assert differs(lambda: assert_bitwise(score(hidden, weight, targets, options, SPANS), every[:, ROWS], "stock"))


def test_policy_loss_of_spans() -> None:
    """Three samples of 10, 0 and 22 tokens: the loss of the scored tokens, and of a dense mask."""
    cu = torch.tensor([0, 10, 10, 32], dtype=torch.int32)
    n, dense = len(ROWS), torch.zeros(T, dtype=torch.bool).index_fill(0, ROWS, True)
    logp, old, advantages = rand(0, n).requires_grad_(), rand(1, n), rand(2, 3)
    result = ops.policy_loss(logp, old, advantages, cu, loss_spans=SPANS)
    packed = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    again = logp.detach().clone().requires_grad_()
    expected = ops.policy_loss(again, old, advantages, packed)
    assert_bitwise(result.loss, expected.loss, "loss")
    assert result.stats["tokens"] == n
    result.loss.backward(), expected.loss.backward()
    assert logp.grad is not None and again.grad is not None
    assert_bitwise(logp.grad, again.grad, "gradient")
    wide = lambda x: torch.zeros(T).index_copy(0, ROWS, x)
    masked = ops.policy_loss(wide(logp.detach()), wide(old), advantages, cu, mask=dense)
    assert torch.allclose(masked.loss, result.loss.detach(), rtol=1e-6)
    assert torch.allclose(
        result.loss, ops.policy_loss(logp, old, wide(advantages[[0] * 5 + [2] * 9])[ROWS], packed).loss
    )


def test_bad_input() -> None:
    hidden, weight, targets = rand(0, T, C), rand(1, V, C), torch.zeros(T, dtype=torch.int64)
    score = lambda spans, **more: ops.linear_logprob(hidden, weight, targets, loss_spans=spans, **more)
    for spans, words in (
        ([[4, 6], [5, 8]], r"span 1 is \[5, 8\], after row 6 of 32; spans must ascend"),
        ([[4, 6], [1, 2]], "span 1"),
        ([[4, 4]], "hold at least one row"),
        ([[30, 33]], "end within the rows"),
        ([[-1, 3]], "span 0"),
    ):
        with pytest.raises(ValueError, match=words):
            score(torch.tensor(spans))
    with pytest.raises(ValueError, match=r"expected \[K, 2\]"):
        score(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="expected int32 or int64"):
        score(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="spans is of type list"):
        score([[0, 1]])
    with pytest.raises(ValueError, match="pass one"):
        score(SPANS, rows=ROWS)
    with pytest.raises(ValueError, match="belong to all T=32 tokens"):
        score(SPANS, temperature=torch.ones(len(ROWS)))
    with pytest.raises(ValueError, match=r"targets is \(14,\)"):
        ops.linear_logprob(hidden, weight, targets[ROWS], loss_spans=SPANS)
    with pytest.raises(ValueError, match="the spans have 14 rows, and the vectors 3"):
        ops.policy_loss(rand(0, 3), None, rand(1, 1), torch.tensor([0, 32], dtype=torch.int32), loss_spans=SPANS)
    with pytest.raises(ValueError, match=r"flat is \(3, 64\)"):
        ops.unpack_spans(hidden[:3], SPANS, hidden)
