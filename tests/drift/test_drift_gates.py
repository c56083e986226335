"""Each gate passes and fails: weights, tokens, positions, masks, media, meaning, configuration, layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from drift_cases import SAMPLED, capsule, causes, gate, operators, part_of, relabel, sequences

from rlkernel_drift.capsule import (
    Media,
    Model,
    Sampling,
    Tensor,
    Weights,
)
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
from rlkernel_drift.compare import compare

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
    # Where the other tokens differ too, the zeros are a symptom: here of a shift, in a model that is often certain.
    certain = [np.where(np.random.default_rng(i).random(len(v)) < 0.7, -0.01, v - 1) for i, v in enumerate(unlikely)]
    certain = [np.append(v[:-4], [-3.0] * 4) for v in certain]
    shifted = [np.append(v[4:], np.zeros(4)).astype(np.float32) for v in certain]
    rollout, train = capsule(logprobs=[v.astype(np.float32) for v in certain]), capsule("train", logprobs=shifted)
    assert causes(compare(rollout, train), "tokens") == []


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


# ---- what the streams and the configuration show -------------------------------------------------------------------


def _streams(change: Any, noise: float = 1e-6) -> list[str]:
    own = sequences()[2]
    rng = np.random.default_rng(5)
    train = [np.minimum(v + rng.normal(0, noise, len(v)), 0).astype(np.float32) for v in own]
    verdict = compare(
        capsule(logprobs=[np.asarray(v, np.float32) for v in change(own)]), capsule("train", logprobs=train)
    )
    return causes(verdict, "statistics")


def _other(theirs: Any, mine: Any) -> Any:
    return np.resize(theirs, len(mine))


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda rows: [v.round(2) for v in rows], "rounded-records"),
        (lambda rows: [(v.view(np.uint32) & 0xFFFF0000).view(np.float32) for v in rows], "rounded-records"),
        (lambda rows: [np.maximum(v, -1.5) for v in rows], "clamped"),
        (lambda rows: [v / np.log(2) for v in rows], "units"),
        (lambda rows: [-v for v in rows], "units"),
        (lambda rows: [_other(rows[i ^ 1], v) for i, v in enumerate(rows)], "exchanged-requests"),
    ],
)  # fmt: skip
def test_streams_alone_name_what_was_done_to_them(change: Any, cause: str) -> None:
    assert _streams(change)[0] == cause


def test_noise_and_shared_grids_are_no_cause() -> None:
    assert _streams(lambda rows: rows) == [] and _streams(lambda rows: rows, 0.02) == []
    rounded = [v.round(2) for v in sequences()[2]]
    assert causes(compare(capsule(logprobs=rounded), capsule("train", logprobs=rounded)), "statistics") == []


def test_entries_of_config_json_are_compared() -> None:
    base = {"dtype": "float32", "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 64, "use_cache": True}
    other = {**base, "rms_norm_eps": 1e-5, "use_cache": False, "rope_parameters.factor": 4.0}
    found = gate(compare(capsule(config=base), capsule("train", noise=1e-6, config=other)), "configuration")
    assert {f.cause for f in found.findings} == {"norm-epsilon", "rope-scaling"} and found.status == "warned"
    assert "not set in the rollout, 4.0 in training" in " ".join(f.message for f in found.findings)
