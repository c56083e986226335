"""The vision chain on CUDA: bidirectional attention, an encoder of a real width, own engine, transformers, vLLM.

Control: stock transformers has other log-probabilities.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import vlm
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.models import PackedBatch
from rlkernel.models.media import Medium
from rlkernel.models.vision import encode
from rlkernel.models.vision_config import VisionConfig, from_hf_multimodal
from rlkernel.models.vision_decoder import VisionDecoder
from rlkernel.multimodal import ProcessorFingerprint

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("d", (32, 64, 80, 128))
def test_bidirectional_attention(d: int, dtype: torch.dtype, record: Callable[..., None]) -> None:
    lens = [64, 1, 700, 2500, 130]
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(sum(lens), 4, d, generator=generator).cuda().to(dtype) for _ in range(4))

    def run(rows: slice, sizes: list[int]) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device="cuda")
        out, lse = ops.attention(*leaves, cu, max_seqlen_q=max(sizes), causal=False)
        return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout[rows])]

    packed, first = run(slice(0, sum(lens)), lens), 0
    for n in lens:
        rows = slice(first, first + n)
        alone = run(rows, [n])
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), alone, packed, strict=True):
            assert_bitwise(a, b[rows], f"{name} of {n} tokens")
        x, y, z = (t[rows].double().transpose(0, 1) for t in (q, k, v))
        truth = ((x @ y.transpose(1, 2)) * d**-0.5).softmax(-1) @ z
        assert_accurate(alone[0], truth.transpose(0, 1), None, f"out of {n} tokens", dtype=dtype)
        first += n
    record(cases=len(lens), tokens=sum(lens), mismatches=0)


def test_an_encoder_of_a_real_width(record: Callable[..., None]) -> None:
    """Qwen2.5-VL-3B's encoder with four layers: an image has the same features alone and with others."""
    config = VisionConfig(
        "qwen2_5_vl", 4, 1280, 3420, 16, 2048, 14, window_size=112, full_attention=(3,)
    )  # heads of 80 channels
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.02 + (len(shape) == 1)).cuda().bfloat16()
        for name, shape in config.layout().items()
    }
    grids = [(1, 40, 40), (4, 16, 24), (1, 28, 52)]
    sizes = [t * h * w for t, h, w in grids]
    patches = torch.randn(sum(sizes), config.patch_elements, generator=generator).cuda()
    whole = encode(config, weights.__getitem__, patches, grids).merged.split([n // 4 for n in sizes])
    for part, grid, expected in zip(patches.split(sizes), grids, whole, strict=True):
        assert_bitwise(encode(config, weights.__getitem__, part, [grid]).merged, expected, str(grid))
    record(cases=len(grids), tokens=sum(sizes) // 4, mismatches=0)


@pytest.mark.parametrize("kind", vlm.KINDS)
def test_engine_training_and_transformers_agree(kind: str, record: Callable[..., None]) -> None:
    rt = pytest.importorskip("rlkernel_transformers")
    theirs, stock = vlm.model(kind, torch.bfloat16).cuda(), vlm.model(kind, torch.bfloat16).cuda()
    calls = [vlm.raw_call(kind, [(4, 6), (6, 4)], 7, seed=1), vlm.raw_call(kind, [(4, 10)], 11, seed=2)]
    rt.apply(theirs)
    own = VisionDecoder.from_multimodal(from_hf_multimodal(theirs.config.to_dict()), 0, "cuda", 0.1).bfloat16()
    found = dict(theirs.named_parameters())
    with torch.no_grad():
        for name in own.multimodal.vision.layout():
            own.visual.parameter(name).copy_(found[f"model.visual.{name}"])
        _copy_text(own, found)
    prompts, _held = zip(*(_with_media(own, call) for call in calls), strict=True)
    outputs = LLM(own, max_num_batched_tokens=16, num_pages=64).generate(prompts, SamplingParams(n=2, max_tokens=6))
    compared = differing = 0
    for call, output in zip(calls, outputs, strict=True):
        for one in output.outputs:
            full = torch.tensor(output.prompt_token_ids + one.token_ids, device="cuda")
            hidden = own(PackedBatch.from_sequences([full[:-1]], "cuda"))
            start = len(output.prompt_token_ids) - 1
            scored = own.logprob(hidden[start:], full[start + 1 :]).logp.detach()
            assert_bitwise(one.logprobs_tensor, scored.cpu(), "engine and training forward")
            new = torch.tensor([one.token_ids])
            given = {name: value.cuda() for name, value in call.items()}
            given["input_ids"] = torch.cat((call["input_ids"], new), 1).cuda()
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            kinds = torch.nn.functional.pad(call["mm_token_type_ids"], (0, new.shape[1]))
            given["mm_token_type_ids"] = kinds.cuda()
            logp = rt.token_logprobs(theirs, **given).logp
            assert_bitwise(logp[0, start:-1].detach(), scored, "transformers")
            compared += len(one.token_ids)
            with torch.no_grad():
                plain = stock(**given).logits[0, start:-1].float().log_softmax(-1)
            differing += int((plain.gather(1, full[start + 1 :, None])[:, 0] != scored).sum())
    assert differing > 0, "the control"
    record(cases=4, tokens=2 * compared, mismatches=0)


@pytest.mark.parametrize("kind", vlm.KINDS)
def test_graphs_change_no_bit(kind: str, record: Callable[..., None]) -> None:
    """Prompts with images, one that ends in an image, and text; control: other weights sample other tokens."""
    config = from_hf_multimodal(vlm.config(kind).to_dict())
    model = VisionDecoder.from_multimodal(config, 0, "cuda", 0.1).bfloat16()
    calls = [vlm.raw_call(kind, [(4, 6), (6, 4)], 7, seed=1), vlm.raw_call(kind, [(4, 10)], 11, seed=2)]
    prompts, _held = zip(*(_with_media(model, call) for call in calls), strict=True)
    ids = [*prompts, model.media.ids(_held[0][0]), [5, 9, 12]]
    params = SamplingParams(n=3, max_tokens=24, seed=0, ignore_eos=True)

    def run(graphs: bool) -> tuple[list[tuple[list[int], bytes]], LLM]:
        llm = LLM(model, max_num_batched_tokens=64, num_pages=128, cuda_graphs=graphs)
        found = [one for output in llm.generate(ids, params) for one in output.outputs]
        return [(one.token_ids, one.logprobs_tensor.numpy().tobytes()) for one in found], llm

    eager, _ = run(False)
    replayed, llm = run(True)
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.replayed > graphs.recorded > 0
    mismatches = sum(a != b for a, b in zip(eager, replayed, strict=True))
    record(cases=len(eager), tokens=sum(len(t) for t, _ in eager), mismatches=mismatches, replayed=graphs.replayed)
    assert mismatches == 0
    with torch.no_grad():
        model.norm.weight.mul_(2)
    assert run(True)[0] != replayed


def _with_media(own: VisionDecoder, call: dict[str, Tensor]) -> tuple[list[int], list[Medium]]:
    """The ids of a prompt with media ids, and the media, which live as long as the list."""
    grids = [tuple(grid) for grid in call["image_grid_thw"].tolist()]
    parts = call["pixel_values"].split([t * h * w for t, h, w in grids])
    media = [own.media.register(p, g, ProcessorFingerprint("t")) for p, g in zip(parts, grids, strict=True)]
    ids = call["input_ids"][0].clone()
    ids[ids == own.multimodal.image_token_id] = torch.tensor([i for m in media for i in own.media.ids(m)])
    return ids.tolist(), media


def _copy_text(own: VisionDecoder, found: dict[str, Tensor]) -> None:
    from rlkernel.models.checkpoint import hf_layout

    parameters = dict(own.named_parameters())
    for one in hf_layout(own.config):
        name = one.name.replace("model.", "model.language_model.", 1) if one.name.startswith("model.") else one.name
        parameters[one.parameter].narrow(0, one.start, one.rows).copy_(found[name])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("kind", vlm.KINDS)
def test_vllm_equals_transformers(kind: str, tmp_path: Path, record: Callable[..., None]) -> None:
    """With CUDA graphs: several images, a video of 8 frames, both, text."""
    sys.path.append(str(ROOT / "benchmarks"))
    from vllm_arms import entry_point

    folder = vlm.save(kind, tmp_path / kind, torch.bfloat16)
    engine = {"enforce_eager": False, "block_size": 16, "gpu_memory_utilization": 0.05}
    engine["kv_cache_memory_bytes"] = 1 << 28  # other tests share the GPU
    # vLLM 0.26 drops the metadata of Qwen2.5-VL's videos, and transformers' processor then assumes 24 frames a second.
    fps = 24.0 if kind == "qwen2_5_vl" else 2.0
    jobs = [("media", str(folder), {"kind": kind, "dtype": "bfloat16", "engine": engine, "fps": fps})]
    script = ROOT / "tests" / "integrations" / "vllm" / "vllm_side.py"
    path = os.pathsep.join([str(entry_point(tmp_path)), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    (result,) = json.loads(found[-1].removeprefix("RESULT "))
    pairs = {name: value for name, value in result.items() if isinstance(value, list)}
    record(cases=len(pairs), tokens=sum(n for _, n in pairs.values()), mismatches=sum(d for d, _ in pairs.values()))
    assert {name: value for name, value in pairs.items() if value[0] or not value[1]} == {} and result["exact"]
