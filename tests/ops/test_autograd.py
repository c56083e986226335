"""The ops in autograd: which `main_grad` a backward writes, second derivatives, threads, batched grads, graphs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlkernel import ops
from rlkernel.ops.autograd import main_grad_lock

try:
    from rlkernel_transformers.joined import join, join_storage, joined_linear
except ImportError:  # without transformers
    joined_linear = None  # type: ignore[assignment]

IDS = torch.tensor([0, 2, 2])
CU = torch.tensor([0, 3], dtype=torch.int32)
TABLE = torch.cat((torch.randn(9, 4).cos(), torch.randn(9, 4).sin()), 1)


def parameters(*shapes: tuple[int, ...], main_grad: bool = True) -> list[Any]:
    torch.manual_seed(1)
    made: list[Any] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in made if main_grad else ():
        p.main_grad = torch.zeros(p.shape)
    return made


def logprobs(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return ops.linear_logprob(x, weight, IDS, **options).logp


Op = Callable[..., Tensor]
WITH_WEIGHTS: dict[str, tuple[Op, tuple[tuple[int, ...], ...]]] = {
    "linear": (ops.linear, ((5, 8),)),
    "linear with bias": (ops.linear, ((5, 8), (5,))),
    "linear, another name of the weight": (lambda x, w: ops.linear(x, alias(w)), ((5, 8),)),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 0.1), ((8,),)),
    "rms_norm with residual": (lambda x, w: ops.rms_norm(x, w, 0.1, x * 2)[0], ((8,),)),
    "linear_logprob": (logprobs, ((5, 8),)),
    "linear_logprob, keep_probs": (lambda x, w: logprobs(x, w, keep_probs=True), ((5, 8),)),
    "embedding": (lambda x, w: ops.embedding(IDS, w) * x, ((5, 8),)),
    "joined": (lambda x, *w: joined_linear(x, list(w), []), ((5, 8), (3, 8))),
    "joined with bias": (lambda x, v, w, a, b: joined_linear(x, [v, w], [a, b]), ((5, 8), (3, 8), (5,), (3,))),
}


def alias(weight: Any) -> Tensor:
    """An alias, as the decoder makes one for a tied head."""
    name: Any = weight.view_as(weight)
    if hasattr(weight, "main_grad"):
        name.main_grad = weight.main_grad
    return name


@pytest.fixture(params=WITH_WEIGHTS)
def case(request: pytest.FixtureRequest) -> tuple[Op, list[Any], list[Any], Tensor]:
    """An op, its weights with `main_grad`, the same weights without, and its input."""
    if request.param.startswith("joined") and joined_linear is None:
        pytest.skip("transformers is not installed")
    op, shapes = WITH_WEIGHTS[request.param]
    return op, parameters(*shapes), parameters(*shapes, main_grad=False), torch.randn(3, 8, requires_grad=True)


def squares(y: Tensor) -> Tensor:
    return y.pow(2).sum()


def assert_near(found: Any, expected: Any) -> None:
    """Close up to the order of a few fp32 sums."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def written(weights: list[Any]) -> list[bool]:
    return [bool(w.main_grad.any()) for w in weights]


# ---- main_grad -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ("grad", "inputs", "jacobian"))
def test_main_grad_does_not_change_when_only_the_inputs_gradient_is_requested(case: Any, ask: str) -> None:
    """A silent write would double the next step's gradient."""
    op, weights, plain, x = case
    (expected,) = torch.autograd.grad(squares(op(x, *plain)), [x])
    if ask == "grad":
        (found,) = torch.autograd.grad(squares(op(x, *weights)), [x])
    elif ask == "inputs":
        squares(op(x, *weights)).backward(inputs=[x])
        found = x.grad
    else:
        found = torch.autograd.functional.jacobian(lambda a: squares(op(a, *weights)), x)
    assert torch.equal(found, expected) and not any(written(weights))


def test_main_grad_is_written_where_grad_would_be(case: Any) -> None:
    op, weights, plain, x = case
    squares(op(x, *plain)).backward()
    expected = [p.grad for p in plain]

    def check(times: int = 1) -> None:
        for w, g in zip(weights, expected, strict=True):
            assert w.grad is None
            assert_near(w.main_grad, times * g)
            w.main_grad.zero_()

    loss = squares(op(x, *weights))
    loss.backward(retain_graph=True)
    loss.backward()
    check(2)
    squares(op(x, *weights)).backward(inputs=weights)
    check()
    squares(op(x, *weights)).backward(inputs=weights[:1])
    assert written(weights) == [True] + [False] * (len(weights) - 1)
    weights[0].main_grad.zero_()
    for reentrant in (False, True):
        squares(checkpoint(lambda a: op(a, *weights), x, use_reentrant=reentrant)).backward()
        check()
    squares(checkpoint(op, x, *weights, use_reentrant=False)).backward(inputs=[x])
    assert not any(written(weights))


def test_requested_gradients_are_returned(case: Any) -> None:
    """As for a parameter without `main_grad`; the buffer does not change."""
    op, weights, plain, x = case
    expected = torch.autograd.grad(squares(op(x, *plain)), plain)
    found = torch.autograd.grad(squares(op(x, *weights)), weights)
    assert not any(written(weights))
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


@pytest.mark.skipif(joined_linear is None, reason="transformers is not installed")
def test_joined_weights_with_a_gradient_of_some() -> None:
    """Weights in one buffer, one of them without `main_grad`."""
    layers = [nn.Linear(8, n, bias=False) for n in (5, 3)]
    join_storage(layers)
    first, second = weights = [layer.weight for layer in layers]
    assert join(weights).data_ptr() == first.data_ptr()
    buffer = torch.zeros(8, 8)
    x = torch.randn(3, 8)
    loss = lambda: squares(joined_linear(x, list(weights), []))
    expected = torch.autograd.grad(loss(), weights)
    first.main_grad, second.main_grad = buffer.split((5, 3))  # type: ignore[assignment]
    loss().backward(inputs=[second])
    assert not first.main_grad.any()
    assert_near(second.main_grad, expected[1])
    del second.main_grad
    second.requires_grad_(False)
    loss().backward()
    assert_near(first.main_grad, expected[0])


def test_a_backward_by_hand_writes_main_grad() -> None:
    """Outside of autograd's backward it is unknown which gradients are requested."""
    (weight,) = parameters((5, 8))
    y: Any = ops.linear(torch.randn(3, 8), weight)
    type(y.grad_fn)._forward_cls.backward(y.grad_fn, torch.ones(3, 5))
    assert weight.main_grad.any()


def test_threads_lose_nothing_of_main_grad() -> None:
    """The kernels release the GIL, and torch's lock protects only `.grad`."""
    weight: Any = nn.Parameter(torch.zeros(256, 256))
    weight.main_grad = torch.zeros(256, 256)
    x = torch.ones(16, 256)
    # Deterministic: while this thread holds the lock, no backward may add.
    with main_grad_lock:
        worker = threading.Thread(target=lambda: ops.linear(x, weight).sum().backward())
        worker.start()
        worker.join(0.3)
        assert worker.is_alive() and not weight.main_grad.any()
    worker.join()
    assert weight.main_grad.eq(16).all()

    def many() -> None:
        for _ in range(20):
            ops.linear(x, weight).sum().backward()

    workers = [threading.Thread(target=many) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert weight.main_grad.eq(81 * 16).all()


# ---- derivatives ---------------------------------------------------------------------------------

ONCE: dict[str, Op] = {
    "linear": lambda x: ops.linear(x, torch.ones(5, 8)),
    "linear, weight": lambda x: ops.linear(torch.ones(2, 8), x),
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(8), 0.1),
    "add_rms_norm": lambda x: ops.rms_norm(x, torch.ones(8), 0.1, x.detach())[0],
    "swiglu": lambda x: ops.swiglu(x),
    "logprob": lambda x: ops.logprob(x, IDS).logp,
    "logprob, entropy": lambda x: ops.logprob(x, IDS).entropy,
    "linear_logprob": lambda x: ops.linear_logprob(x, torch.ones(5, 8), IDS).logp,
    "linear_logprob_probs": lambda x: ops.linear_logprob(x, torch.ones(5, 8), IDS, keep_probs=True).logp,
    "embedding": lambda x: ops.embedding(IDS, x),
    "attention": lambda x: ops.attention(*[x.view(3, 1, 8)] * 3, CU, max_seqlen_q=3)[0],
    "policy_loss": lambda x: ops.policy_loss(x.flatten(), None, torch.ones(24), torch.tensor([0, 24]).int()).loss,
}
MISSING = "there is no second derivative; leave create_graph=True out"


@pytest.mark.parametrize("loss", (torch.sum, squares), ids=("sum", "square"))
@pytest.mark.parametrize("op", ONCE)
def test_second_derivatives_raise_for_every_way_to_request_them(op: str, loss: Any) -> None:
    """`autograd.grad` and `hessian` would omit the penalty, while `backward` runs every node."""
    name = op.split(",")[0]
    x = torch.randn(3, 8)
    run = lambda a: loss(ONCE[op](a))
    leaf = x.clone().requires_grad_()
    value = run(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}: {MISSING}"):
        torch.autograd.grad(value + gradient.pow(2).sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}: {MISSING}"):
        (value + gradient.pow(2).sum()).backward()
    with pytest.raises(RuntimeError, match=f"{name}: {MISSING}"):
        torch.autograd.functional.hessian(run, x)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(RuntimeError, match=f"{name}: {MISSING}"):
            product(run, x, torch.ones_like(x))


def test_a_penalty_on_one_tensors_gradient_reaches_another() -> None:
    """The gradient of x depends on the weight, so a penalty on it must reach the weight."""
    weight, x = parameters((5, 8), main_grad=False)[0], torch.randn(3, 8, requires_grad=True)
    for y in (ops.linear(x, weight), checkpoint(ops.linear, x, weight, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"linear: {MISSING}"):
            torch.autograd.grad(y.sum() + gradient.pow(2).sum(), weight)


def test_gradients_with_create_graph_are_those_without() -> None:
    for op, fn in ONCE.items():
        x = torch.randn(3, 8, requires_grad=True)
        y = fn(x).sum()
        (plain,) = torch.autograd.grad(y, x, retain_graph=True)
        (with_graph,) = torch.autograd.grad(y, x, create_graph=True)
        assert torch.equal(plain, with_graph) and not plain.requires_grad, op


def rotated(x: Tensor) -> Tensor:
    return ops.rope(x.view(3, 1, 8), torch.zeros(3, 1, 8), IDS, TABLE)[0]


def test_rope_is_differentiable_twice() -> None:
    hessian = torch.autograd.functional.hessian(lambda a: rotated(a).pow(2).sum(), torch.randn(3, 8))
    assert torch.count_nonzero(hessian) > 0


@pytest.mark.parametrize("op", (*ONCE, "rope"))
def test_a_batch_of_upstream_gradients_is_refused(op: str) -> None:
    """Our error names the op; torch's would mention storage, or call itself a bug in PyTorch."""
    fn = {**ONCE, "rope": rotated}[op]
    refused = f"{op.split(',')[0]}: its backward takes one upstream gradient at a time"
    x = torch.randn(3, 8, requires_grad=True)
    y = fn(x)
    with pytest.raises(NotImplementedError, match=refused):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True, retain_graph=True)
    with pytest.raises(NotImplementedError, match=refused):
        torch.autograd.functional.jacobian(fn, torch.randn(3, 8), vectorize=True)
    torch.autograd.grad(y, x, torch.ones(y.shape))  # the graph still works


# ---- torch.compile -------------------------------------------------------------------------------


def test_main_grad_leaves_one_op_out_of_the_graph(case: Any) -> None:
    """The code around the op is compiled, and the op is not traced."""
    op, weights, plain, x = case
    graphs: list[list[str]] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append([getattr(n.target, "__name__", n.target) for n in module.graph.nodes if "call" in n.op])
        return module.forward

    run = lambda a, *ws: op(a.sin(), *ws).cos()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")  # of code that it must not trace
        compiled = torch.compile(run, backend=backend)
        compiled(x, *weights).sum().backward()
    run(x, *plain).sum().backward()
    for w, p in zip(weights, plain, strict=True):
        assert w.grad is None
        assert_near(w.main_grad, p.grad)
    around = {name for graph in graphs for name in graph}
    assert {"sin", "cos"} <= around <= {"sin", "cos", "mul", "getitem", "view_as"}, graphs


def test_main_grad_under_fullgraph_is_an_error(case: Any) -> None:
    op, weights, _, x = case
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r": torch\.compile does not see main_grad"):
        torch.compile(op, fullgraph=True, backend="eager")(x, *weights)
    with torch.no_grad():
        torch.compile(op, fullgraph=True, backend="eager")(x, *weights)
    with ops.stock():  # which does not see main_grad
        torch.compile(lambda *args: op(*args), fullgraph=True, backend="eager")(x, *weights)
