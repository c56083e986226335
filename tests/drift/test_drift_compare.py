"""The comparison: every gate passes and fails; the order of gates and the exit codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drift_cases import SAMPLED, capsule, causes, gate, operators, printed, sequences

from rlkernel_drift.capsule import (
    Floor,
    Manifest,
    Media,
    Model,
    Sampling,
    Tensor,
    Weights,
    build_capsule,
    write_capsule,
)
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
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
    # The other values look like another temperature, on a lattice.
    rows = [np.round(v * np.float32(1.5) * 32) / 32 for v in sequences()[2]]
    assert {"drift", "temperature"} <= {f.cause for f in compare(capsule(), capsule("train", logprobs=rows)).findings}
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


def part_of(count: int, **parts: Any) -> Any:
    prompts, completions, logprobs = (rows[:count] for rows in sequences())
    return capsule("train", prompts=prompts, completions=completions, logprobs=logprobs, **parts)


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


# ---- weights -------------------------------------------------------------------------------------------------------


def weights(seeds: dict[str, int], previous: dict[str, int] | None = None, **fields: Any) -> Weights:
    make = lambda seed: weight_fingerprint(
        Tensor.of(np.random.default_rng(seed).normal(size=(3, 3)).astype(np.float32))
    )
    return Weights(
        tensors={name: make(seed) for name, seed in seeds.items()},
        previous={name: make(seed).digest for name, seed in (previous or {}).items()},
        **fields,
    )


NEW, OLD = {"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 11, "b": 12, "c": 13, "d": 14}


@pytest.mark.parametrize(
    "rollout, train, cause",
    [
        (weights(OLD, version=6), weights(NEW, OLD, version=7), "stale-weights"),
        (weights({**NEW, "b": 12}), weights(NEW, OLD), "partial-sync"),
        (weights({**NEW, "b": 99}), weights(NEW, OLD), "partial-sync"),
        (weights({**NEW, "a": 2, "b": 1}), weights(NEW), "swapped-weights"),
        (weights({"a": 21, "b": 22, "c": 23, "d": 24}), weights(NEW), "weights-differ"),
        (weights(NEW), weights(NEW, adapter="lora r=8"), "lora-missing"),
        (Weights(version=6), Weights(version=7), "stale-weights"),
        (Weights(version=6), weights(NEW, {**OLD, "a": 1}, version=7), "stale-weights"),
        (weights({"x": 1}, version=6), weights(NEW, version=7), "stale-weights"),
        (Weights(version=7), Weights(version=7, adapter="lora"), "lora-missing"),
    ],
)
def test_weights_that_differ(rollout: Weights, train: Weights, cause: str) -> None:
    verdict = compare(capsule(weights=rollout), capsule("train", weights=train))
    assert verdict.exit_code == 4 and causes(verdict, "weights") == [cause]
    assert gate(verdict, "statistics").status == "not reached"
    going = compare(capsule(weights=rollout), capsule("train", weights=train), keep_going=True)
    assert going.exit_code == 4 and gate(going, "statistics").status == "passed"


def test_unchanged_though_trained() -> None:
    train = weights(NEW, {**OLD, "c": 3})
    verdict = compare(capsule(weights=weights(NEW)), capsule("train", weights=train))
    found = gate(verdict, "weights").findings
    assert [f.cause for f in found] == ["unchanged-though-trained"] and found[0].evidence["tensors"] == ["c"]
    assert verdict.exit_code == 0 and gate(verdict, "weights").status == "warned"


@pytest.mark.parametrize("still, words", [("abc", "3 of 4 tensors did not change"), ("abcd", "no tensor moved")])
def test_weights_that_hardly_moved_are_named(still: str, words: str) -> None:
    train = weights(NEW, {name: NEW[name] if name in still else OLD[name] for name in NEW})
    found = gate(compare(capsule(weights=weights(NEW)), capsule("train", weights=train)), "weights")
    assert found.status == "warned" and words in found.summary


def test_few_common_names_are_not_evidence() -> None:
    other = weights({"a": 1, **{f"x{i}": i for i in range(9)}})
    found = gate(compare(capsule(weights=other), capsule("train", weights=weights(NEW))), "weights")
    assert found.status == "skipped" and "only 1 of 13 tensors" in found.summary
    found = gate(compare(capsule(weights=weights({"x": 1})), capsule("train", weights=weights(NEW))), "weights")
    assert found.status == "skipped" and "only 0 of 5" in found.summary


def test_an_adapter_is_a_warning_if_the_other_side_declares_nothing() -> None:
    verdict = compare(capsule(), capsule("train", weights=Weights(adapter="lora")))
    found = gate(verdict, "weights")
    assert (verdict.exit_code, found.status) == (0, "warned") and "of the rollout: unknown" in found.summary


def test_equal_weights_pass_across_dtypes() -> None:
    x = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    a = Weights(tensors={"a": weight_fingerprint(Tensor.of(x))})
    b = Weights(tensors={"a": weight_fingerprint(Tensor.bfloat16(x))})
    assert gate(compare(capsule(weights=a), capsule("train", weights=b)), "weights").status == "passed"


# ---- tokens --------------------------------------------------------------------------------------------------------


def changed(edit: Any) -> Any:
    prompts, completions, logprobs = sequences()
    prompts, completions, logprobs = [list(p) for p in prompts], [list(c) for c in completions], list(logprobs)
    edit(prompts, completions, logprobs)
    return capsule("train", prompts=prompts, completions=completions, logprobs=logprobs, vocabulary=WORDS)


WORDS = {str(i): chr(97 + i % 26) for i in range(100)} | {"98": "ab", "99": "\x1b[31mcd"}


def bos(p: Any, c: Any, l: Any) -> None:
    for prompt in p:
        prompt.insert(0, 1)


def template(p: Any, c: Any, l: Any) -> None:
    for prompt in p:
        prompt[2:2] = [7, 8, 9]


def cut(p: Any, c: Any, l: Any) -> None:
    c[1], l[1] = c[1][:-5], l[1][:-5]


def other(p: Any, c: Any, l: Any) -> None:
    c[1][4] = 50 if c[1][4] != 50 else 51


@pytest.mark.parametrize(
    "edit, cause",
    [(bos, "missing-bos"), (template, "chat-template"), (cut, "truncated"), (other, "tokens-differ")],
)
def test_tokens_that_differ(edit: Any, cause: str) -> None:
    verdict = compare(capsule(vocabulary=WORDS), changed(edit))
    assert verdict.exit_code == 4 and causes(verdict, "tokens") == [cause]


def test_retokenised_span_is_decoded_both_ways() -> None:
    prompts, completions, logprobs = sequences()
    completions[2][10:12] = [0, 1]  # "a", "b"
    rollout = capsule(prompts=prompts, completions=completions, vocabulary=WORDS)
    train = capsule(
        "train",
        prompts=prompts,
        completions=[*completions[:2], completions[2][:10] + [98] + completions[2][12:], *completions[3:]],
        logprobs=[v[:-1] if i == 2 else v for i, v in enumerate(logprobs)],
        vocabulary=WORDS,
    )
    verdict = compare(rollout, train)
    assert causes(verdict, "tokens") == ["retokenised"]
    found = gate(verdict, "tokens").findings[0]
    assert found.evidence["rollout_ids"] == [0, 1] and found.evidence["train_ids"] == [98] and "'ab'" in found.message


@pytest.mark.parametrize("cause", ["positions-restart", "positions-shift", "shifted"])
def test_positions(cause: str) -> None:
    prompts, completions, _ = sequences()
    places = []
    for p, c in zip(prompts, completions, strict=True):
        if cause == "positions-restart":
            places.append([*range(len(p)), *range(len(c))])
        elif cause == "positions-shift":
            places.append([*range(len(p)), *range(len(p) + 2, len(p) + 2 + len(c))])
        else:
            places.append(list(range(3, 3 + len(p) + len(c))))
    verdict = compare(capsule(), capsule("train", positions=places))
    if cause == "shifted":  # rotary embeddings do not see it
        assert verdict.exit_code == 0 and gate(verdict, "tokens").status == "warned"
    else:
        assert causes(verdict, "tokens") == [cause]


def test_masks_and_observations() -> None:
    masks = [[i % 7 != 0 for i in range(len(c))] for c in sequences()[1]]
    assert causes(compare(capsule(), capsule("train", masks=masks)), "tokens") == ["mask-differs"]
    dummies = [np.where(np.arange(len(v)) < 6, 0, v).astype(np.float32) for v in sequences()[2]]
    unlikely = [np.where(np.arange(len(v)) < 6, v - 2.5, v).astype(np.float32) for v in sequences()[2]]
    rollout, train = capsule(logprobs=dummies), capsule("train", logprobs=unlikely)
    assert causes(compare(rollout, train), "tokens") == ["observation-tokens"]
    # A token alone in its kept set has log-probability 0 too, and the other side finds it likely.
    likely = [np.where(np.arange(len(v)) < 6, -0.4, v).astype(np.float32) for v in sequences()[2]]
    assert causes(compare(rollout, capsule("train", logprobs=likely)), "tokens") == []


def test_media_in_another_order() -> None:
    pictures = [Media(sequence=0, begin=i, end=i + 1, kind="image", digest=str(i) * 32) for i in range(2)]
    swapped = [m.model_copy(update={"digest": d.digest}) for m, d in zip(pictures, pictures[::-1], strict=True)]
    assert causes(compare(capsule(media=pictures), capsule("train", media=swapped)), "tokens") == ["swapped-media"]
    assert compare(capsule(media=pictures), capsule("train", media=pictures)).exit_code == 0
    # The order in which a manifest lists them means nothing.
    assert compare(capsule(media=pictures), capsule("train", media=pictures[::-1])).exit_code == 0


@pytest.mark.parametrize("update", [{"begin": 2, "end": 5}, {"end": 5}, {"kind": "video"}])
def test_media_at_other_tokens(update: dict[str, Any]) -> None:
    image = Media(sequence=0, begin=1, end=4, kind="image", digest="0" * 32)
    verdict = compare(capsule(media=[image]), capsule("train", media=[image.model_copy(update=update)]))
    assert verdict.exit_code == 4 and causes(verdict, "tokens") == ["moved-media"]
    assert "sequence 0: image at tokens 1 to 3 in the rollout" in verdict.headline


def test_spans_of_media_at_other_tokens() -> None:
    def with_spans(side: Any, *spans: tuple[int, int, int, int]) -> Any:
        return dataclasses.replace(side, spans=np.array([*side.spans.tolist(), *spans], np.int32))

    left, right = with_spans(capsule(), (1, 0, 3, 4)), with_spans(capsule("train"), (1, 1, 4, 4))
    verdict = compare(left, right)
    assert verdict.exit_code == 4 and causes(verdict, "tokens") == ["moved-media"]
    assert "image at tokens 0 to 2 in the rollout, image at tokens 1 to 3" in verdict.headline
    assert compare(left, with_spans(capsule("train"), (1, 0, 3, 4))).exit_code == 0
    assert compare(left, capsule("train")).exit_code == 0  # a side without media spans does not record them


def picture(sequence: int) -> Media:
    return Media(sequence=sequence, begin=0, end=1, kind="image", digest=f"{sequence:02}" * 16)


@pytest.mark.parametrize(
    "left, right, words",
    [([0], [], "names no media"), ([], [0], "names no media"), ([0], [0, 2], "sequence 2")],
)
def test_media_on_one_side_only(left: list[int], right: list[int], words: str) -> None:
    sides = capsule(media=[picture(i) for i in left]), capsule("train", media=[picture(i) for i in right])
    verdict = compare(*sides)
    assert verdict.exit_code == 4 and causes(verdict, "tokens") == ["swapped-media"] and words in verdict.headline


def test_media_of_sequences_without_partner_are_left_out() -> None:
    verdict = compare(capsule(media=[picture(i) for i in range(8)]), part_of(6, media=[picture(i) for i in range(6)]))
    assert verdict.exit_code == 0, verdict.headline


def test_sequences_are_matched_by_their_ids() -> None:
    prompts, completions, logprobs = sequences()
    order = [3, 1, 2, 0, 7, 6, 5, 4]
    pick = lambda rows: [rows[i] for i in order]
    train = capsule(
        "train", prompts=pick(prompts), completions=pick(completions), logprobs=pick(logprobs), sequence_ids=order
    )
    assert compare(capsule(sequence_ids=list(range(8))), train, profile="bitwise").exit_code == 0
    assert compare(capsule(), train).exit_code == 4
    # Completions of one prompt share its id, and keep their order.
    shared = [i // 2 for i in range(8)]
    order = [6, 7, 0, 1, 4, 5, 2, 3]
    rows = {"prompts": pick(prompts), "completions": pick(completions), "logprobs": pick(logprobs)}
    both = capsule(sequence_ids=shared), capsule("train", **rows, sequence_ids=pick(shared))
    assert compare(*both, profile="bitwise").exit_code == 0
    verdict = compare(capsule(sequence_ids=shared), capsule("train", sequence_ids=[i + 9 for i in shared]))
    assert verdict.exit_code == 3 and "no sequence of the rollout has the id" in verdict.headline
    assert not [m for m in verdict.metrics if m.status == "ok"]


# ---- semantics, configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rollout, train, cause",
    [
        ({"sampling": SAMPLED}, {}, "temperature"),
        ({"sampling": Sampling(top_p=0.9)}, {}, "top-p"),
        ({"sampling": Sampling(top_k=5)}, {}, "top-k"),
        ({"sampling": SAMPLED, "stream": "recorded.raw"}, {"sampling": SAMPLED}, "logprobs-mode"),
        (
            {"model": Model(vocab_size=100)},
            {"model": Model(vocab_size=100, padded_vocab_size=128)},
            "padded-vocabulary",
        ),
    ],
)
def test_semantics(rollout: Any, train: Any, cause: str) -> None:
    left = relabel(capsule(**{k: v for k, v in rollout.items() if k != "stream"}), rollout.get("stream"))
    verdict = compare(left, capsule("train", **train))
    assert verdict.exit_code == 4 and causes(verdict, "semantics") == [cause]


def relabel(side: Any, stream: str | None) -> Any:
    from dataclasses import replace

    return side if stream is None else replace(side, logprobs={stream: next(iter(side.logprobs.values()))})


def test_raw_streams_need_no_temperature() -> None:
    left = relabel(capsule(sampling=SAMPLED), "recorded.raw")
    right = relabel(capsule("train", sampling=Sampling(temperature=0.5)), "train.raw")
    assert compare(left, right).exit_code == 0


def test_configuration_is_the_first_suspect() -> None:
    verdict = compare(
        capsule(config={"dtype": "bfloat16", "head_dtype": "float32", "seed": 1}, versions={"vllm": "0.26"}),
        capsule("train", config={"dtype": "float32", "head_dtype": "float32", "seed": 2}, versions={"torch": "2.11"}),
    )
    assert gate(verdict, "configuration").status == "warned" and verdict.exit_code == 0
    assert [d.key for d in verdict.differences] == ["dtype", "torch", "vllm", "seed"]


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


# ---- layers --------------------------------------------------------------------------------------------------------


def test_first_divergence_names_operator_token_element_and_ulps() -> None:
    tokens = capsule().tokens
    left = capsule(operators=operators(tokens))
    right = capsule("train", operators=operators(tokens, ("layers.1.q_proj", 60, 2)))
    verdict = compare(left, right, profile="bitwise")
    assert verdict.exit_code == 1 and verdict.layers is not None and verdict.layers.first is not None
    first = verdict.layers.first
    assert (first.operator, first.layer, first.element, first.ulps, first.rows) == ("layers.1.q_proj", 1, 2, 1, 1)
    assert (first.sequence, first.index) == left.place(60)
    assert compare(left, capsule("train", operators=operators(tokens)), profile="bitwise").exit_code == 0


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("profile", [None, "bitwise", "miles"])
def test_an_operator_that_is_finite_on_one_side_only_fails(side: str, profile: str | None) -> None:
    tokens = capsule().tokens
    broken = operators(tokens)
    values = broken.values["layers.1.q_proj"].values.copy()
    values[40:60] = np.nan
    broken.values["layers.1.q_proj"] = Tensor.of(values)
    sides = {"rollout": operators(tokens), "train": operators(tokens), side: broken}
    verdict = compare(capsule(operators=sides["rollout"]), capsule("train", operators=sides["train"]), profile=profile)
    assert verdict.exit_code == 1 and causes(verdict, "layers") == ["not-finite"]
    assert f"layers.1.q_proj is NaN or infinite on the {side} side" in gate(verdict, "layers").summary


def test_one_buffer_recorded_for_all_layers_is_not_evidence() -> None:
    tokens = capsule().tokens
    ops = operators(tokens)
    ops.values["layers.1.output"] = ops.values["layers.0.output"]
    verdict = compare(capsule(operators=ops), capsule("train", operators=ops))
    assert gate(verdict, "layers").status == "warned" and verdict.layers is None
