"""The verdict: the JSON-serialisable model from which every output is written (text, Markdown, JSON, JUnit, HTML).

Lists are bounded where they are built, so that the verdict of any run fits into a report.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlkernel_drift.statistics import Lattice, SequenceStatistics, TokenStatistics, UlpHistogram

SCHEMA = "rlkernel.verdict/1"
Scalar = str | int | float | bool | None


class Status(StrEnum):
    """The result of a comparison."""

    ALIGNED = "aligned"
    DRIFT = "drift"
    UNUSABLE = "unusable input"
    INCONCLUSIVE = "inconclusive"
    INPUTS_DIFFER = "inputs differ"


EXIT_CODES = {Status.ALIGNED: 0, Status.DRIFT: 1, Status.UNUSABLE: 2, Status.INCONCLUSIVE: 3, Status.INPUTS_DIFFER: 4}


class Part(BaseModel):
    """Base of all parts: unknown keys are errors, and numbers that are not finite become null in JSON."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Thread(Part):
    """A public thread in which the cause was seen."""

    name: str
    url: str
    seen: str = ""


class Finding(Part):
    """One finding of a gate or of the diagnosis.

    Attributes:
        cause: key of `knowledge.CAUSES`.
        message: one sentence with the numbers.
        evidence: the numbers by name.
        fix: the remedy; threads: where others saw the cause.
        severity: an error fails its gate; warnings and notes do not.
    """

    cause: str
    message: str
    evidence: dict[str, Scalar | list[Scalar]] = {}
    fix: str = ""
    threads: list[Thread] = []
    severity: Literal["error", "warning", "note"] = "error"


GateStatus = Literal["passed", "failed", "warned", "skipped", "not reached"]


class Gate(Part):
    """The result of one gate."""

    name: str
    title: str
    status: GateStatus
    summary: str
    findings: list[Finding] = []


class Metric(Part):
    """A statistic and its threshold.

    Attributes:
        ratio: value over limit (limit over value for a lower limit); above 1 the threshold is exceeded.
        source: where the threshold was published.
    """

    name: str
    label: str
    value: float | None
    at_most: float | None = None
    at_least: float | None = None
    ratio: float | None = None
    status: Literal["ok", "over", "no threshold", "missing"] = "no threshold"
    source: str = ""


class Side(Part):
    """What one input declares about itself."""

    label: str
    kind: Literal["capsule", "sequences", "run folder", "model", "metrics", "hidden states"]
    engine: str = ""
    stream: str | None = None
    contract: str | None = None
    model: str = ""
    step: int | None = None
    weights_version: int | str | None = None
    tokens: int = 0
    sequences: int = 0
    sampling: dict[str, Scalar] = {}
    config: dict[str, Scalar] = {}
    versions: dict[str, str] = {}
    hardware: dict[str, Scalar] = {}
    command: list[str] = []


class Difference(Part):
    """A setting that differs between the sides."""

    key: str
    rollout: Scalar
    train: Scalar
    weight: Literal["numerics", "version", "other"] = "other"


class Token(Part):
    """One compared token.

    Attributes:
        sequence, index: sequence, and index in it; position: position id that the model received.
        text: None without a vocabulary. difference: train - rollout.
    """

    sequence: int
    index: int
    position: int
    id: int
    text: str | None
    rollout: float | None
    train: float | None
    difference: float | None
    span: str = ""


class Histogram(Part):
    """Counts between edges, one fewer than edges."""

    edges: list[float]
    counts: list[int]


class Coverage(Part):
    """Compared sequences and counted tokens, out of those of the larger side."""

    sequences: int
    of: int
    tokens: int = 0
    of_tokens: int = 0

    @property
    def share(self) -> float:
        """The smaller of the two shares, because the missing sequences may be the long ones."""
        return min(self.sequences / max(1, self.of), self.tokens / max(1, self.of_tokens))

    def __str__(self) -> str:
        words = f"{self.sequences} of {self.of} sequences"
        return words + (f" with {self.tokens} of {self.of_tokens} tokens" if self.tokens < self.of_tokens else "")


class TokenView(Part):
    """Tokens for the report: the worst ones, sequences for the strip, a sample for the scatter plot."""

    worst: list[Token] = []
    strip: list[list[Token]] = []
    scatter: list[tuple[float, float]] = []
    signed: Histogram | None = None
    by_position: list[tuple[float, float]] = []


class Divergence(Part):
    """The first place where two recordings differ.

    Attributes:
        layer: number of the layer, None outside the layers.
        sequence, index: the token; element: index in the row, None for fingerprints.
        rollout, train: the values; ulps: their distance.
        rows, of: number of differing and of compared rows.
    """

    operator: str
    layer: int | None
    sequence: int
    index: int
    element: int | None = None
    rollout: float | None = None
    train: float | None = None
    ulps: int | None = None
    rows: int = 0
    of: int = 0


class LayerView(Part):
    """Operators in the order of computation.

    Attributes:
        accumulated: relative error of each output if both sides compute from the tokens.
        local: relative error of each output if the reference replays the operator on the recorded input.
        floor: rounding error of the operator on that input.
        splice: mean |difference| of the log-probabilities that is left when the layer's output is replaced.
        heat: log10 of the relative error, one row per operator and one column per group of tokens.
        heat_tokens: first token of each column.
    """

    operators: list[str] = []
    accumulated: list[float | None] = []
    local: list[float | None] = []
    floor: list[float | None] = []
    splice: list[float | None] = []
    heat: list[list[float | None]] = []
    heat_tokens: list[int] = []
    first: Divergence | None = None


class HypothesisResult(Part):
    """A hypothesis and how well it explains the differences.

    Attributes:
        residual, tail: mean and 99% quantile of the |difference| that is left; over_floor: mean over noise floor.
    """

    name: str
    cause: str
    side: str
    parameters: dict[str, Scalar] = {}
    residual: float
    tail: float
    over_floor: float


class Diagnosis(Part):
    """The named cause, or what was excluded.

    Attributes:
        cause: key of `knowledge.CAUSES`, "none" (aligned) or "unexplained".
        side: the side that differs from the reference.
        statement: the diagnosis as a sentence.
        residual, as_is: mean |difference| under the cause, and as the side declares itself.
        floor: mean |difference| of the noise; floor_source: how it was measured.
        hypotheses: best first.
        excluded: causes that re-scoring ruled out.
        confidence: proven (re-scoring removes the difference, a replay or a gate shows it), likely (evidence without
            that proof, or several changes give the same numbers), or unknown.
        alternatives: causes whose changes give the same numbers as that of `cause`.
        location: the narrowest place of the difference: operator, tensor, layer or part of the tokens.
        tried: changes of each stage of the search. next: the command that would decide or confirm.
    """

    cause: str
    side: str = ""
    statement: str
    parameters: dict[str, Scalar] = {}
    residual: float | None = None
    as_is: float | None = None
    floor: float | None = None
    floor_source: str = ""
    hypotheses: list[HypothesisResult] = []
    excluded: list[str] = []
    confidence: Literal["proven", "likely", "unknown"] = "unknown"
    alternatives: list[str] = []
    location: str = ""
    tried: dict[str, int] = {}
    next: str = ""
    finding: Finding | None = None

    @property
    def summary(self) -> list[str]:
        """Confidence and place, next command, what was tried, one line each."""
        lines = [f"confidence: {self.confidence}{f'; at {self.location}' if self.location else ''}"]
        if self.next:
            lines.append(f"next: {self.next}")
        if self.tried and self.confidence != "proven":
            lines.append("tried: " + ", ".join(f"{stage} {count}" for stage, count in self.tried.items()))
        return lines


class Consequence(Part):
    """The cost of the drift under one correction or clip, or to the gradient.

    Attributes:
        tokens, sequences: affected shares.
        cosine: between the gradients with and without the mismatch; length: of the latter relative to the former.
    """

    name: str
    setting: str
    tokens: float | None = None
    sequences: float | None = None
    cosine: float | None = None
    length: float | None = None
    words: str = ""


class Trend(Part):
    """A metric over steps.

    Attributes:
        change: step at which the level changes, None if it does not.
        version: version of the weights at that step, if known.
        before, after: levels before and after the change.
    """

    metric: str
    steps: list[int]
    values: list[float | None]
    change: int | None = None
    version: int | str | None = None
    before: float | None = None
    after: float | None = None
    words: str = ""


class Verdict(Part):
    """The result of a comparison.

    Attributes:
        headline: the answer in one sentence.
        scope: what was compared.
        factors: statistics of each link of the chain train, prefill, decode, recorded.
    """

    schema_id: str = Field(default=SCHEMA, alias="schema")
    tool: str = ""
    status: Status
    exit_code: int
    headline: str
    scope: str = ""
    profile: str = ""
    profile_source: str = ""
    rollout: Side | None = None
    train: Side | None = None
    gates: list[Gate] = []
    metrics: list[Metric] = []
    statistics: TokenStatistics | None = None
    sequence_statistics: SequenceStatistics | None = None
    coverage: Coverage | None = None
    ulps: UlpHistogram | None = None
    lattice: Lattice | None = None
    factors: dict[str, TokenStatistics] = {}
    tokens: TokenView | None = None
    layers: LayerView | None = None
    differences: list[Difference] = []
    diagnosis: Diagnosis | None = None
    consequences: list[Consequence] = []
    trends: list[Trend] = []
    command: list[str] = []

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null", populate_by_name=True)

    @property
    def findings(self) -> list[Finding]:
        """All findings, in the order of the gates."""
        return [finding for gate in self.gates for finding in gate.findings]

    def gate(self, name: str) -> Gate:
        """The result of a gate, by its name."""
        return next(gate for gate in self.gates if gate.name == name)

    def with_gate(self, new: Gate) -> Verdict:
        """The verdict with another result of one gate."""
        gates = [new if gate.name == new.name else gate for gate in self.gates]
        return self.model_copy(update={"gates": gates})

    @property
    def named(self) -> Finding | None:
        """The established cause: of the diagnosis, or of a gate if there is no diagnosis or it found no cause."""
        if self.diagnosis is not None and (self.diagnosis.finding is not None or self.diagnosis.cause != "none"):
            return self.diagnosis.finding
        return next((f for f in self.findings if f.severity == "error" and f.cause != "drift"), None)

    @property
    def suspect(self) -> Finding | None:
        """If no cause is named, the first one to which evidence points and which the diagnosis did not exclude."""
        found = self.diagnosis
        if self.named is not None or (found is not None and found.cause == "none"):
            return None
        excluded = found.excluded if found is not None else []
        return next((f for f in self.findings if f.severity == "warning" and f.cause not in excluded), None)

    def to_json(self) -> str:
        """Strict JSON, keys in the order of the model."""
        return self.model_dump_json(by_alias=True, indent=1)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a verdict."""
    return Verdict.model_json_schema(by_alias=True)
