"""No op depends on torch's default dtype and device or on the flushing of denormals, which users may change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels import select


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32)
    return {
        "x": draw(6, 16),
        "w": draw(40, 16),
        "norm": draw(16),
        "q": draw(6, 2, 8),
        "k": draw(6, 1, 8),
        "table": draw(8, 8),
        "logp": -draw(6).abs(),
        "ids": torch.tensor([3, 1, 4, 1, 5, 9]),
        "positions": torch.tensor([0, 1, 2, 3, 0, 1]),
        "cu": torch.tensor([0, 4, 6], dtype=torch.int32),
        "ones": torch.ones(6, dtype=torch.float32),
        "top_k": torch.full((6,), 5, dtype=torch.int32),
        "cache": torch.zeros(3, 4, 1, 8, dtype=torch.float32),
        "block_table": torch.tensor([[2], [0]], dtype=torch.int32),
        "slots": torch.tensor([8, 9, 10, 11, 0, 1]),
        "lens": torch.tensor([4, 2], dtype=torch.int32),
        "rewards": draw(6),
    }


def everything(t: dict[str, Tensor]) -> list[Tensor]:
    """Results and gradients of every op on the inputs `t`."""
    leaves = [t[n].clone().requires_grad_(True) for n in ("x", "w", "norm", "q", "k")]
    x, w, norm, q, k = leaves
    out: list[Tensor] = [ops.linear(x, w), ops.rms_norm(x, norm, 1e-6), ops.swiglu(x), ops.embedding(t["ids"], w)]
    out += [*ops.rms_norm(x, norm, 1e-6, x), *ops.rope(q, k, t["positions"], t["table"])]
    attended = ops.attention(q, k, k, t["cu"], max_seqlen_q=4)
    scored = ops.linear_logprob(x, w, t["ids"], temperature=0.7)
    given = ops.logprob(ops.linear(x, w, out_dtype=torch.float32), t["ids"])
    loss = ops.policy_loss(scored.logp, t["logp"], t["ones"], t["cu"], entropy=scored.entropy, entropy_coef=0.1).loss
    out += [attended[0], scored.logp, scored.entropy, given.logp, given.entropy, loss]
    total = sum((o.sum() for o in out), torch.zeros((), dtype=torch.float32, device="cpu"))
    total.backward()
    keys, values = t["cache"].clone(), t["cache"].clone()
    ops.store_kv_(keys, values, t["k"], t["k"], t["slots"])
    paged = ops.paged_attention(
        t["q"], keys, values, t["block_table"], t["cu"], t["lens"], max_seqlen_q=4, max_seqlen_k=4
    )
    logits = ops.linear(t["x"], t["w"], out_dtype=torch.float32)
    sampled = ops.sample(
        logits, t["ids"], t["positions"], temperature=t["ones"], top_k=t["top_k"], top_p=t["ones"], return_kept=True
    )
    out += [attended[1], *paged, scored.lse, sampled.tokens, sampled.logp]
    norm = ops.grad_norm([t["x"]], max_norm=0.1)
    moments, halves = [t["x"].clone(), t["x"].square(), t["x"].clone()], t["x"].bfloat16()
    ops.adamw_([halves], [t["x"]], *([m] for m in moments[:2]), masters=moments[2:], lr=0.1, step=1, scale=norm.scale)
    out += [*norm, *moments, halves]
    out += [ops.group_advantages(t["rewards"], 3), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    out += [*ops.gae(t["rewards"], t["logp"], t["cu"], 0.9, 0.8)]
    out += [*ops.pack([t["x"][:2], t["x"][2:]]), *ops.pack([[5, 6, 7], [8]])]
    spans = torch.tensor([[0, 1], [2, 3]], device="cpu")
    picked = ops.linear_logprob(t["x"], t["w"], t["ids"], loss_spans=spans)
    packed = ops.pack_spans(t["x"], spans)
    out += [*picked, *packed, ops.unpack_spans(packed.flat, spans, t["x"])]
    credit = ops.token_rewards(spans, t["cu"], turns=t["rewards"][:2], sequence=t["rewards"][: len(t["cu"]) - 1])
    out += [credit, ops.turn_advantages(t["rewards"], [1, 2, len(t["rewards"]) - 3], 3)]
    out += [ops.constrained_advantages(t["rewards"], t["rewards"], t["rewards"][0].abs())]
    out += [ops.overlong_penalty(spans, t["cu"], 3, 1), ops.update_multiplier(t["rewards"][0], t["rewards"], 0.1, 0.1)]
    return [o.detach() for o in out]


@pytest.mark.parametrize("implementation", ("cpu", "reference"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_default_dtype_changes_nothing(dtype: torch.dtype, implementation: str) -> None:
    given = inputs()
    with select.use("reference") if implementation == "reference" else contextlib.nullcontext():
        expected = everything(given)
        torch.set_default_dtype(dtype)
        found = everything(given)
    assert torch.get_default_dtype() == dtype
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(a, b, f"result {i}")


def test_default_device_changes_nothing() -> None:
    given = inputs()
    expected = everything(given)
    with torch.device("meta"):
        found = everything(given)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(a, b, f"result {i}")


def tiny_inputs() -> dict[str, Tensor]:
    """Inputs with some denormal results and gradients, large enough for two threads."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape, by=1.0: torch.randn(*shape, generator=generator) * by
    return {
        "x": draw(256, 64, by=1e-20), "w": draw(128, 64, by=1e-19), "q": draw(96, 4, 32), "k": draw(96, 2, 32),
        "v": draw(96, 2, 32, by=1e-38), "gate_up": draw(512, 128, by=1e-38), "dy": draw(256, 128, by=1e-19),
        "norm": torch.full((128,), 1e-2), "cu": torch.tensor([0, 40, 96], dtype=torch.int32),
        "moments": draw(40000, by=1e-38).abs(), "hidden": draw(300, 16), "head": draw(70, 16, by=1e-38),
        "ids": torch.randint(0, 70, (300,), generator=generator), "dlogp": draw(300, by=1e-38),
        "rewards": draw(70000, by=1e-38), "far": draw(300, 16, by=6.0), "wide": draw(300, 16, by=6.0),
    }  # fmt: skip


def tiny(t: dict[str, Tensor]) -> list[Tensor]:
    x, w, gate_up, v, hidden, head = (
        t[n].clone().requires_grad_() for n in ("x", "w", "gate_up", "v", "hidden", "head")
    )
    y = ops.linear(x, w)
    scored = ops.linear_logprob(hidden, head, t["ids"])
    out = [y, ops.swiglu(gate_up), ops.rms_norm(t["gate_up"], t["norm"], 1.0)]
    out += [ops.attention(t["q"], t["k"], v, t["cu"], max_seqlen_q=56)[0], scored.logp]
    out += torch.autograd.grad([y, scored.logp], (x, w, hidden, head), [t["dy"], t["dlogp"]])
    far, wide = t["far"].clone().requires_grad_(), t["wide"].clone().requires_grad_()  # probabilities down to 0
    kept = ops.linear_logprob(far, wide, t["ids"], keep_probs=True).logp
    out += torch.autograd.grad(kept, (far, wide), t["far"][:, 0].contiguous())
    logp = torch.linspace(-1.0, 0.0, 70000).requires_grad_()
    borders, tiny_advantages = torch.tensor([0, 70000], dtype=torch.int32), torch.tensor([1.0])
    loss = ops.policy_loss(logp, None, tiny_advantages, borders, loss_type="bnpo", normalizer=1e38).loss
    out += torch.autograd.grad(loss, logp, torch.tensor(0.3))
    out += [ops.group_advantages(t["rewards"], 7, normalize_std=False)]
    out += [*ops.gae(t["rewards"], t["rewards"].flip(0), torch.arange(0, 70001, 1000).int(), 0.9, 0.8)]
    m, u, p = (t["moments"].clone() for _ in range(3))
    ops.adamw_([p], [t["moments"]], [m], [u], lr=1e-3, step=1)
    return [o.detach() for o in (*out, p, m, u)]


def test_flushed_denormals_change_nothing() -> None:
    """Some threads of a process may flush denormals and others not, so the bits would depend on the thread."""
    threads, given = torch.get_num_threads(), tiny_inputs()
    expected = tiny(given)
    assert sum(bool(((o != 0) & (o.abs() < torch.finfo(torch.float32).tiny)).any()) for o in expected) >= 8
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes nothing")
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found = tiny(given)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"result {i}, {n} threads"
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
