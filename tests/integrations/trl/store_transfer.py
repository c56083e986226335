"""A weight transfer without a GPU: vLLM's and TRL's own code on both sides, with vLLM's TCP store in place of NCCL.

The server imports this file by `--worker-extension-cls store_transfer.Extension`, which registers the backend "store".
On the side of TRL `on_cpu` replaces the two places that call NCCL: the rendezvous and the broadcast.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class Extension:
    """vLLM requires a class; the import of the file registers the backend."""


class StoreEngine(NCCLWeightTransferEngine):
    """vLLM's engine with its layerwise reload, and another transport."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.group = StatelessProcessGroup.create(
            init_info.master_address, init_info.master_port, init_info.rank_offset, init_info.world_size
        )

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = self.group.broadcast_obj(None, src=0)
            assert (str(weight.dtype), list(weight.shape)) == (f"torch.{dtype}", shape)
            self.model.load_weights([(name, weight)])


if "store" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("store", StoreEngine)


def _init_communicator(client: Any, device: Any = 0) -> None:
    """`VLLMClient.init_communicator` without its check that the device is CUDA."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = client.get_world_size() + 1
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(client._post, f"{client.base_url}/init_weight_transfer_engine", json={"init_info": info})
        client.communicator = StatelessProcessGroup.create("127.0.0.1", port, 0, size)
        joined.result()


def _broadcast(iterator: Iterator[tuple[str, torch.Tensor]], group: Any, src: int, **options: Any) -> None:
    for _, tensor in iterator:
        group.broadcast_obj(tensor.detach().clone(), src=src)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """A block in which TRL's client sends weights through the store."""
    from trl.generation import vllm_client

    with (
        patch.object(vllm_client.VLLMClient, "init_communicator", _init_communicator),
        patch.object(vllm_client, "packed_nccl_broadcast_producer", _broadcast),
    ):
        yield
