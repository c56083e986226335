"""Accuracy: each family against transformers on the same random weights, forward and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import CASES, build, save

from rlkernel.contract import assert_accurate
from rlkernel.models import Decoder, PackedBatch, hf_tensors, load_model

LENGTHS = (41, 1, 17)


def sequences(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=generator) for n in LENGTHS]


def hf_logits(model: torch.nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])


def our_logits(model: Decoder, rows: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(PackedBatch.from_sequences(rows)))


@pytest.mark.parametrize("case", CASES)
def test_fp32_logits(case: str, tmp_path: Path) -> None:
    rows = sequences()
    ours = our_logits(load_model(save(case, tmp_path)), rows)
    hf = build(case)
    baseline = hf_logits(hf, rows)
    assert_accurate(ours, hf_logits(hf.double(), rows), baseline, f"{case} logits")


@pytest.mark.parametrize("case", CASES)
def test_bf16_logits(case: str, tmp_path: Path) -> None:
    """Our bf16 against transformers' fp32 on the same (bf16) weights: no worse than transformers' own bf16."""
    rows = sequences(1)
    hf = build(case).to(torch.bfloat16)
    baseline = hf_logits(hf, rows).float()
    truth = hf_logits(hf.float(), rows)
    ours = our_logits(load_model(save(case, tmp_path), torch.bfloat16), rows)
    assert_accurate(ours, truth, baseline, f"{case} logits", torch.bfloat16)
    error, own = ((x - truth).square().mean().sqrt() for x in (ours, baseline))
    assert error <= 1.25 * own, f"{case}: root mean square error {error:.3g}, transformers' own {own:.3g}"


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen2", "llama3-rope", "mistral-window"])
def test_gradients(case: str, tmp_path: Path) -> None:
    """Gradients of a loss over all logits, per Hugging Face tensor, against transformers in fp64."""
    rows = sequences(2)
    weights = torch.randn(sum(LENGTHS), 96, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradients(hf: torch.nn.Module) -> dict[str, torch.Tensor]:
        logits = torch.cat([hf(row[None]).logits[0] for row in rows])
        (logits * weights.to(logits.dtype)).sum().backward()
        return {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}

    model = load_model(save(case, tmp_path))
    logits = model.logits(model(PackedBatch.from_sequences(rows)))
    (logits * weights.float()).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    ours = dict(hf_tensors(model))
    truth, baseline = gradients(build(case).double()), gradients(build(case))
    assert ours.keys() == truth.keys()
    for name, grad in ours.items():
        assert_accurate(grad, truth[name], baseline[name], f"{case} gradient of {name}")


def test_window_matters(tmp_path: Path) -> None:
    """Control: without a window the comparison fails."""
    from dataclasses import replace

    rows = sequences()
    model = load_model(save("mistral-window", tmp_path))
    wide = Decoder(replace(model.config, windows=(None,) * model.config.num_layers))
    wide.load_state_dict(model.state_dict())
    assert (our_logits(wide, rows) - our_logits(model, rows)).abs().max() > 0.1
