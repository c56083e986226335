"""Every Triton kernel, compiled without a GPU for every GPU family: the instructions that the contract counts on.

A matrix instruction of another shape, TF32, a flushed denormal or a floating-point atomic would each change bits, and
no tolerance test on one machine would notice.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from rlkernel.kernels.triton import aot

INSTRUCTION = {
    "sm_80": ("mma.sync.aligned.m16n8k16",) * 2,
    "sm_90": ("mma.sync.aligned.m16n8k16", "wgmma.mma_async.sync.aligned.m64"),
    "sm_100": ("mma.sync.aligned.m16n8k16", "tcgen05.mma"),
    "gfx942": ("v_mfma_f32_16x16x16",) * 2,
    "gfx90a": ("v_mfma_f32_16x16x16",) * 2,
}
"""Per target: the matrix instruction of tiles with fewer than 64 rows, and of larger ones."""

MATRIX = re.compile(r"mma\.sync[.\w]*|wgmma\.mma_async[.\w]*|tcgen05\.mma[.\w]*|v_mfma_\w+|v_smfmac\w+")
FLUSHED = re.compile(r"\b(?:fma|add|sub|mul|div|sqrt)\.(?:\w+\.)*ftz\b")
ATOMIC = re.compile(r"\b(?:atom|red)\.\S*(?:global|shared)|_atomic_")


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("module", aot.MODULES)
def test_compiles(module: str, target: str) -> None:
    for variant in aot.variants(module):
        if target not in variant.targets:
            continue
        kernel = aot.compile_variant(variant, target)
        what = f"{variant.name} for {target}"
        assert kernel.shared <= aot.SHARED_LIMIT[target], f"{what}: {kernel.shared} bytes of shared memory"
        assert not ATOMIC.search(kernel.text), f"{what}: {ATOMIC.search(kernel.text)}"
        assert not FLUSHED.search(kernel.text), f"{what}: {FLUSHED.search(kernel.text)}"
        used = set(MATRIX.findall(kernel.text))
        narrow = any("bf16" in t or "fp16" in t for t in variant.types.values())
        if not variant.matmul:
            assert not used, f"{what}: {used}"
        elif narrow:
            expected = INSTRUCTION[target][variant.constants["BLOCK_M"] >= 64]
            assert used and all(name.startswith(expected) for name in used), f"{what}: {used}, expected {expected}"
        else:  # fp32: a chain of fma on NVIDIA, fp32 matrix instructions on AMD
            assert used <= {"v_mfma_f32_16x16x4_f32", "v_mfma_f32_16x16x4f32"}, f"{what}: {used}"
            assert "gfx" in target or "fma.rn.f32" in kernel.text, what
        assert not re.search(r"tf32|xf32", " ".join(used)), f"{what}: {used}"
        if variant.constants.get("TMA"):
            assert "cp.async.bulk.tensor" in kernel.text, what
        if variant.main:  # speed depends on it
            # Register allocation is the compiler's: these bounds are Triton 3.6's, which `make setup` installs here.
            allowed = 0 if target != "sm_80" and triton.__version__.startswith("3.6.") else 16
            usage = kernel.resources()
            assert usage["stack"] <= allowed and usage["spill_stores"] <= allowed // 4, f"{what} spills: {usage}"


@triton.jit
def flushing_kernel(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(x + i, tl.fma(v, v, tl.log2(v)))


def test_sees_flushed_denormals() -> None:
    """The control: one libdevice call, and every operation of the kernel flushes."""
    kernel = aot.compile_variant(aot.Variant("flushing", flushing_kernel, {"x": "*fp32:16"}, {"BLOCK": 128}), "sm_90")
    assert FLUSHED.search(kernel.text)


def test_names_the_argument_without_a_type() -> None:
    variant = aot.variants("common")[0]
    broken = aot.Variant("broken", variant.kernel, {**variant.types, "WIDTH": "i32"}, {})
    with pytest.raises(ValueError, match="'BLOCK'"):
        aot.compile_variant(broken, "sm_90")
