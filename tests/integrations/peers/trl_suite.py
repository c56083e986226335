"""A pytest plugin that runs TRL's own tests of its trainers without a network, with stock TRL or with the flag.

`pytest -p trl_suite tests/test_grpo_trainer.py` in a checkout of TRL. Tiny models and sentences, made here, take the
place of those that the tests load from the Hub by name: models in a cache of the Hub's layout, data sets by a function.
`RLKERNEL_PEERS=stock` runs TRL as it is; otherwise `rlkernel_trl.patch()` is called and `use_rl_kernel_backend` is True
unless a test says otherwise. `lenient` adds `rl_kernel_strict=False`, `float32` `rl_kernel_dtype="float32"`.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

MODE = os.environ.get("RLKERNEL_PEERS", "strict")
ORGANISATION = "trl-internal-testing"
LEFT_OUT = re.compile(r"vllm|vlm|liger|slow", re.IGNORECASE)  # GPUs, servers, images
SENTENCES = [
    ("Rivers are", " longer than roads.", " roads."),
    ("A small boat", " crosses the lake at noon.", " sinks."),
    ("Bread is", " baked early in the morning.", " a stone."),
    ("The old clock", " strikes twelve.", " says nothing of it."),
    ("Snow falls", " softly on the roof.", " in summer."),
    ("Birds leave", " before the winter comes.", " never."),
    ("Apples are", " red, green or yellow.", " blue and square."),
    ("Tall trees", " keep the garden cool.", " grow down."),
    ("The baker", " sells rolls and cakes.", " sells nails."),
    ("Her letter", " arrived on Monday.", " was not written."),
    ("Trains run", " every hour until ten.", " on water."),
    ("My neighbour", " plays the violin.", " is a violin."),
    ("Good tea", " needs hot water and time.", " is cold."),
    ("The bridge", " was built of stone.", " walks away."),
    ("Children like", " stories about dragons.", " taxes."),
    ("Rain helps", " the fields in spring.", " nothing."),
    ("A lamp", " stands beside the bed.", " sleeps."),
    ("Maps show", " where the mountains are.", " songs."),
    ("Cats sleep", " most of the day.", " in the sea."),
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"]
CONTROL += ["<|end_header_id|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
TINY = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "qwen3", {"head_dim": 128}),
    "tiny-LlamaForCausalLM-3.1": ("Llama", "llama3_1", {}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "llama3_2", {}),
    "tiny-LlamaForCausalLM-3": ("Llama", "llama3", {}),
    "tiny-MistralForCausalLM-0.1": ("Mistral", "qwen2_5", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "qwen2_5", {"sliding_window": None}),
}
REWARDS = {
    "tiny-Qwen2ForSequenceClassification-2.5": "Qwen2",
    "tiny-Qwen3ForSequenceClassification": "Qwen3",
    "tiny-LlamaForSequenceClassification-3.2": "Llama",
}

REASONS = (  # name and message of tests that may fail, and the reason
    (
        r"Parameter \S*norm\.weight has not changed",
        "the test asks for another value of every weight; its few steps are below the spacing of bf16 at 1 (the "
        'fp32 masters change; with `rl_kernel_dtype="float32"` these tests pass)',
    ),
    (r"torch\.float16; expected torch\.bfloat16", "a model in float16 is refused"),
    (r"adapters of \w+ are not supported", "learned prompts and prefixes are refused: an engine has no such inputs"),
    (
        r"(repetition_penalty|length_penalty|num_beams).*: rlkernel's engine takes",
        "`generation_kwargs` that change the sampled distribution are refused in strict mode",
    ),
    (
        r"torch\.bfloat16 == torch\.float32",
        "the test asks for fp32 weights of the head (`cast_lm_head_to_fp32`); under the flag logits are fp32 sums of "
        "bf16 weights",
    ),
)


def reason(message: str) -> str:
    """Why a test may fail that passes with stock TRL, by `name: message`.

    Raises:
        KeyError: no reason is known; the test is a defect.
    """
    for pattern, why in REASONS:
        if re.search(pattern, message):
            return why
    raise KeyError(message)


def tokenizer(template: str) -> Any:
    """A byte-level tokenizer, trained on the sentences, with a chat template that TRL knows."""
    import transformers
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(parts) for parts in SENTENCES], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>" if template.startswith("qwen") else "<|eot_id|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return fast


def fill_hub(home: Path) -> None:
    """Writes the tiny models into a cache of the Hub, under the names that TRL's tests use."""
    import torch
    import transformers

    torch.manual_seed(0)
    chosen = [(name, family, template, changes, "CausalLM") for name, (family, template, changes) in MODELS.items()]
    chosen += [(name, family, "qwen2_5", {}, "SequenceClassification") for name, family in REWARDS.items()]
    for name, family, template, changes, head in chosen:
        folder = home / "hub" / f"models--{ORGANISATION}--{name}"
        snapshot = folder / "snapshots" / ("0" * 40)
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        fast = tokenizer(template)
        options = TINY | changes | ({} if head == "CausalLM" else {"num_labels": 1})
        config = getattr(transformers, f"{family}Config")(
            vocab_size=len(fast), pad_token_id=fast.pad_token_id, eos_token_id=fast.eos_token_id, **options
        )
        model = getattr(transformers, f"{family}For{head}")(config).to(torch.bfloat16)
        model.save_pretrained(snapshot)
        fast.save_pretrained(snapshot)


def rows(config: str) -> list[dict[str, Any]]:
    """The sentences in one of the formats of TRL's data set `zen`."""
    out = []
    for prompt, good, bad in SENTENCES:
        if config.startswith("conversational"):
            asked = [{"role": "user", "content": prompt}]
            answers = [[{"role": "assistant", "content": text.strip()}] for text in (good, bad)]
        else:
            asked, answers = prompt, [good, bad]
        chosen, rejected = answers
        forms = {
            "language_modeling": {"messages" if isinstance(asked, list) else "text": asked + chosen},
            "prompt_only": {"prompt": asked},
            "prompt_completion": {"prompt": asked, "completion": chosen},
            "preference": {"prompt": asked, "chosen": chosen, "rejected": rejected},
            "implicit_prompt_preference": {"chosen": asked + chosen, "rejected": asked + rejected},
            "unpaired_preference": {"prompt": asked, "completion": chosen, "label": True},
        }
        out.append(forms[config.split("_", 1)[1]])
    return out


def load_dataset(
    path: str, name: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """`datasets.load_dataset` for the names of TRL's tests; others are skipped."""
    if path != f"{ORGANISATION}/zen" or name is None:
        pytest.skip(f"data set {path} is on the Hub alone")
    import datasets

    found = rows(name)
    parts = {"train": found[:17], "test": found[17:]}
    made = datasets.DatasetDict({key: datasets.Dataset.from_list(part) for key, part in parts.items()})
    if split is not None:
        part, _, bound = split.partition("[:")
        chosen = made[part].select(range(int(bound.rstrip("]")))) if bound else made[part]
        return chosen.to_iterable_dataset() if streaming else chosen
    return datasets.IterableDatasetDict({k: d.to_iterable_dataset() for k, d in made.items()}) if streaming else made


def flag() -> None:
    """Replaces TRL's classes by those of `rlkernel_trl`, with the flag on by default."""
    import rlkernel_trl

    rlkernel_trl.patch()
    for algorithm in rlkernel_trl.ALGORITHMS:
        config = getattr(rlkernel_trl, f"{algorithm}Config")

        def __init__(self: Any, *args: Any, _init: Any = config.__init__, **kwargs: Any) -> None:
            kwargs.setdefault("use_rl_kernel_backend", True)
            kwargs.setdefault("rl_kernel_strict", MODE != "lenient")
            kwargs.setdefault("rl_kernel_dtype", "float32" if MODE == "float32" else None)
            _init(self, *args, **kwargs)

        config.__init__ = __init__


def _absent(name: str) -> Any:
    """Names that tests of another TRL version import: libraries count as absent, and functions skip the test."""
    import trl

    if name.startswith("is_"):
        return lambda: False
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: pytest.skip(f"TRL {trl.__version__} has no {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything imports huggingface_hub, which reads HF_HOME once."""
    home = tempfile.TemporaryDirectory(prefix="peers-hub-")
    early_config.add_cleanup(home.cleanup)
    os.environ.update({"HF_HOME": home.name, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for module in ("trl.import_utils", *(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "sft"))):
        importlib.import_module(module).__getattr__ = _absent  # type: ignore[method-assign]
    fill_hub(Path(home.name))
    datasets.load_dataset = load_dataset
    if MODE != "stock":
        flag()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not LEFT_OUT.search(item.name)]
