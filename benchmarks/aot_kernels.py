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
from rlkernel.kernels.cuda import (
    attention_prefill,
    linear_logprob_hopper,
    linear_rows,
    logprob_rows,
    policy_loss_hopper,
    rms_norm_hopper,
)
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
    """The CUDA sources for Hopper, linear_logprob in each of its modes; needs NVRTC or nvcc. Of a kernel that hands
    registers from the warps that fetch to the others, the number is what a thread starts with."""
    found: list[dict[str, Any]] = []

    def add(name: str, source: str, macros: Mapping[str, int], function: str, warps: int, shared: int,
            matrix: Sequence[str] = ()) -> None:  # fmt: skip
        cubin = compile_cuda(build.source_dir() / "cuda" / source, "90a", macros)
        found.append({
            "kernel": name, "function": function, "target": "sm_90", "main": True, "num_warps": warps,
            **aot.cuda_resources(cubin, function), "shared": shared, "matrix": list(matrix),
        })  # fmt: skip

    hopper = linear_logprob_hopper
    for mode in ("STATISTICS", "GRADIENT", "PROBS", "DHIDDEN", "DWEIGHT"):
        macros = {"MODE": getattr(hopper, mode), "HAS_TEMPERATURE": 0, "HAS_KEPT": 0, "HAS_DENTROPY": 0}
        staging = hopper.STAGING_BYTES if mode in ("GRADIENT", "PROBS") else 0
        add(f"linear_logprob CUDA {mode.lower()}", hopper.SOURCE, macros, "rlk_linear_logprob", 12,
            hopper.SHARED_BYTES + staging, ["wgmma m64n256k16"])  # fmt: skip
    for rows, columns in itertools.product((8, linear_rows.MOST_ROWS), linear_rows.COLUMNS):
        held = linear_rows.stages(rows, columns)
        macros = {"HALF": 0, "FP32_OUT": 0, "ROWS": rows, "COLUMNS": columns, "STAGES": held}
        add(f"linear_dgrad CUDA rows {rows} columns {columns}", linear_rows.SOURCE, macros, "rlk_linear_dgrad_rows", 5,
            held * linear_rows.stage_bytes(rows, columns), [f"wgmma m64n{columns}k16"])  # fmt: skip
    for d, skip in itertools.product(attention_prefill.HEAD_DIMS, (False, True)):
        add(f"attention CUDA long prefill d{d}{' skip' * skip}", attention_prefill.SOURCE,
            attention_prefill.macros(d, False, False, skip), "rlk_attention_prefill", attention_prefill.THREADS // 32,
            attention_prefill.shared_bytes(d), [f"wgmma m64n{n}k16" for n in sorted({64, d})])  # fmt: skip
    for rows_of in logprob_rows.SETTINGS:
        add(f"logprob CUDA rows {rows_of.warps}x{rows_of.pieces}", logprob_rows.SOURCE,
            logprob_rows.macros(rows_of, 151936, False, False), "rlk_logprob_rows", rows_of.warps + 1,
            logprob_rows.shared_bytes(rows_of, 151936))  # fmt: skip
    for setting in (*policy_loss_hopper.SETTINGS, *policy_loss_hopper.TEAMS):
        name = f"team of {setting.warps}" if setting.team else f"{setting.warps}x{setting.stages}"
        add(f"policy_loss CUDA {name}", policy_loss_hopper.source(setting),
            policy_loss_hopper.macros(setting, True), "rlk_policy_loss_tokens", setting.warps,
            policy_loss_hopper.shared_bytes(setting, True, policy_loss_hopper.MOST_SEQUENCES))  # fmt: skip
    for channels in (1024, 4096, 5120):
        for groups in rms_norm_hopper.RESIDENT:
            if rms_norm_hopper.fits(channels, True, groups):
                add(f"rms_norm_grad CUDA {channels}, {groups}", rms_norm_hopper.SOURCE,
                    rms_norm_hopper.macros(channels, True, groups), "rlk_rms_norm_grad",
                    rms_norm_hopper.threads(channels, groups) // 32,
                    rms_norm_hopper.shared_bytes(channels, True))  # fmt: skip
    return found


def main() -> int:
    """Exit status 1 if a variant does not compile; its name is printed."""
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
    try:
        rows += measure_cuda()
    except BuildError as error:
        print(f"note: {str(error).splitlines()[0]}")
    more = {"driver": None, "cuda compiler": compiler()}
    path = write_result("kernels", rows, folder="aot", hardware="compiled ahead of time", **more)
    print(f"{len(rows)} kernels; wrote {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
