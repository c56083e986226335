"""vLLM with rlkernel on a GPU: with CUDA graphs, the V2 runner and sleep mode, log-probabilities equal the training
forward's.

Control: tests/integrations/vllm shows that log-probabilities of vLLM without rlkernel differ.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.gpu_checks import vllm_against_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


FEATURES = {
    "decode": "decode, batched",
    "again, from the prefix cache": "prefix cache",
    "prompt": "prompt log-probabilities",
}
"""Names of these comparisons in the compatibility table, shared with the CPU tests."""


@pytest.mark.parametrize(
    "preset,attention,sleep", [("qwen3-0.6b", "split", True), ("llama3-8b", "split", False), ("qwen3-8b", "fa3", False)]
)
def test_rollout_equals_training(
    preset: str, attention: str, sleep: bool, tmp_path: Path, record: Callable[..., None], compat: Any
) -> None:
    if attention == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 is for GPUs of compute capability 9")
    arguments = {"preset": preset, "attention": attention, "sleep": sleep, "layers": 4}
    found, pairs = vllm_against_training(tmp_path, arguments)
    tokens, differing = sum(n for _, n in pairs.values()), sum(d for d, _ in pairs.values())
    record(cases=len(pairs), tokens=tokens, mismatches=differing)
    assert differing == 0 < tokens, pairs
    assert found["exact"] and found["runner"] == "V2"
    assert all(value == {} for name, value in found.items() if name.startswith("weights"))
    compat.pairs("vLLM", pairs, {name: FEATURES.get(name, name) for name in pairs})
    compat.compared("vLLM", f"model {preset}, bfloat16, {attention}, V2 runner, CUDA graphs", differing, tokens)
    compat.exact("vLLM", "fingerprints of the weights")
