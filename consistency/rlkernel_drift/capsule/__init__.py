"""Capsules: the trace format `rlkernel.trace/1`, safetensors and JSON, no pickle. See docs/drift/capsule.md."""

from rlkernel_drift.capsule.capsule import (
    STREAMS,
    Capsule,
    Distribution,
    Kept,
    Operators,
    SpanKind,
    build_capsule,
    describe_operators,
)
from rlkernel_drift.capsule.folder import check_target, is_capsule, read_capsule, redact, write_capsule
from rlkernel_drift.capsule.manifest import (
    FORMAT,
    Floor,
    Manifest,
    Media,
    Model,
    Operator,
    Sampling,
    WeightFingerprint,
    Weights,
    dtype_name,
    layer_of,
)
from rlkernel_drift.capsule.tensor_file import Limits, Tensor

__all__ = [
    "FORMAT",
    "STREAMS",
    "Capsule",
    "Distribution",
    "Floor",
    "Kept",
    "Limits",
    "Manifest",
    "Media",
    "Model",
    "Operator",
    "Operators",
    "Sampling",
    "SpanKind",
    "Tensor",
    "WeightFingerprint",
    "Weights",
    "build_capsule",
    "check_target",
    "describe_operators",
    "dtype_name",
    "is_capsule",
    "layer_of",
    "read_capsule",
    "redact",
    "write_capsule",
]
