"""adamw_ and grad_norm: torch's AdamW, same bits for any grouping of tensors, updates skipped if not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, assert_reference_equal, differs, rand, with_threads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
from rlkernel.optim import AdamW

properties = settings(max_examples=20, deadline=None, derandomize=True)
sizes_of = st.lists(st.one_of(st.integers(0, 40), st.integers(1000, 5000)), min_size=1, max_size=6)
seeds = st.integers(0, 2**16)
kinds = st.sampled_from([(g, p) for g in DTYPES for p in DTYPES])


class State:
    """Parameters, gradients, moments and masters of the given sizes, seeded per tensor."""

    def __init__(
        self, sizes: Sequence[int], grad: torch.dtype = torch.float32, param: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        noise = [rand(1000 * seed + i, 4, n) for i, n in enumerate(sizes)]
        self.masters = [x[0].contiguous() for x in noise]
        self.params = self.masters if param == torch.float32 else [w.to(param) for w in self.masters]
        self.grads = [(x[1] * 3).to(grad) for x in noise]
        self.exp_avgs = [x[2] * 0.1 for x in noise]
        self.exp_avg_sqs = [(x[3] * 0.1).square() for x in noise]

    def lists(self) -> dict[str, list[Tensor]]:
        return {name: getattr(self, name) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")}

    def update(self, step: int, pick: Sequence[int] | None = None, lr: float = 1e-2, **options: Any) -> None:
        """`ops.adamw_` of all tensors, or of those in `pick`."""
        lists = {n: t if pick is None else [t[i] for i in pick] for n, t in self.lists().items()}
        ops.adamw_(**lists, lr=lr, step=step, **options)


def assert_same_state(ours: State, theirs: State, what: str) -> None:
    for name, tensors in ours.lists().items():
        for i, (a, b) in enumerate(zip(tensors, theirs.lists()[name], strict=True)):
            assert_bitwise(a, b, f"{what}, {name}[{i}]")


def both(sizes: Sequence[int], run: Callable[[State], None], **options: Any) -> tuple[State, State]:
    """Results of `run` on two equal states, the second with stock ops."""
    ours, stock = State(sizes, **options), State(sizes, **options)
    run(ours)
    with ops.stock():
        run(stock)
    return ours, stock


# ---- right


def truth(state: State, steps: int, scale: float, lr: float, betas: tuple[float, float], decay: float) -> None:
    """`steps` updates of fp64 masters and moments with the published formulas."""
    for step in range(1, steps + 1):
        for w, grad, m, v in zip(state.masters, state.grads, state.exp_avgs, state.exp_avg_sqs, strict=True):
            g = grad.double() * scale
            m.copy_(betas[0] * m + (1 - betas[0]) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
            unbiased = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
            w.copy_(w - lr * decay * w - lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8))


@properties
@given(
    sizes_of,
    kinds,
    st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.5, 0.5), (0.2, 0.9), (0.0, 0.0)]),
    st.sampled_from([0.0, 0.1]),
    seeds,
)
def test_it_is_adamw(sizes: list[int], kind: Any, betas: tuple[float, float], decay: float, seed: int) -> None:
    def run(state: State) -> None:
        for step in (1, 2, 3):
            state.update(step, lr=1e-2, betas=betas, weight_decay=decay, scale=torch.tensor(0.5))

    ours, stock = both(sizes, run, grad=kind[0], param=kind[1], seed=seed)
    exact = State(sizes, *kind, seed=seed)
    for name in ("masters", "exp_avgs", "exp_avg_sqs"):
        setattr(exact, name, [t.double() for t in getattr(exact, name)])
    truth(exact, 3, 0.5, 1e-2, betas, decay)
    for name in ("masters", "exp_avgs", "exp_avg_sqs"):
        for i, mine in enumerate(getattr(ours, name)):
            assert_accurate(mine, getattr(exact, name)[i], getattr(stock, name)[i], f"{name}[{i}]")
    for i, (param, master) in enumerate(zip(ours.params, ours.masters, strict=True)):
        assert_bitwise(param, master.to(param.dtype), f"params[{i}] is the rounded master")


def test_a_small_weight_decay_is_not_lost() -> None:
    """lr * weight_decay = 1e-8: torch's factor 1 - 1e-8 is 1 in fp32, but the sum of decay and step keeps it."""
    decayed, plain = (State([20_000], seed=1) for _ in range(2))
    for state, decay in ((decayed, 0.01), (plain, 0.0)):
        state.masters[0].abs_().add_(1.0)
        state.grads[0].mul_(1e-9)  # a step of about 1e-9
        for step in range(1, 40):
            state.update(step, lr=1e-6, weight_decay=decay)
    assert float((plain.masters[0] - decayed.masters[0]).double().mean()) > 0


def test_gradients_far_smaller_than_the_moment_are_not_lost() -> None:
    state = State([1000])
    state.exp_avgs[0].fill_(1e10)
    before = state.grads[0].clone()
    state.update(5, betas=(0.0, 0.5))
    assert_bitwise(state.exp_avgs[0], before, "beta1 = 0: the first moment is the gradient")


@properties
@given(sizes_of, st.sampled_from(DTYPES), st.floats(1e-20, 1e15), seeds)
def test_the_norm_is_exact_to_fp64(sizes: list[int], dtype: torch.dtype, size: float, seed: int) -> None:
    grads = [(g * size).to(dtype) for g in State(sizes, seed=seed).grads]
    found = ops.grad_norm(grads)
    exact = math.sqrt(math.fsum(x * x for g in grads for x in g.double().tolist()))
    assert found.norm.dtype == torch.float64 and float(found.norm) == pytest.approx(exact, rel=1e-13)
    for g, square in zip(grads, found.squares.tolist(), strict=True):
        assert square == pytest.approx(math.fsum(x * x for x in g.double().tolist()), rel=1e-13)


def test_the_scale_clips_and_divides_by_the_loss_scale() -> None:
    grads = [torch.full((9,), 40.0), torch.full((16,), -30.0)]
    norm = math.sqrt(9 * 1600 + 16 * 900)
    plain = ops.grad_norm(grads)
    assert float(plain.norm) == pytest.approx(norm, rel=1e-15) and float(plain.scale) == 1.0
    assert plain.scale.dtype == torch.float32 and plain.squares.tolist() == [14400.0, 14400.0]
    assert float(ops.grad_norm(grads, max_norm=2.0).scale) == pytest.approx(2.0 / norm, rel=1e-7)
    assert float(ops.grad_norm(grads, max_norm=200.0).scale) == 1.0
    scaled = ops.grad_norm(grads, max_norm=2.0, loss_scale=torch.tensor(64.0))
    assert float(scaled.norm) == pytest.approx(norm / 64, rel=1e-15)
    assert float(scaled.scale) == pytest.approx(2.0 / norm, rel=1e-7), "of gradients 64 times too large"
    assert float(ops.grad_norm(grads, max_norm=20.0, loss_scale=torch.tensor(64.0)).scale) == 1 / 64
    zero = ops.grad_norm([torch.zeros(5), torch.zeros(0)], max_norm=1.0)
    assert [float(x) for x in zero[:2]] == [0.0, 1.0]


def test_squares_neither_overflow_nor_vanish() -> None:
    for value in (3e38, 1e-40, 1e-45):
        grads = [torch.full((4,), value)]
        assert float(ops.grad_norm(grads).norm) == 2 * float(grads[0][0])
    with ops.stock():
        assert not math.isfinite(float(ops.grad_norm([torch.full((4,), 3e38)]).norm))


# ---- the reference


def test_reference_equals_cpp() -> None:
    sizes = [1, 1023, 0, 16_385, 70]

    def run(kind: Any, betas: tuple[float, float], wild: bool) -> list[Tensor]:
        state = State(sizes, *kind)
        if wild:  # exponents over most of the range, with denormals and zeros
            for tensors in (state.masters, state.exp_avgs, state.exp_avg_sqs, state.grads):
                for i, t in enumerate(tensors):
                    t.mul_(torch.exp2((rand(i, *t.shape) * 40).clamp(-130, 60)).to(t.dtype))
        scale = ops.grad_norm(state.grads, max_norm=1.0, loss_scale=torch.tensor(8.0))
        state.update(1, betas=betas)
        state.update(2, betas=betas, scale=scale.scale, zero_grad=True)
        return [*scale, *(t for tensors in state.lists().values() for t in tensors)]

    for grad in DTYPES:
        for param in DTYPES:
            for betas in ((0.9, 0.999), (0.3, 0.0)):
                for wild in (False, grad == torch.float32):
                    what = f"{grad}, {param}, {betas}, wild {wild}"
                    assert_reference_equal(lambda a=((grad, param), betas, wild): run(*a), what)


def test_reference_of_a_long_norm_equals_cpp() -> None:
    long = rand(0, 5 * SEGMENT + 3).repeat(
        -(-(SEGMENT + 1) * NORM_SEGMENT // (5 * SEGMENT))
    )  # a second row of segments
    grads = [long, rand(1, NORM_SEGMENT, dtype=torch.bfloat16)]
    assert_reference_equal(lambda: ops.grad_norm(grads, max_norm=3.0), "norm of several segments")
    for seed in range(150):  # torch's fp64 square root is off by one ulp for some seeds
        assert_reference_equal(lambda s=seed: ops.grad_norm([rand(s, 7)], max_norm=1.0), f"norm of seed {seed}")


# ---- invariant


def check_grouping(sizes: Sequence[int], groups: Sequence[Sequence[int]], kind: Any, seed: int) -> None:
    """The same bits in one call, and in one call per group in any order."""
    options = {"betas": (0.9, 0.95), "scale": torch.tensor(0.7), "zero_grad": True}
    whole, parts = State(sizes, *kind, seed=seed), State(sizes, *kind, seed=seed)
    whole.update(3, **options)
    for group in groups:
        parts.update(3, group, **options)
    assert_same_state(parts, whole, f"groups {groups}")


def partition(data: Any, count: int) -> list[list[int]]:
    order = data.draw(st.permutations(range(count)))
    borders = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    cuts = [0, *borders, count]
    return [order[a:b] for a, b in pairwise(cuts) if b > a]


@properties
@given(st.data(), sizes_of, kinds, seeds)
def test_grouping_of_tensors_is_free(data: Any, sizes: list[int], kind: Any, seed: int) -> None:
    check_grouping(sizes, partition(data, len(sizes)), kind, seed)


@properties
@given(st.data(), st.integers(1, 40_000), seeds)
def test_chunking_of_a_tensor_is_free(data: Any, size: int, seed: int) -> None:
    whole, parts = State([size], seed=seed), State([size], seed=seed)
    whole.update(2)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    for a, b in pairwise(cuts):
        piece = {name: [t[0][a:b]] for name, t in parts.lists().items()}
        ops.adamw_(**piece, lr=1e-2, step=2)
    assert_same_state(parts, whole, f"cut at {cuts}")


def test_grouping_control() -> None:
    """Control: the comparison detects one ulp in one gradient, and stock ops."""
    ours, other = State([300, 500]), State([300, 500])
    other.grads[1][123] = torch.nextafter(other.grads[1][123], torch.tensor(torch.inf))
    ours.update(1)
    other.update(1)
    assert differs(lambda: assert_same_state(ours, other, "an ulp"))
    ours, stock = both([3000, 500], lambda state: state.update(3))
    assert differs(lambda: assert_same_state(ours, stock, "stock"))


def fold(squares: Sequence[float]) -> float:
    """The norm's last sum: tensor i goes to lane i mod SEGMENT, a tree of neighbours adds the lanes."""
    lanes = [0.0] * SEGMENT
    for i, square in enumerate(squares):
        lanes[i % SEGMENT] += square
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[0::2], lanes[1::2], strict=True)]
    return math.sqrt(lanes[0])


def check_norm_grouping(sizes: Sequence[int], dtypes: Sequence[torch.dtype], groups: Any, seed: int) -> None:
    """A tensor's sum of squares does not depend on the other tensors, and the norm depends only on the sums."""
    grads = [g.to(dtypes[i % len(dtypes)]) for i, g in enumerate(State(sizes, seed=seed).grads)]
    whole = ops.grad_norm(grads)
    for group in groups:
        part = ops.grad_norm([grads[i] for i in group])
        assert_bitwise(part.squares, whole.squares[torch.tensor(group)], f"squares in the group {group}")
    assert_bitwise(whole.norm, torch.tensor(fold(whole.squares.tolist()), dtype=torch.float64), "norm")


@properties
@given(st.data(), sizes_of, st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3), seeds)
def test_grouping_of_gradients_is_free(data: Any, sizes: list[int], dtypes: list[torch.dtype], seed: int) -> None:
    check_norm_grouping(sizes, dtypes, partition(data, len(sizes)), seed)


def test_norm_grouping_control() -> None:
    """Control: stock's norm differs, and so does the sum of a tensor that is cut in two."""
    groups = [[1, 0], [2]]
    check_norm_grouping([5000, 3000, 70_000], DTYPES, groups, 1)
    with ops.stock():
        assert differs(lambda: check_norm_grouping([5000, 3000, 70_000], DTYPES, groups, 1))
    grad = rand(3, 3 * NORM_SEGMENT)
    whole = ops.grad_norm([grad]).squares
    cuts = [ops.grad_norm([grad[: i * 777], grad[i * 777 :]]).squares.sum(0, keepdim=True) for i in range(1, 9)]
    assert any(differs(lambda cut=cut: assert_bitwise(cut, whole, "one tensor as two")) for cut in cuts)


def test_threads_are_free() -> None:
    def run() -> list[Tensor]:
        state = State([200_000, 70, 65_537])
        found = ops.grad_norm(state.grads, max_norm=1.0)
        state.update(1, scale=found.scale)
        return [*found, *state.masters, *state.exp_avgs, *state.exp_avg_sqs]

    for i, (one, two) in enumerate(zip(with_threads(1, run), with_threads(2, run), strict=True)):
        assert_bitwise(two, one, f"1 against 2 threads, tensor {i}")


# ---- gradients that are not finite


@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("zero_grad", (False, True))
@pytest.mark.parametrize("stock", (False, True))
def test_a_gradient_that_is_not_finite_changes_no_weight(bad: float, zero_grad: bool, stock: bool) -> None:
    state, before = State([70, 5000], param=torch.bfloat16), State([70, 5000], param=torch.bfloat16)
    for each in (state, before):
        each.grads[1][4321] = bad
    with ops.stock(stock):
        found = ops.grad_norm(state.grads, max_norm=1.0)
        assert math.isnan(found.scale) and not math.isfinite(found.norm)
        assert found.squares.isfinite().tolist() == [True, False]
        state.update(1, scale=found.scale, zero_grad=zero_grad)
    if zero_grad:
        assert not any(g.any() for g in state.grads)
        state.grads = before.grads
    assert_same_state(state, before, "a skipped update")


def test_weights_that_change_are_seen_by_autograd() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    loss = (w * w).sum()
    ops.adamw_([w], [torch.ones(4)], [torch.zeros(4)], [torch.zeros(4)], lr=0.1, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_written_has_a_new_version() -> None:
    for dtype in DTYPES:
        for zero_grad in (False, True):
            state = State([4, 6], param=dtype)
            lists = state.lists()
            before = {name: [t._version for t in tensors] for name, tensors in lists.items()}
            state.update(1, zero_grad=zero_grad)
            for name, tensors in lists.items():
                changed = [t._version > v for t, v in zip(tensors, before[name], strict=True)]
                assert changed == [zero_grad or name != "grads"] * 2, f"{name}, zero_grad={zero_grad}, {dtype}"
    leaf = torch.ones(4, requires_grad=True)
    grad = leaf * 2
    loss = (grad * grad).sum()
    ops.adamw_(*([torch.ones(4)], [grad.detach()], *([torch.zeros(4)] for _ in "mv")), lr=0.1, step=1, zero_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        state = State([4])
        state.update(1)
    state.update(2)


def test_opcheck_and_compile() -> None:
    def inputs() -> list[list[Tensor]]:
        state = State([5, 40], param=torch.bfloat16)
        return [state.masters, state.grads, state.exp_avgs, state.exp_avg_sqs, state.params]

    numbers = (1e-2, 0.9, 0.999, 1e-8, 0.01, 1, True)
    torch.library.opcheck(torch.ops.rlkernel.adamw_.default, (*inputs(), torch.tensor(0.5), *numbers))
    torch.library.opcheck(torch.ops.rlkernel.grad_norm.default, (inputs()[1], None, 1.0))

    def step(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, masters: Any) -> Tensor:
        found = ops.grad_norm(grads, max_norm=1.0)
        ops.adamw_(params, grads, exp_avgs, exp_avg_sqs, masters=masters, lr=1e-2, step=2, scale=found.scale)
        return found.norm

    torch.compiler.reset()
    compiled, eager = State([5, 40], param=torch.bfloat16), State([5, 40], param=torch.bfloat16)
    norm = torch.compile(step, fullgraph=True, backend="aot_eager")(**compiled.lists())
    assert_bitwise(norm, step(**eager.lists()), "norm, compiled")
    assert_same_state(compiled, eager, "compiled")


# ---- bad input


def arguments(**change: Any) -> dict[str, Any]:
    state = State([4, 6], param=torch.bfloat16)
    return {**state.lists(), "lr": 1e-3, "step": 1, **change}


@pytest.mark.parametrize(
    "change,error,message",
    (
        ({"params": []}, ValueError, "params is empty"),
        ({"grads": [torch.zeros(4)]}, ValueError, "grads has 1 tensors, params 2"),
        ({"exp_avgs": [torch.zeros(4), torch.zeros(5)]}, ValueError, r"exp_avgs\[1\] is \(5,\), params\[1\] \(6,\)"),
        ({"exp_avg_sqs": [torch.zeros(4), torch.zeros(6).half()]}, TypeError, r"exp_avg_sqs\[1\] is torch.float16"),
        ({"grads": [torch.zeros(4), torch.zeros(6).double()]}, TypeError, r"grads\[1\] is torch.float64"),
        ({"grads": [torch.zeros(4), torch.zeros(12)[::2]]}, ValueError, r"grads\[1\] \(6,\) is not contiguous"),
        ({"grads": [torch.zeros(4), torch.zeros(6, device="meta")]}, ValueError, r"grads\[1\] is on meta, others on c"),
        ({"masters": None}, TypeError, r"masters\[0\] is torch.bfloat16, expected float32; pass fp32 master weights"),
        ({"lr": -1.0}, ValueError, "lr=-1.0"),
        ({"betas": None}, TypeError, "betas=None; expected two numbers"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0.9, 1.0\)"),
        ({"eps": 0.0}, ValueError, "eps=0.0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
        ({"step": 0}, ValueError, "step=0"),
        ({"scale": torch.ones(2)}, ValueError, r"scale is \(2,\) torch.float32 on cpu, expected one float32 on cpu"),
        ({"scale": torch.ones((), dtype=torch.float64)}, ValueError, r"scale is \(\) torch.float64"),
    ),
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"adamw_: {message}"):
        ops.adamw_(**arguments(**change))


def test_tensors_without_memory() -> None:
    def state() -> State:
        return State([4, 6], param=torch.bfloat16)

    meta = {name: [t.to("meta") for t in tensors] for name, tensors in state().lists().items()}
    assert ops.adamw_(**meta, lr=1e-3, step=1, zero_grad=True) is None
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        fake = {name: [mode.from_tensor(t) for t in tensors] for name, tensors in state().lists().items()}
        ops.adamw_(**fake, lr=1e-3, step=1, zero_grad=True)
    for name in state().lists():
        lists = state().lists()
        lists[name][1] = lists[name][1].to_sparse()
        with pytest.raises(TypeError, match=rf"adamw_: {name}\[1\] is torch.sparse_coo; .* pass x.to_dense\(\)"):
            ops.adamw_(**lists, lr=1e-3, step=1)


@pytest.fixture
def sharded() -> Iterator[Callable[[Tensor], Tensor]]:
    """Makes a tensor a DTensor of one process, like FSDP2's parameters."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        yield lambda t: distribute_tensor(t, mesh, [Shard(0)])
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_without_memory_of_their_own(sharded: Callable[[Tensor], Tensor]) -> None:
    lists = State([4, 6]).lists()
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        mixed = {**lists, name: [lists[name][0], sharded(lists[name][1])]}
        mixed["masters"] = mixed["params"]
        with pytest.raises(TypeError, match=rf"adamw_: {name}\[1\] is a DTensor; pass its local shard, x.to_local"):
            ops.adamw_(**mixed, lr=1e-3, step=1)
    every = {name: [sharded(t) for t in tensors] for name, tensors in lists.items()}
    with pytest.raises(TypeError, match=r"adamw_: params\[0\] is a DTensor"):
        ops.adamw_(**every, lr=1e-3, step=1)
    with pytest.raises(TypeError, match=r"grad_norm: grads\[0\] is a DTensor; pass its local shard, x.to_local\(\)"):
        ops.grad_norm(every["grads"])
    ops.adamw_(**{name: [t.to_local() for t in tensors] for name, tensors in every.items()}, lr=1e-3, step=1)  # type: ignore[attr-defined]
    p = torch.nn.Parameter(every["params"][0])
    p.grad = every["grads"][0]
    plain = torch.nn.Parameter(p.full_tensor().clone())
    plain.grad = p.grad.full_tensor().clone()
    for parameter in (p, plain):  # the optimizer updates this rank's part
        AdamW([parameter]).step()
    assert_bitwise(p.full_tensor(), plain)
    with pytest.raises(TypeError, match=r"params\[0\] is a TwoTensor; pass the tensors that it is made of"):
        ops.adamw_(
            [TwoTensor(lists["params"][0], lists["params"][0])], *([t] for t in lists["grads"][:1] * 3), lr=1.0, step=1
        )


def test_bad_input_of_the_norm() -> None:
    for change, error, message in (
        (([],), ValueError, "grads is empty"),
        (([torch.zeros(3).int()],), TypeError, r"grads\[0\] is torch.int32"),
        (([torch.zeros(3, 4).t()],), ValueError, r"grads\[0\] \(4, 3\) is not contiguous"),
        (([torch.zeros(3), torch.zeros(3, device="meta")],), ValueError, r"grads\[1\] is on meta"),
    ):
        with pytest.raises(error, match=f"grad_norm: {message}"):
            ops.grad_norm(*change)
    with pytest.raises(ValueError, match=r"max_norm=0.0 must be above 0"):
        ops.grad_norm([torch.zeros(3)], max_norm=0.0)
    with pytest.raises(ValueError, match=r"loss_scale is \(3,\)"):
        ops.grad_norm([torch.zeros(3)], loss_scale=torch.zeros(3))


def test_tensors_that_share_memory_are_refused() -> None:
    new = lambda n=2: [torch.ones(4) for _ in range(n)]
    p, (shared,) = torch.ones(5), new(1)
    update = lambda *lists, **options: ops.adamw_(*lists, lr=0.1, step=1, **options)
    halves = [t.bfloat16() for t in new()]
    for what, call in {
        r"params\[0\] and params\[1\]": lambda: update([shared] * 2, new(), new(), new()),
        r"params\[0\] and params\[1\] ": lambda: update([p[:4], p[1:]], new(), new(), new()),
        r"exp_avgs\[0\] and exp_avgs\[1\]": lambda: update(new(), new(), [shared] * 2, new()),
        r"exp_avgs\[1\] and exp_avg_sqs\[1\]": lambda: update(new(), new(), [*new(1), shared], [*new(1), shared]),
        r"masters\[0\] and masters\[1\]": lambda: update(halves, new(), new(), new(), masters=[shared] * 2),
        r"grads\[0\] and grads\[1\]": lambda: update(new(), [shared] * 2, new(), new(), zero_grad=True),
    }.items():
        with pytest.raises(ValueError, match=f"adamw_: {what.strip()} share memory; .* is passed once"):
            call()
    for what, place in {r"params\[1\]": 0, r"exp_avgs\[1\]": 2, r"exp_avg_sqs\[1\]": 3, r"masters\[1\]": 4}.items():
        for gradient in (p[1:], p[:4]):
            lists = [new() if i or place == 0 else halves for i in range(5)]
            lists[1][0], lists[place][1] = gradient, p[:4]
            with pytest.raises(ValueError, match=rf"grads\[0\] and {what}|{what} and grads\[0\]"):
                update(*lists[:4], masters=lists[4] if place else lists[0])
    update(new(), [p[:4], p[1:]], new(), new())  # read only
    update(new(), [shared] * 2, new(), new())
    update(halves, new(), new(), new(), masters=new())
    same = new()
    update(same, new(), new(), new(), masters=[t.view(4) for t in same])
    update(p.split([2, 1, 2]), *[list(torch.ones(5).split([2, 1, 2])) for _ in range(3)])  # neighbours
    empty = torch.ones(0)
    update([*new(1), empty, empty], *[[*new(1), empty, empty] for _ in range(3)])
