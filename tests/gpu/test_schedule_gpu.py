"""Certified schedules on CUDA: cuBLASLt without split-K equals the anchor for Qwen3's weights.

Controls: planted schedules with another order, TF32 or another start of the chain are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.gpu_checks import HOPPER, Compared, forget, refusal
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE
from rlkernel.kernels import certification, clock, scheduled_op, verdicts
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.verdicts import Trial

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS = (1, 16, 64, 256, 2048)
WEIGHTS = (
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (6144, 4096), (4096, 4096), (24576, 4096),
    (4096, 12288),
)  # fmt: skip
# Each weight at two row counts; every row count with a small and a large weight, and the head.
FEW_WEIGHTS = ((6144, 1024), (4096, 12288), (151936, 1024))
CALLS = [(m, *weight) for m in ROWS for weight in (WEIGHTS if m in (64, 2048) else FEW_WEIGHTS)]
hopper = pytest.mark.skipif(not HOPPER, reason="cuBLASLt is known to keep the chain on sm_90 only")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test certifies by itself instead of reading stored verdicts; compiled kernels stay in the usual cache."""
    monkeypatch.setattr(verdicts, "verdict_dir", lambda: tmp_path / "schedules")
    forget()
    yield
    forget()


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cublaslt(verdict: scheduled_op.Verdict | None) -> list[Trial]:
    assert verdict is not None
    return [trial for trial in verdict.trials if trial.name.startswith("cublaslt.")]


@hopper
@pytest.mark.parametrize("m,n,k", CALLS)
def test_cublaslt_is_certified(m: int, n: int, k: int, record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    x, dy, w, seen = rand(m, k), rand(m, n), rand(n, k), Compared()
    calls = [(linear.linear, (x, w, None, 1, 1, None)), (linear.linear_dgrad, (dy, w, 1))]
    if n > DGRAD_WHOLE:
        del calls[1]  # see test_input_gradients_of_a_head_are_certified
    for op, arguments in calls:
        trials = cublaslt(op.verdict(*arguments))
        assert any(trial.certified for trial in trials), trials
        expected = op.spec.anchor(*arguments)
        for name, run in op._classes[op.spec.shape(*arguments)].bound.items():
            seen.rows(run(*arguments), expected, f"{op.spec.name} [{m}, {n}, {k}] by {name}")
    record(**vars(seen))


@hopper
def test_an_explicit_algorithm_equals_the_heuristics_choice() -> None:
    from rlkernel.kernels.cuda import cublaslt as lt

    x, w, out = rand(256, 512), rand(1024, 512), rand(256, 1024)
    plan = lambda which: lt.plan(
        0, 256, 1024, 512, 1, 512, 512, False, True, torch.bfloat16, torch.bfloat16, False, which
    )  # fmt: skip
    named = plan(0)
    settings = {name: int(value) for name, value in (part.split() for part in named.algorithm.split(", "))}
    explicit = plan(lt.Algorithm(settings.pop("algorithm"), **settings))
    assert explicit.handle != named.handle and explicit.algorithm == named.algorithm
    results = []
    for chosen in (named, explicit):
        lt.launcher(0, chosen)(256, 512, x.data_ptr(), w.data_ptr(), None, False, out)
        results.append(out.clone())
    assert_bitwise(results[1], results[0], named.algorithm)
    with pytest.raises(RuntimeError, match="status"):
        plan(lt.Algorithm(1 << 20, 0, 0, 0))


@hopper
@pytest.mark.parametrize("counts", ((33,), (64,), (5000, 8192)), ids=str)  # of one shape class
@pytest.mark.parametrize("n,k", ((1024, 3072), (6144, 4096), (19456, 1024)))
def test_weight_gradients_are_certified(counts: tuple[int, ...], n: int, k: int, record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear
    from rlkernel.kernels.triton import linear_grad as anchor

    seen = Compared()
    for tokens, (dtype, fresh) in itertools.product(
        counts, ((torch.bfloat16, True), (torch.float32, True), (torch.float32, False))
    ):
        dy, x = rand(tokens, n), rand(tokens, k)
        start = torch.randn(n, k, device="cuda").to(dtype)
        verdict = linear.wgrad_chunk.verdict(start, dy, x, fresh)
        assert any(trial.certified for trial in cublaslt(verdict)), verdict
        grad, expected = start.clone(), start.clone()
        with scheduled_op.strict():
            linear.wgrad_(grad, dy, x, fresh)
        anchor.wgrad_(expected, dy, x, fresh)
        seen.whole(grad, expected, f"[{tokens}, {n}, {k}] onto {dtype}, fresh {fresh}")
    record(**vars(seen))


@hopper
@pytest.mark.parametrize("m", (1, 16, 64, 256, 2048))
def test_input_gradients_of_a_head_are_certified(m: int, record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    n, k = 3 * DGRAD_CHUNK + 4480, 1024
    dy, w = rand(m, n), rand(n, k)
    verdict = linear.linear_dgrad.verdict(dy, w, 1)
    assert verdict is not None and all(trial.certified or trial.first is None for trial in verdict.trials), verdict
    assert any(trial.certified for trial in verdict.trials)
    expected, seen = linear.anchor.linear_dgrad(dy, w, 1), Compared()
    for name, run in linear.linear_dgrad._classes[linear.linear_dgrad.spec.shape(dy, w, 1)].bound.items():
        seen.rows(run(dy, w, 1), expected, f"{m} rows by {name}")
    record(**vars(seen))


@hopper
@pytest.mark.parametrize("chunks", (1, 4))
@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("out", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_epilogues_and_chunks_keep_the_bits(
    out: torch.dtype, bias: bool, chunks: int, record: Callable[..., None]
) -> None:
    w, b, seen = rand(1024, 2048), rand(1024) if bias else None, Compared()
    for m in (1, 3, 16, 100, 300, 1000):
        x = rand(m, 2048)
        y = ops.linear(x, w, b, chunks=chunks, out_dtype=out)
        with scheduled_op.without():
            seen.rows(y, ops.linear(x, w, b, chunks=chunks, out_dtype=out), f"{m} rows")
    record(**vars(seen))


def test_the_clock_detects_launches_that_outlast_the_wait() -> None:
    """Control: without a wait, the time of the host is part of the sample."""
    x = rand(4096, 4096)
    flush = torch.empty(32 << 20, dtype=torch.int32, device="cuda")
    once = lambda wait, host: clock.on_gpu(lambda: (time.sleep(host), x.neg_()), wait, flush)
    # 20 samples each, because other tests share the GPU and disturb some of them.
    waited, late = ([once(wait, host) for _ in range(20)] for wait, host in ((2e-2, 2e-3), (0.0, 3e-2)))
    assert any(hidden and taken < 1 for taken, hidden in waited), waited
    assert any(not hidden and taken > 1 for taken, hidden in late), late


@hopper
@pytest.mark.parametrize("m", (8, 64, 300))
def test_operands_at_any_address_keep_the_bits(m: int, record: Callable[..., None]) -> None:
    """Alignment is not part of the shape class: schedules fall back to the anchor for unaligned operands."""
    n, k = 1024, 2048
    shifted = lambda shift, *shape: rand(shift + shape[0] * shape[1]).reshape(-1)[shift:].view(shape)
    targets = torch.randint(0, n, (m,), device="cuda")

    def results(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = ops.linear(x, w)
        grads = torch.autograd.grad(y, (x, w), dy)
        logp = ops.linear_logprob(x, w, targets).logp
        return [y, *grads, logp, *torch.autograd.grad(logp.sum(), (x, w))]

    seen = Compared()
    results(rand(m, k), rand(n, k), rand(m, n))  # certifies the class on aligned operands
    for which in range(3):
        x, w, dy = (shifted(i == which, *shape) for i, shape in enumerate(((m, k), (n, k), (m, n))))
        found = results(x, w, dy)
        with scheduled_op.without():
            expected = results(x, w, dy)
        what = f"{m} rows, operand {which} misaligned"
        for outputs in ((0, 1), (3, 4)):
            seen.rows([found[i] for i in outputs], [expected[i] for i in outputs], what)
        for i in (2, 5):
            seen.whole(found[i], expected[i], f"{what}, gradient of the weight")
    record(**vars(seen))


@hopper
@pytest.mark.parametrize(
    "m,n,k",
    (
        pytest.param(16400, 512, 256, id="largest bucket"),
        pytest.param(14400, 151936, 64, id="more than 2^31 elements", marks=pytest.mark.gpu_memory(24)),
    ),
)
def test_calls_with_more_rows_than_certified_are_split(m: int, n: int, k: int, record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear
    from rlkernel.kernels.cuda import linear_shapes as shapes

    x, w, bias, seen = rand(m, k), rand(n, k), rand(2 * n)[::2], Compared()
    dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    for op, arguments in ((linear.linear, (x, w, bias, 1, 1, None)), (linear.linear_dgrad, (dy, w, 1))):
        key = op.spec.shape(*arguments)
        assert shapes.max_rows(key) < m
        verdict = op.verdict(*arguments)
        assert verdict is not None and verdict.rows[-1] == shapes.max_rows(key)
        bound = op._classes[key].bound
        assert bound, verdict.trials
        expected = op.spec.anchor(*arguments)
        for name, run in bound.items():
            assert torch.equal(run(*arguments).view(torch.int16), expected.view(torch.int16)), f"{op.spec.name}, {name}"
            seen.add(tokens=m)
        del expected
    record(**vars(seen))


@hopper
def test_an_invalidated_capture_raises_and_disables_no_schedule() -> None:
    import ctypes

    from rlkernel.kernels.cuda import driver, linear

    x, w = rand(300, 1024), rand(512, 1024)
    calls = ((linear.linear, (x, w, None, 1, 1, None)), (linear.linear_dgrad, (rand(64, 512), w, 1)))
    expected = [op(*given) for op, given in calls]
    chosen = [op.chosen(*given) for op, given in calls]
    torch.cuda.synchronize()
    stream, graph, thread_local = torch.cuda.Stream(), ctypes.c_void_p(), 1
    with torch.cuda.stream(stream):
        for op, given in calls:
            op(*given)  # the allocator has memory for this stream
        stream.synchronize()
        cuda, place = driver._cuda(), ctypes.c_void_p(stream.cuda_stream)
        assert cuda.cuStreamBeginCapture_v2(place, thread_local) == 0
        try:
            assert cuda.cuStreamSynchronize(place) != 0, "invalidates the capture"
            for op, given in calls:
                with pytest.raises(RuntimeError):
                    op(*given)
        finally:
            assert cuda.cuStreamEndCapture(place, ctypes.byref(graph)) != 0
        for (op, given), y, name in zip(calls, expected, chosen, strict=True):
            assert op.chosen(*given) == name and not op.failures()
            assert_bitwise(op(*given), y, f"{op.spec.name} afterwards")
    torch.cuda.synchronize()


def test_schedules_are_certified_in_torchs_deterministic_mode() -> None:
    from rlkernel.kernels.cuda import linear

    x, w, dy = rand(20, 256), rand(512, 256), rand(20, 512)
    grad = torch.zeros(512, 256, device="cuda")
    keys = (
        (linear.linear, linear.linear.spec.shape(x, w, None, 1, 1, None)),
        (linear.wgrad_chunk, linear.wgrad_chunk.spec.shape(grad, dy, x, False)),
    )
    torch.use_deterministic_algorithms(True)
    try:
        with scheduled_op.strict(), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*deterministic")
            for op, key in keys:
                verdict = op.verdict_of(key)
                assert not op.failures()
                if torch.cuda.get_device_capability() == (9, 0):
                    assert verdict is not None and any(trial.certified for trial in verdict.trials), verdict
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def planted(**switch: Any) -> Callable[..., Tensor]:
    """torch's product in fp32: with TF32, or as the sum of two halves of K."""

    def run(x: Tensor, weight: Tensor, bias: Any, chunks: int, dgrad_chunks: int, out_dtype: Any) -> Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = switch.get("tf32", False)
        try:
            if switch.get("split"):
                half = x.shape[1] // 2
                y = (
                    x[:, :half].float() @ weight[:, :half].float().t()
                    + x[:, half:].float() @ weight[:, half:].float().t()
                )
            else:
                y = x.float() @ weight.float().t()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return y.to(out_dtype or x.dtype)

    return run


@pytest.mark.parametrize("switch", ({"tf32": True}, {"split": True}), ids=str)
def test_a_planted_wrong_schedule_is_refused(switch: dict[str, bool], record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    wrong = Schedule("planted", lambda key: planted(**switch))
    spec = dataclasses.replace(linear.linear.spec, schedules=(wrong,))
    dtype = torch.float32 if "tf32" in switch else torch.bfloat16
    key = spec.shape(rand(64, 1024, dtype=dtype), rand(512, 1024, dtype=dtype), None, 1, 1, torch.float32)
    verdict, bound = certification.certify(spec, key)
    (trial,) = verdict.trials
    record(**refusal(trial.first))
    assert not trial.certified and trial.first is not None and trial.first["mismatches"] > 0 and not bound


def chain_continued(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
    """Starts the chain with the value in the buffer, not with 0."""
    from rlkernel.kernels.triton.linear import gemm

    gemm(dy.t(), x, grad, start=grad)


def halves_of_tokens(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
    half = len(dy) // 2
    for piece in (slice(0, half), slice(half, None)):
        grad += dy[piece].float().t() @ x[piece].float()


def tokens_descending(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
    from rlkernel.kernels.triton.linear_grad import wgrad_

    wgrad_(grad, dy.flip(0), x.flip(0), fresh)


@pytest.mark.parametrize("wrong", (chain_continued, halves_of_tokens, tokens_descending), ids=lambda run: run.__name__)
def test_a_planted_wrong_weight_gradient_is_refused(wrong: Callable[..., None], record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    spec = dataclasses.replace(linear.wgrad_chunk.spec, schedules=(Schedule("planted", lambda key: wrong),))
    key = spec.shape(torch.zeros(256, 512, device="cuda"), rand(300, 256), rand(300, 512), False)
    (trial,) = certification.certify(spec, key)[0].trials
    record(**refusal(trial.first))
    assert not trial.certified and trial.first is not None and trial.first["mismatches"] > 0


def test_bits_do_not_depend_on_schedules_in_a_graph_or_out_of_it(record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    x, w = rand(48, 1024), rand(4096, 1024)
    linear.linear.spec.anchor(x, w, None, 1, 1, None)  # its kernel is compiled and loaded before the capture
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        cold = ops.linear(x, w)
    captured.replay()
    assert not verdicts.stored(), "nothing is certified under capture"
    with scheduled_op.strict():
        y = ops.linear(x, w)
    with torch.cuda.graph(warm := torch.cuda.CUDAGraph()):
        inside = ops.linear(x, w)
    warm.replay()
    assert verdicts.stored()
    seen = Compared()
    seen.rows(cold, y, "captured before the verdict")
    seen.rows(inside, y, "captured after the verdict")
    for names in (("cublaslt",), ("triton",), ()):
        with scheduled_op.without(*names):
            seen.rows(ops.linear(x, w), y, f"without {names or 'all'}")
    record(**vars(seen))


def test_odd_shapes_run_the_anchor(record: Callable[..., None]) -> None:
    from rlkernel.kernels.cuda import linear

    w, seen = rand(100, 72), Compared()
    for x in (rand(5, 80)[:, :72], rand(0, 72), rand(5, 72)):
        arguments = (x, w, None, 1, 1, None)
        with scheduled_op.strict():
            y = ops.linear(x, w)
        seen.rows(y, linear.linear.spec.anchor(*arguments), f"{tuple(x.shape)}")
    record(**vars(seen))
