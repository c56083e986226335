"""policy_loss on a GPU: close to the CPU, and a sequence's gradient has the same bits anywhere in any batch.

Control: without a fixed normalizer the gradient depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from gpu.gpu_checks import Compared
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels.policy_loss import LOSS_TYPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = [700, 1, 0, 1024, 1500, 37, 5000, 1025]
NAMES = ("logp", "old_logp", "ref_logp", "rollout_logp", "entropy")


def sequence(i: int) -> dict[str, Tensor]:
    noise = torch.randn(6, SIZES[i], generator=torch.Generator().manual_seed(i))
    logp = -noise[0].abs()
    old = logp + 0.3 * noise[1]
    rows = (logp, old, logp + 0.2 * noise[2], old + 0.1 * noise[3], noise[4].abs())
    return {**dict(zip(NAMES, rows, strict=True)), "mask": noise[5] > -1.0}


def run(order: list[int], device: str, **options: Any) -> dict[str, Tensor]:
    rows = [sequence(i) for i in order]
    cu_seqlens = ops.pack([r["logp"] for r in rows]).cu_seqlens.to(device)
    x = {name: torch.cat([r[name] for r in rows]).to(device) for name in (*NAMES, "mask")}
    x["logp"].requires_grad_()
    x["entropy"].requires_grad_()
    advantages = torch.tensor([(-1.0) ** i * (1 + i) / 4 for i in order], device=device)
    logp, old_logp = x.pop("logp"), x.pop("old_logp")
    form = {"kl_coef": 0.1, "entropy_coef": 0.01, "tis_cap": 1.1, "max_completion_length": 5000, **options}
    out = ops.policy_loss(logp, old_logp, advantages, cu_seqlens, **x, **form)
    out.loss.backward()
    return {"loss": out.loss.detach(), "dlogp": logp.grad, "dentropy": x["entropy"].grad, **out.stats}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("ratio_level", ("token", "sequence"))
def test_against_the_cpu(loss_type: str, ratio_level: str) -> None:
    everything = list(range(len(SIZES)))
    for kl_type in ("k1", "k2", "k3"):
        form = {"loss_type": loss_type, "ratio_level": ratio_level, "kl_type": kl_type}
        gpu, cpu = run(everything, "cuda", **form), run(everything, "cpu", **form)
        for name, value in cpu.items():
            torch.testing.assert_close(gpu[name].cpu(), value, rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        again = run(everything, "cuda", **form)
        for name, value in gpu.items():
            assert_bitwise(again[name], value, f"{name}, repeated")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("ratio_level", ("token", "sequence"))
def test_gradients_do_not_depend_on_the_batch(loss_type: str, ratio_level: str, record: Callable[..., None]) -> None:
    form = {"loss_type": loss_type, "ratio_level": ratio_level, "normalizer": 640.0}
    whole = run(list(range(len(SIZES))), "cuda", **form)
    borders = [0]
    for n in SIZES:
        borders.append(borders[-1] + n)
    seen = Compared()
    for order in ([6], [3, 0, 7], [7, 6, 5, 4, 3, 2, 1, 0], [1, 4]):
        moved = run(order, "cuda", **form)
        here = [0]
        for i in order:
            here.append(here[-1] + SIZES[i])
        for i, (a, b) in zip(order, pairwise(here), strict=True):
            names, there = ("dlogp", "dentropy"), slice(borders[i], borders[i + 1])
            seen.rows([moved[n][a:b] for n in names], [whole[n][there] for n in names], f"{order}: sequence {i}")
    record(**vars(seen))


def test_control_gradients_without_a_normalizer_depend_on_the_batch() -> None:
    alone, whole = (run(order, "cuda", loss_type="dapo")["dlogp"] for order in ([0], list(range(len(SIZES)))))
    assert not torch.equal(alone, whole[: SIZES[0]])


def test_invalid_cu_seqlens_give_nan() -> None:
    logp = torch.zeros(9, device="cuda")
    for borders in ([0, 5, 8], [1, 5, 9], [0, 12, 9]):
        cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
        assert bool(ops.policy_loss(logp, logp, torch.ones(2, device="cuda"), cu_seqlens).loss.isnan())


def test_gae_has_the_bits_of_the_cpu(record: Callable[..., None]) -> None:
    """In any batch; one unit in the last place of lambda is a difference that the comparison sees."""
    tokens, seen = sum(SIZES), Compared()
    rewards, values = torch.randn(2, tokens, generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, *SIZES]).cumsum(0).int()
    given = [x.cuda() for x in (rewards, values, cu_seqlens)]
    whole = ops.gae(*given, 0.99, 0.95)
    seen.rows(list(whole), list(ops.gae(rewards, values, cu_seqlens, 0.99, 0.95)), "GPU against CPU")
    for i, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        alone = ops.gae(given[0][a:b], given[1][a:b], (given[2][i : i + 2] - a), 0.99, 0.95)
        seen.rows(list(alone), [x[a:b] for x in whole], f"sequence {i} alone")
    assert not torch.equal(ops.gae(*given, 0.99, 0.95 * (1 + 2**-23)).advantages, whole.advantages)
    record(**vars(seen))


def test_group_advantages_have_the_bits_of_the_cpu() -> None:
    rewards = torch.randn(96, generator=torch.Generator().manual_seed(0))
    for mode in ("group", "leave_one_out", "batch", "none"):
        ours = ops.group_advantages(rewards.cuda(), 12, mode=mode)
        assert_bitwise(ours.cpu(), ops.group_advantages(rewards, 12, mode=mode), mode)
    unknown = torch.full((2,), float("nan"), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ops.group_advantages(unknown, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(found.isnan().all())
