"""SamplingParams: every bad value is an error that names the field and the range; seeds make distinct streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.engine import SamplingParams
from rlkernel.engine.sampling_params import mix_seed


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, r"0 \(greedy\) or a finite number"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", 1e-9, ">= 1e-05"),
        ("temperature", "hot", "finite"),
        ("top_k", -1, r"an integer >= 0 \(0 keeps all tokens\)"),
        ("top_k", 1.5, "integer"),
        ("top_p", 0.0, r"a number in \(0, 1\]"),
        ("top_p", 1.1, r"a number in \(0, 1\]"),
        ("min_p", -0.1, r"a number in \[0, 1\]"),
        ("min_p", 2, r"a number in \[0, 1\]"),
        ("max_tokens", 0, "an integer >= 1"),
        ("max_tokens", True, "an integer >= 1"),
        ("n", 0, "an integer >= 1"),
        ("seed", -1, "0 <= seed < 2\\^64"),
        ("seed", 1 << 64, "0 <= seed < 2\\^64"),
        ("stop", [""], "non-empty strings"),
        ("stop", [3], "non-empty strings"),
        ("stop_token_ids", [-2], "integers >= 0"),
        ("ignore_eos", "false", "True or False"),
        ("return_kept", 1, "True or False"),
    ],
)
def test_bad_value_is_named(field, value, expected):
    with pytest.raises(ValueError, match=f"SamplingParams: {field}=.*{expected}"):
        SamplingParams(**{field: value})


def test_forms_that_are_accepted():
    params = SamplingParams(stop="end", stop_token_ids=np.array([3, 4]), seed=np.int64(5), temperature=np.float32(0.5))
    assert params.stop_strings == ("end",) and params.stop_token_ids == (3, 4) and type(params.seed) is int
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert not SamplingParams().filters and SamplingParams(top_k=3).filters
    assert not SamplingParams(top_k=3, temperature=0).filters, "greedy ignores the filters"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, (1 << 64) - 1))
def test_streams_of_a_seed_are_distinct_int64(seed):
    streams = [mix_seed(seed, i) for i in range(200)]
    assert len(set(streams)) == 200
    assert all(-(1 << 63) <= s < 1 << 63 for s in streams)
    assert streams == [mix_seed(seed, i) for i in range(200)]


def test_small_seeds_and_indices_never_meet():
    assert len({mix_seed(seed, i) for seed in range(100) for i in range(100)}) == 10_000
