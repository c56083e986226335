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

__all__ = [
    "TEMPORAL_AXES",
    "Grounding",
    "Medium",
    "Modality",
    "MultimodalBatch",
    "ProcessorFingerprint",
    "digest_of_pixels",
    "mrope_positions",
]
