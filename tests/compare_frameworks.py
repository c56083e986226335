"""One question with an image through transformers, vLLM, TRL and verl: `python tests/compare_frameworks.py`.

Prints what each reader saw, the comparison of each pair, and whether planted faults are named; the exit status is 1 if
a pair differs or a fault is not named. Only verl is not the installed package: its agent loop's batch is built here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models import vlm
from torch import Tensor
from torch.nn.functional import pad
from triangle import triangle

import rlkernel.multimodal as mm

KIND = "qwen3_vl"
COLUMNS = {"spans": "placeholder runs", "pixels": "digests of pixels", "mask": "attention mask"}
COLUMNS |= {"positions": "positions", "targets": "loss spans"}
"""Columns of the tables, and their names in `Layout.compared`."""
NAME = 20  # width of the first column
# planted in spans, mask, positions and targets of verl's batch
FAULTS = ("placeholder-count", "attention-mask", "positions-flat", "turn-end-unscored")


class Question:
    """The drawn triangle, its prompt, and two completions of unequal length, whose tokens the loss scores."""

    def __init__(self) -> None:
        row, made = triangle(0), vlm.processor(KIND)
        content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
        self.processor, self.image = made, row["image"]
        self.text = made.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        self.row = {"prompt": [{"role": "user", "content": row["question"]}], "image": row["image"]}
        texts = (f"{row['answer']}<|im_end|>", f"answer is {row['answer']}<|im_end|>")
        self.completions: list[list[int]] = [made.tokenizer(text)["input_ids"] for text in texts]


def rope(**inputs: Tensor) -> Tensor:  # [3, B, L]
    """The positions that transformers' model computes from its inputs."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    with torch.device("meta"):
        model = Qwen3VLModel(vlm.config(KIND))
    return torch.as_tensor(model.get_rope_index(**inputs)[0])


def read_transformers(question: Question) -> mm.MultimodalBatch:
    """The processor tokenises prompt and completion together, and pads on the right."""
    made = question.processor
    texts = [question.text + made.tokenizer.decode(ids) for ids in question.completions]
    images = [question.image] * len(texts)
    inputs = dict(made(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"))
    inputs["mm_token_type_ids"] = torch.as_tensor(inputs["mm_token_type_ids"])
    positions = rope(**{name: value for name, value in inputs.items() if name != "pixel_values"})
    ends, at = inputs["attention_mask"].sum(1, keepdim=True), torch.arange(inputs["input_ids"].shape[1])
    begins = ends - torch.tensor([[len(ids)] for ids in question.completions])
    scored = (begins <= at) & (at < ends)
    return mm.from_transformers(inputs | {"position_ids": positions}, scored=scored, processor=made)


def read_vllm(question: Question, folder: Path) -> mm.MultimodalBatch:
    """vLLM's renderer and processor expand the prompt, and its model's function counts positions; no engine starts."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Model
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.renderers.registry import renderer_from_config

    config = vlm.config(KIND)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    question.processor.save_pretrained(folder)
    limits = {"image": 1, "video": 0}
    engine = EngineArgs(model=str(folder), dtype="float32", max_model_len=256, limit_mm_per_prompt=limits)
    renderer = renderer_from_config(engine.create_engine_config())
    given = {"prompt": question.text, "multi_modal_data": {"image": [question.image]}}
    (prompt,) = renderer.render_cmpl([given], skip_mm_cache=True)
    renderer.shutdown()
    (data,), (place,) = prompt["mm_kwargs"]["image"], prompt["mm_placeholders"]["image"]
    media = [MultiModalFeatureSpec(data=data, modality="image", identifier="0", mm_position=place)]
    model = SimpleNamespace(config=config, _get_mrope_input_positions=Model._get_mrope_input_positions)
    count = lambda ids: Model.get_mrope_input_positions(model, ids, media)[0]
    positions = [count([*prompt["prompt_token_ids"], *ids]) for ids in question.completions]
    prompts = [prompt] * len(positions)
    return mm.from_vllm(prompts, question.completions, positions=positions, processor=question.processor)


def read_trl(question: Question, folder: Path) -> mm.MultimodalBatch:
    """`GRPOTrainer._prepare_inputs`. Sampling is replaced, and positions are those its model computes from the rest."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            return question.completions, None

    n = len(question.completions)
    options: dict[str, Any] = {"num_generations": n, "use_cpu": True, "bf16": False, "report_to": "none"}
    trainer = Trainer(
        model=vlm.model(KIND),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(str(folder), per_device_train_batch_size=n, **options),
        train_dataset=Dataset.from_list([question.row]),
        processing_class=question.processor,
    )
    trainer.model.train()
    inputs = trainer._prepare_inputs([question.row] * n)
    joined = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    for name, part in (("input_ids", "ids"), ("attention_mask", "mask")):
        joined[name] = torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1)
    return mm.from_trl(inputs | {"position_ids": rope(**joined)}, processor=question.processor)


def read_verl(question: Question, fault: str = "") -> mm.MultimodalBatch:
    """`DataProto` of the agent loop: prompts padded on the left, responses on the right, positions [B, 4, L]."""
    made, longest = question.processor, max(map(len, question.completions))
    media = made(text=[question.text], images=[question.image], return_tensors="pt")
    (prompt,) = media["input_ids"]
    row = lambda head, tail: torch.cat([pad(head, (2, 0)), pad(tail, (0, longest - len(tail)))])
    ids = torch.stack([row(prompt, torch.tensor(answer)) for answer in question.completions])
    mask = torch.stack([row(torch.ones_like(prompt), torch.ones(len(a)).long()) for a in question.completions])
    is_image, grids = (ids == made.image_token_id).long(), media["image_grid_thw"].repeat(len(ids), 1)
    first = int(is_image[0].argmax())
    axes = rope(input_ids=ids, attention_mask=mask, mm_token_type_ids=is_image, image_grid_thw=grids)
    positions = torch.cat([(mask.cumsum(1) - 1).clamp(min=0)[None], axes]).transpose(0, 1)
    response = mask[:, -longest:].clone()
    if fault == "placeholder-count":
        ids[:, first] = made.tokenizer.eos_token_id
    elif fault == "attention-mask":
        mask[:, first - 1] = 0
    elif fault == "positions-flat":
        positions = positions[:, 0]
    elif fault == "turn-end-unscored":
        response.scatter_(1, response.sum(1, keepdim=True) - 1, 0)
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "response_mask": response}
    each = {name: media[name] for name in ("pixel_values", "image_grid_thw")}
    batch = SimpleNamespace(batch=tensors, non_tensor_batch={"multi_modal_inputs": [each] * len(ids)})
    return mm.from_verl(batch, processor=made)


def seen(batch: mm.MultimodalBatch) -> list[str]:
    """The columns of a batch, sample by sample; of positions those of the last token."""
    masks = torch.ones(len(batch.token_ids)) if batch.attention_mask is None else batch.attention_mask
    assert batch.positions is not None
    columns: tuple[list[object], ...] = (
        [f"{mm.Modality(kind).name.lower()} {begin}:{end}" for _, begin, end, kind in batch.modality_spans.tolist()],
        [medium.digest[:8] for medium in batch.media],
        [f"{int(masks[tokens].sum())} of {tokens.stop - tokens.start}" for tokens in batch.ranges],
        [tuple(batch.positions[-3:, tokens.stop - 1].tolist()) for tokens in batch.ranges],
        [f"{begin}:{end}" for _, begin, end in batch.loss_spans.tolist()],
    )
    return ["; ".join(map(str, column)) for column in columns]


def compared(layout: mm.Layout) -> list[str]:
    """The columns of a comparison, or its first difference."""
    if layout.findings:
        return [str(layout.findings[0])]
    return ["equal" if name in " ".join(layout.compared) else "not stated" for name in COLUMNS.values()]


def line(name: str, cells: list[str]) -> str:
    return f"{name:<{NAME}}" + "".join(f"{cell:<28}" for cell in cells).rstrip()


def main() -> int:
    question = Question()
    with tempfile.TemporaryDirectory() as folder:
        batches = {
            "transformers": read_transformers(question),
            "vLLM": read_vllm(question, Path(folder) / "model"),
            "TRL": read_trl(question, Path(folder) / "trl"),
            "verl (built here)": read_verl(question),
        }
    print(line("reader", [*COLUMNS]), *(line(name, seen(batch)) for name, batch in batches.items()), sep="\n")
    print("\n" + line("pair", [*COLUMNS]))
    wrong = False
    for (a, left), (b, right) in combinations(batches.items(), 2):
        cells = compared(mm.compare_layout(left, right))
        wrong |= cells != ["equal"] * len(COLUMNS)
        print(line(f"{a.split()[0]}, {b.split()[0]}", cells))
    print("\nfaults planted in verl's batch, against vLLM")
    for fault in FAULTS:
        findings = mm.compare_layout(batches["vLLM"], read_verl(question, fault)).findings
        wrong |= [found.cause for found in findings] != [fault]
        print(*findings or [f"{fault} is not named"], sep="\n")
    return int(wrong)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.exit(main())
