"""The comparison: exit codes, order of gates, coverage, floors, hints and the links of the chain."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from drift_cases import capsule, causes, gate, part_of, printed, relabel, sequences

from rlkernel_drift.capsule import (
    Floor,
    Manifest,
    build_capsule,
    write_capsule,
)
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import compare
from rlkernel_drift.profiles import FLOOR_FACTOR, PROFILES, carried_floor
from rlkernel_drift.report import write_html
from rlkernel_drift.verdict import Status

# ---- exit codes ----------------------------------------------------------------------------------------------------


def test_equal_bits_are_aligned() -> None:
    verdict = compare(capsule(contract="rlk-2"), capsule("train", contract="rlk-2"))
    assert (verdict.status, verdict.exit_code, verdict.profile) == (Status.ALIGNED, 0, "bitwise")
    assert verdict.statistics is not None and verdict.statistics.equal == 1
    assert [g.name for g in verdict.gates] == [
        "schema", "weights", "tokens", "semantics", "configuration", "statistics", "layers"
    ]  # fmt: skip
    assert gate(verdict, "weights").status == "skipped"  # nothing recorded is never a pass


def test_one_ulp_fails_the_bitwise_profile_and_no_other() -> None:
    prompts, _, logprobs = sequences()
    moved = [v.copy() for v in logprobs]
    moved[3][7] = np.nextafter(moved[3][7], np.float32(0))
    train = capsule("train", logprobs=moved)
    verdict = compare(capsule(), train, profile="bitwise")
    assert verdict.exit_code == 1 and verdict.statistics is not None and verdict.statistics.equal == 1 - 1 / 348
    assert verdict.ulps is not None and verdict.ulps.bins == {"1": 1}
    assert verdict.tokens is not None
    assert (verdict.tokens.worst[0].sequence, verdict.tokens.worst[0].index) == (3, 7 + len(prompts[3]))
    for name in PROFILES:
        assert compare(capsule(), train, profile=name).exit_code == (1 if name == "bitwise" else 0)


@pytest.mark.parametrize("name", ["prime-rl", "nemo", "miles"])
def test_drift_fails_every_profile(name: str) -> None:
    verdict = compare(capsule(), capsule("train", noise=0.3), profile=name)
    assert verdict.exit_code == 1 and causes(verdict, "statistics") == ["drift"]
    assert gate(verdict, "layers").status == "skipped"
    assert verdict.consequences and all(c.words for c in verdict.consequences)


def test_sides_in_the_wrong_order_are_reported() -> None:
    verdict = compare(capsule("train", noise=0.01), capsule())
    assert verdict.exit_code == 0 and [f.cause for f in verdict.findings] == ["sides-exchanged"]
    assert gate(verdict, "schema").status == "warned"


def test_nothing_compared_is_inconclusive() -> None:
    none = [np.full_like(v, np.nan) for v in sequences()[2]]
    masks = [[False] * len(v) for v in none]
    verdict = compare(capsule(masks=masks), capsule("train", masks=masks))
    assert verdict.exit_code == 3 and verdict.status == Status.INCONCLUSIVE
    prompts, completions, _ = sequences()
    bare = build_capsule(Manifest(side="rollout"), prompts, completions, {})
    assert compare(bare, capsule("train")).exit_code == 3


def test_values_that_are_not_numbers_fail() -> None:
    broken = [v.copy() for v in sequences()[2]]
    broken[0][3] = np.nan
    assert causes(compare(capsule(), capsule("train", logprobs=broken)), "statistics") == ["not-finite"]
    nothing = compare(capsule(), capsule("train", logprobs=[np.full_like(v, np.nan) for v in broken]))
    assert nothing.exit_code == 1 and causes(nothing, "statistics") == ["not-finite"]
    broken[0][3] = -np.inf
    assert causes(compare(capsule(), capsule("train", logprobs=broken)), "statistics") == ["support"]


@pytest.mark.parametrize("value, cause", [(np.nan, "not-finite"), (-np.inf, "support"), (3.0, "above-zero")])
def test_invalid_values_leave_no_other_cause(value: float, cause: str) -> None:
    # The other values are those of the rollout times a factor, on a lattice.
    rows = [np.round(v * np.float32(1.5) * 32) / 32 for v in sequences()[2]]
    assert {"drift", "units"} <= {f.cause for f in compare(capsule(), capsule("train", logprobs=rows)).findings}
    rows[2][5] = value
    verdict = compare(capsule(), capsule("train", logprobs=rows))
    assert verdict.exit_code == 1 and {f.cause for f in verdict.findings} == {cause} and verdict.lattice is None
    for words in ("another temperature", "different temperatures", "multiples of 1/", "drift diagnose"):
        assert words not in printed(verdict) + write_html(verdict) + verdict.to_json(), words


def test_log_probabilities_above_zero_fail() -> None:
    lifted = [np.where(np.arange(len(v)) == 2, 5, v).astype(np.float32) for v in sequences()[2]]
    verdict = compare(capsule(logprobs=lifted), capsule("train", logprobs=lifted))
    assert verdict.exit_code == 1 and causes(verdict, "statistics") == ["above-zero", "above-zero"]
    rounded = [np.where(np.arange(len(v)) == 2, 1e-3, v).astype(np.float32) for v in sequences()[2]]
    assert compare(capsule(logprobs=rounded), capsule("train", logprobs=rounded)).exit_code == 0


def test_few_of_the_sequences_are_inconclusive(tmp_path: Path) -> None:
    some, few = compare(capsule(), part_of(5)), compare(capsule(), part_of(3))
    assert some.exit_code == 0 and some.headline.endswith("; compared 5 of 8 sequences with 210 of 348 tokens.")
    assert few.exit_code == 3 and "only 3 of 8 sequences with 123 of 348 tokens were compared" in few.headline
    assert few.coverage is not None and (few.coverage.sequences, few.coverage.of) == (3, 8)
    assert compare(capsule(), part_of(3), partial=True).exit_code == 0
    file = tmp_path / "sample.toml"
    file.write_text('coverage = 0.25\n[[threshold]]\nmetric = "tokens.k3"\nat_most = 1\n')
    assert compare(capsule(), part_of(3), profile=str(file)).exit_code == 0
    assert compare(capsule(), part_of(1), profile=str(file)).exit_code == 3
    assert compare(capsule(), part_of(3, noise=0.3)).exit_code == 1  # drift in a part is drift
    write_capsule(capsule(), tmp_path / "rollout")
    write_capsule(part_of(2), tmp_path / "train")
    assert main(["assert", str(tmp_path)]) == 3 and main(["assert", str(tmp_path), "--partial"]) == 0
    # Tokens that both sides mask out do not reduce the coverage.
    masks = [[i < 2] * len(c) for i, c in enumerate(sequences()[1])]
    verdict = compare(capsule(masks=masks), capsule("train", masks=masks))
    assert verdict.exit_code == 0 and "compared" not in verdict.headline


def test_coverage_counts_tokens_as_well() -> None:
    long = [np.full(5000, -1, np.float32) - np.arange(5000, dtype=np.float32) % 7 for _ in range(4)]
    rows = [*(v[:10] for v in long), *long]
    side = lambda name, stream, n: build_capsule(
        Manifest(side=name), [[1]] * n, [[2] * len(v) for v in rows[:n]], {stream: rows[:n]}
    )
    verdict = compare(side("rollout", "recorded.processed", 8), side("train", "train.processed", 4))
    assert verdict.exit_code == 3 and "4 of 8 sequences with 40 of 20040 tokens" in verdict.headline


def test_a_stream_of_placeholders_is_not_evidence() -> None:
    zeros = [np.zeros_like(v) for v in sequences()[2]]
    zeros[0][0] = -0.5  # a token that was counted by mistake
    verdict = compare(capsule(logprobs=zeros), capsule("train", logprobs=zeros))
    assert verdict.exit_code == 3 and "are one value: placeholders" in verdict.headline
    # Placeholders on one side only are not evidence for a cause either.
    some_likely = [np.where(np.arange(len(v)) % 8 == 0, -0.01, v - 3) for v in sequences()[2]]
    for sides in (
        (capsule(), capsule("train", logprobs=zeros)),
        (capsule(logprobs=zeros), capsule("train")),
        (capsule(logprobs=some_likely), capsule("train", logprobs=zeros)),
    ):
        verdict = compare(*sides)
        assert verdict.exit_code == 3 and "100% of the" in verdict.headline and verdict.findings == []
        assert {m.status for m in verdict.metrics} == {"missing"}


@pytest.mark.parametrize("count, exit_code", [(1, 3), (7, 3), (8, 0)])
def test_a_handful_of_tokens_is_inconclusive(tmp_path: Path, count: int, exit_code: int) -> None:
    masks = [[i == 0 and t < count for t in range(len(c))] for i, c in enumerate(sequences()[1])]
    sides = capsule(masks=masks), capsule("train", masks=masks)
    for profile in (None, "bitwise"):
        assert compare(*sides, profile=profile).exit_code == exit_code
    assert "only 1 token was compared" in compare(*sides).headline or count > 1
    file = tmp_path / "one.toml"
    file.write_text('tokens = 1\n[[threshold]]\nmetric = "tokens.k3"\nat_most = 1\n')
    assert compare(*sides, profile=str(file)).exit_code == 0


def test_a_capsule_compared_with_itself_does_not_pass(tmp_path: Path) -> None:
    a = str(write_capsule(capsule(), tmp_path / "a"))
    same = [compare(a, a), compare(capsule(), capsule("train"))]
    assert [[f.cause for f in gate(v, "schema").findings] for v in same] == [["same-capsule"], []]
    assert gate(same[0], "schema").status == "failed" and same[0].exit_code == 3
    # A trainer that passes on the rollout's own log-probabilities has computed nothing.
    carried = compare(capsule(), relabel(capsule("train"), "recorded.processed"))
    assert carried.exit_code == 3 and "rollout's own recorded" in carried.headline
    both = dataclasses.replace(capsule(), logprobs={**capsule().logprobs, **capsule("train").logprobs})
    both = str(write_capsule(both, tmp_path / "both"))
    assert gate(compare(both), "schema").status == "passed"


# ---- floor, hints, factors -----------------------------------------------------------------------------------------


def test_a_floor_decides_what_is_normal() -> None:
    floor = Floor(mean=0.01, p99=0.04, maximum=0.1, tokens=500)
    quiet, loud = capsule("train", noise=0.012), capsule("train", noise=0.05)
    assert compare(capsule(), quiet, floor=floor).profile == "floor"
    assert compare(capsule(floor=floor), quiet).exit_code == 0
    assert compare(capsule(floor=floor), loud).exit_code == 1


def test_the_floor_of_an_exact_engine_is_what_fp32_rounds_to() -> None:
    zero = Floor(mean=0.0, p99=0.0, maximum=0.0, tokens=500)
    assert compare(capsule(), capsule("train", noise=2e-6), floor=zero).exit_code == 0
    assert compare(capsule(), capsule("train", noise=1e-4), floor=zero).exit_code == 1


def test_a_capsule_cannot_widen_its_own_bar() -> None:
    wide = Floor(mean=1000, p99=1000, maximum=1000)
    far = capsule("train", logprobs=[v - 200 for v in sequences()[2]], floor=wide)
    verdict = compare(capsule(), far)
    assert verdict.exit_code == 1 and "the noise floor that the train capsule contains" in verdict.scope
    assert compare(capsule(floor=wide), capsule("train", noise=0.05)).exit_code == 1
    known = carried_floor(capsule().manifest, far.manifest)  # what `diagnose` calls normal
    assert known is not None and known.mean * FLOOR_FACTOR["mean"] <= 0.03 and known.p99 <= 0.3
    # A floor that the user provides is not capped.
    assert compare(capsule(), far, floor=wide.model_copy(update={"tokens": 9})).exit_code == 0
    for value in (np.inf, np.nan):
        with pytest.raises(ValueError, match="finite"):
            Floor(mean=value, p99=1, maximum=1)


def test_a_given_floor_takes_precedence_over_a_common_contract() -> None:
    floor = Floor(mean=0.01, p99=0.04, maximum=0.1, tokens=500)
    sides = capsule(contract="rlk-2"), capsule("train", noise=0.01, contract="rlk-2")
    assert compare(*sides).exit_code == 1
    verdict = compare(*sides, floor=floor)
    assert (verdict.exit_code, verdict.profile) == (0, "floor")


def test_hints_from_two_streams_alone() -> None:
    _, _, logprobs = sequences()
    shifted = [np.roll(v, 1) for v in logprobs]
    smaller = [v - 0.2 * np.exp(v) for v in logprobs]
    for rows, cause in ((shifted, "off-by-one"), (smaller, "top-p")):
        verdict = compare(capsule(), capsule("train", logprobs=rows))
        assert cause in [f.cause for f in gate(verdict, "statistics").findings]


def test_a_temperature_is_hinted_at_within_the_bar() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (400, 64))
    drawn = (logits / 0.985 + rng.gumbel(size=logits.shape)).argmax(1)
    score = lambda t: logits[np.arange(400), drawn] / t - np.log(np.exp(logits / t).sum(1))
    side = lambda name, stream, t: build_capsule(
        Manifest(side=name), [[1]] * 4, [[2] * 100] * 4, {stream: score(t).astype(np.float32).reshape(4, 100)}
    )
    verdict = compare(side("rollout", "recorded.processed", 0.985), side("train", "train.processed", 1.0))
    found = gate(verdict, "statistics")
    assert (verdict.exit_code, found.status) == (0, "warned") and found.findings[0].cause == "temperature"
    assert compare(capsule(), capsule("train", noise=0.02)).gates[5].status == "passed"


def test_each_link_of_the_chain_is_reported() -> None:
    from dataclasses import replace

    rollout = capsule()
    values = rollout.logprobs["recorded.processed"]
    rollout = replace(
        rollout,
        logprobs={
            "recorded.processed": values,
            "decode.processed": values + np.float32(0.01),
            "prefill.processed": values + np.float32(0.11),
        },
    )
    factors = compare(rollout, capsule("train")).factors
    assert {k: round(v.mean, 3) for k, v in factors.items()} == {
        "train/prefill (processed)": 0.11,
        "prefill/decode (processed)": 0.1,
        "decode/recorded (processed)": 0.01,
    }
    rollout = replace(rollout, logprobs={"recorded.processed": values - np.float32(0.1), "prefill.processed": values})
    found = gate(compare(rollout, capsule("train")), "statistics").findings
    link = next(f for f in found if f.evidence == {"link": "prefill/recorded"})
    assert "train/prefill equal bits" in link.message


def test_a_bad_link_is_reported_if_the_ends_agree() -> None:
    rollout = capsule()
    values = rollout.logprobs["recorded.processed"]
    rollout = dataclasses.replace(
        rollout, logprobs={"recorded.processed": values, "prefill.processed": values - np.float32(0.5)}
    )
    verdict = compare(rollout, capsule("train"))
    found = gate(verdict, "statistics")
    assert (verdict.exit_code, found.status) == (0, "warned") and "train/prefill" in found.summary
    assert "prefill/recorded" in printed(verdict)


def test_systematic_and_concentrated_drift_fail_the_general_profile() -> None:
    _, _, logprobs = sequences()
    shifted = compare(capsule(), capsule("train", logprobs=[v - np.float32(0.029) for v in logprobs]))
    assert (shifted.profile, shifted.exit_code) == ("general", 1) and "bias" in shifted.headline
    # One of 200 sequences, far off on each token: neither the mean nor the 99th percentile sees it.
    rng = np.random.default_rng(0)
    rows = [-rng.exponential(1.0, 50).astype(np.float32) - 1 for _ in range(200)]
    one = [v + np.float32(0.9) if i == 7 else v for i, v in enumerate(rows)]
    side = lambda name, stream, values: build_capsule(
        Manifest(side=name), [[1]] * 200, [[2] * 50] * 200, {stream: values}
    )
    sides = side("rollout", "recorded.processed", rows), side("train", "train.processed", one)
    assert compare(*sides).exit_code == 1 and "worst sequence" in compare(*sides).headline
    floor = Floor(mean=0.01, p99=0.1, maximum=1, tokens=99)
    assert compare(*sides, floor=floor).exit_code == 1
    # A published profile lets it pass with a warning.
    published = compare(*sides, profile="miles")
    assert published.exit_code == 0 and "1 of 200 sequences carry the difference" in printed(published)


def test_noise_of_short_sequences_passes_the_general_profile() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        rows = [-rng.exponential(1.0, n).astype(np.float32) for n in rng.integers(1, 60, 64)]
        # Noise as in bf16: heavy tails, a mean of 0.025.
        far = [v + (rng.standard_t(3, len(v)) * 0.023).astype(np.float32) for v in rows]
        side = lambda name, stream, values: build_capsule(
            Manifest(side=name), [[1]] * 64, [[2] * len(v) for v in values], {stream: values}
        )
        metrics = compare(side("rollout", "recorded.processed", rows), side("train", "train.processed", far)).metrics
        own = [m for m in metrics if m.name.startswith(("sequences", "tokens.out")) and m.status != "no threshold"]
        assert [m.status for m in own] == ["ok", "ok", "ok"], (seed, own)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.005, 0.02])
@pytest.mark.parametrize("away", [-3.0, 3.0])
def test_one_token_far_off_is_not_rounding(noise: float, away: float) -> None:
    rng = np.random.default_rng(0)
    rows = [-rng.exponential(1.0, 40).astype(np.float32) - 4 for _ in range(60)]
    far = [v + rng.normal(0, noise, 40).astype(np.float32) for v in rows]
    far[17][23] += np.float32(away)
    side = lambda name, stream, values: build_capsule(
        Manifest(side=name), [[1]] * 60, [[2] * 40] * 60, {stream: values}
    )
    sides = side("rollout", "recorded.processed", rows), side("train", "train.processed", far)
    for floor in (None, Floor(mean=0.02, p99=0.1, maximum=1, tokens=99)):
        verdict = compare(*sides, floor=floor)
        assert verdict.exit_code == 1 and causes(verdict, "statistics") == ["drift"]
        assert "1 token is too far off for rounding: sequence 17, token 24, is" in verdict.headline
    # A published profile lets it pass with a warning.
    assert (published := compare(*sides, profile="miles")).exit_code == 0 and "too far off" in printed(published)
