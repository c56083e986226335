"""Qwen2.5-VL and Qwen3-VL of transformers after `apply`: right, and the same bits whatever a prompt is computed with.

Alone, in batches with other numbers of images, padded on either side, packed, decoded with a cache, in micro-batches.
Stock transformers is the control.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from models import vlm
from torch import Tensor

if os.environ.get("RLKERNEL_TEST_INTEGRATIONS") is None:
    pytest.importorskip("transformers")

import rlkernel_transformers as rt
from rlkernel.contract import assert_bitwise
from rlkernel.models.vision import MediaError

by_kind = pytest.mark.parametrize("kind", vlm.KINDS)
by_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))


def prompts(kind: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Two images; one image and a video of 8 frames; text alone."""
    return [
        vlm.raw_call(kind, [(4, 6), (6, 4)], 7, seed=1, dtype=dtype),
        vlm.raw_call(kind, [(4, 10)], 11, frames=8, seed=2, dtype=dtype),
        vlm.raw_call(kind, [], 9, seed=3, dtype=dtype),
    ]


@torch.no_grad()
def logits(model: Any, call: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**call).logits
    return found


@by_kind
def test_equals_transformers_within_rounding(kind: str) -> None:
    """Logits, the loss, and every gradient, of images; positions after a video differ (`rope_index`)."""
    stock, call = vlm.model(kind), prompts(kind)[0]
    ours = rt.apply(copy.deepcopy(stock))
    assert rt.status(ours).exact, rt.status(ours)
    assert (logits(ours, call) - logits(stock, call)).abs().max() < 1e-4
    labels = call["input_ids"]
    for model in (ours, stock):
        model(**call, labels=labels).loss.backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert a.grad is not None and (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max().clamp(min=1e-3), name
    removed = rt.remove(ours)
    assert_bitwise(logits(removed, call), logits(stock, call), "after remove")


def rows_differ(model: Any, calls: list[dict[str, Tensor]], side: str, alone: list[Tensor]) -> list[int]:
    """Calls whose logits in one padded batch differ from those alone."""
    found = logits(model, vlm.batch(calls, side))
    lengths = [c["input_ids"].shape[1] for c in calls]
    rows = [found[i, -3 - max(lengths) :][-n:] if side == "left" else found[i, :n] for i, n in enumerate(lengths)]
    return [i for i, (row, x) in enumerate(zip(rows, alone, strict=True)) if not torch.equal(row, x[0])]


@by_kind
@by_dtype
def test_a_prompt_has_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    model, calls = vlm.model(kind, dtype), prompts(kind, dtype)
    control = [logits(model, c) for c in calls]
    differ = [rows_differ(model, calls, side, control) for side in ("left", "right")]
    assert any(differ), "stock transformers depends on the batch"
    rt.apply(model)
    alone = [logits(model, c) for c in calls]
    assert all(not torch.equal(a, b) for a, b in zip(alone, control, strict=True))
    for order in (calls, calls[::-1]):
        expected = alone if order is calls else alone[::-1]
        assert [rows_differ(model, order, side, expected) for side in ("left", "right")] == [[], []]
    packed, first = packed_logits(model, calls), 0
    for i, x in enumerate(alone):
        assert_bitwise(packed[first : first + x.shape[1]], x[0], f"packed, prompt {i}")
        first += x.shape[1]


@by_kind
def test_a_row_without_tokens(kind: str) -> None:
    """A row that is masked as a whole, as trainers fill batches."""
    model, calls = rt.apply(vlm.model(kind)), prompts(kind)
    both = vlm.batch([calls[0], vlm.raw_call(kind, [], 5)], "right", extra=0)
    both["attention_mask"][1] = 0
    with torch.no_grad():
        found = model(**both).logits[:1, : calls[0]["input_ids"].shape[1]]
    assert_bitwise(found, logits(model, calls[0]), "the row with tokens")


def packed_logits(model: Any, calls: list[dict[str, Tensor]]) -> Tensor:  # [T, V]
    """One row with the positions inside each sequence before the three axes, as transformers takes packed rows."""
    axes = []
    for call in calls:
        grids = {name: call.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        positions, _ = model.model.get_rope_index(call["input_ids"], call["mm_token_type_ids"], **grids)
        axes.append(torch.cat((torch.arange(positions.shape[-1]).expand(1, 1, -1), positions)))
    media = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    given = {name: torch.cat([c[name] for c in calls if name in c]) for name in media}
    ids = torch.cat([c["input_ids"] for c in calls], 1)
    return logits(model, {"input_ids": ids, "position_ids": torch.cat(axes, -1), **given})[0]


@by_kind
def test_decoding_with_a_cache_equals_the_forward(kind: str) -> None:
    model, call = rt.apply(vlm.model(kind)), prompts(kind)[1]
    found = model.generate(
        **call, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    length = call["input_ids"].shape[1]
    new = found.sequences.shape[1] - length
    full = {**call, "input_ids": found.sequences, "attention_mask": torch.ones_like(found.sequences)}
    full["mm_token_type_ids"] = torch.nn.functional.pad(call["mm_token_type_ids"], (0, new))
    whole = logits(model, full)[0]
    for i, row in enumerate(found.logits):
        assert_bitwise(row[0], whole[length - 1 + i], f"token {i}")
    with torch.no_grad():
        scored = rt.token_logprobs(model, **full).logp
    assert scored is not None
    expected = whole.log_softmax(-1)[:-1].gather(-1, found.sequences[0, 1:, None])[:, 0]
    assert torch.allclose(scored[0, :-1], expected, atol=1e-5)


@by_kind
def test_gradients_continue_over_micro_batches(kind: str) -> None:
    """With fp32 buffers, a batch and its prompts one by one have the same gradient bits, those of the encoder too."""
    calls, found = prompts(kind, torch.bfloat16)[:2], []
    for parts in ([vlm.batch(calls, "right")], calls):
        model = rt.apply(vlm.model(kind, torch.bfloat16))
        rt.main_grads(model)
        for part in parts:
            logp = rt.token_logprobs(model, **part).logp
            assert logp is not None
            logp.sum().backward()
        found.append({name: p.main_grad for name, p in model.named_parameters()})
    differing = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    # images and videos are two calls of the encoder, so their order in its gradients differs; the text's do not
    assert not [name for name in differing if "visual" not in name]
    assert all(bool(g.any()) for name, g in found[0].items() if "embed_tokens" not in name)


@by_kind
def test_images_alone_continue_the_encoders_gradients(kind: str) -> None:
    calls = [vlm.raw_call(kind, [(4, 6)], 5, seed=1), vlm.raw_call(kind, [(6, 4), (4, 4)], 8, seed=2)]
    found = []
    for parts in ([vlm.batch(calls, "left")], calls):
        model = rt.apply(vlm.model(kind))
        rt.main_grads(model)
        for part in parts:
            rt.token_logprobs(model, **part).logp.sum().backward()  # type: ignore[union-attr]
        found.append({name: p.main_grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert_bitwise(grad, found[1][name], name)


@by_kind
def test_refusals(kind: str) -> None:
    model, call = rt.apply(vlm.model(kind)), vlm.raw_call(kind, [(4, 6), (6, 4)], 7)
    one = {**call, "image_grid_thw": call["image_grid_thw"][:1], "pixel_values": call["pixel_values"][:24]}
    with pytest.raises(MediaError, match=r"the 1 image grids give 6 features.*\[12\] image placeholder tokens"):
        logits(model, {**one, "position_ids": torch.arange(call["input_ids"].shape[1])[None]})
    with pytest.raises(MediaError, match=r"pixel values are .*; the 2 grids need"):
        logits(model, {**call, "pixel_values": call["pixel_values"][:-1]})
    pixels = ("pixel_values", "image_grid_thw")
    for without in (pixels[:1], pixels, (*pixels, "mm_token_type_ids")):
        with pytest.raises(rt.CallError, match=r"row 0, token 2 .* image .* the call has no pixel_values; pass"):
            logits(model, {k: v for k, v in call.items() if k not in without})
    text = {k: v for k, v in call.items() if k not in pixels}
    logits(model, {**text, "mm_token_type_ids": torch.zeros_like(call["input_ids"])})  # as if they were sampled
    untyped = {k: v for k, v in call.items() if k != "mm_token_type_ids"}
    assert_bitwise(logits(model, untyped), logits(model, call), "placeholders by their ids")
    odd = {**call, "image_grid_thw": torch.tensor([[1, 3, 8], [1, 6, 4]])}
    with pytest.raises(MediaError, match="media 0 has a grid of 1 x 3 x 8 patches"):
        logits(model, {**odd, "position_ids": torch.arange(call["input_ids"].shape[1])[None]})
    with pytest.raises(rt.CallError, match="pass input_ids, whose placeholder"):
        embeds = model.get_input_embeddings()(call["input_ids"]).detach()
        logits(model, {**{k: v for k, v in call.items() if k != "input_ids"}, "inputs_embeds": embeds})
    sizes = call["input_ids"].shape[1]
    packed = {**call, "cu_seq_lens_q": torch.tensor([0, sizes], dtype=torch.int32), "max_length_q": sizes}
    del packed["attention_mask"]
    with pytest.raises(rt.CallError, match="packed rows with media have no position_ids"):
        logits(model, packed)
    holes = call["attention_mask"].clone()
    holes[0, -3] = 0
    with pytest.raises(rt.CallError, match="attention_mask is zero between two tokens"):
        logits(model, {**call, "attention_mask": holes})
    longer = {**call, "input_ids": torch.nn.functional.pad(call["input_ids"], (0, 2), value=9)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    with pytest.raises(rt.CallError, match=rf"mm_token_type_ids are \(1, {sizes}\), .* append a 0 for each token"):
        logits(model, longer)
    with pytest.raises(rt.UnsupportedModelError, match="tp_group with a vision-language model"):
        rt.apply(model, tp_group=_Group())  # type: ignore[arg-type]


class _Group:
    """A process group of one rank, which no call reaches."""

    def size(self) -> int:
        return 1
