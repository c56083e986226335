"""Images, videos and screens: batch schema, validation, positions, readers, layout comparison. numpy and torch only."""

from rlkernel.multimodal.actions import ACTIONS, Action, parse_action
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
from rlkernel.multimodal.sources import check_frames, check_size, open_image
from rlkernel.multimodal.trajectory import Trajectories, Turn, pack_trajectories
from rlkernel.multimodal.validation import Problem, problems, validate
from rlkernel.multimodal.video import frame_major, frame_mask, token_major

__all__ = [
    "ACTIONS",
    "TEMPORAL_AXES",
    "Action",
    "Grounding",
    "Layout",
    "LayoutFinding",
    "Medium",
    "Modality",
    "MultimodalBatch",
    "Problem",
    "ProcessorFingerprint",
    "Screen",
    "Trajectories",
    "Turn",
    "check_frames",
    "check_size",
    "compare_layout",
    "convert_box",
    "convert_point",
    "digest_of_pixels",
    "fingerprint_of",
    "frame_major",
    "frame_mask",
    "from_transformers",
    "from_trl",
    "from_verl",
    "from_vllm",
    "mrope_positions",
    "open_image",
    "pack_trajectories",
    "parse_action",
    "problems",
    "read_records",
    "token_major",
    "validate",
    "write_records",
]
