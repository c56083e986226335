"""One case of the matrix: a fault (or none) is planted, recorded, compared, diagnosed, and judged."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose.noise import noise_floor
from rlkernel_drift.diagnose.run import examine
from rlkernel_drift.diagnose.verdict import diagnose_verdict
from rlkernel_drift.faults.kinds import KINDS, Kind
from rlkernel_drift.faults.world import Recorded, healthy_world, record_world
from rlkernel_drift.profiles import floor_profile
from rlkernel_drift.verdict import Status, Verdict

ABOVE = 1.5
"""A fault is above the floor where it moves the mean |d| by more than this many times the noise floor."""
HEALTHY = "healthy"


class Case(BaseModel):
    """What came of one case.

    Attributes:
        effect: mean |difference| that the fault makes by itself; floor: of these tokens and this dtype.
        above: whether the fault counts as above the floor; files: it shows in the files, whatever its size.
        named: cause in the verdict, "none" where it found no drift.
        right: named rightly; missed: called aligned.
        seconds, cpu_seconds: wall time (with whatever else ran), and this process's own. code: hash of what ran.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    group: str
    family: str
    seed: int
    dtype: str
    path: str
    planted: dict[str, Any]
    effect: float | None
    floor: float | None
    above: bool
    files: bool
    status: str
    named: str
    operator: str | None
    right: bool
    missed: bool
    seconds: float
    cpu_seconds: float
    code: str


@functools.cache
def code_hash() -> str:
    """First 16 hex digits of SHA-256 over this package's modules: which code a case came from."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def run_case(kind: str, family: str, seed: int) -> Case:
    """Runs one case.

    Args:
        kind: of `KINDS`, or "healthy".
    """
    start, own = time.perf_counter(), time.process_time()
    planted = KINDS.get(kind)
    if planted is None:
        world = healthy_world(family, 100_000 + seed)
        world.operators = seed % 2 == 0
        recorded = record_world(world)
    else:
        world = healthy_world(family, seed, planted.dtype, with_previous=planted.previous)
        recorded = record_world(world, planted.plant)
    verdict = judge_pair(recorded)
    diagnosis = verdict.diagnosis
    named = diagnosis.cause if diagnosis is not None else "none"
    operator = str(diagnosis.parameters.get("operator")) if diagnosis and "operator" in diagnosis.parameters else None
    floor = diagnosis.floor if diagnosis is not None else None
    effect = recorded.effect
    files = planted is not None and planted.visible
    above = files or (effect is not None and floor is not None and effect > ABOVE * floor)
    return Case(
        kind=kind,
        group=planted.group if planted else HEALTHY,
        family=family,
        seed=seed,
        dtype=world.dtype,
        path=world.rollout.path,
        planted=world.planted,
        effect=effect,
        floor=floor,
        above=above,
        files=files,
        status=verdict.status.value,
        named=named,
        operator=operator,
        right=_right(planted, named, operator, recorded, verdict),
        missed=planted is not None and verdict.status == Status.ALIGNED,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - own,
        code=code_hash(),
    )


def judge_pair(recorded: Recorded) -> Verdict:
    """What a user gets: the comparison under the stack's own floor, then the diagnosis."""
    references = recorded.world.references
    train = examine("train", recorded.train, references, "train.processed")
    floor = train.floor if train.floor.tokens else noise_floor(train.context, train.as_is)
    options = Options(profile=floor_profile(floor), command=["rlkernel-drift", "diagnose"])
    verdict = compare_capsules(recorded.rollout, recorded.train, options)
    return diagnose_verdict(verdict, recorded.rollout, recorded.train, lambda: references)


def _right(kind: Kind | None, named: str, operator: str | None, recorded: Recorded, verdict: Verdict) -> bool:
    if kind is None:
        return verdict.status == Status.ALIGNED and named == "none"
    if named not in kind.causes:
        return False
    return not kind.operator or operator == recorded.world.planted.get("operator")
