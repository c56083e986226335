"""The `rlkernel` torch library: schemas, fakes, autograd, dispatch to an implementation, and the stock control arm.

`define` registers one op; `kernels.select` decides what computes it. `stock()` switches every public op in a block
to plain torch, the control that shows the drift.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import _functions
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from rlkernel.kernels import select
from rlkernel.kernels.switch import Switch

_LIBRARY = torch.library.Library("rlkernel", "DEF")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the ops take."""
LEAST, MOST = 2.0**-149, torch.finfo(torch.float32).max
"""Smallest and largest positive number of fp32."""
_stock = Switch(False)  # of `stock`
_on: dict[str, Callable[[str], Callable[..., Any]]] = {}  # op -> its kernel for a device type


def define(
    schema: str,
    module: str | Callable[..., Any],
    *,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    differentiable_twice: bool = False,
    for_backward: int = 0,
) -> Callable[..., Any]:
    """Registers `rlkernel::<schema>` and returns a function that calls it with tensors of one device.

    Args:
        schema: torch schema without the namespace, `name(Tensor x, ...) -> Tensor`.
        module: module of `rlkernel/kernels/{reference,cpu,triton}` whose function `name` computes it; or the function
            itself, where there is one for every device and nothing to choose.
        fake: shapes and dtypes of the result, for tracing.
        setup_context, backward: autograd, as in `torch.library.register_autograd`.
        differentiable_twice: whether `backward` is itself made of differentiable ops; else a second derivative raises.
        for_backward: number of trailing arguments that only `setup_context` reads; implementations do not get them.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)

    def on(device: str) -> Callable[..., Any]:
        if not isinstance(module, str):
            return module

        def call(*args: Any) -> Any:
            choice = select.choose(name, device)
            if for_backward:
                args = args[:-for_backward]
            try:
                if choice.implementation == "reference":
                    return _in_plain_torch(choice.fn, args)
                return choice.fn(*args)
            except RuntimeError:  # looked for only now: each tensor of each call would take its time
                refuse_sparse(name, names, args)
                raise

        return call

    if isinstance(module, str):
        _on[name] = on
    direct = {"cpu": on("cpu"), "cuda": on("cuda")}
    _LIBRARY.impl(name, direct["cpu"], "CPU")
    _LIBRARY.impl(name, direct["cuda"], "CUDA")
    torch.library.register_fake(f"rlkernel::{name}", fake, lib=_LIBRARY)
    eager: Callable[..., Any] | None = None
    if backward is not None:
        once = unbatched(name, backward) if differentiable_twice else once_differentiable(name, backward)
        torch.library.register_autograd(f"rlkernel::{name}", once, setup_context=setup_context, lib=_LIBRARY)
        if setup_context is not None:
            eager = _function(name, direct, setup_context, once)
    overload = getattr(torch.ops.rlkernel, name).default
    names = tuple(a.name for a in overload._schema.arguments)
    written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info and a.alias_info.is_write]
    on_cpu, on_cuda = direct["cpu"], direct["cuda"]

    def call_on_one_device(*args: Any) -> Any:
        plain = not _observed()
        recording = plain and is_grad_enabled()
        first, device, differentiable = None, None, False
        for arg in args:
            if isinstance(arg, Tensor):
                if first is None:
                    first, device = arg, arg.device
                elif arg.device != device:
                    raise ValueError(f"{name}: tensors lie on {device} and on {arg.device}; move them to one device")
                if plain:  # the dispatcher resolves the others: kernels read what lies in memory
                    plain = type(arg) in _PLAIN and not arg.is_neg() and not arg._is_zerotensor()
                    differentiable = differentiable or (recording and arg.requires_grad)
            elif isinstance(arg, (list, tuple)):
                plain = False
        run = None
        if plain and first is not None:
            run = on_cpu if first.is_cpu else on_cuda if first.is_cuda else None  # device.type makes a string
        if run is None:
            _refuse_unseen(name, names, args, backward is not None)
            output = overload(*args)
        elif differentiable:
            if backward is None:
                refuse_gradient(name, names, args)
            output = overload(*args) if eager is None else eager(*args)
        else:
            with _AutoDispatchBelowAutograd():
                output = run(*args)
        if written and not torch.compiler.is_compiling():  # neither does the dispatcher, for ops in Python
            wrote(*(args[i] for i in written if i < len(args) and isinstance(args[i], Tensor)))
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
        TypeError: a function cannot be called. RuntimeError: torch knows no such device type.
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

    for name, on in _on.items():
        torch.library.impl(f"rlkernel::{name}", device, below_autograd(on(device)), lib=_LIBRARY)


def once_differentiable(op: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, whose gradients raise where they are differentiated in turn: torch would drop that term in silence.

    They hang on what they were computed from, so that every way of asking finds the error: torch's own decorator hangs
    them on leaves of their own, which `autograd.grad` and `hessian` never reach.
    """
    message = f"{op}: there is no second derivative; leave create_graph=True out, or this op out of the penalty"

    def once(ctx: Any, *upstream: Any) -> Any:
        _refuse_batched(op, upstream)
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *upstream)
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        found = gradients if isinstance(gradients, tuple) else (gradients,)
        fresh = [g if g is None else g.detach().requires_grad_() for g in found]
        sources = (*ctx.saved_tensors, getattr(ctx, "weight", None), *upstream)
        hung = [*fresh, *(t for t in sources if t is not None and t.requires_grad)]
        return _functions.DelayedError(message.encode(), len(hung))(*hung)[: len(fresh)]

    return once


class _UnpackedOnce:
    """A backward's ctx that unpacks the saved tensors once: activation checkpointing allows no second time."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def unbatched(op: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, which refuses a batch of upstream gradients."""

    def checked(ctx: Any, *upstream: Any) -> Any:
        _refuse_batched(op, upstream)
        return backward(ctx, *upstream)

    return checked


def _refuse_batched(op: str, upstream: tuple[Any, ...]) -> None:
    """Raises where autograd gives many upstream gradients as one: kernels read memory, which such a tensor lacks."""
    if is_dynamo_compiling():
        return
    for gradient in upstream:
        if gradient is not None and _is_batched(gradient):
            raise NotImplementedError(
                f"{op}: its backward takes one upstream gradient at a time; leave is_grads_batched=True or "
                "vectorize=True out"
            )


def wrote(*tensors: Tensor) -> None:
    """Bumps the versions of tensors that were written in place, so that autograd sees it."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


# ---- without the dispatcher ----------------------------------------------------------------------
# torch's dispatcher runs an op's Python three times (autograd, its redispatch, the kernel), which takes longer than
# the kernel of a small batch. Where nothing is there to see the op, it is called directly, with the same functions.

_PLAIN = (Tensor, torch.nn.Parameter)
# Looked up once: a small batch's kernel takes no longer than a few of these.
_AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
_profiled, _transformed = torch._C._autograd._profiler_enabled, torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_current_backward, _will_run = torch._C._current_graph_task_id, torch._C._will_engine_execute_node
is_grad_enabled = torch.is_grad_enabled


def _observed() -> bool:
    """Whether tracing, a dispatch mode, a functorch transform or the profiler must see the op."""
    return (
        torch.compiler.is_compiling() or _modes() > 0 or _transformed() or _profiled() or forward_ad._current_level >= 0
    )


def refuse_gradient(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Raises where a tensor asks an op without a gradient for one: torch would leave that share out."""
    for name, a in zip(names, args, strict=False):
        if isinstance(a, Tensor) and a.requires_grad:
            raise no_gradient(op, name)


def check_devices(op: str, *tensors: Tensor) -> None:
    """Raises ValueError unless the tensors lie on one device: for calls that go past an op of `define`."""
    first = tensors[0].device
    for other in tensors:
        if other.device != first:
            raise ValueError(f"{op}: tensors lie on {first} and on {other.device}; move them to one device")


def _refuse_unseen(op: str, names: tuple[str, ...], args: tuple[Any, ...], differentiable: bool) -> None:
    """Raises where a transform would lose a gradient in silence: torch gives a tangent of zero to ops without a forward
    derivative, and a compiled backward sees no attribute of a parameter."""
    if not differentiable and torch.is_grad_enabled():
        refuse_gradient(op, names, args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.compiler.is_compiling():
        if differentiable and has_main_grad(*tensors):  # by torch.export and the like: see `outside_graph`
            raise RuntimeError(f"{op}: {_UNSEEN}")
    elif forward_ad._current_level >= 0:
        for a in tensors:
            if forward_ad.unpack_dual(a).tangent is not None:
                raise NotImplementedError(f"{op}: there is no forward-mode derivative; use reverse mode (backward)")
    elif differentiable and torch.is_grad_enabled() and any(map(torch._C._functorch.is_gradtrackingtensor, tensors)):
        raise NotImplementedError(f"{op}: torch.func has no gradient of it; use torch.autograd.grad or backward")


_UNSEEN = (
    "torch.compile does not see main_grad, and its gradient would go to .grad instead; compile without fullgraph, "
    "which leaves this op out, or leave the parameter without main_grad"
)


def has_main_grad(*parameters: Tensor | None) -> bool:
    """Whether a gradient of one of them is recorded and is to be added onto its `main_grad`."""
    if torch.is_grad_enabled() and not is_stock():
        for p in parameters:
            if p is not None and p.requires_grad and getattr(p, "main_grad", None) is not None:
                return True
    return False


def outside_graph(op: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fn` beside the graphs that dynamo makes; with fullgraph, where there is no beside, that is an error.

    Called where dynamo traces a public op, before the op does anything: a break further in would have dynamo compile
    the op's inside.
    """
    torch._dynamo.graph_break(msg=f"{op}: {_UNSEEN}")
    return _untraced(fn, args, kwargs)


@torch._disable_dynamo
def _untraced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def refuse_sparse(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Raises TypeError for a tensor that is not dense."""
    for name, a in zip(names, args, strict=False):
        if isinstance(a, Tensor) and a.layout != torch.strided:
            raise TypeError(f"{op}: {name} is {a.layout}; expected a dense tensor, pass {name}.to_dense()") from None


def _function(
    name: str, direct: dict[str, Callable[..., Any]], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The op as an `autograd.Function`, what `torch.library.register_autograd` makes of the same arguments."""

    def forward(ctx: Any, *args: Any) -> Any:
        cpu = next(a.is_cpu for a in args if isinstance(a, Tensor))
        with _AutoDispatchBelowAutograd():
            output = direct["cpu" if cpu else "cuda"](*args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    apply: Callable[..., Any] = function.apply
    return apply


_reference = threading.RLock()  # torch's default dtype belongs to the process


def _in_plain_torch(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls the reference with fp32 and the device of the arguments as torch's defaults, which it relies on."""
    flat = (a[0] if isinstance(a, (list, tuple)) and a else a for a in args)
    device = next(a.device for a in flat if isinstance(a, Tensor))
    with _reference, device:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return fn(*args)
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def stock(active: bool = True) -> Iterator[None]:
    """Inside the block every public op runs as plain torch (`--backend torch`): the control arm, not invariant.

    In every thread of the process, as autograd computes a checkpointed forward again in one of its own.

    Raises:
        TypeError: active is not True or False.
    """
    check_flag("stock", "active", active)
    with _stock.block(True) if active else contextlib.nullcontext():
        yield


def is_stock() -> bool:
    """Whether the control arm is on."""
    return _stock.now


def check_tensors(op: str, **arguments: Any) -> None:
    """Raises TypeError unless each argument is a tensor."""
    for value in arguments.values():
        if not isinstance(value, Tensor):
            raise not_tensor(op, **arguments)


def check_optional(op: str, **arguments: Any) -> None:
    """Raises TypeError unless each argument is a tensor or None."""
    for value in arguments.values():
        if not (value is None or isinstance(value, Tensor)):
            raise not_tensor(op, **{name: v for name, v in arguments.items() if v is not None})


def rows(x: Tensor) -> Tensor:  # [..., n] -> [rows, n]
    """All dimensions but the last as one, also where a dimension is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def not_tensor(op: str, **arguments: Any) -> TypeError:
    """The error for the first of the arguments that is no tensor."""
    name, value = next((n, a) for n, a in arguments.items() if not isinstance(a, Tensor))
    return TypeError(f"{op}: {name} is of type {type(value).__name__}; it must be a torch.Tensor")


def no_gradient(op: str, name: str) -> RuntimeError:
    """The error for an argument that asks for a gradient which the op does not give."""
    return RuntimeError(
        f"{op}: {name} requires a gradient, and the op gives it none; call it under torch.no_grad(), or pass "
        f"{name}.detach()"
    )


def check_float(op: str, name: str, x: Tensor) -> None:
    """Raises TypeError unless the argument `name` has one of the dtypes that the ops compute in."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {x.dtype}; expected float32, bfloat16 or float16, cast it")


def check_number(op: str, name: str, value: Any, expected: str, least: float = LEAST, most: float = MOST) -> float:
    """The argument `name` as a float; ValueError unless it lies in [least, most], TypeError where it is no number.

    The kernels compute in fp32: a number beyond its largest would be infinite there, one below its least zero.
    """
    try:
        if isinstance(value, bool):  # would pass for 0 or 1
            raise TypeError
        fits = least <= value <= most
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of several numbers
        raise TypeError(f"{op}: {name}={value!r} is no number; it must be {expected}") from None
    if not fits:
        raise ValueError(f"{op}: {name}={value} must be {expected}")
    return float(value)


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless the argument `name` is True or False: a text, "no" among them, would pass for True."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r} must be True or False")


def is_whole(value: Any) -> bool:
    """Whether a value is an int, and no bool, which would pass for 0 or 1."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_whole(op: str, name: str, value: Any, expected: str, least: int, most: int) -> int:
    """The argument `name` as an int; ValueError unless it lies in [least, most], TypeError where it is not whole."""
    symbolic = isinstance(value, torch.SymInt) or (is_whole(value) and torch.compiler.is_compiling())
    number: int = value
    if symbolic:  # its range may not be known
        return number
    try:
        if isinstance(value, bool):  # would pass for 0 or 1
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name}={value!r} is no whole number; it must be {expected}") from None
    if not least <= number <= most:
        raise ValueError(f"{op}: {name}={value} must be {expected}")
    return number


def main_grad(op: str, parameter: Tensor) -> Tensor | None:
    """The parameter's fp32 `main_grad`, into which its gradient is accumulated; None where it has none.

    Raises:
        ValueError: it is no contiguous fp32 tensor of the parameter's shape. TypeError: it is no tensor.
    """
    found: Tensor | None = getattr(parameter, "main_grad", None)
    if found is None:
        return None
    if not isinstance(found, Tensor):
        raise TypeError(f"{op}: main_grad is of type {type(found).__name__}; expected a tensor, zeros_like(parameter)")
    if found.shape != parameter.shape or found.dtype != torch.float32 or not found.is_contiguous():
        raise ValueError(
            f"{op}: main_grad is {tuple(found.shape)} {found.dtype}; expected a contiguous float32 tensor of the "
            f"parameter's shape {tuple(parameter.shape)}, as zeros_like(parameter, dtype=torch.float32) makes it"
        )
    return found


adding = threading.RLock()
"""Held while a `main_grad` is added onto: kernels do without the GIL, and torch's own lock is that of `.grad`."""


def asked(op: str, ctx: Any, place: int, parameter: Tensor) -> tuple[bool, Tensor | None]:
    """Whether this backward is to give the gradient of a parameter, and the `main_grad` onto which it is to be added.

    None for the latter: autograd gets it. As with `.grad`, what `autograd.grad` and `backward(inputs=...)` do not name
    is left alone, and `autograd.grad` returns the gradients of those that it names. `place` counts the op's tensors, of
    which none before the parameter may be missing.
    """
    if not ctx.needs_input_grad[place]:
        return False, None
    to = main_grad(op, parameter)
    if to is None or _current_backward() < 0:  # called by hand, or by a compiled autograd
        return True, to
    node = ctx.next_functions[place][0]
    while len(onwards := node.next_functions) == 1:  # another name of the parameter, such as a view
        node = onwards[0][0]
    try:
        return (True, to) if _will_run(node) else (False, None)
    except RuntimeError:  # a leaf whose gradient autograd.grad returns
        return True, None


def weight_grad(
    op: str,
    ctx: Any,
    place: int,
    parameter: Tensor,
    accumulate: Callable[[Tensor], None],
    fresh: Callable[[], Tensor] | None = None,
) -> Tensor | None:
    """Gradient of a parameter through `accumulate`, which adds in the contract's order onto an fp32 buffer.

    Where the parameter has a `main_grad` (fp32, its shape; Megatron's name), that buffer is continued and autograd
    gets None: splitting a batch into micro-batches then leaves the chain of additions, and the bits, unchanged.
    Otherwise the gradient is returned in the parameter's dtype, from `fresh` where given. `parameter` must be the
    forward's own tensor, kept as `ctx.weight`: what `ctx.saved_tensors` returns is a copy without attributes where
    saved-tensor hooks are active, as under activation checkpointing.
    """
    wanted, to = asked(op, ctx, place, parameter)
    if not wanted:
        return None
    if to is not None:
        with adding:
            accumulate(to)
        return None
    if fresh is not None:
        return fresh()
    total = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    accumulate(total)
    return total.to(parameter.dtype)


def check(condition: bool, message: Callable[[], str], error: type[Exception] = ValueError) -> None:
    """Raises `error(message())` unless `condition` holds; the message is built only then."""
    if not condition:
        raise error(message())
