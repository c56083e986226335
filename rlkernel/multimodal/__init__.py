"""Images, videos and screens: batch schema, validation, positions, readers, layout comparison. numpy and torch only."""

from rlkernel.multimodal.positions import mrope_positions
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
    "Medium",
    "Modality",
    "MultimodalBatch",
    "Problem",
    "ProcessorFingerprint",
    "Screen",
    "convert_box",
    "convert_point",
    "digest_of_pixels",
    "mrope_positions",
    "problems",
    "validate",
]
