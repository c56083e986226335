"""Launches of `direct` kernels pass Triton's launcher the same arguments as Triton does. No GPU needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rlkernel.kernels.triton import launch, rms_norm, sample, swiglu
from rlkernel.kernels.triton.launch import DirectKernel

pytestmark = pytest.mark.skipif(not launch.KNOWN, reason="the launcher is known for Triton 3.6 on CUDA only")


class Launcher:
    """Triton's launcher of one compiled kernel; records instead of launching."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        self._record(x, y, z, function, packed, rest[3:])  # behind metadata and two hooks

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        cooperative, pdl, scratch, profile, packed, metadata, enter, leave, *args = rest
        assert (cooperative, pdl) == (self.launch_cooperative_grid, self.launch_pdl)
        assert scratch is profile is metadata is enter is leave is None
        self._record(x, y, z, function, packed, args)

    def _record(self, x: int, y: int, z: int, function: Any, packed: Any, args: Sequence[Any]) -> None:
        plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
        self.calls.append((x, y, z, function, packed, plain))


class Driver:
    """The part of a driver that compiling for an H100 needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(triton.compiler.CompiledKernel, "run", property(lambda self: Launcher()))
    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", lambda self: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    for kernel in (rms_norm.rms_norm_kernel, swiglu.swiglu_kernel, sample.filter_logits_kernel):
        monkeypatch.setattr(kernel, "compiled", {})
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setattr(Launcher, "calls", [])
    return Launcher.calls


def test_a_cached_launch_passes_the_arguments_of_triton(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(6, 256, dtype=torch.bfloat16)
    odd = torch.randn(6 * 256 + 1, dtype=torch.bfloat16)[1:].view(6, 256)
    weight = torch.ones(256, dtype=torch.bfloat16)
    arguments = [
        (a.clone() if a is x else a, r, w, e)
        for a in (x, odd)
        for r in (None, x, odd)
        for w in (weight, torch.nn.Parameter(weight))
        for e in (1e-6, 1e-5)
    ]
    run = lambda: [rms_norm._forward(*each) for each in arguments]
    kept = [run(), run()]  # keeps the results alive, so that no address is reused
    direct_calls = calls[len(arguments) :]
    calls.clear()
    monkeypatch.setattr(launch, "_read", lambda args, key: None)  # Triton launches
    kept.append(run())
    assert len(calls) == len(direct_calls) == len(arguments)
    assert 1 < len(rms_norm.rms_norm_kernel.compiled) < len(arguments)
    for ours, theirs in zip(direct_calls, calls, strict=True):
        assert ours[:3] == theirs[:3] and ours[4] == theirs[4] and ours[3] is theirs[3]
        results = (3, 4)  # y and r are new tensors
        assert [a for i, a in enumerate(ours[5]) if i not in results] == [
            a for i, a in enumerate(theirs[5]) if i not in results
        ]


def test_specialised_integers_have_their_own_kernels(calls: list[tuple[Any, ...]]) -> None:
    logits, temperature = torch.zeros(4, 32), torch.ones(4)
    options = {"HAS_FILTER": False, "HAS_MIN_P": False, "BLOCK": 32, "num_warps": 1, "enable_fp_fusion": False}
    for _ in range(2):
        for vocab in (1, 2, 3, 16, 32):
            sample.filter_logits_kernel[(4,)](logits, temperature, None, None, None, vocab, 32, **options)
    kinds = {key[6] for key in sample.filter_logits_kernel.compiled}
    assert len(kinds) == 3  # 1, a multiple of 16, any other
    assert len(calls) == 10 and [c[5][5] for c in calls] == [1, 2, 3, 16, 32] * 2


def test_triton_launches_with_unknown_arguments_or_hooks(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    kernel = swiglu.swiglu_kernel
    assert isinstance(kernel, DirectKernel)
    swiglu.swiglu(x)
    heard: list[Any] = []
    monkeypatch.setattr(launch._listeners[0], "calls", [heard.append])
    before = dict(kernel.compiled)
    monkeypatch.setattr(kernel, "compiled", {})
    swiglu.swiglu(x)
    assert kernel.compiled == {} and len(before) == 1 and len(calls) == 2
    monkeypatch.undo()
    assert launch._read((x, object()), [-1]) is None
    assert launch._read((x, True), [-1]) is None
    assert launch._read((x,), [0]) is None, "a tensor of another device"
