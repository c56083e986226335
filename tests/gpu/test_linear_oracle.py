"""linear on a Hopper GPU equals the model of its tensor cores in `oracle/hopper_mma.py`, forward and backward.

Control: the model with one bit more or less below the largest exponent differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu.gpu_checks import Compared
from ops.op_checks import differs
from oracle.hopper_mma import FRACTION_BITS, chain, linear
from torch import Tensor

from rlkernel import ops
from rlkernel.contract.orders import WGRAD_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the oracle models sm_90 only",
    ),
]

dtypes = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))


def data(kind: str, rows: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Standard normal numbers; their absolute values (positive); or exponents spread over 2^+-8 (wide)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if kind == "positive":
        x = x.abs()
    if kind == "wide":
        x = torch.ldexp(x, torch.randint(-8, 9, (rows, k), generator=generator))
    return x.to(dtype)


def numbers(x: Tensor) -> np.ndarray:
    return x.float().numpy()


@pytest.mark.parametrize(
    "kind,dtype",  # fp16 would overflow with wide exponents
    [(kind, torch.bfloat16) for kind in ("normal", "positive", "wide")]
    + [(kind, torch.float16) for kind in ("normal", "positive")],
)
@pytest.mark.parametrize("m", (1, 16, 33, 200))
@pytest.mark.parametrize("k,chunks", ((1024, 1), (1024, 2), (1024, 8), (2048, 16), (200, 1)))
def test_linear_equals_the_tensor_core_model(
    m: int, k: int, chunks: int, kind: str, dtype: torch.dtype, record: Callable[..., None]
) -> None:
    x, w = data(kind, m, k, dtype, 0), data(kind, 48, k, dtype, 1)
    expected = torch.from_numpy(linear(numbers(x), numbers(w), chunks))
    y = ops.linear(x.cuda(), w.cuda(), chunks=chunks, out_dtype=torch.float32)
    seen = Compared()
    seen.rows(y, expected, f"linear [{m},{k}] x [48,{k}], {chunks} chunks, {kind}")
    rounded = ops.linear(x.cuda(), w.cuda(), chunks=chunks)
    seen.rows(rounded, expected.to(dtype), "one rounding at the end")
    record(**vars(seen))


@pytest.mark.parametrize("bits", (FRACTION_BITS - 1, FRACTION_BITS + 1))
def test_control_another_model_differs(bits: int) -> None:
    x, w = data("normal", 33, 1024, torch.bfloat16, 0), data("normal", 48, 1024, torch.bfloat16, 1)
    other = torch.from_numpy(linear(numbers(x), numbers(w), fraction_bits=bits))
    assert differs(
        lambda: Compared().rows(ops.linear(x.cuda(), w.cuda(), out_dtype=torch.float32), other, "another model")
    )


@dtypes
@pytest.mark.parametrize("chunks", (1, 4))
def test_input_gradient_equals_the_tensor_core_model(
    chunks: int, dtype: torch.dtype, record: Callable[..., None]
) -> None:
    dy, w = data("normal", 70, 512, dtype, 2), data("normal", 512, 96, dtype, 3)
    expected = torch.from_numpy(linear(numbers(dy), numbers(w.t().contiguous()), chunks)).to(dtype)
    seen = Compared()
    seen.rows(torch.ops.rlkernel.linear_dgrad(dy.cuda(), w.cuda(), chunks), expected, "input gradient")
    record(**vars(seen))


@dtypes
@pytest.mark.parametrize("tokens", (40, 2 * WGRAD_TOKENS + 100))
def test_weight_gradient_equals_the_tensor_core_model(
    tokens: int, dtype: torch.dtype, record: Callable[..., None]
) -> None:
    dy, x = data("normal", tokens, 48, dtype, 4), data("normal", tokens, 80, dtype, 5)
    total = data("normal", 48, 80, torch.float32, 6)
    grad = total.cuda()
    for first in range(0, tokens, WGRAD_TOKENS):
        piece = slice(first, first + WGRAD_TOKENS)
        total = total + torch.from_numpy(chain(numbers(dy[piece]).T, numbers(x[piece]).T))
    torch.ops.rlkernel.linear_wgrad_(grad, dy.cuda(), x.cuda())
    seen = Compared()
    seen.whole(grad, total, "weight gradient, continued from main_grad")
    record(**vars(seen))
