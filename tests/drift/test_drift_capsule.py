"""Capsules: round trips, bounds, redaction, and an error that names the fault of every inconsistent file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlkernel_drift.capsule import (
    Manifest,
    Operators,
    Sampling,
    Tensor,
    Weights,
    build_capsule,
    read_capsule,
    write_capsule,
)
from rlkernel_drift.capsule.fingerprint import (
    multipliers_torch,
    row_fingerprints,
    row_fingerprints_torch,
    weight_fingerprint,
)
from rlkernel_drift.capsule.folder import OPERATORS, TOKENS
from rlkernel_drift.capsule.tensor_file import parse_tensors, round_bfloat16, write_tensors
from rlkernel_drift.errors import CapsuleError, DriftError, Refusal


def example(**manifest: Any) -> Any:
    rng = np.random.default_rng(0)
    values = {
        "layers.0.output": Tensor.bfloat16(rng.normal(size=(8, 4))),
        "layers.1.output": Tensor.of(rng.normal(size=(8, 4)).astype(np.float32)),
        "final_norm": Tensor.of(row_fingerprints(rng.normal(size=(8, 4)).astype(np.float32))),
    }
    return build_capsule(
        Manifest(
            engine="hf",
            side="rollout",
            sampling=Sampling(temperature=0.7),
            vocabulary={"4": "four"},
            command=["rlkernel-drift", "capture"],
            weights=Weights(version=3, tensors={"lm_head.weight": weight_fingerprint(values["layers.1.output"])}),
            **manifest,
        ),
        [[1, 2], [3]],
        [[4, 5, 6], [7, 8]],
        {
            "recorded.raw": [[-1.0, -2.0, -0.5], [-3.0, float("-inf")]],
            "prefill.raw": [[-1.0, -2.0, -0.5], [-3.0, -1.0]],
        },
        kept=[[[4, 9], [5], []], [[7], [8]]],
        sequence_ids=[11, 12],
        operators=Operators(None, values),
    )


def equal(a: Any, b: Any) -> None:
    assert a.manifest.model_copy(update={"files": {}}) == b.manifest.model_copy(update={"files": {}})
    for name in ("ids", "positions", "cu_seqlens", "mask", "spans", "sequence_ids"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert list(a.logprobs) == list(b.logprobs)
    for name in a.logprobs:
        assert a.logprobs[name].tobytes() == b.logprobs[name].tobytes()
    assert list(a.operators.values) == list(b.operators.values)
    for name, tensor in a.operators.values.items():
        assert tensor.dtype == b.operators.values[name].dtype
        np.testing.assert_array_equal(tensor.values, b.operators.values[name].values)


def test_round_trip(tmp_path: Path) -> None:
    capsule = example()
    again = read_capsule(write_capsule(capsule, tmp_path / "c"))
    equal(capsule, again)
    assert again.place(6) == (1, 1) and again.text(4) == "four" and again.stream == "recorded.raw"


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_capsule(example(), tmp_path / name)
    for file in (TOKENS, OPERATORS, "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_official_reader_reads_it(tmp_path: Path) -> None:
    write_capsule(example(), tmp_path / "c")
    with safe_open(tmp_path / "c" / OPERATORS, framework="pt") as file:
        ours = example().operators.values["layers.0.output"].float32()
        assert torch.equal(file.get_tensor("operator/layers.0.output").float(), torch.from_numpy(ours))


def test_redaction_leaves_no_text(tmp_path: Path) -> None:
    write_capsule(example(), tmp_path / "c", text=False)
    assert b"four" not in (tmp_path / "c" / "manifest.json").read_bytes()
    assert read_capsule(tmp_path / "c").manifest.redacted


def test_size_is_bounded_and_reported(tmp_path: Path) -> None:
    write_capsule(example(), tmp_path / "c", max_bytes=400)
    capsule = read_capsule(tmp_path / "c")
    assert not capsule.operators.values and "3 operators" in capsule.manifest.left_out[0]
    with pytest.raises(DriftError, match="use fewer sequences"):
        write_capsule(example(), tmp_path / "d", max_bytes=10)


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("dear")
    with pytest.raises(DriftError, match="is not a capsule"):
        write_capsule(example(), tmp_path / "c")


# ---- refusals ------------------------------------------------------------------------------------------------------


def packed(header: Any, body: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "data, refusal",
    [
        (b"123", Refusal.TRUNCATED),
        (packed({}, size=1 << 62), Refusal.HEADER_SIZE),
        (packed({}, size=1000), Refusal.TRUNCATED),
        (packed(b"[1]"), Refusal.HEADER),
        (packed(b"{]"), Refusal.JSON),
        (packed(b'{"a":1,"a":2}'), Refusal.JSON),
        (packed(b'{"a":NaN}'), Refusal.JSON),
        (packed(b'{"a":' + b"9" * 100 + b"}"), Refusal.JSON),
        (packed(b'{"a":1e999}'), Refusal.JSON),
        (packed(b'{"a":-1e999}'), Refusal.JSON),
        (packed(b"[" * 100 + b"]" * 100), Refusal.JSON_DEPTH),
        (packed({"a": {"dtype": "F32"}}), Refusal.HEADER),
        (packed({"a": entry(dtype="F31")}, bytes(4)), Refusal.DTYPE),
        (packed({"a": entry(dtype=[1])}, bytes(4)), Refusal.DTYPE),
        (packed({"a": entry(shape=[-1])}, bytes(4)), Refusal.SHAPE),
        (packed({"a": entry(shape=[True])}, bytes(4)), Refusal.SHAPE),
        (packed({"a": entry(shape=[1] * 9)}, bytes(4)), Refusal.SHAPE),
        (packed({"a": entry(shape=[1 << 62, 8])}, bytes(4)), Refusal.SHAPE),
        (packed({"a": entry(shape=[0, 10**30], offsets=[0, 0])}), Refusal.SHAPE),
        (packed({"a": entry(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}), Refusal.SHAPE),
        (packed({"a": entry(shape=[0, (1 << 63) - 1], offsets=[0, 0])}), Refusal.SHAPE),
        (packed({"a": entry(offsets=[4, 0])}, bytes(4)), Refusal.OFFSETS_RANGE),
        (packed({"a": entry(offsets=[4, 8])}, bytes(4)), Refusal.OFFSETS_RANGE),
        (packed({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), Refusal.OFFSETS_OVERLAP),
        (packed({"a": entry(), "b": entry()}, bytes(4)), Refusal.OFFSETS_OVERLAP),
        (packed({"a": entry(offsets=[4, 8])}, bytes(8)), Refusal.OFFSETS_GAP),
        (packed({"a": entry()}, bytes(8)), Refusal.OFFSETS_GAP),
        (packed({str(i): entry(shape=[0], offsets=[0, 0]) for i in range(65537)}), Refusal.COUNT),
    ],
)
def test_inconsistent_tensor_files(data: bytes, refusal: Refusal) -> None:
    with pytest.raises(CapsuleError) as caught:
        parse_tensors(data, "file")
    assert caught.value.refusal is refusal and str(caught.value).startswith(refusal.value)


def rewrite(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, refusal",
    [
        (lambda m: m.update(format="rlkernel.trace/2"), Refusal.FORMAT),
        (lambda m: m.update(surprise=1), Refusal.MANIFEST),
        (lambda m: m.update(step="three"), Refusal.MANIFEST),
        (lambda m: m["sampling"].update(temperature=-1), Refusal.MANIFEST),
        (lambda m: m["files"].update({"../../etc/passwd": m["files"][TOKENS]}), Refusal.PATH),
        (lambda m: m["files"].update({"/etc/passwd": m["files"][TOKENS]}), Refusal.PATH),
        (lambda m: m["files"].pop(TOKENS), Refusal.MISSING),
        (lambda m: m["files"][TOKENS].update(bytes=7), Refusal.TRUNCATED),
        (lambda m: m["files"][TOKENS].update(sha256="0" * 64), Refusal.DIGEST),
        (lambda m: m["operators"].pop(), Refusal.TENSOR_MISSING),
        (lambda m: m["operators"][0].update(width=5), Refusal.SHAPE),
        (lambda m: m.update(model={"vocab_size": 3}), Refusal.VALUE),
        (
            lambda m: m.update(media=[{"sequence": 9, "begin": 0, "end": 1, "kind": "image", "digest": "0" * 32}]),
            Refusal.VALUE,
        ),
    ],
)
def test_inconsistent_manifests(tmp_path: Path, change: Any, refusal: Refusal) -> None:
    folder = write_capsule(example(), tmp_path / "c")
    rewrite(folder, change)
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is refusal


@pytest.mark.parametrize(
    "name, values, refusal",
    [
        ("tokens.ids", np.array([-1] * 8, np.int32), Refusal.VALUE),
        ("tokens.ids", np.zeros(7, np.int32), Refusal.SHAPE),
        ("tokens.cu_seqlens", np.array([0, 9, 8]), Refusal.VALUE),
        ("tokens.cu_seqlens", np.array([0, 0, 8]), Refusal.VALUE),
        ("tokens.spans", np.array([[0, 4, 2, 1]], np.int32), Refusal.VALUE),
        ("tokens.spans", np.array([[5, 0, 1, 1]], np.int32), Refusal.VALUE),
        ("kept.offsets", np.array([0] * 8 + [99]), Refusal.VALUE),
        ("logprobs.recorded.raw", np.zeros(3, np.float32), Refusal.SHAPE),
        ("logprobs.guessed.raw", np.zeros(8, np.float32), Refusal.TENSOR_UNKNOWN),
        ("pickle", np.zeros(8, np.float32), Refusal.TENSOR_UNKNOWN),
        ("tokens.mask", np.zeros(8, np.int32), Refusal.SHAPE),
    ],
)
def test_impossible_values(tmp_path: Path, name: str, values: Any, refusal: Refusal) -> None:
    folder = write_capsule(example(), tmp_path / "c")
    tensors = parse_tensors((folder / TOKENS).read_bytes(), TOKENS)
    write_tensors(folder / TOKENS, {**tensors, name: Tensor.of(values)})
    data = (folder / TOKENS).read_bytes()
    rewrite(
        folder, lambda m: m["files"].update({TOKENS: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})
    )
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is refusal


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    folder = write_capsule(example(), tmp_path / "c")
    os.rename(folder / TOKENS, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / TOKENS)
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is Refusal.SYMLINK
    os.remove(folder / TOKENS)
    os.mkfifo(folder / TOKENS)
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is Refusal.NOT_REGULAR
    os.remove(folder / TOKENS)
    (folder / TOKENS).mkdir()
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is Refusal.NOT_REGULAR
    assert handles is None or len(os.listdir("/proc/self/fd")) == handles
    os.rmdir(folder / TOKENS)
    with pytest.raises(CapsuleError) as caught:
        read_capsule(folder)
    assert caught.value.refusal is Refusal.MISSING


# ---- fingerprints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_row_fingerprints_are_the_same_in_torch(dtype: torch.dtype) -> None:
    x = torch.randn(5, 33).to(dtype)
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).numpy()
    ours = row_fingerprints(bits)
    theirs = row_fingerprints_torch(x, multipliers_torch(33, "cpu"))
    np.testing.assert_array_equal(ours, theirs.numpy())
    y = x.clone()
    y[2, 7] = -y[2, 7]
    assert (row_fingerprints_torch(y, multipliers_torch(33, "cpu")) != theirs).tolist() == [0, 0, 1, 0, 0]
    swapped = x[:, torch.randperm(33, generator=torch.Generator().manual_seed(1))]
    assert (row_fingerprints_torch(swapped, multipliers_torch(33, "cpu")) != theirs).all()


def test_weights_that_are_not_finite_have_a_fingerprint() -> None:
    broken = weight_fingerprint(Tensor.of(np.array([1, np.nan, np.inf], np.float32)))
    assert broken.norm is None and len(broken.digest) == 32


def test_weight_fingerprints_compare_across_dtypes() -> None:
    x = torch.randn(3, 4)
    bf16 = Tensor(x.bfloat16().view(torch.int16).numpy().view(np.uint16), "BF16")
    np.testing.assert_array_equal(round_bfloat16(x.numpy()), bf16.values)
    a, b = weight_fingerprint(Tensor.of(x.numpy())), weight_fingerprint(bf16)
    assert a.bf16 == b.bf16 == b.digest != a.digest
