"""LoRA: the merged weight is read by rollout and training, the gradients are those of A and B, and PEFT agrees.

Able to fail: an adapter without its scale gives other gradients and other merged weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import save

from rlkernel import ops
from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.models import CheckpointError, Decoder, ModelConfig, PackedBatch, hf_tensors, load_model, save_model
from rlkernel.models.lora import TARGETS, AdaptedLinear, adapted, add_adapters, base_of, merge_adapters_, save_adapter
from rlkernel_transformers import merged_weights

CONFIG = ModelConfig("qwen2", 40, 32, 48, 2, 4, 2, 16, max_position_embeddings=64, tie_word_embeddings=True)
ROWS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [3, 1, 3, 1, 39]]


def objective(model: Decoder, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    batch = PackedBatch.from_sequences([list(row[:-1]) for row in rows])
    targets = torch.tensor([token for row in rows for token in row[1:]])
    return model.logprob(model(batch), targets).logp.sum()


def trained(dtype: torch.dtype = torch.float32, rank: int = 3, targets: Sequence[str] = TARGETS) -> Decoder:
    """A model whose adapters are not at their start."""
    model = Decoder.from_config(replace(CONFIG, dtype=dtype), std=0.2)
    return perturb(add_adapters(model, rank=rank, alpha=2.0 * rank, targets=targets))


def perturb(model: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.05, generator=generator)
    merge_adapters_(model)
    return model


def gradients(model: Decoder, parts: Sequence[Sequence[Sequence[int]]]) -> dict[str, torch.Tensor]:
    model.zero_main_grads()
    for part in parts:
        objective(model, part).backward()
    assert not any(p.grad is not None for p in model.parameters())
    return {name: p.main_grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_it_starts_as_the_base_and_trains_only_adapters() -> None:
    plain, model = Decoder.from_config(CONFIG), Decoder.from_config(CONFIG)
    add_adapters(model, rank=4, alpha=8, targets=["v_proj", "up_proj"])
    for (name, ours), (_, other) in zip(hf_tensors(model), hf_tensors(plain), strict=True):
        assert_bitwise(ours, other, name)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names == [
        f"layers.{i}.{owner}.adapters.{target}.{part}"
        for i in range(2)
        for owner, target in (("self_attn.qkv_proj", "v_proj"), ("mlp.gate_up_proj", "up_proj"))
        for part in ("lora_A", "lora_B")
    ]
    assert_bitwise(objective(model, ROWS).detach(), objective(plain, ROWS).detach(), "the first policy")
    assert not any(hasattr(p, "main_grad") for p in model.parameters() if not p.requires_grad)
    with pytest.raises(ValueError, match=r"targets=\['c_proj'\]; expected some of q_proj"):
        add_adapters(plain, rank=4, alpha=8, targets=["c_proj"])


def test_gradients_are_those_of_the_unmerged_form() -> None:
    """Of W0 + s B A, recorded by torch's autograd on stock ops."""
    ours, model = gradients(trained(), [ROWS]), trained()
    for linear in adapted(model):
        parts = list(linear.base.split([adapter.rows[1] for adapter in linear.parts()]))
        updates = [adapter.scale * adapter.lora_B @ adapter.lora_A for adapter in linear.parts()]
        weight = torch.cat([part + update for part, update in zip(parts, updates, strict=True)])
        linear.forward = lambda x, w=weight, b=linear.bias: F.linear(x, w, b)  # type: ignore[method-assign]
    with ops.stock():
        objective(model, ROWS).backward()
    assert len(ours) == 2 * 2 * len(TARGETS)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
            assert bool(parameter.grad.any())


def test_micro_batches_recomputation_and_threads_change_no_bit() -> None:
    model = trained(torch.bfloat16)
    whole = gradients(model, [ROWS])
    assert all(bool(grad.any()) for grad in whole.values())
    model.gradient_checkpointing = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        split = gradients(model, [ROWS[:1], ROWS[1:3], ROWS[3:]])
        merge_adapters_(model)
        merged = {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        torch.set_num_threads(threads)
    merge_adapters_(model)
    for name, parameter in model.named_parameters():
        assert_bitwise(merged[name], parameter, name)
    for name, grad in whole.items():
        assert_bitwise(split[name], grad, name)


def test_the_control_trains_the_same_adapters_on_stock_ops() -> None:
    model = trained()
    ours = gradients(model, [ROWS])
    with ops.stock():
        stock = gradients(model, [ROWS])
    for name, grad in ours.items():
        torch.testing.assert_close(stock[name], grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_reads_the_adapter_and_merges_to_our_weights(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """PEFT multiplies B A with a BLAS, in its order of addition: the merged weights are equal or neighbours."""
    base = save(case, tmp_path / "base", dtype)
    model = perturb(add_adapters(load_model(base), rank=4, alpha=6.0, targets=["q_proj", "v_proj", "down_proj"]))
    save_adapter(model, tmp_path / "adapter", str(base))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    wrapped = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
    unused = [name for name in wrapped.state_dict() if "lora" in name and "lora_embedding" not in name]
    assert len(unused) == 3 * 3 * 2
    same = dict(merged_weights(wrapped))
    merged, moved = wrapped.merge_and_unload().state_dict(), 0
    start = dict(hf_tensors(load_model(base)))
    for name, tensor in hf_tensors(model):
        assert_bitwise(same[name], tensor, f"{name} by rlkernel_transformers")
        result = compare_bitwise(tensor, merged[name])
        assert result.mismatches <= tensor.numel() // 100, name
        torch.testing.assert_close(tensor, merged[name], rtol=torch.finfo(dtype).eps, atol=1e-7, msg=name)
        moved += not torch.equal(tensor, start[name])
    assert moved == 9
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 6.0 and config["base_model_name_or_path"] == str(base)
    with pytest.raises(CheckpointError, match=r"save_adapter: .* exists"):
        save_adapter(model, tmp_path / "adapter", str(base))


def test_the_saved_model_is_the_merged_one(tmp_path: Path) -> None:
    model = trained(torch.bfloat16)
    loaded = load_model(save_model(model, tmp_path / "m"))
    assert_bitwise(objective(loaded, ROWS).detach(), objective(model, ROWS).detach(), "merged")
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(loaded, tmp_path / "a", "base")


def test_the_base_shares_storage_and_stays() -> None:
    model = Decoder.from_config(CONFIG)
    before = objective(model, ROWS).detach()
    base = base_of(add_adapters(model, rank=2, alpha=4, targets=["k_proj"]))
    perturb(model)
    assert_bitwise(objective(base, ROWS).detach(), before, "the base")
    assert not torch.equal(objective(model, ROWS), before)
    assert not any(p.requires_grad for p in base.parameters()) and not adapted(base)
    assert all(isinstance(layer.self_attn.qkv_proj, AdaptedLinear) for layer in model.layers)
    assert base.layers[0].self_attn.qkv_proj.weight.data_ptr() == model.layers[0].self_attn.qkv_proj.base.data_ptr()
    assert base.norm.weight is model.norm.weight
