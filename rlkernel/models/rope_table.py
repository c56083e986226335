"""The cos/sin table of rotary position embedding, computed once per model on the CPU and copied to its device.

All devices therefore rotate a position by the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkernel.models.config import ModelConfig, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:  # [D/2] fp32
    """Radians per position of each channel pair, in fp32 as transformers computes them.

    Source: RoFormer (arXiv 2104.09864); `llama3` after the model code of Llama 3.1: wavelengths longer than
    `original / low_freq_factor` are stretched by `factor`, those shorter than `original / high_freq_factor` are kept,
    and the ones between are blended.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.type == "linear":
        return frequency / rope.factor
    if rope.type == "default":
        return frequency
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    keep = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - keep) * frequency / rope.factor + keep * frequency
    out = torch.where(wavelength > longest, frequency / rope.factor, blended)
    return torch.where(wavelength < shortest, frequency, out)


def rope_table(config: ModelConfig) -> Tensor:  # [P, D] fp32: D/2 cosines, then D/2 sines
    """Cosines and sines of every position below `max_position_embeddings`.

    The angle is the fp32 product of position and frequency, as in transformers. Cosine and sine are computed in fp64
    and rounded once, so that they do not depend on the last bit of a math library.
    """
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angle = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim)).double()
    return torch.cat((angle.cos().float(), angle.sin().float()), dim=1)
