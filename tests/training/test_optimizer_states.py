"""8-bit optimizer states: the table, the same bits for any slices and threads, training as with fp32 states, size.

Able to fail: with a sixteenth of the codes the same training diverges.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkernel.contract import assert_bitwise
from rlkernel.models import Decoder, ModelConfig
from rlkernel.optim import AdamW
from rlkernel.training import int8_adamw
from rlkernel.training.batch import Trajectory, pack_trajectories, score
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.int8_adamw import Int8AdamW
from rlkernel.training.int8_states import BLOCK, _tables, dequantize, quantize
from rlkernel.training.optimizer import Optimizer

CONFIG = ModelConfig("qwen3", 20, 32, 48, 2, 2, 1, 16, max_position_embeddings=16, tie_word_embeddings=True)
EXAMPLES = [Trajectory([i, (3 * i) % 20], [(7 * i + j * j) % 20 for j in range(5)]) for i in range(12)]


@pytest.mark.parametrize("signed", [True, False])
def test_values_become_the_nearest_entry_of_their_block(signed: bool) -> None:
    entries = _tables(signed, torch.device("cpu"))[0]
    assert entries.unique().numel() == 256 and entries.max() == 1.0 and bool((entries == 0).any())
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) ** 5
    values = values if signed else values.abs()
    values[BLOCK : 2 * BLOCK] = 0.0
    codes, largest = quantize(values, signed)
    assert codes.dtype == torch.uint8 and largest.shape == (4,) and largest[1] == 0.0
    found = dequantize(codes, largest, signed)
    assert not found[BLOCK : 2 * BLOCK].any()
    scales = largest.repeat_interleave(BLOCK)[:1000]
    relative = torch.where(scales > 0, values / scales, 0.0).double()
    gaps = (relative[:, None] - entries.double()).abs().min(1).values
    assert float((((found / scales).nan_to_num().double() - relative).abs() - gaps).max()) < 1e-6
    again = quantize(found, signed)
    assert_bitwise(again[0], codes, "codes of what was stored")
    small = torch.tensor([1.0, 1e-20, 0.0])
    if not signed:
        assert (dequantize(*quantize(small, False), False) > 0).tolist() == [True, True, False]


def run(steps: int, dtype: torch.dtype, states: str) -> tuple[list[float], Decoder, Optimizer]:
    model = Decoder.from_config(CONFIG, std=0.1).to(dtype)
    optimizer = Optimizer(model, OptimizerSettings.model_validate({"lr": 0.01, "states": states}), steps)
    losses = []
    for _ in range(steps):
        loss = -score(model, pack_trajectories(EXAMPLES, "cpu")).logp.mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_as_with_fp32_states(dtype: torch.dtype) -> None:
    fp32, *_ = run(50, dtype, "fp32")
    int8, _, optimizer = run(50, dtype, "int8")
    assert fp32[-1] < 0.2 * fp32[0]
    assert sum(int8) == pytest.approx(sum(fp32), rel=0.02) and int8[-1] == pytest.approx(fp32[-1], rel=0.02)
    matrix = optimizer.adamw.state[optimizer.model.embed_tokens.weight]
    moments = sum(t.nbytes for name, t in matrix.items() if name.startswith("exp_avg"))
    assert moments / CONFIG.vocab_size / CONFIG.hidden_size == pytest.approx(2 + 8 / BLOCK, rel=0.02)
    assert ("master" in matrix) == (dtype == torch.bfloat16)
    assert optimizer.adamw.state[optimizer.model.norm.weight]["exp_avg"].dtype == torch.float32


def test_fewer_codes_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        codes, largest = quantize(values, signed)
        return codes // 16 * 16, largest

    monkeypatch.setattr(int8_adamw, "quantize", coarse)
    assert run(50, torch.float32, "int8")[0][-1] > 1.0


def trained_bytes(optimizer: Optimizer) -> dict[str, Tensor]:
    moments, _ = optimizer.state()
    return {**moments, **{name: p.detach() for name, p in optimizer.model.named_parameters()}}


def test_slices_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained_bytes(run(3, torch.bfloat16, "int8")[2])
    monkeypatch.setattr(int8_adamw, "SLICE", 2 * BLOCK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = trained_bytes(run(3, torch.bfloat16, "int8")[2])
    finally:
        torch.set_num_threads(threads)
    for name, tensor in expected.items():
        assert_bitwise(found[name], tensor, name)


def test_vectors_and_masters_are_those_of_adamw() -> None:
    """The first update reads no stored moment, so it is AdamW's for matrices too."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in ((37, 41), (16,))]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    pair = (Int8AdamW(ours, lr=0.1), AdamW(theirs, lr=0.1))
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).bfloat16()
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            if step == 0 or mine.dim() == 1:
                assert_bitwise(mine.detach(), other.detach(), "weights")
                assert_bitwise(pair[0].state[mine]["master"], pair[1].state[other]["master"], "masters")
    assert_bitwise(pair[0].state[ours[1]]["exp_avg"], pair[1].state[theirs[1]]["exp_avg"], "moment of a vector")
    assert not torch.equal(ours[0], theirs[0])
