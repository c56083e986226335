"""Hugging Face directories: loading and saving keep every tensor's bits, and an error names a broken file."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import CASES, build, save, tensors
from safetensors.torch import save_file

from rlkernel.contract import assert_bitwise, contract_id
from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.models import CheckpointError, ConfigError, Decoder, ModelConfig, hf_tensors, load_model, save_model

TINY = ModelConfig("qwen3", 32, 16, 24, 2, 2, 1, 8, max_position_embeddings=16, eos_token_id=(1,))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise(actual[name], tensor, name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers -> rlkernel -> transformers: the same tensors, and a directory that transformers loads."""
    source = save(case, tmp_path / "hf", dtype)
    model = load_model(source)
    assert model.dtype == model.config.dtype == dtype
    target = save_model(model, tmp_path / "ours")
    assert_same(tensors(target), tensors(source))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.dtype == dtype
    assert_same(dict(loaded.state_dict()), dict(build(case).to(dtype).state_dict()))
    assert transformers.GenerationConfig.from_pretrained(target).eos_token_id == 2


@pytest.mark.parametrize("case", ["qwen3", "qwen2-window"])
def test_sharded(case: str, tmp_path: Path) -> None:
    """Sharded by transformers, and sharded by us: an index, shards below the size, equal tensors."""
    source = save(case, tmp_path / "hf", max_shard_size="60KB")
    assert (source / "model.safetensors.index.json").is_file()
    model = load_model(source)
    assert_same(dict(hf_tensors(model)), tensors(source))
    target = save_model(model, tmp_path / "ours", max_shard_bytes=60_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 70_000 for shard in shards)
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors(target).values())
    assert_same(dict(hf_tensors(load_model(target))), tensors(source))
    assert_same(
        dict(transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()), dict(build(case).state_dict())
    )


def test_dtype(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path)
    assert_same(
        dict(hf_tensors(load_model(source, torch.bfloat16))),
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors(source).items()},
    )
    with pytest.raises(CheckpointError, match=r"dtype torch.float64 is not supported"):
        load_model(source, torch.float64)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    shard = tensors(source)
    save_file({name: tensor.half() for name, tensor in shard.items()}, source / "model.safetensors")
    assert load_model(source).dtype == torch.float16  # without a name in config.json, as it is stored


def test_a_dtype_that_cannot_hold_a_weight_is_named(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path)
    rewrite(lambda t: t[Q][0, 0].fill_(7e4))(source)
    assert load_model(source, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=rf"{Q} has values up to 7e\+04, which float16 cannot represent; load"):
        load_model(source, torch.float16)


def test_tied_with_a_copy_of_the_head(tmp_path: Path) -> None:
    """Some tied checkpoints store the head as well; an equal copy is taken, another one refused."""
    source = save("qwen3-tied", tmp_path)
    shard = tensors(source)
    shard["lm_head.weight"] = shard["model.embed_tokens.weight"].clone()
    shard["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old Llama checkpoints have these
    save_file(shard, source / "model.safetensors")
    assert load_model(source).lm_head is None
    shard["lm_head.weight"][3, 3] += 1
    save_file(shard, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs(.*)tie_word_embeddings"):
        load_model(source)


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        shard = tensors(directory)
        change(shard)
        save_file(shard, directory / "model.safetensors")

    return apply


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def lie_in_header(directory: Path) -> None:
    """A header whose offsets point past the end of the file."""
    file = directory / "model.safetensors"
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [10**12, 10**12 + 256]}})
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 256)


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no shard": (lambda d: (d / "model.safetensors").unlink(), r"model.safetensors does not exist"),
    "pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"pytorch_model.bin is a pickle, which is never read",
    ),
    "truncated": (truncate, r"model.safetensors \(\d+ bytes\) is truncated"),
    "empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), r"truncated or not a safetensors"),
    "no safetensors": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 999), r"not a safetensors"),
    "offsets": (lie_in_header, r"not a safetensors"),
    "missing tensor": (rewrite(lambda t: t.pop(Q)), rf"tensor {Q} is missing"),
    "missing head": (rewrite(lambda t: t.pop("lm_head.weight")), r"lm_head.weight is missing(.*)tie_word_embeddings"),
    "many missing": (rewrite(lambda t: [t.pop(n) for n in list(t)[:9]]), r"tensors (.*) and 5 more are missing"),
    "shape": (
        rewrite(lambda t: t.update({Q: torch.zeros(64, 64)})),
        r"q_proj.weight has shape \(64, 64\); config.json asks for \(128, 64\)",
    ),
    "extra": (rewrite(lambda t: t.update(adapter=torch.zeros(2))), r"tensor adapter is not part of qwen3"),
    "integers": (
        rewrite(lambda t: t.update({Q: torch.zeros(128, 64, dtype=torch.int8)})),
        r"q_proj.weight is torch.int8",
    ),
    "not a number": (
        rewrite(lambda t: t[Q][3, 5:].fill_(math.nan)),
        rf"model.safetensors: {Q} holds NaN or infinity \(59 of 8192 values, the first at \(3, 5\)\); download",
    ),
    "infinity": (rewrite(lambda t: t["model.norm.weight"][0].fill_(-math.inf)), r"model.norm.weight holds NaN or inf"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config.json does not exist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str, tmp_path: Path) -> None:
    source = save("qwen3", tmp_path)
    change, message = BROKEN[name]
    change(source)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        load_model(source)
    assert str(tmp_path) in str(caught.value)


def test_broken_shards(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path / "hf", max_shard_size="60KB")
    index = source / "model.safetensors.index.json"
    good = index.read_text()
    shard = sorted(source.glob("*.safetensors"))[1]

    def refuses(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(source)

    shutil.move(shard, tmp_path / "aside")
    refuses(rf"{shard.name} does not exist; download it again")
    shard.write_bytes((tmp_path / "aside").read_bytes()[:-10])
    refuses(rf"{shard.name} \(\d+ bytes\) is truncated")
    shutil.move(tmp_path / "aside", shard)
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("{}", "weight_map is missing"),
        (good.replace(shard.name, "../secret.safetensors"), "not a plain file name"),
        (json.dumps({"weight_map": {Q: shard.name}}), r"which model.safetensors.index.json places in"),
    ):
        index.write_text(text)
        refuses(message)
    moved = json.loads(good)
    moved["weight_map"]["model.phantom"] = shard.name
    index.write_text(json.dumps(moved))
    refuses(rf"{shard.name} lacks model.phantom")


def test_save_carries_files_and_contract(tmp_path: Path) -> None:
    save_tokenizer(character_tokenizer("0123456789+="), tmp_path / "tok")
    target = save_model(Decoder.from_config(TINY), tmp_path / "out", tmp_path / "tok")
    assert transformers.AutoTokenizer.from_pretrained(target)("1+2")["input_ids"] == [3, 12, 4]
    assert json.loads((target / "config.json").read_text())["rlkernel_contract"] == contract_id()
    again = save_model(Decoder.from_config(TINY), tmp_path / "again", tmp_path / "tok")
    assert (again / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    shutil.rmtree(again)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tok"]  # no temporary folder is left
    assert target.stat().st_mode & 0o077 == 0o055


def test_save_replaces_only_when_told(tmp_path: Path) -> None:
    first, second = Decoder.from_config(TINY, seed=0), Decoder.from_config(TINY, seed=1)
    target = save_model(first, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"exists; choose another path, or pass overwrite=True"):
        save_model(second, target)
    assert_same(dict(hf_tensors(load_model(target))), dict(hf_tensors(first)))
    save_model(second, target, overwrite=True)
    assert_same(dict(hf_tensors(load_model(target))), dict(hf_tensors(second)))
    (tmp_path / "empty").mkdir()
    save_model(first, tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "out"]


@pytest.mark.parametrize("broken", ["save_file", "os.fsync", "os.rename"])
def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = Decoder.from_config(TINY)
    target = save_model(model, tmp_path / "out")
    before = sorted(target.iterdir())
    monkeypatch.setattr(f"rlkernel.models.checkpoint.{broken}", fail)
    for overwrite, path in ((True, target), (False, tmp_path / "new")):
        with pytest.raises(CheckpointError, match=r"cannot write .*\(No space left on device\); free some space"):
            save_model(model, path, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and sorted(target.iterdir()) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_model(model, tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="exists"):
        save_model(model, tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        save_model(model, tmp_path / "new", tokenizer_dir=tmp_path)
    assert not (tmp_path / "new").exists()


def test_config_survives(tmp_path: Path) -> None:
    """A configuration made from scratch is read back equal; tp_leaves belongs to the run, not to the directory."""
    config = replace(TINY, tp_leaves=2, pad_token_id=0, dtype=torch.bfloat16)
    target = save_model(Decoder.from_config(config), tmp_path / "out")
    loaded = load_model(target, tp_leaves=2)
    assert replace(loaded.config, generation={}) == config
