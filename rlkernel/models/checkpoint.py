"""Loads and saves Hugging Face directories with single or sharded safetensors, and checks every tensor.

Loading reads no pickle and runs no code of the directory. Saving writes a temporary directory and renames it, so an
interrupted save leaves the target as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlkernel.data.tokenizer import copy_tokenizer_files, local_directory
from rlkernel.models.config import DTYPES, ConfigError, ModelConfig, load_config, read_json, token_ids
from rlkernel.models.decoder import Backbone, Decoder

Model = TypeVar("Model", bound=Backbone)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file, the tensor, and what to do."""


class HFTensor(NamedTuple):
    """A tensor of the Hugging Face checkpoint: its name, and its rows in a (fused) parameter of the decoder."""

    name: str
    parameter: str
    start: int
    rows: int


def hf_layout(config: ModelConfig, head: str = Decoder.head) -> list[HFTensor]:
    """All tensors of the Hugging Face checkpoint of a configuration, in the order of the model's parameters.

    `head` is the head's name: that of the language model, [V, C] unless it is tied, or another of one row, [1, C].
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    c, f = config.hidden_size, config.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)),
        "gate_up_proj": (("gate_proj", 0, f), ("up_proj", f, f)),
    }
    layout = [HFTensor("model.embed_tokens.weight", "embed_tokens.weight", 0, config.vocab_size)]

    def add(parameter: str, rows: int) -> None:
        owner = parameter.split(".")[-2]
        for name, start, size in fused.get(owner, ((owner, 0, rows),)):
            layout.append(HFTensor("model." + parameter.replace(owner, name), parameter, start, size))

    for i in range(config.num_layers):
        layer = f"layers.{i}"
        add(f"{layer}.input_layernorm.weight", c)
        add(f"{layer}.self_attn.qkv_proj.weight", q + 2 * kv)
        if config.qkv_bias:
            add(f"{layer}.self_attn.qkv_proj.bias", q + 2 * kv)
        add(f"{layer}.self_attn.o_proj.weight", c)
        if config.attention_bias:
            add(f"{layer}.self_attn.o_proj.bias", c)
        if config.family.qk_norm:
            add(f"{layer}.self_attn.q_norm.weight", config.head_dim)
            add(f"{layer}.self_attn.k_norm.weight", config.head_dim)
        add(f"{layer}.post_attention_layernorm.weight", c)
        add(f"{layer}.mlp.gate_up_proj.weight", 2 * f)
        add(f"{layer}.mlp.down_proj.weight", c)
    add("norm.weight", c)
    if head != Decoder.head:
        layout.append(HFTensor(head, head, 0, 1))
    elif not config.tie_word_embeddings:
        layout.append(HFTensor(head, head, 0, config.vocab_size))
    return layout


def hf_tensors(model: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a model as in its Hugging Face checkpoint; rows of fused parameters are views."""
    parameters = dict(model.named_parameters())
    for one in hf_layout(model.config, model.head):
        yield model.hf_name(one.name), parameters[one.parameter].detach().narrow(0, one.start, one.rows)
    yield from model.other_tensors()


# ---- load ----------------------------------------------------------------------------------------------------------


def load_as(
    model_class: type[Model], path: str | Path, dtype: torch.dtype | None, device: torch.device | str, *, tp_leaves: int
) -> Model:
    """Loads a directory as a model of `model_class`; otherwise as `load.load_model`."""
    directory = local_directory(path)
    config = load_config(directory, model_class.kind)
    if dtype is not None and dtype not in DTYPES.values():
        raise CheckpointError(f"load_model: dtype {dtype} is not supported; expected one of {', '.join(DTYPES)}")
    with ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        if dtype is None:
            dtype = config.dtype if _names_dtype(directory) else _stored_dtype(tensors)
        config = replace(config, dtype=dtype, tp_leaves=tp_leaves)
        layout = hf_layout(config, model_class.head)
        check_names(directory, config, tensors, {one.name for one in layout})
        with torch.device(device):
            model = model_class(config)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for one in layout:
                read_into(tensors[one.name], parameters[one.parameter].narrow(0, one.start, one.rows))
    return model


def read_into(place: _Stored, rows: Tensor) -> None:
    """Reads a tensor into (rows of) a parameter, and checks it."""
    stored = place.read()
    _check_tensor(place, stored, rows.shape)
    rows.copy_(stored)
    if not torch.stack(rows.aminmax()).isfinite().all():  # costs about as much as the copy
        raise _not_finite(place, stored, rows)


def _not_finite(place: _Stored, stored: Tensor, loaded: Tensor) -> CheckpointError:
    bad = ~stored.isfinite()
    if not bad.any():
        dtype, largest = str(loaded.dtype).removeprefix("torch."), stored.abs().max().item()
        return CheckpointError(
            f"{place.path}: {place.name} has values up to {largest:.3g}, which {dtype} cannot represent; load the "
            "model as bfloat16 or float32"
        )
    first = tuple(bad.nonzero()[0].tolist())
    return CheckpointError(
        f"{place.path}: {place.name} holds NaN or infinity ({int(bad.sum())} of {bad.numel()} values, the first at "
        f"{first}); download the file again, or use an earlier checkpoint of the run that wrote it"
    )


class _Stored(NamedTuple):
    """A tensor in an open safetensors file."""

    file: Any
    path: Path
    name: str

    def read(self) -> Tensor:
        try:
            return self.file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path}: {self.name} cannot be read: {error}; download the file again"
            ) from None


def open_tensors(directory: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Opens all shards; returns their tensors by name."""
    index = directory / INDEX
    if not index.is_file():
        return _open_shard(directory / SINGLE, stack, directory)
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is missing or malformed; download the file again")
    tensors: dict[str, _Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:  # an index must not lead to files outside its directory
            raise CheckpointError(f"{index}: shard {shard!r} is not a plain file name; do not trust this index")
        found = _open_shard(directory / shard, stack, directory)
        for name in found:
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{directory / shard} holds {name}, which {INDEX} places in {weight_map.get(name)}"
                )
        tensors.update(found)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / shard} lacks {name}, which {INDEX} places there; download it again")
    return tensors


def _open_shard(path: Path, stack: ExitStack, directory: Path) -> dict[str, _Stored]:
    if not path.is_file():
        hint = "download it again, or copy the whole directory"
        if path.name == SINGLE:
            pickled = sorted(p.name for p in directory.glob("*.bin"))
            hint = f"{pickled[0]} is a pickle, which is never read: convert it to safetensors" if pickled else hint
        raise CheckpointError(f"{path} does not exist; {hint}")
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return {name: _Stored(file, path, name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a safetensors file: {error}; download it again"
        ) from None


def _check_tensor(place: _Stored, stored: Tensor, shape: torch.Size) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"{place.path}: {place.name} has shape {tuple(stored.shape)}; config.json asks for {tuple(shape)}: they do "
            "not belong to one model"
        )
    if stored.dtype not in DTYPES.values():
        raise CheckpointError(
            f"{place.path}: {place.name} is {stored.dtype}; expected one of {', '.join(DTYPES)}, unquantised"
        )


def _names_dtype(directory: Path) -> bool:
    values = read_json(directory / "config.json")
    return bool(values.get("dtype") or values.get("torch_dtype"))


def _stored_dtype(tensors: dict[str, _Stored]) -> torch.dtype:
    stored = tensors.get("model.embed_tokens.weight")
    if stored is None:
        return torch.float32  # check_names reports it
    name = stored.file.get_slice("model.embed_tokens.weight").get_dtype()
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(name, torch.float32)


def check_names(
    directory: Path,
    config: ModelConfig,
    tensors: dict[str, _Stored],
    wanted: set[str],
    embedding_name: str = "model.embed_tokens.weight",
) -> None:
    """Raises CheckpointError unless the tensors are those wanted. A tied head may be stored too."""
    missing = sorted(wanted - tensors.keys())
    if missing:
        hint = "; a model without its own head has tie_word_embeddings=true in config.json"
        hint = hint if "lm_head.weight" in missing else ""
        raise CheckpointError(f"{directory}: {_listed('tensor', missing)} missing from the checkpoint{hint}")
    extra = {name for name in tensors.keys() - wanted if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        head, embedding = (tensors[name].read() for name in ("lm_head.weight", embedding_name))
        if head.shape != embedding.shape or head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise CheckpointError(
                f"{tensors['lm_head.weight'].path}: lm_head.weight differs from {embedding_name}, but "
                "config.json ties them; set tie_word_embeddings to false"
            )
    if extra:
        raise CheckpointError(
            f"{directory}: {_listed('tensor', sorted(extra))} not part of {config.model_type} with this config.json; "
            "the model would be computed without them"
        )


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{noun} {shown} is" if len(names) == 1 else f"{noun}s {shown} are"


# ---- save ----------------------------------------------------------------------------------------------------------


def save_model(
    model: Backbone,
    path: str | Path,
    tokenizer_dir: str | Path | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes a Hugging Face model directory that transformers loads with equal tensors.

    Args:
        model: the model; its tensors are written in its dtype, fused ones separately.
        path: the directory to create.
        tokenizer_dir: directory whose tokenizer files are copied.
        max_shard_bytes: size above which the tensors are split into shards with an index.
        overwrite: replace an existing directory; without it, one that is not empty is an error.

    Returns:
        The directory.

    Raises:
        CheckpointError: the target exists, or cannot be written. The target is then as it was before.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"save_model: max_shard_bytes is {max_shard_bytes}; it must be positive")
    with new_directory(path, "save_model", overwrite) as work:
        _write_json(work / "config.json", {**model.hf_config(), "rlkernel_contract": model.contract})
        _write_json(work / "generation_config.json", _generation(model.config))
        if tokenizer_dir is not None:
            copy_tokenizer_files(tokenizer_dir, work)
        _write_tensors(model, work, max_shard_bytes)
    return Path(path)


@contextmanager
def new_directory(path: str | Path, caller: str, overwrite: bool) -> Iterator[Path]:
    """A temporary directory that replaces `path` when the block ends, after its files are on disk.

    Args:
        caller: the function that errors name.
        overwrite: replace an existing directory; without it, one that is not empty is an error.

    Raises:
        CheckpointError: the target exists, or cannot be written. The target is then as it was before.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite)):
        raise CheckpointError(f"{caller}: {target} exists; choose another path, or pass overwrite=True")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _not_written(caller, target, error) from None
    try:
        work.chmod(0o755)  # mkdtemp creates it with 0o700
        yield work
        # Some file systems report a full disk only at fsync, and a rename may reach the disk before the data.
        for file in (*work.rglob("*"), work):
            _sync(file)
        _replace(work, target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise _not_written(caller, target, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _not_written(caller: str, target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{caller}: cannot write {target} ({getattr(error, 'strerror', None) or error}); free some space or "
        "choose another path"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(work: Path, target: Path) -> None:
    """Renames the finished directory to the target; an existing one is renamed before and removed after."""
    if not target.exists():
        os.rename(work, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        os.rename(target, old)
    except OSError:
        os.rmdir(old)
        raise
    try:
        os.rename(work, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation(config: ModelConfig) -> dict[str, Any]:
    own = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": token_ids(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
    }
    # Padding and start tokens of generation_config.json may differ from config.json's, and are kept.
    merged = {**own, **config.generation, "eos_token_id": own["eos_token_id"]}
    return {key: value for key, value in merged.items() if value is not None}


def _write_tensors(model: Backbone, work: Path, max_shard_bytes: int) -> None:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    used = total = 0
    for name, tensor in hf_tensors(model):
        size = tensor.numel() * tensor.element_size()
        if used and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, tensor))
        used, total = used + size, total + size
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        # Copied shard by shard, because safetensors requires tensors that own their memory.
        owned = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in shard}
        # Only one key: safetensors writes several in random order, so equal runs would differ in their bytes.
        save_file(owned, work / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(owned, file)
    if len(shards) > 1:
        _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
