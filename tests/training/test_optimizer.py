"""The optimizer of a run: AdamW as torch has it, masters of bf16 models, clipping, bad gradients and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.models import Decoder, ModelConfig
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.optimizer import Optimizer, learning_rate


def model_of(dtype: torch.dtype = torch.float32, tied: bool = False) -> Decoder:
    config = ModelConfig("qwen3", 20, 16, 24, 1, 2, 1, 8, max_position_embeddings=16, tie_word_embeddings=tied)
    return Decoder.from_config(config).to(dtype)


def fill(model: Decoder, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.main_grad.copy_(fn(parameter))  # type: ignore[attr-defined]


def test_it_is_torchs_adamw_on_an_fp32_model() -> None:
    ours = model_of()
    copies = [[p.detach().to(dtype, copy=True) for p in ours.parameters()] for dtype in (torch.float32, torch.float64)]
    chosen = OptimizerSettings(lr=0.01, weight_decay=0.1, clip_norm=None)
    optimizer = Optimizer(ours, chosen, 10)
    generator = torch.Generator().manual_seed(0)
    references = []
    for copy in copies:
        matrices, vectors = [p for p in copy if p.dim() > 1], [p for p in copy if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        references.append(torch.optim.AdamW(groups, lr=0.01, betas=chosen.betas, eps=chosen.eps))
    for _ in range(3):
        for mine, *others in zip(ours.parameters(), *copies, strict=True):
            grad = torch.randn(mine.shape, generator=generator)
            mine.main_grad.copy_(grad)  # type: ignore[attr-defined]
            for other in others:
                other.grad = grad.to(other.dtype)
        optimizer.step()
        for reference in references:
            reference.step()
    for (name, mine), other, exact in zip(ours.named_parameters(), *copies, strict=True):
        assert_accurate(mine, exact, other, name)
        assert not mine.main_grad.any()  # type: ignore[attr-defined]


def test_a_bf16_model_follows_fp32_masters() -> None:
    model = model_of(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, OptimizerSettings(lr=1e-5, clip_norm=None), 100)
    for _ in range(100):  # each update alone is below half an ulp of most bf16 weights
        fill(model, torch.ones_like)
        optimizer.step()
    moved = 0
    for name, parameter in model.named_parameters():
        master = optimizer.adamw.state[parameter]["master"]
        assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert_bitwise(parameter.detach(), master.detach().to(torch.bfloat16), name)
        moved += int((parameter.detach() != before[name]).sum())
    assert moved > 100


def test_stock_gradients_and_a_tied_heads_share_are_gathered() -> None:
    model = model_of(tied=True)
    optimizer = Optimizer(model, OptimizerSettings(clip_norm=None), 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.gather()
    table = model.embed_tokens.weight
    table.head_main_grad.fill_(2.0)  # type: ignore[attr-defined]
    expected = sum(p.numel() for p in model.parameters()) + 8 * table.numel()
    assert optimizer.step().grad_norm == pytest.approx(math.sqrt(expected), rel=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clipping_scales_to_the_limit() -> None:
    model = model_of()
    optimizer = Optimizer(model, OptimizerSettings(lr=1.0, betas=(0.0, 0.0), eps=1e3, clip_norm=0.5), 1)
    before = [p.detach().clone() for p in model.parameters()]
    fill(model, lambda p: torch.full_like(p, 3.0))
    norm = 3.0 * math.sqrt(sum(p.numel() for p in model.parameters()))
    update = optimizer.step()
    assert update.grad_norm == pytest.approx(norm) and update.lr == 1.0
    moved = torch.cat([(b - p).detach().reshape(-1) for b, p in zip(before, model.parameters(), strict=True)])
    expected = 0.5 / norm * 3.0  # with a huge epsilon AdamW moves by lr * grad / eps
    assert torch.allclose(moved * 1e3, torch.full_like(moved, expected), rtol=2e-2)


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_parameter() -> None:
    model = model_of()
    optimizer = Optimizer(model, OptimizerSettings(), 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.norm.weight.main_grad[3] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(FloatingPointError, match=r"the gradient of norm\.weight is not finite"):
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert_bitwise(parameter.detach(), before[name], name)


def test_schedules() -> None:
    constant = OptimizerSettings(lr=1.0, warmup_steps=3)
    assert [learning_rate(constant, i, 10) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = OptimizerSettings(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert learning_rate(linear, 0, 10) == 2.0 and learning_rate(linear, 5, 10) == 1.5
    assert learning_rate(linear, 10, 10) == learning_rate(linear, 99, 10) == 1.0
    cosine = OptimizerSettings(lr=1.0, schedule="cosine", warmup_steps=2)
    assert learning_rate(cosine, 2, 12) == 1.0 and learning_rate(cosine, 7, 12) == pytest.approx(0.5)
    assert learning_rate(cosine, 12, 12) == pytest.approx(0.0, abs=1e-15)
