"""Decode graphs without a GPU: shapes; a recorded forward reads everything that changes from the step buffers.

A call of the recorded batch replaces the graph: like a graph, it sees fixed addresses only.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fingerprint, make_model, shared_model

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.graphs import DecodeGraphs, padded, padded_keys, padded_rows, padded_table, wanted
from rlkernel.engine.runner import StepBuffers, step_sections
from rlkernel.kernels import select

PROMPTS = [[5], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [9] * 20, [7, 8], [30, 31, 32], [4] * 9]
PARAMS = [
    SamplingParams(max_tokens=14, seed=1, n=3),
    SamplingParams(max_tokens=16, seed=2, top_k=5, top_p=0.9, return_kept=True),
    SamplingParams(max_tokens=16, seed=3, min_p=0.05, temperature=0.5, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=4, temperature=0.0),
    SamplingParams(max_tokens=20, seed=5, stop_token_ids=(3, 4)),
    SamplingParams(max_tokens=20, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=11, seed=7),
]
SIZES = {"max_num_seqs": 9, "max_num_batched_tokens": 24, "page_size": 4}


def recording(model: torch.nn.Module) -> DecodeGraphs:
    return DecodeGraphs(model, lambda: lambda forward: forward)


def engine(model: torch.nn.Module, graphs: bool, **changes: int) -> LLM:
    llm = LLM(model, **{**SIZES, **changes})
    llm._ahead = int(graphs)  # as on a GPU
    if graphs:
        llm.runner.graphs = recording(model)
    # A twin buffer, as on a GPU: the recorded forward must read what was sent, at the addresses of its own step.
    llm.runner.buffers = StepBuffers(torch.device("cpu"), step_sections(24, 9, 24), staged=True)
    return llm


def fingerprints(llm: LLM) -> list[tuple]:
    return [fingerprint(c) for output in llm.generate(PROMPTS, PARAMS) for c in output.outputs]


@given(rows=st.integers(1, 600), limit=st.integers(1, 600))
def test_padded_rows(rows: int, limit: int) -> None:
    rows = min(rows, limit)
    size = padded_rows(rows, limit)
    assert rows <= size <= limit and size - rows < 16
    assert size in (1, 2, 4, 8, limit) or size % 16 == 0
    assert padded_rows(size, limit) == size


@given(keys=st.integers(1, 1 << 17), limit=st.integers(1, 1 << 17))
def test_padded_keys(keys: int, limit: int) -> None:
    keys = min(keys, limit)
    span = padded_keys(keys, limit)
    assert keys <= span <= limit and span <= max(2048, 2 * keys)
    assert span == limit or span & (span - 1) == 0
    assert padded_keys(span, limit) == span


def test_counts_of_graphs() -> None:
    assert len({padded_rows(n, 256) for n in range(1, 257)}) == 20
    assert sorted({padded_keys(n, 40_960) for n in range(1, 40_961)}) == [2048, 4096, 8192, 16_384, 32_768, 40_960]


def test_padding() -> None:
    assert padded(np.asarray([3, 4]), 4, -1).tolist() == [3, 4, -1, -1]
    table = np.asarray([[1, 2], [3, 4], [5, 6]], np.int32)
    assert padded_table(table, np.asarray([2, 0]), 3, 3).tolist() == [[5, 6, 0], [1, 2, 0], [0, 0, 0]]
    assert padded_table(table, np.asarray([1]), 1, 1).tolist() == [[3]]
    assert padded_table(table, np.asarray([1]), 1, 1).dtype == np.int32


@pytest.mark.parametrize("name", ["fp32", "bf16", "window"])
def test_same_bits_padded_and_replayed(name: str) -> None:
    """Forks, filters, kept sets, stops, preemption, scoring: replayed steps change nothing."""
    found = []
    for graphs in (False, True):
        llm = engine(shared_model(name), graphs, num_pages=24)
        prints = fingerprints(llm)
        scores = [s.numpy().tobytes() for s in llm.score([[3, 4, 5], [6, 7], [6, 7]])]
        found.append((prints, scores))
        assert llm.stats.preemptions > 0 and llm.stats.forks > 0
        if graphs:
            assert llm.runner.graphs is not None and llm.runner.graphs.replayed > 10 > llm.runner.graphs.recorded > 1
    assert found[0] == found[1]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(max_num_seqs=st.integers(1, 9), budget=st.sampled_from([1, 2, 5, 24]), page_size=st.sampled_from([4, 5, 16, 96]))
def test_any_settings(max_num_seqs: int, budget: int, page_size: int) -> None:
    llm = engine(
        shared_model("fp32"), True, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, page_size=page_size
    )
    assert fingerprints(llm) == fingerprints(engine(shared_model("fp32"), False))


def test_a_replay_that_reads_old_inputs_is_noticed() -> None:
    """Control: a graph that keeps the inputs of its recording gives other tokens."""

    def frozen(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = forward()
        return lambda: out

    llm = engine(shared_model("fp32"), False)
    expected = fingerprints(llm)
    llm = engine(shared_model("fp32"), False)
    llm.runner.graphs = DecodeGraphs(llm.model, lambda: frozen)
    assert fingerprints(llm) != expected


def test_padded_rows_store_nothing() -> None:
    """Slot -1 leaves the cache alone, also page 0, which padded rows name."""
    caches = []
    for graphs in (False, True):
        llm = engine(shared_model("fp32"), graphs)
        llm.generate(PROMPTS[1:4], SamplingParams(max_tokens=8, seed=0, ignore_eos=True))
        caches.append(llm.runner.cache)
    for plain, other in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
        assert_bitwise(other, plain, "cache")


def test_weights_in_place_and_replaced() -> None:
    """New values change nothing, new addresses drop every recording; both give the new model's completions."""
    model = make_model("fp32")
    llm = engine(model, True)
    graphs = llm.runner.graphs
    assert graphs is not None
    before = fingerprints(llm)
    recorded = graphs.recorded

    def check(records: bool) -> None:
        llm.weights_updated()
        seen = graphs.recorded
        found = fingerprints(llm)
        assert found == fingerprints(engine(model, False)) != before
        assert (graphs.recorded > seen) == records

    assert fingerprints(llm) == before and graphs.recorded == recorded
    with torch.no_grad():
        model.norm.weight.mul_(1.1)
    check(records=False)
    model.norm.weight.data = model.norm.weight.data * 1.1
    check(records=True)
    model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(model.layers[1].mlp.down_proj.weight.detach().clone())
    check(records=True)
    model.layers[0].mlp = make_model("fp32", seed=3).layers[0].mlp
    check(records=True)


def test_blocks_that_choose_an_implementation_stay_eager() -> None:
    llm = engine(shared_model("fp32"), True)
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.usable
    with ops.stock():
        assert not graphs.usable
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6, seed=0))
    with select.use("reference"):
        assert not graphs.usable
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6, seed=0))
    assert graphs.recorded == graphs.replayed == 0


def test_setting() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert not wanted(None, cpu) and not wanted(False, cpu) and not wanted(False, gpu) and wanted(True, gpu)
    assert wanted(None, gpu) == (torch.version.hip is None)
    with pytest.raises(ValueError, match="cuda_graphs=True, but the model is on cpu; move it to a GPU"):
        LLM(shared_model("fp32"), cuda_graphs=True)
    assert LLM(shared_model("fp32")).runner.graphs is None
