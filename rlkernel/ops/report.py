"""Which implementation computes each op on this machine, and why: the data that `rlkernel doctor` prints.

On a GPU it first certifies the schedules of a few common shapes, because only shapes that were called have a verdict.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rlkernel.contract.orders import ATTENTION_SPLIT
from rlkernel.kernels import build, select
from rlkernel.kernels.cuda import attention_fa3, fa3_library
from rlkernel.kernels.errors import BuildError, NoCompilerError
from rlkernel.ops.linear_logprob import linear_logprob

_HEADS = ((64, 16, 8), (96, 16, 8), (128, 16, 8), (128, 32, 8), (128, 28, 4), (192, 16, 8), (256, 16, 8))  # D, H, HK
_PREFILLS = ((2048, False), (8192, True))  # keys of the longest sequence, several splits: long prefill of 0.6B's heads
_SHAPES = tuple((m, n, k) for m in (1, 64, 2048) for n, k in ((4096, 1024), (1024, 3072)))  # [M, K] x [N, K]


def report(device: str) -> dict[str, Any]:
    """Compiler, implementations of all ops, and verdicts, as plain data.

    Args:
        device: "cpu" or "cuda".
    """
    compiler = build_error = None
    try:
        compiler = build.compiler()
        if device == "cpu":
            build.cpu_library()
    except NoCompilerError:
        pass
    except BuildError as error:
        build_error = str(error)
    if device == "cuda":
        schedules = _schedules()
    else:
        missing = "the device asked for is the CPU" if torch.cuda.is_available() else "no CUDA GPU"
        schedules = {"unavailable": missing, "uncertified": [], "unsupported": [], "rows": [], "verdicts": None}
    return {
        "compiler": compiler,
        "build_error": build_error,
        "cache": str(build.cache_dir()),
        "triton": _triton(),
        "ops": [_implementation(op, device) for op in select.declared()],
        "attention_fa3": _attention_fa3(device),
        "schedules": schedules,
    }


def _implementation(op: str, device: str) -> dict[str, str | None]:
    try:
        with warnings.catch_warnings():  # the row itself says that a reference is slow
            warnings.simplefilter("ignore", RuntimeWarning)
            choice = select.choose(op, device)
    except BuildError as error:
        return {"op": op, "implementation": None, "reason": str(error).splitlines()[0]}
    except select.NoImplementation as error:
        return {"op": op, "implementation": None, "reason": str(error)}
    return {"op": op, "implementation": choice.implementation, "reason": choice.reason}


def _triton() -> dict[str, Any] | None:
    """Triton's version, the measured one, whether kernels are launched directly, and a note; None without Triton."""
    try:
        import triton

        from rlkernel.kernels.triton import launch
    except ImportError:
        return None
    note = None
    if not triton.__version__.startswith(f"{launch.MEASURED}."):
        note = (
            f"Triton {triton.__version__} is not the measured {launch.MEASURED}: direct launches are off, so calls "
            "cost the host more, and no test or figure of rlkernel covers it; "
            f"pip install 'triton=={launch.MEASURED}.*'"
        )
    elif not launch.KNOWN:
        note = "direct launches are off, so calls cost the host more: Triton's launcher is known for CUDA only"
    return {"version": triton.__version__, "measured": launch.MEASURED, "direct": launch.KNOWN, "note": note}


def _attention_fa3(device: str) -> dict[str, Any]:
    """Verdicts on attention variant fa3 for common heads in bf16, or why the variant is unavailable."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    reason = fa3_library.unavailable(place)
    rows = []
    for d, heads, kv_heads in () if reason else _HEADS:
        index = -1 if place.index is None else place.index
        shape = attention_fa3.FA3Shape(index, torch.bfloat16, heads, kv_heads, d, attention_fa3.PAGE)
        (found,) = attention_fa3.verdict(shape).trials
        rows.append(
            {"shape": shape.describe(), "certified": found.certified, "reason": found.reason, "first": found.first}
        )
    return {"unavailable": reason, "rows": rows}


def _schedules() -> dict[str, Any]:
    """Verdicts on this GPU, after the certification of a few common shapes, or why cuBLASLt is unavailable."""
    from rlkernel.kernels import scheduled_op
    from rlkernel.kernels.cuda import attention, cublaslt, linear
    from rlkernel.kernels.verdicts import verdict_dir

    bf16 = torch.bfloat16
    reason = cublaslt.unavailable()
    for rows, n, k in _SHAPES:
        x, dy, w = (torch.randn(a, b, dtype=bf16, device="cuda") for a, b in ((rows, k), (rows, n), (n, k)))
        linear.linear.verdict(x, w, None, 1, 1, None)
        linear.linear_dgrad.verdict(dy, w, 1)
        linear.wgrad_chunk.verdict(torch.empty_like(w), dy, x, True)
        linear.wgrad_chunk.verdict(torch.zeros_like(w, dtype=torch.float32), dy, x, False)
    device = torch.device("cuda", torch.cuda.current_device())
    for span, several in _PREFILLS:
        heads = attention.AttentionShape(device.index, bf16, 16, 8, 128, ATTENTION_SPLIT, several, False, span)
        generator = torch.Generator(device).manual_seed(0)
        attention.prefill.verdict(*attention.sample(heads, attention.rows_of(heads)[0], "normal", generator))
    _train_a_head()
    scheduled = scheduled_op.scheduled_ops()
    return {
        "unavailable": reason,
        "uncertified": [
            {"op": op.spec.name, "shape": shape, "reason": why} for op in scheduled for shape, why in op.failures()
        ],
        "unsupported": [
            {"op": op.spec.name, "shape": shape, "schedules": [s.name for s in op.spec.schedules]}
            for op in scheduled
            for shape in op.unsupported()
        ],
        "rows": scheduled_op.report(device),
        "verdicts": str(verdict_dir()),
    }


def _train_a_head() -> None:
    """One forward and backward of linear_logprob, which certifies its products."""
    hidden, weight = (
        torch.randn(n, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (256, 8192)
    )
    targets = torch.zeros(len(hidden), dtype=torch.int64, device="cuda")
    linear_logprob(hidden, weight, targets).logp.sum().backward()
