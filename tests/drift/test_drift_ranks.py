"""Captures of several ranks are one capsule, and the fault of a rank is named by its rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drift_cases import capsule, printed, sequences

from rlkernel_drift.capsule import Capsule, Sampling, build_capsule, read_capsule, write_capsule
from rlkernel_drift.capsule.folder import COUNT, rank_folder
from rlkernel_drift.compare import compare
from rlkernel_drift.errors import CapsuleError, Refusal
from rlkernel_drift.inputs.run_folder import read_run_folder

RANKS = 4


def of_rank(rank: int, side: Any, change: float = 0.0, **parts: Any) -> Capsule:
    """Two sequences of a rank; `change` is added to its log-probabilities."""
    chosen = [[*rows[2 * rank : 2 * rank + 2]] for rows in sequences()]
    prompts, completions, logprobs = chosen
    return capsule(
        side,
        prompts=prompts,
        completions=completions,
        logprobs=[v - np.float32(change) for v in logprobs],
        sequence_ids=[0, 1],
        config={COUNT: RANKS},
        contract="rlk-2",
        **parts,
    )


def captured(folder: Path, side: Any, faulty: dict[int, float], **parts: Any) -> Path:
    """A folder with the capsule of each rank."""
    for rank in range(RANKS):
        write_capsule(of_rank(rank, side, faulty.get(rank, 0.0), **parts), rank_folder(folder / side, rank))
    return folder / side


def suspects(verdict: Any) -> list[list[int]]:
    return [f.evidence["ranks"] for f in verdict.findings if f.cause == "rank-fault"]


def test_ranks_are_one_capsule(tmp_path: Path) -> None:
    rollout, train = (captured(tmp_path, side, {}) for side in ("rollout", "train"))
    merged, whole = read_capsule(rollout), capsule()
    assert merged.ranks is not None and merged.ranks.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.array_equal(merged.ids, whole.ids) and np.array_equal(merged.spans, whole.spans)
    assert merged.logprobs["recorded.processed"].tobytes() == whole.logprobs["recorded.processed"].tobytes()
    verdict = compare(rollout, train)
    assert verdict.exit_code == 0 and not suspects(verdict) and compare(tmp_path).exit_code == 0
    again = read_capsule(write_capsule(merged, tmp_path / "merged"))
    assert np.array_equal(again.ranks, merged.ranks)


@pytest.mark.parametrize("faulty", ({2: 1e-6}, {0: 0.01, 3: 0.02}))
def test_faulty_ranks_are_named(tmp_path: Path, faulty: dict[int, float]) -> None:
    verdict = compare(captured(tmp_path, "rollout", {}), captured(tmp_path, "train", faulty))
    assert verdict.exit_code == 1 and suspects(verdict) == [list(faulty)]
    words = f"the difference is that of rank{'s' if len(faulty) > 1 else ''} {', '.join(map(str, faulty))}"
    assert words in printed(verdict)


def test_a_fault_above_the_others_drift_is_named(tmp_path: Path) -> None:
    drifting = {rank: 1e-5 for rank in range(RANKS)}
    rollout = captured(tmp_path, "rollout", {})
    assert suspects(compare(rollout, captured(tmp_path / "one", "train", {**drifting, 1: 0.01}))) == [[1]]
    assert suspects(compare(rollout, captured(tmp_path / "all", "train", drifting))) == []  # the control


def test_incomplete_and_differing_ranks_are_refused(tmp_path: Path) -> None:
    def changed(rank: int, one: Capsule | None) -> str:
        folder = captured(tmp_path / str(rank), "train", {})
        place = rank_folder(folder, rank)
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
        if one is not None:
            write_capsule(one, place)
        with pytest.raises(CapsuleError) as raised:
            read_capsule(folder)
        assert raised.value.refusal in (Refusal.MISSING, Refusal.VALUE)
        return raised.value.reason

    assert "has no capsule of rank 1" in changed(1, None)
    assert "of 3 ranks, but 4 ranks wrote them" in changed(3, None)
    assert "rank 2 has another sampling than rank 0" in changed(2, of_rank(2, "train", sampling=Sampling(top_k=3)))


@pytest.mark.parametrize("ranks, expected", ((1, None), (2, [0, 1, 0, 0, 1, 0])))
def test_run_folders(tmp_path: Path, ranks: int, expected: list[int] | None) -> None:
    token = {"id": 5, "text": "a", "rollout": "bf800000", "training": "bf800000"}
    rows = [{"step": step, "tokens": [token]} for step in (1, 1, 1, 2, 2, 2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "contract": "rlk-2"}) + "\n")
    (tmp_path / "config.yaml").write_text("rollout: {}\n")
    (tmp_path / "run.json").write_text(json.dumps({"ranks": ranks}))
    side = read_run_folder(tmp_path, "rollout")
    assert side is not None and (side.ranks if side.ranks is None else side.ranks.tolist()) == expected


def test_ranks_have_a_number_per_sequence() -> None:
    whole = capsule()
    with pytest.raises(CapsuleError, match=r"tokens\.ranks"):
        dataclasses.replace(whole, ranks=np.zeros(3, np.int32)).validate()
    assert build_capsule(whole.manifest, [[1]], [[2]], {"train.raw": [[-1.0]]}, ranks=[7]).ranks is not None
