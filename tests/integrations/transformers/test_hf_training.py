"""Models in training stacks: checkpointing, compilation, adapters, FSDP2, fp32 buffers, copies, saving."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_side import ROWS, decoder_logprobs, fused_gradients, next_tokens, padded, pair, stock
from models.hf_models import build
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import rlkernel_transformers as rt
from rlkernel.contract import assert_bitwise
from rlkernel.models import load_model
from rlkernel_transformers.adapters import _Merged
from rlkernel_transformers.joined import join, joined_linear

IDS, MASK = padded(ROWS)


def gradients(model: Any, ids: torch.Tensor = IDS, mask: torch.Tensor = MASK) -> dict[str, torch.Tensor]:
    model.zero_grad()
    rt.token_logprobs(model, ids, mask).logp.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(found[name], value, f"{what}: {name}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, compat: Any) -> None:
    model, _ = pair("qwen3-tied", torch.bfloat16)
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_equal(gradients(model), expected, "checkpointing")
    compat.exact("transformers", f"gradient checkpointing, {'' if reentrant else 'not '}reentrant")


def two_layers(case: str) -> Any:
    """Compilation takes a second per layer."""
    model, _ = pair(case)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


@pytest.mark.parametrize("mask", [MASK, None], ids=["padded", "full"])
def test_compiles_whole(mask: torch.Tensor | None, compat: Any) -> None:
    model = two_layers("qwen3")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for m in (model, compiled):
        model.zero_grad()
        out = rt.token_logprobs(m, IDS, mask)
        out.logp.sum().backward()
        results.append((out.logp.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_bitwise(results[1][0], results[0][0], "compiled")
    assert_equal(results[1][1], results[0][1], "compiled")
    compat.exact("transformers", "torch.compile(fullgraph=True): log-probabilities and gradients")


@torch.no_grad()
def test_compiles_logits() -> None:
    model = two_layers("qwen2").eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (m(input_ids=IDS, attention_mask=MASK).logits for m in (compiled, model))
    assert_bitwise(found, expected, "compiled logits")


def test_compiles_packed_rows(compat: Any) -> None:
    model = two_layers("llama")
    flat = torch.tensor([[token for row in ROWS for token in row]])
    cu = torch.tensor([0, *(len(row) for row in ROWS)]).cumsum(0).to(torch.int32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (rt.token_logprobs(m, flat, cu_seq_lens_q=cu, max_length_q=17).logp for m in (compiled, model))
    compat.bitwise("transformers", "torch.compile(fullgraph=True): packed rows", found, expected)


# ---- fp32 buffers --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen2", "llama"])
@pytest.mark.parametrize("joined", [True, False])
def test_main_grads_of_micro_batches(case: str, joined: bool, compat: Any) -> None:
    """With fp32 buffers every split of a batch has the bits of our decoder in one batch; bf16 `.grad` has others."""
    model, decoder = pair(case, torch.bfloat16)
    if not joined:
        model = rt.apply(copy.deepcopy(rt.remove(model)), join_weights=False).train()
    rt.main_grads(model)
    decoder.zero_main_grads()
    decoder_logprobs(decoder, ROWS).logp.sum().backward()
    decoder.fold_main_grads()
    for parts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(i, i + 1) for i in range(4)]):
        model.zero_grad()
        for at in parts:
            rt.token_logprobs(model, IDS[at], MASK[at]).logp.sum().backward()
        rt.fold_main_grads(model)
        for name, (theirs, own) in fused_gradients(model, decoder, "main_grad").items():
            assert_bitwise(theirs, own, f"{name} of {len(parts)} micro-batches")
    compat.exact("transformers", "main_grads: fp32 gradients over any micro-batches")


def test_the_row_of_the_padding_token_is_not_trained() -> None:
    """As in transformers. Its embedding is zero, where the gradient would dominate the norm of all others."""
    model = build("llama")
    model.config.pad_token_id = 7
    embedding = model.model.embed_tokens
    embedding.padding_idx = 7
    with torch.no_grad():
        embedding.weight[7] = 0
    ids = torch.tensor([[5, 9, 7, 12, 40, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = embedding.weight.grad.clone()
    model.zero_grad()
    rt.apply(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert not embedding.weight.grad[7].any() and embedding.weight.grad[5].any()
    assert torch.allclose(embedding.weight.grad, wanted, atol=1e-4)
    rt.main_grads(model)
    model(input_ids=ids, labels=ids).loss.backward()
    rt.fold_main_grads(model)
    assert not embedding.weight.main_grad[7].any() and embedding.weight.main_grad[5].any()


def test_masters_in_a_training_loop() -> None:
    """Clipping by torch, AdamW on fp32 masters, `zero_grad`: bf16 does not lose small updates."""
    model, _ = pair("qwen3-tied", torch.bfloat16)
    gradients(model)  # leaves bf16 gradients behind
    rt.main_grads(model)
    optimizer = rt.AdamW(model.parameters(), lr=1e-5)
    before = model.lm_head.weight.detach().clone()
    for _ in range(4):
        rt.token_logprobs(model, IDS, MASK).logp.sum().neg().backward()
        with pytest.raises(ValueError, match=r"tied head .* call fold_main_grads after the last backward"):
            optimizer.step()
        rt.fold_main_grads(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm) > 1 and model.model.norm.weight.grad is model.model.norm.weight.main_grad
        optimizer.step()
        model.zero_grad()
        assert not any(bool(p.main_grad.any()) for p in model.parameters())
    master = optimizer.state[model.lm_head.weight]["master"]
    assert model.lm_head.weight.dtype == torch.bfloat16 and master.dtype == torch.float32
    assert int((master != before.float()).sum()) > 2 * int((model.lm_head.weight != before).sum()) > 0
    rt.remove(model)
    assert not hasattr(model.lm_head.weight, "main_grad") and model.lm_head.weight.grad is None


def test_in_a_trainer(tmp_path: Path, compat: Any) -> None:
    """transformers' own Trainer finds columns and passes token counts, and the loss falls, with bf16=True too."""
    pytest.importorskip("accelerate")
    ids, mask = padded(ROWS, left=False)
    rows = [
        {"input_ids": i, "attention_mask": m, "labels": i.masked_fill(m == 0, -100)}
        for i, m in zip(ids, mask, strict=True)
    ]
    common: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}

    def trainer(**options: Any) -> Any:
        args = transformers.TrainingArguments(str(tmp_path), **common, **options)
        model, _ = pair("qwen3")
        optimizer = rt.AdamW(model.parameters(), lr=3e-3)
        return transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None))

    for bf16 in (False, True):
        one = trainer(per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=4, bf16=bf16)
        before = one.evaluate()["eval_loss"]
        one.train()
        assert one.evaluate()["eval_loss"] < before - 0.3
        assert rt.status(one.model).exact
    assert all(p.dtype == torch.float32 for p in one.model.parameters())
    half = rt.apply(copy.deepcopy(stock("qwen3")))
    half.load_state_dict(one.model.state_dict())
    expected = rt.token_logprobs(rt.apply(half.to(torch.bfloat16)), ids, mask).logp
    found = rt.token_logprobs(one.model, ids, mask).logp
    compat.bitwise("transformers", "bf16=True of a Trainer, over fp32 weights", found, expected)


# ---- LoRA ----------------------------------------------------------------------------------------


def lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = options.pop("targets", ["q_proj", "v_proj", "gate_proj", "down_proj"])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("adapters", ["low-rank", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_is_invariant(adapters: str, dtype: torch.dtype, compat: Any) -> None:
    model = rt.apply(lora(stock("qwen3", dtype)), adapters=adapters).train()
    assert rt.status(model).exact
    other_ids, other_mask = padded(ROWS, left=False, extra=3)
    for autocast in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            one, other = (rt.token_logprobs(model, i, m) for i, m in ((IDS, MASK), (other_ids, other_mask)))
        assert_bitwise(next_tokens(other.logp, other_mask), next_tokens(one.logp, MASK), f"autocast={autocast}")
    feature = f"PEFT LoRA, {adapters}: padding changes nothing"
    compat.bitwise("transformers", feature, next_tokens(other.logp, other_mask), next_tokens(one.logp, MASK))
    found = gradients(model)
    assert len(found) == 2 * 4 * 3 and all("lora_" in name and bool(g.any()) for name, g in found.items())
    with model.disable_adapter():
        base = rt.token_logprobs(model, IDS, MASK).logp
    assert_bitwise(base, rt.token_logprobs(pair("qwen3", dtype)[0], IDS, MASK).logp, "reference model")
    assert not torch.equal(base, one.logp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_lora_is_the_merged_model(dtype: torch.dtype, tmp_path: Path, compat: Any) -> None:
    """`adapters="merged"` has the bits of an engine that was sent `merged_weights`, and the right gradients."""
    model = rt.apply(lora(stock("qwen3", dtype)), adapters="merged").train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = stock("qwen3", dtype)
    missing = plain.load_state_dict(dict(rt.merged_weights(model)), strict=True)
    assert not missing.missing_keys
    plain.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, dtype=dtype)
    out = rt.token_logprobs(model, IDS, MASK)
    merged = decoder_logprobs(decoder, ROWS).logp
    compat.bitwise("transformers", "PEFT LoRA, merged: an engine's numbers", next_tokens(out.logp, MASK), merged)
    found = gradients(model)
    low_rank = gradients(rt.apply(model, adapters="low-rank"))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for name, grad in low_rank.items():
        error = float((found[name] - grad).norm() / grad.norm())
        assert error < tolerance, (name, error)
    for name, p in model.named_parameters():
        assert_bitwise(p, before[name], f"{name} after merging")


def test_adapters_that_are_refused(compat: Any) -> None:
    peft = pytest.importorskip("peft")
    model = pair("qwen3")[0]
    wrapped = lora(model)
    with pytest.raises(rt.CallError, match=r"peft\..*Linear was put into .*call apply"):
        rt.token_logprobs(wrapped, IDS, MASK)
    assert not rt.status(wrapped).exact and "was added after apply" in str(rt.status(wrapped))
    for feature, named, options, adapters in (
        ("lora_dropout", "lora_dropout", {"lora_dropout": 0.1}, "low-rank"),
        ("modules_to_save", "lm_head", {"modules_to_save": ["lm_head"]}, "low-rank"),
        ("DoRA, merged", "low-rank", {"use_dora": True}, "merged"),
        ("modules_to_save of norms", "norm.modules_to_save", {"modules_to_save": ["norm"]}, "low-rank"),
    ):
        with pytest.raises(rt.UnsupportedModelError) as raised:
            rt.apply(lora(stock("qwen3"), **options), adapters=adapters)
        compat.refused("transformers", f"PEFT with {feature}", raised.value, named)
    with pytest.raises(rt.UnsupportedModelError, match="without lora_bias"):  # it would be ignored
        rt.apply(lora(stock("qwen2"), targets=["q_proj"], lora_bias=True), adapters="merged")
    other = peft.get_peft_model(stock("qwen3", torch.bfloat16), peft.LoHaConfig(target_modules=["q_proj"]))
    with pytest.raises(rt.UnsupportedModelError, match=r"has weights .*hada_w1_a.*; .* remove other adapters"):
        rt.apply(other)
    with pytest.raises(rt.UnsupportedModelError, match=r"lm_head is a peft\.[\w.]*Linear; take it out"):
        rt.apply(lora(stock("qwen3"), targets=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="expected 'low-rank'"):
        rt.apply(stock("qwen3"), adapters="other")


# ---- FSDP2 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, inputs cast", "fp32 under autocast(bf16)"])
@pytest.mark.parametrize("case", ["qwen3-tied", "llama"])
def test_fsdp2(case: str, policy: str, mesh: Any, compat: Any) -> None:
    """One rank, fp32 or bf16 compute over fp32 masters: log-probabilities and gradients of our decoder."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, decoder = pair(case)
    mixed = MixedPrecisionPolicy()
    autocast = "autocast" in policy
    if policy != "fp32":
        decoder = decoder.to(torch.bfloat16)
    if policy.startswith("bf16"):
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=policy != "bf16")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    if case == "llama":  # the head's group is not the model's, as torchtitan makes it
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = rt.token_logprobs(model, IDS, MASK)
    ours = decoder_logprobs(decoder, ROWS)
    feature = f"FSDP2 on one rank, {policy}: log-probabilities, and gradients too"
    compat.bitwise("transformers", feature, next_tokens(out.logp, MASK), ours.logp)
    out.logp.sum().backward()
    ours.logp.sum().backward()
    for p in model.parameters():
        p.full = p.grad.full_tensor().to(decoder.dtype)
    for p in decoder.parameters():
        p.full = p.grad
    for name, (theirs, own) in fused_gradients(model, decoder, "full").items():
        if not (autocast and case == "qwen3-tied" and "embed" in name):  # accumulated in fp32 there
            assert_bitwise(theirs, own, name)
    if policy != "bf16":
        return
    rt.main_grads(model)
    model.zero_grad()
    rt.token_logprobs(model, IDS, MASK).logp.sum().backward()
    for p in decoder.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    decoder_logprobs(decoder, ROWS).logp.sum().backward()
    for p in model.parameters():
        p.full = p.grad.full_tensor()
    for name, (theirs, own) in fused_gradients(model, decoder, "full", "main_grad").items():
        if not (case == "qwen3-tied" and "embed" in name):  # two chains, of the embedding and of the head
            assert_bitwise(theirs, own, name)
    compat.exact("transformers", "main_grads under FSDP2: fp32 gradients of parameters gathered in bf16")


def test_parallel_wrappers_that_are_refused(mesh: Any, compat: Any) -> None:
    """Each would compute wrong gradients, or add in another order."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, _ = pair("llama", torch.bfloat16)
    rt.main_grads(model)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(rt.UnsupportedModelError) as raised:
        rt.token_logprobs(ddp, IDS, MASK)
    compat.refused("transformers", "main_grads under DDP", raised.value, r"create a rlkernel_transformers.GradientTree")
    with ddp.no_sync():
        rt.token_logprobs(ddp, IDS, MASK).logp.sum().backward()
    assert bool(model.lm_head.weight.main_grad.any())
    model = fully_shard(pair("llama")[0], mesh=mesh)
    with pytest.raises(rt.CallError, match=r"still sharded where it is used.*call the module that fully_shard"):
        model.model(IDS)
    plain = parallelize_module(stock("llama"), mesh, {"model.layers.0.self_attn.q_proj": ColwiseParallel()})
    with pytest.raises(rt.UnsupportedModelError) as raised:
        rt.apply(plain)
    compat.refused("transformers", "tensor parallelism (tp_plan)", raised.value, "load the model without tp_plan")
    model, _ = pair("llama")
    fully_shard(model.model.layers[0], mesh=mesh)
    with pytest.raises(rt.UnsupportedModelError) as raised:
        rt.main_grads(model)
    compat.refused(
        "transformers", "main_grads of a model in part under FSDP2", raised.value, "after the last fully_shard"
    )


# ---- apply and remove ----------------------------------------------------------------------------


def test_remove_restores_everything(compat: Any) -> None:
    model, plain = pair("qwen2")[0], stock("qwen2")
    rt.main_grads(model)
    assert rt.status(model).exact and rt.status(model).contract == "rlk-2"
    assert model.config._attn_implementation == "rlkernel"
    rt.remove(rt.apply(model))
    for module in model.modules():
        assert not [name for name in module.__dict__ if "rlkernel" in name or name in ("forward", "zero_grad")]
    assert model.config._attn_implementation == plain.config._attn_implementation
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.untyped_storage().nbytes() == q.numel() * q.element_size()
    with torch.no_grad():
        compat.bitwise("transformers", "remove: stock logits again", model.eval()(IDS).logits, plain(IDS).logits)
    found = rt.status(model)
    assert not found.exact and found.contract is None and str(found).endswith("contract none")
    with pytest.raises(rt.UnsupportedModelError, match="apply"):
        rt.token_logprobs(model, IDS)


def test_status_lists_every_module() -> None:
    model, _ = pair("qwen3")
    rows = {row.module: row for row in rt.status(model).rows}
    owners = {name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    assert owners <= rows.keys() and all(row.runs == "rlkernel" for row in rows.values())
    del model.model.layers[1].mlp.forward
    found = rt.status(model)
    assert [row.module for row in found.rows if row.runs == "stock"] == ["model.layers.1.mlp"] and not found.exact
    assert "4 chunks of K" in str(rt.status(rt.apply(stock("llama"), tp_leaves=4)))


def test_copies_and_saves_as_before(tmp_path: Path, compat: Any) -> None:
    model, _ = pair("qwen3-tied")
    expected = rt.token_logprobs(model, IDS, MASK).logp
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin and rt.status(twin).exact
    assert_bitwise(rt.token_logprobs(twin, IDS, MASK).logp, expected, "copy")
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert_bitwise(rt.token_logprobs(model, IDS, MASK).logp, expected, "after the copy changed")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    found = rt.token_logprobs(rt.apply(loaded), IDS, MASK).logp
    compat.bitwise("transformers", "copied, saved and loaded", found, expected)


def test_every_saver_sees_every_weight(tmp_path: Path, compat: Any) -> None:
    """safetensors and accelerate treat tensors of one storage as tied; the model can be pickled."""
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = pair("qwen2", torch.bfloat16)
    expected = rt.token_logprobs(model, IDS, MASK).logp.detach()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    safetensors.save_model(model, tmp_path / "again.safetensors")
    first = model.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (first.q_proj, first.k_proj, first.v_proj)}
    assert len(storages) == 1 and join([first.q_proj.weight, first.k_proj.weight]).data_ptr() in storages
    model.state_dict()["model.layers.0.self_attn.k_proj.weight"].zero_()
    assert not bool(first.k_proj.weight.any()), "a state dict is the model's memory"
    safetensors.load_model(model, tmp_path / "again.safetensors")
    assert_bitwise(rt.token_logprobs(model, IDS, MASK).logp, expected, "loaded by safetensors")
    torch.save(model, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert rt.status(whole).exact and whole.forward.__self__ is whole
    compat.bitwise("transformers", "torch.save(model)", rt.token_logprobs(whole, IDS, MASK).logp, expected)
    rt.main_grads(model)
    with pytest.raises(TypeError, match=r"save model.state_dict\(\), or call rlkernel_transformers.remove"):
        torch.save(model, tmp_path / "buffers.pt")
    assert not rt.remove(model).model.layers[0].self_attn.k_proj._state_dict_hooks


def test_hooks_run(compat: Any) -> None:
    """Hooks on joined layers and the fused head run; hooks that only read change no bit of the forward."""
    model, _ = pair("qwen3", torch.bfloat16)
    layer, head = model.model.layers[1], model.lm_head
    expected = rt.token_logprobs(model, IDS, MASK, temperature=0.7, statistics=True)
    plain = gradients(model)
    seen: list[Any] = []
    looked = (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj, head)
    handles = [part.register_forward_hook(lambda part, x, out: seen.append((part, out.shape))) for part in looked]
    found = rt.token_logprobs(model, IDS, MASK, temperature=0.7, statistics=True)
    scored = sum(len(row) - 1 for row in ROWS)
    assert {part for part, _ in seen} == set(looked) and seen[-1] == (head, (scored, 96))
    compat.bitwise("transformers", "forward hooks on joined layers and the head", found.logp, expected.logp)
    assert torch.equal(found.top1, expected.top1)
    torch.testing.assert_close(found.mean_logit, expected.mean_logit, rtol=1e-2, atol=1e-3)
    hooked = gradients(model)
    assert all(float((hooked[name] - g).norm() / g.norm()) < 0.02 for name, g in plain.items())
    assert rt.status(model).exact and "q_proj" in str(rt.status(model)) and "has hooks" in str(rt.status(model))
    for handle in handles:
        handle.remove()
    assert_equal(gradients(model), plain, "after the hooks")
    handle = head.register_forward_hook(lambda part, x, out: out * 0)
    assert rt.token_logprobs(model, IDS, MASK).logp[0, -2].item() == pytest.approx(-math.log(96))
    handle.remove()
    prune.l1_unstructured(layer.self_attn.q_proj, "weight", 0.5)
    weight_norm(layer.mlp.gate_proj)
    for weight in (layer.self_attn.q_proj.weight_orig, layer.mlp.gate_proj.parametrizations.weight.original0):
        before = rt.token_logprobs(model, IDS, MASK).logp
        with torch.no_grad():
            weight.mul_(-3)
        assert not torch.equal(rt.token_logprobs(model, IDS, MASK).logp, before)
    merged = rt.apply(lora(stock("qwen3")), adapters="merged")
    base = merged.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
    base.register_forward_hook(lambda *_: None)
    with pytest.raises(rt.CallError, match=r"inside a LoRA layer has hooks.* put them on the LoRA layer"):
        rt.token_logprobs(merged, IDS, MASK)


def test_a_module_that_was_replaced_is_named(compat: Any) -> None:
    model, _ = pair("llama")
    model.resize_token_embeddings(120, mean_resizing=False)
    assert not rt.status(model).exact
    with pytest.raises(rt.UnsupportedModelError) as raised:
        model(IDS)
    compat.refused("transformers", "a head that was replaced after apply", raised.value, "call apply")
    found = rt.apply(model)(IDS).logits
    assert rt.status(model).exact and found.shape[-1] == 120 and found.dtype == torch.float32
    for owner, name in ((model.model, "norm"), (model.model.layers[1], "input_layernorm"), (model.model, "layers")):
        fresh = getattr(stock("llama").model.layers[0] if name == "input_layernorm" else stock("llama").model, name)
        before = getattr(owner, name)
        setattr(owner, name, fresh)
        with pytest.raises(rt.UnsupportedModelError, match=r"was put into the model after .*call apply\(model\) again"):
            model(IDS)
        setattr(owner, name, before)


@pytest.mark.parametrize("first", [True, False])
@torch.no_grad()
def test_under_cpu_offload(first: bool, compat: Any) -> None:
    """accelerate's hooks load each module's weights at its call; `apply` before or after them."""
    accelerate = pytest.importorskip("accelerate")
    expected = rt.token_logprobs(pair("qwen3-tied")[0], IDS, MASK).logp
    model = stock("qwen3-tied")
    if first:
        rt.apply(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if not first:
        rt.apply(model)
    assert rt.status(model).exact and model.lm_head.weight.is_meta
    compat.bitwise("transformers", "accelerate's cpu_offload", rt.token_logprobs(model, IDS, MASK).logp, expected)
    accelerate.hooks.remove_hook_from_submodules(rt.remove(model))
    assert not rt.status(model).exact
    assert_bitwise(model(IDS).logits, stock("qwen3-tied")(IDS).logits, "stock again")


def test_tp_leaves_are_those_of_the_decoder(tmp_path: Path, compat: Any) -> None:
    plain = stock("llama", torch.bfloat16)
    plain.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, tp_leaves=4)
    model = rt.apply(plain, tp_leaves=4)
    found = next_tokens(rt.token_logprobs(model, IDS, MASK).logp, MASK)
    compat.bitwise("transformers", "tp_leaves=4 on one device", found, decoder_logprobs(decoder, ROWS).logp)


BIASED = "has weights that its architecture does not: lm_head.bias;"
HALVED = "lacks: model.layers.1.self_attn.q_proj.bias;"
REFUSED = {
    "Gemma2ForCausalLM.*gelu MLP.*soft-capping.*no op": "Gemma 2",
    "Gemma3ForCausalLM.*gelu MLP.*norm of weight 1.*no op": "Gemma 3",
    "Qwen3MoeForCausalLM.*mixture-of-experts": "mixture of experts",
    "dtypes torch.bfloat16, torch.float32": "parameters of several dtypes",
    "float64": "float64 parameters",
    "use_liger_kernel=False": "Liger kernels",
    BIASED: "a head with a bias",
    HALVED: "a layer without its bias",
}


def test_models_that_are_refused(compat: Any) -> None:
    cases: list[tuple[str, Any]] = []
    tiny: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    gemma2, gemma3 = transformers.Gemma2Config(**tiny), transformers.Gemma3TextConfig(**tiny)
    cases.append(("Gemma2ForCausalLM.*gelu MLP.*soft-capping.*no op", transformers.Gemma2ForCausalLM(gemma2)))
    cases.append(("Gemma3ForCausalLM.*gelu MLP.*norm of weight 1.*no op", transformers.Gemma3ForCausalLM(gemma3)))
    mixture = transformers.Qwen3MoeConfig(**tiny, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
    cases.append(("Qwen3MoeForCausalLM.*mixture-of-experts", transformers.Qwen3MoeForCausalLM(mixture)))
    cases.append(("no model of transformers", torch.nn.Linear(2, 2)))
    for text, changes in (
        ("attention_dropout=0.1", {"attention_dropout": 0.1}),
        ("hidden_act='gelu'", {"hidden_act": "gelu"}),
        ("rope type 'yarn'", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
    ):
        model = build("llama")
        for name, value in changes.items():
            setattr(model.config, name, value)
        cases.append((text, model))
    mixed = build("llama")
    mixed.model.norm.to(torch.bfloat16)
    cases.append(("dtypes torch.bfloat16, torch.float32", mixed))
    cases.append(("float64", build("llama").double()))
    kernels = build("llama")
    kernels._use_kernels = True
    cases.append(("use_kernels=True", kernels))
    biased = build("llama")  # a head's bias, which our forward would ignore
    biased.lm_head = torch.nn.Linear(biased.config.hidden_size, biased.config.vocab_size)
    cases.append((BIASED, biased))
    halved = build("qwen2")
    halved.model.layers[1].self_attn.q_proj.bias = None
    cases.append((HALVED, halved))
    liger = build("llama")
    forward = lambda self, x: x
    forward.__module__ = "liger_kernel.transformers.rms_norm"
    liger.model.norm.forward = forward
    cases.append(("use_liger_kernel=False", liger))
    for text, model in cases:
        with pytest.raises(rt.UnsupportedModelError) as raised:
            rt.apply(model)
        compat.refused("transformers", REFUSED.get(text, text), raised.value, text)


def test_a_second_derivative_raises() -> None:
    """With torch's own decorator a gradient penalty vanishes if the upstream gradient has no graph."""
    x = torch.randn(3, 4, requires_grad=True)
    weights = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    a, b = torch.randn(1, 4, requires_grad=True), torch.randn(2, 1, requires_grad=True)
    cases = ((joined_linear(x, weights, []), x), (_Merged.apply(weights[0], [1.0], a, b), a))
    for result, leaf in cases:
        (gradient,) = torch.autograd.grad(result.sum(), [leaf], create_graph=True)
        with pytest.raises(RuntimeError, match="there is no second derivative"):
            gradient.pow(2).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="there is no second derivative"):
            torch.autograd.grad(result.sum() + gradient.pow(2).sum(), [leaf])
