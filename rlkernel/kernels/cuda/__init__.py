"""Certified schedules on CUDA: kernels that replace an op's Triton kernel, the anchor, if their bits are equal."""

from typing import TYPE_CHECKING

from rlkernel.kernels.lazy import modules_of

if TYPE_CHECKING:
    from rlkernel.kernels.cuda import attention, linear, linear_logprob
else:
    __getattr__ = modules_of(__name__)
