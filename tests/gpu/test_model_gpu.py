"""The main claim on CUDA: log-probabilities of decode equal those of the training forward, byte for byte.

Qwen3-0.6B shapes with random weights, 64 requests of 200 to 1500 tokens; continuous batching, paged KV, prefix cache
and chunked prefill are on. Control: the same comparison on stock torch ops fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlkernel import ops
from rlkernel.contract import compare_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.models import Decoder, PackedBatch, preset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

REQUESTS = 64
NEW_TOKENS = 330


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = replace(preset("qwen3-0.6b"), max_position_embeddings=4096)
    return Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.randint(200, 1500 - NEW_TOKENS) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


@torch.no_grad()
def train_logprobs(
    model: Decoder, sequences: list[list[int]], starts: list[int], temperature: float
) -> list[torch.Tensor]:
    """Log-probabilities of tokens starts[i]: of sequence i by the packed training forward, 8 sequences per batch."""
    out = []
    for first in range(0, len(sequences), 8):
        part = sequences[first : first + 8]
        flat, cu, positions = ops.pack([torch.tensor(s[:-1]) for s in part])
        batch = PackedBatch(flat.cuda(), positions.cuda(), cu.cuda(), max(len(s) - 1 for s in part))
        hidden = model(batch)
        targets = torch.cat([torch.tensor(s[1:]) for s in part]).cuda()
        logp = model.logprob(hidden, targets, temperature=temperature).logp
        for i, s in enumerate(part):
            begin, end = int(cu[i]), int(cu[i + 1])
            out.append(logp[begin:end][starts[first + i] - 1 :].cpu())
            assert end - begin == len(s) - 1
    return out


def compare(
    model: Decoder, llm: LLM, inputs: list[list[int]], temperature: float, new_tokens: int
) -> tuple[int, int, float]:
    """(tokens, mismatches, largest difference) between decode and the training forward."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=new_tokens, seed=i, ignore_eos=True)
        for i in range(len(inputs))
    ]
    outputs = llm.generate(inputs, params)
    sequences = [p + list(o.outputs[0].token_ids) for p, o in zip(inputs, outputs, strict=True)]
    scored = train_logprobs(model, sequences, [len(p) for p in inputs], temperature)
    rolled = torch.cat([o.outputs[0].logprobs_tensor.cpu() for o in outputs])
    report = compare_bitwise(rolled, torch.cat(scored))
    if report.mismatches:
        print(report)
    return report.elements, report.mismatches, report.max_abs_diff


@pytest.mark.gpu_memory(16)  # of which 11 GiB for the pages of all requests
def test_decode_equals_training_forward(model: Decoder, record: Callable[..., None]) -> None:
    llm = LLM(model, max_num_seqs=REQUESTS, max_num_batched_tokens=2048, page_size=16, num_pages=64 * 96)
    inputs = prompts(REQUESTS, model.config.vocab_size)
    tokens, mismatches, gap = compare(model, llm, inputs, 1.0, NEW_TOKENS)
    record(cases=REQUESTS, tokens=tokens, mismatches=mismatches, max_abs_diff=gap, model="qwen3-0.6b", dtype="bfloat16")
    assert tokens >= 20_000
    assert mismatches == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alone", {"max_num_seqs": 1}),
        ("small chunks", {"max_num_batched_tokens": 96}),
        ("pages of 64", {"page_size": 64, "num_pages": 256}),
        ("no prefix cache", {"prefix_caching": False}),
    ],
)
def test_engine_settings_change_no_bit(model: Decoder, record: Callable[..., None], name: str, options: dict) -> None:
    inputs = prompts(6, model.config.vocab_size, seed=1)
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "page_size": 16, "num_pages": 1024}
    params = [SamplingParams(temperature=0.8, max_tokens=48, seed=i, ignore_eos=True) for i in range(len(inputs))]

    def run(**changes: object) -> tuple[list[list[int]], torch.Tensor]:
        outputs = LLM(model, **{**settings, **changes}).generate(inputs, params)  # type: ignore[arg-type]
        return [list(o.outputs[0].token_ids) for o in outputs], torch.cat(
            [o.outputs[0].logprobs_tensor.cpu() for o in outputs]
        )

    tokens, logprobs = run()
    other_tokens, other = run(**options)
    assert tokens == other_tokens
    report = compare_bitwise(other, logprobs)
    record(cases=len(inputs), tokens=report.elements, mismatches=report.mismatches, setting=name)
    assert report.mismatches == 0


def test_control_stock_ops_differ(model: Decoder, record: Callable[..., None]) -> None:
    with ops.stock():
        llm = LLM(model, max_num_seqs=16, max_num_batched_tokens=2048, page_size=16, num_pages=1280)
        tokens, mismatches, gap = compare(model, llm, prompts(16, model.config.vocab_size, seed=2), 1.0, 32)
    record(cases=16, tokens=tokens, mismatches=mismatches, max_abs_diff=gap, backend="torch")
    assert mismatches > 0
