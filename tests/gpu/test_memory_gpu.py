"""Memory on a GPU: the KV cache leaves and comes back at its address, states stream from pinned memory, real shortage.

Each test compares bytes with a run that keeps everything on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.gpu_checks import Compared

from rlkernel import ops, optim_offload
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.device_memory import is_supported
from rlkernel.models import Decoder, KVCache, PackedBatch, preset
from rlkernel.optim import AdamW
from rlkernel.optim_offload import OffloadedAdamW
from rlkernel.training.batch import TokenBudget, Trajectory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def model_of(layers: int = 4) -> Decoder:
    config = replace(preset("qwen3-0.6b"), num_layers=layers, windows=(None,) * layers, max_position_embeddings=8192)
    return Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu_memory(8)
def test_the_cache_leaves_and_comes_back_at_its_address(record: Callable[..., None]) -> None:
    model = model_of()
    llm = LLM(model, max_num_seqs=16, max_num_batched_tokens=1024, num_pages=10_000)
    size = 10_000 * llm.runner.cache.page_bytes(model.config, 16, torch.bfloat16)
    params = [SamplingParams(max_tokens=20 + 4 * i, seed=i, ignore_eos=True) for i in range(16)]
    prompts = [[i + 1] * (3 + 30 * i) for i in range(16)]

    def sampled(llm: LLM) -> list[tuple[Any, bytes]]:
        llm.weights_updated()
        done = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [(one.token_ids, one.logprobs_tensor.numpy().tobytes()) for one in done]

    sampled(llm)  # shapes run eagerly first
    expected, graphs = sampled(llm), llm.runner.graphs
    assert graphs is not None and graphs.recorded > 1
    place, recorded, mismatches = llm.runner.cache.k[0].data_ptr(), graphs.recorded, 0
    for keeps in (True, True, False):
        llm.sleep(keep_graphs=keeps)
        assert llm.uncounted_bytes == 0
        dirty = torch.full((size // 4,), torch.nan, device="cuda")
        del dirty
        torch.cuda.empty_cache()  # the cache's memory may be the one that was written here
        llm.wake()
        assert not any(bool(pages.any()) for pages in (*llm.runner.cache.k, *llm.runner.cache.v))
        found = sampled(llm)
        mismatches += sum(a != b for a, b in zip(found, expected, strict=True))
        if is_supported(model.device):
            assert llm.runner.cache.k[0].data_ptr() == place and llm.uncounted_bytes >= size
            assert (graphs.recorded == recorded) == keeps, "kept graphs stay valid"
    llm.sleep()
    llm.wake(600)
    mismatches += sum(a != b for a, b in zip(sampled(llm), expected, strict=True))
    record(cases=4 * 16, tokens=4 * sum(p.max_tokens for p in params), mismatches=mismatches, recorded=graphs.recorded)
    assert mismatches == 0
    with pytest.raises(torch.OutOfMemoryError, match="wake: out of memory"):
        other = LLM(model, max_num_seqs=1, num_pages=8, max_model_len=128)
        other.sleep()
        other.wake(1 << 24)


@pytest.mark.gpu_memory(8)
def test_nothing_is_left_behind() -> None:
    """As many caches, one after the other, as would take twice the GPU's memory."""
    model = model_of()
    page = KVCache.page_bytes(model.config, 16, torch.bfloat16)
    cycles = 2 * torch.cuda.get_device_properties(0).total_memory // (4000 * page)
    llm = LLM(model, max_num_seqs=4, num_pages=4000)
    for _ in range(cycles):
        llm.sleep(keep_graphs=True)
        llm.wake()
    del llm
    for _ in range(cycles):
        LLM(model, max_num_seqs=4, num_pages=4000)


def test_streamed_states_have_the_bits_of_adamw(record: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks far smaller than the parameters, so that both slots are reused hundreds of times without a pause."""
    monkeypatch.setattr(optim_offload, "BLOCK", 1 << 16)
    seen, found = Compared(), []
    for kind in (AdamW, OffloadedAdamW):
        model = model_of(2)
        model.zero_main_grads()
        optimizer = kind(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(4):
            for i, p in enumerate(model.parameters()):
                p.main_grad.normal_(generator=torch.Generator("cuda").manual_seed(1000 * step + i))
            scale = ops.grad_norm(optimizer.gradients(), max_norm=1.0).scale
            optimizer.step(scale=scale * torch.nan if step == 2 else scale, zero_grad=True)
            assert not any(bool(p.main_grad.any()) for p in model.parameters())
        states = [optimizer.state[p] for p in model.parameters()]
        found.append((list(model.parameters()), states))
    (params, states), (others, offloaded) = found
    for p, q, state, other in zip(params, others, states, offloaded, strict=True):
        seen.whole(q.detach(), p.detach(), "parameter")
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert other[name].device.type == "cpu" and other[name].is_pinned()
            seen.whole(other[name], state[name].cpu(), name)
    record(**vars(seen))


@pytest.mark.gpu_memory(20)
def test_a_real_shortage_halves_the_micro_batches(
    record: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A backward of 16,384 tokens does not fit in the process's share, one of a quarter does."""
    model, seen = model_of(), Compared()
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(5, 150_000, (count,), generator=generator).tolist()
    rows = [Trajectory(draw(100), draw(925)) for _ in range(16)]
    sizes = [len(row) - 1 for row in rows]

    def gradients(budget: TokenBudget) -> list[torch.Tensor]:
        model.zero_main_grads()

        def work(ranges: list[range]) -> None:
            for span in ranges:
                chosen = rows[span.start : span.stop]
                batch = PackedBatch.from_sequences([(row.prompt + row.completion)[:-1] for row in chosen], "cuda")
                targets = torch.tensor([t for row in chosen for t in (row.prompt + row.completion)[1:]], device="cuda")
                model.logprob(model(batch), targets).logp.sum().backward()

        budget.run(sizes, work, model.zero_main_grads)
        model.fold_main_grads()
        return [p.main_grad.cpu() for p in model.parameters()]

    def peak_of(tokens: int) -> tuple[int, list[torch.Tensor]]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = gradients(TokenBudget(tokens))
        return torch.cuda.max_memory_allocated(), found

    gradients(TokenBudget(16_384))  # compiles and certifies
    most, expected = peak_of(16_384)
    least, _ = peak_of(4_096)
    assert least < most
    torch.cuda.empty_cache()
    limit = (least + most) // 2 + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        budget = TokenBudget(16_384)
        found = gradients(budget)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert budget.tokens < 16_384
    assert f"micro-batches have {budget.tokens} tokens" in capsys.readouterr().out
    for one, other in zip(found, expected, strict=True):
        seen.whole(one, other, "gradient")
    record(**vars(seen), budget=budget.tokens)


@pytest.mark.gpu_memory(10)
def test_checkpointed_layers_have_the_same_gradients_and_keep_attention(
    record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls, seen = sys.modules["rlkernel.ops.attention"], [], Compared()
    run = module._attention
    monkeypatch.setattr(module, "_attention", lambda *args: calls.append(1) or run(*args))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 150_000, (n,), generator=generator).tolist() for n in (3000, 17, 900)]
    found = []
    for recompute in (False, True):
        model = model_of()
        model.gradient_checkpointing = recompute
        model.zero_main_grads()
        calls.clear()
        batch = PackedBatch.from_sequences(rows, "cuda")
        targets = torch.tensor([t for row in rows for t in row], device="cuda").roll(-1)
        model.logprob(model(batch), targets).logp.sum().backward()
        assert len(calls) == 4
        model.fold_main_grads()
        found.append([p.main_grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        seen.whole(other, one, "gradient")
    record(**vars(seen))
