"""linear_logprob on Hopper: the CUDA kernel behind the certified schedules, and its launches."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.cuda.driver import Kernel, TensorMap, compile_cuda, tensor_map

SHARED_BYTES = {0: 4 * 49152 + 64 + 1024, 1: 4 * 49152 + 32768 + 64 + 1024, 2: 4 * 49152 + 32768 + 64 + 1024}


class Arguments(ctypes.Structure):
    """`struct Arguments` of csrc/cuda/linear_logprob_sm90.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "targets", "inv_temperature", "kept", "tile_max", "tile_sum", "tile_entropy", "target_z",
            "stats", "entropy", "dlogp", "dentropy",
        )),
        *((name, ctypes.c_int) for name in ("tokens", "vocab", "pieces", "tiles", "words", "first")),
    )  # fmt: skip


@functools.cache
def kernel(device: int, mode: int, temperature: bool, kept: bool, dentropy: bool, **macros: int) -> Kernel:
    source = build.source_dir() / "cuda" / "linear_logprob_sm90.cu"
    flags = {"MODE": mode, "HAS_TEMPERATURE": temperature, "HAS_KEPT": kept, "HAS_DENTROPY": dentropy}
    cubin = compile_cuda(source, "90a", {name: int(value) for name, value in (flags | macros).items()})
    return Kernel(cubin, "rlk_linear_logprob", SHARED_BYTES[mode])


def launch(mode: int, hidden: Tensor, weight: Tensor, out: Tensor | None, macros: dict[str, int], **args: Any) -> None:
    given = {k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in args.items()}
    tokens, vocab = hidden.shape[0], weight.shape[0]
    pieces = -(-hidden.shape[1] // 64)
    arguments = Arguments(tokens=tokens, vocab=vocab, pieces=pieces, **given)
    run = kernel(
        hidden.get_device(), mode, args.get("inv_temperature") is not None, args.get("kept") is not None,
        args.get("dentropy") is not None, **macros,
    )  # fmt: skip
    maps = tensor_map(hidden, 128, 64), tensor_map(weight, 128, 64)
    to = TensorMap() if out is None else tensor_map(out, 64, 64)
    clusters = -(-tokens // 256) * -(-vocab // 256)
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    run(2 * min(clusters, processors // 2), 384, *maps, to, arguments)
