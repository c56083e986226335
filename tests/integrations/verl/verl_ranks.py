"""verl's engines on gloo ranks without Ray: `python verl_ranks.py STORE '[{"model": "FOLDER", ...}, ...]'`.

Each rank prints one JSON line, a list with one result for each scenario. The same 16 samples are dealt to the ranks in
an order that depends on their number, as verl does.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import verl  # noqa: F401
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_name
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, value_loss

from rlkernel_verl import MismatchError

SAMPLES, TEMPERATURE = 16, 0.7


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(rows: list[int], **settings: Any) -> Any:
    """Samples of the run, by their numbers."""
    made: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        g = torch.Generator().manual_seed(row)
        prompt, response = (int(torch.randint(low, 20, (), generator=g)) for low in (3, 5))
        ids = torch.randint(3, 24, (prompt + response,), generator=g)
        mask = torch.ones(response, dtype=torch.long)
        fields = {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "response_mask": mask,
            "loss_mask": torch.cat((torch.zeros(prompt, dtype=torch.long), mask)),
            "advantages": torch.randn((), generator=g).expand(response).clone(),
            "old_log_probs": -3 + 0.1 * torch.randn(response, generator=g),
            "ref_log_prob": -3 + 0.1 * torch.randn(response, generator=g),
            "values": torch.randn(response, generator=g),
            "returns": torch.randn(response, generator=g),
        }
        for name, value in fields.items():
            made.setdefault(name, []).append(value)
    given = {
        "use_remove_padding": True,
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_fused_kernels": False,
        "pad_token_id": 0,
        "global_batch_size": SAMPLES,
        **settings,
    }
    out = tu.get_tensordict({name: nested(values) for name, values in made.items()}, non_tensor_dict=given)
    tu.assign_non_tensor(out, pad_mode=DatasetPadMode.NO_PADDING)
    return out


def engine_of(scenario: dict[str, Any]) -> Any:
    kind = scenario.get("kind", "language_model")
    model = HFModelConfig(
        path=scenario["model"],
        override_config={"attn_implementation": "sdpa"},
        **{"enable_gradient_checkpointing": False, **scenario.get("settings", {})},
    )
    model.model_type = kind
    config = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        fsdp_size=scenario.get("fsdp_size", -1),
        mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32"},
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, weight_decay=0.1)
    made = EngineRegistry.new(
        model_type=kind,
        backend="fsdp2",
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    torch.manual_seed(3)  # LoRA's and a value head's first weights
    made.initialize()
    return made


def mine() -> list[int]:
    """This rank's samples."""
    ranks, order = dist.get_world_size(), list(range(SAMPLES))
    random.Random(ranks).shuffle(order)
    share = SAMPLES // ranks
    return order[dist.get_rank() * share :][:share]


def loss_of(scenario: dict[str, Any]) -> Any:
    common = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 2, "rollout_n": 1}
    if scenario.get("kind") == "value_model":
        config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, rollout_n=1)
        return partial(value_loss, config=config)
    config = ActorConfig(**common, entropy_coeff=0.01, use_kl_loss=True, use_torch_compile=False)
    return partial(ppo_loss, config=config)


def scores(engine: Any, rows: list[int], **settings: Any) -> dict[str, list[torch.Tensor]]:
    with engine.eval_mode():
        out = engine.infer_batch(batch(rows, **settings))["model_output"]
    return {name: [row[:-1].cpu().clone() for row in value.unbind()] for name, value in out.items()}


def differ(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return sum(
        int((x.float().view(torch.int32) != y.float().view(torch.int32)).sum()) for x, y in zip(a, b, strict=True)
    )


def weights(engine: Any) -> str:
    """SHA-256 of the fp32 weights."""
    digest = hashlib.sha256()
    for name, value in sorted(engine.module.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode() + whole.float().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    engine, rows, loss = engine_of(scenario), mine(), loss_of(scenario)
    one = scores(engine, rows, micro_batch_size_per_gpu=1)
    found: dict[str, Any] = {"engine": type(engine).__name__}
    others = [{"micro_batch_size_per_gpu": len(rows)}, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64}]
    found["micro_batches"] = [
        differ(values, scores(engine, rows, **other)[name]) for other in others for name, values in one.items()
    ]
    found["before"] = {
        name: {row: value.tolist() for row, value in zip(rows, values, strict=True)} for name, values in one.items()
    }
    norms = []
    for _ in range(scenario.get("updates", 3)):
        with engine.train_mode():
            out = engine.train_batch(batch(rows, **scenario.get("batch", {})), loss_function=loss)
        norms.append(out["metrics"]["grad_norm"])
    found |= {"norms": norms, "weights": weights(engine)}
    if scenario.get("kind") != "value_model" and found["engine"] == "ExactEngine":
        found |= against_rollout(engine, rows, scenario)
    if scenario.get("resume"):
        found["resumed"] = resumed(engine, rows, scenario)
    return found


def resumed(engine: Any, rows: list[int], scenario: dict[str, Any]) -> bool:
    """Whether a run that loads a checkpoint continues with the same weights."""
    folder, loss = f"{scenario['model']}-{dist.get_world_size()}", loss_of(scenario)
    engine.save_checkpoint(folder)
    other = engine_of(scenario)
    other.load_checkpoint(folder, del_local_after_load=False)
    for each in (engine, other):
        with each.train_mode():
            each.train_batch(batch(rows), loss_function=loss)
    return weights(engine) == weights(other)


def against_rollout(engine: Any, rows: list[int], scenario: dict[str, Any]) -> dict[str, Any]:
    """Comparison with a rollout: one process, the delivered weights, transformers in bf16 on rlkernel's ops."""
    from transformers import AutoModelForCausalLM

    import rlkernel_transformers

    synced, _ = engine.get_per_tensor_param()
    delivered = dict(synced)
    model = AutoModelForCausalLM.from_pretrained(scenario["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(delivered, strict=False)
    rlkernel_transformers.apply(model.to(get_device_name()))
    synced.confirmed = True
    rolled = []
    for ids, prompt in ((row["input_ids"], len(row["prompts"])) for row in (batch([r])[0] for r in rows)):
        with torch.no_grad():
            out = rlkernel_transformers.token_logprobs(
                model, ids[None].to(model.device), temperature=TEMPERATURE, vocabulary=engine.vocabulary
            )
        rolled.append(out.logp[0, prompt - 1 : -1].cpu())
    sampled = batch(rows)
    sampled["rollout_log_probs"] = nested(rolled)
    with engine.eval_mode():
        engine.infer_batch(sampled)
    changed = [row.clone() for row in rolled]
    if dist.get_rank() == 0:
        changed[0][0] = torch.nextafter(changed[0][0], torch.tensor(0.0))
    other = batch(rows)
    other["rollout_log_probs"] = nested(changed)
    one_bit = "no error"
    try:
        with engine.eval_mode():
            engine.infer_batch(other)
    except MismatchError as error:
        one_bit = str(error)
    with engine.train_mode():
        metrics = engine.train_batch(sampled, loss_function=loss_of(scenario))["metrics"]
    return {
        "left_out": sorted({*missing, *unexpected} - {"lm_head.weight"}),
        "certificate": {name: value for name, value in metrics.items() if name.startswith("rlkernel/")},
        "one_bit": one_bit,
        "after_an_update": engine.certificate.synced is not None,
    }


def main() -> None:
    torch.set_num_threads(1)
    store, scenarios = sys.argv[1], json.loads(sys.argv[2])
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [run(scenario) for scenario in scenarios]
    print("RESULTS", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
