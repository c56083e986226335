"""A diagnosis agrees with its verdict, accepts a floor of zero, refuses another model and notices NaN."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drift_cases import diagnosed, noisy, recorded, with_logits

from rlkernel_drift.capsule import Floor, Manifest, Operators, Sampling, build_capsule
from rlkernel_drift.capsule import Tensor as Stored
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose import run, sides
from rlkernel_drift.diagnose.context import residual
from rlkernel_drift.diagnose.location import OUTLIER, local_errors, part_of
from rlkernel_drift.errors import DriftError
from rlkernel_drift.faults import KINDS
from rlkernel_drift.faults.world import Recorded, World, healthy_world, record_world, tiny_model
from rlkernel_drift.inputs import Source, open_input
from rlkernel_drift.inputs.model import scored
from rlkernel_drift.power import judge_pair
from rlkernel_drift.profiles import GENERAL
from rlkernel_drift.report import write_html
from rlkernel_drift.scoring.model import ReferenceModel
from rlkernel_drift.scoring.operators import as_torch, record, stored
from rlkernel_drift.verdict import Status, Verdict


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("files", [True, False])
def test_a_named_cause_is_never_aligned(files: bool) -> None:
    pair = with_logits(recorded(temperature=0.985))
    assert compare_capsules(pair.rollout, pair.train, Options(profile=GENERAL)).status == Status.ALIGNED
    verdict = diagnosed(pair, files=files)
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == "temperature"
    assert verdict.exit_code == 1 and "temperature" in verdict.headline


def test_unexplained_with_a_guessed_floor_is_inconclusive() -> None:
    pair = with_logits(recorded())
    noise = np.random.default_rng(0).normal(0, 1e-3, pair.rollout.tokens).astype(np.float32)
    (name,) = pair.rollout.logprobs
    noisy = dataclasses.replace(pair.rollout, logprobs={name: np.minimum(pair.rollout.logprobs[name] + noise, 0)})
    verdict = diagnosed(dataclasses.replace(pair, rollout=noisy), files=True)
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == "unexplained"
    assert verdict.exit_code == 3 and "the floor is a guess" in verdict.headline


@pytest.mark.parametrize("files", [True, False])
def test_the_floor_of_an_exact_engine_is_usable(files: bool) -> None:
    zero = Floor(mean=0.0, p99=0.0, maximum=0.0, tokens=100, permutations=["batch"])
    assert diagnosed(with_logits(recorded()), zero, files=files).exit_code == 0
    verdict = diagnosed(with_logits(recorded(temperature=0.8)), zero, files=files)
    assert verdict.exit_code == 1 and verdict.diagnosis is not None and verdict.diagnosis.cause == "temperature"
    assert verdict.diagnosis.hypotheses[0].over_floor < 10


def test_operators_that_are_not_finite_are_named() -> None:
    pair = recorded(operators=True)
    values = dict(pair.rollout.operators.values)
    array = values["layers.2.down_proj"].values.copy()
    array[:5] = np.nan
    values["layers.2.down_proj"] = Stored.of(array)
    broken = dataclasses.replace(pair.rollout, operators=Operators(pair.rollout.operators.rows, values))
    verdict = diagnosed(dataclasses.replace(pair, rollout=broken))
    assert verdict.exit_code == 1 and verdict.diagnosis is not None
    assert verdict.diagnosis.parameters["operator"] == "layers.2.down_proj"
    assert "NaN or infinite" in verdict.headline
    assert diagnosed(pair).exit_code == 0


def captured(folder: Path, model: str, *weights: str) -> tuple[str, str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": list(range(5, 15 + i))}) + "\n" for i in range(4)))
    rollout, train = str(folder / f"r-{model}{len(weights)}"), str(folder / f"t-{model}{len(weights)}")
    common = ["capture", "--engine", "hf", "--model", str(folder / model), *weights]
    assert main([*common, "--prompts", str(prompts), "--max-tokens", "12", "--out", rollout]) == 0
    assert main([*common, "--tokens", rollout, "--out", train]) == 0
    return rollout, train


def test_another_model_is_refused_and_is_not_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3", 5).save_pretrained(tmp_path / "base")
    tiny_model("qwen3", 6).save_pretrained(tmp_path / "other")
    tiny_model("qwen3", 5).save_pretrained(tmp_path / "rope")
    config = json.loads((tmp_path / "rope/config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 3210.0}
    (tmp_path / "rope/config.json").write_text(json.dumps(config))
    for name, words in (
        ("rope", "rope_theta 10000.0 where the capsule has 3210.0"),
        ("other", "46 of 46 tensors differ"),
    ):
        sides = captured(tmp_path, name)
        capsys.readouterr()
        assert main(["diagnose", *sides, "--model", str(tmp_path / "base")]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert main(["diagnose", *sides, "--model", str(tmp_path / name)]) == 0
    # Without fingerprints another model cannot be recognised, but two sides of equal bits do not drift.
    sides = captured(tmp_path, "other", "--no-weights")
    capsys.readouterr()
    assert main(["diagnose", *sides, "--model", str(tmp_path / "base")]) == 0
    assert "differ from the model alike" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_another_shape_is_refused() -> None:
    pair = recorded()
    shaped = pair.train.manifest.model.model_copy(update={"layers": 77})
    train = dataclasses.replace(pair.train, manifest=pair.train.manifest.model_copy(update={"model": shaped}))
    with pytest.raises(DriftError, match="num_hidden_layers"):
        diagnosed(dataclasses.replace(pair, train=train))


# ---- names and suspects --------------------------------------------------------------------------------------------

NEW = ("rounded records", "bfloat16 rotary frequencies", "norm epsilon in every layer", "other GELU")


@pytest.mark.parametrize("kind", [*NEW, "bfloat16 layers", "eight-bit keys and values"])
def test_a_cause_is_named_only_where_re_scoring_removes_the_difference(kind: str) -> None:
    verdict = judge_pair(record_world(healthy_world("llama", 2, "float32"), KINDS[kind].plant))
    found = verdict.diagnosis
    assert found is not None and found.cause in KINDS[kind].causes and verdict.exit_code == 1
    assert (found.residual or 0) < 0.1 * (found.as_is or 0) and found.confidence == "proven"


def test_noise_names_neither_a_cause_nor_a_place() -> None:
    verdict = diagnosed(noisy(recorded(), 0.03), seconds=2.0)
    found = verdict.diagnosis
    assert found is not None and found.cause == "unexplained" and found.finding is None and verdict.named is None
    assert (found.confidence, found.location) == ("unknown", "") and found.next.startswith("rlkernel-drift capture")
    assert found.tried["logits"] > 5 and "time was not enough" in found.statement
    page = write_html(Verdict.model_validate_json(verdict.to_json()))
    assert "<h2>Cause</h2>" not in page and "Tried (" in page and "confidence: unknown" in page


def test_one_token_of_a_long_sequence_is_noise_in_16_bits() -> None:
    """A near tie of two experts moves single tokens far; three sequences with one, or one by many nats, are drift."""
    owner = torch.arange(2000) // 20
    noise = torch.linspace(-0.02, 0.02, 2000)[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]

    def healthy(level: float, sequences: int, nats: float) -> bool:
        moved = level * noise
        moved[: 20 * sequences : 20] = nats
        floor = Floor(mean=0.01 * level, p99=0.02 * level, maximum=0.02 * level, k3=0.0, tokens=2000)
        return residual(torch.zeros(2000), moved, owner, 100).healthy(floor)

    assert healthy(1.0, 0, 0.0) and healthy(1.0, 2, 1.0) and not healthy(1.0, 3, 1.0) and not healthy(1.0, 1, 4.0)
    assert healthy(1e-4, 0, 0.0) and not healthy(1e-4, 1, 1e-4)


def test_what_re_scoring_excludes_is_shown_nowhere() -> None:
    # The differences are proportional to the log-probabilities, which hints at a temperature; re-scoring excludes it.
    pair = noisy(recorded(operators=False), 0.03)
    (name,) = pair.rollout.logprobs
    values = pair.rollout.logprobs[name] * np.float32(1.15)
    scaled = dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
    before = compare_capsules(scaled.rollout, scaled.train, Options(profile=GENERAL))
    assert before.suspect is not None and before.suspect.cause == "temperature"
    verdict = diagnosed(scaled, seconds=2.0)
    assert verdict.diagnosis is not None and "temperature" in verdict.diagnosis.excluded
    assert "temperature" not in {f.cause for f in verdict.findings}
    for shown in (verdict, before.model_copy(update={"diagnosis": verdict.diagnosis})):
        assert shown.named is not None and shown.named.cause == "units"  # it explains most, the noise the rest
        assert shown.named.message == verdict.diagnosis.statement
        assert shown.suspect is None or shown.suspect.cause != "temperature"
        assert "different temperatures" not in write_html(shown).split("</header>")[0]
    assert verdict.diagnosis.confidence == "likely" and "something else differs too" in verdict.diagnosis.statement


# ---- what a side does not declare ----------------------------------------------------------------------------------


def bfloat16_pair(seed: int, config: dict[str, object], plant: object = None) -> Recorded:
    world = healthy_world("llama", seed, "bfloat16")
    world.config = (config, config)  # type: ignore[assignment]
    return record_world(world, plant)  # type: ignore[arg-type]


# Seed 0 decodes with sdpa; seed 3 is a forward with eager attention, which re-scoring matches less closely.
SPELLINGS = [(3, {"dtype": "bf16"}), (3, {"dtype": "torch.bfloat16"}), (3, {"torch_dtype": "bfloat16"})]


@pytest.mark.parametrize("seed, config", [*SPELLINGS, (3, {"dtype": "auto"}), (3, {}), (0, {})])
def test_a_healthy_stack_in_bfloat16_is_not_blamed_for_how_it_spells_it(seed: int, config: dict[str, object]) -> None:
    found = diagnosed(bfloat16_pair(seed, config)).diagnosis
    assert found is not None and found.cause == "none" and found.floor is not None and found.floor > 0.01
    assert ("declares no dtype and fits bfloat16" in found.statement) == (config in ({"dtype": "auto"}, {}))


@pytest.mark.parametrize("together", [True, False])
def test_both_sides_are_judged_in_the_dtype_that_both_match(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in float32 that both sides ran in bfloat16, whose noise hides which dtype is closer."""
    monkeypatch.setattr(sides, "_CLEARLY", 1e9)
    monkeypatch.setattr(sides, "_CORRELATED", 1e9)
    if not together:  # the control
        monkeypatch.setattr(run, "in_one_dtype", lambda both: both)
    pair = bfloat16_pair(3, {})
    pair.world.references.model.own = torch.float32
    found = diagnosed(pair, seconds=0.2).diagnosis
    assert found is not None and (found.cause == "none") == together, found.statement


def test_an_undeclared_dtype_hides_no_fault() -> None:
    def plant(world: World) -> None:
        world.rollout.sampling = Sampling(temperature=0.7)

    found = diagnosed(bfloat16_pair(0, {}, plant)).diagnosis
    assert found is not None and (found.cause, found.side) == ("temperature", "rollout")
    heads = diagnosed(bfloat16_pair(1, {}, KINDS["exchanged heads in one layer"].plant)).diagnosis
    assert heads is not None and (heads.cause, heads.parameters["operator"]) == ("operator", "layers.2.attention")
    world = healthy_world("llama", 0, "float32")
    world.config = ({}, {})
    small = record_world(world, lambda w: setattr(w.rollout, "sampling", Sampling(temperature=0.99)))
    found = diagnosed(small).diagnosis
    assert found is not None and found.cause == "temperature" and found.parameters["temperature"] == pytest.approx(0.99)
    # The noise in addition to the temperature is 4e-4, less than that of bfloat16; the side still counts as float32.
    unlike = record_world(world, lambda w: setattr(w.rollout, "sampling", Sampling(temperature=0.99)))
    found = diagnosed(noisy(unlike, 4e-4), seconds=1.0).diagnosis
    assert found is not None and (found.cause, found.confidence) == ("temperature", "likely"), found.statement


@pytest.mark.parametrize("dtype, files", [("float32", True), ("float32", False), ("bfloat16", False)])
def test_a_temperature_that_neither_side_declares_is_not_drift(dtype: str, files: bool) -> None:
    for seed in (1, 3):
        world = healthy_world("llama", seed, dtype)
        world.rollout.sampling = world.trainer.sampling = Sampling(temperature=0.5)
        pair = record_world(world)
        found = diagnosed(with_logits(pair) if files else pair, files=files).diagnosis
        assert found is not None and found.cause == "none", found.statement


# ---- recorded operators --------------------------------------------------------------------------------------------

EACH = slice(None)


@pytest.mark.parametrize(
    "name, tokens, channels, words",
    [
        ("layers.1.attention", EACH, EACH, ""),
        ("layers.1.attention", "completions", slice(8, 24), ", in tokens of completions, in heads 1, 2 of 4"),
        ("layers.1.k_proj", "prompts", slice(0, 8), ", in tokens of prompts, in head 0 of 2"),
        ("layers.0.down_proj", EACH, slice(3, 8), ", in channels 3 to 7 of 32"),
        ("layers.0.down_proj", EACH, slice(0, 32, 4), ", in 8 of 32 channels"),
        ("layers.0.output", [7, 9, 25], EACH, ", in 3 of 30 tokens"),
        ("layers.0.mlp", [*range(10, 20)], EACH, ", in sequence 1"),
        (
            "final_norm",
            [*range(3, 10), *range(13, 20), *range(23, 30)],
            EACH,
            ", in tokens from number 3 of each sequence on",
        ),
    ],
)
def test_the_part_of_an_operator_that_fails(name: str, tokens: Any, channels: slice, words: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(96, (3, 10))
    places = {"prompts": [i for i in range(30) if i % 10 < 4], "completions": [i for i in range(30) if i % 10 >= 4]}
    rows = torch.arange(30)[places.get(tokens, tokens) if isinstance(tokens, str) else tokens]
    context, side, found = replayed(
        model, ids, torch.float32, name, lambda x: 2 * x[rows, channels] + 1, rows, channels
    )
    assert max(found, key=lambda n: found[n].ratio) == name
    assert part_of(name, found[name], context, side) == words


def replayed(
    model: Any, ids: torch.Tensor, dtype: torch.dtype, name: str, change: Any, rows: Any, channels: Any
) -> Any:
    """(context, capsule, local errors) of three sequences of ten tokens, some outputs of an operator changed."""
    recorded = record(model.to(dtype), [(row, torch.arange(10)) for row in ids])
    changed = as_torch(recorded[name])
    changed[rows, channels] = change(changed)
    operators = Operators(None, {**recorded, name: stored(changed)})
    prompts, completions = ids[:, :4].tolist(), ids[:, 4:].tolist()
    side = build_capsule(Manifest(), prompts, completions, {"train.raw": [[-1.0] * 6] * 3}, operators=operators)
    context = types.SimpleNamespace(model=ReferenceModel(model), merged={}, dtype=dtype)
    return context, side, local_errors(context, side)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_value_that_is_not_finite_makes_the_error_infinite(value: float) -> None:
    model, ids = tiny_model("llama", 0), torch.randint(96, (3, 10))
    *_, found = replayed(model, ids, torch.float32, "layers.1.q_proj", lambda x: value, 5, 7)
    assert found["layers.1.q_proj"].ratio == torch.inf and found["layers.1.k_proj"].ratio < 2


def test_near_ties_of_two_tokens_are_no_error_of_the_experts() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model, ids = Qwen3MoeForCausalLM(config).eval(), torch.randint(96, (3, 10))
    for rows, fails in (([3, 21], False), ([3, 21, 22], True)):
        *_, found = replayed(model, ids, torch.bfloat16, "layers.0.mlp", lambda x, rows=rows: -x[rows], rows, EACH)
        assert (found["layers.0.mlp"].ratio > OUTLIER) == fails
    model = tiny_model("llama", 0)  # without experts each token counts
    *_, found = replayed(model, ids, torch.bfloat16, "layers.0.mlp", lambda x: -x[[3]], [3], EACH)
    assert found["layers.0.mlp"].ratio > OUTLIER


# ---- references ----------------------------------------------------------------------------------------------------


def test_a_reference_keeps_caps_and_sinks(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

    tiny: dict[str, object] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    capped = Gemma2Config(**tiny, attn_logit_softcapping=0.5, bos_token_id=2)
    for name, model in (
        ("gemma", Gemma2ForCausalLM(capped)),
        ("plain", Gemma2ForCausalLM(Gemma2Config(**tiny, attn_logit_softcapping=None))),
        ("sinks", GptOssForCausalLM(GptOssConfig(**tiny, num_local_experts=2))),
    ):
        model.save_pretrained(tmp_path / name)
        loaded = ReferenceModel.load(tmp_path / name)
        assert loaded.model.config._attn_implementation == ("sdpa" if name == "plain" else "eager")
        assert loaded.kernels == (("sdpa", "eager") if name == "plain" else ("eager",))
    explicit = ReferenceModel.load(tmp_path / "gemma", attention="sdpa")
    assert explicit.model.config._attn_implementation == "sdpa"
    sides = captured(tmp_path, "gemma")
    assert main(["diagnose", *sides, "--model", str(tmp_path / "gemma")]) == 0
    manifest = json.loads((Path(sides[1]) / "manifest.json").read_text())
    assert manifest["config"]["attention_backend"] == "eager"


def test_copies_of_a_reference_keep_every_rotary_frequency() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    reference = ReferenceModel(Gemma3ForCausalLM(config))
    buffers = {n: b for n, b in reference.model.named_buffers() if n.endswith("inv_freq")}
    copies = dict(reference.in_dtype(torch.bfloat16).named_buffers())
    assert len(buffers) == 4 and all(copies[name].equal(value) for name, value in buffers.items())


def test_a_model_scores_in_the_dtype_that_the_other_side_spells(tmp_path: Path) -> None:
    tiny_model("llama", 4).save_pretrained(tmp_path / "model")
    pair = recorded()
    for config, dtype in (({"torch_dtype": "torch.bfloat16"}, "bfloat16"), ({"dtype": "auto"}, "float32")):
        manifest = pair.rollout.manifest.model_copy(update={"config": config})
        other = Source("rollout", "capsule", capsule=dataclasses.replace(pair.rollout, manifest=manifest))
        capsule = scored(open_input(f"hf:{tmp_path / 'model'}", "train"), other).capsule
        assert capsule is not None and capsule.manifest.config["dtype"] == dtype
