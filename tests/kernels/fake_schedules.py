"""A matrix product on the CPU for tests of certification: an anchor, equal schedules, and wrong ones (`WRONG`).

Each wrong schedule has one fault that a library could have: another order of K, TF32, split-K, flushed denormals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.errors import BuildError
from rlkernel.kernels.samples import values
from rlkernel.kernels.verdicts import ANCHOR

K = 64


class Launches:
    """Stands in for a compiled kernel and records its arguments."""

    def __init__(self, ran: list[Any], *named: str, code: str = "0") -> None:
        self.ran, self.named, self.code = ran, named, code

    def __call__(self, *given: Any, **more: Any) -> None:
        self.ran.append((*self.named, *given, more) if self.named else given)


def classes_of(spec: OpSpec[Any], calls: Iterable[tuple[Any, ...]]) -> set[Any]:
    """The shape classes of these calls; asserts that `call_key` decides the class."""
    assert spec.call_key is not None
    found: dict[Any, Any] = {}
    for given in calls:
        shape = spec.shape(*given)
        assert found.setdefault(spec.call_key(*given), shape) == shape, f"{spec.name}: {shape}"
    return set(found.values())


def chain(x: Tensor, w: Tensor, ks: range, start: Tensor | None = None) -> Tensor:
    total = torch.zeros(x.shape[0], w.shape[0]) if start is None else start
    for k in ks:
        total = total + x[:, k : k + 1].float() * w[:, k].float()
    return total


def anchor(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def equal(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def slow(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(x.dtype)


def other_k_order(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K - 1, -1, -1)).to(x.dtype)


def split_k(x: Tensor, w: Tensor) -> Tensor:
    return (chain(x, w, range(K // 2)) + chain(x, w, range(K // 2, K))).to(x.dtype)


def tf32(x: Tensor, w: Tensor) -> Tensor:
    cut = lambda t: (t.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return chain(cut(x), cut(w), range(K)).to(x.dtype)


def low_precision_sum(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    for k in range(K):
        total = (total.float() + x[:, k : k + 1].float() * w[:, k].float()).bfloat16()
    return total.to(x.dtype)


def other_layout(x: Tensor, w: Tensor) -> Tensor:
    """Sums of a row in four lanes that are added at the end, as with another distribution over warps."""
    lanes = [chain(x, w, range(lane, K, 4)) for lane in range(4)]
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])).to(x.dtype)


def two_roundings(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K)).to(torch.bfloat16).to(x.dtype)


def no_negative_zero(x: Tensor, w: Tensor) -> Tensor:
    return chain(x, w, range(K), torch.full((x.shape[0], w.shape[0]), -0.0)).to(x.dtype)


def flushes_denormals(x: Tensor, w: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    return chain(torch.where(x.abs() < tiny, 0 * x, x), w, range(K)).to(x.dtype)


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError("no kernel image")


def writes_nothing(x: Tensor, w: Tensor) -> Tensor:
    return torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype)


def row_dependent(x: Tensor, w: Tensor) -> Tensor:
    return (split_k if x.shape[0] > 4 else equal)(x, w)


WRONG = (
    other_k_order, split_k, tf32, low_precision_sum, other_layout, two_roundings, no_negative_zero, flushes_denormals,
    writes_nothing, row_dependent,
)  # fmt: skip


class Shape(NamedTuple):
    """Shape class of the product."""

    many: bool
    weight: tuple[int, int]
    dtype: torch.dtype
    device: int = -1


def spec(*runs: Callable[..., Tensor], anchor: Callable[..., Tensor] = anchor, **fields: Any) -> OpSpec[Shape]:
    def sample(s: Shape, m: int, kind: str, g: torch.Generator) -> tuple[Tensor, Tensor]:
        return values(kind, m, K, s.dtype, g), values(kind, s.weight[0], K, s.dtype, g, second=True)

    schedules = [Schedule(f"fake.{run.__name__}", lambda s, run=run: run) for run in runs]
    shape = lambda x, w: Shape(x.shape[0] > 1, tuple(w.shape), x.dtype)
    return OpSpec("fake", anchor, shape, lambda s: [2, 6] if s.many else [1], sample, schedules, **fields)


def arguments(m: int = 3, n: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(m, K).to(dtype), torch.randn(n, K).to(dtype)


def milliseconds(candidates: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Fixed times in place of the clock: schedules beat the anchor, except those with `slow` in their name."""
    return {name: 2.0 if name == ANCHOR else 4.0 if "slow" in name else 1.0 for name in candidates}


def counted(calls: list[int]) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return anchor(x, w)

    return run


def built(missing: list[bool], runs: Callable[..., Tensor] = equal) -> Schedule:
    """A schedule that cannot be built while `missing[0]` is true."""

    def bind(key: Any) -> Callable[..., Tensor]:
        if missing[0]:
            raise BuildError("no compiler")
        return runs

    return Schedule("fake.built", bind)
