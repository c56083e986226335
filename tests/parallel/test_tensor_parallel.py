"""Sums over ranks and sharded layers on 1, 2, 4 and 8 gloo ranks: the bytes of one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel import vocabulary_checks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.ops.all_reduce import register_group
from rlkernel.parallel.tensor import row_parallel_linear
from rlkernel.parallel.vocabulary import parallel_embedding

LEAVES, RANKS = 8, 8
SHAPES = ((5, 24, 64), (1, 8, 16), (61, 40, 32), (0, 8, 16))
"""T, N, K. Partial results of the third are reduced in parts, one per rank, with the limit that `run` sets."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(x: Tensor, group: Any, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def row_parallel(group: Any) -> None:
    """Forward and gradients of a row-parallel linear, in both ways of moving the partial results."""
    ranks, name = group.size(), register_group(group)
    for (t, n, k), dtype in ((shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)):
        what = f"{(t, n, k)} {dtype} on {ranks} ranks"
        x, weight, bias, dy = (normal(i, *size, dtype=dtype) for i, size in enumerate(((t, k), (n, k), (n,), (t, n))))
        whole = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        expected = ops.linear(*whole, chunks=LEAVES)
        expected.backward(dy)
        own = [part(x.detach(), group, 1), part(weight.detach(), group, 1), bias.detach().clone()]
        found = row_parallel_linear(*(shard.requires_grad_() for shard in own), name, chunks=LEAVES // ranks)
        found.backward(dy)
        assert_bitwise(found, expected, what)
        for shard, full, cut in zip(own, whole, (True, True, False), strict=True):
            assert shard.grad is not None and full.grad is not None
            assert_bitwise(shard.grad, part(full.grad, group, 1) if cut else full.grad, f"gradient, {what}")


def compiled(group: Any) -> None:
    """torch.compile sees both layers as ops of one graph, whether they get the group or its name."""
    name, weight, x, table = register_group(group), normal(0, 8, 16), normal(1, 4, 16), normal(2, 8, 4)
    ids, rows = torch.tensor([0, 7, 3]), part(table, group, 0)
    chunks, first = LEAVES // group.size(), group.rank() * len(rows)

    def layers(x: Tensor, weight: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return row_parallel_linear(x, weight, None, group, chunks=chunks), parallel_embedding(ids, rows, first, name)

    arguments = (part(x, group, 1), part(weight, group, 1), ids, rows)
    with torch.no_grad():
        found = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=False)(*arguments)
    for one, other in zip(found, layers(*arguments), strict=True):
        assert_bitwise(one, other, "compiled")


def refusals(group: Any) -> None:
    x = normal(0, 2, 3)
    wrong: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (ValueError, r"partial is \(2, 3\) torch.bfloat16; expected", lambda: ops.all_reduce(x.bfloat16(), group)),
        (ValueError, r"bias is \(2,\) .*; expected \[N=3\]", lambda: ops.all_reduce(x, group, bias=x[:, 0])),
        (ValueError, "dtype=torch.int32; expected", lambda: ops.all_reduce(x, group, dtype=torch.int32)),
        (ValueError, "no process group has the name 'tp'; pass what register_group", lambda: ops.all_reduce(x, "tp")),
        (TypeError, "partial is of type int", lambda: ops.all_reduce(3, group)),  # type: ignore[arg-type]
    )
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
    three = dist.new_group([0, 1, 2])
    if group.rank() < 3:
        with pytest.raises(ValueError, match="the group has 3 ranks; expected one of"):
            ops.all_reduce(x, three)


def run(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    importlib.import_module("rlkernel.ops.all_reduce").GATHERED_BYTES = 4 * SHAPES[0][0] * SHAPES[0][1]  # type: ignore[attr-defined]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for size in (1, 2, 4, 8):
        mesh = init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("groups", "ranks"))["ranks"]
        for check in (row_parallel, vocabulary_checks.embedding, vocabulary_checks.log_probabilities):
            check(mesh.get_group())
    vocabulary_checks.stock_differs(dist.group.WORLD)
    vocabulary_checks.refusals(dist.group.WORLD)
    refusals(dist.group.WORLD)
    if rank < 2:  # tracing takes seconds
        compiled(dist.new_group([0, 1], use_local_synchronization=True))
    dist.destroy_process_group()


def test_ranks(tmp_path: Path) -> None:
    mp.spawn(run, args=(str(tmp_path / "rendezvous"),), nprocs=RANKS)


def test_another_order_differs() -> None:
    """The control: a sum over ranks in another order has other bits."""
    parts: Any = [normal(i, 200) for i in range(4)]
    tree = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert not torch.equal(tree, ((parts[0] + parts[1]) + parts[2]) + parts[3])
