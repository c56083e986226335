"""The installed FlashAttention-3 (vLLM's copy or the package flash_attn_3) behind one interface."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels.certification import one_line

INSTALL = "install vllm, or flash_attn_3, for this torch; or use attention variant 'split'"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Library:
    """An installed FlashAttention-3: causal, one split, (out [T, H, D], natural-log LSE [H, T]).

    Attributes:
        dense: (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale).
        paged: (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k, scale), and
            optionally `out`, which receives the result.
        versions: package, version and hash of the binary; part of a verdict's identity.
        device: device type it runs on.
    """

    dense: Callable[..., Pair]
    paged: Callable[..., Pair]
    versions: dict[str, str]
    device: str = "cuda"


def _versions(package: str, *binaries: str) -> dict[str, str]:
    """Versions for a verdict, with the binary's hash, because source builds of many commits have the same version."""
    file = next((sys.modules[name].__file__ for name in binaries if name in sys.modules), None)
    found = {"flash_attention_3": f"{package} {metadata.version(package)}"}
    if file is not None:
        with open(file, "rb") as binary:
            found["binary"] = hashlib.file_digest(binary, "sha256").hexdigest()[:16]
    return found


def _by_name(function: Callable[..., Any], names: str, **fixed: Any) -> Callable[..., Pair]:
    """Wraps `function`: q, k and v are passed by position, further arguments under `names` ("-" drops one), and `fixed`
    ones always."""

    @torch.no_grad()
    def call(q: Tensor, k: Tensor, v: Tensor, *given: Any, **more: Any) -> Pair:
        named = {name: x for name, x in zip(names.split(), given, strict=True) if name != "-"}
        out, lse, *_ = function(q, k, v, **named, **fixed, **more)
        return out, lse

    return call


def _from_vllm() -> Library:
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not interface.FA3_AVAILABLE:
        raise ImportError(interface.FA3_UNAVAILABLE_REASON)
    fixed = {"causal": True, "num_splits": 1, "fa_version": 3, "return_softmax_lse": True}
    varlen, sizes = interface.flash_attn_varlen_func, "max_seqlen_q max_seqlen_k softmax_scale"
    dense = _by_name(varlen, f"cu_seqlens_q cu_seqlens_k {sizes}", **fixed)
    paged = _by_name(varlen, f"block_table cu_seqlens_q seqused_k {sizes}", **fixed)
    return Library(dense, paged, _versions("vllm", "vllm.vllm_flash_attn._vllm_fa3_C"))


def _from_package() -> Library:
    """FlashAttention's own package, under either of its module names."""
    try:
        interface = importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError:
        interface = importlib.import_module("flash_attn_3.flash_attn_interface")
    varlen, cached = interface.flash_attn_varlen_func, interface.flash_attn_with_kvcache
    for function, names in (
        (varlen, ("num_splits", "softmax_scale")),
        (cached, ("num_splits", "page_table", "cu_seqlens_q", "return_softmax_lse")),
    ):
        missing = [name for name in names if name not in inspect.signature(function).parameters]
        if missing:
            raise ImportError(f"its {function.__name__} has no {', '.join(missing)}")
    fixed: dict[str, Any] = {"causal": True, "num_splits": 1}
    # Newer versions return the LSE only on request.
    ask = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(varlen).parameters else {}
    dense = _by_name(varlen, "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale", **fixed, **ask)
    of_pages = "page_table cu_seqlens_q cache_seqlens max_seqlen_q - softmax_scale"
    from_pages = _by_name(cached, of_pages, **fixed, return_softmax_lse=True)

    def paged(*given: Any, out: Tensor | None = None) -> Pair:
        found, lse = from_pages(*given)
        return found if out is None else out.copy_(found), lse

    return Library(dense, paged, _versions("flash_attn_3", "flash_attn_3._C", "flash_attn_3_cuda"))


@functools.cache
def find() -> Library | str:
    """The installed FlashAttention-3, vLLM's copy first; or the reason why there is none."""
    reasons = []
    for name, load in (("vllm", _from_vllm), ("flash_attn_3", _from_package)):
        try:
            return load()
        except ModuleNotFoundError as error:
            reasons.append(f"{name}: no module {error.name}")
        except Exception as error:  # a package built for another torch fails in many ways
            reasons.append(f"{name}: {one_line(error)}")
    return "; ".join(reasons)


def unavailable(device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot run on a device, or None."""
    library = find()
    if isinstance(library, str):
        where = "" if device.type == "cuda" else f", and the tensors are on {device.type}"
        return f"FlashAttention-3 is not importable ({library}){where}; {INSTALL}"
    if device.type != library.device:
        return f"FlashAttention-3 runs on {library.device}, the tensors are on {device.type}; use variant 'split' there"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return f"FlashAttention-3 is for GPUs of compute capability 9, not {torch.cuda.get_device_name(device)}"
    return None
