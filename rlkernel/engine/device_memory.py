"""GPU memory behind an address that stays reserved while the memory itself is returned to the GPU and taken again.

CUDA graphs hold addresses, so graphs of decode steps stay valid while the KV cache is away. Written with the driver's
virtual memory management (cuMemAddressReserve, cuMemCreate, cuMemMap), which torch does not offer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from typing import Any

import torch
from torch import Tensor

_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        error = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name} failed with CUDA error {code}")


def is_supported(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU with virtual memory management, which some virtual GPUs lack."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    found = ctypes.c_int()
    with torch.cuda.device(device):
        _call("cuDeviceGetAttribute", ctypes.byref(found), _SUPPORTED, torch.cuda.current_device())
    return bool(found.value)


class DeviceMemory:
    """Reserved addresses for `size` bytes on one GPU. Memory is behind them between `map` and `unmap`.

    Args:
        size: bytes; rounded up to the granularity of the driver, 2 MiB.
        device: the GPU.

    Attributes:
        address: first address.
        size: bytes after rounding.
        granularity: to a multiple of this many bytes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.device = torch.cuda.current_device()
        location = _Location(_DEVICE, self.device)
        self._properties, self._access = _Properties(_PINNED, 0, location), _Access(location, _READ_WRITE)
        granularity, address = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value
        self.size = -(-size // self.granularity) * self.granularity
        _call(
            "cuMemAddressReserve",
            ctypes.byref(address), ctypes.c_size_t(self.size), ctypes.c_size_t(0), ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )  # fmt: skip
        self.address = address.value
        self._mapped = [False]  # shared with the finalizer, which must not hold `self`
        # The driver frees everything when the process exits, and may be gone before a finalizer runs then.
        weakref.finalize(self, _release, self.device, self.address, self.size, self._mapped).atexit = False

    @property
    def is_mapped(self) -> bool:
        """Whether memory is behind the addresses."""
        return self._mapped[0]

    def map(self) -> Tensor:  # [size] uint8
        """Takes memory from the GPU; returns all of it, uninitialised, as a tensor that keeps this object alive.

        Raises:
            torch.OutOfMemoryError: the GPU has too little free memory, also after torch returned its unused blocks.
        """
        handle, address, size = ctypes.c_uint64(), ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)
        create = functools.partial(
            _call, "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0)
        )
        with torch.cuda.device(self.device):
            try:
                create()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                create()
            try:
                _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
                self._mapped[0] = True
            finally:
                _call("cuMemRelease", handle)  # the mapping holds the memory
            try:
                _call("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
                return torch.as_tensor(self, device=torch.device("cuda", self.device))
            except BaseException:
                self.unmap()
                raise

    def unmap(self) -> None:
        """Returns the memory to the GPU once the work that was launched so far has ended; keeps the addresses.

        No tensor of `map` may be used afterwards.
        """
        _unmap(self.device, self.address, self.size, self._mapped)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


def _unmap(device: int, address: int, size: int, mapped: list[bool]) -> None:
    if mapped[0]:
        torch.cuda.synchronize(device)
        _call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        mapped[0] = False


def _release(device: int, address: int, size: int, mapped: list[bool]) -> None:
    with contextlib.suppress(RuntimeError):  # an earlier error of the GPU, which its cause has reported
        _unmap(device, address, size, mapped)
        _call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))


class CacheMemory:
    """Memory of a KV cache: at the same address each time, if the size is the same, where the device supports that.

    Elsewhere it is torch's, at any address.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch_device = device
        self._reserves = is_supported(device)
        self._reserved: DeviceMemory | None = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes in use that torch does not count."""
        return self._reserved.size if self._reserved is not None and self._reserved.is_mapped else 0

    def take(self, size: int) -> Tensor:  # at least [size] uint8
        """Zeroed memory for the cache.

        Raises:
            torch.OutOfMemoryError: the device has too little free memory.
        """
        if not self._reserves:
            return torch.zeros(size, dtype=torch.uint8, device=self._torch_device)
        if self._reserved is None or not 0 <= self._reserved.size - size < self._reserved.granularity:
            self._reserved = DeviceMemory(size, self._torch_device)
        return self._reserved.map().zero_()

    def give_back(self, all_unused: bool) -> None:
        """Returns the cache's memory, which nothing uses any more, to the device.

        Args:
            all_unused: return torch's unused blocks too, such as those of dropped graphs.
        """
        if self._reserved is not None:
            self._reserved.unmap()
        if self._torch_device.type == "cuda" and (all_unused or not self._reserves):
            torch.cuda.empty_cache()
