"""Attention variant fa3 on a GPU: certified or refused, accurate against fp64, with equal bits in rollout and training.

Controls: head dimension 64 is refused, and log-probabilities of the variant `split` differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.gpu_checks import refusal
from ops.attention_paths import cu, gradients, packed, rand, sequences, truth
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import CONTRACT_ID, assert_accurate, assert_bitwise
from rlkernel.engine import LLM, RequestOutput, SamplingParams
from rlkernel.kernels import samples, verdicts
from rlkernel.kernels.cuda import attention_fa3, fa3_library
from rlkernel.kernels.errors import VariantError
from rlkernel.models import Decoder, PackedBatch, preset

MISSING = fa3_library.unavailable(torch.device("cuda")) if torch.cuda.is_available() else "needs a CUDA GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

BF16 = torch.bfloat16
Record = Callable[..., None]
by_heads = pytest.mark.parametrize("heads,kv_heads", [(16, 8), (32, 8), (28, 4)])


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test certifies by itself instead of reading a stored verdict."""
    monkeypatch.setattr(verdicts, "verdict_dir", lambda: tmp_path / "schedules")
    attention_fa3.forget()
    yield
    attention_fa3.forget()


def shape(head_dim: int, heads: int, kv_heads: int, page: int = 16) -> attention_fa3.FA3Shape:
    return attention_fa3.FA3Shape(torch.cuda.current_device(), BF16, heads, kv_heads, head_dim, page)


@pytest.mark.usefixtures("fresh")
@by_heads
@pytest.mark.parametrize("page", [16, 128])
def test_head_dim_128_is_certified(heads: int, kv_heads: int, page: int, record: Record) -> None:
    (found,) = attention_fa3.verdict(shape(128, heads, kv_heads, page)).trials
    calls = len(list(attention_fa3.calls())) * len(samples.KINDS)
    mismatches = 0 if found.first is None else found.first["mismatches"]
    record(cases=calls, elements=found.elements, mismatches=mismatches, heads=f"{heads}/{kv_heads}")
    assert found.certified, (found.reason, found.first)


@pytest.mark.usefixtures("fresh")
def test_head_dim_64_is_refused(record: Record) -> None:
    """FlashAttention-3 chooses its block of keys by the longest query of the batch there."""
    (found,) = attention_fa3.verdict(shape(64, 16, 8)).trials
    record(**refusal(found.first))
    assert not found.certified and found.first is not None and found.first["index"] is not None
    q, k, v = (rand(i, 5, h, 64, dtype=BF16, device="cuda") for i, h in enumerate((16, 8, 8)))
    with pytest.raises(VariantError, match=r"refused for .*'D': 64.*first: .*, dense "):
        ops.attention(q, k, v, cu([5], "cuda"), max_seqlen_q=5, variant="fa3")


def run(op: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], dout: Tensor, dtype: torch.dtype) -> Any:
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out, lse = op(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))], lse.detach()


@by_heads
def test_accuracy_of_output_lse_and_gradients(heads: int, kv_heads: int) -> None:
    lens = [300, 1, 70]
    batch = sequences(lens, heads // kv_heads, kv_heads, 128, BF16, device="cuda")
    tensors = [torch.cat(parts) for parts in zip(*batch, strict=True)]
    dout, at = rand(7, *tensors[0].shape, dtype=BF16, device="cuda"), cu(lens, "cuda")
    exact, top = run(lambda q, k, v: truth(q, k, v, at, at, None), tensors, dout, torch.float64)
    ours, lse = run(lambda *x: ops.attention(*x, at, max_seqlen_q=300, variant="fa3"), tensors, dout, BF16)
    with ops.stock():
        base, _ = run(lambda *x: ops.attention(*x, at, max_seqlen_q=300), tensors, dout, BF16)
    for name, o, e, b in zip(("out", "dq", "dk", "dv"), ours, exact, base, strict=True):
        assert_accurate(o, e, b, name)
    assert_accurate(lse, top, None, "lse", dtype=torch.float32)


@by_heads
def test_gradients_do_not_depend_on_the_batch(heads: int, kv_heads: int) -> None:
    batch = sequences([700, 1, 64, 333], heads // kv_heads, kv_heads, 128, BF16, device="cuda")
    douts = [rand(900 + i, *s.q.shape, dtype=BF16, device="cuda") for i, s in enumerate(batch)]
    together = gradients(batch, douts, variant="fa3")
    for found, s, dout in zip(together, batch, douts, strict=True):
        for name, a, b in zip(("dq", "dk", "dv"), found, gradients([s], [dout], variant="fa3")[0], strict=True):
            assert_bitwise(a, b, name)


def test_one_query_per_sequence_over_packed_keys() -> None:
    """FlashAttention-3 would drop the causal mask and choose other blocks here; the op prevents it."""
    batch = sequences([700, 130], 2, 8, 128, BF16, device="cuda")
    whole = packed(batch, variant="fa3")
    q = torch.cat([s.q[-1:] for s in batch])
    k, v = (torch.cat([s[i] for s in batch]) for i in (1, 2))
    at = cu([700, 130], "cuda")
    out, _ = ops.attention(q, k, v, cu([1, 1], "cuda"), at, max_seqlen_q=1, max_seqlen_k=700, variant="fa3")
    assert_bitwise(out, torch.cat([o[-1:] for o, _ in whole]))


# ---- model and engine ----------------------------------------------------------------------------


@pytest.fixture
def model() -> Decoder:
    config = replace(preset("qwen3-0.6b"), num_layers=4, windows=(None,) * 4, max_position_embeddings=8192)
    return Decoder.from_config(config, seed=0).to(device="cuda", dtype=BF16)


def trained(model: Decoder, outputs: list[RequestOutput], temperature: float) -> Tensor:
    """Log-probabilities of all completion tokens through the packed forward, 7 sequences per batch."""
    found = []
    with torch.no_grad():
        for first in range(0, len(outputs), 7):
            part = outputs[first : first + 7]
            rows = [o.prompt_token_ids + o.outputs[0].token_ids for o in part]
            hidden = model(PackedBatch.from_sequences(rows, device="cuda")).split([len(row) for row in rows])
            for o, h in zip(part, hidden, strict=True):
                n = len(o.outputs[0].token_ids)
                targets = torch.tensor(o.outputs[0].token_ids, device="cuda")
                found.append(model.logprob(h[-n - 1 : -1], targets, temperature=temperature).logp)
    return torch.cat(found).cpu()


def test_decode_equals_the_training_forward(model: Decoder, record: Record) -> None:
    rng = random.Random(0)
    lengths = [rng.choice((1, 15, 127, 128, 700, 2600)) + rng.randint(0, 3) for _ in range(32)]
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]
    params = [
        SamplingParams(seed=i, max_tokens=rng.randint(8, 64), ignore_eos=True, temperature=0.8) for i in range(32)
    ]
    found = {}
    for graphs in (False, True):
        llm = LLM(model, max_num_seqs=20, max_num_batched_tokens=1024, num_pages=4000, cuda_graphs=graphs,
                  attention="fa3")  # fmt: skip
        for _ in range(1 + graphs):  # a shape is recorded at its second use
            outputs = llm.generate(prompts, params)
            llm.weights_updated()
        found[graphs] = outputs
        assert llm.contract == model.contract == f"{CONTRACT_ID}+fa3"
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.replayed > graphs.recorded > 3
    rollout = [torch.cat([o.outputs[0].logprobs_tensor for o in found[g]]) for g in (False, True)]
    assert_bitwise(rollout[1], rollout[0], "replayed steps")
    training = trained(model, outputs, 0.8)
    mismatches = int((training.view(torch.int32) != rollout[1].view(torch.int32)).sum())
    record(cases=len(outputs), tokens=training.numel(), mismatches=mismatches)
    assert_bitwise(training, rollout[1], "training forward")
    alone = LLM(model, max_num_seqs=1, num_pages=4000).generate(prompts[:4], params[:4])
    for a, b in zip(alone, outputs, strict=False):
        assert_bitwise(a.outputs[0].logprobs_tensor, b.outputs[0].logprobs_tensor, "alone")
    # Control: the training forward of the other variant gives other bits.
    model.set_attention_variant("split")
    assert int((trained(model, outputs, 0.8).view(torch.int32) != rollout[1].view(torch.int32)).sum()) > 0
    with pytest.raises(VariantError, match="created for attention variant 'fa3'"):
        llm.generate(prompts[:1])
