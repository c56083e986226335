"""ScalarModel: transformers' numbers and files, and values that no batch and no micro-batch changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import CASES, SMALL, save, tensors
from ops.op_checks import rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.models import ConfigError, Decoder, ModelConfig, PackedBatch, ScalarModel, load_model, save_model

SEQUENCES = [[5, 9, 2], [7, 7, 7, 3, 1, 2], [4], [8, 3, 3, 2]]
WIDE = ModelConfig("qwen3", 64, 256, 96, 2, 4, 2, 64, max_position_embeddings=32, eos_token_id=(2,))


@pytest.mark.parametrize("case", ["qwen3-tied", "llama", "mistral"])
def test_transformers_reads_it_and_computes_the_same(case: str, tmp_path: Path) -> None:
    source = save(case, tmp_path / "hf")
    model = ScalarModel.from_decoder(load_model(source), seed=3, pad_token_id=0)
    target = save_model(model, tmp_path / "ours")
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        target, output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.num_labels == 1 and theirs.config.pad_token_id == 0
    padded = torch.tensor([row + [0] * (6 - len(row)) for row in SEQUENCES])
    with torch.no_grad():
        expected = theirs(padded, attention_mask=(padded != 0).long()).logits.squeeze(-1)
        found = model.scores(PackedBatch.from_sequences(SEQUENCES))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(set(found.tolist())) == len(SEQUENCES)
    theirs.save_pretrained(tmp_path / "again")
    again = ScalarModel.load(tmp_path / "again")
    for name, tensor in tensors(target).items():
        assert_bitwise(tensors(tmp_path / "again")[name], tensor, name)
    assert_bitwise(again.scores(PackedBatch.from_sequences(SEQUENCES)).detach(), found, "scores")


def test_each_kind_of_model_is_refused_as_the_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM.*; expected one ending in ForSequenceClassification"):
        ScalarModel.load(save("qwen3", tmp_path / "causal"))
    config = transformers.Qwen3Config(**{**SMALL, **CASES["qwen3"][1], "num_labels": 1})
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "score")
    ScalarModel.load(tmp_path / "score")
    with pytest.raises(ConfigError, match=r"Qwen3ForSequenceClassification.*; expected one ending in ForCausalLM"):
        load_model(tmp_path / "score")


def test_the_padding_token_is_one_that_transformers_needs() -> None:
    decoder = Decoder.from_config(WIDE)
    assert ScalarModel.from_decoder(decoder).config.pad_token_id == 2
    assert ScalarModel.from_decoder(decoder, pad_token_id=5).config.pad_token_id == 5


def _gradients(model: ScalarModel, parts: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    model.zero_main_grads()
    for part in parts:
        model.values(PackedBatch.from_sequences(part)).sum().backward()
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_batch_nor_micro_batch_changes_a_bit(dtype: torch.dtype) -> None:
    model = ScalarModel.from_decoder(Decoder.from_config(WIDE, seed=1)).to(dtype)
    batch = PackedBatch.from_sequences(SEQUENCES)
    alone = [PackedBatch.from_sequences([row]) for row in SEQUENCES]
    with torch.no_grad():
        assert_bitwise(model.values(batch), torch.cat([model.values(one) for one in alone]), "values")
        with ops.stock():  # the control; in bf16 its values are rounded, which can hide a difference
            same = torch.equal(model.values(batch), torch.cat([model.values(one) for one in alone]))
            assert dtype == torch.bfloat16 or not same
    whole = _gradients(model, [SEQUENCES])
    for name, grad in _gradients(model, [SEQUENCES[:1], SEQUENCES[1:3], SEQUENCES[3:]]).items():
        assert_bitwise(grad, whole[name], name)
        assert grad.abs().sum() > 0 or name.endswith("bias"), name
    assert whole["score.weight"].shape == (1, 256)


def test_the_head_is_as_accurate_as_stock_torch() -> None:
    model = ScalarModel(replace(WIDE, hidden_size=2048))
    hidden, weight = rand(0, 512, 2048), rand(1, 1, 2048)
    model.score.weight.data.copy_(weight)
    with torch.no_grad():
        found = {"head": model.values_of(hidden), "one chain": ops.linear(hidden, weight).squeeze(-1)}
        with ops.stock():
            found["stock"] = model.values_of(hidden)
    truth = (hidden.double() @ weight.double().t()).squeeze(-1)
    error = {name: float((values - truth).square().mean().sqrt()) for name, values in found.items()}
    assert error["head"] < 1.5 * error["stock"]
    assert error["one chain"] > 1.5 * error["head"], "the control"


def test_the_backbone_is_a_copy() -> None:
    decoder = Decoder.from_config(WIDE)
    model = ScalarModel.from_decoder(decoder)
    assert_bitwise(model.norm.weight.detach(), decoder.norm.weight.detach(), "norm")
    assert model.norm.weight.data_ptr() != decoder.norm.weight.data_ptr()
    assert "lm_head.weight" not in dict(model.named_parameters())
