"""Images, videos and screens: batch schema, validation, positions, readers, layout comparison. numpy and torch only."""

from rlkernel.multimodal.layout import Layout, LayoutFinding, compare_layout
from rlkernel.multimodal.positions import mrope_positions
from rlkernel.multimodal.readers import fingerprint_of, from_transformers, from_trl, from_verl, from_vllm
from rlkernel.multimodal.records import read_records, write_records
from rlkernel.multimodal.schema import (
    TEMPORAL_AXES,
    Grounding,
    Medium,
    Modality,
    MultimodalBatch,
    ProcessorFingerprint,
    digest_of_pixels,
)
from rlkernel.multimodal.screen import Screen, convert_box, convert_point
from rlkernel.multimodal.validation import Problem, problems, validate

__all__ = [
    "TEMPORAL_AXES",
    "Grounding",
    "Layout",
    "LayoutFinding",
    "Medium",
    "Modality",
    "MultimodalBatch",
    "Problem",
    "ProcessorFingerprint",
    "Screen",
    "compare_layout",
    "convert_box",
    "convert_point",
    "digest_of_pixels",
    "fingerprint_of",
    "from_transformers",
    "from_trl",
    "from_verl",
    "from_vllm",
    "mrope_positions",
    "problems",
    "read_records",
    "validate",
    "write_records",
]
