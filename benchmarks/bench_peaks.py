"""The peaks behind "share of roofline": a large bf16 matrix product with torch's cuBLAS, and a large copy.

`timing.PEAKS` holds the numbers from which shares are computed; this script measures them again on this machine. They
are what torch reaches on random data and not limits of the chip, so another shape can be slightly faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import write_result
from timing import PEAKS, interleaved

SIZE = 8192
BYTES = 1 << 32


def main() -> int:
    """Prints one line per measurement and writes `bench_peaks.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_peaks: torch sees no CUDA GPU; nothing is measured")
        return 1
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 256, (BYTES,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    product, copy = interleaved([lambda: a @ b, lambda: target.copy_(source)], True, args.rounds)
    used = PEAKS.get(torch.cuda.get_device_name(), {})
    rows = [
        {
            "op": "matrix product", "shape": (SIZE,) * 3, "dtype": "bfloat16", "ours": "torch", "ours_ms": product,
            "measured": f"{2 * SIZE**3 / product / 1e9:.0f} TFLOP/s",
            "shares use": f"{used.get('bf16_flops', 0) / 1e12:.0f} TFLOP/s",
        },
        {
            "op": "copy", "shape": (BYTES,), "dtype": "uint8", "ours": "torch", "ours_ms": copy,
            "measured": f"{2 * BYTES / copy / 1e9:.2f} TB/s", "shares use": f"{used.get('bytes', 0) / 1e12:.2f} TB/s",
        },
    ]  # fmt: skip
    for row in rows:
        print(f"{row['op']:20} {row['ours_ms']:.3f} ms  {row['measured']}, shares use {row['shares use']}")
    print(f"wrote {write_result('bench_peaks', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
