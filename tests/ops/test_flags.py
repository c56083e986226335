"""Flags are True or False, and neither is a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlkernel import ops

X, W = torch.randn(3, 8), torch.randn(16, 8)
TARGETS, ROW, IDS = torch.tensor([1, 0, 2]), torch.ones(3), torch.arange(3)
CU = torch.tensor([0, 3], dtype=torch.int32)


def adamw(**options: object) -> None:
    lists = ([torch.zeros(2)] for _ in range(4))
    ops.adamw_(*lists, **{"lr": 1e-3, "step": 1, **options})  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "chunks": (lambda: ops.linear(X, W, chunks=True), ValueError, "linear: chunks=True must be a power of two"),
    "step": (lambda: adamw(step=True), ValueError, "adamw_: step=True must be a whole number"),
    "lr": (lambda: adamw(lr=True), TypeError, "adamw_: lr=True is not a number"),
    "zero_grad": (lambda: adamw(zero_grad="no"), TypeError, "adamw_: zero_grad='no' must be True or False"),
    "temperature": (
        lambda: ops.logprob(X, TARGETS, temperature=True), TypeError, "logprob: temperature=True is not a number"
    ),
    "keep_probs": (
        lambda: ops.linear_logprob(X, W, TARGETS, keep_probs="no"),  # type: ignore[arg-type]
        TypeError, "linear_logprob: keep_probs='no' must be True or False",
    ),
    "keep_bytes": (
        lambda: ops.linear_logprob(X, W, TARGETS, keep_bytes=False), TypeError, "keep_bytes=False is not a number"
    ),
    "return_kept": (
        lambda: ops.sample(X, IDS, IDS, temperature=ROW, return_kept=1),  # type: ignore[arg-type]
        TypeError, "sample: return_kept=1 must be True or False",
    ),
    "betas": (lambda: adamw(betas=(False, 0.9)), ValueError, r"betas=\(False, 0.9\) must be two numbers"),
    "group_size": (
        lambda: ops.group_advantages(ROW, True), TypeError, "group_advantages: group_size=True must be an integer"
    ),
    "normalize_std": (
        lambda: ops.group_advantages(ROW, 3, normalize_std=2),  # type: ignore[arg-type]
        TypeError, "group_advantages: normalize_std=2 must be True or False",
    ),
    "stock": (
        lambda: ops.stock("no").__enter__(), TypeError, "stock: active='no' must be True or False"  # type: ignore[arg-type]
    ),
    "window": (
        lambda: ops.attention(X[:, None], X[:, None], X[:, None], CU, max_seqlen_q=3, window=True),
        TypeError, "attention: window=True, split=2048; expected integers",
    ),
    "max_seqlen": (
        lambda: ops.attention(X[:, None], X[:, None], X[:, None], CU, max_seqlen_q=True),
        TypeError, "max_seqlen_q=True is not an integer",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_flags_are_refused_as_numbers_and_strings_as_flags(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_flag_is_refused_as_a_length_under_compile() -> None:
    def run(n: object) -> torch.Tensor:
        return ops.policy_loss(ROW, None, ROW[:1], CU, loss_type="dr_grpo", max_completion_length=n).loss  # type: ignore[arg-type]

    with pytest.raises(Exception, match="max_completion_length=True is not an integer"):
        torch.compile(run, backend="eager", fullgraph=True)(True)
