"""Settings that strict mode refuses, by name; the flag without the plugin; leaves; confirmed deliveries."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from verl_side import make_model, overrides

FLAG = "actor_rollout_ref.model.use_rl_kernel_backend"
MEGATRON = "{tensor_model_parallel_size:1,pipeline_model_parallel_size:1,context_parallel_size:1}"

REFUSED = {
    "actor_rollout_ref.actor.strategy=fsdp": "over FSDP2 only",
    f"actor_rollout_ref.actor.strategy=megatron +actor_rollout_ref.actor.megatron={MEGATRON}": "not over Megatron",
    "actor_rollout_ref.rollout.name=sglang": "in vLLM only",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2": "split over ranks; use 1",
    "actor_rollout_ref.model.use_fused_kernels=True": "use False",
    "actor_rollout_ref.model.use_liger=True": "use False",
    "actor_rollout_ref.model.tiled_mlp.enabled=True": "use False",
    "actor_rollout_ref.model.lora.merge=False actor_rollout_ref.model.lora_rank=8": "use True",
    "actor_rollout_ref.rollout.top_p=0.9": "scores without it; use 1",
    "actor_rollout_ref.rollout.top_k=50": "scores without it; use -1",
    "actor_rollout_ref.rollout.calculate_log_probs=False": "use True",
    "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs": "use processed_logprobs",
    "actor_rollout_ref.rollout.temperature=0": "use a positive value",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl": "use naive",
    "trainer.v1.trainer_mode=separate_async": "use sync",
    "trainer.use_v1=False": "use True",
    "critic.strategy=fsdp +critic.model.use_rl_kernel_backend=True": "use fsdp2",
}


def check(changes: str) -> None:
    """verl's check of a run's configuration, with the flag."""
    import verl.utils.config
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        given = [*overrides(Path("x"), 1), f"+{FLAG}=True", *changes.split()]
        verl.utils.config.validate_config(compose("ppo_trainer", overrides=given), False, False)


@pytest.mark.parametrize("changes", REFUSED)
def test_refused_by_name(changes: str) -> None:
    from rlkernel_verl import ExactnessLostError

    path, _, value = changes.split()[0].partition("=")
    with pytest.raises(ExactnessLostError, match=rf"{path.rpartition('.')[2]}={value}.*: .*{REFUSED[changes]}"):
        check(changes)


def test_admitted() -> None:
    check("")
    check("actor_rollout_ref.model.use_remove_padding=False")
    check("+actor_rollout_ref.model.rl_kernel_strict=False actor_rollout_ref.rollout.top_p=0.9")


MODEL = """
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

made = omega_conf_to_dataclass(OmegaConf.create({
    "_target_": "verl.workers.config.HFModelConfig", "path": "MODEL", "use_rl_kernel_backend": True,
    "override_config": {"attn_implementation": "sdpa"},
}))
"""


def test_a_run_without_the_plugin_does_not_start(tmp_path: Path) -> None:
    """verl drops a plugin in silence, for example by this variable; the flag is then an unknown key."""
    make_model(tmp_path)
    made: dict[str, Any] = {}
    exec(MODEL.replace("MODEL", str(tmp_path)), made)
    assert type(made["made"]).__module__ == "rlkernel_verl.config"
    done = subprocess.run(
        [sys.executable, "-c", MODEL.replace("MODEL", str(tmp_path))],
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode and "unexpected keyword argument 'use_rl_kernel_backend'" in done.stderr


def test_leaves_are_dealt_by_contents() -> None:
    from rlkernel_verl.leaves import partition

    rows = [torch.full((3 + i % 5,), i) for i in range(16)]

    def parts(order: list[int], samples: int = 16, tokens: int = 1 << 62) -> list[list[int]]:
        ids = torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)
        return [[order[i] for i in part] for part in partition({"input_ids": ids}, 4, (samples, tokens))]

    first = parts(list(range(16)))
    assert sorted(i for part in first for i in part) == list(range(16))
    assert first == parts(list(range(15, -1, -1)))
    assert len(parts(list(range(16)), samples=2)) == 8
    assert all(sum(len(rows[i]) for i in part) <= 12 for part in parts(list(range(16)), tokens=12))
    with pytest.raises(ValueError, match="3 samples for 4 leaves"):
        parts(list(range(3)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", "True"),
        (
            "Worker failed with error 'rlkernel: 1 of 9 weights in vLLM are not the trainer's: a'",
            "MismatchError: .*1 of 9",
        ),
        ("'Worker' object has no attribute 'rlkernel_confirm'", "ExactnessLostError: .*VLLM_PLUGINS"),
        ("CUDA error", "RuntimeError: CUDA error"),
    ],
)
def test_deliveries_are_confirmed(error: str, expected: str) -> None:
    import re

    from rlkernel_verl.rollout import ServerAdapter

    async def execute(method: str, **_: Any) -> None:
        if error:
            raise RuntimeError(error)

    adapter: Any = types.SimpleNamespace(_execute_method=execute, strict=True)
    weights: Any = types.SimpleNamespace(fingerprints={})
    try:
        found = str(asyncio.run(ServerAdapter._confirm(adapter, weights)))
    except Exception as raised:
        found = f"{type(raised).__name__}: {raised}"
    assert re.match(expected, found, re.DOTALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "SGD"}, r"optim\.optimizer=torch\.optim\.SGD"),
        ({"override_optimizer_config": {"amsgrad": True}}, r"optim\.override_optimizer_config=amsgrad"),
    ],
)
def test_another_optimizer_is_refused_strict_or_not(changes: dict[str, Any], message: str) -> None:
    """rlkernel's AdamW would silently take its place."""
    from rlkernel_verl import ExactnessLostError
    from rlkernel_verl.engine import ExactUpdate

    given = {"optimizer_impl": "torch.optim", "optimizer": "AdamW", "override_optimizer_config": None, **changes}
    engine: Any = types.SimpleNamespace(optimizer_config=types.SimpleNamespace(**given), strict=False)
    with pytest.raises(ExactnessLostError, match=message):
        ExactUpdate._build_optimizer(engine, torch.nn.Linear(2, 2))
