"""Compiles every Triton kernel ahead of time for every GPU family, without a GPU: for tests and benchmarks.

Each module lists the `Variant`s of the kernel module of the same name in `AOT`. `compile_variant` compiles one.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
}
NVIDIA = tuple(name for name, target in TARGETS.items() if target.backend == "cuda")
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx90a": 65536}
"""Bytes of shared memory that one thread block may use."""
MATRIX = re.compile(r"mma\.sync[.\w]*|wgmma\.mma_async[.\w]*|tcgen05\.mma[.\w]*|v_mfma_\w+|v_smfmac\w+")

MODULES = (
    "common",
    "linear",
    "linear_grad",
    "embedding",
    "rms_norm",
    "qk_norm_rope",
    "rope",
    "swiglu",
    "attention",
    "attention_pages",
    "attention_shared",
    "attention_splits",
    "attention_backward",
    "logprob",
    "logprob_backward",
    "linear_logprob",
    "linear_logprob_backward",
    "linear_logprob_rows",
    "sample",
    "policy_loss",
    "group_advantages",
    "gae",
    "adamw",
    "all_reduce",
)
"""Modules of this package, in the order of docs/kernels.md."""


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants it is compiled for.

    Attributes:
        name: shown in tests and reports.
        kernel: the `@triton.jit` function.
        types: Triton type of each run-time argument; the suffix `:16` marks a pointer or integer that is a multiple
            of 16.
        constants: value of every other argument.
        num_warps, num_stages: as in the launch.
        matmul: whether the launch uses `common.options(matmul=True)`.
        main: whether speed depends on this variant; it must not spill then.
        targets: names of `TARGETS` it is compiled for.
        stack: bytes that a main variant may spill because the spills lie outside its loops.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    matmul: bool = False
    main: bool = False
    targets: tuple[str, ...] = tuple(TARGETS)
    stack: int = 0


def with_pdl(variant: Variant) -> tuple[Variant, Variant]:
    """The variant without programmatic dependent launch, and with it (", early") for the GPUs that support it."""
    plain, pdl = ({**variant.constants, "PDL": on} for on in (False, True))
    targets = tuple(t for t in variant.targets if t in ("sm_90", "sm_100"))
    return replace(variant, constants=plain), replace(
        variant, name=f"{variant.name}, early", constants=pdl, targets=targets
    )


@dataclass(frozen=True)
class Compiled:
    """Machine code of one variant for one target."""

    variant: Variant
    target: str
    text: str  # PTX or AMD assembly
    cubin: bytes | None
    shared: int  # bytes of shared memory per thread block
    ttgir: str  # Triton's GPU dialect: which thread holds which element

    def matrix(self) -> set[str]:
        """Names of the matrix instructions in `text`."""
        return set(MATRIX.findall(self.text))

    def resources(self) -> dict[str, int]:
        """`registers` per thread, bytes of `stack`, and counts of `spill_stores` and `spill_loads`."""
        if self.cubin is None:
            found = {
                "registers": r"\.vgpr_count:\s+(\d+)",
                "spill_stores": r"\.vgpr_spill_count:\s+(\d+)",
            }
            counts = {name: int(m.group(1)) for name, p in found.items() if (m := re.search(p, self.text))}
            return {"stack": 0, "spill_loads": 0, **counts}
        return cuda_resources(self.cubin)


def cuda_resources(cubin: bytes, function: str = "") -> dict[str, int]:
    """`registers` per thread and bytes of `stack` of a function (default: the only one), and how many `spill_stores`
    and `spill_loads` the cubin contains."""
    usage = _cuobjdump("-res-usage", cubin).partition(f"Function {function}")[2]
    code = sass(cubin)
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    return {
        "registers": int(registers.group(1)) if registers else 0,
        "stack": int(stack.group(1)) if stack else 0,
        "spill_stores": len(re.findall(r"\bSTL", code)),
        "spill_loads": len(re.findall(r"\bLDL", code)),
    }


def sass(cubin: bytes) -> str:
    """Disassembly of a cubin."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(flag: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        done = subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True)
    finally:
        os.unlink(file.name)
    return done.stdout + done.stderr


def variants(*modules: str) -> list[Variant]:
    """Every variant of the named modules (default: all of `MODULES`), in order."""
    names = modules or MODULES
    return [v for name in names for v in import_module(f"{__name__}.{name}").AOT]


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compiles one variant for a key of `TARGETS`.

    Raises:
        KeyError: unknown target.
        ValueError: an argument of the kernel has neither a type nor a constant.
    """
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name in variant.types:
            signature[name], _, multiple = variant.types[name].partition(":")
            if multiple:
                attributes[(index,)] = [["tt.divisibility", int(multiple)]]
        else:
            raise ValueError(f"{variant.name}: argument {name!r} of the kernel has neither a type nor a constant")
    gpu = TARGETS[target]
    options: dict[str, Any] = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": False,
    }
    if variant.kernel.debug:  # keeps the kernel's assertions
        options |= {"debug": True, "sanitize_overflow": False}
    if gpu.backend == "hip":
        options["num_stages"] = min(2, variant.num_stages)
        if variant.matmul:
            options |= {"matrix_instr_nonkdim": 16, "kpack": 1}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    done = triton.compile(source, target=gpu, options=options)
    text = done.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    return Compiled(variant, target, text, done.asm.get("cubin"), done.metadata.shared, done.asm["ttgir"])
