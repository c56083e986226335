"""The function of every op in each folder of implementations. `select.py` chooses among the folders.

A folder is imported at its first use, because Triton and the C++ kernels are not installed everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Table = dict[str, Callable[..., Any]]  # op -> function


def _table(*functions: Callable[..., Any], **others: Callable[..., Any]) -> Table:
    return {fn.__name__: fn for fn in functions} | others


def _reference() -> Table:
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

    return _table(
        adamw.adamw_, adamw.grad_norm, attention.attention, attention.attention_backward, attention.paged_attention,
        attention.store_kv_, embedding.embedding, embedding.embedding_wgrad, embedding.embedding_wgrad_,
        gae.gae, group_advantages.group_advantages, linear.linear, linear.linear_dgrad, linear.linear_wgrad,
        linear.linear_wgrad_, linear.bias_grad_, linear_logprob.linear_logprob, linear_logprob.linear_logprob_logits,
        linear_logprob.linear_logprob_probs, linear_logprob.linear_logprob_grad_, logprob.logprob,
        logprob.logprob_dgrad, policy_loss.policy_loss, policy_loss.policy_loss_scale_, rms_norm.rms_norm,
        rms_norm.add_rms_norm, rms_norm.rms_norm_dgrad, rms_norm.rms_norm_grad,
        rms_norm.rms_norm_grad_, rope.rope, sample.sample, swiglu.swiglu, swiglu.swiglu_grad,
        qk_norm_rope=qk_norm_rope.qk_norm_rope,
    )  # fmt: skip


def _cpu() -> Table:
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

    return _table(
        adamw.adamw_, adamw.grad_norm, attention.attention, attention.attention_backward, attention.paged_attention,
        attention.store_kv_, embedding.embedding, embedding.embedding_wgrad, embedding.embedding_wgrad_,
        gae.gae, group_advantages.group_advantages, linear.linear, linear.linear_dgrad, linear.linear_wgrad,
        linear.linear_wgrad_, linear.bias_grad_, linear_logprob.linear_logprob, linear_logprob.linear_logprob_logits,
        linear_logprob.linear_logprob_probs, linear_logprob.linear_logprob_grad_, logprob.logprob,
        logprob.logprob_dgrad, policy_loss.policy_loss, policy_loss.policy_loss_scale_, rms_norm.rms_norm,
        rms_norm.add_rms_norm, rms_norm.rms_norm_dgrad, rms_norm.rms_norm_grad,
        rms_norm.rms_norm_grad_, rope.rope, sample.sample, swiglu.swiglu, swiglu.swiglu_grad,
        qk_norm_rope=qk_norm_rope.qk_norm_rope,
    )  # fmt: skip


def _triton() -> Table:
    from rlkernel.kernels.triton import (
        adamw,
        attention,
        attention_backward,
        attention_pages,
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

    return _table(
        adamw.adamw_, adamw.grad_norm, attention.attention, attention_backward.attention_backward,
        attention.paged_attention, attention_pages.store_kv_, embedding.embedding, embedding.embedding_wgrad,
        embedding.embedding_wgrad_, gae.gae, group_advantages.group_advantages, linear.linear, linear.linear_dgrad,
        linear_grad.linear_wgrad, linear_grad.linear_wgrad_, linear_grad.bias_grad_, linear_logprob.linear_logprob,
        linear_logprob.linear_logprob_logits, linear_logprob.linear_logprob_probs, logprob.logprob,
        logprob_backward.logprob_dgrad, policy_loss.policy_loss, policy_loss.policy_loss_scale_,
        qk_norm_rope.qk_norm_rope, rms_norm.rms_norm, rms_norm.add_rms_norm, rms_norm.rms_norm_dgrad,
        rms_norm.rms_norm_grad, rms_norm.rms_norm_grad_, rope.rope, sample.sample, swiglu.swiglu, swiglu.swiglu_grad,
        linear_logprob_grad_=linear_logprob.linear_logprob_grad_,
    )  # fmt: skip


def _cuda() -> Table:
    """Ops with certified schedules; on CUDA the Triton table computes the others."""
    from rlkernel.kernels.cuda import attention, linear, linear_logprob, logprob

    return _table(
        linear.linear_wgrad, linear.linear_wgrad_, linear_logprob.linear_logprob, linear_logprob.linear_logprob_logits,
        linear_logprob.linear_logprob_probs,
        attention=attention.attention, paged_attention=attention.paged_attention, linear=linear.linear.call,
        linear_dgrad=linear.linear_dgrad.call, linear_logprob_grad_=linear_logprob.linear_logprob_grad_,
        logprob=logprob.logprob.call,
    )  # fmt: skip


_TABLES = {"cpu": _cpu, "cuda": _cuda, "triton": _triton, "reference": _reference}
IMPLEMENTATIONS = tuple(_TABLES)
"""The folders of `rlkernel/kernels` that hold implementations."""


@functools.cache
def functions(implementation: str) -> Table:
    """op -> function of one of `IMPLEMENTATIONS`; imports the folder."""
    return _TABLES[implementation]()
