"""Packing of samples: which rows predict which tokens, and scores that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.contract import assert_bitwise
from rlkernel.models import Decoder, ModelConfig
from rlkernel.training.batch import TokenBudget, Trajectory, pack_trajectories, packed_sizes, score_all, spans

MODEL = Decoder.from_config(ModelConfig("llama", 30, 16, 24, 2, 2, 1, 8, max_position_embeddings=64), seed=1)


def samples_of(seed: int, count: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> list[int]:
        size = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(0, 30, (size,), generator=generator).tolist()

    return [Trajectory(ids(9), ids(12)) for _ in range(count)]


def test_rows_predict_the_completion() -> None:
    packed = pack_trajectories([Trajectory([1, 2, 3], [4, 5]), Trajectory([6], [7])], "cpu")
    assert packed.batch.input_ids.tolist() == [1, 2, 3, 4, 6]
    assert packed.batch.positions.tolist() == [0, 1, 2, 3, 0]
    assert packed.batch.cu_seqlens.tolist() == [0, 4, 5] and packed.batch.max_seqlen == 4
    assert packed.rows.tolist() == [2, 3, 4] and packed.targets.tolist() == [4, 5, 7]
    assert packed.cu_seqlens.tolist() == [0, 2, 3] and packed.cu_seqlens.dtype == torch.int32
    assert packed.kept is None


def test_kept_masks_are_for_all_or_for_none() -> None:
    mask = torch.zeros(1, 1, dtype=torch.int32)
    assert pack_trajectories([Trajectory([1], [2], kept=mask), Trajectory([1], [2], kept=mask)], "cpu").kept is not None
    with pytest.raises(ValueError, match="all or none"):
        pack_trajectories([Trajectory([1], [2], kept=mask), Trajectory([1], [2])], "cpu")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), count=st.integers(1, 8), budget=st.integers(1, 120))
def test_scores_do_not_depend_on_the_micro_batch(seed: int, count: int, budget: int) -> None:
    samples = samples_of(seed, count)
    ranges = spans(packed_sizes(samples), budget)
    assert [i for chosen in ranges for i in chosen] == list(range(count))
    for chosen in ranges:
        assert len(chosen) == 1 or sum(len(samples[i]) - 1 for i in chosen) <= budget
    whole = score_all(MODEL, samples, temperature=0.7, budget=TokenBudget(10**9), device="cpu")
    cut = score_all(MODEL, samples, temperature=0.7, budget=TokenBudget(budget), device="cpu")
    assert_bitwise(cut, whole, "scores")
    assert whole.numel() == sum(len(sample.completion) for sample in samples)
