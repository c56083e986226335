"""Compiles every Triton kernel for every GPU family, without a GPU, and checks the instructions the contract needs.

A matrix instruction of another shape, TF32, a flushed denormal or a floating-point atomic would change bits, and no
tolerance test on one machine would notice.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import aot
import triton
import triton.language as tl

import rlkernel

INSTRUCTION = {
    "sm_80": ("mma.sync.aligned.m16n8k16",) * 2,
    "sm_90": ("mma.sync.aligned.m16n8k16", "wgmma.mma_async.sync.aligned.m64"),
    "sm_100": ("mma.sync.aligned.m16n8k16", "tcgen05.mma"),
    "gfx942": ("v_mfma_f32_16x16x16",) * 2,
    "gfx90a": ("v_mfma_f32_16x16x16",) * 2,
}
"""Per target: the matrix instruction of tiles with fewer than 64 rows, and of taller tiles."""

FLUSHED = re.compile(r"\b(?:fma|add|sub|mul|div|sqrt)\.(?:\w+\.)*ftz\b")
ATOMIC = re.compile(r"\b(?:atom|red)\.(?!\S*\.[bsu](?:32|64)\b)\S*(?:global|shared)|_atomic_")
"""Atomic additions of floating-point numbers, whose order is not fixed; flags between GPUs are integers."""
JIT = re.compile(r"\btriton\.jit\b")
PACKAGE = Path(rlkernel.__file__).resolve().parent

MEMORY = re.compile(r"\b(?:ld|st|red|atom)\.(?:\w+\.)*global|\bcp\.async|\bprefetch\.")
"""PTX that touches global memory."""


def problems(kernel: aot.Compiled) -> list[str]:
    """Violations of the contract in the machine code: forbidden or missing instructions, spills."""
    variant, target, text, found = kernel.variant, kernel.target, kernel.text, []
    if kernel.shared > aot.SHARED_LIMIT[target]:
        found.append(f"{kernel.shared} bytes of shared memory")
    found += [f"{what}: {m[0]}" for what, p in (("atomic", ATOMIC), ("flushes", FLUSHED)) if (m := p.search(text))]
    used = kernel.matrix()
    narrow = any("bf16" in t or "fp16" in t for t in variant.types.values())
    if not variant.matmul:
        expected: tuple[str, ...] = ()
    elif narrow:
        expected = (INSTRUCTION[target][variant.constants["BLOCK_M"] >= 64],)
        if not used:
            found.append(f"no matrix instruction, expected {expected[0]}")
    else:  # fp32: a chain of fma on NVIDIA, fp32 matrix instructions on AMD
        expected = ("v_mfma_f32_16x16x4_f32", "v_mfma_f32_16x16x4f32")
        if "gfx" not in target and "fma.rn.f32" not in text:
            found.append("no fma")
    found += [f"{name}, expected {expected}" for name in used if not expected or not name.startswith(expected)]
    found += [f"reduced precision: {name}" for name in used if re.search(r"tf32|xf32", name)]
    if variant.constants.get("TMA") and "cp.async.bulk.tensor" not in text:
        found.append("no bulk tensor copy")
    if variant.constants.get("PDL"):  # it may start while the previous kernel still writes the inputs
        wait, first = text.find("griddepcontrol.wait"), MEMORY.search(text)
        if wait < 0 or (first is not None and first.start() < wait):
            found.append("global memory is touched before griddepcontrol.wait")
    if variant.main:  # speed depends on it
        # Register allocation is the compiler's: these bounds are Triton 3.6's, which `make setup` installs here.
        allowed = 0 if target != "sm_80" and triton.__version__.startswith("3.6.") else 16
        allowed = max(allowed, variant.stack)
        usage = kernel.resources()
        if usage["stack"] > allowed or usage["spill_stores"] > allowed // 4:
            found.append(f"spills: {usage}")
    return found


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("module", aot.MODULES)
def test_compiles(module: str, target: str) -> None:
    for variant in aot.variants(module):
        if target in variant.targets:
            found = problems(aot.compile_variant(variant, target))
            assert not found, f"{variant.name} for {target}: {'; '.join(found)}"


def test_a_pdl_kernel_that_does_not_wait_is_found() -> None:
    plain, pdl = (v for v in aot.variants("rms_norm") if v.name in ("add_rms_norm", "add_rms_norm, early"))
    compiled = aot.compile_variant(plain, "sm_90")
    assert not problems(compiled)
    assert problems(replace(compiled, variant=pdl)) == ["global memory is touched before griddepcontrol.wait"]


def test_main_products_have_hopper_tiles() -> None:
    """`test_compiles` requires wgmma for tiles of 64 rows or more; every module with products must have such a tile."""
    for module in aot.MODULES:
        products = [v for v in aot.variants(module) if v.matmul]
        tall = [v for v in products if v.main and v.constants["BLOCK_M"] >= 64 and "sm_90" in v.targets]
        assert tall or not products, f"{module} has no main product with BLOCK_M >= 64"


def jit_functions(path: Path) -> tuple[set[str], set[str]]:
    """Names of a file's jitted functions, and of the kernels it launches: `name[grid](...)`, `name.warmup(...)`."""
    tree = ast.parse(path.read_text())
    jitted = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(JIT.search(ast.unparse(d)) for d in node.decorator_list)
    }
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    launched = [f.value for f in called if isinstance(f, ast.Subscript)]
    launched += [f.value for f in called if isinstance(f, ast.Attribute) and f.attr in ("run", "warmup")]
    return jitted, {ast.unparse(value).rsplit(".", 1)[-1] for value in launched}


def test_every_launched_kernel_is_registered() -> None:
    files = {path: jit_functions(path) for path in sorted(PACKAGE.rglob("*.py"))}
    registered = {v.kernel.fn.__name__ for v in aot.variants()}
    launched = {name for _, names in files.values() for name in names}
    missing = [
        f"{name} in {path.relative_to(PACKAGE)}"
        for path, (jitted, _) in files.items()
        for name in sorted(jitted)
        if (name in launched or name.endswith("_kernel")) and name not in registered
    ]
    assert not missing, f"missing in tests/aot, or its module is missing in aot.MODULES: {', '.join(missing)}"
    assert registered <= {name for jitted, _ in files.values() for name in jitted}


@triton.jit
def tf32_kernel(x, y, BLOCK_M: tl.constexpr):
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, 32)[None, :]
    a = tl.load(x + i * 32 + j)
    b = tl.load(x + tl.arange(0, 32)[:, None] * 32 + j)
    tl.store(y + i * 32 + j, tl.dot(a, b, input_precision="tf32"))


@triton.jit
def crowded_kernel(x, y, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    tl.store(y + tl.arange(0, BLOCK), v - tl.max(v, axis=0))


@triton.jit
def atomic_kernel(x, BLOCK: tl.constexpr):
    tl.atomic_add(x + tl.arange(0, BLOCK) % 2, 1.0)


PLANTED = {
    "tf32": (
        aot.Variant("tf32", tf32_kernel, {"x": "*fp32:16", "y": "*fp32:16"}, {"BLOCK_M": 64}, matmul=True),
        "tf32",
    ),
    "atomic": (aot.Variant("atomic", atomic_kernel, {"x": "*fp32:16"}, {"BLOCK": 128}), "atomic"),
    "spills": (
        aot.Variant("crowded", crowded_kernel, {"x": "*fp32:16", "y": "*fp32:16"}, {"BLOCK": 16384}, 1, main=True),
        "spills",
    ),
    "product": (
        aot.Variant("product", tf32_kernel, {"x": "*fp32:16", "y": "*fp32:16"}, {"BLOCK_M": 64}),
        r"expected \(\)",
    ),
}


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, target: str) -> None:
    variant, message = PLANTED[name]
    found = "; ".join(problems(aot.compile_variant(variant, target)))
    assert re.search(message, found), found
    if name == "tf32" and target == "sm_80":
        assert "m16n8k8" in found


def test_logprob_reads_16_bytes_and_clamps_for_free() -> None:
    """Otherwise a tile's statistics are issue-bound: `units` relies on a clamp that is a flag of the multiplication."""
    variant = next(v for v in aot.variants("logprob") if v.name == "logprob tiles, plain")
    kernel = aot.compile_variant(variant, "sm_90")
    assert "ld.global.v4.b32" in kernel.text
    assert kernel.cubin is not None
    sass = aot.sass(kernel.cubin)
    assert len(re.findall(r"MUFU\.EX2", sass)) >= len(re.findall(r"FMUL\.SAT", sass)) >= 32


@triton.jit
def flushing_kernel(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(x + i, tl.fma(v, v, tl.log2(v)))


def test_sees_flushed_denormals() -> None:
    """Control: one libdevice call makes every operation of the kernel flush denormals."""
    kernel = aot.compile_variant(aot.Variant("flushing", flushing_kernel, {"x": "*fp32:16"}, {"BLOCK": 128}), "sm_90")
    assert FLUSHED.search(kernel.text)


def test_names_the_argument_without_a_type() -> None:
    variant = aot.variants("common")[0]
    broken = aot.Variant("broken", variant.kernel, {**variant.types, "WIDTH": "i32"}, {})
    with pytest.raises(ValueError, match="has neither a type nor a constant"):
        aot.compile_variant(broken, "sm_90")


def minus_zeros(tree: ast.AST) -> list[int]:
    """Lines with a literal -0.0, which Triton takes for +0."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and isinstance(node.operand.value, float)
        and node.operand.value == 0.0
    ]


def test_no_kernel_counts_on_a_literal_minus_zero() -> None:
    found = {p.name: minus_zeros(ast.parse(p.read_text())) for p in (PACKAGE / "kernels" / "triton").glob("*.py")}
    assert len(found) > 20 and not any(found.values()), found
    assert minus_zeros(ast.parse("tl.full(shape, -0.0, tl.float32)")) == [1]


def test_partial_sums_begin_at_minus_zero() -> None:
    """`negative_zeros` must compile to -0, the identity of fp32 addition."""
    sums = {v.name: v for v in aot.variants() if v.name in ("linear m128 tree8", "linear_dgrad head")}
    assert len(sums) == 2
    for variant in sums.values():
        assert "dense<-0.000000e+00>" in aot.compile_variant(variant, "sm_90").ttgir, variant.name
