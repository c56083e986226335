"""all_reduce on one GPU: the kernels of two or four ranks run at once on streams and exchange data as GPUs do.

test_tensor_parallel_gpu.py does the same on several GPUs. Control: ranks that do not wait for each other.
"""

from __future__ import annotations

import pytest
import torch
from gpu.gpu_checks import DEVICE, Compared, Record, data

from rlkernel.kernels import symmetric_memory
from rlkernel.kernels.symmetric_memory import BYTES, CAPACITY, CONTROL_BYTES, Workspace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = (1, 3009, 1 << 18, (1 << 20) + 5, CAPACITY // 4 + 12345)
"""Numbers that one launch exchanges in one step and in two, and that take two launches."""
FIRST_CALL = 2**31 - 8
"""Calls before the test, so that their number passes 32 bits during it."""
NEVER_WAIT = 1 << 40


@pytest.mark.parametrize("ranks", (2, 4))
def test_ranks_on_streams(ranks: int, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkernel.kernels.triton import all_reduce as kernels

    # All ranks' programs must be resident at once; on several GPUs each rank has a GPU of its own.
    monkeypatch.setattr(kernels, "PROGRAMS", symmetric_memory.PROGRAMS // ranks)
    buffers = [torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
    control = [b[:CONTROL_BYTES].view(torch.int64) for b in buffers]
    addresses = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
    workspaces = [Workspace(b, addresses, rank) for rank, b in enumerate(buffers)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    columns, seen = 1003, Compared()
    bias = data(3, columns)

    def launch(rank: int, parts: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return kernels.all_reduce(parts[rank], b, dtype, columns, workspaces[rank])

    for size in SIZES:
        parts = data(size, ranks, size)
        for b, dtype in ((None, torch.float32), (bias, torch.bfloat16)):
            for buffer, words in zip(buffers, control, strict=True):
                buffer.zero_()  # what the others sent in earlier calls
                words[kernels.PROGRAMS :] = NEVER_WAIT
            early = launch(0, parts, b, dtype)
            assert not torch.equal(early, kernels.add_ranks(parts, b, dtype, columns, 0)), "rank 0 did not wait"
            for rank in range(1, ranks):  # compiles: a kernel cannot be loaded while another waits for it
                launch(rank, parts, b, dtype)
            graph, main, found = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
            with torch.cuda.graph(graph, stream=main):
                for rank, stream in enumerate(streams):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        found.append(launch(rank, parts, b, dtype))
                for stream in streams:
                    main.wait_stream(stream)
            for words in control:
                words.fill_(FIRST_CALL)
            for _ in range(25):
                parts.copy_(parts.roll(1, 1).neg())
                graph.replay()
                expected = kernels.add_ranks(parts, b, dtype, columns, 0)
                for rank, out in enumerate(found):
                    seen.whole(out, expected, f"{size} numbers, {dtype}, rank {rank} of {ranks}")
    record(**vars(seen))
