"""A subset of the matrix of planted faults, a demo, and diagnosis from two files without a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from drift_cases import with_logits

from rlkernel_drift.capsule import Floor, Sampling
from rlkernel_drift.cli.main import main
from rlkernel_drift.diagnose.attach import diagnose_recorded
from rlkernel_drift.faults import KINDS
from rlkernel_drift.faults.world import healthy_world, record_world
from rlkernel_drift.power import Case, plan, run_case, run_matrix, summary, write_result
from rlkernel_drift.power_tables import TABLES, kinds
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
    cases = plan(1, 60)
    unseen = sum(name in KINDS and KINDS[name].group == "unseen" for name, _, _ in cases)
    assert len(KINDS) >= 60 and len(cases) >= 150 and unseen / (len(cases) - 60) >= 0.35
    groups = "semantics weights tokens layout precision settings operators unseen"
    assert {k.group for k in KINDS.values()} == set(groups.split())


def test_a_stopped_matrix_is_continued(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    cases = plan(3, 0, ["other mask"])
    first = run_matrix(cases[:1], 1, log)
    with open(log, "a") as file:
        file.write('{"kind": "cut off')
    reported = []
    (tmp_path / "log.jsonl").write_text(log.read_text().rsplit("\n", 1)[0] + "\n")
    results = run_matrix(cases, 1, log, reported.append)
    assert results[0] == first[0] and len(reported) == len(cases) - 1
    figures = write_result(tmp_path / "r.json", results, ["rlkernel-drift", "power"])
    assert figures == summary(results) and figures["named_right"] == len(cases) == figures["above_floor"]
    assert "| other mask | tokens |" in kinds(figures)


def case(kind: str, named: str, planted: dict[str, object], right: bool, above: bool = True) -> Case:
    group = KINDS[kind].group if kind in KINDS else "healthy"
    return Case(
        kind=kind, group=group, family="llama", seed=0, dtype="float32", path="alone", planted=planted, effect=1.0,
        floor=0.1, above=above, files=False, status="drift", named=named, operator=None, right=right, missed=False,
        seconds=3.0, cpu_seconds=1.0, code="c",
    )  # fmt: skip


def test_tables_agree_with_the_rows(tmp_path: Path) -> None:
    final, query = {"operator": "final_norm", "size": 0.1}, {"operator": "layers.2.q_proj", "size": 0.25}
    cases = [
        case("top-p", "top-p", {}, True),
        case("top-p", "min-p", {}, False),
        case("top-p", "unexplained", {}, False, above=False),
        case("final norm", "operator", final, True),
        case("error of the query projection in one layer", "operator", query, False),
        case("healthy", "none", {}, True, above=False),
    ]
    path = tmp_path / "r.json"
    write_result(path, cases, ["rlkernel-drift", "power"])
    made = {name: make(json.loads(path.read_text())) for name, make in TABLES.items()}
    assert "| top-p | semantics | min-p (1) | 2 of 3 | 1 | 0 |" in made["kinds"]
    assert "| top-p | top-p (1), min-p (1) |" in made["confusion"] and "| healthy | none (1) |" in made["confusion"]
    assert "| another operator (1) |" in made["confusion"]
    assert "| final norm | 0.1 to 0.1 |  | 1 of 1 |" in made["depths"]
    assert "| error of the query projection in one layer | 0.25 to 0.25 | 0 of 1 |  |" in made["depths"]
    assert "of 4 faults above the noise floor 2 were named correctly (50.0%)" in made["sentence"]
    assert "1 s of CPU time per case" in made["source"]


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
def test_two_files_without_a_model_name_a_temperature(sampling: Sampling, cause: str) -> None:
    torch.set_num_threads(1)
    world = healthy_world("llama", 4, "float32")
    recorded = record_world(world, lambda w: setattr(w.rollout, "sampling", sampling))
    train = with_logits(recorded).train
    found = diagnose_recorded(recorded.rollout, train)
    assert found is not None and found.cause == cause
    if cause == "temperature":
        assert found.parameters["temperature"] == pytest.approx(0.73, abs=1e-3)
    floor = Floor(mean=1e-4, p99=1e-3, maximum=1e-2, tokens=100)
    floored = dataclasses.replace(train, manifest=train.manifest.model_copy(update={"floor": floor}))
    assert diagnose_recorded(recorded.rollout, floored).cause == cause  # type: ignore[union-attr]
