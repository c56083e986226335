"""Every op under compute-sanitizer: memcheck, racecheck, initcheck over small and larger calls; writes sanitize.json.

Runs each tool on every op, forward and backward with all of its schedules, and on a planted error of the tool's kind. A
pass needs no errors in the ops and one in the planted kernel, so a tool that does not work on this host fails. Every
Triton kernel and every offered schedule must run (of those that match `SPELT`, one per op).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

from processes import Groups, exit_on_signals, pool_of
from results_io import own_cache, write_result

TRITON = ROOT / "rlkernel" / "kernels" / "triton"
TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*?(\d+) (?:error|hazard)")
PLANT, COPY, RAN = "planted error", "TMA stores", "RAN "
_COPY = "p[64 + threadIdx.x] = p[threadIdx.x];"
PLANTED = {
    "memcheck": ("p[(1 << 20) + threadIdx.x] = 1.0f;",),
    "racecheck": ("__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; p[threadIdx.x] = s[63 - threadIdx.x];",),
    "initcheck": (_COPY,),
    "TMA": (
        """__shared__ __align__(128) float s[64]; s[threadIdx.x] = 1.0f;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
          "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
          :: "l"(p), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");""",
        _COPY,
    ),
}
"""Kernels of 64 threads on 1024 uninitialised floats, with one error each. The last pair is correct: the first kernel
stores by TMA what the second reads."""
TMA_STORES = ("cublaslt", "hopper")
"""Groups of schedules that store by TMA, which initcheck does not see, so it takes their results for uninitialised."""
SPELT, ONE = re.compile(r"(:cublaslt\.)\d+x.*"), r"\1spelt out"
"""cuBLASLt's explicit algorithms count as one schedule per op, because they differ only inside cuBLASLt's kernel."""
_RACE, _AT = re.compile(r"Race reported between"), re.compile(r"access at (?:void )?(\w+)")


# ---- the calls -----------------------------------------------------------------------------------


def backward(outputs: Any, *leaves: Any) -> None:
    """Gradients of the outputs with respect to the leaves, with random upstream gradients."""
    import torch

    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.requires_grad]
    torch.autograd.grad(outputs, leaves, [torch.randn_like(out) for out in outputs], allow_unused=True)


def calls(device: str, dtype: Any, large: bool) -> dict[str, Callable[[], object]]:
    """Name and call of every op, forward and backward; `large` ones span several tiles in every dimension."""
    import torch

    from rlkernel import ops
    from rlkernel.contract.orders import DGRAD_WHOLE, EMBEDDING_WINDOW, LOGPROB_DGRAD_CHUNK, WGRAD_TOKENS
    from rlkernel.kernels import triton
    from rlkernel.kernels.symmetric_memory import BYTES, Workspace
    from rlkernel.ops.sample import filter_logits_

    t, c, v, heads, d = (512, 256, 4136, 4, 128) if large else (37, 64, 520, 2, 64)

    def leaf(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()

    def vector(n: int = t) -> Any:
        return torch.randn(n, device=device)

    def ids(high: int, n: int = t) -> Any:
        return torch.randint(0, high, (n,), device=device)

    # Tools take seconds for each cuBLASLt kernel, so there are few calls with little more than a tile per dimension.
    # N = 5128 and K = 136 are above and below the limits of the offered tiles, and N exceeds the shared memory of the
    # kernel for few rows.
    def linear() -> None:
        for m in (1, 130) if large else (16, 33):
            x, w = leaf(m, 136), leaf(5128, 136, scale=0.1)
            backward(ops.linear(x, w), x, w)

    def linear_options() -> None:
        x, w, b = leaf(t // 4, 128), leaf(264, 128, scale=0.1), leaf(264)
        backward(ops.linear(x, w, b, chunks=4, dgrad_chunks=2), x, w, b)
        backward(ops.linear(x, w, b, out_dtype=torch.float32), x, w, b)
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        backward(ops.linear(x, w), x, w)

    def linear_chunks() -> None:  # several chunks in both gradients: vocabulary entries, tokens
        for m, n in () if large else ((33, DGRAD_WHOLE + 8), (WGRAD_TOKENS + 12, 16)):
            x, w = leaf(m, 16), leaf(n, 16, scale=0.1)
            backward(ops.linear(x, w), x, w)

    # The tiles that the calls above do not reach: more than 2048 columns, few columns, a head.
    def linear_tiles() -> None:
        if large:
            ops.linear(leaf(33, 136).detach(), leaf(264, 136).detach())
            dgrad(16, 136, 2056)

    def linear_tiles_of_more_rows() -> None:
        for m in (33, 96, 130) if large else ():
            dgrad(m, 136, 2056)
        for m in (96, 130) if large else ():
            ops.linear(leaf(m, 136).detach(), leaf(2056, 136).detach())

    def linear_head() -> None:
        for m in (16, 65) if large else ():
            dgrad(m, DGRAD_WHOLE + 8, 16)

    def dgrad(m: int, n: int, k: int) -> None:
        torch.ops.rlkernel.linear_dgrad(leaf(m, n).detach(), leaf(n, k, scale=0.1).detach(), 1)

    def linear_logprob_dhidden() -> None:
        # cuBLASLt needs rows of dz as long as complete chunks of the input gradient: two parallel chunks, or one. The
        # number of cuBLASLt's algorithms depends on the shape.
        for t, c, chunks in ((80, 256, 2), (80, 256, 2), (96, 1024, 1)) if large else ():
            hidden, weight = leaf(t, c), leaf(chunks * LOGPROB_DGRAD_CHUNK, c, scale=0.1).detach()
            every = torch.arange(t, device=device)  # cuBLASLt is offered only with `rows`
            backward(ops.linear_logprob(hidden, weight, ids(99, t), rows=every).logp, hidden)
            torch.cuda.synchronize()

    def linear_logprob() -> None:
        # The Hopper kernel is slow under the tools: two clusters of tokens, five of entries, the last ones partial.
        t, c, v = (300, 136, 1032) if large else (37, 64, 520)
        hidden, weight, targets = leaf(t, c), leaf(v, c, scale=0.1), ids(v, t)
        kept = ops.pack_kept(torch.rand(t, v, device=device) < 0.7)
        temperature = torch.rand(t, device=device) + 0.5
        for options in ({}, {"temperature": temperature, "kept": kept}):
            scored = ops.linear_logprob(hidden, weight, targets, **options)
            backward((scored.logp, scored.entropy), hidden, weight)
            upstream = torch.where(torch.rand(t, device=device) < 0.5, 0.0, 1.0)
            upstream[: 2 * t // 3] = 0.0  # a prompt
            scored = ops.linear_logprob(hidden, weight, targets, **options)
            torch.autograd.grad(scored.logp, [hidden, weight], upstream)
        backward(ops.linear_logprob(hidden, weight, targets, keep_probs=True).logp, hidden, weight)
        rows = torch.arange(0, t, 2, device=device)
        backward(ops.linear_logprob(hidden, weight, targets[rows], rows=rows).logp, hidden, weight)
        # Below 768 channels the public op keeps no logits.
        scored = torch.ops.rlkernel.linear_logprob_logits(hidden, weight, targets, None, None, 512, False)
        backward(scored[0], hidden, weight)

    def logprob() -> None:
        for width in (v, v + 1):  # rows with and without 16-byte alignment
            logits = leaf(t, width)
            scored = ops.logprob(logits, ids(width), temperature=0.7)
            backward((scored.logp, scored.entropy), logits)
            kept = ops.pack_kept(torch.rand(t, width, device=device) < 0.7)
            backward(ops.logprob(logits, ids(width), kept=kept).logp, logits)
        for width, n in ((16392, 529), (65544, 257)) if large else ():  # one program per row; a partial block
            logits = leaf(n, width)
            for options in ({}, {"temperature": 0.7}):
                backward(ops.logprob(logits, ids(width, n), **options).logp, logits)

    def rms_norm() -> None:
        for width in (c, 1000, 4096):
            x, r, w = leaf(t, width), leaf(t, width), leaf(width)
            backward(ops.rms_norm(x, w, 1e-6), x, w)
            backward(ops.rms_norm(x, w, 1e-6, r), x, r, w)
        x, w = leaf(t, heads, d), leaf(d)
        backward(ops.rms_norm(x, w, 1e-6), x, w)

    def pointwise() -> None:
        gate_up = leaf(t, 6 * c)
        backward(ops.swiglu(gate_up), gate_up)
        q, k, table = leaf(t, heads, d), leaf(t, heads // 2, d), torch.randn(t, d, device=device)
        positions = torch.arange(t, device=device)
        backward(ops.rope(q, k, positions, table), q, k)
        scale = leaf(d).detach()
        ops.qk_norm_rope(q.detach(), k.detach(), scale, scale, 1e-6, positions, table)
        weight = leaf(v, c)
        backward(ops.embedding(ids(v // 8), weight), weight)
        backward(ops.embedding(ids(3, 6 * EMBEDDING_WINDOW + 5), weight), weight)  # tokens with many occurrences

    def attention() -> None:
        lengths = (t // 2, t // 4, 1, t - t // 2 - t // 4 - 1)
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device, dtype=torch.int32)
        for dim in (64, 128):
            q, k, val = leaf(t, heads, dim), leaf(t, heads // 2, dim), leaf(t, heads // 2, dim)
            for options in ({}, {"window": 33, "split": 128}):
                backward(ops.attention(q, k, val, cu, max_seqlen_q=max(lengths), **options)[0], q, k, val)
            page, batch, longest = 16, 3, 600 if large else 80
            pages = batch * -(-longest // page)
            cache = [torch.randn(pages, page, heads // 2, dim, device=device).to(dtype) for _ in range(2)]
            slots = torch.randperm(pages * page, device=device)[:t]
            ops.store_kv_(*cache, k.detach(), val.detach(), slots)
            table = torch.randperm(pages, device=device).to(torch.int32).view(batch, -1)
            lens = torch.tensor([longest, longest // 2, 5], device=device, dtype=torch.int32)
            for each in (1, 5):  # decode, and a chunk of a prompt
                cu_q = torch.arange(batch + 1, device=device, dtype=torch.int32) * each
                ops.paged_attention(
                    leaf(batch * each, heads, dim).detach(), *cache, table, cu_q, lens,
                    max_seqlen_q=each, max_seqlen_k=longest, split=256,
                )  # fmt: skip

    def attention_shared_prefix() -> None:  # the prefix ends inside a split, or at its end
        for shares in (192, 256):
            table = torch.randperm(60, device=device).to(torch.int32).view(3, 20)
            table[1, :16] = table[0, :16]
            cache = [torch.randn(60, 16, 1, 128, device=device).to(dtype) for _ in range(2)]
            int32 = lambda *values: torch.tensor(values, device=device, dtype=torch.int32)
            shared = ops.SharedPrefix(int32(0, 2), int32(shares, shares, 0), 2, 256)
            ops.paged_attention(
                leaf(3, 2, 128).detach(), *cache, table, int32(0, 1, 2, 3), int32(300, 257, 40), max_seqlen_q=1,
                max_seqlen_k=320, split=128, shared=shared,
            )  # fmt: skip

    def attention_prefill() -> None:  # a tile of few positions; one split per sequence, or several
        for dim, split in ((64, 2048), (128, 2048), (64, 128), (128, 128)) if large else ():
            cu_q, cu_k = (torch.tensor(n, device=device, dtype=torch.int32) for n in ([0, 130, 133], [0, 300, 370]))
            q, k, val = leaf(133, 8, dim), leaf(370, 1, dim), leaf(370, 1, dim)
            ops.attention(
                q.detach(), k.detach(), val.detach(), cu_q, cu_k, max_seqlen_q=130, max_seqlen_k=300, split=split
            )  # fmt: skip

    def attention_pages() -> None:  # so long that pages are gathered into contiguous memory first
        queries, keys, page = (512, 4096, 16) if large else (5, 80, 16)
        cache = [torch.randn(keys // page, page, 1, 128, device=device).to(dtype) for _ in range(2)]
        table = torch.randperm(keys // page, device=device).to(torch.int32).view(1, -1)
        cu, lens = (torch.tensor(n, device=device, dtype=torch.int32) for n in ([0, queries], [keys]))
        ops.paged_attention(
            leaf(queries, 2, 128).detach(), *cache, table, cu, lens, max_seqlen_q=queries, max_seqlen_k=keys
        )  # fmt: skip

    def losses() -> None:
        batch = 8
        cu = torch.linspace(0, t, batch + 1, device=device).to(torch.int32)
        mask = torch.rand(t, device=device) < 0.8
        for loss_type in ("grpo", "dapo", "cispo", "gspo", "reinforce"):
            logp, entropy = vector().requires_grad_(), vector().requires_grad_()
            found = ops.policy_loss(
                logp, vector(), vector(batch), cu, mask=mask, ref_logp=vector(), entropy=entropy,
                rollout_logp=vector(), loss_type=loss_type, kl_coef=0.1, entropy_coef=0.1, tis_cap=2.0,
            )  # fmt: skip
            backward(found.loss, logp, entropy)
        ops.group_advantages(vector(batch), 4)
        ops.group_advantages(vector(batch), 4, mode="batch")
        ops.gae(vector(), vector(), cu, 0.99, 0.95)

    def optimizer() -> None:
        shapes = ((v, c), (c,), (3,), (1025,))
        tensors = lambda: [torch.randn(*shape, device=device) for shape in shapes]
        masters, grads, squares = tensors(), tensors(), [x.square() for x in tensors()]
        found = ops.grad_norm(grads, max_norm=1.0)
        params = [m.to(dtype) for m in masters] if dtype != torch.float32 else masters
        ops.adamw_(
            params, grads, tensors(), squares, masters=masters, lr=1e-3, step=1, scale=found.scale, zero_grad=True
        )

    def sample() -> None:
        n = 8
        full = lambda value, kind: torch.full((n,), value, device=device, dtype=kind)
        filters = {
            "top_k": full(50, torch.int32),
            "top_p": full(0.9, torch.float32),
            "min_p": full(0.01, torch.float32),
        }
        logits = torch.randn(n, v, device=device)
        for options in ({}, filters, {"top_p": filters["top_p"]}):
            ops.sample(
                logits, ids(99, n), ids(99, n), temperature=full(0.8, torch.float32), return_full=True, **options
            )  # fmt: skip
            filter_logits_(logits.clone(), full(0.8, torch.float32), **options)

    def all_reduce() -> None:
        # One rank, because the tools run kernels one after another and those of several ranks wait for each other.
        if device != "cuda":
            return
        buffer = torch.zeros(BYTES, dtype=torch.uint8, device=device)
        workspace = Workspace(buffer, torch.tensor([buffer.data_ptr()], device=device), 0)
        parts, bias = torch.randn(4, t * c, device=device), leaf(c).detach()
        triton.all_reduce.add_ranks(parts, bias, dtype, c, 0)
        for most in (triton.all_reduce.ONE_SHOT_BYTES, -1):
            with mock.patch.object(triton.all_reduce, "ONE_SHOT_BYTES", most):
                triton.all_reduce.all_reduce(parts[0], bias, dtype, c, workspace)

    found = (linear, linear_options, linear_chunks, linear_tiles, linear_tiles_of_more_rows, linear_head,
             linear_logprob, linear_logprob_dhidden, logprob, rms_norm, pointwise, attention, attention_prefill,
             attention_pages, attention_shared_prefix, losses, optimizer, sample,
             all_reduce)  # fmt: skip
    return {call.__name__: call for call in found}


def every_schedule() -> set[str]:
    """Makes every op with schedules run its anchor and then each schedule, without certification.

    Returns a set to which the names of the schedules that ran are added.
    """
    import torch

    from rlkernel.kernels.scheduled_op import ScheduledOp

    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 1)

    names: set[str] = set()

    @functools.cache
    def bound(op: ScheduledOp, key: Any) -> dict[str, Callable[..., Any]]:
        found = {}
        for schedule in op.spec.schedules:
            if schedule.supports(key):
                with contextlib.suppress(RuntimeError):  # cuBLASLt has fewer algorithms for some shapes
                    found[f"{op.spec.name}:{schedule.name}"] = schedule.bind(key)
        return found

    def first(self: ScheduledOp, key: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = self.spec.anchor(*args)
            fresh = inspect.signature(self.spec.anchor).bind(*args).arguments.get("fresh", False)
            for name, schedule in bound(self, self.spec.shape(*args)).items():
                names.add(name)
                own = list(args)
                group = name.split(":", 1)[1].split(".", 1)[0]
                for i in self.spec.mutates:  # written by the anchor: pass fresh memory or a copy
                    if isinstance(own[i], torch.Tensor):
                        own[i] = torch.empty_like(own[i]) if fresh else own[i].clone()
                        if fresh and group == "cublaslt":  # torch rounds its sum afterwards
                            own[i].fill_(float("nan"))
                # initcheck does not see what TMA has stored in memory that the schedule allocates and reads back.
                with mock.patch.object(torch, "empty", filled if group in TMA_STORES else empty):
                    schedule(*own)
            return found

        return run

    ScheduledOp._choose = first  # type: ignore[method-assign]
    return names


def offered(capability: tuple[int, int]) -> set[str]:
    """Names of all schedules offered for a compute capability, with those that match `SPELT` merged."""
    from rlkernel.kernels.cuda import attention, linear, linear_logprob
    from rlkernel.kernels.scheduled_op import ScheduledOp

    groups = () if capability == (9, 0) else ("hopper",)
    modules = (attention, linear, linear_logprob)
    ops = [op for module in modules for op in vars(module).values() if isinstance(op, ScheduledOp)]
    names = {f"{op.spec.name}:{s.name}" for op in ops for s in op.spec.schedules}
    names = {SPELT.sub(ONE, name) for name in names if capability == (9, 0) or not SPELT.search(name)}
    return {name for name in names if name.split(":")[1].split(".")[0] not in groups}


def launched() -> set[str]:
    """Returns a set to which the names of all Triton kernels launched from now on are added."""
    from triton.runtime.jit import JITFunction

    names: set[str] = set()
    run = JITFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    JITFunction.run = recorded  # type: ignore[method-assign]
    return names


def make_calls(only: list[str]) -> None:
    """Runs the calls and prints one line with the Triton kernels and schedules that ran."""
    import torch

    kernels, schedules = launched(), every_schedule()
    torch.manual_seed(0)
    # Run backward in this thread: autograd's threads may still free Python objects when the interpreter exits, which
    # aborts it ("terminate called without an active exception").
    torch.autograd.set_multithreading_enabled(False)
    for dtype, large in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        for name, call in calls("cuda", dtype, large).items():
            if not only or name in only:
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                size = "large" if large else "small"
                print(f"{name} {dtype} {size}: {time.perf_counter() - begin:.1f} s", flush=True)
    print(RAN + json.dumps({"kernels": sorted(kernels), "schedules": sorted(schedules)}), flush=True)


def plant(name: str) -> int:
    """Launches the kernels of `PLANTED[name]` in order."""
    import torch

    p = torch.empty(1024, device="cuda")
    for body in PLANTED[name]:
        kernel = torch.cuda._compile_kernel(f'extern "C" __global__ void planted(float* p) {{ {body} }}', "planted")
        kernel((1, 1, 1), (64, 1, 1), (p,))
    torch.cuda.synchronize()
    return 0


# ---- the tools -----------------------------------------------------------------------------------


def sanitizer() -> str | None:
    """Path of compute-sanitizer, from PATH or the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.is_file() else None)


groups = Groups()


def start(arguments: list[str], limit: float, tool: tuple[str, ...] = ()) -> tuple[str, int | None, float]:
    """Runs this script under a tool; returns output, exit status (None after `limit` seconds) and seconds."""
    # Without torch's caching allocator every tensor is a separate allocation, so out-of-bounds reads are detected.
    environment = {
        **os.environ, **own_cache("sanitize"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    begin = time.perf_counter()
    command = [*tool, sys.executable, str(Path(__file__).resolve()), *arguments]
    status = None
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        # Groups kills the process under the tool too, which would otherwise stay on the GPU.
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = groups.run(command, limit, env=environment, stdout=out, stderr=subprocess.STDOUT)
        seconds = time.perf_counter() - begin
        out.seek(0)
        return out.read(), status, seconds


def races_in_cublas(output: str) -> int:
    """Number of racecheck reports with both accesses in cuBLASLt's kernels on Hopper (`nvjet_...`).

    The tool does not know their barriers. Both accesses are in one kernel's shared memory, which no argument of ours
    reaches, so these reports are counted separately.
    """
    found = [set(_AT.findall(report.split("Race reported", 1)[0])) for report in _RACE.split(output)[1:]]
    return sum(bool(kernels) and all(name.startswith("nvjet_") for name in kernels) for kernels in found)


def check(program: str, tool: str, what: str, limit: float) -> dict[str, Any]:
    """Runs one tool on one call or planted kernel; errors is None if the tool gave no verdict."""
    planted = {PLANT: tool, COPY: "TMA"}.get(what)
    arguments = ["--plant", planted] if planted else ["--calls", "--only", what]
    command = (
        program, "--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no",
        "--launch-timeout", "120",  # seconds; with many jobs Python may need more than the default of 10 to start
        "--print-limit", "500" if tool == "racecheck" else "5",
    )  # fmt: skip
    output, status, seconds = start(arguments, limit, command)
    summary = SUMMARY.findall(output)
    errors = int(summary[-1]) if summary and status is not None else None
    row = {"tool": tool, "what": what, "errors": errors, "exit_status": status, "seconds": round(seconds, 1)}
    false = races_in_cublas(output) if tool == "racecheck" else 0
    if errors is not None and false:
        row |= {"errors": errors - false, "in_cublas": false}
    more = f"  ({false} more in_cublas)" if false else ""
    print(f"{tool:10} {what:16} errors {row['errors']}{more}  exit {status}  {seconds:.0f} s", flush=True)
    if not passed(row):
        print("\n".join(line[:200] for line in output.splitlines()[-40:]), flush=True)
    return row


def passed(row: dict[str, Any]) -> bool:
    """A call needs 0 errors and exit status 0, a planted error must be found, and the TMA stores need any verdict."""
    if row["what"] == PLANT:
        return bool(row["errors"])
    if row["what"] == COPY:
        return row["errors"] is not None
    return row["errors"] == 0 and row["exit_status"] == 0


def main() -> int:
    """Returns 0 if every tool worked and found no errors, and every kernel and every offered schedule ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--only", nargs="*", default=[], help="names of calls, as printed")
    parser.add_argument("--limit", type=float, default=300, help="time limit of a tool for one call, in seconds")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--calls", action="store_true", help="run the calls in this process, without a tool")
    parser.add_argument("--plant", choices=tuple(PLANTED), help="launch the planted kernels of this name")
    args = parser.parse_args()
    if args.plant:
        return plant(args.plant)
    if args.calls:
        make_calls(args.only)
        return 0
    import torch

    program = sanitizer()
    if program is None or not torch.cuda.is_available():
        reason = "torch sees no CUDA GPU" if program else "compute-sanitizer is not on PATH or in CUDA_HOME"
        print(f"sanitize: {reason}")
        return 1
    import aot

    names = args.only or list(calls("cpu", torch.float32, large=False))
    ran: dict[str, set[str]] = {"kernels": set(), "schedules": set()}
    with pool_of(args.jobs, groups) as pool:
        # Kernels are compiled before the tools run, because the tools would also trace the compiler.
        for name, (output, status, seconds) in zip(
            names, pool.map(lambda name: start(["--calls", "--only", name], args.limit), names), strict=True
        ):
            print(f"no tool    {name:16} exit {status}  {seconds:.0f} s", flush=True)
            if status != 0:
                print("\n".join(output.splitlines()[-40:]))
                print(f"sanitize: {name} fails without a tool")
                return 1
            for key, found in json.loads(output.rsplit(RAN, 1)[1]).items():
                ran[key] |= set(found)
        work = [(tool, what) for what in (PLANT, *names) for tool in args.tools]
        work += [(tool, COPY) for tool in args.tools if tool == "initcheck"]
        slow_first = sorted(work, key=lambda item: item[0] != "racecheck")
        rows = list(pool.map(lambda item: check(program, *item, args.limit), slow_first))
    for row in rows:
        if row["errors"] is None:  # no verdict, perhaps because the host was busy: try once more, alone
            row.update(check(program, row["tool"], row["what"], args.limit), tries=2)
    rows.sort(key=lambda row: work.index((row["tool"], row["what"])))
    wanted = {variant.kernel.fn.__name__ for variant in aot.variants()} | offered(torch.cuda.get_device_capability())
    left = sorted(wanted - ran["kernels"] - {SPELT.sub(ONE, name) for name in ran["schedules"]})
    if left and not args.only:
        print(f"sanitize: no call launches {', '.join(left)}")
    good = all(map(passed, rows)) and (not left or bool(args.only))
    more = {key: sorted(found) for key, found in ran.items()}
    print(f"wrote {write_result('sanitize', rows, passed=good, not_launched=left, **more)}")
    return int(not good)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
