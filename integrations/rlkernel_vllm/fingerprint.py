"""Fingerprints of weights: one integer per tensor, computed on its device, to compare an engine's and a trainer's.

The hash is a sum of mixed (position, bits) words modulo 2^64. Integer addition is associative, so every device and
order of addition gives the same number; a changed, moved or swapped element changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


# Parts of parameter names that PEFT, FSDP and torch.compile insert.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "base_model.model.", "base_layer.")


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_A, _B, _C = (_signed(w) for w in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit words (in place) whose every output bit depends on every input bit."""
    for shift, factor in ((30, _B), (27, _C)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= factor
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """dtype, shape and hash of a tensor, as text; one number is copied from its device."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK].long()
        place = torch.arange(first + 1, first + 1 + part.numel(), dtype=torch.int64, device=flat.device)
        total += _mixed(part + place.mul_(_A)).sum()
    size = "x".join(str(n) for n in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{size}]:{int(total) % (1 << 64):016x}"


def fingerprints(side: Any, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Fingerprint of every weight, by its Hugging Face name.

    Args:
        side: a vLLM engine (`LLM`) with the plugin, a Hugging Face or other module, a state dict, or pairs of name and
            tensor. Weights that an engine stacks (qkv, gate and up) are listed separately, tied ones once.
        dtype: round floating-point weights to this dtype first, for example the engine's if the trainer holds fp32
            masters; None: do not round.

    Raises:
        InactiveError: the engine does not run the plugin.
        RuntimeError: its workers do not hold the same weights.
        TypeError: side is an asynchronous engine (the message says what to await), or none of these.
    """
    if hasattr(side, "collective_rpc"):
        from rlkernel_vllm.report import call

        first, *others = call(side, "rlkernel_fingerprints")
        for other in others:
            if differ := compare(first, other):
                raise RuntimeError(f"the engine's workers hold different weights: {', '.join(differ)}")
        return first
    return _all(_named(side), dtype)


def compare(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Names whose fingerprints differ, with both; None if a side lacks the tensor. Empty: the weights are equal.

    One side may list a tied head that the other omits; it is then compared with the embedding.
    """
    out: dict[str, tuple[str | None, str | None]] = {}
    for name in sorted({*one, *other}):
        a, b = (side.get(name, _tied(side, name)) for side in (one, other))
        if a != b:
            out[name] = (a, b)
    return out


def _tied(side: Mapping[str, str], name: str) -> str | None:
    return side.get("model.embed_tokens.weight") if name == "lm_head.weight" else None


def _named(side: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(side, nn.Module):
        return ((_plain(name), p) for name, p in side.named_parameters())
    if isinstance(side, str) or not isinstance(side, Iterable):
        raise TypeError(f"fingerprints takes an engine, a module, a state dict or pairs; found a {type(side).__name__}")
    return side.items() if isinstance(side, Mapping) else side


def _plain(name: str) -> str:
    """A parameter's name without the parts that wrappers insert."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name.removeprefix("module.")


def _all(pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> dict[str, str]:
    return {
        name: fingerprint(x if dtype is None or not x.is_floating_point() else x.to(dtype)) for name, x in pairs
    }  # fmt: skip


def of_worker(worker: Any) -> dict[str, str]:
    """Fingerprints of the model in a vLLM worker."""
    return _all(hf_weights(worker.model_runner.get_model()), None)


def hf_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a vLLM model by their Hugging Face names, as slices of the stacked ones."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        prefix, _, last = owner.rpartition(".")
        module: Any = modules[owner]
        if last in _STACKED:
            sizes = module.output_partition_sizes
            for part, rows in zip(_STACKED[last], parameter.data.split(list(sizes)), strict=True):
                yield f"{prefix}.{part}.{leaf}", rows
        else:
            size = getattr(module, "org_vocab_size", None)
            yield name, parameter.data if size is None else parameter.data[:size]
