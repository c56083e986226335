"""Shared by all Triton kernels: elementary functions, the second pass of two-pass sums, launch options."""

# Rules for every kernel in this folder:
# - No libdevice: one call makes the whole kernel flush denormals, so its bits differ from those of other kernels.
# - No contraction: every launch sets `enable_fp_fusion=False`, and an fma is written where the contract has one.
# - No conversion of an operand of `tl.dot`: it permutes k inside the instruction.
# - No unary minus where the sign of a zero matters, because Triton computes 0 - x, and no literal -0.0, which Triton
#   reads as +0: use `negated` and `negative_zeros`.

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

IS_HIP = torch.version.hip is not None
PDL_BYTES = 16 << 20  # largest operand of a launch with PDL; those of decode steps are smaller


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def after_previous(PDL: tl.constexpr):
    """First statement of a kernel launched with `pdl`: waits for the previous kernel, then lets the next one start.

    Every kernel waits for its predecessor here, so all earlier kernels of the stream have finished on return.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def negated(x):
    """-x with the right sign of zero. Triton computes -x as 0 - x, which is +0 for both zeros."""
    return x * -1.0


@triton.jit
def negative_zeros(shape: tl.constexpr):
    """fp32 tensor of -0, the identity of fp32 addition."""
    return negated(tl.full(shape, 0.0, tl.float32))


@triton.jit
def exp2(x):
    """2^x by the hardware instruction; results below 2^-126 are +0."""
    return tl.exp2(x)


@triton.jit
def exp(x):
    """e^x as exp2(x * log2(e)), the product rounded to fp32."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log2_parts(r, exponent):
    """exponent + log2(1 + r) for sqrt(1/2) <= 1 + r < sqrt(2), by the polynomial of `reference/arith.py`.

    lg2.approx is not used, because near 1 it only bounds the absolute error; Gumbel noise needs a small relative error.
    """
    p = tl.fma(-0.11020159721374512, r, 0.18631209433078766)
    p = tl.fma(p, r, -0.19102497398853302)
    p = tl.fma(p, r, 0.2045752853155136)
    p = tl.fma(p, r, -0.23961904644966125)
    p = tl.fma(p, r, 0.2885688841342926)
    p = tl.fma(p, r, -0.3606966435909271)
    p = tl.fma(p, r, 0.4808982014656067)
    p = tl.fma(p, r, -0.7213473320007324)
    p = tl.fma(p, r, 1.4426950216293335)
    return tl.fma(r, p, exponent)


@triton.jit
def log2_split(x):
    """(r, exponent) with x = 2^exponent * (1 + r), for positive normal fp32 x; exponent int32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent


@triton.jit
def log2(x):
    """log2 of positive normal fp32 numbers; +0 gives -inf, inf gives inf, NaN stays."""
    r, exponent = log2_split(x)
    out = log2_parts(r, exponent.to(tl.float32))
    out = tl.where(x == 0.0, float("-inf"), out)
    return tl.where((x == float("inf")) | (x != x), x, out)


@triton.jit
def fold_rows(x):
    """Sum [WIDTH] of the rows of x [2^n, WIDTH], folded in halves; only pairs are added, so no layout changes a bit."""
    for _ in tl.static_range(20):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), axis=0)
    return tl.reshape(x, (x.shape[1],))


@triton.jit(do_not_specialize=["SEGMENTS"])
def add_partials_kernel(
    partials, grad, SEGMENTS, WIDTH, FRESH: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """grad [WIDTH] += partials [SEGMENTS, WIDTH], segments ascending: the second pass of a two-pass sum.

    FRESH: overwrites grad with the sum, rounded once to its dtype.
    """
    after_previous(PDL)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    if not FRESH:
        total = tl.load(grad + column, mask=inside, other=0.0)
    for first in range(0, SEGMENTS, UNROLL):
        rows = ()
        for i in tl.static_range(UNROLL):  # issues all loads before the first addition
            at = tl.cast(first + i, tl.int64) * WIDTH + column
            # partial sums start at +0 and are never -0, so adding 0 past the last one changes no total
            rows = rows + (tl.load(partials + at, mask=inside & (first + i < SEGMENTS), other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            total += rows[i]
    tl.store(grad + column, total.to(grad.dtype.element_ty), mask=inside)


# ---- launchers -----------------------------------------------------------------------------------


def options(matmul: bool = False) -> dict[str, Any]:
    """Compiler options that the contract requires; `matmul` for kernels with a `tl.dot`."""
    if matmul and IS_HIP:
        # the shape of the MFMA and the packing of k decide which products one instruction adds
        return {"enable_fp_fusion": False, "matrix_instr_nonkdim": 16, "kpack": 1}
    return {"enable_fp_fusion": False}


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU current, because Triton launches on the current device.

    Raises:
        TypeError: the kernels do not support the tensor's dtype.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"rlkernel's GPU kernels take float32, bfloat16 and float16, not {tensor.dtype}")
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied unless it is contiguous and 16-byte aligned.

    Alignment decides the vector width of a load, the width decides which thread holds an element, and the layout
    decides the order of `tl.sum`. Operands of a kernel that sums with `tl.sum` over more than pairs need this.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def family(t: Tensor) -> str:
    """Matrix instructions of the tensor's GPU: "amd", "ampere" (mma.sync), "hopper" (wgmma) or "blackwell" (tcgen05).

    "hopper" for CPU tensors, on which Triton's interpreter runs.
    """
    if IS_HIP:
        return "amd"
    if not t.is_cuda:
        return "hopper"
    return {9: "hopper", 10: "blackwell", 11: "blackwell"}.get(_capability(t.device.index), "ampere")


def pdl(tensor: Tensor) -> dict[str, Any]:
    """Launch options for programmatic dependent launch of a kernel on `tensor` that starts with `after_previous`.

    The launch then overlaps the previous kernel. Off before Hopper, on AMD, and for large tensors, because the waiting
    programs of the next kernel take SM slots: swiglu [16384, 12288] took 0.29 ms on an H200 before it had PDL and 0.48
    ms with it.
    """
    if IS_HIP or not tensor.is_cuda or tensor.nbytes > PDL_BYTES or _capability(tensor.device.index) < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def contiguous_heads(x: Tensor) -> Tensor:
    """x [n, heads, D], copied unless the heads of a row are contiguous, as in a slice of a fused projection.

    Rows further than 2^24 elements from each other are copied too, so that offsets inside a tile fit in 32 bits.
    """
    near = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) < 1 << 24
    return x if near else x.contiguous()


def add_partials_(grad: Tensor, partials: Tensor, fresh: bool = False) -> None:
    """grad [width] fp32 += partials [segments, width], segments ascending; `fresh` overwrites a grad of any dtype."""
    segments, width = partials.shape
    add_partials_kernel[(cdiv(width, 32),)](
        partials, grad, segments, width, FRESH=fresh, UNROLL=16, BLOCK=32, num_warps=1, **pdl(grad), **options()
    )


def next_power_of_2(n: int, least: int = 1) -> int:
    """Smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length() if n > 1 else 1)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b); faster on the host than `triton.cdiv`, which is wrapped for use in kernels."""
    return -(-a // b)
