"""Sums over ranks and sharded layers on 1, 2 and 4 gloo ranks: the bytes of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.ops.all_reduce import GATHERED_BYTES, register_group
from rlkernel.parallel.tensor import parallel_embedding, row_parallel_linear

LEAVES = 8
SHAPES = ((5, 24, 64), (1, 8, 16), (3001, 96, 32), (0, 8, 16))  # T, N, K


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(x: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    return x.chunk(ranks, dim)[rank].contiguous()


def row_parallel(rank: int, ranks: int) -> None:
    """Forward and gradients of a row-parallel linear, in both ways of moving the partial results."""
    group = register_group(dist.group.WORLD)
    assert 4 * SHAPES[2][0] * SHAPES[2][1] > GATHERED_BYTES
    for (t, n, k), dtype in ((s, d) for s in SHAPES for d in (torch.float32, torch.bfloat16)):
        x, weight, bias, dy = (normal(i, *shape, dtype=dtype) for i, shape in enumerate(((t, k), (n, k), (n,), (t, n))))
        whole = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        expected = ops.linear(*whole, chunks=LEAVES)
        expected.backward(dy)
        shards = [part(x.detach(), rank, ranks, 1), part(weight.detach(), rank, ranks, 1), bias.detach().clone()]
        found = row_parallel_linear(*(s.requires_grad_() for s in shards), group, chunks=LEAVES // ranks)
        found.backward(dy)
        assert_bitwise(found, expected, f"{(t, n, k)} {dtype} on {ranks} ranks")
        for name, one, other, dim in zip("xwb", shards, whole, (1, 1, None), strict=True):
            grad = other.grad if dim is None else part(other.grad, rank, ranks, dim)  # type: ignore[arg-type]
            assert_bitwise(one.grad, grad, f"gradient of {name}, {(t, n, k)} {dtype} on {ranks} ranks")


def embedding(rank: int, ranks: int) -> None:
    """Every bit pattern of a row is kept, also -0 and NaN."""
    weight = normal(0, 64, 6, dtype=torch.bfloat16)
    weight[3, 2], weight[40, 5] = -0.0, float("nan")
    ids = torch.tensor([[3, 40, 0, 63], [15, 16, 31, 32]])
    rows = part(weight, rank, ranks, 0)
    found = parallel_embedding(ids, rows, rank * rows.shape[0], register_group(dist.group.WORLD))
    assert_bitwise(found.view(torch.int16), weight[ids].view(torch.int16), f"embedding on {ranks} ranks")


def compiled(rank: int, ranks: int) -> None:
    """torch.compile sees both layers as ops of one graph."""
    group = register_group(dist.group.WORLD)
    weight, x = normal(0, 8, 16), normal(1, 4, 16)
    ids, table = torch.tensor([0, 7, 3]), normal(2, 8, 4)
    rows = part(table, rank, ranks, 0)

    def layers(x: Tensor, weight: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = row_parallel_linear(x, weight, None, group, chunks=LEAVES // ranks)
        return y, parallel_embedding(ids, rows, rank * len(rows), group)

    arguments = (part(x, rank, ranks, 1), part(weight, rank, ranks, 1), ids, rows)
    with torch.no_grad():
        found = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=False)(*arguments)
    for one, other in zip(found, layers(*arguments), strict=True):
        assert_bitwise(one, other, "compiled")


def refusals(rank: int, ranks: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    x = normal(0, 2, 3)
    wrong: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (ValueError, r"partial is \(2, 3\) torch.bfloat16; expected", lambda: ops.all_reduce(x.bfloat16(), world)),
        (ValueError, r"bias is \(2,\) .*; expected \[N=3\]", lambda: ops.all_reduce(x, world, bias=x[:, 0])),
        (ValueError, "dtype=torch.int32; expected", lambda: ops.all_reduce(x, world, dtype=torch.int32)),
        (TypeError, "partial is of type int", lambda: ops.all_reduce(3, world)),  # type: ignore[arg-type]
    )
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
    if ranks == 4:
        three = dist.new_group([0, 1, 2])
        if rank < 3:
            with pytest.raises(ValueError, match="the group has 3 ranks; expected one of"):
                ops.all_reduce(normal(0, 2, 3), three)


CHECKS: tuple[Callable[[int, int], None], ...] = (row_parallel, embedding, refusals)


def run(rank: int, ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for check in CHECKS if ranks > 1 else (*CHECKS, compiled):  # once, because it takes seconds
        check(rank, ranks)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks(ranks: int, tmp_path: Path) -> None:
    mp.spawn(run, args=(ranks, str(tmp_path / "rendezvous")), nprocs=ranks)


def test_another_order_differs() -> None:
    """The control: a sum over ranks in another order has other bits."""
    parts: Any = [normal(i, 200) for i in range(4)]
    tree = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert not torch.equal(tree, ((parts[0] + parts[1]) + parts[2]) + parts[3])
