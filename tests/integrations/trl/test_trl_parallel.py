"""TRL's trainers on 1, 2 and 4 processes under DDP and FSDP2: equal weights, a certificate over all processes."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer
from e2e.tiny_model import make_model
from parallel.launched import accelerate_state, on_processes
from trl_side import VLLM_ENVIRONMENT, history, make_trainer, weights_hash

import rlkernel_trl
import rlkernel_trl.trainer
from rlkernel_transformers import merged_weights
from rlkernel_trl import MismatchError

UPDATES, LEAVES = 10, 4
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def trained(
    algorithm: str, model: str, fsdp: dict[str, Any] | None = None, resume: str | None = None, **changes: Any
) -> Any:
    """A trainer after ten updates of eight rows on any number of processes."""
    size = int(os.environ["WORLD_SIZE"])
    per_generation = {"steps_per_generation": 2 * LEAVES // size} if algorithm == "GRPO" else {}
    with accelerate_state(fsdp) as sharding:
        torch.manual_seed(0)  # of LoRA's matrices
        trainer = make_trainer(
            algorithm,
            Path(model),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=LEAVES // size,
            **{"max_steps": UPDATES, "rl_kernel_gradient_tree": True, **per_generation, **sharding, **changes},
        )
        trainer.train(resume_from_checkpoint=resume)
        if algorithm == "GRPO":
            assert all(row.get("rlkernel/exact_frac", 1) == 1 for row in history(trainer))
        return trainer


def lora() -> dict[str, Any]:
    return {"trainer": {"peft_config": peft.LoraConfig(**LORA)}}


def mismatch(model: str) -> str:
    """What this process raises when another process's rollout has one wrong log-probability."""
    stock = rlkernel_trl.trainer.GRPOTrainer._sample

    def _sample(self: Any, prompts: Any) -> Any:
        ids, logps = stock(self, prompts)
        if dist.get_rank() == 1:
            logps[0][0] += 1e-3
        return ids, logps

    rlkernel_trl.trainer.GRPOTrainer._sample = _sample  # type: ignore[method-assign]
    try:
        trained("GRPO", model, {})
        return ""
    except MismatchError as error:
        return str(error)
    finally:
        rlkernel_trl.trainer.GRPOTrainer._sample = stock  # type: ignore[method-assign]


def work(argument: tuple[str, str]) -> dict[str, Any]:
    model, folder = argument
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("rlkernel_trl").setLevel(logging.ERROR)
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    of = lambda trainer: weights_hash(merged_weights(trainer.model, torch.bfloat16))
    sharded: dict[str, Any] = {"state_dict_type": "SHARDED_STATE_DICT"}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    found = {"GRPO ddp": of(trained("GRPO", model, top_p=0.9, engine=True))}
    if size == 1:
        found["LoRA ddp"] = of(trained("GRPO", model, beta=0.1, **lora()))
        found["RLOO ddp"] = of(trained("RLOO", model))
        found["SFT ddp"] = of(trained("SFT", model, bf16=False))
        found["stock"] = weights_hash(trained("SFT", model, package=trl).model)
    elif size == 2:
        found["GRPO fsdp2"] = of(trained("GRPO", model, sharded, top_p=0.9, output_dir=folder, **saving))
        found["LoRA fsdp2"] = of(trained("GRPO", model, {"activation_checkpointing": True}, beta=0.1, **lora()))
        found["RLOO ddp"] = of(trained("RLOO", model))
        found["SFT fsdp2"] = of(trained("SFT", model, {}, bf16=False))
        found["stock"] = weights_hash(trained("SFT", model, package=trl).model)
        found["mismatch"] = mismatch(model)
    else:
        checkpoint = f"{folder}/checkpoint-4"
        found["GRPO resumed"] = of(trained("GRPO", model, sharded, checkpoint, top_p=0.9))
    return found


def colocated(model: str) -> dict[str, Any]:
    """A run with vLLM in each process, FSDP2 on several: its weights, and those that the engine lacks at the end."""
    import rlkernel_vllm

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    trainer = trained("GRPO", model, {} if size > 1 else None, use_vllm=True, max_steps=4)
    ours = rlkernel_vllm.fingerprints(merged_weights(trainer.model, torch.bfloat16))
    trainer.vllm_generation.sync_weights()
    engine = rlkernel_vllm.fingerprints(trainer.vllm_generation.llm)
    return {"weights": ours, "differ": sorted(rlkernel_vllm.compare(engine, ours))}


@pytest.mark.slow
def test_vllm_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compat: Any) -> None:
    for name, value in VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = make_model(tmp_path, head_dim=32)
    one, two = on_processes(colocated, [(size, str(model)) for size in (1, 2)], tmp_path)
    assert one[0] == two[0] == two[1] and one[0]["differ"] == []
    compat.exact(
        "TRL", "vLLM colocated in 2 processes with FSDP2: every token, fingerprints, the weights of one process"
    )


def test_weights_after_ten_updates(tmp_path: Path, compat: Any) -> None:
    model = make_model(tmp_path, head_dim=32)
    argument = (str(model), str(tmp_path / "out"))
    one, two, four = on_processes(work, [(size, argument) for size in (1, 2, 4)], tmp_path)
    first, second = (rank.pop("mismatch") for rank in two)
    for ranks in (two, four):
        assert all(rank == ranks[0] for rank in ranks)
    expected = one[0]
    assert two[0]["GRPO ddp"] == two[0]["GRPO fsdp2"] == four[0]["GRPO ddp"] == expected["GRPO ddp"]
    compat.exact("TRL", "GRPO on 1, 2 and 4 processes, DDP and FSDP2: weights after 10 updates")
    assert four[0]["GRPO resumed"] == expected["GRPO ddp"]
    compat.exact("TRL", "GRPO under FSDP2, saved on 2 processes and resumed on 4: weights")
    assert two[0]["LoRA fsdp2"] == expected["LoRA ddp"] != expected["GRPO ddp"]
    compat.exact("TRL", "GRPO with LoRA and KL on 1 and 2 processes, activation checkpointing: weights")
    assert two[0]["RLOO ddp"] == expected["RLOO ddp"] and two[0]["SFT fsdp2"] == expected["SFT ddp"]
    compat.exact("TRL", "RLOO on 1 and 2 processes, DDP: weights", "SFT in fp32 on 1 and 2 processes, FSDP2: weights")
    assert two[0]["stock"] != expected["stock"]
    for error, where in ((first, "on another process"), (second, "micro-batch")):
        assert "1 of" in error and where in error
    compat.refused("TRL", "a mismatch on one of two processes, by both", first, "on another process")
