"""The promise: a completion depends on the weights, the prompt, the parameters and the seed, and on nothing else.

Every property has its control: the same comparison fails on stock torch ops, or with a stale cache.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, fingerprint, make_model, shared_model, training_logps

from rlkernel import ops
from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.graphs import DecodeGraphs
from rlkernel.models import PackedBatch

PARAMS = (
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=9, seed=2, temperature=0.7, n=3),
    SamplingParams(max_tokens=12, seed=3, temperature=0.0),
    SamplingParams(max_tokens=10, seed=4, top_k=5, return_kept=True, n=2),
    SamplingParams(max_tokens=10, seed=5, top_p=0.8, temperature=1.3, return_kept=True),
    SamplingParams(max_tokens=10, seed=6, min_p=0.1, return_kept=True),
    SamplingParams(max_tokens=14, seed=7, top_k=9, top_p=0.9, min_p=0.02, return_kept=True, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=8, stop_token_ids=(3, 4, 5)),
)
SYSTEM = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
PROMPTS = (
    [5],
    SYSTEM + [2, 3],
    SYSTEM + [2, 3],  # the same prompt again, other parameters
    SYSTEM + [4],
    [2, 3, 4, 5, 6, 7, 8, 9],
    SYSTEM,
    SYSTEM + [30, 31, 32, 33],
    [9, 9, 9],
)


@functools.cache
def alone(name: str) -> tuple[tuple, ...]:
    """Each request on its own, one sequence at a time, whole prompts, nothing cached."""
    llm = LLM(shared_model(name), max_num_seqs=1, max_num_batched_tokens=512, page_size=CONTEXT, prefix_caching=False)
    outputs = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    return tuple(tuple(fingerprint(c) for c in output.outputs) for output in outputs)


@pytest.mark.parametrize("name", ["fp32", "bf16", "window"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(len(PROMPTS))),
    late=st.integers(0, len(PROMPTS)),
    max_num_seqs=st.sampled_from([1, 2, 3, 5, 16]),
    budget=st.sampled_from([1, 3, 7, 16, 64, 512]),
    page_size=st.sampled_from([1, 2, 3, 8, 16, 32]),
    spare=st.sampled_from([0, 3, 1000]),
    prefix_caching=st.booleans(),
    warm=st.booleans(),
    graphs=st.booleans(),
    ahead=st.integers(0, 1),
)
def test_nothing_but_the_request_decides(
    name, order, late, max_num_seqs, budget, page_size, spare, prefix_caching, warm, graphs, ahead
):
    """Batch, arrival, rows, chunk size, page size, preemption, prefix hits, padded decodes, steps ahead: same bytes."""
    need = max(-(-(len(p) + q.max_tokens - 1) // page_size) for p, q in zip(PROMPTS, PARAMS, strict=True))
    llm = LLM(
        shared_model(name),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        page_size=page_size,
        num_pages=need + spare,
        prefix_caching=prefix_caching,
    )
    llm._ahead = ahead
    if graphs:
        llm.runner.graphs = DecodeGraphs(llm.model, lambda: lambda forward: forward)
    if warm:
        llm.generate([SYSTEM + [2, 3, 4]], SamplingParams(max_tokens=3, seed=0))
    ids = {}
    done = {}
    for i in order[:late]:
        ids[llm.add_request(PROMPTS[i], PARAMS[i])] = i
    for i in order[late:]:  # the others arrive one per step, while the first ones run
        done |= {output.request_id: output for output in llm.step()}
        ids[llm.add_request(PROMPTS[i], PARAMS[i])] = i
    while llm.has_unfinished:
        done |= {output.request_id: output for output in llm.step()}
    for request_id, i in ids.items():
        assert tuple(fingerprint(c) for c in done[request_id].outputs) == alone(name)[i], f"request {i} differs"
    assert llm.blocks.available == need + spare
    llm.blocks.check()


def test_the_settings_above_reach_preemption_forks_and_prefix_hits():
    """Guards the property: without these events it would prove nothing about them."""
    llm = LLM(shared_model("fp32"), max_num_seqs=8, max_num_batched_tokens=32, page_size=2, num_pages=24)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm.stats.preemptions > 0 and llm.stats.forks > 0 and llm.stats.cached_tokens > 20
    assert tuple(tuple(fingerprint(c) for c in output.outputs) for output in outputs) == alone("fp32")


def test_threads_do_not_matter():
    """Batches large enough to be spread over two threads, on one and on two."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        llm = LLM(shared_model("fp32"), page_size=4)
        outputs = llm.generate([*PROMPTS, *([3, i] for i in range(2, 40))], SamplingParams(max_tokens=6, seed=1, n=2))
        found.append([fingerprint(c) for output in outputs for c in output.outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fp32", "bf16", "window"])
def test_logprobs_are_those_of_the_training_forward(name):
    """Greedy, temperature, top-k, top-p, min-p with their kept sets: every sampled token, to the bit."""
    model = shared_model(name)
    llm = LLM(model, max_num_seqs=4, max_num_batched_tokens=16, page_size=4)
    tokens = 0
    for output, params in zip(llm.generate(PROMPTS, PARAMS), PARAMS, strict=True):
        for completion, logp in zip(output.outputs, training_logps(model, output, params), strict=True):
            assert_bitwise(completion.logprobs_tensor, logp, f"log-probabilities with {params}")
            assert completion.logprobs == logp.tolist()
            assert torch.isfinite(logp).all()
            assert (completion.kept is not None) == params.return_kept
            tokens += len(logp)
    assert tokens > 60


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_control_stock_ops_differ_from_the_training_forward(name):
    """Able to fail: the same comparison on plain torch shows a drift."""
    model = make_model(name, vocab_size=512, hidden_size=256, intermediate_size=512, head_dim=64)
    prompts = [[(7 * i + j) % 500 + 2 for j in range(20 + i)] for i in range(6)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    drift = 0
    with ops.stock():
        llm = LLM(model, max_num_batched_tokens=32, page_size=4)
        for output in llm.generate(prompts, params):
            for completion, logp in zip(output.outputs, training_logps(model, output, params), strict=True):
                drift += compare_bitwise(completion.logprobs_tensor, logp).mismatches
    assert drift > 0, "stock torch gave equal bits: the comparison proves nothing on this machine"
    llm = LLM(model, max_num_batched_tokens=32, page_size=4)
    for output in llm.generate(prompts, params):
        for completion, logp in zip(output.outputs, training_logps(model, output, params), strict=True):
            assert_bitwise(completion.logprobs_tensor, logp)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sequences=st.lists(st.lists(st.integers(0, 39), min_size=2, max_size=30), min_size=1, max_size=5),
    budget=st.sampled_from([1, 5, 64]),
    page_size=st.sampled_from([1, 4, 16]),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_score_is_the_training_forward(sequences, budget, page_size, temperature):
    model = shared_model("fp32")
    llm = LLM(model, max_num_seqs=2, max_num_batched_tokens=budget, page_size=page_size)
    for ids, logps in zip(sequences, llm.score(sequences, temperature=temperature), strict=True):
        hidden = model(PackedBatch.from_sequences([ids]))[:-1]
        expected = model.logprob(hidden, torch.tensor(ids[1:]), temperature=temperature).logp.detach()
        assert_bitwise(logps, expected, "prompt log-probabilities")


def test_score_and_generate_share_one_engine():
    model = shared_model("fp32")
    llm = LLM(model, page_size=4)
    params = SamplingParams(max_tokens=10, seed=3, ignore_eos=True)
    (output,) = llm.generate([SYSTEM], params)
    completion = output.outputs[0]
    (scored,) = llm.score([SYSTEM + completion.token_ids])
    assert_bitwise(scored[len(SYSTEM) - 1 :], completion.logprobs_tensor)


def test_weights_are_shared_and_updates_must_be_announced():
    """The next rollout uses the new weights; without `weights_updated` it would use stale KV (control)."""
    params = SamplingParams(max_tokens=8, seed=3)

    def fresh(model):
        return fingerprint(LLM(model, page_size=4).generate([SYSTEM], params)[0].outputs[0])

    model = make_model("fp32", seed=5)
    addresses = [p.data_ptr() for p in model.parameters()]
    llm = LLM(model, page_size=4)
    assert llm.model is model
    before = llm.generate([SYSTEM], params)[0].outputs[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    stale = llm.generate([SYSTEM], params)[0].outputs[0]
    llm.weights_updated()
    after = llm.generate([SYSTEM], params)[0].outputs[0]
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert fingerprint(after) == fresh(model) != fingerprint(before)
    assert fingerprint(stale) != fresh(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_can_enter_a_loss():
    """The log-probabilities are ordinary tensors: autograd may save them."""
    output = LLM(shared_model("fp32")).generate([[2, 3]], SamplingParams(max_tokens=3))[0].outputs[0]
    weight = torch.ones(len(output.token_ids), requires_grad=True)
    (weight * output.logprobs_tensor).sum().backward()
    assert_bitwise(weight.grad, output.logprobs_tensor)
