"""The task with images, and the patches of an image."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from PIL import Image

from rlkernel.data.images import patches_of
from rlkernel.data.tasks import load_task
from rlkernel.data.tasks.shapes import SIDE


def test_the_shape_is_where_the_answer_says() -> None:
    task = load_task("shapes")
    rows = list(islice(task.train_prompts(3), 200))
    assert rows == list(islice(task.train_prompts(3), 200)) and rows[:128] != task.heldout()
    assert {row["kind"] for row in rows} == {"circle", "square", "triangle"}
    half = SIDE // 2
    for row in rows:
        (image,) = task.images(row)
        lit = np.asarray(image).any(-1)
        quadrants = [lit[a : a + half, b : b + half].any() for a in (0, half) for b in (0, half)]
        assert quadrants == [letter == row["answer"] for letter in "abcd"]
    answers = [row["answer"] for row in rows]
    assert task.reward(["?"] * 200, answers, answer=answers) == [1.0] * 200
    assert sum(task.reward(["?"] * 200, ["a"] * 200, answer=answers)) == answers.count("a")
    wrong = [row["rejected"] for row in task.preferences(50, 1)]
    assert not any(task.reward(["?"] * 50, wrong, answer=[row["chosen"] for row in task.preferences(50, 1)]))


def test_patches_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    pixels = np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    theirs = processor(images=[image], return_tensors="np")
    ours, grid = patches_of(image, 14, 2, 2)
    assert list(grid) == theirs["image_grid_thw"][0].tolist()
    assert ours.shape == theirs["pixel_values"].shape and np.allclose(ours, theirs["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("size", [(28, 30), (14, 28), (0, 28)])
def test_an_image_that_does_not_divide_is_an_error(size: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=f"an image has {size[0]} x {size[1]} pixels; resize both sides to positive multiples of 28"
    ):
        patches_of(Image.new("RGB", size), 14, 2, 2)
