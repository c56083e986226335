"""CUDA graphs change no bit: tokens and log-probabilities of replayed decode steps equal those of eager steps.

Controls: every comparison asserts that graphs were recorded and replayed, and other weights give other outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlkernel import ops
from rlkernel.engine import LLM, RequestOutput, SamplingParams
from rlkernel.models import Decoder, preset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

REQUESTS = 64
SIZES = {"max_num_seqs": 40, "max_num_batched_tokens": 2048, "page_size": 16}


@pytest.fixture
def model() -> Decoder:
    config = replace(preset("qwen3-0.6b"), num_layers=6, windows=(None,) * 6, max_position_embeddings=8192)
    return Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)


def requests(model: Decoder, count: int = REQUESTS, longer: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths below and above one split of attention, filters, kept sets, greedy, early stops, n > 1."""
    rng = random.Random(0)
    vocab = model.config.vocab_size
    lengths = [rng.choice((1, 15, 16, 200, 700, 2040, 2600)) + rng.randint(0, 9) for _ in range(count)]
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
    kinds = [
        {},
        {"temperature": 0.7, "top_k": 50, "return_kept": True},
        {"top_p": 0.9, "n": 2},
        {"temperature": 0.0},
        {"min_p": 0.05, "temperature": 1.3},
        {"stop_token_ids": tuple(range(0, vocab, 40))},
    ]
    params = [
        SamplingParams(seed=i, max_tokens=longer + rng.randint(8, 64), **kinds[i % len(kinds)]) for i in range(count)
    ]
    return prompts, params


def facts(outputs: list[RequestOutput]) -> list[tuple]:
    return [
        (
            c.token_ids,
            c.logprobs_tensor.cpu().numpy().tobytes(),
            c.finish_reason,
            None if c.kept is None else c.kept.cpu().numpy().tobytes(),
        )
        for output in outputs
        for c in output.outputs
    ]


def run(model: Decoder, graphs: bool, pages: int = 2600, longer: int = 0, **sizes: int) -> tuple[list[tuple], LLM]:
    llm = LLM(model, num_pages=pages, cuda_graphs=graphs, **{**SIZES, **sizes})
    return facts(llm.generate(*requests(model, longer=longer))), llm


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("plenty", {"pages": 6000}),
        ("preemption", {"page_size": 4, "pages": 3000, "longer": 120}),
        ("pages of 24", {"page_size": 24}),
    ],
)
def test_graphs_change_no_bit(model: Decoder, record: Callable[..., None], name: str, sizes: dict[str, int]) -> None:
    eager, plain = run(model, False, **sizes)
    replayed, llm = run(model, True, **sizes)
    mismatches = sum(a != b for a, b in zip(eager, replayed, strict=True))
    graphs = llm.runner.graphs
    assert graphs is not None and plain.runner.graphs is None
    tokens = sum(len(found[0]) for found in eager)
    record(
        cases=len(eager), tokens=tokens, mismatches=mismatches, setting=name, recorded=graphs.recorded,
        replayed=graphs.replayed, preemptions=llm.stats.preemptions,
    )  # fmt: skip
    assert mismatches == 0
    assert graphs.recorded > 3 and graphs.replayed > graphs.recorded
    assert name != "preemption" or llm.stats.preemptions > 0
    # Once more, with all shapes recorded.
    assert facts(llm.generate(*requests(model, longer=sizes.get("longer", 0)))) == eager


@pytest.mark.parametrize(("name", "pages"), [("plenty", 4000), ("preemption", 540)])
def test_groups_change_no_bit(model: Decoder, record: Callable[..., None], name: str, pages: int) -> None:
    """Completions of a prompt that read its keys once, and sequences without a group: eager, replayed, a step ahead."""
    rng = random.Random(0)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in (4500, 1000, 30, 2048, 150)]
    params = [
        SamplingParams(seed=i, max_tokens=40 + 9 * i, n=n, stop_token_ids=tuple(range(0, model.config.vocab_size, 300)))
        for i, n in enumerate((12, 8, 1, 5, 9))
    ]
    found = {}
    for grouped, graphs, ahead in ((False, False, 0), (True, False, 0), (True, True, 0), (True, True, 1)):
        llm = LLM(model, num_pages=pages, cuda_graphs=graphs, shared_prefix=True, **SIZES)
        prefixes = llm.runner.prefixes
        assert prefixes is not None
        llm._ahead, prefixes._least_keys = ahead, 0 if grouped else 1 << 40
        group, seen = prefixes._group, []
        prefixes._group = lambda rows, group=group, seen=seen: seen.append(group(rows)) or seen[-1]
        found[grouped, graphs, ahead] = [facts(llm.generate(prompts, params)) for _ in range(2)]
        assert any(x is not None for x in seen) == grouped
        assert (llm.stats.preemptions > 0) == (name == "preemption")
        assert llm.runner.graphs is None or llm.runner.graphs.replayed > llm.runner.graphs.recorded > 0
    alone = found.pop((False, False, 0))
    mismatches = sum(a != b for pairs in found.values() for x in pairs for a, b in zip(x, alone[0], strict=True))
    tokens = sum(len(fact[0]) for fact in alone[0])
    record(cases=len(found) * len(alone[0]), tokens=len(found) * tokens, mismatches=mismatches, setting=name)
    assert mismatches == 0


def test_weight_updates(model: Decoder, record: Callable[..., None]) -> None:
    """In-place updates keep the graphs, new addresses drop them, and replays always use the current weights."""
    llm = LLM(model, num_pages=6000, cuda_graphs=True, **SIZES)
    graphs = llm.runner.graphs
    assert graphs is not None
    # The lengths do not depend on the weights, so every run has the shapes that the first two have recorded.
    prompts = requests(model, 16)[0]
    params = [SamplingParams(seed=i, max_tokens=20 + 3 * i, ignore_eos=True) for i in range(16)]
    seen = [facts(llm.generate(prompts, params))]
    llm.weights_updated()
    assert facts(llm.generate(prompts, params)) == seen[0]
    mismatches = 0

    def check(records: bool) -> None:
        nonlocal mismatches
        llm.weights_updated()
        before = graphs.recorded
        found = facts(llm.generate(prompts, params))
        plain = LLM(model, num_pages=6000, cuda_graphs=False, **SIZES)
        mismatches += sum(a != b for a, b in zip(found, facts(plain.generate(prompts, params)), strict=True))
        assert found not in seen
        assert (graphs.recorded > before) == records
        seen.append(found)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)
    check(records=False)
    weight = model.layers[2].mlp.down_proj.weight
    weight.data = weight.data * 1.5
    check(records=True)
    model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(model.layers[0].self_attn.o_proj.weight.detach() * 2)
    check(records=True)
    record(cases=3 * len(seen[0]), mismatches=mismatches, recorded=graphs.recorded)
    assert mismatches == 0


def test_stock_ops_run_eagerly(model: Decoder) -> None:
    llm = LLM(model, num_pages=2000, cuda_graphs=True, **SIZES)
    with ops.stock():
        llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=6, seed=0, ignore_eos=True))
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.recorded == graphs.replayed == 0


def test_graphs_share_one_memory_pool(model: Decoder, record: Callable[..., None]) -> None:
    """More recorded shapes store more launches, not more activations."""
    llm = LLM(model, max_num_seqs=256, num_pages=6000, max_num_batched_tokens=8192, cuda_graphs=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    params = [SamplingParams(max_tokens=8 + 3 * (i % 64), seed=i, ignore_eos=True) for i in range(256)]
    llm.generate([[i + 1, 5, 6] for i in range(256)], params)
    graphs = llm.runner.graphs
    assert graphs is not None
    torch.cuda.empty_cache()
    grown = torch.cuda.memory_reserved() - before
    record(recorded=graphs.recorded, reserved_bytes=grown)
    assert graphs.recorded >= 10
    assert grown < 512 << 20
