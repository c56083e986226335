"""`rlkernel-drift layout`, and the layout inside `compare`, on files of records."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from drift_cases import capsule
from layout_worlds import as_verl, as_vllm, conversation

from rlkernel.multimodal import MultimodalBatch, write_records
from rlkernel_drift.capsule import write_capsule
from rlkernel_drift.cli.main import main


@pytest.fixture
def sides() -> tuple[MultimodalBatch, MultimodalBatch]:
    rng = random.Random(0)
    samples = [conversation(rng, turns=3) for _ in range(3)]
    return as_vllm(samples), as_verl(samples)


def _write(folder: Path, sides: tuple[MultimodalBatch, MultimodalBatch], train_shift: float = 0.0) -> list[str]:
    paths = []
    for side, batch in zip(("rollout", "train"), sides, strict=True):
        rng = random.Random(1)
        starts = {s: b for s, b, _ in reversed(batch.loss_spans.tolist())}
        lengths = [t.stop - t.start - starts[b] for b, t in enumerate(batch.ranges)]
        shift = train_shift if side == "train" else 0.0
        logprobs = [[-rng.random() - shift for _ in range(length)] for length in lengths]
        write_records(batch, folder / f"{side}.jsonl", logprobs=logprobs)
        paths.append(str(folder / f"{side}.jsonl"))
    return paths


def test_layout_command(
    tmp_path: Path, sides: tuple[MultimodalBatch, MultimodalBatch], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", *_write(tmp_path, sides)]) == 0
    out = capsys.readouterr().out
    assert "0 of 3 samples differ" in out and "positions (temporal, height, width)" in out
    rollout, train = sides
    media = (replace(train.media[1], digest="0" * 64), *train.media[1:])
    assert main(["layout", *_write(tmp_path, (rollout, replace(train, media=media)))]) == 1
    out = capsys.readouterr().out
    assert "resized" in out or "pixels-differ" in out
    assert "\n  rollout  image of grid" in out and "\n  train    image of grid" in out and "digest 000000000000" in out
    (tmp_path / "bad.jsonl").write_text('{"token_ids": [1, "a"]}\n')
    assert main(["layout", str(tmp_path / "rollout.jsonl"), str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 1" in capsys.readouterr().err
    assert main(["layout", str(tmp_path / "rollout.jsonl"), str(tmp_path / "missing.jsonl")]) == 2


def test_compare_checks_the_layout_before_log_probabilities(
    tmp_path: Path, sides: tuple[MultimodalBatch, MultimodalBatch]
) -> None:
    rollout, train = sides
    verdict = tmp_path / "verdict.json"
    assert main(["compare", *_write(tmp_path, sides), "--json", str(verdict)]) == 0
    gates = {gate["name"]: gate for gate in json.loads(verdict.read_text())["gates"]}
    assert "layout of 3 samples is equal" in gates["tokens"]["findings"][0]["message"]
    # equal token ids and logged positions: only the layout sees the order of the axes
    assert train.positions is not None
    swapped = replace(train, positions=train.positions[[0, 3, 1, 2]])
    assert main(["compare", *_write(tmp_path, (rollout, swapped), 0.3), "--json", str(verdict)]) == 4
    gates = {gate["name"]: gate for gate in json.loads(verdict.read_text())["gates"]}
    assert gates["tokens"]["findings"][0]["evidence"]["difference"] == "axis-order"
    assert gates["statistics"]["status"] == "not reached"


def test_layout_in_the_folder_of_a_capsule(tmp_path: Path, sides: tuple[MultimodalBatch, MultimodalBatch]) -> None:
    rollout, train = sides
    assert train.positions is not None
    for name in ("rollout", "train"):
        write_capsule(capsule(name), tmp_path / name)
    paths = [str(tmp_path / name) for name in ("rollout", "train")]
    assert main(["compare", *paths]) == 0
    write_records(rollout, tmp_path / "rollout" / "layout.jsonl")
    write_records(replace(train, positions=train.positions + 1), tmp_path / "train" / "layout.jsonl")
    assert main(["compare", *paths, "--json", str(tmp_path / "verdict.json")]) == 4
    gates = {gate["name"]: gate for gate in json.loads((tmp_path / "verdict.json").read_text())["gates"]}
    assert gates["tokens"]["findings"][0]["evidence"]["difference"] == "positions-shift"
    assert main(["layout", *paths]) == 1
    (tmp_path / "train" / "layout.jsonl").write_text("{")
    assert main(["layout", *paths]) == 2 and main(["compare", *paths]) == 2
