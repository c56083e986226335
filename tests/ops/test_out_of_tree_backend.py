"""A backend in another package, as docs/accelerators.md describes it: the page's example on a simulated accelerator.

The accelerator `tiny` is torch's PrivateUse1 device in Python. Each of its tensors holds its memory as a CPU tensor,
which rlkernel never sees; torch's ops reach it through one fallback. torch accepts one such device per process, so
the tests run in their own process.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "accelerators.md"

if os.environ.get("RLKERNEL_TEST_TINY") != "1":
    from triton_interpreter import run

    def test_in_a_process_of_its_own() -> None:
        run(__file__, TRITON_INTERPRET="0", RLKERNEL_TEST_TINY="1")

else:
    from op_checks import rand
    from torch.utils._pytree import tree_map
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from rlkernel import ops
    from rlkernel.contract import assert_bitwise
    from rlkernel.kernels import select
    from rlkernel.kernels.reference import linear as reference

    # ---- the accelerator -------------------------------------------------------------------------

    class Tiny(Tensor):
        """A tensor of the device, with its memory as a CPU tensor."""

        memory: Tensor

    def on_tiny(memory: Tensor) -> Any:
        tensor: Any = torch._C._acc.create_empty_tensor(tuple(memory.shape), memory.dtype)
        tensor.__class__ = Tiny
        tensor.memory = memory.clone(memory_format=torch.contiguous_format)  # without strides, views are copies
        return tensor

    def torch_op(op: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs any torch op on the CPU tensors and wraps its results as tensors of the device."""
        known: dict[int, Any] = {}

        def memory(value: Any) -> Any:
            if isinstance(value, Tiny):
                known[id(value.memory)] = value
                return value.memory
            return torch.device("cpu") if isinstance(value, torch.device) else value

        found = op.overloadpacket(*tree_map(memory, args), **tree_map(memory, kwargs))
        place = lambda t: known[id(t)] if id(t) in known else on_tiny(t)  # an in-place op returns its argument
        return tree_map(lambda t: place(t) if isinstance(t, Tensor) else t, found)

    def copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
        getattr(to, "memory", to).copy_(getattr(source, "memory", source))
        return to

    _setup_privateuseone_for_python_backend("tiny")
    _fallback, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _fallback.fallback(torch_op, "PrivateUse1")
    _aten.impl("_copy_from", copy_from, "PrivateUse1")
    for name in ("view.dtype", "detach", "alias", "abs", "sin", "cos", "ceil", "floor", "round", "logical_not"):
        packet, _, overload = name.partition(".")  # torch would build them from a storage, or by resizing a result
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _aten.impl(name, functools.partial(torch_op, op), "PrivateUse1")

    # ---- the page's example ----------------------------------------------------------------------

    page: dict[str, Any] = {}
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example.replace('"xpu"', '"tiny"'), page)

    def forward_backward(op: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor, tiny: bool) -> list[Tensor]:
        """The op's result and the gradients of its inputs, computed on the device or on the CPU."""
        place = on_tiny if tiny else torch.clone
        leaves = [place(t).requires_grad_() for t in inputs]
        out = op(*leaves)
        found = [out, *torch.autograd.grad(out, leaves, place(dy))]
        assert all(t.device.type == ("tiny" if tiny else "cpu") for t in found)
        return [getattr(t, "memory", t.detach()) for t in found]

    CASES = {
        "swiglu": (ops.swiglu, (4 * rand(0, 5, 16),), rand(1, 5, 8)),
        "linear": (ops.linear, (rand(2, 5, 16), rand(3, 6, 16), rand(4, 6)), rand(5, 5, 6)),
    }

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("name", CASES)
    def test_has_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
        """The registered function, the reference for the ops that the backend lacks, and autograd on top of both."""
        op, inputs, dy = CASES[name]
        inputs, dy = [t.to(dtype) for t in inputs], dy.to(dtype)
        tiny, cpu = (forward_backward(op, inputs, dy, tiny) for tiny in (True, False))
        for one, other in zip(tiny, cpu, strict=True):
            assert_bitwise(one, other, f"{name} on tiny")

    @pytest.mark.parametrize("name", CASES)
    def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
        op, (x, *weights), _ = CASES[name]
        weights = [on_tiny(w) for w in weights]
        alone = torch.cat([op(on_tiny(row[None]), *weights).memory for row in x])
        assert_bitwise(alone, op(on_tiny(x), *weights).memory, f"{name}: rows alone and together")

    def test_a_wrong_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
        """The control: a backend whose linear adds k from the end."""

        def backwards(x: Any, weight: Any, bias: Any, *others: Any) -> Tensor:
            return on_tiny(reference.linear(x.memory.flip(1), weight.memory.flip(1), bias.memory, *others))

        monkeypatch.setitem(select._chosen, ("linear", "tiny"), select.Choice("registered", "", backwards))
        with pytest.raises(AssertionError, match="linear on tiny"):
            test_has_the_bits_of_the_cpu("linear", torch.float32)

    def test_page_names_every_function() -> None:
        table = PAGE.read_text().split("**Functions.**")[1].split("**Orders.**")[0]
        named = [name for row in re.findall(r"^\|.*", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
        missing, unknown = set(select.declared()) - set(named), set(named) - set(select.declared())
        assert not missing, f"add {missing} to the table of functions in docs/accelerators.md"
        assert not unknown and len(named) == len(set(named)), f"not ops, or listed twice: {sorted(named)}"

    def test_choices() -> None:
        assert select.choose("swiglu", "tiny").fn is page["swiglu"]
        assert select.choose("swiglu", "tiny").implementation == "registered"
        assert select.choose("linear", "tiny").implementation == "reference"
        assert select.choose("linear", "cpu").implementation != "registered"

    def test_an_op_that_the_backend_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(select._backends, "tiny", ({}, False))
        monkeypatch.delitem(select._chosen, ("swiglu", "tiny"), raising=False)
        with pytest.raises(select.NoImplementation, match=r"'swiglu' has no implementation on 'tiny'.*reference=True"):
            ops.swiglu(on_tiny(rand(0, 5, 16)))

    @pytest.mark.parametrize(
        "device,functions,error,message",
        (
            ("tiny", {}, ValueError, "'tiny' already has"),
            ("cuda", {}, ValueError, "'cuda' already has"),
            ("xpu:0", {}, ValueError, "'xpu:0' has an index"),
            ("xpu", {"swigloo": print}, ValueError, "'swigloo' is not an op"),
            ("xpu", {"swiglu": 1}, TypeError, "swiglu is of type int"),
            ("no_device", {}, RuntimeError, "no_device"),
        ),
    )
    def test_refused(device: str, functions: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            ops.register_backend(device, functions)
        assert list(select._backends) == ["tiny"]
