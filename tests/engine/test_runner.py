"""The device side of a step, on the CPU: staged inputs, and results packed into one tensor."""

import numpy as np
import torch
from tiny import fingerprint, shared_model

from rlkernel.engine import LLM, SamplingParams
from rlkernel.engine.runner import StepBuffers, from_words, shortest_last, step_sections, to_words
from rlkernel.ops import Sample


def test_staged_inputs_give_the_same_completions():
    """With a twin buffer, as on a GPU: a step reads nothing that was written after `send`."""
    prompts = [[5], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [9] * 20]
    params = [
        SamplingParams(max_tokens=6, seed=1, n=3),
        SamplingParams(max_tokens=6, seed=2, top_k=5, top_p=0.9, return_kept=True),
        SamplingParams(max_tokens=6, seed=3, min_p=0.05, temperature=0.5),
        SamplingParams(max_tokens=6, seed=4, temperature=0.0),
    ]
    found = []
    for staged in (False, True):
        llm = LLM(shared_model("fp32"), max_num_seqs=4, max_num_batched_tokens=8, page_size=4)
        if staged:
            llm.runner.buffers = StepBuffers(torch.device("cpu"), step_sections(8, 4, 24), staged=True)
        outputs = llm.generate(prompts, params)
        scores = llm.score([[3, 4, 5], [6, 7]])
        found.append([fingerprint(c) for o in outputs for c in o.outputs] + [s.numpy().tobytes() for s in scores])
    assert found[0] == found[1]


def test_sections_keep_their_addresses():
    """CUDA graphs of decode steps rely on fixed addresses."""
    buffers = StepBuffers(torch.device("cpu"), step_sections(16, 4, 8), staged=True)
    seen = []
    for count in (1, 3):
        buffers.begin()
        rows = buffers.put("seeds", np.arange(count))
        table = buffers.put("block_table", np.ones((count, 2), np.int32))
        buffers.send()
        assert rows.tolist() == list(range(count)) and table.shape == (count, 2)
        seen.append((rows.data_ptr(), table.data_ptr()))
    assert seen[0] == seen[1]


def test_results_travel_as_their_bits():
    logp = torch.tensor([-0.0, float("-inf"), -1e-42, -3.5])
    kept = torch.tensor([[-1, 5], [0, 1], [-(2**31), 7], [3, 3]], dtype=torch.int32)
    for mask in (None, kept):
        result = from_words(to_words(Sample(torch.tensor([0, 151_935, 2**31 - 1, 7]), logp, mask)).numpy())
        assert result.tokens.tolist() == [0, 151_935, 2**31 - 1, 7] and result.tokens.dtype == np.int64
        assert result.logps.tobytes() == logp.numpy().tobytes()
        assert (result.kept is None) if mask is None else (result.kept == kept.numpy()).all()


def test_the_shortest_sequences_end_a_batch() -> None:
    lengths = np.array([5, 1, 9, 3, 7])
    assert lengths[shortest_last(lengths, 2)].tolist() == [5, 9, 7, 3, 1]
    assert lengths[shortest_last(lengths, 5)].tolist() == lengths[shortest_last(lengths, 9)].tolist() == [9, 7, 5, 3, 1]
    assert shortest_last(lengths[:0]).tolist() == []
