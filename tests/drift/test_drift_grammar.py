"""Changes of the grammar that a search must find: records, logits, inputs, operators, caches, tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drift_cases import causes, diagnosed, recorded
from torch import Tensor

from rlkernel_drift.capsule import Sampling
from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose import layers
from rlkernel_drift.diagnose.attention import hiding
from rlkernel_drift.diagnose.context import Body, Computation
from rlkernel_drift.diagnose.inputs import last_turn, scale_positions
from rlkernel_drift.diagnose.search import Search
from rlkernel_drift.faults.world import Engine, Recorded, World, healthy_world, record_world
from rlkernel_drift.profiles import GENERAL
from rlkernel_drift.scoring.attention import attending
from rlkernel_drift.scoring.model import Head, ReferenceModel, replaced
from rlkernel_drift.scoring.operators import as_torch, changed, record, replay
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.statistics import owners

ENOUGH = 90.0
"""Seconds of a search that must reach its change although other tests share the cores."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    found = diagnosed(planted(change), seconds=ENOUGH).diagnosis
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
    engine.hooks.append(lambda model: attending(model, (evicted,), "", [0] * 64))
    engine.path = "right"


def without_keys_of_pages(engine: Engine) -> None:
    """The last key of each page of 8 is seen by its own token and the next one only."""
    hidden = hiding(lambda call, i, j: (j % 8 == 7) & (j < i - 1))
    engine.hooks.append(lambda model: attending(model, (hidden,), "", [0] * 64))
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


def turned_back(model: Any, stack: contextlib.ExitStack) -> None:
    """Layer 1 rotates in the other direction."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (cos, -sin)}

    stack.callback(model.base_model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True).remove)


def half_a_sum(model: Any, stack: contextlib.ExitStack) -> None:
    """The second rank's part of o_proj in layer 2 is missing."""
    half = lambda m, args: (torch.cat([args[0].chunk(2, -1)[0], 0 * args[0].chunk(2, -1)[1]], -1),)
    stack.callback(model.base_model.layers[2].self_attn.o_proj.register_forward_pre_hook(half).remove)


def window_of_a_layer(engine: Engine) -> None:
    window = hiding(lambda call, i, j: (j <= i - 6) & (call.layer == 1))
    engine.hooks.append(lambda model: attending(model, (window,), "", [0] * 64))
    engine.path = "right"


def halves(z: Tensor, ids: list[int]) -> Tensor:
    return torch.cat(z.chunk(2, 1)[::-1], 1)


def in_steps(z: Tensor, ids: list[int]) -> Tensor:
    z[3::4] *= 1.3
    return z


@pytest.mark.parametrize(
    "change, cause, name",
    [
        (hooked(turned_back), "operator", "embedding of layer 1 (rotation in the other direction, of q and k"),
        (hooked(half_a_sum), "operator", "a part of layers.2.attention is missing (part 2 of 2"),
        (window_of_a_layer, "operator", "another attention in layer 1 (change a window of 6 tokens"),
        (processed(in_steps), "temperature", "one token in 4 of the completions, from token 4 on"),
        (processed(halves), "swapped-weights", "two parts of the vocabulary exchanged (parts 1 and 2 of 2"),
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
        "rotation",
        "sum",
        "window",
        "steps",
        "vocabulary",
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
    found = diagnosed(record_world(world, lambda w: change(w.rollout)), seconds=ENOUGH).diagnosis
    assert found is not None and (found.cause, found.confidence) == (cause, "proven"), found.statement
    assert name in found.statement


def test_one_process_finds_what_two_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_has_second_core", lambda self: False)
    test_operators_and_caches_are_named(hooked(half_a_sum), "operator", "layers.2.attention is missing (part 2 of 2")


def mixture() -> Any:
    """A model with two layers of eight experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def test_experts_are_recorded_and_replayed() -> None:
    model, ids, positions = mixture(), torch.randint(96, (12,)), torch.arange(12)
    recorded = {name: as_torch(value) for name, value in record(model, [(ids, positions)]).items()}
    assert recorded["layers.1.experts"].shape == (12, 32)
    recorded["layers.0.experts"] *= 2
    for dtype in (torch.float32, torch.float64):
        replayed = replay(ReferenceModel(model).in_dtype(dtype), ids, positions, recorded)
        differ = [
            name for name, value in replayed.items() if not torch.allclose(value.float(), recorded[name], atol=1e-4)
        ]
        assert differ == ["layers.0.experts", "layers.0.mlp"]


def test_the_next_expert_computes_what_this_one_would_with_its_weights() -> None:
    model, ids = mixture(), torch.randint(96, (2, 12))
    (expert,) = layers.experts(
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
        assert found is not None and (found.cause, found.confidence) == ("some-places", "likely"), found.statement


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


@pytest.mark.parametrize("lag", [1, 2])
def test_shifted_values_are_named_although_zeros_stand_in_front(lag: int) -> None:
    pair = recorded()
    counted = np.flatnonzero(pair.train.mask)
    owner = owners(pair.train.cu_seqlens, counted)
    (name,) = pair.train.logprobs
    values, own = pair.train.logprobs[name].copy(), pair.train.logprobs[name][counted]
    values[counted] = np.where(owner == np.roll(owner, lag), np.roll(own, lag), 0.0)
    moved = dataclasses.replace(pair, train=dataclasses.replace(pair.train, logprobs={name: values}))
    found = diagnosed(moved).diagnosis
    assert found is not None and (found.cause, found.parameters) == ("off-by-one", {"tokens": lag}), found.statement


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
