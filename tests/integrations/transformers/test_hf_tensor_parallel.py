"""A trainer on tensor-parallel ranks: log-probabilities, gradients and updated weights have the bytes of one device.

One process per rank computes the model whole and sharded, on 2 and on 4 of 4 ranks. FSDP2 is compared as well, so that
every trainer of the matrix (FSDP2 1, 2, 4; tensor parallel 2, 4) equals one device, as vLLM's ranks do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import hf_models
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rlkernel_transformers as rt
from rlkernel.contract import assert_bitwise

LEAVES, RANKS = 8, 4
CASES = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": ("Llama", {"head_dim": 16, "attention_bias": True}),
}
WIDE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}


def build(case: str, dtype: torch.dtype) -> Any:
    hf_models.SMALL.update(WIDE)
    hf_models.CASES.update(CASES)
    return hf_models.build(case).to(dtype)


def logp(model: Any, ids: Tensor) -> Tensor:
    found = rt.token_logprobs(model, ids).logp
    assert found is not None
    return found


def batch(seed: int) -> Tensor:
    return torch.randint(3, 96, (3, 21), generator=torch.Generator().manual_seed(seed))


def whole(pairs: Any) -> dict[str, Tensor]:
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in pairs}


def updates(model: Any) -> dict[str, Tensor]:
    """Log-probabilities of each of three updates, the last one's gradients, and the weights after it."""
    rt.main_grads(model)
    optimizer = rt.AdamW(model.parameters(), lr=1e-2)
    out: dict[str, Tensor] = {}
    for step in range(3):
        model.zero_grad()
        for half in batch(step).split((1, 2)):  # two micro-batches
            found = logp(model, half)
            out[f"logp {step} {len(half)}"] = found.detach()
            found.sum().backward()
        rt.fold_main_grads(model)
        if step == 2:
            out |= {f"gradient of {n}": g.clone() for n, g in whole(rt.sharded_parameters(model, grads=True)).items()}
        optimizer.step()
    return out | {n: p.clone() for n, p in whole(rt.sharded_parameters(model)).items()}


def run(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    meshes = {1: DeviceMesh("cpu", [[r] for r in range(4)]), 2: DeviceMesh("cpu", [[0, 1], [2, 3]]), 4: DeviceMesh("cpu", [0, 1, 2, 3])}
    counts: dict[str, int] = {}
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            expected = updates(rt.apply(build(case, dtype), tp_leaves=LEAVES))
            for ranks, group in groups.items():
                model = rt.apply(build(case, dtype), tp_leaves=LEAVES, tp_group=group)
                assert model.model.layers[0].mlp.down_proj.weight.shape[1] == WIDE["intermediate_size"] // ranks
                found = updates(model)
                assert found.keys() == expected.keys()
                for name, value in found.items():
                    assert_bitwise(value, expected[name], f"{case} {dtype} on {ranks} ranks: {name}")
                    counts[f"tensor parallel {ranks}"] = counts.get(f"tensor parallel {ranks}", 0) + value.numel()
    refusals(groups[4])
    if rank == 0:
        Path(rendezvous).with_name("counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def refusals(group: Any) -> None:
    for changes, message in (
        ({"tp_leaves": 2}, "4 ranks, which does not divide tp_leaves=2"),
        ({"tp_leaves": LEAVES}, "does not divide num_key_value_heads=2"),
    ):
        hf_models.SMALL["num_key_value_heads"] = 2 if changes["tp_leaves"] == LEAVES else 4
        with pytest.raises(rt.UnsupportedModelError, match=message):
            rt.apply(hf_models.build("llama"), tp_group=group, **changes)


def test_trainers_on_ranks(tmp_path: Path, compat: Any) -> None:
    mp.spawn(run, args=(str(tmp_path / "rendezvous"),), nprocs=RANKS)
    for feature, numbers in json.loads((tmp_path / "counts.json").read_text()).items():
        compat.compared("transformers", f"{feature}: log-probabilities, gradients, updated weights", 0, numbers)
