"""Registration of ops with `torch.library`, the direct call past torch's dispatcher, and the choice of a kernel.

torch's dispatcher runs an op's Python three times (autograd, its redispatch, the kernel), which takes longer than the
kernel of a small batch. In plain eager mode, where nothing has to see the op, the same functions are called directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
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

Kernel = Callable[[], Callable[..., Any]]
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose memory a kernel can read without the dispatcher."""

_GPU_IMPLEMENTATIONS = ("cuda", "triton")
_LIBRARY = torch.library.Library("rlkernel", "DEF")
_kernels: dict[str, Callable[[str], Callable[..., Any]]] = {}  # op -> its kernel for a device type
_reference_lock = threading.RLock()  # held while torch's default dtype, a setting of the process, is fp32

# Looked up once: the kernel of a small batch takes no longer than a few of these lookups.
_AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
_profiled, _transformed = torch._C._autograd._profiler_enabled, torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Kernel | None = None,
    cpu: Kernel | None = None,
    triton: Kernel | None = None,
    cuda: Kernel | None = None,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    differentiable_twice: bool = False,
    for_backward: int = 0,
    inputs: Callable[[tuple[Any, ...]], Any] | None = None,
    compute: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers `rlkernel::<schema>` and returns a function that calls it with tensors of one device.

    Args:
        schema: torch schema without the namespace, `name(Tensor x, ...) -> Tensor`.
        fake: shapes and dtypes of the result, for tracing.
        reference, cpu, triton, cuda: return the op's function in that folder of `rlkernel/kernels`, which is imported
            by this call. Every op has the first three; `cuda` holds ops with certified schedules.
        setup_context, backward: autograd, as in `torch.library.register_autograd`.
        differentiable_twice: whether `backward` itself consists of differentiable ops; else a second derivative raises.
        for_backward: number of trailing arguments that only `setup_context` reads; kernels do not get them.
        inputs: builds a NamedTuple from the op's arguments, which kernels then get as their only argument.
        compute: the function that computes the op on every device, in place of those four.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)

    def kernel_for(device: str) -> Callable[..., Any]:
        if compute is not None:
            return compute

        def call(*args: Any) -> Any:
            choice = select.choose(name, device)
            if for_backward:
                args = args[:-for_backward]
            given = args if inputs is None else (inputs(args),)
            try:
                if choice.implementation == "reference":
                    return _in_plain_torch(lambda *_: choice.fn(*given), args)
                return choice.fn(*given)
            except RuntimeError:  # checked after the failure, because checking every tensor of every call costs time
                check_dense(name, names, args)
                raise

        return call

    if compute is None:
        select.declare(name, {"reference": reference, "cpu": cpu, "triton": triton, "cuda": cuda})
        _kernels[name] = kernel_for
    kernels = {"cpu": kernel_for("cpu"), "cuda": kernel_for("cuda")}
    _LIBRARY.impl(name, kernels["cpu"], "CPU")
    _LIBRARY.impl(name, kernels["cuda"], "CUDA")
    torch.library.register_fake(f"rlkernel::{name}", fake, lib=_LIBRARY)
    eager: Callable[..., Any] | None = None
    if backward is not None:
        once = unbatched(name, backward) if differentiable_twice else once_differentiable(name, backward)
        torch.library.register_autograd(f"rlkernel::{name}", once, setup_context=setup_context, lib=_LIBRARY)
        if setup_context is not None:
            eager = _function(name, kernels, setup_context, once)
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
            output = overload(*args) if eager is None else eager(*args)
        else:
            with _AutoDispatchBelowAutograd():
                output = run(*args)
        if written and not torch.compiler.is_compiling():  # the dispatcher does not do it for ops in Python either
            bump_versions(*(args[i] for i in written if i < len(args) and isinstance(args[i], Tensor)))
        return output

    return call_on_one_device


def register_backend(device: str, functions: Mapping[str, Callable[..., Any]], *, reference: bool = False) -> None:
    """Makes another package's functions compute the ops on a device type that rlkernel has no kernels for.

    Argument checks, autograd and fakes stay those of the ops. docs/accelerators.md says what the functions must keep.

    Args:
        device: torch's name of the device type without an index, such as "xpu"; not "cpu" or "cuda".
        functions: name of a torch op (`rlkernel.kernels.select.declared()` lists them) -> a function with the arguments
            and results of the function of that name in `rlkernel/kernels/reference`.
        reference: whether that reference, on the device's own torch kernels, computes the ops that are left out. It is
            slow, and for bring-up. If False, they raise `select.NoImplementation`.

    Raises:
        ValueError: the device type has implementations already, or a name is not that of an op.
        TypeError: a function cannot be called. RuntimeError: torch does not know the device type.
    """
    if torch.device(device).type != device:
        raise ValueError(f"register_backend: device={device!r} has an index; expected a device type, such as 'xpu'")
    check_flag("register_backend", "reference", reference)
    select.register(device, functions, reference)

    def below_autograd(run: Callable[..., Any]) -> Callable[..., Any]:  # torch's own ops in a kernel record nothing
        def call(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return run(*args)

        return call

    for name, kernel_for in _kernels.items():
        torch.library.impl(f"rlkernel::{name}", device, below_autograd(kernel_for(device)), lib=_LIBRARY)


def gpu_kernel(op: str, device: str) -> Callable[..., Any] | None:
    """The GPU kernel that computes an op on a device type, for a call with more arguments than the op has; None where
    the op is computed by a C++ kernel, the reference or another package."""
    choice = select.choose(op, device)
    return choice.fn if choice.implementation in _GPU_IMPLEMENTATIONS else None


def is_forced() -> bool:
    """Whether a test forces one implementation on every op (`rlkernel.kernels.select.use`)."""
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


def _function(
    name: str, kernels: dict[str, Callable[..., Any]], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The op as an `autograd.Function`, as `torch.library.register_autograd` makes one of the same arguments."""

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


def _in_plain_torch(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls the reference with fp32 and the arguments' device as torch's defaults, on which it relies."""
    flat = (a[0] if isinstance(a, (list, tuple)) and a else a for a in args)
    device = next(a.device for a in flat if isinstance(a, Tensor))
    with _reference_lock, device:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return fn(*args)
        finally:
            torch.set_default_dtype(before)
