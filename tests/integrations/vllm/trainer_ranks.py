"""Trainers on 4 gloo ranks: FSDP2 over 1, 2 and 4 of them, tensor parallel over 1, 2 and 4. One process per rank.

`score` recomputes the log-probabilities of a rollout. `check_updates` compares log-probabilities, gradients and updated
weights of tensor-parallel trainers with those of one device.
"""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import hf_models
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rlkernel_transformers as rt
from rlkernel.contract import assert_bitwise
from rlkernel.parallel.norm import grad_norm
from rlkernel_transformers.joined import joined_linear

LEAVES, RANKS, SIZES = 8, 4, (1, 2, 4)
VOCABULARY = hf_models.SMALL["vocab_size"]
KINDS = [f"{kind} {size}" for kind in ("FSDP2", "tensor parallel") for size in SIZES]
CASES = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": ("Llama", {"head_dim": 16, "attention_bias": True}),
}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}


def run(rank: int, folder: str, model: str) -> None:
    """Writes `scores-KIND-RANK.json` for each of `KINDS`, and `counts.json`: how much `check_updates` compared."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    named = {"mesh_dim_names": ("groups", "ranks")}
    meshes = {size: init_device_mesh("cpu", (RANKS // size, size), **named)["ranks"] for size in SIZES}
    sequences = json.loads(Path(folder, "sequences.json").read_text())
    for kind in KINDS:
        found = score(kind.split()[0], meshes[int(kind[-1])], model, sequences)
        Path(folder, f"scores-{kind}-{rank}.json").write_text(json.dumps(found))
    counts = check_updates(meshes)
    compiled(meshes[2].get_group())
    refusals(meshes[4].get_group())
    if rank == 0:
        Path(folder, "counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def score(kind: str, mesh: Any, folder: str, sequences: list[list[int]]) -> list[float]:
    """Log-probabilities of the sequences' tokens after the first; under FSDP2 a rank computes its share of them."""
    from transformers import AutoModelForCausalLM

    if kind == "FSDP2":  # bf16 compute over fp32 masters
        model = rt.apply(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tp_leaves=LEAVES)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        share = len(sequences) // mesh.size()
        sequences = sequences[mesh.get_local_rank() * share :][:share]
    else:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = rt.apply(plain, tp_leaves=LEAVES, tp_group=mesh.get_group())
    with torch.no_grad():
        found = (rt.token_logprobs(model, torch.tensor([ids])).logp for ids in sequences)
        return list(chain(*(logp[0, :-1].tolist() for logp in found if logp is not None)))


def check_updates(meshes: dict[int, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    hf_models.SMALL.update(SHAPE)
    hf_models.CASES.update(CASES)
    build = lambda case: hf_models.build(case).to(torch.bfloat16)
    for case in CASES:
        expected = updates(rt.apply(build(case), tp_leaves=LEAVES))
        for size, tokens in product(SIZES[1:], (False, True)):
            group = meshes[size].get_group()
            model = rt.apply(build(case), tp_leaves=LEAVES, tp_group=group, sequence_parallel=tokens)
            assert model.model.layers[0].mlp.down_proj.weight.shape[1] == SHAPE["intermediate_size"] // size
            assert len(model.lm_head.weight) == len(model.model.embed_tokens.weight) == VOCABULARY // size
            rows: set[int] = set()  # that the first layer returns, of 21, 42 and 63 tokens
            model.model.layers[0].register_forward_hook(lambda *call, rows=rows: rows.add(len(call[2][0])))
            if tokens:
                model.gradient_checkpointing_enable()
                model.train()
            found = updates(model)
            assert rows == {-(-t // size) if tokens else t for t in (21, 42, 63)}
            assert found.keys() == expected.keys()
            for name, value in found.items():
                assert_bitwise(value, expected[name], f"{case} on {size} ranks, sequence_parallel={tokens}: {name}")
                key = f"tensor parallel {size}, {name.split(' of ')[0]}"
                counts[key] = counts.get(key, 0) + value.numel()
    return counts


def compiled(group: Any) -> None:
    """torch.compile leaves joined layers with main_grad outside its graphs, and passes their ranks on."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    weights = [torch.nn.Parameter(torch.randn(n, 32, generator=generator).bfloat16()) for n in (16, 8)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(9)).bfloat16().requires_grad_()
    call = lambda x: joined_linear(x, weights, [], group)
    (expected,) = torch.autograd.grad(call(x).float().square().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(call, backend="eager")(x).float().square().sum(), x)
    assert_bitwise(found, expected, "input gradient of a compiled layer")


def updates(model: Any) -> dict[str, Tensor]:
    """Log-probabilities of each of three updates, the last one's gradients, and the weights after it."""
    rt.main_grads(model)
    optimizer = rt.AdamW(model.parameters(), lr=1e-2)
    out: dict[str, Tensor] = {}
    for step in range(3):
        model.zero_grad()
        ids = torch.randint(3, VOCABULARY - 12, (3, 21), generator=torch.Generator().manual_seed(step))
        for half in ids.split((1, 2)):  # two micro-batches
            logp = rt.token_logprobs(model, half, temperature=0.8, vocabulary=VOCABULARY - 6 * step).logp
            assert logp is not None
            out[f"log-probabilities of {step}, {len(half)} rows"] = logp.detach()
            logp.sum().backward()
        logits = model(ids, use_cache=False).logits
        out[f"log-probabilities of {step}, unnormalised"] = logits.detach()
        logits.square().mean().backward()
        rt.fold_main_grads(model)
        if step == 2:
            out |= whole("gradients", rt.sharded_parameters(model, grads=True))
            out["norm of gradients"] = grad_norm([g for _, g in rt.sharded_parameters(model, grads=True)]).norm
        optimizer.step()
    return out | whole("weights", rt.sharded_parameters(model))


def whole(kind: str, pairs: Any) -> dict[str, Tensor]:
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
    return {f"{kind} of {name}": full(x).clone() for name, x in pairs}


def refusals(group: Any) -> None:
    hf_models.SMALL["num_key_value_heads"] = 2
    for changes, message in (
        ({"tp_leaves": 2}, "4 ranks, which does not divide tp_leaves=2; pass tp_leaves=8"),
        ({"tp_leaves": LEAVES}, "4 ranks, which does not divide num_key_value_heads=2; use fewer ranks"),
    ):
        with pytest.raises(rt.UnsupportedModelError, match=message):
            rt.apply(hf_models.build("llama"), tp_group=group, **changes)
    hf_models.SMALL["num_key_value_heads"] = 4
    model = rt.apply(hf_models.build("llama"), tp_leaves=LEAVES, tp_group=group)
    with pytest.raises(rt.CallError, match="tensor parallelism is for training: no cache"):
        model(torch.tensor([[3, 4]]), use_cache=True)
    with pytest.raises(ValueError, match="sequence_parallel shares tokens between tensor-parallel ranks"):
        rt.apply(hf_models.build("llama"), sequence_parallel=True)
    with pytest.raises(rt.CallError, match="statistics and keep_probs are not available with tp_group"):
        rt.token_logprobs(model, torch.tensor([[3, 4]]), statistics=True)
    rt.apply(model, tp_leaves=LEAVES, tp_group=group, sequence_parallel=True)
    with pytest.raises(rt.CallError, match="output_hidden_states: with sequence_parallel"):
        model(torch.tensor([[3, 4]]), use_cache=False, output_hidden_states=True)
    for call in (rt.apply, rt.remove):
        with pytest.raises(rt.UnsupportedModelError, match="the weights are sharded"):
            call(model)
