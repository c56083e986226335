"""Layers whose vocabulary is split over the ranks of a group, against one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.ops.all_reduce import register_group
from rlkernel.parallel import vocabulary
from rlkernel.parallel.vocabulary import parallel_embedding, parallel_linear_logprob, parallel_logprob

T, C, V = 13, 32, 1000
"""Shards of 1000 entries end inside a tile of the log-sum-exp and inside a word of a mask."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature, rows": {"temperature": torch.linspace(0.5, 2, 6), "rows": torch.tensor([9, 2, 3, 0, 12, 7])},
    "mask": {"kept": True},
    "padded vocabulary": {"vocabulary": 900, "kept": True, "temperature": 0.7},
    "ranks without an entry": {"vocabulary": 120, "temperature": 0.7},
}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def embedding(group: Any, device: str = "cpu") -> None:
    """Every bit pattern of a row is kept, also -0 and NaN; the gradient of a row is that of one device."""
    weight = normal(0, 64, 6).bfloat16()
    weight[3, 2], weight[40, 5] = -0.0, float("nan")
    weight, name = weight.to(device), register_group(group)
    ids = torch.tensor([[3, 40, 0, 63], [15, 16, 31, 32]], device=device)
    rows = weight.chunk(group.size())[group.rank()]
    found = parallel_embedding(ids, rows, group.rank() * len(rows), name)
    assert_bitwise(found.view(torch.int16), weight[ids].view(torch.int16), f"embedding on {group.size()} ranks")
    ids = torch.randint(64, (999,), generator=torch.Generator().manual_seed(1)).to(device)
    dy = normal(2, 999, 6).bfloat16().to(device)
    for kind in ("grad", "main_grad"):
        whole, own = weight.clone().requires_grad_(), rows.clone().requires_grad_()
        if kind == "main_grad":
            whole.main_grad = normal(3, *whole.shape).to(device)  # type: ignore[attr-defined]
            own.main_grad = whole.main_grad.chunk(group.size())[group.rank()].clone()  # type: ignore[attr-defined]
        ops.embedding(ids, whole).backward(dy)
        parallel_embedding(ids, own, group.rank() * len(own), name).backward(dy)
        expected = getattr(whole, kind).chunk(group.size())[group.rank()]
        assert_bitwise(getattr(own, kind), expected, f"{kind} of an embedding on {group.size()} ranks")


def log_probabilities(group: Any, device: str = "cpu", entries: int = V) -> int:
    """Results, input gradient and weight gradient, with several exchanges per call; how many numbers were compared."""
    vocabulary.BLOCK, compared = 4 * entries, 0
    for name, given in CASES.items():
        for dtype, entropy in ((torch.float32, True), (torch.bfloat16, False)):
            what = f"{name}, {dtype}, {group.size()} ranks"
            compared += _compare(group, dict(given), dtype, entropy, device, entries, what)
    return compared


def _compare(
    group: Any, given: dict[str, Any], dtype: torch.dtype, with_entropy: bool, device: str, entries: int, what: str
) -> int:
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    total = given.pop("vocabulary", entries)
    rows = given.get("rows")
    n = T if rows is None else len(rows)
    targets = torch.randint(total, (n,), generator=torch.Generator().manual_seed(3)).to(device)
    if given.get("kept"):
        mask = normal(4, n, total).to(device) > 0
        mask[1:, :].scatter_(1, targets[1:, None], True)  # the first row's target may be dropped
        mask[0, targets[0]] = False
        given["kept"] = ops.pack_kept(mask)
    hidden, weight = normal(0, T, C).to(device, dtype), (normal(1, entries, C) / 4).to(device, dtype)
    own = weight.chunk(group.size())[group.rank()]
    up = normal(5, 2, n).to(device)
    up[:, 2] = 0
    split = {**given, "vocabulary": total}
    found = _gradients(hidden, own, up, with_entropy, parallel_linear_logprob, targets, group, **split)
    expected = _gradients(hidden, weight[:total], up, with_entropy, ops.linear_logprob, targets, **given)
    logits = ops.linear(hidden if rows is None else hidden[rows], weight, out_dtype=torch.float32)
    for arguments in (given, split):
        arguments.pop("rows", None)
    shard = logits.chunk(group.size(), 1)[group.rank()]
    found |= _logits_gradient(shard, up, with_entropy, parallel_logprob, targets, group, **split)
    whole = _logits_gradient(logits[:, :total], up, with_entropy, ops.logprob, targets, **given)
    for key in ("weight gradient", "main_grad"):
        expected[key] = _own(expected[key], group, entries)
    whole["logits gradient"] = _own(whole["logits gradient"].t(), group, entries).t()
    for key, value in found.items():
        assert_bitwise(value, {**expected, **whole}[key], f"{key}, {what}")
    if not given and rows is None:
        exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)[torch.arange(n, device=device), targets]
        assert torch.allclose(found["logp"].double(), exact, rtol=0, atol=2e-5), what
    return sum(value.numel() for value in found.values())


def _own(x: Tensor, group: Any, entries: int) -> Tensor:
    """This rank's part, along dimension 0, of the padded vocabulary."""
    return torch.nn.functional.pad(x, (0, 0, 0, entries - len(x))).chunk(group.size())[group.rank()].contiguous()


def _gradients(hidden: Tensor, weight: Tensor, up: Tensor, entropy: bool, op: Any, *args: Any, **given: Any) -> Any:
    """Results, gradients, and the weight gradient of two backwards added onto a main_grad."""
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    result = op(x, w, *args, **given)
    _loss(result, up, entropy).backward()
    assert x.grad is not None and w.grad is not None
    out = {**_named(result), "input gradient": x.grad, "weight gradient": w.grad}
    w.main_grad = torch.zeros(w.shape, device=w.device)  # type: ignore[attr-defined]
    for _ in range(2):
        _loss(op(hidden, w, *args, **given), up, entropy).backward()
    return {**out, "main_grad": w.main_grad}


def _logits_gradient(logits: Tensor, up: Tensor, entropy: bool, op: Any, *args: Any, **given: Any) -> dict[str, Tensor]:
    z = logits.clone().requires_grad_()
    result = op(z, *args, **given)
    _loss(result, up, entropy).backward()
    assert z.grad is not None
    return {**{f"{name} of logits": value for name, value in _named(result).items()}, "logits gradient": z.grad}


def _named(result: ops.LogProb) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in result._asdict().items()}


def _loss(result: ops.LogProb, up: Tensor, entropy: bool) -> Tensor:
    logp = torch.where(result.logp.isfinite(), result.logp, 0.0)
    return (logp * up[0]).sum() + ((result.entropy * up[1]).sum() if entropy else 0)


def stock_differs(group: Any) -> None:
    """The control: vocabulary-parallel cross entropy with the library's sums, and gradients summed over ranks."""
    hidden, weight = normal(0, 200, C), normal(1, V, C)
    targets = torch.randint(V, (200,), generator=torch.Generator().manual_seed(3))
    whole = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
    z = hidden @ weight.chunk(group.size())[group.rank()].t()
    largest = z.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (z - largest[:, None]).exp().sum(-1)
    dist.all_reduce(total, group=group)
    own = targets - group.rank() * z.shape[1]
    here = (own >= 0) & (own < z.shape[1])
    picked = torch.where(here, z.gather(1, own.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)
    dist.all_reduce(picked, group=group)
    found = picked - largest - total.log()
    assert torch.allclose(found, whole, atol=1e-4) and not torch.equal(found, whole)


def refusals(group: Any) -> None:
    """On every rank, before anything is exchanged."""
    z, targets = normal(0, 3, V // group.size()), torch.tensor([0, V - 1, V])
    with pytest.raises(IndexError, match=r"targets\[2\] is 1000; expected 0 <= targets < 1000"):
        parallel_logprob(z, targets, group)
    with pytest.raises(ValueError, match="vocabulary is 1001; expected 1 to 1000, the entries of 8 ranks"):
        parallel_logprob(z, targets, group, vocabulary=V + 1)
    with pytest.raises(ValueError, match=r"temperature\[1\] is -1.0; it must be positive"):
        parallel_logprob(z, targets.clamp(max=9), group, temperature=torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match=r"hidden is \(3, 8\) .*, weight \(3, 125\)"):
        parallel_linear_logprob(normal(1, 3, 8), z, targets, group)
    with pytest.raises(IndexError, match="expected 0 <= ids < 1000"):
        parallel_embedding(targets, z.t(), group.rank() * z.shape[1], register_group(group))
