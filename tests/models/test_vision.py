"""Own vision-language models: the bits of transformers after `apply`, in training and in the engine; media features."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import vlm
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.engine import LLM, RequestError, SamplingParams
from rlkernel.engine.graphs import DecodeGraphs
from rlkernel.engine.runner import StepBuffers, step_sections
from rlkernel.models import ConfigError, KVCache, PackedBatch, PagedBatch, load_model, save_model
from rlkernel.models.media import Medium
from rlkernel.models.mrope import mrope_table
from rlkernel.models.vision import MediaError
from rlkernel.models.vision_config import axes_of_pairs, from_hf_multimodal
from rlkernel.models.vision_decoder import VisionDecoder
from rlkernel.multimodal import ProcessorFingerprint, from_transformers, mrope_positions

PROCESSOR = ProcessorFingerprint("test", {"patch_size": 14})
GRIDS = [(4, 6), (6, 4)]
by_kind = pytest.mark.parametrize("kind", vlm.KINDS)


@pytest.fixture(scope="module", params=vlm.KINDS)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    vlm.model(request.param).save_pretrained(folder)
    return request.param, folder


def loaded(folder: Path) -> VisionDecoder:
    model = load_model(folder)
    assert isinstance(model, VisionDecoder)
    return model


def with_media(model: VisionDecoder, call: dict[str, Tensor]) -> tuple[list[int], list[Medium]]:
    """The ids of a prompt with media ids, and the media."""
    ids, media = call["input_ids"][0].clone(), []
    if "pixel_values" in call:
        grids = [(int(t), int(h), int(w)) for t, h, w in call["image_grid_thw"]]
        parts = call["pixel_values"].split([t * h * w for t, h, w in grids])
        media = [model.media.register(part, grid, PROCESSOR) for part, grid in zip(parts, grids, strict=True)]
    rows = [i for medium in media for i in model.media.ids(medium)]
    ids[ids == model.multimodal.image_token_id] = torch.tensor(rows, dtype=torch.int64)
    return ids.tolist(), media


def logits(model: VisionDecoder, *sequences: list[int]) -> Tensor:
    with torch.no_grad():
        return model.logits(model(PackedBatch.from_sequences(list(sequences))))


def test_logits_and_gradients_are_those_of_transformers(saved: tuple[str, Path]) -> None:
    rt = pytest.importorskip("rlkernel_transformers")
    kind, folder = saved
    model, theirs = loaded(folder), rt.apply(vlm.model(kind))
    call = vlm.raw_call(kind, GRIDS, 7, seed=1)
    ids, _media = with_media(model, call)
    text = [5, 17, 30]
    with torch.no_grad():
        wanted = theirs(**call).logits[0]
        assert_bitwise(logits(model, ids), wanted, "alone")
        assert_bitwise(logits(model, text, ids)[3:], wanted, "packed")
    rt.token_logprobs(theirs, **call).logp.sum().backward()
    hidden = model(PackedBatch.from_sequences([ids[:-1]]))
    model.logprob(hidden, call["input_ids"][0, 1:]).logp.sum().backward()
    found = dict(theirs.named_parameters())
    for name in model.multimodal.vision.layout():
        grad = model.visual.parameter(name).grad
        assert grad is not None
        if ".mlp.gate" not in name and ".mlp.up" not in name:
            assert_bitwise(grad, found[f"model.visual.{name}"].grad, name)
    with ops.stock():
        assert not torch.equal(logits(model, ids), wanted)


def test_the_engine_samples_what_the_training_forward_scores(saved: tuple[str, Path]) -> None:
    """Chunked prefill, decode, a group, another prompt with the same text and another image, one that ends in an image;
    then again with recorded decode steps, which as CUDA graphs read addresses of the first step of their shape."""
    kind, folder = saved
    model = loaded(folder)
    prompts = [with_media(model, vlm.raw_call(kind, GRIDS, 7, seed=seed)) for seed in (1, 2)]
    same_text = [*prompts[0][0]]
    image = model.media.ids(prompts[1][1][0])
    at = same_text.index(model.media.ids(prompts[0][1][0])[0])
    same_text[at : at + len(image)] = image
    ids = [prompts[0][0], prompts[1][0], same_text, [5, 9, 12], image]
    params, sizes = SamplingParams(n=3, max_tokens=9, seed=3), {"max_num_batched_tokens": 16, "num_pages": 128}
    llm = LLM(model, **sizes)
    outputs = llm.generate(ids, params)
    assert model.media.stats.computed == 4 and llm.stats.cached_tokens > 0
    recorded = LLM(model, **sizes)
    recorded._ahead = 1  # as on a GPU
    recorded.runner.graphs = DecodeGraphs(model, lambda: lambda work: work)
    recorded.runner.buffers = StepBuffers(torch.device("cpu"), step_sections(16, 256, 32), staged=True)
    for output, again in zip(outputs, recorded.generate(ids, params), strict=True):
        for one, other in zip(output.outputs, again.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert_bitwise(one.logprobs_tensor, other.logprobs_tensor, "recorded steps")
    assert recorded.runner.graphs.replayed > recorded.runner.graphs.recorded > 0
    for output in outputs:
        for one in output.outputs:
            full = torch.tensor(output.prompt_token_ids + one.token_ids)
            hidden = model(PackedBatch.from_sequences([full[:-1]]))
            start = len(output.prompt_token_ids) - 1
            scored = model.logprob(hidden[start:], full[start + 1 :]).logp
            assert_bitwise(one.logprobs_tensor, scored.detach(), "sampled")
    assert not torch.equal(logits(model, ids[0])[-1], logits(model, same_text)[-1]), "the image changes the text"


def test_a_hit_equals_a_miss(saved: tuple[str, Path]) -> None:
    """Features are computed once until the weights change; the same pixels of another processor are another medium."""
    kind, folder = saved
    model = loaded(folder)
    call = vlm.raw_call(kind, GRIDS, 7, seed=1)
    ids, media = with_media(model, call)
    first = logits(model, ids)
    assert (model.media.stats.computed, model.media.stats.reused) == (2, 0)
    assert_bitwise(logits(model, ids), first, "hit")
    assert (model.media.stats.computed, model.media.stats.reused) == (2, 2)
    again, same = with_media(model, call)
    assert again == ids and same[0] is media[0]
    other = model.media.register(media[0].patches, media[0].grid, ProcessorFingerprint("test", {"patch_size": 28}))
    assert other.key != media[0].key and other.first != media[0].first
    model.forget_features()
    assert_bitwise(logits(model, ids), first, "miss again")
    assert model.media.stats.computed == 4
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.visual.parameter("merger." + copied.multimodal.vision.family.merger_linears[1] + ".bias").add_(1)
    assert not torch.equal(logits(copied, ids), first)
    assert_bitwise(logits(model, ids), first, "the copy has its own features")
    del media, same, other
    gc.collect()
    with pytest.raises(MediaError, match="a prompt names media that were dropped"):
        logits(model, ids)


def test_gradients_of_a_group_share_the_encoder(saved: tuple[str, Path]) -> None:
    """Four completions of one prompt encode its images once, and the gradient is that of four prompts in a row."""
    kind, folder = saved
    model = loaded(folder)
    ids, _media = with_media(model, vlm.raw_call(kind, GRIDS, 7, seed=1))
    group = [[*ids, 10 + i] for i in range(4)]
    found = []
    for _ in range(2):
        model.zero_grad()
        before = model.media.stats.computed
        model(PackedBatch.from_sequences(group)).sum().backward()
        assert model.media.stats.computed - before == 2
        found.append([p.grad.clone() for p in model.visual.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert_bitwise(a, b, "gradient")


def test_a_saved_model_is_the_one_that_was_loaded(saved: tuple[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    _, folder = saved
    save_model(loaded(folder), tmp_path / "again")
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert one.keys() == other.keys()
    for name in one:
        assert_bitwise(one[name], other[name], name)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "again").config.model_type == saved[0]


@by_kind
def test_positions_are_those_of_the_schema(kind: str) -> None:
    config = from_hf_multimodal(vlm.config(kind).to_dict())
    model = VisionDecoder.from_multimodal(config, 0, "cpu", 0.1)
    call = vlm.raw_call(kind, [(4, 6), (6, 4), (4, 4)], 9, seed=4)
    ids, _media = with_media(model, call)
    batch = from_transformers({k: v for k, v in call.items() if k != "pixel_values"})
    assert torch.from_numpy(model.media.axes(np.asarray(ids))).equal(mrope_positions(batch))
    first = model.media.ids(_media[0])
    for wrong in (first[1:], [*first[:-1], 5], [first[1], first[0], *first[2:]], [*first[:-1], *first]):
        with pytest.raises(RequestError, match=r"prompt.*: tokens 2 to .*put `MediaTable.ids`"):
            LLM(model, num_pages=8).generate([[1, 2, *wrong, 3]], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"prompts\[0\]: the prompt ends before the last 1 of a medium's 6 ids"):
        LLM(model, num_pages=8).generate([[1, 2, *first[:-1]]], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"token_ids\[0\]: token 1 is an id of a medium, which has no log-prob"):
        LLM(model, num_pages=8).score([[1, *first, 3]])
    placeholder = config.image_token_id
    with pytest.raises(RequestError, match=rf"prompts\[0\]: token 1 is the placeholder {placeholder}, .*put `Media"):
        LLM(model, num_pages=8).generate([[1, placeholder, 3]], SamplingParams(max_tokens=1))
    LLM(model, num_pages=8).score([[1, placeholder, 3]])  # a completion may have sampled it
    with pytest.raises(MediaError, match=r"2 temporal patches; register each as a medium of grid \(1, 4, 6\)"):
        model.media.register(_media[0].patches.repeat(2, 1), (2, 4, 6), PROCESSOR)
    model.media._media.next = (1 << 31) - model.media.vocab_size
    with pytest.raises(
        MediaError, match=r"ids are int32, and .* features have had one in this process; go on in a new"
    ):
        model.media.register(_media[0].patches + 1, (1, 4, 6), PROCESSOR)


@by_kind
def test_a_decode_step_reads_no_value(kind: str) -> None:
    """On the meta device tensors have none, so a CUDA graph can capture the step. Control: a step with media."""
    config = from_hf_multimodal(vlm.config(kind).to_dict())
    with torch.device("meta"):
        model = VisionDecoder(config)
        model.cos_sin = model.cos_sin.to("meta")
        i64, i32 = (partial(torch.empty, dtype=dtype) for dtype in (torch.int64, torch.int32))
        cache = KVCache(config.text, 4, 16, torch.float32, torch.device("meta"))
        fields = (i64(4), i64(4), i32(5), i32(4), i32(4, 4), i64(4), cache, 1, 64)
        batch = PagedBatch(*fields, axes=i64(3, 4), has_media=False)
        assert model.logits(model(batch)).shape == (4, config.text.vocab_size)
        with pytest.raises(NotImplementedError, match="nonzero"):
            model(replace(batch, has_media=True))


def test_the_config_of_a_released_model_is_read() -> None:
    """Qwen2.5-VL-3B's config.json, whose text keys lie outside of `text_config`."""
    text = {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70, "hidden_act": "silu",
        "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3, "patch_size": 14,
        "out_hidden_size": 2048, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu", "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    ids = {"image_token_id": 151655, "video_token_id": 151656}
    config = from_hf_multimodal({"model_type": "qwen2_5_vl", **text, **ids, "vision_config": vision})
    assert config.axes == (0,) * 16 + (1,) * 24 + (2,) * 24 and config.vision.head_dim == 80
    assert config.text.tie_word_embeddings and config.text.qkv_bias and config.text.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="vision_config is missing"):
        from_hf_multimodal({"model_type": "qwen2_5_vl", **text, **ids})
    with pytest.raises(ConfigError, match=r"mrope_section is \[16, 24\]"):
        short = {**text, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}
        from_hf_multimodal({"model_type": "qwen2_5_vl", **short, **ids, "vision_config": vision})
    with pytest.raises(ConfigError, match="image_token_id is None; expected the id of the placeholder"):
        from_hf_multimodal({"model_type": "qwen2_5_vl", **text, "vision_config": vision})


def test_mrope_turns_pairs_by_their_axis() -> None:
    assert axes_of_pairs((2, 1, 1), interleaved=False) == (0, 0, 1, 2)
    assert axes_of_pairs((3, 3, 2), interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 1)
    table = torch.arange(40.0).view(5, 8)
    axes = torch.tensor((0, 0, 1, 2))
    same = mrope_table(table, torch.tensor([[3, 1]]).expand(3, -1), axes)
    assert_bitwise(same, table[[3, 1]], "equal axes")
    mixed = mrope_table(table, torch.tensor([[0], [1], [2]]), axes)
    assert mixed.tolist() == [[0.0, 1.0, 10.0, 19.0, 4.0, 5.0, 14.0, 23.0]]
    with pytest.raises(IndexError, match="a position is 5; the table ends at 4"):
        mrope_table(table, torch.tensor([[0], [5], [0]]), axes)
