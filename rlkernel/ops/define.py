"""Registers ops with `torch.library`, and calls their kernels without torch's dispatcher where that is possible.

torch's dispatcher runs an op's Python three times (autograd, its redispatch, the kernel), which takes longer than the
kernel of a small batch. In plain eager mode, where no mode or transform has to see the op, the functions are called
directly: `call_on_one_device` calls `run_kernel`, which calls the function in `rlkernel/kernels/<implementation>` that
`select.choose` returns. With gradients, the `autograd.Function` of `_autograd_function` comes between the first two.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rlkernel.kernels import select
from rlkernel.ops.autograd import (
    MAIN_GRAD_UNSEEN,
    bump_versions,
    has_main_grad,
    once_differentiable,
    refuse_gradient,
    unbatched,
)
from rlkernel.ops.checks import check_dense, check_flag, device_error

KernelImport = Callable[[], Callable[..., Any]]
"""Imports a module of `rlkernel/kernels` and returns its function."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose memory a kernel can read without the dispatcher."""

_GPU_IMPLEMENTATIONS = ("cuda", "triton")
_LIBRARY = torch.library.Library("rlkernel", "DEF")
_kernels: dict[str, Callable[[str], Callable[..., Any]]] = {}  # op -> device type -> the op's kernel
_reference_lock = threading.RLock()  # taken while torch's default dtype, a setting of the process, is fp32

# Looked up once, because a few of these lookups take as long as the kernel of a small batch.
_AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
_profiled, _transformed = torch._C._autograd._profiler_enabled, torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: KernelImport | None = None,
    cpu: KernelImport | None = None,
    triton: KernelImport | None = None,
    cuda: KernelImport | None = None,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    differentiable_twice: bool = False,
    for_backward: int = 0,
    inputs: Callable[[tuple[Any, ...]], Any] | None = None,
    compute: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers `rlkernel::<schema>` and returns a function that calls it and raises for tensors on several devices.

    Args:
        schema: torch schema without the namespace, `name(Tensor x, ...) -> Tensor`.
        fake: shapes and dtypes of the result, for tracing.
        reference, cpu, triton, cuda: import that folder of `rlkernel/kernels` and return the op's function in it. Every
            op has the first three; `cuda` has the ops with certified schedules.
        setup_context, backward: autograd, as in `torch.library.register_autograd`.
        differentiable_twice: whether `backward` itself consists of differentiable ops; else a second derivative raises.
        for_backward: number of trailing arguments that only `setup_context` reads; kernels do not get them.
        inputs: builds a NamedTuple from the op's arguments, which kernels then get as their only argument.
        compute: a function that computes the op on every device, instead of the four implementations.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)

    def kernel_for(device: str) -> Callable[..., Any]:
        if compute is not None:
            return compute

        def run_kernel(*args: Any) -> Any:
            choice = select.choose(name, device)
            if for_backward:
                args = args[:-for_backward]
            given = args if inputs is None else (inputs(args),)
            try:
                if choice.implementation == "reference":
                    with _torch_defaults(args):
                        return choice.fn(*given)
                return choice.fn(*given)
            except RuntimeError:  # checked after the failure, because checking every tensor of every call costs time
                check_dense(name, names, args)
                raise

        return run_kernel

    if compute is None:
        select.declare(name, {"reference": reference, "cpu": cpu, "triton": triton, "cuda": cuda})
        _kernels[name] = kernel_for
    kernels = {"cpu": kernel_for("cpu"), "cuda": kernel_for("cuda")}
    _LIBRARY.impl(name, kernels["cpu"], "CPU")
    _LIBRARY.impl(name, kernels["cuda"], "CUDA")
    torch.library.register_fake(f"rlkernel::{name}", fake, lib=_LIBRARY)
    autograd_apply: Callable[..., Any] | None = None
    if backward is not None:
        once = unbatched(name, backward) if differentiable_twice else once_differentiable(name, backward)
        torch.library.register_autograd(f"rlkernel::{name}", once, setup_context=setup_context, lib=_LIBRARY)
        if setup_context is not None:
            autograd_apply = _autograd_function(name, kernels, setup_context, once)
    overload = getattr(torch.ops.rlkernel, name).default
    names = tuple(a.name for a in overload._schema.arguments)
    written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info and a.alias_info.is_write]
    on_cpu, on_cuda = kernels["cpu"], kernels["cuda"]

    def call_on_one_device(*args: Any) -> Any:
        plain = not _is_observed()
        recording = plain and _is_grad_enabled()
        first, device, differentiable = None, None, False
        for arg in args:
            if isinstance(arg, Tensor):
                if first is None:
                    first, device = arg, arg.device
                elif arg.device != device:
                    raise device_error(name, device, arg.device)  # type: ignore[arg-type]
                if plain:  # the dispatcher resolves lazy negation and zero tensors, whose memory a kernel cannot read
                    plain = type(arg) in PLAIN and not arg.is_neg() and not arg._is_zerotensor()
                    differentiable = differentiable or (recording and arg.requires_grad)
            elif isinstance(arg, (list, tuple)):
                plain = False
        run = None
        if plain and first is not None:
            run = on_cpu if first.is_cpu else on_cuda if first.is_cuda else None  # device.type makes a string
        if run is None:
            _refuse_lost_gradients(name, names, args, backward is not None)
            output = overload(*args)
        elif differentiable:
            if backward is None:
                refuse_gradient(name, names, args)
            output = overload(*args) if autograd_apply is None else autograd_apply(*args)
        else:
            with _AutoDispatchBelowAutograd():
                output = run(*args)
        if written and not torch.compiler.is_compiling():  # the dispatcher does not do this for ops in Python
            bump_versions(*(args[i] for i in written if i < len(args) and isinstance(args[i], Tensor)))
        return output

    return call_on_one_device


def register_backend(device: str, functions: Mapping[str, Callable[..., Any]], *, reference: bool = False) -> None:
    """Makes another package's functions compute the ops on a device type that rlkernel has no kernels for.

    Argument checks, autograd and fakes remain those of the ops. docs/accelerators.md lists the functions' obligations.

    Args:
        device: torch's name of the device type without an index, such as "xpu"; not "cpu" or "cuda".
        functions: name of a torch op (`rlkernel.kernels.select.declared()` lists them) -> a function with the arguments
            and results of the function of that name in `rlkernel/kernels/reference`.
        reference: whether the reference, which runs on the device's torch kernels, computes the ops that `functions`
            lacks. It is slow, for bring-up only. If False, these ops raise `select.NoImplementation`.

    Raises:
        ValueError: the device type has implementations already, or a name is not that of an op.
        TypeError: a function cannot be called. RuntimeError: torch does not know the device type.
    """
    if torch.device(device).type != device:
        raise ValueError(f"register_backend: device={device!r} has an index; expected a device type, such as 'xpu'")
    check_flag("register_backend", "reference", reference)
    select.register(device, functions, reference)

    def below_autograd(run: Callable[..., Any]) -> Callable[..., Any]:  # torch's own ops in a kernel record nothing
        def run_below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return run(*args)

        return run_below

    for name, kernel_for in _kernels.items():
        torch.library.impl(f"rlkernel::{name}", device, below_autograd(kernel_for(device)), lib=_LIBRARY)


def gpu_kernel(op: str, device: str) -> Callable[..., Any] | None:
    """The GPU kernel that computes an op on a device type, for callers that pass arguments which the op does not have.
    None if a C++ kernel, the reference or another package computes the op."""
    choice = select.choose(op, device)
    return choice.fn if choice.implementation in _GPU_IMPLEMENTATIONS else None


def is_forced() -> bool:
    """Whether a block of `rlkernel.kernels.select.use` forces one implementation on every op."""
    return select.forced()


def _is_observed() -> bool:
    """Whether tracing, a dispatch mode, a functorch transform or the profiler must see the op."""
    return (
        torch.compiler.is_compiling() or _modes() > 0 or _transformed() or _profiled() or forward_ad._current_level >= 0
    )


def _refuse_lost_gradients(op: str, names: tuple[str, ...], args: tuple[Any, ...], differentiable: bool) -> None:
    """Raises where a transform would silently lose a gradient.

    torch gives ops without a forward derivative a tangent of zero, and a compiled backward does not see an attribute of
    a parameter.
    """
    if not differentiable and torch.is_grad_enabled():
        refuse_gradient(op, names, args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.compiler.is_compiling():
        if differentiable and has_main_grad(*tensors):  # under torch.export and the like: see `outside_graph`
            raise RuntimeError(f"{op}: {MAIN_GRAD_UNSEEN}")
    elif forward_ad._current_level >= 0:
        for a in tensors:
            if forward_ad.unpack_dual(a).tangent is not None:
                raise NotImplementedError(f"{op}: there is no forward-mode derivative; use reverse mode (backward)")
    elif differentiable and torch.is_grad_enabled() and any(map(torch._C._functorch.is_gradtrackingtensor, tensors)):
        raise NotImplementedError(f"{op}: torch.func has no gradient of it; use torch.autograd.grad or backward")


def _autograd_function(
    name: str, kernels: dict[str, Callable[..., Any]], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`apply` of an `autograd.Function` equal to the one that `torch.library.register_autograd` makes."""

    def forward(ctx: Any, *args: Any) -> Any:
        cpu = next(a.is_cpu for a in args if isinstance(a, Tensor))
        with _AutoDispatchBelowAutograd():
            output = kernels["cpu" if cpu else "cuda"](*args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    apply: Callable[..., Any] = function.apply
    return apply


@contextlib.contextmanager
def _torch_defaults(args: tuple[Any, ...]) -> Iterator[None]:
    """Sets torch's default dtype to fp32 and its default device to that of `args`, because the reference relies on
    both."""
    flat = (a[0] if isinstance(a, (list, tuple)) and a else a for a in args)
    device = next(a.device for a in flat if isinstance(a, Tensor))
    with _reference_lock, device:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
