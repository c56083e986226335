"""The comparison of log-probabilities: counted by bytes, located, and NaN never passes for equal or small."""

from __future__ import annotations

import math

import pytest
import torch

from rlkernel.contract import MismatchError
from rlkernel.training.batch import Trajectory
from rlkernel.training.exactness import Exactness, hex_bits

TRAJECTORIES = [
    Trajectory([1, 2], [3, 4], torch.tensor([-1.0, -2.0])),
    Trajectory([5], [6, 7, 8], torch.tensor([-3.0, -4.0, -0.0])),
]
LOGP = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.0])


def test_equal_bytes_are_exact() -> None:
    exact = Exactness()
    exact.add(TRAJECTORIES, LOGP)
    assert exact.row() == {"exact_frac": 1.0, "mismatch_tokens": 0, "max_abs_diff": 0.0} and exact.tokens == 5
    exact.require(1)
    assert Exactness().exact_frac == 1.0


def test_a_mismatch_is_counted_located_and_raised() -> None:
    trained = LOGP.clone()
    trained[3] = torch.nextafter(trained[3], torch.tensor(0.0))
    trained[4] = 0.0  # +0 against -0: equal as numbers, not as bytes
    exact = Exactness()
    exact.add(TRAJECTORIES, trained)
    assert exact.mismatch_tokens == 2 and exact.exact_frac == pytest.approx(0.6) and exact.max_ulps >= 1
    with pytest.raises(MismatchError) as caught:
        exact.require(9)
    for part in ("step 9: 2 of 5", "completion 1, token 1 of 3 (id 7, position 2)", "rollout -4.0", "1 ulps apart"):
        assert part in str(caught.value), part


def test_nan_is_the_worst_and_stays() -> None:
    trained = LOGP.clone()
    trained[0] = math.nan
    exact, other = Exactness(), Exactness()
    exact.add(TRAJECTORIES, trained)
    assert math.isnan(exact.max_abs_diff) and exact.mismatch_tokens == 1
    other.add(TRAJECTORIES, LOGP + 1)
    other.merge(exact)
    exact.add(TRAJECTORIES, LOGP + 1)
    assert math.isnan(other.max_abs_diff) and math.isnan(exact.max_abs_diff) and other.tokens == 10


def test_bits_in_hexadecimal() -> None:
    assert hex_bits(-1.0) == "bf800000" and hex_bits(0.0) == "00000000" and hex_bits(-0.0) == "80000000"
