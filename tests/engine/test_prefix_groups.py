"""Completions of one prompt are grouped in decode steps, and grouping changes no bit."""

import numpy as np
import torch
from tiny import fingerprint, make_model

from rlkernel import ops
from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.graphs import DecodeGraphs
from rlkernel.engine.shared_prefix import PrefixGroups
from rlkernel.engine.table import SequenceTable
from rlkernel.models import KVCache, PagedBatch

LONG = {"max_position_embeddings": 256}
PROMPTS = [[2, 3] * 50, [5, 6, 7], [9] * 140, [4] * 30, [2, 3] * 50]
PARAMS = [
    SamplingParams(max_tokens=9, seed=1, n=3, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=2, n=2),
    SamplingParams(max_tokens=8, seed=3, n=4, top_k=5, return_kept=True),
    SamplingParams(max_tokens=10, seed=4),
    SamplingParams(max_tokens=6, seed=5, temperature=0.7),
]


def table_of(prompts: list[int], groups: list[int], pages: list[list[int]], computed: list[int]) -> SequenceTable:
    table = SequenceTable(len(prompts), 16, (), 4096)
    table._grow(16 * max(map(len, pages)))
    for row, (prompt, group, own) in enumerate(zip(prompts, groups, pages, strict=True)):
        table.prompt_len[row], table.group[row], table.computed[row] = prompt, group, computed[row]
        table.block_table[row, : len(own)] = own
    return table


def test_groups_of_a_batch() -> None:
    shared = list(range(10))
    pages = [[90], [*shared, 50], [*shared, 51], [20, 21, 22, 23, 24], [*shared[:5], 52, 53, 54, 55, 56, 57]]
    table = table_of([10, 165, 165, 70, 165], [7, 5, 5, 3, 5], pages, [11, 166, 170, 71, 166])
    rows = np.arange(5)
    found = PrefixGroups(table, 1, 128).find(rows)
    assert found is not None
    # three completions of one prompt; the last one has pages of its own from the sixth on: 80 keys, whole blocks 64
    assert found.order.tolist() == [1, 2, 4, 3, 0] and found.groups.tolist() == [0, 3]
    assert found.lengths.tolist() == [64, 64, 64, 0, 0]
    assert PrefixGroups(table, 1, 129).find(rows) is None, "it saves 128 keys"
    two = PrefixGroups(table, 1, 0).find(rows[[3, 1, 2]])
    assert two is not None and two.lengths.tolist() == [128, 128, 0] and two.order.tolist() == [1, 2, 0]
    table.computed[1] = 100  # its prompt is not complete
    short = PrefixGroups(table, 1, 0).find(rows[[1, 2]])
    assert short is not None and short.lengths.tolist() == [64, 64]
    assert PrefixGroups(table, 1, 0).find(rows[[0, 3]]) is None


def test_a_grouping_is_kept_while_the_sequences_stay() -> None:
    table = table_of([165, 165], [5, 5], [list(range(11)), [*range(10), 50]], [166, 166])
    groups = PrefixGroups(table, 1, 0)
    first = groups.find(np.arange(2))
    assert groups.find(np.arange(2)) is first
    table.generation[1] += 1  # another sequence has the row
    table.block_table[1] += 100
    assert first is not None and groups.find(np.arange(2)) is None


def test_grouped_steps_have_the_same_bits() -> None:
    """With forks, filters, stops, recorded steps and steps ahead; every decode step that can be grouped is."""
    model, found, seen = make_model("fp32", **LONG), [], []
    forward = model.forward
    for grouped in (False, True):
        llm = LLM(model, max_num_seqs=8, max_num_batched_tokens=128, page_size=16, num_pages=60)
        if grouped:
            llm._ahead = 1
            llm.runner.prefixes = PrefixGroups(llm.runner.table, 1, 0)
            llm.runner.graphs = DecodeGraphs(model, lambda: lambda work: work)
            model.forward = lambda batch: seen.append(batch) or forward(batch)
        outputs = llm.generate(PROMPTS, PARAMS)
        found.append([fingerprint(c) for output in outputs for c in output.outputs])
    assert found[0] == found[1]
    shared = [batch.shared for batch in seen if batch.shared is not None]
    assert len(shared) >= 5 and {s.groups.tolist()[-1] for s in shared} >= {6}


def test_a_batch_moves_with_its_groups() -> None:
    ids, ints = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    cache = KVCache(make_model("fp32").config, 1, 16)
    shared = ops.SharedPrefix(ints, ints[:1], 1, 64)
    moved = PagedBatch(ids, ids, ints, ints[:1], ints[None], ids, cache, 1, 1, shared).to("meta")
    assert moved.shared is not None and moved.shared.groups.device.type == moved.input_ids.device.type == "meta"
