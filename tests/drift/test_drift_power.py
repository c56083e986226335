"""A subset of the matrix of planted faults, every demo that is quick, and diagnosis from two files alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkernel_drift.capsule import Floor, Sampling
from rlkernel_drift.cli.main import main
from rlkernel_drift.diagnose.recorded import diagnose_recorded
from rlkernel_drift.faults.kinds import KINDS
from rlkernel_drift.faults.world import healthy_world, record_world, with_distribution
from rlkernel_drift.power.case import run_case
from rlkernel_drift.power.matrix import plan, run_matrix, summary, table, write_result
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.verdict import Verdict

# One or two of each group; `rlkernel-drift power` runs them all.
CASES = [
    ("top-p", "qwen2", 12),
    ("padded vocabulary", "llama", 3),
    ("stale fingerprints", "llama", 11),
    ("dropped first token", "llama", 12),
    ("retokenised", "qwen3", 11),
    ("bfloat16 logits", "llama", 12),
    ("exchanged heads in one layer", "qwen2", 13),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, family, seed", CASES)
def test_planted_faults_are_named(kind: str, family: str, seed: int) -> None:
    case = run_case(kind, family, seed)
    assert case.above and case.right and not case.missed, case


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_healthy_pairs_raise_no_alarm(family: str) -> None:
    case = run_case("healthy", family, 1)
    assert case.right, case


def test_the_matrix_covers_enough() -> None:
    assert len(KINDS) >= 25 and len(plan(5, 200)) >= 25 * 5 * 3 + 200
    assert {k.group for k in KINDS.values()} == {"semantics", "weights", "tokens", "layout", "precision", "operators"}


def test_a_stopped_matrix_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    cases = plan(1, 0, ["other mask"])
    first = run_matrix(cases[:1], 1, log)
    with open(log, "a") as file:
        file.write('{"kind": "cut off')
    told = []
    (tmp_path / "log.jsonl").write_text(log.read_text().rsplit("\n", 1)[0] + "\n")
    results = run_matrix(cases, 1, log, told.append)
    assert results[0] == first[0] and len(told) == len(cases) - 1
    figures = write_result(tmp_path / "r.json", results, ["rlkernel-drift", "power"])
    assert figures == summary(results) and figures["named_right"] == len(cases) == figures["above_floor"]
    assert "| other mask | tokens |" in table(figures)


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    out = tmp_path / "v.json"
    assert main(["demo", "faulty-layer", "--out", str(tmp_path / "d"), "--json", str(out)]) == 1
    verdict = Verdict.model_validate_json(out.read_text())
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == "operator"
    assert verdict.layers is not None and any(v is not None for v in verdict.layers.splice)
    cost = verdict.consequences[-1]
    assert cost.name == "gradient" and cost.cosine is not None and -1 <= cost.cosine < 1 and cost.length is not None
    d = str(tmp_path / "d")
    assert main(["diagnose", f"{d}/rollout", f"{d}/train", "--model", f"{d}/model", "--json", str(out)]) == 1
    assert Verdict.model_validate_json(out.read_text()).diagnosis.cause == "operator"  # type: ignore[union-attr]


@pytest.mark.parametrize("sampling, cause", [(Sampling(temperature=0.73), "temperature"), (Sampling(), "none")])
def test_two_files_alone_name_a_temperature(sampling: Sampling, cause: str) -> None:
    torch.set_num_threads(1)
    world = healthy_world("llama", 4, "float32")
    recorded = record_world(world, lambda w: setattr(w.rollout, "sampling", sampling))
    sequences = sequences_of(recorded.train)
    logits = world.trainer.model.logits(sequences).numpy()
    keep = np.arange(0, sequences.counted, 3)
    train = with_distribution(recorded.train, sequences.token.numpy()[keep], logits[keep])
    found = diagnose_recorded(recorded.rollout, train)
    assert found is not None and found.cause == cause
    if cause == "temperature":
        assert found.parameters["temperature"] == pytest.approx(0.73, abs=1e-3)
    floor = Floor(mean=1e-4, p99=1e-3, maximum=1e-2, tokens=100)
    floored = dataclasses.replace(train, manifest=train.manifest.model_copy(update={"floor": floor}))
    assert diagnose_recorded(recorded.rollout, floored).cause == cause  # type: ignore[union-attr]
