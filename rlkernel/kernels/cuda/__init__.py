"""Certified fast schedules on CUDA: each op's Triton kernel is the anchor, what equals it to the bit may replace it."""
