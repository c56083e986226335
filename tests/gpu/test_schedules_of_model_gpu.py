"""A model's log-probabilities, gradients and samples have the same bits with certified schedules on and off.

Qwen3-0.6B's shapes in bf16, four layers. Control: on Hopper, schedules must have run, because a comparison of the
anchor with itself proves nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gpu.gpu_checks import DEVICE, HOPPER, Compared, Record, forget, ran_through
from torch import Tensor

from rlkernel import ops
from rlkernel.engine import LLM, SamplingParams
from rlkernel.kernels import scheduled_op
from rlkernel.models import Decoder, PackedBatch, preset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = (2300, 900, 260, 64, 33, 2)


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = replace(preset("qwen3-0.6b"), num_layers=4, windows=(), max_position_embeddings=4096)
    return Decoder.from_config(config, seed=0).to(device=DEVICE, dtype=torch.bfloat16)


def sequences(model: Decoder, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]


def trained(model: Decoder) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities [T] of a training forward, and the gradients of all parameters."""
    tokens = sequences(model, LENGTHS)
    flat, cu, positions = ops.pack([torch.tensor(s[:-1]) for s in tokens])
    hidden = model(PackedBatch(flat.to(DEVICE), positions.to(DEVICE), cu.to(DEVICE), max(LENGTHS) - 1))
    targets = torch.cat([torch.tensor(s[1:]) for s in tokens]).to(DEVICE)
    logp = model.logprob(hidden, targets, temperature=0.9).logp
    model.zero_grad(set_to_none=True)
    (logp * torch.linspace(-1, 1, len(logp), device=DEVICE)).sum().backward()
    return logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_no_schedule_changes_a_log_probability_or_a_gradient(model: Decoder, record: Record) -> None:
    """Each schedule is switched off in turn, in all ops that have it, then all of them."""
    forget()
    model.requires_grad_(True)
    logp, gradients = trained(model)
    assert len(gradients) == len(list(model.parameters()))
    ran, seen = ran_through(), Compared()
    if HOPPER:
        assert {"linear", "linear_dgrad", "linear_logprob"} <= ran.keys(), f"the fast path did not run: {ran}"
    for some in (*((name,) for name in sorted(set().union(*ran.values()))), ()):
        with scheduled_op.without(*some):
            again, other = trained(model)
        what = f"without {', '.join(some) or 'any schedule'}"
        seen.rows(again, logp, what)
        seen.whole(other, gradients, f"gradients, {what}")
    model.zero_grad(set_to_none=True)
    record(**vars(seen))


def test_no_schedule_changes_what_is_sampled(model: Decoder, record: Record) -> None:
    """Prefill, chunked prefill and decode; each group of schedules is switched off in turn, then all.

    Each setting has an engine of its own, because CUDA graphs keep the schedules that they were recorded with.
    """
    inputs = sequences(model, (1200, 700, 130, 40, 7, 300, 64, 1))
    settings = [SamplingParams(temperature=0.8, max_tokens=40, seed=i, ignore_eos=True) for i in range(len(inputs))]

    def sampled() -> tuple[list[list[int]], Tensor]:
        llm = LLM(model, max_num_seqs=8, max_num_batched_tokens=1024, page_size=16, num_pages=1024)
        outputs = [o.outputs[0] for o in llm.generate(inputs, settings)]
        assert llm.runner.graphs is not None and llm.runner.graphs.replayed > 0
        return [list(o.token_ids) for o in outputs], torch.cat([o.logprobs_tensor for o in outputs])

    forget()
    model.requires_grad_(False)
    tokens, logprobs = sampled()
    ran, seen = ran_through(), Compared()
    if HOPPER:
        assert "linear" in ran, f"the fast path did not run: {ran}"
    groups = sorted({name.split(".", 1)[0] for names in ran.values() for name in names})
    for some in (*((group,) for group in groups), ()):
        with scheduled_op.without(*some):
            again, other = sampled()
        what = f"without {', '.join(some) or 'any schedule'}"
        assert again == tokens, what
        seen.rows(other, logprobs, what)
    model.requires_grad_(True)
    record(**vars(seen))
