"""Fingerprints of weights: one integer per tensor, computed on its device, to compare an engine's and a trainer's.

The hash is a sum of mixed (position, bits) words modulo 2^64. Integer addition is associative, so every device and
order of addition gives the same number; a changed, moved or swapped element changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkernel.models.vision_config import TEXT_PREFIX, VISION_PREFIX

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
    return _text(tensor.dtype, tensor.shape, int(_hash(tensor.detach())))


def _text(dtype: torch.dtype, shape: Sequence[int], total: int) -> str:
    size = "x".join(str(n) for n in shape)
    return f"{str(dtype).removeprefix('torch.')}[{size}]:{total % (1 << 64):016x}"


class _Shard(NamedTuple):
    """A rank's shard of a weight: element i of it is element `first + i // width * stride + i % width` of the whole.

    Attributes:
        shape: of the whole weight.
        copies: neighbouring ranks that hold this shard.
    """

    shape: tuple[int, ...]
    first: int = 0
    width: int = 1 << 62
    stride: int = 0
    copies: int = 1


def _hash(tensor: Tensor, at: _Shard | None = None) -> Tensor:
    """Sum of the mixed words of a tensor, int64 on its device; the sums of all shards add up to that of the whole."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK].long()
        place = torch.arange(first, first + part.numel(), dtype=torch.int64, device=flat.device)
        if at is not None:
            place = place // at.width * at.stride + place % at.width + at.first
        total += _mixed(part + (place + 1).mul_(_A)).sum()
    return total


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
    if name != "lm_head.weight":
        return None
    return side.get("model.embed_tokens.weight", side.get(f"{TEXT_PREFIX}embed_tokens.weight"))


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


@torch.no_grad()
def of_worker(worker: Any) -> dict[str, str]:
    """Fingerprints of the whole weights, from a vLLM worker's shards; all tensor-parallel ranks call it together.

    Raises:
        RuntimeError: ranks that hold the same shard hold different values.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    rank, ranks = group.rank_in_group, group.world_size
    weights = _weights(worker.model_runner.get_model())
    shards = [(name, x, _shard_of(name, x, module, rank, ranks)) for name, x, module in weights]
    own = torch.stack([_hash(x, at) for _, x, at in shards])
    hashes = [torch.empty_like(own) for _ in range(ranks)] if ranks > 1 else [own]
    if ranks > 1:
        dist.all_gather(hashes, own, group=group.device_group)
    out: dict[str, str] = {}
    for (name, x, at), found in zip(shards, torch.stack(hashes, 1).tolist(), strict=True):
        groups = [found[first : first + at.copies] for first in range(0, ranks, at.copies)]
        if any(len(set(copies)) > 1 for copies in groups):
            raise RuntimeError(f"the tensor-parallel ranks hold different values of {name}")
        out[name] = _text(x.dtype, at.shape, sum(copies[0] for copies in groups))
    return out


def confirm(worker: Any, expected: Mapping[str, str]) -> bool:
    """Whether a vLLM worker holds the weights of a trainer; always True, for engines that drop a worker's answer.

    Raises:
        RuntimeError: it does not; the message names up to three weights, with both fingerprints.
    """
    differ = compare(expected, of_worker(worker))
    if differ:
        shown = "; ".join(f"{name}: trainer {a}, vLLM {b}" for name, (a, b) in list(differ.items())[:3])
        raise RuntimeError(f"rlkernel: {len(differ)} of {len(expected)} weights in vLLM are not the trainer's: {shown}")
    return True


def hf_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A rank's shards of a vLLM model's weights by their Hugging Face names, as slices of the stacked ones."""
    return ((name, tensor) for name, tensor, _ in _weights(model))


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """`hf_weights`, with the module of each."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        prefix, _, last = owner.rpartition(".")
        module: Any = modules[owner]
        name, prefix = _hf_name(name), _hf_name(f"{prefix}.").removesuffix(".")
        if last in _STACKED:
            sizes = module.output_partition_sizes
            for part, rows in zip(_STACKED[last], parameter.data.split(list(sizes)), strict=True):
                yield f"{prefix}.{part}.{leaf}", rows, module
        elif hasattr(module, "org_vocab_size"):  # without the vocabulary's padding
            yield name, parameter.data[: module.shard_indices.num_org_elements], module
        else:
            yield name, parameter.data, module


# Prefixes of a vision-language model's names in vLLM, and in a checkpoint.
_PREFIXES = (
    ("language_model.model.", TEXT_PREFIX),
    ("language_model.lm_head.", "lm_head."),
    ("visual.", VISION_PREFIX),
)


def _hf_name(name: str) -> str:
    for ours, theirs in _PREFIXES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _shard_of(name: str, tensor: Tensor, module: Any, rank: int, ranks: int) -> _Shard:
    """Where a rank's shard is: row-parallel weights are cut into columns, other linear layers and the vocabulary into
    rows, the rest is on every rank. A key or value head is on several ranks if there are fewer heads than ranks."""
    n, *rest = tensor.shape
    if hasattr(module, "org_vocab_size"):
        row = tensor[:1].numel()
        return _Shard((module.org_vocab_size, *rest), first=module.shard_indices.org_vocab_start_index * row)
    if hasattr(module, "input_is_parallel") and rest:
        (width,) = rest
        return _Shard((n, ranks * width), rank * width, width, ranks * width)
    if hasattr(module, "gather_output"):
        copies = module.num_kv_head_replicas if name.split(".")[-2] in ("k_proj", "v_proj") else 1
        return _Shard((ranks // copies * n, *rest), rank // copies * tensor.numel(), copies=copies)
    return _Shard(tuple(tensor.shape), copies=ranks)
