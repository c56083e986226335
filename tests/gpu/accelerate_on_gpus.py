"""Ten updates of transformers' Trainer and of TRL's GRPO, for `accelerate launch`; writes hashes of the weights.

`accelerate launch OPTIONS tests/gpu/accelerate_on_gpus.py MODEL RESULTS.json trainer grpo vllm stock`, with tests/ and
tests/integrations/trl on the import path.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from trl_side import VLLM_ENVIRONMENT, history, make_trainer, weights_hash

import rlkernel_transformers as rt

UPDATES, LEAVES = 10, 8


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(5, 300, (40 + 7 * (index % 9),), generator=random)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in ids], batch_first=True)
    ids = pad(ids, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def shared(size: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": UPDATES,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": LEAVES // size,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def trainer(model: str, size: int, stock: bool) -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    arguments = transformers.TrainingArguments(**shared(size))
    given = {"args": arguments, "train_dataset": Rows(), "data_collator": collate}
    made: Any
    if stock:
        made = transformers.Trainer(loaded, **given)
    else:
        made = rt.Trainer(rt.apply(loaded), gradient_tree=True, **given)
    made.train()
    return made


def grpo(model: str, size: int, vllm: bool) -> Any:
    if vllm:
        import rlkernel_vllm

        # Other tests share the GPU, so vLLM must not derive the size from the memory that is free.
        rlkernel_vllm.LLM = functools.partial(rlkernel_vllm.LLM, kv_cache_memory_bytes=1 << 28)
    made = make_trainer(
        "GRPO", model, **{**shared(size), "rl_kernel_gradient_tree": True, "use_vllm": vllm, "top_p": 0.9}
    )
    made.train()
    assert all(row["rlkernel/exact_frac"] == 1 for row in history(made))
    return made


def main(model: str, results: str, *names: str) -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    runs = {
        "trainer": lambda: trainer(model, size, False),
        "stock": lambda: trainer(model, size, True),
        "grpo": lambda: grpo(model, size, False),
        "vllm": lambda: grpo(model, size, True),
    }
    found = {}
    for name in names:
        made = runs[name]()
        found[name] = weights_hash(rt.merged_weights(made.model, torch.bfloat16))
        found[f"{name} parameters"] = type(next(made.model.parameters())).__name__
        del made
    if os.environ.get("RANK", "0") == "0":
        Path(results).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "vllm" in sys.argv:
        os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": VLLM_ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"]})
    main(*sys.argv[1:])
