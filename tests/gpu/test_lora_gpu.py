"""LoRA and 8-bit optimizer states on a GPU: decode, also of a recorded CUDA graph, equals the training forward after an
update; gradients of split batches have the same bits; 8-bit states have those of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rlkernel import ops
from rlkernel.contract import compare_bitwise
from rlkernel.contract.orders import WGRAD_TOKENS
from rlkernel.engine import LLM, SamplingParams
from rlkernel.models import Decoder, add_adapters, preset
from rlkernel.training.batch import TokenBudget, Trajectory, pack_trajectories, score, score_all
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.int8_adamw import Int8AdamW
from rlkernel.training.optimizer import Optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

Record = Callable[..., None]


def adapted_model(layers: int, positions: int) -> Decoder:
    config = replace(preset("qwen3-0.6b", num_layers=layers), max_position_embeddings=positions)
    model = Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)
    return add_adapters(model, rank=16, alpha=32.0)


def trajectories(lengths: Sequence[int]) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(150_000, (n,), generator=generator).tolist()
    return [Trajectory(draw(8), draw(n - 7)) for n in lengths]  # n tokens in the forward


def backward(model: Decoder, batch: Sequence[Trajectory]) -> None:
    score(model, pack_trajectories(batch, "cuda")).logp.sum().backward()


def test_decode_equals_the_training_forward_after_an_update(record: Record) -> None:
    model = adapted_model(4, 1024)
    optimizer = Optimizer(model, OptimizerSettings(lr=0.01, states="int8"), 2)
    llm = LLM(model, max_num_seqs=32, max_num_batched_tokens=1024, page_size=16, num_pages=1024)
    prompts = [one.prompt + one.completion for one in trajectories([300] * 32)]
    params = [SamplingParams(max_tokens=64, seed=i, ignore_eos=True) for i in range(32)]
    seen = []
    for _ in range(3):
        llm.weights_updated()
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        rolled = torch.cat([one.logprobs_tensor.cpu() for one in outputs])
        sampled = [Trajectory(p, list(one.token_ids)) for p, one in zip(prompts, outputs, strict=True)]
        trained = score_all(model, sampled, temperature=1.0, budget=TokenBudget(512), device="cuda").cpu()
        seen.append((rolled, compare_bitwise(rolled, trained)))
        backward(model, sampled)
        optimizer.step()
    tokens, mismatches = (sum(getattr(r, name) for _, r in seen) for name in ("elements", "mismatches"))
    record(cases=len(seen), tokens=tokens, mismatches=mismatches)
    assert mismatches == 0 and tokens == 3 * 32 * 64
    assert not torch.equal(seen[0][0], seen[2][0]), "the update reached the rollout"


@pytest.mark.gpu_memory(24)
def test_split_batches_and_recomputation_change_no_gradient_bit(record: Record) -> None:
    model = adapted_model(2, WGRAD_TOKENS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.02)
    batch = trajectories([WGRAD_TOKENS, WGRAD_TOKENS // 2, WGRAD_TOKENS // 2, 100])

    def gradients(parts: Sequence[Sequence[Trajectory]]) -> list[torch.Tensor]:
        model.zero_main_grads()
        for part in parts:
            backward(model, part)
        return [p.main_grad.clone() for p in model.parameters() if p.requires_grad]

    whole = gradients([batch])
    model.gradient_checkpointing = True
    split = gradients([batch[:1], batch[1:3], batch[3:]])
    reports = [compare_bitwise(a, b) for a, b in zip(split, whole, strict=True)]
    mismatches = sum(report.mismatches for report in reports)
    record(cases=len(reports), elements=sum(report.elements for report in reports), mismatches=mismatches)
    assert len(reports) == 2 * 2 * 7 and mismatches == 0 and all(bool(grad.any()) for grad in whole)


def test_int8_states_have_the_bits_of_the_cpu(record: Record) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(300, 1000, generator=generator).bfloat16()
    pair = [torch.nn.Parameter(start.to(device)) for device in ("cpu", "cuda")]
    optimizers = [Int8AdamW([p], lr=0.01) for p in pair]
    for _ in range(3):
        grad = torch.randn(start.shape, generator=generator) ** 5
        for p, optimizer in zip(pair, optimizers, strict=True):
            p.main_grad = grad.to(p.device)
            optimizer.step(scale=ops.grad_norm([p.main_grad], max_norm=1.0).scale)
    states = [optimizer.state[p] for p, optimizer in zip(pair, optimizers, strict=True)]
    names = [name for name, value in states[0].items() if isinstance(value, torch.Tensor)]
    rows = [(pair[0], pair[1]), *((states[0][name], states[1][name]) for name in names)]
    reports = [compare_bitwise(ours.cpu(), cpu) for cpu, ours in rows]
    mismatches = sum(report.mismatches for report in reports)
    record(cases=len(reports), elements=sum(report.elements for report in reports), mismatches=mismatches)
    assert len(reports) == 6 and mismatches == 0
