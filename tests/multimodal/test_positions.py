"""mRoPE positions against transformers' and vLLM's own functions."""

from __future__ import annotations

import ast
import importlib.util
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layout_worlds import BEGIN, PLACEHOLDERS, STOP, TOKENS_PER_SECOND, VIDEO, Sample, conversation

from rlkernel.multimodal import Medium, Modality, mrope_positions
from rlkernel.multimodal.build import Row, build_batch

CONFIG = SimpleNamespace(
    vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=int(TOKENS_PER_SECOND)),
    video_token_id=VIDEO,
    vision_start_token_id=BEGIN,
    vision_end_token_id=STOP,
)


def _ours(samples: list[Sample]) -> torch.Tensor:
    return mrope_positions(build_batch([s.row() for s in samples]), tokens_per_second=TOKENS_PER_SECOND)


def _transformers(sample: Sample, model: type[Any]) -> torch.Tensor:
    stub = SimpleNamespace(config=CONFIG)
    stub.get_vision_position_ids = lambda *args, **kwargs: model.get_vision_position_ids(stub, *args, **kwargs)
    grids = {
        name: torch.tensor([m.grid for m in sample.media if m.modality == kind])
        for name, kind in (("image_grid_thw", Modality.IMAGE), ("video_grid_thw", Modality.VIDEO))
        if any(m.modality == kind for m in sample.media)
    }
    seconds = torch.tensor([m.seconds for m in sample.media if m.modality == Modality.VIDEO])
    kinds = torch.tensor([sample.kinds])
    positions, _ = model.get_rope_index(
        stub, torch.tensor([sample.ids]), kinds, **grids, second_per_grid_ts=seconds if len(seconds) else None
    )
    return positions[:, 0]


@cache
def _vllm_functions(module: str, functions: tuple[str, ...]) -> dict[str, Any]:
    """Functions of vLLM's model, from its source: importing the module needs torchvision."""
    root = importlib.util.find_spec("vllm")
    assert root is not None and root.origin is not None
    path = Path(root.origin).parent / "model_executor" / "models" / f"{module}.py"
    found = [
        node
        for top in ast.parse(path.read_text()).body
        if isinstance(top, ast.ClassDef) and top.name.endswith("ForConditionalGeneration")
        for node in top.body
        if isinstance(node, ast.FunctionDef) and node.name in functions
    ]
    for node in found:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"np": np, "torch": torch}
    exec(compile(ast.Module(future + found, []), str(path), "exec"), scope)  # type: ignore[arg-type]
    return scope


def _features(sample: Sample) -> list[Any]:
    """The sample's media as vLLM's `MultiModalFeatureSpec`."""
    features = []
    for kind, name in ((Modality.IMAGE, "image"), (Modality.VIDEO, "video")):
        media = [m for m in sample.media if m.modality == kind]
        starts = [i for i, k in enumerate(sample.kinds) if k == kind and (i == 0 or sample.kinds[i - 1] != kind)]
        each = len(starts) // max(len(media), 1)
        for m, offset in zip(media, starts[:: max(each, 1)], strict=True):
            data = {f"{name}_grid_thw": SimpleNamespace(data=torch.tensor(m.grid))}
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(m.seconds, dtype=torch.float64))
            # the range of a video with timestamps begins before the first frame's start token
            place = SimpleNamespace(offset=offset - (1 if each > 1 else 0))
            features.append(SimpleNamespace(mm_position=place, modality=name, data=data))
    return features


@pytest.mark.parametrize("video", ("", "qwen3"))
def test_equal_to_transformers(video: str) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    for seed in range(40):
        sample = conversation(random.Random(seed), video=video)
        for model in (Qwen3VLModel,) if video else (Qwen3VLModel, Qwen2_5_VLModel):
            assert torch.equal(_ours([sample]), _transformers(sample, model))


def test_equal_to_vllm() -> None:
    for seed in range(40):
        sample = conversation(random.Random(seed), video="qwen2.5")
        scope = _vllm_functions("qwen2_5_vl", ("iter_mm_grid_thw", "get_mrope_input_positions"))
        stub = SimpleNamespace(config=CONFIG)
        stub.iter_mm_grid_thw = lambda f, s=scope, m=stub: s["iter_mm_grid_thw"](m, f)
        theirs, _ = scope["get_mrope_input_positions"](stub, sample.ids, _features(sample))
        assert torch.equal(_ours([sample]), theirs)

        sample = conversation(random.Random(seed), video="qwen3")
        scope = _vllm_functions("qwen3_vl", ("_iter_mm_grid_hw", "_get_mrope_input_positions"))
        scope["Qwen3VLForConditionalGeneration"] = SimpleNamespace(_iter_mm_grid_hw=scope["_iter_mm_grid_hw"])
        theirs, _ = scope["_get_mrope_input_positions"](sample.ids, _features(sample), CONFIG)
        assert torch.equal(_ours([sample]), theirs)


def test_transformers_differs_on_videos_of_qwen25() -> None:
    """The two differences that the docstring states; a version that mends them makes this test fail."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    found = set()
    for seed in range(40):
        sample = conversation(random.Random(seed), video="qwen2.5")
        ours, theirs = _ours([sample]), _transformers(sample, Qwen2_5_VLModel)
        seconds = next(m.seconds for m in sample.media if m.modality == Modality.VIDEO)
        begin, end = sample.run(Modality.VIDEO)
        inside = torch.equal(ours[:, begin:end], theirs[:, begin:end])
        found.add((seconds, inside, torch.equal(ours, theirs)))
    # half a second is truncated to 0; a long temporal axis is not continued behind the video
    assert found == {(0.5, False, False), (1.0, True, False), (2.0, True, False)}


def test_packing_keeps_positions_and_frame_rates_may_vary() -> None:
    samples = [conversation(random.Random(seed), video="qwen2.5") for seed in range(3)]
    assert torch.equal(_ours(samples), torch.cat([_ours([s]) for s in samples], 1))
    times = (2.0, 2.5, 4.0)
    clip = Medium(Modality.VIDEO, (3, 2, 2), seconds=times)
    ids = torch.tensor([20, BEGIN, VIDEO, VIDEO, VIDEO, STOP])
    batch = build_batch([Row(ids, (ids == VIDEO) * 2, [clip])], placeholder_ids=PLACEHOLDERS)
    assert mrope_positions(batch, tokens_per_second=2.0)[0].tolist() == [0, 1, 2, 3, 6, 7]
    short = build_batch([Row(ids, (ids == VIDEO) * 2, [Medium(Modality.VIDEO, (4, 2, 2))])])
    with pytest.raises(ValueError, match="sample '0', tokens 2 to 4: placeholders without a medium"):
        mrope_positions(replace(batch, media_ids=torch.tensor([-1])))
    with pytest.raises(ValueError, match=r"tokens 2 to 4: the grid \(1, 3, 4\) does not divide into 2 x 2 patches"):
        mrope_positions(replace(batch, media=(replace(batch.media[0], grid=(1, 3, 4)), *batch.media[1:])))
    with pytest.raises(ValueError, match="3 placeholder tokens for the grid"):
        mrope_positions(short)
