"""Learns the task of images from scratch on a CPU, and checks it: `python benchmarks/learn_images.py [rlkernel|trl]`.

rlkernel: `rlkernel train grpo data.task=shapes`. trl: the same images, TRL's GRPOTrainer with the flag and vLLM
(colocate) on a Qwen3-VL of transformers' own class. The reward rises from below 0.4 to above 0.8 within five minutes on
two cores, and every sampled token has the same log-probability in rollout and training in every step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_io import write_result

from rlkernel.data.characters import EOS_TOKEN, PAD_TOKEN, character_tokenizer
from rlkernel.data.tasks import load_task

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
STEPS = 120


def own(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step of rlkernel's own trainer."""
    from rlkernel.cli.main import main

    run = folder / "run"
    main(["train", "grpo", "data.task=shapes", f"run.output={run}", "--device", "cpu"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{"reward": row["reward"], "exact_frac": row["exact_frac"], "seconds": row["seconds"]} for row in rows]


def trl(folder: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """Metrics of each step of TRL's trainer."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    from datasets import Dataset

    from rlkernel_trl import GRPOConfig, GRPOTrainer

    task = load_task("shapes")
    rows = list(islice(task.train_prompts(0), 24 * steps))
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": "?"}],
                "image": task.images(row)[0],
                "answer": row["answer"],
            }
            for row in rows
        ]
    )
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        use_rl_kernel_backend=True,
        max_steps=steps,
        per_device_train_batch_size=192,
        num_generations=8,
        max_completion_length=1,
        learning_rate=1e-3,
        entropy_coef=0.02,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        beta=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    made = processor()
    trainer = GRPOTrainer(
        model=str(save(folder / "model", made)),
        reward_funcs=right,
        args=args,
        train_dataset=dataset,
        processing_class=made,
    )
    trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]
    return [
        {
            "reward": row["reward"],
            "exact_frac": row.get("rlkernel/exact_frac"),
            "drift": row["sampling/sampling_logp_difference/max"],
            "seconds": row["step_time"],
        }
        for row in history
    ]


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right quadrant."""
    return [float(one[0]["content"] == wanted) for one, wanted in zip(completions, answer, strict=True)]


def processor() -> Any:
    """Qwen3-VL's processor with a character tokenizer; images keep their size of 112 x 112."""
    import transformers as hf

    raw = character_tokenizer("abcd?")
    raw.add_special_tokens(list(SPECIAL))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN, additional_special_tokens=list(SPECIAL)
    )
    shared: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    images = hf.Qwen2VLImageProcessor(size=size, **shared)
    videos = hf.Qwen3VLVideoProcessor(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112 * 2}, **shared)
    return hf.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def save(folder: Path, made: Any) -> Path:
    """A random Qwen3-VL of transformers' own class for the processor's tokenizer, on disk."""
    import torch
    import transformers as hf

    values = load_task("shapes").model_config()
    text, vision = values["text_config"], values["vision_config"]
    tokenizer = made.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    # vLLM on a CPU needs heads of at least 32 channels
    text |= {"vocab_size": len(tokenizer), "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5]}
    text |= {"initializer_range": values["initializer_range"], "max_position_embeddings": 128}
    vision |= {"temporal_patch_size": 2, "initializer_range": values["initializer_range"]}
    config = hf.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    model = hf.Qwen3VLForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) < 4_000_000
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def main() -> None:
    wanted, found = sys.argv[1:] or ["rlkernel", "trl"], []
    for name in wanted:
        started, used = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            rows = {"rlkernel": own, "trl": trl}[name](Path(folder))
        used, seconds = time.process_time() - used, time.perf_counter() - started
        first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:5], rows[-20:]))
        exact = sum(row["exact_frac"] == 1.0 for row in rows)
        line = {"trainer": name, "steps": len(rows), "steps_with_equal_bytes": exact}
        line |= {"reward_of_the_first_5": first, "reward_of_the_last_20": last, "seconds": seconds, "cpu_seconds": used}
        print(line, flush=True)
        assert first < 0.4 and last > 0.8 and exact == len(rows), rows
        assert used < 2 * 300, f"{used:.0f} CPU-seconds are more than five minutes on two cores"
        found.append(line)
    if len(found) == 2:
        print(f"wrote {write_result('learn_images', found, folder='cpu')}")


if __name__ == "__main__":
    main()
