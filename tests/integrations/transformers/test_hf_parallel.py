"""Sharded models and transformers' Trainer on 1, 2 and 4 processes: the bits of one process."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_side import ROWS, padded
from models.hf_models import build
from parallel.launched import accelerate_state, on_processes
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import rlkernel_transformers as rt
from rlkernel.parallel.tree import tree_sum
from rlkernel_transformers.gradient_tree import GradientTree
from rlkernel_transformers.trainer import check_plugins

IDS, MASK = padded(ROWS)
UPDATES, LEAVES = 10, 8
CASES = ("llama", "qwen3-tied")
GROUPS = {"by accelerate": {}, "head alone": {"alone": True}, "gathered once": {"reshard": False},
          "activation checkpointing": {"checkpoint": True}}  # fmt: skip


def fsdp2(**changes: Any) -> SimpleNamespace:
    """accelerate's plugin, as far as it is checked."""
    return SimpleNamespace(**{"fsdp_version": 2, "cpu_offload": None, "cpu_ram_efficient_loading": False, **changes})


def sharded(case: str, *, alone: bool = False, reshard: bool = True, checkpoint: bool = False) -> Any:
    """A model after `apply` and `fully_shard`, fp32 shards gathered in bf16, in the groups of accelerate or of verl."""
    model = rt.apply(build(case)).train()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    shard = functools.partial(fully_shard, mp_policy=policy, reshard_after_forward=reshard)
    for name, layer in model.model.layers.named_children():
        if checkpoint:
            model.model.layers.set_submodule(name, checkpoint_wrapper(layer, preserve_rng_state=False))
        shard(model.model.layers.get_submodule(name))
    inner, head = model.model, model.lm_head
    if head.weight is not inner.embed_tokens.weight:
        shard(inner.embed_tokens)
        shard(head) if alone else shard([inner.norm, head])
    elif not alone:
        shard([inner.norm, inner.embed_tokens, head])
    return shard(model)


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def logp_and_gradients() -> dict[str, Any]:
    """Names of the checks that failed: log-probabilities, and leaf gradients in the tree, against one process's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = [IDS.roll(i, 0)[: 1 + i % 2] for i in range(2 * size)]
    wrong: list[str] = []
    compared = 0
    for case in CASES:
        model = rt.apply(build(case).to(torch.bfloat16)).train()
        rt.main_grads(model)
        expected: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        for ids in leaves:
            logp = rt.token_logprobs(model, ids, MASK[: len(ids)]).logp
            logp.sum().backward()
            rt.fold_main_grads(model)
            expected.append(logp.detach())
            parts.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
            model.zero_grad()
        for group, options in GROUPS.items():
            model = sharded(case, **options)
            tree = GradientTree(model)
            for i in (0, 1):
                ids = leaves[i * size + rank]
                logp = rt.token_logprobs(model, ids, MASK[: len(ids)]).logp
                if not torch.equal(logp, expected[i * size + rank]):
                    wrong.append(f"{case}, {group}: log-probabilities")
                compared += logp.numel()
                tree.backward(torch.Tensor.backward, logp.sum() * size)
            tree.finish()
            for name, p in model.named_parameters():
                total = tree_sum([part[name.replace("_checkpoint_wrapped_module.", "")] for part in parts])
                if not torch.equal(p.grad.full_tensor(), total):
                    wrong.append(f"{case}, {group}: gradient of {name}")
            with torch.no_grad():  # leaves the last group gathered
                rt.token_logprobs(model, IDS, MASK)
            masters = dict(build(case).named_parameters())
            if any(not torch.equal(p, masters[name]) for name, p in rt.merged_weights(model)):
                wrong.append(f"{case}, {group}: merged weights")
    return {"wrong": wrong, "compared": compared}


def odd_sizes() -> bool:
    """Whether four processes' equal leaves, each divided by four, add up to one of them where a bucket is padded."""
    sizes = {"hidden_size": 30, "head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 3}
    config = transformers.LlamaConfig(**sizes, vocab_size=100, intermediate_size=44, num_hidden_layers=1)
    torch.manual_seed(0)
    model = rt.apply(transformers.LlamaForCausalLM(config))
    assert sum(p.numel() for p in model.parameters()) % dist.get_world_size() != 0
    rt.main_grads(model)
    logp = lambda: rt.token_logprobs(model, IDS, MASK).logp.sum()
    logp().backward()
    expected = [p.main_grad.clone() for p in model.parameters()]
    model.zero_grad()
    tree = GradientTree(model)
    tree.backward(torch.Tensor.backward, logp())
    tree.finish()
    return all(torch.equal(p.main_grad, whole) for p, whole in zip(model.parameters(), expected, strict=True))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(1, 90, (4 + index % 9,), generator=random)}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids, mask = padded([row["input_ids"].tolist() for row in rows], left=False)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(case: str, folder: str, fsdp: dict[str, Any] | None, stock: bool = False, **changes: Any) -> Any:
    """A Trainer after ten updates of 16 rows on any number of processes."""
    with accelerate_state(fsdp) as sharding:
        model = build(case).to(torch.bfloat16)
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=UPDATES,
            per_device_train_batch_size=16 // LEAVES,
            gradient_accumulation_steps=LEAVES // int(os.environ["WORLD_SIZE"]),
            learning_rate=1e-3,
            max_grad_norm=0.5,
            weight_decay=0.1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **sharding,
            **changes,
        )
        given = {"args": arguments, "train_dataset": Rows(), "data_collator": collate}
        if stock:
            trainer = transformers.Trainer(model, **given)
        else:
            trainer = rt.Trainer(rt.apply(model), gradient_tree=True, **given)
        trainer.train()
        return trainer


def weights(trainer: Any) -> dict[str, str]:
    """SHA-256 of the bf16 weights, and of their fp32 masters."""
    found = {"bf16": digest(dict(rt.merged_weights(trainer.model, torch.bfloat16)))}
    optimizer = trainer.optimizer.optimizer
    if isinstance(optimizer, rt.AdamW):
        masters = {}
        for name, p in trainer.model.named_parameters():
            master = optimizer.state[p].get("master", p)
            masters[name] = master.full_tensor() if hasattr(master, "full_tensor") else master
        found["masters"] = digest(masters)
    return found


def work(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    warnings.filterwarnings("ignore", "`torch.jit")
    transformers.utils.logging.disable_progress_bar()
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {"sharded": logp_and_gradients() if size == 2 else None}
    if size == 4:
        assert odd_sizes()
    found["llama ddp"] = weights(train("llama", folder, None))
    if size > 1:
        found["llama fsdp2"] = weights(train("llama", folder, {"reshard_after_forward": True}))
    if size < 4:
        tied = {"reshard_after_forward": False} if size > 1 else None
        found["qwen3-tied"] = weights(train("qwen3-tied", folder, tied, gradient_checkpointing=True))
        found["stock"] = weights(train("llama", folder, None, stock=True))
    return found


@pytest.mark.parametrize(
    ("plugins", "processes", "message"),
    [
        ({"deepspeed_plugin": object()}, 2, "DeepSpeed sums weight gradients .* launch with FSDP2"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, 2, "fsdp_version is 1"),
        ({"fsdp_plugin": fsdp2(cpu_offload=CPUOffloadPolicy())}, 2, "fsdp_offload_params .* set it to false"),
        (
            {"fsdp_plugin": fsdp2(cpu_ram_efficient_loading=True)},
            2,
            "fsdp_cpu_ram_efficient_loading .* set it to false",
        ),
        ({}, 3, "number of processes is 3; expected a power of two"),
        ({}, 1, "DataParallel, because one process sees 2 GPUs; launch with FSDP2 .* or set CUDA_VISIBLE_DEVICES"),
    ],
    ids=["DeepSpeed", "FSDP1", "offload", "loading", "three processes", "DataParallel"],
)
def test_refused(plugins: dict[str, Any], processes: int, message: str) -> None:
    check_plugins(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=fsdp2()), num_processes=4))
    with pytest.raises(ValueError, match=message):
        check_plugins(
            SimpleNamespace(state=SimpleNamespace(**plugins), num_processes=processes), gpus=2 // processes or 1
        )


def test_a_trainer_that_would_not_be_exact(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    model = build("llama")
    with pytest.raises(rt.UnsupportedModelError, match=r"call rlkernel_transformers.apply\(model\) before"):
        rt.Trainer(model, arguments)
    optimizers = (torch.optim.SGD(model.parameters()), None)
    trainer = rt.Trainer(rt.apply(model), arguments, train_dataset=Rows(), data_collator=collate, optimizers=optimizers)
    with pytest.raises(rt.UnsupportedModelError, match="the optimizer is a SGD; leave optimizers out"):
        trainer.train()


def test_weights_after_ten_updates(tmp_path: Path, compat: Any) -> None:
    """Log-probabilities and gradients of sharded models, and the Trainer on 1, 2 and 4 processes under DDP and FSDP2:
    equal SHA-256 after ten updates. With the stock Trainer: not."""
    found = on_processes(work, [(size, str(tmp_path / "out")) for size in (1, 2, 4)], tmp_path)
    every = [each["sharded"] for each in found[1]]
    assert all(each["wrong"] == [] for each in every), every
    compared = sum(each["compared"] for each in every)
    compat.compared("transformers", f"FSDP2 on 2 ranks, {', '.join(GROUPS)}: log-probabilities", 0, compared)
    compat.exact("transformers", "FSDP2 on 2 ranks: fp32 gradients in the tree")
    hashes = [{name: value for name, value in ranks[0].items() if name != "sharded"} for ranks in found]
    for ranks, expected in zip(found, hashes, strict=True):
        assert all({**expected, "sharded": each["sharded"]} == each for each in ranks)
    for case, runs in (("llama", 5), ("qwen3-tied", 2)):
        same = [value for each in hashes for name, value in each.items() if name.startswith(case)]
        assert len(same) == runs and all(value == same[0] for value in same), same
    assert hashes[0]["stock"] != hashes[1]["stock"]
    compat.exact("transformers", "Trainer on 1, 2 and 4 processes, DDP and FSDP2: weights and masters after 10 updates")
