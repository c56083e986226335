"""A diagnosis agrees with its verdict, accepts a floor of zero, refuses another model and notices NaN."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drift_cases import causes, with_logits
from torch import Tensor

from rlkernel_drift.capsule import Floor, Operators, Sampling
from rlkernel_drift.capsule import Tensor as Stored
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose import operators, run, sides
from rlkernel_drift.diagnose.attach import diagnose_verdict
from rlkernel_drift.diagnose.attention import hiding
from rlkernel_drift.diagnose.context import Body, Computation
from rlkernel_drift.diagnose.inputs import last_turn, scale_positions
from rlkernel_drift.errors import DriftError
from rlkernel_drift.faults import KINDS
from rlkernel_drift.faults.world import Engine, Recorded, World, healthy_world, record_world, tiny_model
from rlkernel_drift.inputs import Source, open_input
from rlkernel_drift.inputs.model import scored
from rlkernel_drift.power import judge_pair
from rlkernel_drift.profiles import GENERAL
from rlkernel_drift.report import write_html
from rlkernel_drift.scoring.model import Head, ReferenceModel, replaced
from rlkernel_drift.scoring.operators import changed
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.verdict import Status, Verdict


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def recorded(seed: int = 4, temperature: float = 1.0, operators: bool = False) -> Recorded:
    world = healthy_world("llama", seed, "float32")
    world.operators = operators
    return record_world(world, lambda w: setattr(w.rollout, "sampling", Sampling(temperature=temperature)))


def diagnosed(pair: Recorded, floor: Floor | None = None, **options: object) -> Verdict:
    verdict = compare_capsules(pair.rollout, pair.train, Options(profile=GENERAL))
    references = None if options.get("files") else lambda: pair.world.references
    return diagnose_verdict(verdict, pair.rollout, pair.train, references, floor, options.get("seconds"))  # type: ignore[arg-type]


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


def noisy(pair: Recorded, size: float) -> Recorded:
    (name,) = pair.rollout.logprobs
    noise = np.random.default_rng(0).normal(0, size, pair.rollout.tokens).astype(np.float32)
    values = np.minimum(pair.rollout.logprobs[name] + noise, 0)
    return dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))


def test_noise_names_neither_a_cause_nor_a_place() -> None:
    verdict = diagnosed(noisy(recorded(), 0.03), seconds=2.0)
    found = verdict.diagnosis
    assert found is not None and found.cause == "unexplained" and found.finding is None and verdict.named is None
    assert (found.confidence, found.location) == ("unknown", "") and found.next.startswith("rlkernel-drift capture")
    assert found.tried["logits"] > 5 and "time was not enough" in found.statement
    page = write_html(Verdict.model_validate_json(verdict.to_json()))
    assert "<h2>Cause</h2>" not in page and "Tried (" in page and "confidence: unknown" in page


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


# ---- the grammar ---------------------------------------------------------------------------------------------------


def planted(change: Callable[[Engine], None]) -> Recorded:
    return record_world(healthy_world("llama", 6, "float32"), lambda w: change(w.rollout))


def processed(change: Callable[[Tensor, list[int]], Tensor]) -> Callable[[Engine], None]:
    """A rollout whose logits [n, V] of each completion are changed, given the tokens up to the last one."""

    def plant(engine: Engine) -> None:
        def logprobs(sequences: Sequences) -> Tensor:
            z = engine.model.head(engine.model.hidden(sequences, engine.dtype)).split([len(r) for r in sequences.rows])
            rows = zip(z, sequences.ids, sequences.rows, strict=True)
            done = torch.cat([change(logits.clone(), ids[int(row[0]) :].tolist()) for logits, ids, row in rows])
            return done.log_softmax(-1).gather(1, sequences.targets[:, None])[:, 0]

        engine.logprobs = logprobs  # type: ignore[method-assign]

    return plant


def frequency_penalty(z: Tensor, ids: list[int]) -> Tensor:
    for i in range(len(z)):
        counts = torch.bincount(torch.tensor(ids[1 : i + 1], dtype=torch.int64), minlength=z.shape[1])
        z[i] -= 0.7 * counts
    return z


def masked(z: Tensor, ids: list[int]) -> Tensor:
    z[:, [17, 30]] = -1e9
    return z


def test_penalties_and_masks_are_fitted() -> None:
    found = diagnosed(planted(processed(frequency_penalty))).diagnosis
    assert found is not None and found.cause == "frequency-penalty" and found.confidence == "proven"
    assert found.parameters["frequency_penalty"] == pytest.approx(0.7, abs=1e-3)
    found = diagnosed(planted(processed(masked))).diagnosis
    assert found is not None and (found.cause, found.parameters["tokens"]) == ("masked-tokens", "[17, 30]")


def given(change: Callable[[Sequences], Sequences]) -> Callable[[Engine], None]:
    """A rollout of changed tokens or positions."""
    return lambda engine: setattr(engine, "inputs", change)


def still(engine: Engine) -> None:
    """The four slowest rotary frequencies do not turn."""

    def buffers(model: Any) -> Any:
        found = [(m, n, b) for m in model.modules() for n, b in m.named_buffers(recurse=False)]
        stopped = lambda b: torch.cat([b[:-4], torch.zeros_like(b[-4:])])
        return replaced([(m, n, stopped(b)) for m, n, b in found if n.endswith("inv_freq")])

    engine.hooks.append(buffers)


def without_turns(sequences: Sequences) -> Sequences:
    """Turns begin with the most common token of the first prompt."""
    (ids, *_), count = sequences.ids, sequences.prompt[0]
    return last_turn(sequences, int(ids[1:count].bincount().argmax()))


@pytest.mark.parametrize(
    "change, cause, parameter, value",
    [
        (given(lambda s: scale_positions(s, 1.05)), "rope-scaling", "factor", pytest.approx(1.05, abs=1e-3)),
        (still, "rope-scaling", "frequencies", "the 4 slowest"),
        (given(without_turns), "truncated", "token", None),
    ],
    ids=["little scaling", "frequencies", "turns"],
)
def test_positions_and_prompts_are_fitted(
    change: Callable[[Engine], None], cause: str, parameter: str, value: object
) -> None:
    found = diagnosed(planted(change)).diagnosis
    assert found is not None and (found.cause, found.confidence) == (cause, "proven"), found.statement
    assert value is None or found.parameters[parameter] == value


def embedding_scaled(engine: Engine) -> None:
    engine.hooks.append(lambda model: changed(model, frozenset({"embedding"}), lambda x: 8.0 * x))


def narrow_norms(engine: Engine) -> None:
    def hooks(model: Any) -> Any:
        stack = contextlib.ExitStack()
        for module in (m for n, m in model.named_modules() if n.endswith("norm")):
            before = module.register_forward_pre_hook(lambda m, args: (args[0].bfloat16().float(),))
            after = module.register_forward_hook(lambda m, args, out: out.bfloat16().float())
            stack.callback(before.remove), stack.callback(after.remove)
        return stack

    engine.hooks.append(hooks)
    engine.path = "right"  # as the reference: the noise of another path would be rounded to whole steps


def narrow_softmax(engine: Engine) -> None:
    def logprobs(sequences: Sequences) -> Tensor:
        z = engine.model.head(engine.model.hidden(sequences, engine.dtype)) / 0.9
        return z.bfloat16().log_softmax(-1).gather(1, sequences.targets[:, None])[:, 0].float()

    engine.logprobs = logprobs  # type: ignore[method-assign]


def rolling_cache(engine: Engine) -> None:
    """The cache keeps the first 4 and the last 12 tokens."""
    evicted = hiding(lambda call, i, j: (j >= 4) & (j <= i - 12))
    engine.hooks.append(lambda model: engine.model.attending(model, (evicted,), "", [0] * 64))
    engine.path = "right"


def without_keys_of_pages(engine: Engine) -> None:
    """The last key of each page of 8 is seen by its own token and the next one only."""
    hidden = hiding(lambda call, i, j: (j % 8 == 7) & (j < i - 1))
    engine.hooks.append(lambda model: engine.model.attending(model, (hidden,), "", [0] * 64))
    engine.path = "right"


def hooked(hooks: Callable[[Any, contextlib.ExitStack], None]) -> Callable[[Engine], None]:
    """A rollout whose modules have hooks, on the reference's path, because roundings multiply the noise of another."""

    def plant(engine: Engine) -> None:
        def patch(model: Any) -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            hooks(model, stack)
            return stack

        engine.hooks.append(patch)
        engine.path = "right"

    return plant


def int8_inputs(model: Any, stack: contextlib.ExitStack) -> None:
    def narrow(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = args[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return ((args[0] / scale).round() * scale,)

    for module in model.base_model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            stack.callback(module.register_forward_pre_hook(narrow).remove)


def narrow_table(model: Any, stack: contextlib.ExitStack) -> None:
    rotary = model.base_model.rotary_emb
    hook = rotary.register_forward_hook(lambda m, args, out: tuple(x.bfloat16().float() for x in out))
    stack.callback(hook.remove)


def lost_residual(model: Any, stack: contextlib.ExitStack) -> None:
    """Layer 2 returns what its MLP adds."""
    layer, kept = model.base_model.layers[2], list[Tensor]()
    norm = layer.post_attention_layernorm
    stack.callback(norm.register_forward_pre_hook(lambda m, args: kept.append(args[0])).remove)
    stack.callback(layer.register_forward_hook(lambda m, args, out: out - kept.pop()).remove)


def half_an_embedding(model: Any, stack: contextlib.ExitStack) -> None:
    lookup = model.get_input_embeddings()
    hook = lambda m, args, out: out * (args[0] < lookup.num_embeddings // 2)[..., None]
    stack.callback(lookup.register_forward_hook(hook).remove)


def sum_of_a_shard(engine: Engine) -> None:
    def logprobs(sequences: Sequences) -> Tensor:
        z = engine.model.head(engine.model.hidden(sequences, engine.dtype))
        return z.gather(1, sequences.targets[:, None])[:, 0] - z[:, : z.shape[1] // 4].logsumexp(-1)

    engine.logprobs = logprobs  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change, cause, name",
    [
        (without_keys_of_pages, "cache-cut", "a key of each page is not seen (tokens 8, 7)"),
        (hooked(int8_inputs), "quantised-activations", "int8 with a scale of each token"),
        (hooked(narrow_table), "rope-dtype", "cosines and sines of rope rounded to bfloat16"),
        (hooked(lost_residual), "operator", "the residual stream of layer 2 (wiring the MLP's residual missing"),
        (hooked(half_an_embedding), "missing-weights", "a part of the embedding is zero (part 2 of 2"),
        (sum_of_a_shard, "vocabulary-shard", "sums a part of the vocabulary (part eighths 1 to 2)"),
        (embedding_scaled, "model-setting", "the embedding scaled"),
        (narrow_norms, "operator-dtype", "norms computed in bfloat16"),
        (narrow_softmax, "bf16-logits", "log-softmax in bfloat16"),
        (processed(lambda z, ids: z.to(torch.float8_e4m3fn).float()), "bf16-logits", "logits rounded to float8_e4m3fn"),
        (rolling_cache, "cache-cut", "the first tokens and the last ones (tokens 4, 12)"),
    ],
    ids=[
        "pages",
        "int8",
        "table",
        "residual",
        "lookup",
        "shard",
        "embedding",
        "norms",
        "softmax",
        "fp8 logits",
        "cache",
    ],
)
def test_operators_and_caches_are_named(change: Callable[[Engine], None], cause: str, name: str) -> None:
    world = healthy_world("llama", 6, "float32")
    if name.startswith("log-softmax"):
        world.trainer.sampling = Sampling(temperature=0.9)
        world.declared = (world.trainer.sampling,) * 2
    found = diagnosed(record_world(world, lambda w: change(w.rollout))).diagnosis
    assert found is not None and (found.cause, found.confidence) == (cause, "proven"), found.statement
    assert name in found.statement


def test_the_next_expert_computes_what_this_one_would_with_its_weights() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    model, ids = Qwen3MoeForCausalLM(config).eval(), torch.randint(96, (2, 12))
    (expert,) = operators._experts(
        types.SimpleNamespace(model=types.SimpleNamespace(model=model)),  # type: ignore[arg-type]
        frozenset({"layers.0.experts", "layers.1.experts"}), "every layer", 1,
    )  # fmt: skip
    body = Body(sequences=None, dtype=torch.float32)  # type: ignore[arg-type]
    patched = expert.apply(Computation(body, Sampling(), Head()), "the next expert computes")
    assert patched is not None
    with torch.no_grad(), patched.body.patches[0](model):
        found = model(ids).logits
    with torch.no_grad():
        stock = model(ids).logits
        for layer in model.base_model.layers:
            for weight in layer.mlp.experts.parameters():
                weight.data = weight.data.roll(-1, 0)
        assert found.equal(model(ids).logits) and not found.equal(stock)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_both_sides_have_and_neither_declares_hides_no_fault(dtype: str) -> None:
    world = healthy_world("llama", 6, dtype)
    for engine in (world.rollout, world.trainer):
        engine.sampling = Sampling(temperature=0.8)
    world.rollout.theta = 20000.0
    world.declared = (Sampling(), Sampling())
    found = diagnosed(record_world(world)).diagnosis
    assert found is not None and found.statement.startswith("Both sides have another temperature (temperature 0.8")
    assert (found.cause, found.confidence) == ("rope-base", "proven"), found.statement
    world.rollout.theta = None  # Control: without the fault they are aligned, although neither declares 0.8.
    found = diagnosed(record_world(world)).diagnosis
    assert found is not None and found.cause == "none", found.statement


def test_changes_of_the_same_numbers_are_named_together() -> None:
    # Rope sees distances only, so a prompt without its first tokens is one whose first keys are not seen.
    found = diagnosed(planted(given(lambda s: s.drop_first(3)))).diagnosis
    assert found is not None and found.confidence == "likely" and "one of several changes" in found.statement
    assert {"chat-template", "cache-cut"} <= {found.cause, *found.alternatives}


@pytest.mark.parametrize(("size", "cause"), [(2e-3, "temperature"), (6e-3, "unexplained")])
def test_of_two_differences_the_one_that_explains_most_is_named_and_no_tensor_blamed(size: float, cause: str) -> None:
    world = healthy_world("llama", 6, "float32")
    name = "model.layers.2.mlp.down_proj.weight"
    weight = world.base.get_parameter(name).data
    step = size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))

    def plant(w: World) -> None:
        engine = w.rollout

        def logprobs(sequences: Sequences) -> Tensor:
            with engine.model.edited({name: weight + step}, engine.dtype):
                z = engine.model.head(engine.model.hidden(sequences, engine.dtype)) / 1.1
            return z.log_softmax(-1).gather(1, sequences.targets[:, None])[:, 0]

        engine.logprobs = logprobs  # type: ignore[method-assign]

    found = diagnosed(record_world(world, plant), seconds=2.0).diagnosis
    assert found is not None and (found.cause, found.location) == (cause, ""), found.statement
    assert found.confidence == ("unknown" if cause == "unexplained" else "likely")
    assert ("two things differ" if cause == "unexplained" else "something else differs too") in found.statement
    assert "another temperature" in found.statement


def test_a_few_tokens_and_later_tokens_are_told_from_a_shift_of_all() -> None:
    pair = recorded()
    (name,) = pair.rollout.logprobs
    values, counted = pair.rollout.logprobs[name].copy(), np.flatnonzero(pair.rollout.mask)
    values[counted[[9, 40, 77, 120]]] -= np.float32([0.7, 1.1, 0.6, 0.9])
    raced = dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
    assert (
        causes(compare_capsules(raced.rollout, raced.train, Options(profile=GENERAL)), "statistics")[0] == "few-tokens"
    )
    found = diagnosed(raced, seconds=1.0).diagnosis
    assert found is not None and (found.cause, found.confidence) == ("few-tokens", "proven")
    noise = np.random.default_rng(1).normal(0, 0.2, pair.rollout.tokens)
    for last in (8, 3):  # three are so few of all that they could be single tokens
        values = pair.rollout.logprobs[name].copy()
        for i in range(pair.rollout.sequences):
            tail = slice(pair.rollout.sequence(i).stop - last, pair.rollout.sequence(i).stop)
            values[tail] -= 0.1 + np.abs(noise[tail]).astype(np.float32)
        later = dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
        found = diagnosed(later, seconds=1.0).diagnosis
        assert found is not None and (found.cause, found.confidence) == ("mid-request", "likely"), found.statement


def test_a_request_that_differs_in_most_tokens_is_named_and_not_its_tokens() -> None:
    pair = recorded()
    (name,) = pair.rollout.logprobs
    values, part = pair.rollout.logprobs[name].copy(), pair.rollout.sequence(2)
    own = np.flatnonzero(pair.rollout.mask[part]) + part.start
    assert len(own) < 0.15 * pair.rollout.mask.sum()  # few enough to be single tokens
    values[own] -= np.random.default_rng(0).uniform(0.1, 0.9, len(own)).astype(np.float32)
    wrong = dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
    found = diagnosed(wrong, seconds=1.0).diagnosis
    assert found is not None and (found.cause, found.confidence) == ("some-requests", "likely"), found.statement
    assert found.location == f"1 of {pair.rollout.sequences} requests (2)"


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj"])
def test_gradients_find_the_tensor_of_another_version(name: str) -> None:
    world = healthy_world("llama", 6, "float32")
    parameter, place = f"model.layers.2.{name}.weight", f"layers.2.{name.partition('.')[2]}"
    step = torch.randn(world.base.get_parameter(parameter).shape, generator=torch.Generator().manual_seed(0))
    wrong = {parameter: world.base.get_parameter(parameter).data + 2e-3 * step}
    pair = record_world(world, lambda w: w.rollout.edits.update(wrong))
    found = diagnosed(pair, seconds=1.0).diagnosis
    assert found is not None and (found.location, found.confidence) == (place, "likely"), found.statement


@pytest.mark.parametrize("operators", [False, True])
def test_no_tensor_is_blamed_for_a_change_of_all(operators: bool) -> None:
    # the control: the same size of change in all tensors is not blamed on one, nor on one operator
    world = healthy_world("llama", 6, "float32")
    world.operators = operators
    noise = {
        n: p.data + 5e-4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))
        for n, p in world.base.named_parameters()
        if operators or n.endswith("proj.weight")  # with records also the embedding and the norms
    }
    found = diagnosed(record_world(world, lambda w: w.rollout.edits.update(noise)), seconds=1.0).diagnosis
    assert found is not None and found.location in ("all layers", "" if not operators else None), found.statement
    assert not operators or (found.cause, found.confidence) == ("weights-differ", "proven")


@pytest.mark.parametrize("value, cause", [(np.nan, "not-finite"), (0.5, "above-zero"), (-np.inf, "support")])
def test_a_diagnosis_repeats_what_the_gate_found_about_impossible_values(value: float, cause: str) -> None:
    pair = recorded()
    (name,) = pair.rollout.logprobs
    values = pair.rollout.logprobs[name].copy()
    values[np.flatnonzero(pair.rollout.mask)[::9]] = value
    broken = dataclasses.replace(pair, rollout=dataclasses.replace(pair.rollout, logprobs={name: values}))
    verdict = diagnosed(broken)
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == cause and verdict.exit_code == 1
    assert verdict.named is not None and verdict.named.message in verdict.diagnosis.statement


@pytest.mark.parametrize("both", [False, True])
def test_values_above_zero_are_named_where_the_search_explains_them(both: bool) -> None:
    pair = recorded()
    shifted = lambda side: dataclasses.replace(
        side, logprobs={n: x + np.float32(0.5) for n, x in side.logprobs.items()}
    )
    sides = {"rollout": shifted(pair.rollout), **({"train": shifted(pair.train)} if both else {})}
    found = diagnosed(dataclasses.replace(pair, **sides), seconds=1.0).diagnosis
    # If both sides record the same values, the search finds no drift, and what the gate saw stays true.
    assert found is not None and found.cause == ("above-zero" if both else "units"), found.statement
    assert found.confidence == "proven"


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
    # The noise of bfloat16 would hide noise of 4e-4 beside the temperature, but the side is not closer to it than fp32.
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
