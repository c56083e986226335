"""logprob on a GPU: accurate against fp64 computed on the GPU, the same bits in any batch and tile.

Control: log-probabilities of the stock head depend on the batch.
"""

from __future__ import annotations

import pytest
import torch
from gpu.gpu_checks import DEVICE, Record, assert_rows_alone, data
from gpu.logprob_checks import by_filter, finite, logprob_truth, scored, settings
from ops.op_checks import assert_right, by_dtype, differs
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.contract.orders import VOCAB_TILE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@by_dtype
@by_filter
def test_logprob(filtered: bool, dtype: torch.dtype, record: Record) -> None:
    v = 10 * VOCAB_TILE + 44
    logits, g, h = data(0, 60, v, dtype=dtype) * 3, data(1, 60), data(2, 60)
    targets, temperature, kept = scored(60, v)
    if filtered:
        g[1] = h[1] = 0.0  # a dropped target has no gradient
    options = settings(filtered, temperature, kept)
    assert_right(
        lambda z: finite(ops.logprob(z, targets, **options)),
        lambda z: logprob_truth(z, targets, options.get("temperature"), options.get("kept")),
        (logits,),
        (g, h),
        "logprob",
    )
    logits = data(3, 1100, v, dtype=dtype) * 3
    targets, temperature, kept = scored(1100, v)
    batch = (logits, targets, temperature if filtered else None, kept if filtered else None)
    run = lambda z, y, t, k: ops.logprob(z, y, temperature=1.0 if t is None else t, kept=k)
    record(**vars(assert_rows_alone(run, batch, "logprob")))


@pytest.mark.parametrize(
    "dtype,filtered,v",
    (
        (torch.bfloat16, False, 520 * VOCAB_TILE + 64),
        (torch.bfloat16, True, 150 * VOCAB_TILE),
        (torch.bfloat16, False, 150 * VOCAB_TILE + 13),
        (torch.float16, True, 150 * VOCAB_TILE + 13),
        (torch.float32, False, 150 * VOCAB_TILE),
    ),
)
def test_logprob_of_a_large_vocabulary(dtype: torch.dtype, filtered: bool, v: int, record: Record) -> None:
    """From 256 rows on each program computes one row; results equal those of fewer rows and of other load widths."""
    logits = data(3, 300, v, dtype=dtype) * 3
    logits[7, 300:700], logits[8, 999], logits[9, 1000] = -torch.inf, torch.inf, torch.nan
    targets, temperature, kept = scored(300, v)
    batch = (logits, targets, temperature if filtered else None, kept if filtered else None)
    run = lambda z, y, t, k: ops.logprob(z, y, temperature=1.0 if t is None else t, kept=k)
    seen = assert_rows_alone(run, batch, "logprob")
    unaligned = torch.empty(300, v + 1, dtype=dtype, device=DEVICE)[:, 1:].copy_(logits)
    seen.rows(run(unaligned, *batch[1:]), run(*batch), "unaligned logits, without vector loads")
    if not filtered:  # 1/T = 1: the product changes no bit
        seen.rows(run(logits, targets, torch.ones_like(temperature), None), run(*batch), "a temperature of 1")
    rows = slice(10, 300)
    truth = logprob_truth(logits[rows].double(), targets[rows], *(None if t is None else t[rows] for t in batch[2:]))
    for ours, true in zip(finite(run(*(None if t is None else t[rows] for t in batch))), truth, strict=True):
        assert_accurate(ours, true, None, "large vocabulary", dtype=torch.float32)
    record(**vars(seen))


def test_control_stock_logprob_depends_on_the_batch() -> None:
    """The product of the stock head varies with M, and every log-probability with it."""
    x, w = data(0, 1100, 12288, dtype=torch.bfloat16), data(1, 4096, 12288, dtype=torch.bfloat16) / 100
    y = torch.randint(0, 4096, (1100,), device=DEVICE)
    with ops.stock():
        assert differs(lambda: assert_rows_alone(lambda x, y: ops.linear_logprob(x, w, y), (x, y), "stock"))


def test_logprob_special_rows() -> None:
    logits = data(0, 5, 300)
    logits[0, 5], logits[1, 130], logits[2], logits[3, :200] = torch.nan, torch.inf, -torch.inf, -torch.inf
    targets = torch.tensor([5, 5, 5, 5, 5])
    gpu = ops.logprob(logits, targets.to(DEVICE))
    cpu = ops.logprob(logits.cpu(), targets)
    for name, ours, reference in zip(gpu._fields, gpu, cpu, strict=True):
        assert torch.equal(torch.isnan(ours.cpu()), torch.isnan(reference)), name
        assert torch.equal(torch.isinf(ours.cpu()), torch.isinf(reference)), name


@pytest.mark.gpu_memory(14)
def test_more_than_2_to_the_31_logits() -> None:
    v = 151936
    tokens = 2**31 // v + 300
    logits = torch.empty(tokens, v, dtype=torch.bfloat16, device=DEVICE).normal_(generator=torch.Generator(DEVICE))
    targets = torch.randint(0, v, (tokens,), device=DEVICE)
    last = slice(tokens - 3, tokens)
    whole = ops.logprob(logits, targets)
    alone = ops.logprob(logits[last].clone(), targets[last])
    for w, a in zip(whole, alone, strict=True):
        assert_bitwise(w[last], a, "rows past 2^31 elements")

    def gradient(z: Tensor, y: Tensor) -> Tensor:
        _, entropy, _, stats = torch.ops.rlkernel.logprob(z, y, None, None)
        return torch.ops.rlkernel.logprob_dgrad(z, y, None, None, stats, entropy, torch.ones_like(entropy), None)

    assert_bitwise(gradient(logits, targets)[last], gradient(logits[last].clone(), targets[last]), "their gradient")
