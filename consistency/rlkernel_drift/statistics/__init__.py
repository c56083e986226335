"""Statistics of drift: tokens, sequences, ulps, lattices. numpy alone, vectorised over the tokens."""

from rlkernel_drift.statistics.lattice import Lattice, find_lattice
from rlkernel_drift.statistics.sequences import SequenceStatistics, SequenceSums, sequence_statistics
from rlkernel_drift.statistics.tokens import (
    ONE_VALUE,
    Comparable,
    TokenStatistics,
    effective_sample_size,
    k3,
    outlying,
    token_statistics,
)
from rlkernel_drift.statistics.ulps import UlpHistogram, tensor_ulps, ulp_distance, ulp_histogram

__all__ = [
    "ONE_VALUE",
    "Comparable",
    "Lattice",
    "SequenceStatistics",
    "SequenceSums",
    "TokenStatistics",
    "UlpHistogram",
    "effective_sample_size",
    "find_lattice",
    "k3",
    "outlying",
    "sequence_statistics",
    "tensor_ulps",
    "token_statistics",
    "ulp_distance",
    "ulp_histogram",
]
