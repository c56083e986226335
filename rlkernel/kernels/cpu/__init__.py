"""Launchers of the C++ CPU kernels in `csrc/cpu`, through their plain C interface."""

from typing import TYPE_CHECKING

from rlkernel.kernels.lazy import modules_of

if TYPE_CHECKING:
    from rlkernel.kernels.cpu import (
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
