"""loss_spans and token rewards on a GPU: the bits of rows chosen by hand, and no synchronisation."""

from __future__ import annotations

import pytest
import torch
from gpu.gpu_checks import DEVICE, Compared, Record
from ops.op_checks import rand

from rlkernel import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

T, C, V = 4096, 1024, 32_000
SPANS = torch.tensor([[b, b + 100 + 7 * i] for i, b in enumerate(range(200, T - 300, 450))])
CU = torch.tensor([0, 1100, 2000, 2000, T], dtype=torch.int32)


def test_spans(record: Record) -> None:
    hidden, weight = (rand(i, n, C, dtype=torch.bfloat16).to(DEVICE) / 32 for i, n in enumerate((T, V)))
    targets, cu = (torch.arange(T) * 7 % V).to(DEVICE), CU.to(DEVICE)
    rows = torch.cat([torch.arange(a, b) for a, b in SPANS.tolist()]).to(DEVICE)
    logits = ops.linear(hidden, weight)
    turns, sequence = rand(2, len(SPANS)).to(DEVICE), rand(3, 4).to(DEVICE)
    counts = [2, 2, 0, len(SPANS) - 4]
    regions = SPANS[:3] + torch.tensor([[1, -1]]), rand(4, 3).to(DEVICE)
    ops.linear_logprob(hidden, weight, targets[rows], rows=rows), ops.logprob(logits[rows], targets[rows])  # certified

    def run() -> list[torch.Tensor]:
        x = hidden.detach().requires_grad_()
        scored = ops.linear_logprob(x, weight, targets, loss_spans=SPANS)
        credit = ops.turn_advantages(turns, counts, 2)
        values = ops.token_rewards(SPANS, cu, sequence=sequence, turns=credit, regions=regions)
        multiplier = ops.update_multiplier(sequence[0], turns[:4], 0.1, 0.1)
        result = ops.policy_loss(scored.logp, None, values, cu, loss_spans=SPANS)
        result.loss.backward()
        packed = ops.pack_spans(hidden, SPANS)
        return [
            *scored, credit, values, multiplier, result.loss, x.grad, packed.flat,
            ops.unpack_spans(packed.flat, SPANS, hidden), ops.logprob(logits, targets, loss_spans=SPANS).logp,
            ops.constrained_advantages(sequence, turns[:4], multiplier), ops.overlong_penalty(SPANS, cu, 500, 100),
        ]  # fmt: skip

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seen = Compared()
    expected = ops.linear_logprob(hidden, weight, targets[rows], rows=rows)
    for i, name in enumerate(("logp", "entropy", "lse")):
        seen.rows(found[i], expected[i], name)
    seen.rows(found[-3], ops.logprob(logits[rows], targets[rows]).logp, "logprob")
    on_cpu = lambda x: x.cpu()
    seen.whole(found[3], ops.turn_advantages(on_cpu(turns), counts, 2), "turn advantages, as on a CPU")
    values = ops.token_rewards(
        SPANS, CU, sequence=on_cpu(sequence), turns=on_cpu(found[3]), regions=(regions[0], on_cpu(regions[1]))
    )
    seen.whole(found[4], values, "token rewards, as on a CPU")
    seen.whole(found[5], ops.update_multiplier(on_cpu(sequence[0]), on_cpu(turns[:4]), 0.1, 0.1), "multiplier")
    outside = torch.ones(T, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    seen.whole(found[7][outside], torch.zeros_like(found[7][outside]), "gradient of other rows")
    seen.whole(found[9], hidden, "unpacked")
    record(**vars(seen))
