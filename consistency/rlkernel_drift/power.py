"""Detection power: every kind of fault on every family and seed, and healthy pairs; which were named, which missed.

Each case plants a fault (or none), records both sides, compares and diagnoses them. The matrix runs the cases in
parallel and logs each when it ends.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose.attach import diagnose_verdict
from rlkernel_drift.diagnose.context import noise_floor
from rlkernel_drift.diagnose.sides import examine
from rlkernel_drift.errors import DriftError
from rlkernel_drift.faults import KINDS
from rlkernel_drift.faults.kinds import Kind
from rlkernel_drift.faults.world import FAMILIES, Recorded, healthy_world, record_world
from rlkernel_drift.profiles import floor_profile
from rlkernel_drift.verdict import Status, Verdict

ABOVE = 1.5
"""A fault is above the floor if it moves the mean |d| by more than this many times the noise floor."""
HEALTHY = "healthy"


class Case(BaseModel):
    """The result of one case.

    Attributes:
        effect: mean |difference| that the fault causes by itself; floor: noise floor of these tokens and this dtype.
        above: whether the fault counts as above the floor; files: whether it shows in the files, at any size.
        named: cause in the verdict, "none" if it found no drift.
        right: whether the cause is the planted one; missed: whether the pair was called aligned.
        seconds, cpu_seconds: wall time, and CPU time of this process. code: hash of the package's modules.
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
    """First 16 hex digits of SHA-256 over the modules of this package, to identify the code of a case."""
    package = Path(__file__).resolve().parent
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
    """The verdict that a user gets: the comparison under the stack's own floor, then the diagnosis."""
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
    if kind.place:
        return verdict.diagnosis is not None and str(recorded.world.planted["place"]) in verdict.diagnosis.location
    return not kind.operator or operator == recorded.world.planted.get("operator")


Key = tuple[str, str, int]


def plan(seeds: int, healthy: int, kinds: Iterable[str] | None = None) -> list[Key]:
    """Cases of `seeds` seeds: unseen kinds on every family, others on one each, then healthy pairs of the families."""
    chosen = list(KINDS) if kinds is None else list(kinds)
    unknown = [name for name in chosen if name not in KINDS]
    if unknown:
        raise DriftError(f"fault {unknown[0]!r} is unknown; known are: {', '.join(KINDS)}")
    faults = []
    for seed in range(seeds):
        for i, name in enumerate(chosen):
            families = KINDS[name].families
            own = families if KINDS[name].group == "unseen" else (families[(i + seed) % len(families)],)
            faults += [(name, family, seed) for family in own]
    return faults + [(HEALTHY, FAMILIES[i % len(FAMILIES)], i) for i in range(healthy)]


def run_matrix(
    cases: list[Key], jobs: int, log: Path | None = None, report: Callable[[Case], None] = lambda _: None
) -> list[Case]:
    """Runs the cases, except those that `log` already holds, so that a stopped run can be continued."""
    done = {(c.kind, c.family, c.seed): c for c in read_cases(log)} if log is not None else {}
    left = [key for key in cases if key not in done]
    for case in _run(left, jobs):
        done[case.kind, case.family, case.seed] = case
        if log is not None:
            with open(log, "a", encoding="utf-8") as file:
                file.write(case.model_dump_json() + "\n")
        report(case)
    return [done[key] for key in cases]


def _run(cases: list[Key], jobs: int) -> Iterator[Case]:
    if jobs == 1:
        yield from (run_case(*key) for key in cases)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code_hash()  # cached before the workers start, so that all of them record the code with which this run began
    with ProcessPoolExecutor(jobs, initializer=_one_thread) as pool:
        for future in as_completed([pool.submit(run_case, *key) for key in cases]):
            yield future.result()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def read_cases(path: Path) -> list[Case]:
    """Cases of a log, without a last line that was cut off."""
    if not path.is_file():
        return []
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            cases.append(Case.model_validate_json(line))
        except ValueError:
            continue
    return cases


def summary(cases: list[Case]) -> dict[str, Any]:
    """Totals of the matrix, the same by kind, and the confusion of causes."""
    faults = [c for c in cases if c.kind != HEALTHY]
    above = [c for c in faults if c.above]
    healthy = [c for c in cases if c.kind == HEALTHY]
    kinds = []
    for name in dict.fromkeys(c.kind for c in faults):
        mine = [c for c in faults if c.kind == name]
        over = [c for c in mine if c.above]
        kinds.append(
            {
                "kind": name,
                "group": mine[0].group,
                "cases": len(mine),
                "above_floor": len(over),
                "named_right": sum(c.right for c in over),
                "called_aligned": sum(c.missed for c in over),
                "below_floor_named": sum(c.right for c in mine if not c.above),
                "otherwise": dict(Counter(c.named for c in over if not c.right)),
            }
        )
    confusion: dict[str, Counter[str]] = {}
    for c in above + healthy:
        wrong_operator = c.named == "operator" and not c.right
        confusion.setdefault(c.kind, Counter())["another operator" if wrong_operator else c.named] += 1
    return {
        "above_floor_means": f"effect > {ABOVE} x noise floor, or visible in the files",
        "kinds": len(kinds),
        "families": len({c.family for c in cases}),
        "seeds": len({c.seed for c in faults}),
        "cases": len(faults),
        "above_floor": len(above),
        "named_right": sum(c.right for c in above),
        "named_right_share": sum(c.right for c in above) / len(above) if above else None,
        "called_aligned_above_floor": sum(c.missed for c in above),
        "below_floor": len(faults) - len(above),
        "below_floor_named_right": sum(c.right for c in faults if not c.above),
        "healthy": len(healthy),
        "false_alarms": sum(not c.right for c in healthy),
        "cpu_seconds": sum(c.cpu_seconds for c in cases),
        "code": sorted({c.code for c in cases}),
        "by_kind": kinds,
        "confusion": {name: dict(counts) for name, counts in confusion.items()},
        "operators": _by_layer([c for c in faults if c.group == "operators"]),
    }


def _by_layer(cases: list[Case]) -> list[dict[str, Any]]:
    """For each kind of faulty operator: smallest and largest fault, and by layer [named right, above the floor]."""
    found = []
    for kind in dict.fromkeys(c.kind for c in cases):
        mine = [c for c in cases if c.kind == kind]
        sizes = [c.planted[key] for c in mine for key in ("factor", "size", "epsilon") if key in c.planted]
        layers: dict[str, list[int]] = {}
        for c in mine:
            name = str(c.planted["operator"]).split(".")  # layers.2.q_proj, or final_norm
            counts = layers.setdefault(name[1] if len(name) == 3 else "", [0, 0])
            counts[0] += c.right and c.above
            counts[1] += c.above
        found.append({"kind": kind, "sizes": [min(sizes), max(sizes)] if sizes else [], "layers": layers})
    return found


def write_result(path: Path, cases: list[Case], command: list[str]) -> dict[str, Any]:
    """Writes the summary as JSON and returns it; `run_matrix` logs the cases."""
    from rlkernel_drift.capture.request import hardware, versions

    figures = summary(cases)
    result = {
        "name": "drift_power",
        "command": " ".join(command),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return figures
