"""Triton kernels: one source for NVIDIA and AMD GPUs. Imported when an op first runs on a GPU."""

from typing import TYPE_CHECKING

from rlkernel.kernels.lazy import modules_of

if TYPE_CHECKING:
    from rlkernel.kernels.triton import (
        adamw,
        all_reduce,
        attention,
        attention_backward,
        attention_pages,
        attention_shared,
        embedding,
        gae,
        group_advantages,
        linear,
        linear_grad,
        linear_logprob,
        logprob,
        logprob_backward,
        policy_loss,
        qk_norm_rope,
        rms_norm,
        rope,
        sample,
        swiglu,
    )
else:
    __getattr__ = modules_of(__name__)
