"""`rlkernel doctor`: this machine, which implementation each op uses and why, on CUDA what is certified."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADS = ((64, 16, 8), (96, 16, 8), (128, 16, 8), (128, 32, 8), (128, 28, 4), (192, 16, 8), (256, 16, 8))  # D, H, HK
_PREFILLS = ((2048, False), (8192, True))  # keys of the longest sequence, several splits: long prefill of 0.6B's heads
_SCORED = (151936,)  # vocabularies whose logits are scored
_NORMS = (1024, 4096)  # channels of an rms_norm with a residual, whose gradients are asked for
_LOSSES = ((1 << 20, 1 << 10),)  # tokens of a policy_loss, and of a sequence on average
_SHAPES = tuple((m, n, k) for m in (1, 64, 2048) for n, k in ((4096, 1024), (1024, 3072)))  # [M, K] x [N, K]


def add_parser(subparsers: Any) -> None:
    """Adds the `doctor` command."""
    parser = subparsers.add_parser("doctor", help="show the machine and which implementation each op uses, and why")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if there is a GPU")


def examine(device: str | None = None) -> dict[str, Any]:
    """Facts on the machine and the chosen implementation of every op, as plain data.

    Args:
        device: "cpu" or "cuda"; default cuda if there is a GPU.
    """
    import torch

    import rlkernel
    from rlkernel import ops  # noqa: F401  (declares the ops)
    from rlkernel.contract import contract_id
    from rlkernel.environment import environment
    from rlkernel.kernels import build, select
    from rlkernel.kernels.errors import BuildError, NoCompilerError

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, str | None]] = []
    build_error = compiler = None
    try:
        compiler = build.compiler()
        if device == "cpu":
            build.cpu_library()
    except NoCompilerError:
        pass
    except BuildError as error:
        build_error = str(error)
    for op in select.declared():
        try:
            with warnings.catch_warnings():  # that the reference is slow stands in the row
                warnings.simplefilter("ignore", RuntimeWarning)
                choice = select.choose(op, device)
            rows.append({"op": op, "implementation": choice.implementation, "reason": choice.reason})
        except BuildError as error:
            rows.append({"op": op, "implementation": None, "reason": str(error).splitlines()[0]})
        except select.NoImplementation as error:
            rows.append({"op": op, "implementation": None, "reason": str(error)})
    return {
        "rlkernel": rlkernel.__version__,
        "contract": contract_id(),
        "device": device,
        "environment": environment(),
        "compiler": compiler,
        "build_error": build_error,
        "cache": str(build.cache_dir()),
        "threads": torch.get_num_threads(),
        "triton": _triton(),
        "ops": rows,
        "attention_fa3": _attention_fa3(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else None,
        "schedules": _schedules()
        if device == "cuda"
        else {
            "unavailable": "no CUDA GPU" if not torch.cuda.is_available() else "the device asked for is the CPU",
            "uncertified": [], "unsupported": [], "rows": [], "verdicts": None,
        },
    }  # fmt: skip


def summary(found: dict[str, Any]) -> str:
    """One line on what `examine` found: that all is well, or the first problem with its remedy."""
    place = "GPU" if found["device"] == "cuda" else "CPU"
    ops, name = found["ops"], f"rlkernel {found['rlkernel']}"
    absent = [row for row in ops if row["implementation"] is None]
    slow = [row for row in ops if row["implementation"] == "reference" and found["device"] == "cpu"]
    if absent:
        remedy = "; name another compiler in CXX" if "\n" in (found["build_error"] or "") else ""  # that is its log
        return f"{name}: {len(absent)} of {len(ops)} ops cannot run on this {place}: {absent[0]['reason']}{remedy}"
    if slow and found["compiler"] is None:
        return (
            f"{name}: {len(slow)} of {len(ops)} ops run the readable reference on this CPU, about a thousand times "
            f"slower than compiled kernels: {slow[0]['reason']}"
        )
    if place == "CPU":
        return f"{name}: all {len(ops)} ops run compiled C++ kernels on this CPU; nothing to do."
    lost = [found["triton"] and found["triton"]["note"], found["schedules"]["unavailable"]]
    if any(lost):
        return (
            f"{name}: all {len(ops)} ops run on this GPU, some slower than they could: {'; '.join(filter(None, lost))}"
        )
    return f"{name}: all {len(ops)} ops run kernels for this GPU; nothing to do."


def _triton() -> dict[str, Any] | None:
    """Triton's version, the measured one, whether kernels are launched directly, and what to know; None without one."""
    try:
        import triton

        from rlkernel.kernels.triton import launch
    except ImportError:
        return None
    note = None
    if not triton.__version__.startswith(f"{launch.MEASURED}."):
        note = (
            f"Triton {triton.__version__} is not the measured {launch.MEASURED}: direct launches and attention's Gluon "
            "kernel for long prefill are off, so calls cost the host more, and no test or figure of ours is of it; "
            f"pip install 'triton=={launch.MEASURED}.*'"
        )
    elif not launch.KNOWN:
        note = "direct launches are off, calls cost the host more: Triton's launcher is known for CUDA alone"
    return {"version": triton.__version__, "measured": launch.MEASURED, "direct": launch.KNOWN, "note": note}


def _attention_fa3(device: str) -> dict[str, Any]:
    """Verdicts on attention variant fa3 for common heads in bf16, certified now where there are none; why none."""
    import torch

    from rlkernel.kernels.cuda import attention_fa3

    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    reason = attention_fa3.unavailable(place)
    rows = []
    for d, heads, kv_heads in () if reason else _HEADS:
        index = -1 if place.index is None else place.index
        shape = attention_fa3.Shape(index, torch.bfloat16, heads, kv_heads, d, attention_fa3.PAGE)
        found = attention_fa3.verdict(shape)
        rows.append({
            "shape": shape.describe(), "certified": found.certified, "reason": found.reason, "calls": found.calls,
            "differing": found.differing, "first": found.first,
        })  # fmt: skip
    return {"unavailable": reason, "rows": rows}


def _schedules() -> dict[str, Any]:
    """Verdicts on this GPU, after the certification of a few common shapes; why there are none, where that is so."""
    import torch

    from rlkernel.contract.orders import ATTENTION_SPLIT
    from rlkernel.kernels import schedule
    from rlkernel.kernels.cuda import attention, cublaslt, linear, logprob, policy_loss, rms_norm
    from rlkernel.kernels.verdicts import verdict_dir

    folder = verdict_dir()
    before = _written(folder)
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
        heads = attention.Shape(device.index, bf16, 16, 8, 128, ATTENTION_SPLIT, several, False, span)
        generator = torch.Generator(device).manual_seed(0)
        attention.prefill.verdict(*attention.sample(heads, attention.rows_of(heads)[0], "normal", generator))
    for vocab in _SCORED:
        logprob.logprob.verdict_of(logprob.Shape(device.index, bf16, vocab, logprob.MANY, True, False, False))
    for channels in _NORMS:
        rms_norm.gradients.verdict_of(rms_norm.Shape(device.index, bf16, channels, True, rms_norm.FEW))
    for tokens, length in _LOSSES:
        policy_loss.policy_loss.verdict_of(policy_loss.Shape(device.index, True, True, True, tokens, length))
    _train_a_head()
    uncertified = [
        {"op": op.family.op, "shape": shape, "reason": why}
        for op in schedule.scheduled_ops()
        for shape, why in op.failures()
    ]
    unsupported = [
        {"op": op.family.op, "shape": shape, "schedules": [s.name for s in op.family.schedules]}
        for op in schedule.scheduled_ops()
        for shape in op.unsupported()
    ]
    verdicts = schedule.report(device)
    used = sum(len(op.verdicts()) for op in schedule.scheduled_ops())
    made = len(_written(folder).items() - before.items())
    return {
        "unavailable": reason, "uncertified": uncertified, "unsupported": unsupported, "rows": verdicts,
        "verdicts": {"folder": str(folder), "made": made, "read": max(0, used - made)},
    }  # fmt: skip


def _written(folder: Path) -> dict[str, int]:
    """Files of verdicts, each with the time at which it was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def _train_a_head() -> None:
    """One forward and backward of linear_logprob, which certifies its products."""
    import torch

    from rlkernel import ops

    hidden, weight = (
        torch.randn(n, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (256, 8192)
    )
    targets = torch.zeros(len(hidden), dtype=torch.int64, device="cuda")
    ops.linear_logprob(hidden, weight, targets).logp.sum().backward()


def _difference(first: dict[str, Any] | None, against: str = "anchor") -> str:
    if first is None:
        return ""
    of = f"result {first['result']}, " if "result" in first else ""
    where = (
        f"; {first['kind']}, {first['rows']} rows: {of}at {first['index']} {first['actual']}, "
        f"{against} {first['expected']}"
    )
    return f"{where}, {first['mismatches']} of {first['elements']} differ"


def _shape(shape: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items() if value is not False)


def _fa3_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["unavailable"]:
        yield f"attention variant fa3: not available: {found['unavailable']}"
    for row in found["rows"]:
        verdict = "certified" if row["certified"] else "refused"
        difference = _difference(row["first"], "dense")
        yield f"attention variant fa3 {_shape(row['shape'])}: {verdict}; {row['reason']}{difference}"


def _schedule_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["unavailable"]:
        what = "cuBLASLt's schedules are off" if found["verdicts"] else "no certified schedules"
        yield f"{what}: {found['unavailable']}"
    if found["verdicts"]:
        made, read = found["verdicts"]["made"], found["verdicts"]["read"]
        yield f"schedules: {made} verdicts made now, {read} read from {found['verdicts']['folder']}"
    for row in found["uncertified"]:
        yield f"not certified: {row['op']} {row['shape']}: {row['reason']}"
    for row in found["unsupported"]:
        yield f"{row['op']} {_shape(row['shape'])}: anchor; not for this GPU or shape: {', '.join(row['schedules'])}"
    last = None
    for row in found["rows"]:  # lines, because a table of six columns is wider than a terminal
        heading = f"{row['op']} {_shape(row['shape'])}"
        if heading != last:
            last = heading
            yield heading
        verdict = ("certified" if row["certified"] else "refused") + (", chosen" if row["chosen"] else "")
        speed = "" if row["speed"] is None else f"{row['speed']:.2f}x anchor, {row['ms']:.4f} ms; "
        yield f"  {row['schedule']}: {verdict}; {speed}{row['reason']}{_difference(row['first'])}"


def run(args: argparse.Namespace) -> int:
    """Prints a summary and the table, or JSON with --json. Exit status 1 if an op has no implementation."""
    from rlkernel.cli.errors import UserError

    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("doctor: --device cuda, but torch sees no CUDA GPU; leave the option out or use cpu")
    found = examine(args.device)
    found = {"summary": summary(found), **found}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if all(row["implementation"] for row in found["ops"]) else 1


def _print(found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rlkernel.training.display import Screen

    console = Screen()

    def say(line: str) -> None:
        console.print(line, markup=False)  # paths may look like rich's markup

    chip = f", compute capability {found['capability']}" if found["capability"] else ""
    say(found["summary"])
    say(f"contract {found['contract']}, {found['device']}: {found['environment']['hardware']}{chip}")
    say(f"compiler {found['compiler']}, cache {found['cache']}, {found['threads']} threads")
    if found["triton"] and found["triton"]["note"]:
        say(found["triton"]["note"])
    table = Table("op", "implementation", "why")
    for row in found["ops"]:
        table.add_row(row["op"], row["implementation"] or "none", escape(row["reason"]))
    console.print(table)
    if found["build_error"]:
        print(found["build_error"])
    for line in (*_fa3_lines(found["attention_fa3"]), *_schedule_lines(found["schedules"])):
        say(line)
