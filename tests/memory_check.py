"""A memory checker for Triton kernels in Triton's interpreter; `install()` applies it to every launch of the process.

Every active lane of a load or store must lie on an element of the tensor that its address was computed from. A program
must not access what another program of the launch has written, or write what another has read. One store must not write
two values to one address. Uninitialised memory holds NaN or the largest integer. `kernels/test_memory_check.py` holds
the controls.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

# Kernels get virtual addresses in a range of 2^48 bytes per argument, so that an address computed from one argument
# never falls into another. Real addresses are below the first range.
RANGE = 48
LOW_BITS = (1 << 16) - 1  # kept from the real address, because alignment depends on them
SHARED = -1  # read by several programs
LOADS, STORES, UPDATES = "loads", "stores", "updates"


class MemoryFault(BaseException):
    """A load or a store that a kernel must not do. Not an `Exception`: Triton and the dispatchers catch those."""


class Region(NamedTuple):
    """Bytes of one tensor, with its first address as kernels see it and the distance to the real address."""

    name: str
    first: int
    size: int
    shift: int
    elements: np.ndarray[Any, Any] | None  # bytes that belong to an element; None where all do
    storage: int  # address of the tensor's storage
    storage_bytes: int


class Programs:
    """For each byte of a storage, the program that wrote it and the program that read it; 0 for none."""

    def __init__(self, size: int) -> None:
        self.wrote = np.zeros(size, np.int32)
        self.read = np.zeros(size, np.int32)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements are contiguous in some order of dimensions, and none share an address."""
    expected = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s != expected:
            return False
        expected *= n
    return True


@functools.lru_cache(maxsize=1024)
def elements_of(shape: tuple[int, ...], stride: tuple[int, ...], item: int) -> tuple[int, np.ndarray[Any, Any] | None]:
    """Bytes from a tensor's first to its last element, and a mask of those that belong to elements; None if all do."""
    if 0 in shape:
        return 0, None
    size = (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * item
    if is_dense(shape, stride):  # decided without a mask
        return size, None
    held = np.zeros(size, bool)
    np.lib.stride_tricks.as_strided(held, (*shape, item), (*(s * item for s in stride), 1))[...] = True
    return size, None if held.all() else held


def region_of(name: str, tensor: Tensor, first: int) -> Region:
    size, elements = elements_of(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())
    storage = tensor.untyped_storage()
    return Region(name, first, size, address_of(tensor) - first, elements, storage.data_ptr(), storage.nbytes())


class Launch:
    """The arguments of the running launch, and which program has accessed which byte."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.regions: list[Region] = []
        self.by_tensor: dict[int, Region] = {}
        self.programs: dict[int, Programs] = {}
        self.reachable: list[Region] | None = None

    def add(self, name: str, argument: Any) -> None:
        if isinstance(argument, TensorDescriptor):
            argument = argument.base
        if isinstance(argument, tuple):
            for i, each in enumerate(argument):
                self.add(f"{name}[{i}]", each)
        elif isinstance(argument, Tensor):
            first = (2 * len(self.regions) + 3 << RANGE - 1) | address_of(argument) & LOW_BITS
            self.regions.append(region_of(name, argument, first))
            self.by_tensor[id(argument)] = self.regions[-1]

    def where(self) -> tuple[int, str]:
        """The running program's number, from 1, and its name in messages."""
        (x, y, z), (_, ny, nz) = interpreter.interpreter_builder.grid_idx, interpreter.interpreter_builder.grid_dim
        return (x * ny + y) * nz + z + 1, f"{self.kernel}, program {(x, y, z)}"

    def find(self, address: int) -> Region | None:
        """The argument that an address was computed from; for an address loaded from a table, the nearest tensor."""
        index = (address >> RANGE) - 1
        if index >= 0:
            return self.regions[index] if index < len(self.regions) else None
        if self.reachable is None:
            self.reachable = [region_of(f"a tensor {tuple(t.shape)}", t, a) for (a, _), t in handed_out.items()]
        near = (r for r in self.reachable if r.first <= address)
        return max(near, key=lambda r: min(r.first + r.size, address), default=None)

    def real(self, ptrs: Any, mask: Any, size: int, access: str) -> Any:
        """Real addresses of the active lanes, each of `size` bytes.

        Raises:
            MemoryFault: a lane lies outside the elements, or on one that another program accesses.
        """
        mask = np.asarray(mask, bool)
        at = ptrs if mask.all() else ptrs[np.broadcast_to(mask, ptrs.shape)]
        if at.size == 0:
            return ptrs
        low, high = int(at.min()), int(at.max())
        if low >> RANGE != high >> RANGE:  # from several arguments
            source = ptrs >> np.uint64(RANGE)
            for index in np.unique(at >> np.uint64(RANGE)):
                lanes = mask & (source == index)
                ptrs = np.where(lanes, self.real(ptrs, lanes, size, access), ptrs)
            return ptrs
        region = self.find(low)
        if access == UPDATES and low >> RANGE == 0 and self.find(high) is not region:  # from several entries of a table
            near = np.array([id(self.find(int(address))) for address in ptrs.flat])
            for one in np.unique(near):
                lanes = mask & (near.reshape(ptrs.shape) == one)
                ptrs = np.where(lanes, self.real(ptrs, lanes, size, access), ptrs)
            return ptrs
        if region is None:
            raise MemoryFault(f"{self.where()[1]}: {access} {size} bytes at {low:#x}, which belongs to no argument")
        offset = (at - np.uint64(region.first)).view(np.int64)
        wrong = None
        if low < region.first or high + size > region.first + region.size:
            wrong = (offset < 0) | (offset + size > region.size)
        elif region.elements is not None:
            wrong = ~(region.elements[offset] & region.elements[offset + size - 1])
        if wrong is not None and wrong.any():
            self.fail(region, offset[wrong], size, access)
        self.note(region, offset, size, access)
        return ptrs + np.uint64(region.shift % (1 << 64))

    def fail(self, region: Region, offset: Any, size: int, access: str) -> None:
        first, last = int(offset.min()), int(offset.max())
        at, place = first, "between its elements"
        if last + size > region.size:
            at, place = last, f"{last + size - region.size} bytes past its end"
        elif first < 0:
            place = f"{-first} bytes in front of it"
        raise MemoryFault(
            f"{self.where()[1]}: {access} {size} bytes at `{region.name}` + {at}, {place}; it has {region.size} bytes, "
            f"and {offset.size} lanes miss them"
        )

    def note(self, region: Region, offset: Any, size: int, access: str) -> None:
        """Records the access of this program, and fails on a conflict with another one. Atomics do not conflict."""
        programs = self.programs.get(region.storage)
        if programs is None:
            programs = self.programs[region.storage] = Programs(region.storage_bytes)
        me, name = self.where()
        at = offset + (region.first + region.shift - region.storage)
        wrote, read = programs.wrote[at], programs.read[at]
        other, what = (wrote != 0) & (wrote != me), "written"
        if access == LOADS:
            programs.read[at] = np.where((read == 0) | (read == me), me, SHARED)
        elif access == STORES:
            programs.wrote[at] = me
            if not other.any():
                other, what = (read != 0) & (read != me), "read"
        else:
            return
        if other.any():
            raise MemoryFault(
                f"{name}: {access} {size} bytes at `{region.name}` + {int(offset[other].min())} that another program "
                f"of the launch has {what}"
            )


launch = Launch("")


class Memory:
    """Triton's interpreter with checked memory accesses; other attributes are passed through."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._plain.load(launch.real(ptrs, mask, dtype.itemsize, LOADS), mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> None:
        ptrs = launch.real(ptrs, mask, value.itemsize, STORES)
        self._plain.store(ptrs, value, mask)
        value = np.ascontiguousarray(np.broadcast_to(value, ptrs.shape))
        kept = self._plain.load(ptrs, mask, value, value.dtype)
        if kept.tobytes() != value.tobytes():
            raise MemoryFault(f"{launch.where()[1]}: stores several values at one address")

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, order: Any) -> Any:
        return self._plain.atomic_rmw(op, launch.real(ptrs, mask, value.itemsize, UPDATES), value, mask, order)

    def atomic_cas(self, ptrs: Any, expected: Any, value: Any, order: Any) -> Any:
        return self._plain.atomic_cas(launch.real(ptrs, True, value.itemsize, UPDATES), expected, value, order)


handed_out: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""Tensors whose `data_ptr` was read, by address and size, because a kernel may load these addresses from a table."""

address_of = Tensor.data_ptr


def data_ptr(tensor: Tensor) -> int:
    """`Tensor.data_ptr`, which also records the tensor."""
    address = address_of(tensor)
    handed_out[address, tensor.nbytes] = tensor
    return address


def install() -> None:
    """Checks every launch of this process from now on, and fills the results of `torch.empty` and similar functions."""
    start, convert = interpreter.GridExecutor._init_args_hst, interpreter._implicit_cvt

    def begin(executor: Any, args: Any, kwargs: Any) -> Any:
        global launch
        launch = Launch(executor.fn.__name__)
        args, kwargs = start(executor, args, kwargs)
        for name, argument in (*zip(executor.arg_names, args, strict=False), *kwargs.items()):
            launch.add(name, argument)
        return args, kwargs

    def converted(argument: Any) -> Any:
        out = convert(argument)
        if isinstance(argument, Tensor):
            out.handle.data = np.array([launch.by_tensor[id(argument)].first], np.uint64)
        return out

    def set_attr(handle: Any, key: str, value: Any) -> None:
        if key == "tt.divisibility" and handle.data.size == 1 and int(handle.data.item()) % value[0]:
            raise MemoryFault(f"{launch.where()[1]}: {int(handle.data.item()):#x} is not a multiple of {value[0]}")
        handle.attr[key] = value

    interpreter.GridExecutor._init_args_hst = begin
    interpreter._implicit_cvt = converted
    interpreter._interpreter = Memory(interpreter._interpreter)
    interpreter.TensorHandle.set_attr = set_attr
    Tensor.data_ptr = data_ptr
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
