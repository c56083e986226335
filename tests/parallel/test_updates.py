"""Weights after ten updates on 1, 2 and 4 ranks, under FSDP2 and under DDP: equal SHA-256. With stock torch: not."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlkernel import ops
from rlkernel.contract.orders import NORM_SEGMENT
from rlkernel.optim import AdamW
from rlkernel.parallel import collectives
from rlkernel.parallel.collectives import all_reduce, reduce_scatter
from rlkernel.parallel.ddp import TreeHook, tree_hook
from rlkernel.parallel.fsdp2 import set_tree_reduction
from rlkernel.parallel.norm import aligned_squares, grad_norm, norm_of
from rlkernel.parallel.tree import tree_sum

UPDATES, SAMPLES, VOCAB, WIDTH = 10, 16, 70, 24
LEAVES = (4, 8)  # of four samples and of two


class Block(nn.Module):
    """A residual MLP, without torch's own reductions."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * width, width) / 4)
        self.down = nn.Parameter(torch.randn(width, 2 * width) / 4)
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = ops.rms_norm(x, self.norm, 1e-6)
        return x + ops.linear(ops.swiglu(ops.linear(normed, self.up)), self.down)


class Model(nn.Module):
    """Sum of -log p of tokens; large enough that a segment of the norm is cut between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCAB * 10, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Parameter(torch.randn(VOCAB, WIDTH) / 4)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = ops.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x)
        return -ops.linear_logprob(x, self.head, targets).logp.sum()


def batch(update: int) -> tuple[Tensor, Tensor]:  # [SAMPLES, 5] each
    random = torch.Generator().manual_seed(update)
    ids = torch.randint(VOCAB * 10, (SAMPLES, 5), generator=random)
    return ids, torch.randint(VOCAB, ids.shape, generator=random)


def synchronise(model: Any, wanted: bool) -> None:
    """Whether the next backward is followed by a sum over ranks, or adds to this rank's gradients only."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = wanted
    else:
        model.set_requires_gradient_sync(wanted)


def trained(group: ProcessGroup, kind: str, leaves: int, stock: bool, device: str = "cpu", parts: int = 1) -> str:
    """SHA-256 of the weights after UPDATES updates.

    Args:
        stock: torch's own reductions and norm.
        parts: micro-batches of a leaf, of which only the last one's backward synchronises.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rounds = leaves // size
    model: Any = Model().to(device)
    if kind == "fsdp2":
        mesh = DeviceMesh.from_group(group, device)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if stock:
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)
            for block in model.blocks:
                block.set_gradient_divide_factor(1.0)
                block.set_force_sum_reduction_for_comms(True)
        else:
            set_tree_reduction(model, rounds)
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
        if not stock:
            model.register_comm_hook(TreeHook(rounds, group), tree_hook)
    parameters = list(model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    optimizer = AdamW([p.detach() for p in local if p.numel()], lr=0.01)
    per_leaf = SAMPLES // leaves
    for update in range(UPDATES):
        ids, targets = (each.to(device) for each in batch(update))
        for i in range(rounds):
            chosen = slice((i * size + rank) * per_leaf, (i * size + rank + 1) * per_leaf)
            for part, rows in enumerate(zip(ids[chosen].chunk(parts), targets[chosen].chunk(parts), strict=True)):
                # DDP's own reduction is repeated for every backward, so the control synchronises in the last one alone
                synchronise(model, part == parts - 1 and (not stock or kind == "fsdp2" or i == rounds - 1))
                loss = model(*(each.reshape(-1) for each in rows)) / ids.numel()
                (loss * size if stock and kind == "ddp" else loss).backward()
        grads = [p.grad for p in parameters]
        found = grad_norm(grads, max_norm=0.5)
        assert float(found.scale) < 1
        own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        for p, g in zip(optimizer.param_groups[0]["params"], [g for g in own if g.numel()], strict=True):
            p.main_grad = g
        optimizer.step(scale=found.scale)
        model.zero_grad()
    digest = hashlib.sha256()
    for p in parameters:
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def norms(group: ProcessGroup) -> dict[str, bool]:
    """Whether sharded norms have the bits of `ops.grad_norm`, for shapes whose segments are cut in every way."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    random = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=random) for shape in ((3, 9000), (257, 300), (5,), (1000, 100), (8, 4096))]
    expected = ops.grad_norm(whole, max_norm=1.0)
    mesh = DeviceMesh.from_group(group, "cpu")
    places: list[Any] = [Shard(0), Replicate(), Shard(0), Shard(0), Shard(1)]
    cut = grad_norm([distribute_tensor(t, mesh, [p]) for t, p in zip(whole, places, strict=True)], max_norm=1.0)
    flat = torch.cat([nn.functional.pad(t.reshape(-1), (0, -t.numel() % NORM_SEGMENT)) for t in whole])
    flat = nn.functional.pad(flat, (0, -flat.numel() % (size * NORM_SEGMENT)))
    shard = flat.view(size, -1)[rank]
    aligned = norm_of(aligned_squares(shard, [t.numel() for t in whole], group), 1.0)
    bits = lambda found: [each.numpy().tobytes() for each in found]
    return {"whole": bits(grad_norm(whole, 1.0)) == bits(expected), "cut": bits(cut) == bits(expected),
            "aligned": bits(aligned) == bits(expected)}  # fmt: skip


def sums(group: ProcessGroup) -> dict[str, bool]:
    """Whether the collectives give the tree's bits, also in chunks; and that torch's own do not, on four ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    everyone = torch.randn(size, 1000 * size, generator=torch.Generator().manual_seed(2))
    expected = tree_sum(list(everyone))
    part = torch.empty(1000)
    collectives.CHUNK = 300
    reduce_scatter(part, everyone[rank].clone(), group)
    mine, stock, odd = everyone[rank].clone(), everyone[rank].clone(), everyone[rank, :37].clone()
    all_reduce(mine, group)
    all_reduce(odd, group)
    dist.all_reduce(stock, group=group)
    same = lambda a, b: a.numpy().tobytes() == b.numpy().tobytes()
    return {"reduce_scatter": same(part, expected.view(size, -1)[rank]), "all_reduce": same(mine, expected),
            "odd": same(odd, expected[:37]), "control": size < 4 or not same(stock, expected)}  # fmt: skip


def everything(groups: dict[int, ProcessGroup]) -> dict[str, Any]:
    weights = {
        f"{kind} {leaves}{' stock' if stock else ''}": {
            str(size): trained(group, kind, leaves, stock) for size, group in groups.items()
        }
        for kind in ("fsdp2", "ddp")
        for leaves, stock in ((4, False), (8, False), (8, True))
    }
    return {
        "weights": weights,
        "split": {
            str(size): [trained(group, kind, 4, False, parts=2) for kind in ("fsdp2", "ddp")]
            for size, group in groups.items()
        },
        "norms": {str(size): norms(group) for size, group in groups.items()},
        "sums": {str(size): sums(group) for size, group in groups.items()},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


def test_weights(found: list[dict[str, Any]]) -> None:
    for leaves in LEAVES:
        hashes = {
            sha for rank in found for kind in ("fsdp2", "ddp") for sha in rank["weights"][f"{kind} {leaves}"].values()
        }
        assert len(hashes) == 1, f"{leaves} leaves: {hashes}"
    assert len({found[0]["weights"][f"fsdp2 {leaves}"]["1"] for leaves in LEAVES}) == len(LEAVES)


def test_split_leaves(found: list[dict[str, Any]]) -> None:
    """A leaf of two backwards is their sum: the same on any number of ranks, and not a leaf of one backward."""
    hashes = {sha for rank in found for both in rank["split"].values() for sha in both}
    assert len(hashes) == 1 and hashes != {found[0]["weights"]["fsdp2 4"]["1"]}


@pytest.mark.parametrize("kind", ("fsdp2", "ddp"))
def test_the_control(found: list[dict[str, Any]], kind: str) -> None:
    assert len(set(found[0]["weights"][f"{kind} 8 stock"].values())) > 1


def test_norms_and_sums(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for checks in (*rank["norms"].values(), *rank["sums"].values()):
            assert all(checks.values()), checks


def test_refusals() -> None:
    with pytest.raises(ValueError, match="rounds is 3; expected a power of two"):
        TreeHook(3)
    with pytest.raises(ValueError, match="call fully_shard first"):
        set_tree_reduction(Model())
