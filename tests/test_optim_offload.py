"""AdamW with its states in host memory: the bits, the state and the checkpoints of AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from rlkernel import ops, optim_offload
from rlkernel.contract import assert_bitwise
from rlkernel.optim import AdamW
from rlkernel.optim_offload import OffloadedAdamW

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    """A bf16 matrix of several blocks, an fp32 one, a vector, and a parameter without a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = (((50, 33), torch.bfloat16), ((17, 9), torch.float32), ((5,), torch.bfloat16), ((4,), torch.float32))
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in shapes]
    for p in made[:3]:
        p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
    return made


def train(optimizer: AdamW, params: list[Any], steps: range, bad: int = -1) -> None:
    for step in steps:
        for i, p in enumerate(params[:3]):
            p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)))
            p.main_grad[0] = torch.inf if step == bad else 1.0
        scale = ops.grad_norm(optimizer.gradients(), max_norm=1.0).scale
        optimizer.step(scale=scale, zero_grad=True)
        assert not any(p.main_grad.any() for p in params[:3])


def assert_equal(optimizers: list[AdamW]) -> None:
    a, b = ([p for group in o.param_groups for p in group["params"]] for o in optimizers)
    for p, q in zip(a, b, strict=True):
        assert_bitwise(q.detach(), p.detach())
        ours, theirs = (o.state.get(x, {}) for o, x in zip(optimizers, (p, q), strict=True))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert_bitwise(theirs[name], value, name)
            else:
                assert theirs[name] == value


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_offload, "BLOCK", 256)


def test_the_bits_of_adamw_also_after_a_skipped_step_and_from_its_states() -> None:
    plain, offloaded = (kind(parameters(), **OPTIONS) for kind in (AdamW, OffloadedAdamW))
    for optimizer in (plain, offloaded):
        train(optimizer, optimizer.param_groups[0]["params"], range(5), bad=2)
    assert_equal([plain, offloaded])
    # On from the states of the other class, in either direction.
    swapped = []
    for kind, source in ((AdamW, offloaded), (OffloadedAdamW, plain)):
        params = [torch.nn.Parameter(p.detach().clone()) for p in source.param_groups[0]["params"]]
        for p in params[:3]:
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
        optimizer = kind(params, **OPTIONS)
        for p, theirs in zip(params[:3], source.param_groups[0]["params"], strict=False):
            optimizer.set_state(p, source.state[theirs])
        swapped.append(optimizer)
    for optimizer in (plain, *swapped):
        train(optimizer, optimizer.param_groups[0]["params"], range(5, 7))
    assert_equal([plain, swapped[0]])
    assert_equal([plain, swapped[1]])
    loaded = OffloadedAdamW(parameters(), **OPTIONS)
    loaded.load_state_dict(plain.state_dict())
    for p, theirs in zip(loaded.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        p.data.copy_(theirs)
    for optimizer in (plain, loaded):
        train(optimizer, optimizer.param_groups[0]["params"], range(7, 8))
    assert_equal([plain, loaded])


def test_states_stay_in_the_one_host_memory() -> None:
    """12 bytes per bf16 element, 8 per fp32 one, which nothing but the update's slots adds to."""
    optimizer = OffloadedAdamW(parameters(), **OPTIONS)
    params = optimizer.param_groups[0]["params"]
    train(optimizer, params, range(2))
    optimizer.set_state(params[0], {"step": 2, **{k: torch.ones(50, 33) for k in ("exp_avg", "exp_avg_sq", "master")}})
    train(optimizer, params, range(2, 3))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    }
    assert list(storages.values()) == [12 * (50 * 33 + 5) + 8 * (17 * 9 + 4)]
    assert optimizer.state[params[0]]["step"] == 3
    kept = {f"{i}.{k}": v for i, p in enumerate(params[:3]) for k, v in optimizer.state[p].items() if k != "step"}
    for name, value in load(save(kept)).items():  # safetensors accepts disjoint parts of one memory
        assert_bitwise(value, kept[name], name)


def test_a_tied_heads_gradient_that_was_not_folded_is_an_error() -> None:
    params = parameters()
    params[0].head_main_grad = torch.ones(50, 33)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="call fold_main_grads"):
        OffloadedAdamW(params, **OPTIONS).step()
