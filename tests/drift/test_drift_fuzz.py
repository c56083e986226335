"""The capsule reader against hostile input: any bytes end in a named refusal or in a capsule."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz_capsule import SMALL, read_anything
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkernel_drift.capsule import Manifest, build_capsule, read_capsule, write_capsule
from rlkernel_drift.capsule.folder import TOKENS
from rlkernel_drift.capsule.tensor_file import parse_json, parse_tensors
from rlkernel_drift.errors import CapsuleError, Refusal

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def capsule_folder(path: Path) -> Path:
    capsule = build_capsule(
        Manifest(engine="hf", side="rollout"),
        [[1, 2], [3]],
        [[4, 5, 6], [7, 8]],
        {"recorded.raw": [[-1.0, -2.0, -0.5], [-3.0, -0.25]]},
        kept=[[[4, 9], [5], []], [[7], [8]]],
    )
    return write_capsule(capsule, path)


@QUICK
@given(st.binary(max_size=400))
def test_arbitrary_bytes(data: bytes) -> None:
    read_anything(data)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([b'"', b"", b'["']),
    st.sampled_from([b'\\"', b"\\", b'"', b'["']),
    st.sampled_from([b"", b"\\", b"]"]),
)
def test_reading_json_takes_linear_time(begin: bytes, part: bytes, end: bytes) -> None:
    start = time.perf_counter()
    with pytest.raises(CapsuleError):
        parse_json(begin + part * 100_000 + end, "fuzz")
    assert time.perf_counter() - start < 5  # quadratic: minutes


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.dictionaries(
    st.sampled_from(["tokens.ids", "tokens.mask", "a", "__metadata__", "../x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I32", "BOOL", "BF16", "X"]) | json_values,
            "shape": st.lists(st.integers(-1, 2**64), max_size=3) | json_values,
            "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
        }
    )
    | json_values,
    max_size=4,
)


@QUICK
@given(entries, st.binary(max_size=64))
def test_headers_that_look_right(header: dict[str, object], body: bytes) -> None:
    text = json.dumps(header).encode()
    try:
        tensors = parse_tensors(len(text).to_bytes(8, "little") + text + body, "fuzz", SMALL)
    except CapsuleError:
        return
    assert sum(t.values.nbytes for t in tensors.values()) == len(body)


@QUICK
@given(st.data())
def test_a_flipped_or_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = capsule_folder(tmp_path_factory.mktemp("c") / "capsule")
    victim = folder / data.draw(st.sampled_from(["manifest.json", TOKENS]))
    content = bytearray(victim.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    victim.write_bytes(content)
    try:
        read_capsule(folder)
    except CapsuleError:
        return
    assert victim.name == "manifest.json"  # a flipped letter of a free text is another valid manifest


@QUICK
@given(st.data())
def test_a_tampered_tensor_file_with_its_digest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = capsule_folder(tmp_path_factory.mktemp("c") / "capsule")
    content = bytearray((folder / TOKENS).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / TOKENS).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][TOKENS] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    try:
        read_capsule(folder).validate()
    except CapsuleError as error:
        assert error.refusal in Refusal


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_atheris_finds_nothing(tmp_path: Path) -> None:
    """Five seconds from a valid capsule on: the instrumented reader gives a capsule or a named refusal."""
    corpus, script = tmp_path / "corpus", Path(__file__).with_name("fuzz_capsule.py")
    corpus.mkdir()
    folder = capsule_folder(tmp_path / "capsule")
    parts = [(folder / name).read_bytes() for name in ("manifest.json", TOKENS)]
    (corpus / "valid").write_bytes(b"\0\0SPLIT\0\0".join(parts))
    command = [sys.executable, script, corpus, "-max_total_time=5", "-max_len=8192", "-verbosity=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "Done " in done.stderr, done.stderr[-2000:]
