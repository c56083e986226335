"""The optimizer class: torch's protocol and state_dict, fp32 state beside parameters of any dtype."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.optim import AdamW

DTYPES = (torch.float32, torch.bfloat16)


def parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(40, 3, generator=generator).to(dtype)) for dtype in dtypes]


def train(params: list[Any], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(p.dtype)
        optimizer.step()


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise(a.detach(), b.detach(), f"parameter {i}")


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict through a file that may hold nothing but tensors and plain values."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_continues_from_its_state_with_the_same_bits() -> None:
    whole, first = parameters(*DTYPES), parameters(*DTYPES)
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    train(whole, AdamW(whole, **options), range(5))
    start = AdamW(first, **options)
    train(first, start, range(3))
    state = saved(start)
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"} and state["state"][1]["master"].numel() == 120
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    resumed = AdamW(second)
    resumed.load_state_dict(state)
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert resumed.state[second[1]][name].dtype == torch.float32
    train(second, resumed, range(3, 5))
    assert_same(second, whole)
    for name, value in state["state"][0].items():
        now = start.state_dict()["state"][0][name]
        assert not isinstance(value, Tensor) or torch.equal(now, value), "the loaded tensors were copied"


def test_torchs_state_is_loaded_and_ours_by_torch() -> None:
    theirs = parameters(torch.float32)
    torchs = torch.optim.AdamW(theirs, lr=1e-3)
    train(theirs, torchs, range(3))
    ours = [torch.nn.Parameter(theirs[0].detach().clone())]
    optimizer = AdamW(ours)
    optimizer.load_state_dict(saved(torchs))
    back = [torch.nn.Parameter(theirs[0].detach().clone())]
    again = torch.optim.AdamW(back)
    again.load_state_dict(saved(optimizer))
    for params, chosen in ((theirs, torchs), (ours, optimizer), (back, again)):
        train(params, chosen, range(3, 6))
    assert_same(back, theirs)
    assert optimizer.state[ours[0]]["step"] == 6
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_a_bf16_state_without_masters_gets_them_from_the_parameter() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    optimizer.load_state_dict(
        {
            "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(40, 3), "exp_avg_sq": torch.ones(40, 3)}},
            "param_groups": [{**optimizer.param_groups[0], "params": [0]}],
        }
    )
    before = params[0].detach().float()
    train(params, optimizer, range(1))
    assert optimizer.state[params[0]]["step"] == 3
    assert 0 < float((optimizer.state[params[0]]["master"] - before).abs().max()) < 1e-2


def test_groups_closures_schedules_and_parameters_without_a_gradient() -> None:
    a, b, c = parameters(torch.float32, torch.float32, torch.float32)
    optimizer = AdamW([{"params": [a, c], "lr": 0.1, "weight_decay": 0.0}, {"params": [b]}], lr=0.2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    starts = [p.detach().clone() for p in (a, b, c)]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = a.sum() + b.sum()
        loss.backward()
        return loss

    expected = float(a.detach().sum() + b.detach().sum())
    for step in range(2):
        loss = optimizer.step(closure)
        if step == 0:
            assert float(loss.detach()) == pytest.approx(expected)
            torch.testing.assert_close(starts[0] - a.detach(), torch.full((40, 3), 0.1))
            torch.testing.assert_close(starts[1] - b.detach(), torch.full((40, 3), 0.2))
        schedule.step()
    torch.testing.assert_close(starts[1] - b.detach(), torch.full((40, 3), 0.3))
    assert_bitwise(c.detach(), starts[2], "no gradient, no update")
    assert c not in optimizer.state
    c.grad = torch.ones_like(c)  # its first update is step 1, although other parameters have had several
    optimizer.step()
    torch.testing.assert_close(starts[2] - c.detach(), torch.full((40, 3), 0.025))
    assert [optimizer.state[p]["step"] for p in (a, b, c)] == [3, 3, 1]


def test_main_grads_clipping_and_skipping() -> None:
    params = parameters(*DTYPES)
    for p in params:
        p.main_grad = torch.full(p.shape, 2.0)  # type: ignore[attr-defined]
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.0)
    norm = ops.grad_norm(optimizer.gradients(), max_norm=1.0)
    assert float(norm.norm) == 2.0 * 240**0.5
    optimizer.step(scale=norm.scale, zero_grad=True)
    moment = optimizer.state[params[1]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((40, 3), 0.1 * 240**-0.5))
    assert not any(p.main_grad.any() for p in params)  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in params]
    params[0].main_grad[7, 2] = torch.inf  # type: ignore[attr-defined]
    optimizer.step(scale=ops.grad_norm(optimizer.gradients()).scale, zero_grad=True)
    assert_same(params, before)
    assert not any(p.main_grad.any() for p in params) and optimizer.state[params[0]]["step"] == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_raises_changes_and_counts_nothing(dtype: torch.dtype) -> None:
    a, b = parameters(torch.float32, dtype)
    optimizer = AdamW([{"params": [a]}, {"params": [b]}], lr=0.1)
    c, d = parameters(torch.float32, dtype)
    train([c, d], AdamW([{"params": [c]}, {"params": [d]}], lr=0.1), range(2))
    with pytest.raises(ValueError, match=r"grads\[0\] \(40, 3\) is not contiguous"):
        a.grad, b.main_grad = torch.ones(40, 3), torch.ones(3, 40).t()  # type: ignore[attr-defined]
        optimizer.step()
    assert not optimizer.state, "no count or master changes: weights may be loaded before the step is repeated"
    del b.main_grad  # type: ignore[attr-defined]
    train([a, b], optimizer, range(1))
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr=nan"):
        train([a, b], optimizer, range(1, 2))
    optimizer.param_groups[1]["lr"] = 0.1
    assert [optimizer.state[p]["step"] for p in (a, b)] == [1, 1]
    train([a, b], optimizer, range(1, 2))
    assert_same([a, b], [c, d])


@pytest.mark.parametrize("name", ("maximize", "amsgrad"))
def test_a_state_with_what_is_not_computed_is_refused(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    state = torch.optim.AdamW([p], **{name: True}).state_dict()
    with pytest.raises(ValueError, match=name):
        AdamW([p]).load_state_dict(state)


def test_bad_settings_are_refused_at_once() -> None:
    for options in ({"lr": -1.0}, {"betas": (1.2, 0.9)}, {"eps": 0.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="AdamW"):
            AdamW([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("named", (False, True))
def test_a_grad_beside_main_grad_is_not_dropped(named: bool) -> None:
    params = parameters(*DTYPES)
    for p in params:
        p.main_grad = torch.full(p.shape, 2.0)  # type: ignore[attr-defined]
    groups = [{"params": [(f"layer.{i}", p)] if named else [p]} for i, p in enumerate(params)]
    optimizer = AdamW(groups, lr=1e-2)
    before = [p.detach().clone() for p in params]
    params[1].sum().backward()
    name = "layer.1" if named else r"param_groups\[1\]\['params'\]\[0\]"
    for run in (optimizer.gradients, optimizer.step):
        with pytest.raises(
            ValueError, match=f"AdamW: {name} has both grad .*; add p.grad to p.main_grad and set p.grad"
        ):
            run()
    assert_same(params, before)
    assert not optimizer.state
    params[1].grad = None
    params[0].grad = params[0].main_grad.view(40, 3)  # type: ignore[attr-defined]
    assert [g.data_ptr() for g in optimizer.gradients()] == [p.main_grad.data_ptr() for p in params]  # type: ignore[attr-defined]
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [1, 1]
    flat = torch.ones(240)
    params[0].main_grad, params[0].grad = flat[:120].view(40, 3), flat[120:].view(40, 3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has both grad and main_grad"):
        optimizer.step()
