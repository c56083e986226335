"""sample on the CPU: launcher of `csrc/cpu/sample.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, function, pointer, threads
from rlkernel.kernels.cpu.logprob import contiguous, logprob
from rlkernel.kernels.reference.sample import check_rows, check_values, score_tokens


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    scores: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values(temperature, top_k, top_p, min_p)
    logits = logits.float()
    inputs = contiguous(logits, seeds, positions, temperature, top_k, top_p, min_p)
    b, v = logits.shape
    filtered = top_k is not None or top_p is not None or min_p is not None
    tokens = torch.empty(b, dtype=torch.int64, device=CPU)
    kept = torch.empty(b if filtered else 0, (v + 31) // 32, dtype=torch.int32, device=CPU)
    bad = torch.empty(b, dtype=torch.int32, device=CPU)
    function("rlk_sample", "pppppppppplli")(
        *map(pointer, inputs),
        tokens.data_ptr(),
        pointer(kept) if filtered else None,
        bad.data_ptr(),
        b,
        v,
        threads(),
    )
    check_rows(bad)
    return tokens, kept, *score_tokens(logprob, logits, tokens, temperature, kept, scores)
