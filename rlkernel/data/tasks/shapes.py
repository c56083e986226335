"""A shape drawn by Pillow, and the question in which quadrant it is: a task with images.

The policy starts with random weights and without a warm-up, so it learns from the reward alone what an answer is, and
where in an image a shape is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from rlkernel.data.characters import EOS_TOKEN, PAD_TOKEN, character_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.tasks import Task

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_TOKEN = "<image>"
SIDE = 112
"""Pixels of an image: 4 x 4 features of 28 x 28 pixels."""
_KINDS = ("circle", "square", "triangle")
_QUADRANTS = "abcd"  # upper left, upper right, lower left, lower right
_HELDOUT = 128


class Shapes(Task):
    """`<image>?` has the answer `a`, `b`, `c` or `d`, the quadrant of the shape. Reward 1 for the right one, else 0.

    A row holds the drawing, not the pixels: kind, centre, radius and colour of the shape.
    """

    name = "shapes"

    def tokenizer(self) -> Tokenizer:
        tokenizer = character_tokenizer(_QUADRANTS + "?")
        tokenizer.add_special_tokens([IMAGE_TOKEN])
        return tokenizer

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        quadrant, radius = rng.randrange(4), rng.randint(8, 20)
        x, y = (rng.randint(radius + 2, SIDE // 2 - radius - 3) for _ in range(2))
        return {
            "prompt": IMAGE_TOKEN + "?",
            "answer": _QUADRANTS[quadrant],
            "kind": rng.choice(_KINDS),
            "centre": [x + quadrant % 2 * SIDE // 2, y + quadrant // 2 * SIDE // 2],
            "radius": radius,
            "colour": [rng.randint(96, 255) for _ in range(3)],
        }

    def images(self, row: dict[str, Any]) -> list[Image]:
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise InputError("data.task=shapes draws with Pillow, which is missing: pip install pillow") from None
        image = Image.new("RGB", (SIDE, SIDE))
        draw, (x, y), r, colour = ImageDraw.Draw(image), row["centre"], row["radius"], tuple(row["colour"])
        if row["kind"] == "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif row["kind"] == "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=colour)
        return [image]

    def train_prompts(self, seed: int) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"shapes {seed}")
        while True:
            yield self._draw(rng)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        rng = random.Random("shapes held out")
        return [self._draw(rng) for _ in range(_HELDOUT)]

    def heldout(self) -> list[dict[str, Any]]:
        return list(self._rows)

    def sft_examples(self, n: int, seed: int) -> list[dict[str, Any]]:
        rows = self.train_prompts(seed)
        return [{**row, "completion": row["answer"]} for row in (next(rows) for _ in range(n))]

    def preferences(self, n: int, seed: int) -> list[dict[str, Any]]:
        """The right quadrant is chosen, the next one rejected."""
        wrong = dict(zip(_QUADRANTS, _QUADRANTS[1:] + _QUADRANTS[:1], strict=True))
        rows = self.sft_examples(n, seed)
        return [{**row, "chosen": row["answer"], "rejected": wrong[row["answer"]]} for row in rows]

    def reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        return [float(c == answer) for c, answer in zip(completions, columns["answer"], strict=True)]

    def model_config(self) -> dict[str, Any]:
        tokenizer = self.tokenizer()
        image = tokenizer.token_to_id(IMAGE_TOKEN)
        text = {
            "model_type": "qwen3_vl_text",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [4, 4, 4],
                "mrope_interleaved": True,
            },
            "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
            "pad_token_id": tokenizer.token_to_id(PAD_TOKEN),
        }
        vision = {
            "model_type": "qwen3_vl_vision",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 96,
            "patch_size": 14,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        }
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": text,
            "vision_config": vision,
            "image_token_id": image,
            "video_token_id": image,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "initializer_range": 0.06,
        }

    def defaults(self, algorithm: str) -> dict[str, Any]:
        if algorithm != "grpo":  # others do not train vision-language models
            return {}
        return {
            "rollout.prompts": 32,
            "rollout.group_size": 8,
            "rollout.max_tokens": 2,
            "optimizer.lr": 1e-3,
            "optimizer.betas": [0.9, 0.98],
            "loss.entropy_coef": 0.02,
            "train.steps": 150,
            "train.micro_batch_tokens": 8192,
            "eval.every": 50,
            "eval.rows": 128,
        }
