"""`python -m rlkernel_trl`: TRL's parser and scripts, with the flag on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.tiny_model import make_model
from trl_side import PAIRS, PROMPTS, VLLM_ENVIRONMENT

from rlkernel_trl import unpatch
from rlkernel_trl.__main__ import main


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "rlkernel_trl", *arguments],
        env={**os.environ, **VLLM_ENVIRONMENT, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def write(folder: Path, rows: list[dict[str, str]], **values: object) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(folder / "model", head_dim=32)
    config = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": str(folder / "rows.jsonl")}],
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        **values,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_grpo_with_vllm(tmp_path: Path, compat: Any) -> None:
    config = write(
        tmp_path,
        [{"prompt": prompt} for prompt in PROMPTS * 4],
        reward_funcs=["trl_rewards.letters"],
        num_generations=4,
        max_completion_length=8,
        use_vllm=True,
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=96,
    )
    done = command("grpo", "--config", str(config), "--learning_rate", "1e-3", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if "rlkernel/exact_frac" in line]
    assert len(rows) == 3
    assert all("'rlkernel/exact_frac': '1'" in row and "difference/max': '0'" in row for row in rows)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    compat.exact("TRL", "python -m rlkernel_trl grpo, vLLM colocate")


def test_sft_off_by_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": prompt, "completion": pair[0]} for prompt, pair in zip(PROMPTS, PAIRS, strict=True)] * 4
    config = write(tmp_path, rows, max_steps=1)
    try:
        assert main(["sft", "--config", str(config), "--use_rl_kernel_backend", "false"]) == 0
    finally:
        unpatch()
    found = capsys.readouterr().out
    assert "'loss'" in found and "rlkernel/fallbacks" not in found


def test_unknown_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt flag must not silently train stock, nor `num_processes` a single process."""
    config = write(tmp_path, [], use_rl_kernel_backnd=True, num_processes=4)
    try:
        assert main(["sft", "--config", str(config), "--typo", "3"]) == 2
    finally:
        unpatch()
    found = capsys.readouterr().err
    assert "unknown settings: num_processes, use_rl_kernel_backnd, typo" in found and "accelerate launch" in found
    for arguments in (["--config", str(tmp_path / "none.yaml")], ["--config"]):
        assert main(["sft", *arguments]) == 2
        assert "no such file" in capsys.readouterr().err


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ppo"]) == 2
    found = capsys.readouterr().err
    assert "unknown command 'ppo'" in found and "grpo" in found
    assert main(["--help"]) == 0
