"""Registers, shared memory, spills and matrix instructions of every Triton kernel on every GPU family, without a GPU.

Compiles all registered variants ahead of time, as `tests/kernels/test_triton_aot.py` does (whose compiled kernels it
finds in Triton's cache), and writes `benchmarks/results/aot/kernels.json`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import write_result

from rlkernel.kernels.triton import aot

SHORT = re.compile(r"(mma\.sync|wgmma|tcgen05|mfma)|m\d+n\d+k\d+|\d+x\d+x\d+")
"""What a table shows of an instruction's name: the family, and the shape where the name has it."""


def measure(index: int, target: str) -> dict[str, Any]:
    """One variant for one target."""
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


def main() -> int:
    """Exit status 1 where a variant does not compile; it is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    work = [(i, target) for i, v in enumerate(aot.variants()) for target in v.targets]
    rows, failed = [], []
    with ProcessPoolExecutor(args.jobs) as pool:
        for (index, target), future in [(item, pool.submit(measure, *item)) for item in work]:
            try:
                rows.append(future.result())
            except Exception as error:
                failed.append(f"{aot.variants()[index].name} for {target}: {error!r:.300}")
                print(failed[-1], flush=True)
    path = write_result("kernels", rows, folder="aot", hardware="compiled ahead of time", driver=None)
    print(f"{len(rows)} kernels; wrote {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
