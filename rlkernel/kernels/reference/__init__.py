"""Readable references: the contract's CPU arithmetic in torch ops, with the bits of the C++ kernels."""

from typing import TYPE_CHECKING

from rlkernel.kernels.lazy import modules_of

if TYPE_CHECKING:
    from rlkernel.kernels.reference import (
        adamw,
        attention,
        embedding,
        gae,
        group_advantages,
        linear,
        linear_logprob,
        logprob,
        policy_loss,
        qk_norm_rope,
        rms_norm,
        rope,
        sample,
        swiglu,
    )
else:
    __getattr__ = modules_of(__name__)
