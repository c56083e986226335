"""sleep and wake: the KV cache and the graphs leave the device and come back, and no bit changes."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch
from test_graphs import PROMPTS, engine, fingerprints
from tiny import shared_model

from rlkernel.engine import LLM, SamplingParams, device_memory
from rlkernel.engine.device_memory import DeviceMemory

CPU = torch.device("cpu")


@pytest.mark.parametrize("graphs", [False, True])
def test_same_bits_after_waking_at_any_size(graphs: bool) -> None:
    llm = engine(shared_model("fp32"), graphs, num_pages=40)
    expected = fingerprints(llm)
    for pages, keeps in ((None, False), (24, True), (90, False), (90, True)):
        preemptions, hits = llm.stats.preemptions, llm.blocks.stats.hits
        llm.sleep(keep_graphs=keeps)
        llm.sleep()
        assert llm.is_asleep and llm.runner.cache.k == llm.runner.cache.v == []
        llm.wake(pages)
        llm.wake()
        assert not llm.is_asleep and llm.num_pages == llm.blocks.num_pages == llm.runner.cache.num_pages
        assert len(llm.runner.cache.k) == 2 and llm.runner.cache.k[0].shape[0] == (pages or 40)
        assert llm.blocks.available == llm.num_pages and llm.blocks.stats.hits == hits
        assert fingerprints(llm) == expected
        assert (llm.stats.preemptions > preemptions) == (pages == 24), "the new size is the one that is used"


def test_what_cannot_sleep_or_wake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(shared_model("fp32"), num_pages=30, page_size=4)
    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="sleep: 1 requests are unfinished"):
        llm.sleep()
    llm.abort_all()
    with pytest.raises(RuntimeError, match=r"awake with num_pages=30; call sleep\(\) before wake\(num_pages=31\)"):
        llm.wake(31)
    llm.sleep()
    for call in (llm.generate, llm.score, lambda prompts: llm.add_request(prompts[0])):
        with pytest.raises(RuntimeError, match=r"the engine sleeps and has no KV cache; call wake\(\) first"):
            call([[3, 4]])
    with pytest.raises(ValueError, match="num_pages=0; expected at least 1"):
        llm.wake(0)
    llm.weights_updated()
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.cache, "_memory", lambda size: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError, match=r"wake: out of memory, num_pages=99 .*\(full\)"):
            llm.wake(99)
    assert llm.is_asleep and llm.num_pages == 30
    llm.wake()
    assert llm.generate([[3, 4]])[0].outputs


class Driver:
    """libcuda's memory calls on a CPU: `held` bytes are behind addresses, each call is recorded by name."""

    def __init__(self, free: int) -> None:
        self.free, self.calls = free, list[str]()
        self.created: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.buffers: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            return getattr(self, f"_{name}")(*args) or 0

        return call

    def _cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: int) -> None:
        given = properties._obj
        assert (given.type, given.handle_types, given.location.type, given.location.id, option) == (1, 0, 1, 0, 0)
        assert ctypes.sizeof(given) == 32
        out._obj.value = 4096

    def _cuMemAddressReserve(self, out: Any, size: Any, alignment: Any, fixed: Any, flags: Any) -> None:
        memory = ctypes.create_string_buffer(size.value)
        out._obj.value = ctypes.addressof(memory)
        self.buffers[out._obj.value] = memory

    def _cuMemCreate(self, out: Any, size: Any, properties: Any, flags: Any) -> int:
        if size.value > self.free:
            return 2
        self.free -= size.value
        out._obj.value = len(self.created) + 1
        self.created[out._obj.value] = size.value
        return 0

    def _cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        assert address.value in self.buffers and address.value not in self.mapped
        assert self.created[handle.value] == size.value
        self.mapped[address.value] = size.value

    def _cuMemRelease(self, handle: Any) -> None:
        if handle.value not in self.created:
            raise AssertionError("released twice")

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        given = access._obj
        assert (given.location.type, given.location.id, given.flags, count.value) == (1, 0, 3, 1)
        assert ctypes.sizeof(given) == 12 and self.mapped[address.value] == size.value

    def _cuMemUnmap(self, address: Any, size: Any) -> None:
        assert self.mapped.pop(address.value) == size.value
        self.free += size.value

    def _cuMemAddressFree(self, address: Any, size: Any) -> None:
        assert address.value not in self.mapped
        del self.buffers[address.value]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of a GPU with 1 MiB, whose memory torch reads as the host's."""
    made = Driver(1 << 20)
    monkeypatch.setattr(device_memory, "_driver", lambda: made)
    monkeypatch.setattr(device_memory, "is_supported", lambda device: True)

    class NoDevice:
        __init__ = __enter__ = __exit__ = lambda self, *args: None

    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    for name, result in (("current_device", 0), ("synchronize", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name, result=result: made.calls.append(name) or result)

    def as_tensor(memory: DeviceMemory, device: Any) -> torch.Tensor:
        found = memory.__cuda_array_interface__
        assert found["typestr"] == "|u1" and memory.is_mapped
        tensor = torch.frombuffer(made.buffers[found["data"][0]], dtype=torch.uint8)
        tensor.owner = memory  # type: ignore[attr-defined]
        return tensor

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return made


def test_the_cache_comes_back_at_its_address(driver: Driver) -> None:
    llm = engine(shared_model("fp32"), True, num_pages=40)
    graphs = llm.runner.graphs
    assert graphs is not None
    expected = fingerprints(llm)
    place, recorded, free = llm.runner.cache.k[0].data_ptr(), graphs.recorded, driver.free
    assert llm.uncounted_bytes == (1 << 20) - free > 0
    for keeps in (True, False):
        llm.sleep(keep_graphs=keeps)
        assert driver.free == 1 << 20 and llm.uncounted_bytes == 0
        assert driver.calls.index("synchronize") < driver.calls.index("cuMemUnmap")
        llm.wake()
        assert llm.runner.cache.k[0].data_ptr() == place and driver.free == free
        assert not llm.runner.cache.k[0].any() and not llm.runner.cache.v[-1].any()
        assert fingerprints(llm) == expected
        assert (graphs.recorded == recorded) == keeps, "kept graphs are valid, dropped ones are recorded again"
    llm.sleep()
    llm.wake(80)
    assert len(driver.buffers) == 1 and len(driver.mapped) == 1, "the old addresses are free"
    assert fingerprints(llm) == expected
    with pytest.raises(torch.OutOfMemoryError, match="num_pages=9999"):
        llm.sleep()
        llm.wake(9999)
    assert driver.calls.count("empty_cache") > 0 and llm.is_asleep
    del llm, graphs
    gc.collect()
    assert driver.free == 1 << 20 and not driver.buffers, "an engine that is gone leaves nothing"
