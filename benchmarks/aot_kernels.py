"""Registers, shared memory, spills and matrix instructions of every GPU kernel on every GPU family, without a GPU.

Compiles the Triton variants of `tests/aot` ahead of time (or finds them in Triton's cache after
`tests/kernels/test_triton_aot.py`) and the CUDA sources; writes `benchmarks/results/aot/kernels.json`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

import aot
from results_io import write_result

from rlkernel.kernels import build
from rlkernel.kernels.cuda import attention_prefill_sm90, linear_logprob_sm90
from rlkernel.kernels.cuda.driver import compile_cuda, compiler
from rlkernel.kernels.errors import BuildError

SHORT = re.compile(r"(mma\.sync|wgmma|tcgen05|mfma)|m\d+n\d+k\d+|\d+x\d+x\d+")
"""The parts of an instruction's name that a table shows: family and shape."""


def measure(index: int, target: str) -> dict[str, Any]:
    """Row of the record for one variant and target."""
    variant = aot.variants()[index]
    compiled = aot.compile_variant(variant, target)
    usage = {"registers": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0, **compiled.resources()}
    return {
        "kernel": variant.name,
        "function": variant.kernel.fn.__name__,
        "target": target,
        "main": variant.main,
        "num_warps": variant.num_warps,
        **usage,
        "shared": compiled.shared,
        "matrix": sorted({" ".join(m[0] for m in SHORT.finditer(name)) for name in compiled.matrix()}),
    }


def measure_cuda() -> list[dict[str, Any]]:
    """The CUDA sources for Hopper, linear_logprob in each `Pass`; needs NVRTC or nvcc. For kernels that use setmaxnreg,
    the number of registers is that at launch."""
    found: list[dict[str, Any]] = []

    def add(name: str, source: str, macros: Mapping[str, int], function: str, warps: int, shared: int,
            matrix: Sequence[str] = ()) -> None:  # fmt: skip
        cubin = compile_cuda(build.source_dir() / "cuda" / source, "90a", macros)
        found.append({
            "kernel": name, "function": function, "target": "sm_90", "main": True, "num_warps": warps,
            **aot.cuda_resources(cubin, function), "shared": shared, "matrix": list(matrix),
        })  # fmt: skip

    names = ("statistics", "gradient", "probs", "dhidden", "dweight")
    for name, which in zip(names, linear_logprob_sm90.Pass, strict=True):
        add(f"linear_logprob CUDA {name}", linear_logprob_sm90.SOURCE, linear_logprob_sm90.macros(which),
            "rlk_linear_logprob", 12, linear_logprob_sm90.shared_bytes(which), ["wgmma m64n256k16"])  # fmt: skip
    for d, skip in itertools.product(attention_prefill_sm90.HEAD_DIMS, (False, True)):
        add(f"attention CUDA long prefill d{d}{' skip' * skip}", attention_prefill_sm90.SOURCE,
            attention_prefill_sm90.macros(d, False, False, skip), "rlk_attention_prefill",
            attention_prefill_sm90.THREADS // 32, attention_prefill_sm90.shared_bytes(d),
            [f"wgmma m64n{n}k16" for n in sorted({64, d})])  # fmt: skip
    return found


def main() -> int:
    """Exit status 1 if a variant does not compile, whose name is printed, or if there is no CUDA compiler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    try:
        cuda = measure_cuda()
    except BuildError as error:  # before the long part, and without a record that lacks these rows
        print(f"aot_kernels: the CUDA kernels need a compiler: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    work = [(i, target) for i, v in enumerate(aot.variants()) for target in v.targets]
    rows, failed = [], []
    with ProcessPoolExecutor(args.jobs) as pool:
        for (index, target), future in [(item, pool.submit(measure, *item)) for item in work]:
            try:
                rows.append(future.result())
            except Exception as error:
                failed.append(f"{aot.variants()[index].name} for {target}: {error!r:.300}")
                print(failed[-1], flush=True)
            if len(rows) % 100 == 0:
                print(f"{len(rows)} of {len(work)} Triton kernels", flush=True)
    more = {"driver": None, "cuda compiler": compiler()}
    rows += cuda
    path = write_result("kernels", rows, folder="aot", hardware="compiled ahead of time", **more)
    print(f"{len(rows)} kernels; wrote {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
