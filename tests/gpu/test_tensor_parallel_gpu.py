"""Tensor parallelism on 2, 4 and 8 GPUs: sums over ranks, captured in CUDA graphs, and vLLM have the bits of one GPU.

Partial results travel through symmetric memory and through NCCL's collectives, both in one step and in two.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu.gpu_checks import Compared, data, vllm_against_training

from rlkernel import ops
from rlkernel.kernels import symmetric_memory
from rlkernel.kernels.triton.all_reduce import ONE_SHOT_BYTES
from rlkernel.ops.all_reduce import GATHERED_BYTES, add_ranks, register_group
from rlkernel.parallel.tensor import row_parallel_linear
from rlkernel.parallel.vocabulary import parallel_embedding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

LEAVES, N, K = 8, 1024, 2048
ROWS = (1, 7, 64, 255, 301, 2048, 8192)
"""Tokens whose partial results [T, N] are exchanged in one and in two steps, within and beyond symmetric memory."""
REPLAYS = 500


def needs(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def layers(rank: int, ranks: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group, seen = register_group(dist.group.WORLD), Compared()
    device = torch.device("cuda", rank)
    ops.all_reduce(data(0, 4), group)
    made = symmetric_memory.workspace_of(dist.group.WORLD, device)
    assert 8 * 4 * ROWS[1] * N < ONE_SHOT_BYTES < 4 * ROWS[-2] * N < symmetric_memory.CAPACITY < 4 * ROWS[-1] * N
    assert 4 * ROWS[2] * N < GATHERED_BYTES < 4 * ROWS[-2] * N
    for path, workspace in {"symmetric memory": made, "collectives": None}.items():
        symmetric_memory._workspaces[dist.group.WORLD] = {rank: workspace}
        for dtype in (torch.bfloat16, torch.float32):
            for t in ROWS:
                sums(rank, ranks, group, t, dtype, seen, f"{t} tokens, {dtype}, {ranks} ranks, {path}")
        for t in (8, 1024, ROWS[-1]):
            captured(rank, ranks, group, t, seen, f"{t} tokens, graph, {ranks} ranks, {path}")
        ragged(rank, ranks, group, seen, f"ragged sizes, {ranks} ranks, {path}")
    weight = data(0, 512, 96, dtype=torch.bfloat16)
    weight[5, 3] = -0.0
    ids = torch.randint(512, (999,), device=device, generator=torch.Generator(device).manual_seed(0))
    rows = weight.chunk(ranks)[rank].contiguous()
    found = parallel_embedding(ids, rows, rank * len(rows), group)
    seen.rows(found.view(torch.int16), weight[ids].view(torch.int16), f"embedding, {ranks} ranks")
    if rank == 0:
        Path(folder, "seen.json").write_text(json.dumps({**vars(seen), "symmetric": made is not None}))
    dist.destroy_process_group()


def shards(rank: int, ranks: int, *whole: torch.Tensor) -> list[torch.Tensor]:
    return [x.chunk(ranks, 1)[rank].contiguous() for x in whole]


def sums(rank: int, ranks: int, group: str, t: int, dtype: torch.dtype, seen: Compared, what: str) -> None:
    x, weight = data(1, t, K, dtype=dtype), data(2, N, K, dtype=dtype)
    for bias in (None, data(3, N, dtype=dtype)):
        found = row_parallel_linear(*shards(rank, ranks, x, weight), bias, group, chunks=LEAVES // ranks)
        seen.rows(found, ops.linear(x, weight, bias, chunks=LEAVES), what)


def captured(rank: int, ranks: int, group: str, t: int, seen: Compared, what: str) -> None:
    """Replays two layers many times with other inputs: a flag that is missed or seen early gives other bits."""
    weight = data(2, N, N, dtype=torch.bfloat16) / 32
    (part,) = shards(rank, ranks, weight)
    x = data(1, t, N, dtype=torch.bfloat16)

    def two() -> torch.Tensor:
        y = x
        for _ in range(2):
            y = row_parallel_linear(*shards(rank, ranks, y), part, None, group, chunks=LEAVES // ranks)  # type: ignore[misc]
        return y

    def one() -> torch.Tensor:
        return ops.linear(ops.linear(x, weight, chunks=LEAVES), weight, chunks=LEAVES)

    two(), one()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = two()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    replays = REPLAYS if t < 100 else 50
    for i in range(replays):
        x.copy_(data(10 + i % 7, t, N, dtype=torch.bfloat16) if t < 100 else x.roll(1, 0))
        graph.replay()
        differing += (found.view(torch.int16) != one().view(torch.int16)).sum()
    assert int(differing) == 0, f"{what}: {int(differing)} elements differ"
    seen.add(tokens=replays * t)


def ragged(rank: int, ranks: int, group: str, seen: Compared, what: str) -> None:
    """Results of 1003 columns in one step, in two, and in several kernels, one after another in a graph."""
    parts = [torch.stack([data(20 + r, t, 1003) for r in range(ranks)]) for t in (3, 2051, 301, 5003)]
    bias = data(3, 1003)

    def reduced() -> list[torch.Tensor]:
        return [ops.all_reduce(x[rank], group, bias=bias, dtype=torch.bfloat16) for x in parts]

    reduced()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = reduced()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        for x in parts:
            x.copy_(x.roll(1, 1))
        graph.replay()
        for y, x in zip(found, parts, strict=True):
            expected = add_ranks(x.view(ranks, -1), bias, torch.bfloat16, 1003)
            differing += (y.view(torch.int16).flatten() != expected.view(torch.int16)).sum()
    assert int(differing) == 0, f"{what}: {int(differing)} elements differ"
    seen.add(tokens=50 * sum(x.shape[1] for x in parts))


def trainer(rank: int, ranks: int, folder: str) -> None:
    """Log-probabilities, gradients and updated weights of a model on all ranks, and whole on each."""
    from models import hf_models

    import rlkernel_transformers as rt

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    width = {"vocab_size": 40960, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    hf_models.SMALL.update(width, num_key_value_heads=8, num_hidden_layers=2, max_position_embeddings=2048)
    hf_models.CASES["qwen3"] = ("Qwen3", {"head_dim": 128})
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40960, (3, 4, 777), generator=generator).cuda()

    def updates(group: dist.ProcessGroup | None, tokens: bool = False) -> dict[str, torch.Tensor]:
        model = hf_models.build("qwen3").bfloat16().cuda()
        rt.apply(model, tp_leaves=LEAVES, tp_group=group, sequence_parallel=tokens)
        rt.main_grads(model)
        optimizer = rt.AdamW(model.parameters(), lr=1e-3)
        out: dict[str, torch.Tensor] = {}
        for step, rows in enumerate(ids):
            model.zero_grad()
            out[f"log-probabilities of update {step}"] = logp = rt.token_logprobs(model, rows).logp
            logp.sum().backward()
            if step == 2:
                out |= {f"gradient of {n}": whole(g) for n, g in rt.sharded_parameters(model, grads=True)}
            optimizer.step()
        return out | {n: whole(p) for n, p in rt.sharded_parameters(model)}

    expected, seen = updates(None), Compared()
    for tokens in (False, True):
        for name, value in updates(dist.group.WORLD, tokens).items():
            compare = seen.rows if name.startswith("log") else seen.whole
            what = f"{name}, {ranks} ranks, sequence_parallel={tokens}"
            compare(value.detach().flatten(), expected[name].detach().flatten(), what)
    if rank == 0:
        Path(folder, "seen.json").write_text(json.dumps(vars(seen)))
    dist.destroy_process_group()


def whole(x: Any) -> torch.Tensor:
    full: torch.Tensor = (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
    return full


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainer_on_ranks(ranks: int, tmp_path: Path, record: Callable[..., None], compat: Any) -> None:
    needs(ranks)
    mp.spawn(trainer, args=(ranks, str(tmp_path)), nprocs=ranks)
    seen = json.loads((tmp_path / "seen.json").read_text())
    record(**seen)
    compat.compared("transformers", f"tensor parallel {ranks}, bfloat16", 0, seen["tokens"] + seen["elements"])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layers_on_ranks(ranks: int, tmp_path: Path, record: Callable[..., None]) -> None:
    needs(ranks)
    mp.spawn(layers, args=(ranks, str(tmp_path)), nprocs=ranks)
    record(**json.loads((tmp_path / "seen.json").read_text()))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("preset,ranks", [("qwen3-0.6b", 1), ("qwen3-0.6b", 2), ("llama3-8b", 2), ("qwen3-0.6b", 4)])
def test_rollout_on_ranks_equals_training(
    preset: str, ranks: int, tmp_path: Path, record: Callable[..., None], compat: Any
) -> None:
    needs(ranks)
    arguments = {"preset": preset, "attention": "split", "sleep": False, "layers": 4, "ranks": ranks, "leaves": LEAVES}
    found, pairs = vllm_against_training(tmp_path, arguments)
    tokens, differing = sum(n for _, n in pairs.values()), sum(d for d, _ in pairs.values())
    record(cases=len(pairs), tokens=tokens, mismatches=differing)
    assert differing == 0 < tokens, pairs
    assert found["exact"] and found["weights"] == {}
    compat.compared("vLLM", f"tensor_parallel_size {ranks}, tp_leaves=8, against training", differing, tokens)
