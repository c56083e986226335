"""Rollout and training in attention variant fa3: one choice for both sides, and no way to mix them unnoticed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from ops.fake_fa3 import fake, install
from tiny import fingerprint, make_model, training_logps

from rlkernel import ops
from rlkernel.contract import CONTRACT_ID, assert_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.graphs import DecodeGraphs
from rlkernel.kernels.errors import VariantError
from rlkernel.models import Decoder, PackedBatch, save_model

PROMPTS = [[5], [2, 3, 4, 5, 6], [9] * 20, [7, 8]]
PARAMS = [SamplingParams(max_tokens=14, seed=i, ignore_eos=True, temperature=0.7, n=2) for i in range(4)]
SIZES = {"max_num_seqs": 5, "max_num_batched_tokens": 12, "page_size": 4}
FA3 = f"{CONTRACT_ID}+fa3"


@pytest.fixture(autouse=True)
def fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)


def model() -> Decoder:
    return make_model("bf16")


def test_rollout_equals_training_in_either_variant() -> None:
    seen = []
    for variant in ("split", "fa3"):
        policy = model()
        llm = LLM(policy, attention=variant, **SIZES)
        assert policy.attention_variant == llm.attention == variant
        outputs = llm.generate(PROMPTS, PARAMS)
        for output, params in zip(outputs, PARAMS, strict=True):
            trained = training_logps(policy, output, params)
            for completion, logp in zip(output.outputs, trained, strict=True):
                assert_bitwise(logp, completion.logprobs_tensor)
        seen.append([fingerprint(c) for o in outputs for c in o.outputs])
    assert seen[0] != seen[1], "the variants have orders of their own"


def test_replayed_steps_change_nothing() -> None:
    found = []
    for graphs in (False, True):
        llm = LLM(model(), attention="fa3", **SIZES)
        if graphs:
            llm.runner.graphs = DecodeGraphs(llm.model, lambda: lambda forward: forward)
        found.append([fingerprint(c) for o in llm.generate(PROMPTS, PARAMS) for c in o.outputs])
    assert found[0] == found[1]


def test_the_model_carries_its_variant(tmp_path: Path) -> None:
    with ops.attention_variant("fa3"):
        policy = model()
    assert policy.attention_variant == "fa3" and policy.contract == FA3
    assert copy.deepcopy(policy).attention_variant == "fa3"
    llm = LLM(policy, **SIZES)
    assert llm.attention == "fa3" and llm.contract == FA3
    config = json.loads((save_model(policy, tmp_path / "m") / "config.json").read_text())
    assert config["rlkernel_contract"] == FA3
    other = model()
    assert other.attention_variant == "split" and other.contract == LLM(other, **SIZES).contract == CONTRACT_ID


def test_mixing_is_an_error() -> None:
    policy = model()
    llm = LLM(policy, attention="fa3", **SIZES)
    batch = PackedBatch.from_sequences([[3, 4, 5]])
    with ops.attention_variant("split"), pytest.raises(VariantError, match="'fa3' was requested in a process that is"):
        policy(batch)
    with (
        ops.attention_variant("split"),
        pytest.raises(VariantError, match=r"call model.set_attention_variant\('split'\)"),
    ):
        llm.generate(PROMPTS[:1])
    policy.set_attention_variant("split")
    with pytest.raises(VariantError, match="created for attention variant 'fa3', but the model was set to 'split'"):
        llm.generate(PROMPTS[:1])
    policy.set_attention_variant("fa3")
    llm.generate(PROMPTS[:1])
    assert LLM(policy, attention="split", **SIZES).attention == policy.attention_variant == "split"


def test_gradients_with_recomputed_layers() -> None:
    found = []
    for recompute in (False, True):
        with ops.attention_variant("fa3"):
            policy = model()
        policy.gradient_checkpointing = recompute
        hidden = policy(PackedBatch.from_sequences([[3, 4, 5, 6], [7, 8]]))
        hidden.float().sum().backward()  # outside the block: recomputing follows the model
        found.append([p.grad for p in policy.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert_bitwise(b, a)


def test_what_cannot_run_is_refused_when_the_engine_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VariantError, match="takes bfloat16 and float16, not float32"):
        LLM(make_model("fp32"), attention="fa3")
    with pytest.raises(VariantError, match="does not support window=5"):
        LLM(make_model("window", dtype=torch.bfloat16), attention="fa3")
    with pytest.raises(ValueError, match="variant is 'fa2'; expected one of split, fa3"):
        LLM(model(), attention="fa2")
    with ops.attention_variant("fa3"):
        fp32 = make_model("fp32")
    with pytest.raises(VariantError, match="not float32"):
        LLM(fp32)
    install(monkeypatch, tmp_path / "other", fake(lambda paged, longest, batch: 1 + paged / 64))
    policy = model()
    with pytest.raises(VariantError, match=r"is refused for .*'page': 16"):
        LLM(policy, attention="fa3", **SIZES)
    assert policy.attention_variant == "split"
    install(monkeypatch, tmp_path, "vllm: no module vllm")
    with pytest.raises(VariantError, match="not importable"):
        LLM(policy, attention="fa3")


def test_a_page_size_is_certified_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = fake()

    def paged(q, k, *args):
        out, lse = exact.paged(q, k, *args)
        return (out + 1 if k.shape[1] == 4 else out), lse

    install(monkeypatch, tmp_path, type(exact)(exact.dense, paged, {}, "cpu"))
    with pytest.raises(VariantError, match="'page': 4"):
        LLM(model(), attention="fa3", **SIZES)
    LLM(model(), attention="fa3", **{**SIZES, "page_size": 16}).generate(PROMPTS, PARAMS)
