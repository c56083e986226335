"""A fake FlashAttention-3 for machines without it: our CPU attention in another order, and faulty variants.

`install` replaces the installed library by a fake, with few and short sequences to certify.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.kernels import verdicts
from rlkernel.kernels.cuda import attention_fa3, fa3_library
from rlkernel.kernels.cuda.fa3_library import Library

Change = Callable[[bool, int, int], float]  # (paged, longest query, sequences) -> factor of the scale


def fake(change: Change = lambda paged, longest, batch: 1 + 2**-6) -> Library:
    """Exact where `change` is constant; another factor of the scale stands for another order."""

    def dense(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float):
        scale *= change(False, max_q, cu_q.numel() - 1)
        sizes = {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "scale": scale}
        with ops.attention_variant(None):
            out, lse = ops.attention(q, k, v, cu_q, cu_k, **sizes)
        return out, lse.t().contiguous()

    def paged(q, k, v, table, cu_q, lens, max_q, max_k, scale: float):
        scale *= change(True, max_q, cu_q.numel() - 1)
        sizes = {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "scale": scale}
        with ops.attention_variant(None):
            out, lse = ops.paged_attention(q, k, v, table, cu_q, lens, **sizes)
        return out, lse.t().contiguous()

    return Library(dense, paged, {"flash_attention_3": "fake 1"}, "cpu")


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, library: Library | str | None = None) -> Library | str:
    """Installs `library`, by default the exact fake; a text is the reason why none can run."""
    library = fake() if library is None else library
    for name, value in {
        "LENGTHS": (70, 1, 9),
        "QUERIES": (1, 2, 40),
        "ENDS": (200, 12),
        "LAUNCHED_FOR": 128,
    }.items():
        monkeypatch.setattr(attention_fa3, name, value)
    monkeypatch.setattr(fa3_library, "find", lambda: library)
    monkeypatch.setattr(verdicts, "verdict_dir", lambda: folder / "schedules")
    monkeypatch.setattr(attention_fa3, "_settled", {})
    monkeypatch.setattr(attention_fa3, "_verdicts", {})
    return library


SHAPE = attention_fa3.FA3Shape(-1, torch.bfloat16, 4, 2, 8, 4)
