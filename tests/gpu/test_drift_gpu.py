"""rlkernel-drift on a GPU: row hashes that a CUDA graph computes equal those of the CPU at every replay.

Control: each replay has new data, so hashes of the replay before would fail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel_drift.capsule.fingerprint import row_fingerprints
from rlkernel_drift.capture.recorder import Recorder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hashes_in_a_cuda_graph(dtype: torch.dtype) -> None:
    recorder = Recorder("fingerprint", 64)
    recorder.splits["qkv"] = (("q", "k"), [192, 64])
    x = torch.zeros(48, 256, device="cuda", dtype=dtype)
    residual = torch.zeros_like(x)

    def record() -> None:
        recorder.see("qkv", x)
        recorder.see("sum", x, residual)

    record()  # allocates the buffers before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        residual.normal_()
        graph.replay()
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        for name, value in (("q", x[:, :192]), ("k", x[:, 192:]), ("sum", x + residual)):
            expected = row_fingerprints(value.contiguous().view(bits).cpu().numpy())
            np.testing.assert_array_equal(recorder.step[name][:48].cpu().numpy(), expected)
