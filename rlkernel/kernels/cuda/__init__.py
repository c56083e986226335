"""Certified fast schedules on CUDA: each op's Triton kernel is the anchor, what equals it to the bit may replace it."""

from typing import TYPE_CHECKING

from rlkernel.kernels.lazy import modules_of

if TYPE_CHECKING:
    from rlkernel.kernels.cuda import attention, linear, linear_logprob, logprob
else:
    __getattr__ = modules_of(__name__)
