"""Arguments that ops refuse because they would compute wrongly; errors name the argument and the remedy."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel import ops
from rlkernel.kernels import select

X, W = torch.randn(3, 8), torch.randn(5, 8)
CU = torch.tensor([0, 3], dtype=torch.int32)


def test_two_devices() -> None:
    with pytest.raises(ValueError, match="one device"):
        ops.linear(X, W.to("meta"))
    with pytest.raises(ValueError, match="one device"):
        ops.linear_logprob(X, W.to("meta"), torch.tensor([0, 1, 2]))


NOT_AS_STORED = {
    "linear": lambda x: ops.linear(x, W),
    "linear weight": lambda w: ops.linear(X, w),
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(8), 0.1),
    "add_rms_norm": lambda x: ops.rms_norm(X, torch.ones(8), 0.1, x)[0],
    "swiglu": lambda x: ops.swiglu(x),
    "logprob": lambda x: ops.logprob(x, TARGETS).logp,
    "linear_logprob": lambda x: ops.linear_logprob(x, W, TARGETS).logp,
    "rope": lambda x: ops.rope(x[:, None], x[:, None], TARGETS, COS)[0],
    "attention": lambda x: ops.attention(*[x[:, None]] * 3, CU, max_seqlen_q=3)[0],
}


@pytest.mark.parametrize("op", NOT_AS_STORED)
def test_tensors_whose_memory_does_not_hold_their_values(op: str) -> None:
    """Kernels read memory, and a lazily negated tensor or a zero tensor does not hold its values there."""
    call = NOT_AS_STORED[op]
    for x in (torch._neg_view(X), torch._efficientzerotensor(X.shape)):
        plain = x.clone().resolve_neg() if x.is_neg() else torch.zeros_like(X)
        mine, other = (t.detach().requires_grad_() for t in (x, plain))
        assert mine.is_neg() or mine._is_zerotensor()
        y, expected = call(mine), call(other)
        assert torch.equal(y, expected)
        upstream = torch._neg_view(torch.randn(y.shape))
        (found,) = torch.autograd.grad(y, mine, upstream)
        (wanted,) = torch.autograd.grad(expected, other, upstream.resolve_neg())
        assert torch.equal(found, wanted)
        with torch.no_grad():
            assert torch.equal(call(mine), expected)


def test_shapes() -> None:
    q = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match="linear: weight"):
        ops.linear(X, W[0])
    with pytest.raises(ValueError, match="rms_norm: weight"):
        ops.rms_norm(X, torch.tensor(1.0), 1e-6)
    with pytest.raises(ValueError, match="head dim 0"):
        ops.attention(q[..., :0], q[..., :0], q[..., :0], CU, max_seqlen_q=3)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        ops.attention(q, q, q, CU[:0], max_seqlen_q=3)


@pytest.mark.parametrize("eps", (-1.0, float("nan"), float("inf")))
def test_rms_norm_eps(eps: float) -> None:
    with pytest.raises(ValueError, match=rf"rms_norm: eps={eps} must be finite in float32 and at least 0"):
        ops.rms_norm(X, torch.ones(8), eps)


def test_a_gradient_of_an_op_without_one() -> None:
    """torch would silently omit the op's gradient; without autograd the call is allowed."""
    lengths = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    into = {**lengths, "out": Q * 0}
    asks, table = Q.clone().requires_grad_(), CU[:1, None]
    pages = PAGES.clone().requires_grad_()
    weight = EIGHT.clone().requires_grad_()
    refused = {
        "paged_attention: q": lambda: ops.paged_attention(asks, PAGES, PAGES, table, CU, CU[1:], **lengths),
        "paged_attention: v_cache": lambda: ops.paged_attention(Q, PAGES, pages, table, CU, CU[1:], **lengths),
        "paged_attention: q ": lambda: ops.paged_attention(asks, PAGES, PAGES, table, CU, CU[1:], **into),
        "paged_attention: k_cache": lambda: ops.paged_attention(Q, pages, PAGES, table, CU, CU[1:], **into),
        "qk_norm_rope: k": lambda: ops.qk_norm_rope(Q, asks, EIGHT, EIGHT, 0.1, TARGETS, COS),
        "qk_norm_rope: q_weight": lambda: ops.qk_norm_rope(Q, Q, weight, EIGHT, 0.1, TARGETS, COS),
        "logprob: temperature": lambda: ops.logprob(X, TARGETS, temperature=weight[:3]),
        "linear_logprob: temperature": lambda: ops.linear_logprob(X, W, TARGETS, temperature=weight[:3]),
    }  # fmt: skip
    for message, call in refused.items():
        for watched in (contextlib.nullcontext(), Watching()):  # past torch's dispatcher and through it
            with watched, pytest.raises(RuntimeError, match=rf"^{message.strip()} requires a gradient.*\.detach\(\)"):
                call()
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                call()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_forward_mode() -> None:
    """torch would silently make the tangent zero."""
    one = torch.ones_like(X)
    with pytest.raises(NotImplementedError, match="swiglu: there is no forward-mode derivative"):
        torch.func.jvp(ops.swiglu, (X,), (one,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="linear: there is no forward-mode derivative"):
            ops.linear(forward_ad.make_dual(X, one), W)
        assert torch.equal(ops.linear(X, W), ops.linear(X, W))


def test_gradients_of_torch_func() -> None:
    """torch's own error would name an internal class."""
    with pytest.raises(NotImplementedError, match=r"swiglu: torch\.func has no gradient of it"):
        torch.func.grad(lambda x: ops.swiglu(x).sum())(X)


def test_main_grad_under_compile() -> None:
    """A compiled backward does not see it, so fullgraph is refused, and otherwise the op runs outside the graph."""
    weight = torch.nn.Parameter(W.clone())
    weight.main_grad = torch.zeros(5, 8)  # type: ignore[attr-defined]
    run = lambda x: ops.linear(x * 2, weight) * 2
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"linear: torch\.compile does not see main_grad"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(X)
    with torch.no_grad():
        torch.compiler.reset()
        torch.compile(run, fullgraph=True, backend="aot_eager")(X)
    torch.compiler.reset()
    torch.compile(run, backend="aot_eager")(X).sum().backward()
    assert weight.grad is None and weight.main_grad.abs().sum() > 0  # type: ignore[attr-defined]


def test_dimensions_of_zero() -> None:
    assert ops.linear(torch.ones(2, 3, 0), torch.ones(5, 0), torch.ones(5)).equal(torch.ones(2, 3, 5))
    assert ops.linear(torch.ones(0), torch.ones(5, 0)).shape == (5,)
    assert ops.swiglu(torch.ones(2, 3, 0)).shape == (2, 3, 0)


def test_autograd_sees_that_an_op_wrote_in_place() -> None:
    keys = torch.zeros(2, 4, 1, 8, requires_grad=True)
    kept, values = keys * 1.0, torch.zeros(2, 4, 1, 8)
    squared = (kept * kept).sum()  # autograd keeps `kept`
    with torch.no_grad():
        new = torch.ones(2, 1, 8)
        ops.store_kv_(kept, values, new, new, torch.tensor([0, 5]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()
    assert values._version == 1
    for watched in (torch.profiler.profile(), Watching()):  # then the call goes through torch's dispatcher
        before = values._version
        with watched:
            ops.store_kv_(values.clone(), values, new, new, torch.tensor([0, 5]))
        assert values._version == before + 1
    with torch.inference_mode():  # inference tensors have no version
        pages = torch.zeros(2, 4, 1, 8)
        ops.store_kv_(pages, pages.clone(), new, new, torch.tensor([0, 5]))
    assert pages[0, 0, 0, 0] == 1


# ---- arguments named -----------------------------------------------------------------------------


TARGETS = torch.tensor([0, 1, 2])
Q = torch.randn(3, 2, 8)
EIGHT = torch.ones(8)
COS = torch.randn(4, 8)
PAGES, EMPTY = torch.zeros(1, 4, 2, 8), torch.zeros(1, 0, 2, 8)


def policy_loss(**changed: object) -> object:
    given = {"logp": torch.zeros(3), "old_logp": None, "advantages": torch.ones(1), "cu_seqlens": CU}
    return ops.policy_loss(**{**given, **changed})  # type: ignore[arg-type]


def adamw(**changed: object) -> None:
    p = torch.zeros(2)
    given = {"params": [p], "grads": [p.clone()], "exp_avgs": [p.clone()], "exp_avg_sqs": [p.clone()]}
    ops.adamw_(**{**given, "lr": 0.1, "step": 1, **changed})  # type: ignore[arg-type]


def store(**change: Any) -> Any:
    given = {"q": torch.ones(3, 4, 8), "k": torch.ones(3, 2, 8), "v": torch.ones(3, 2, 8), "q_weight": EIGHT}
    given |= {"k_weight": EIGHT, "eps": 0.1, "positions": TARGETS, "cos_sin": COS}
    given |= {name: torch.zeros(1, 4, 2, 8) for name in ("k_cache", "v_cache")} | {"slots": TARGETS, **change}
    return ops.qk_norm_rope_store(**given)


REFUSED = {
    # refused by some devices only, with different messages
    "linear fp64": (lambda: ops.linear(X.double(), W.double()), TypeError, "linear: x is torch.float64; .*cast it"),
    "linear int": (lambda: ops.linear(X.int(), W.int()), TypeError, "linear: x is torch.int32"),
    "linear_logprob fp64": (
        lambda: ops.linear_logprob(X.double(), W.double(), TARGETS), TypeError, "linear_logprob: hidden is torch.float"
    ),
    "logprob fp64": (lambda: ops.logprob(X.double(), TARGETS), TypeError, "logprob: logits is torch.float64"),
    "rms_norm fp64": (lambda: ops.rms_norm(X.double(), EIGHT.double(), 0.1), TypeError, "rms_norm: x is torch.float64"),
    "swiglu fp64": (lambda: ops.swiglu(X.double()), TypeError, "swiglu: gate_up is torch.float64"),
    "rope fp64": (lambda: ops.rope(Q.double(), Q.double(), TARGETS, COS), TypeError, "rope: q is torch.float64"),
    "qk_norm_rope positions": (
        lambda: ops.qk_norm_rope(Q, Q, EIGHT, EIGHT, 0.1, TARGETS.int(), COS),
        ValueError, r"qk_norm_rope: positions is \(3,\) torch.int32; expected \[T=3\] int64",
    ),
    "qk_norm_rope table": (
        lambda: ops.qk_norm_rope(Q, Q, EIGHT, EIGHT, 0.1, TARGETS, COS.bfloat16()),
        ValueError, r"qk_norm_rope: cos_sin is .* torch.bfloat16; expected \[P, D=8\] float32",
    ),
    "rope without a table": (
        lambda: ops.rope(Q, Q, TARGETS, COS[:0]),
        ValueError, r"rope: cos_sin is \(0, 8\), which has no positions; expected \[P, D=8\]",
    ),
    "qk_norm_rope fp64": (
        lambda: ops.qk_norm_rope(Q.double(), Q.double(), EIGHT.double(), EIGHT.double(), 0.1, TARGETS, COS),
        TypeError, "qk_norm_rope: q is torch.float64",
    ),
    "embedding fp64": (lambda: ops.embedding(TARGETS, W.double()), TypeError, "embedding: weight is torch.float64"),
    "attention fp64": (
        lambda: ops.attention(Q.double(), Q.double(), Q.double(), CU, max_seqlen_q=3), TypeError, "attention: q is"
    ),
    "attention q bf16": (
        lambda: ops.attention(Q.bfloat16(), Q, Q, CU, max_seqlen_q=3), ValueError, "q is torch.bfloat16, k is torch.fl"
    ),
    "attention cu_seqlens_q": (
        lambda: ops.attention(Q, Q, Q, CU.long(), max_seqlen_q=3), TypeError, "attention: cu_seqlens_q is torch.int64"
    ),
    # no tensors
    "linear list": (lambda: ops.linear([1.0], W), TypeError, "linear: x is of type list; it must be a torch.Tensor"),
    "linear None": (lambda: ops.linear(X, None), TypeError, "linear: weight is of type NoneType"),
    "linear_logprob None": (lambda: ops.linear_logprob(X, W, None), TypeError, "linear_logprob: targets is of type"),
    "logprob list": (lambda: ops.logprob([[1.0]], TARGETS), TypeError, "logprob: logits is of type list"),
    "rms_norm None": (lambda: ops.rms_norm(X, None, 0.1), TypeError, "rms_norm: weight is of type NoneType"),
    "swiglu None": (lambda: ops.swiglu(None), TypeError, "swiglu: gate_up is of type NoneType"),
    "rope list": (lambda: ops.rope(Q, Q, [0, 1, 2], COS), TypeError, "rope: positions is of type list"),
    "embedding list": (lambda: ops.embedding([0, 1], W), TypeError, "embedding: ids is of type list"),
    "attention None": (lambda: ops.attention(Q, None, Q, CU, max_seqlen_q=3), TypeError, "attention: k is of type"),
    "policy_loss list": (lambda: policy_loss(cu_seqlens=[0, 3]), TypeError, "policy_loss: cu_seqlens is of type list"),
    "linear bias": (lambda: ops.linear(X, W, [0.0] * 5), TypeError, "linear: bias is of type list"),
    "rms_norm residual": (lambda: ops.rms_norm(X, EIGHT, 0.1, 1.0), TypeError, "rms_norm: residual is of type float"),
    "attention cu_seqlens_k": (
        lambda: ops.attention(Q, Q, Q, CU, [0, 3], max_seqlen_q=3, max_seqlen_k=3),
        TypeError, "attention: cu_seqlens_k is of type list",
    ),
    "attention window": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, window=2.5), TypeError, "attention: window=2.5, split=2048;"
    ),
    "attention split": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, split=64.0), TypeError, "attention: window=None, split=64.0;"
    ),
    "paged_attention list": (
        lambda: ops.paged_attention(Q, PAGES, PAGES, [[0]], CU, CU[1:], max_seqlen_q=3, max_seqlen_k=3),
        TypeError, "paged_attention: block_table is of type list",
    ),
    "paged_attention out": (
        lambda: ops.paged_attention(Q, PAGES, PAGES, CU[:1, None], CU, CU[1:], max_seqlen_q=3, max_seqlen_k=3, out=[]),
        TypeError, "paged_attention: out is of type list",
    ),
    "store_kv_ list": (
        lambda: ops.store_kv_(PAGES, PAGES, Q, Q, [0, 1, 2]), TypeError, "store_kv_: slots is of type list"
    ),
    "qk_norm_rope None": (
        lambda: ops.qk_norm_rope(Q, Q, None, EIGHT, 0.1, TARGETS, COS), TypeError, "qk_norm_rope: q_weight is of type N"
    ),
    "kept list": (lambda: ops.logprob(X, TARGETS, kept=[1]), TypeError, "logprob: kept is of type list"),
    "policy_loss mask": (lambda: policy_loss(mask=[True]), TypeError, "policy_loss: mask is of type list"),
    "group_advantages list": (lambda: ops.group_advantages([1.0], 1), TypeError, "rewards is of type list"),
    "group_size float": (lambda: ops.group_advantages(EIGHT, 2.0), TypeError, "group_size=2.0 must be an integer"),
    "gae list": (lambda: ops.gae(EIGHT, [1.0], CU), TypeError, "gae: values is of type list"),
    "gae dtype": (lambda: ops.gae(EIGHT, EIGHT, CU.long()), TypeError, "gae: cu_seqlens is torch.int64, expected"),
    "sample temperature": (
        lambda: ops.sample(X, TARGETS, TARGETS, temperature=1.0), TypeError, "sample: temperature is of type float"
    ),
    "sample top_k": (
        lambda: ops.sample(X, TARGETS, TARGETS, temperature=EIGHT[:3], top_k=5), TypeError, "sample: top_k is of type"
    ),
    "pack fractions": (lambda: ops.pack([[1, 2], [1.5]]), TypeError, r"pack: sequences\[1\] is neither a tensor nor"),
    # shapes
    "paged_attention lengths": (
        lambda: ops.paged_attention(Q, PAGES, PAGES, CU[:1, None], CU, CU[1], max_seqlen_q=3, max_seqlen_k=3),
        ValueError, r"paged_attention: seq_lens_k is \(\); it must be \[B\]",
    ),
    "paged_attention pages without tokens": (
        lambda: ops.paged_attention(Q, EMPTY, EMPTY, CU[:1, None], CU, CU[1:], max_seqlen_q=3, max_seqlen_k=3),
        ValueError, "at least one token per page",
    ),
    "ids_to_kept offsets": (
        lambda: ops.ids_to_kept(TARGETS[:2].int(), torch.tensor([1, 2]), 4), ValueError, r"start at 0.*are \[1, 2\]"
    ),
    "ids_to_kept offsets that fall": (
        lambda: ops.ids_to_kept(TARGETS[:2].int(), torch.tensor([0, 2, 1, 2]), 4), ValueError, "ids_to_kept: offsets"
    ),
    "swiglu 0-dim": (lambda: ops.swiglu(torch.tensor(1.0)), ValueError, r"swiglu: gate_up is \(\); its last dim"),
    "rms_norm C=0": (lambda: ops.rms_norm(X[:, :0], EIGHT[:0], 0.1), ValueError, "rms_norm: weight .* at least one"),
    "linear chunks": (lambda: ops.linear(X, W, chunks="2"), ValueError, "linear: chunks='2' must be a power of two"),
    "linear out_dtype int": (lambda: ops.linear(X, W, out_dtype=torch.int32), ValueError, "linear: out_dtype=torch"),
    "linear out_dtype fp64": (lambda: ops.linear(X, W, out_dtype=torch.float64), ValueError, "linear: out_dtype="),
    # numbers
    "qk_norm_rope eps": (
        lambda: ops.qk_norm_rope(Q, Q, EIGHT, EIGHT, -1.0, TARGETS, COS), ValueError, "qk_norm_rope: eps=-1.0 must be"
    ),
    "scale inf": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, scale=math.inf), ValueError, "scale=inf must be .* finite"
    ),
    "scale nan": (lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, scale=math.nan), ValueError, "scale=nan"),
    "temperature inf": (lambda: ops.logprob(X, TARGETS, temperature=math.inf), ValueError, "temperature=inf must"),
    "temperature 1e40": (lambda: ops.logprob(X, TARGETS, temperature=1e40), ValueError, r"temperature=1e\+40 must"),
    "temperature 1e-45": (lambda: ops.linear_logprob(X, W, TARGETS, temperature=1e-45), ValueError, "=1e-45 must be"),
    "entropy_coef nan": (
        lambda: policy_loss(entropy=torch.zeros(3), entropy_coef=math.nan), ValueError, "entropy_coef=nan must be"
    ),
    "kl_coef inf": (
        lambda: policy_loss(ref_logp=torch.zeros(3), kl_coef=math.inf), ValueError, "kl_coef=inf must be finite"
    ),
    "normalizer inf": (lambda: policy_loss(normalizer=math.inf), ValueError, "normalizer=inf must be positive"),
    "normalizer 1e-50": (lambda: policy_loss(normalizer=1e-50), ValueError, "normalizer=1e-50 must be positive and"),
    "normalizer 1e50": (lambda: policy_loss(normalizer=1e50), ValueError, r"normalizer=1e\+50 must be positive and"),
    "normalizer tensor 1e50": (
        lambda: policy_loss(normalizer=torch.tensor(1e50, dtype=torch.float64)), ValueError, "normalizer=1e.50 must be"
    ),
    "clip_low": (lambda: policy_loss(clip_low=-0.1), ValueError, "policy_loss: clip_low=-0.1 must be at least 0"),
    "tis_cap 1e-50": (
        lambda: policy_loss(tis_cap=1e-50, rollout_logp=torch.zeros(3)), ValueError, "tis_cap=1e-50 must be positive"
    ),
    "rms_norm eps 1e39": (lambda: ops.rms_norm(X, EIGHT, 1e39), ValueError, r"rms_norm: eps=1e\+39 must be finite in"),
    "rms_norm eps None": (lambda: ops.rms_norm(X, EIGHT, None), TypeError, "rms_norm: eps=None is not a number"),
    "scale 1e60": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, scale=1e60), ValueError, r"scale=1e\+60 must be positive and"
    ),
    "scale 1e-60": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, scale=1e-60), ValueError, "scale=1e-60 must be positive and"
    ),
    "group_advantages eps": (
        lambda: ops.group_advantages(EIGHT, 2, eps=1e-50), ValueError, "group_advantages: eps=1e-50 must be above 0"
    ),
    "lr 1e39": (lambda: adamw(lr=1e39), ValueError, r"adamw_: lr=1e\+39 must be finite in float32"),
    "lr None": (lambda: adamw(lr=None), TypeError, "adamw_: lr=None is not a number; it must be finite"),
    "eps 1e39": (lambda: adamw(eps=1e39), ValueError, r"adamw_: eps=1e\+39 must be finite in float32"),
    "weight_decay 1e39": (lambda: adamw(weight_decay=1e39), ValueError, r"weight_decay=1e\+39 must be finite in"),
    "max_norm 1e-60": (lambda: ops.grad_norm([X], max_norm=1e-60), ValueError, "max_norm=1e-60 must be above 0"),
    "loss_scale": (
        lambda: ops.grad_norm([X], loss_scale=torch.tensor(-2.0)), ValueError, "loss_scale=-2.0 must be positive"
    ),
    "normalizer tensor 0": (lambda: policy_loss(normalizer=torch.tensor(0.0)), ValueError, "normalizer=0.0 must be"),
    "normalizer tensor -1": (
        lambda: policy_loss(normalizer=torch.tensor(-1), mask=torch.tensor([True, False, False])),
        ValueError, "normalizer=-1 must be",
    ),
    "normalizer elsewhere": (
        lambda: policy_loss(normalizer=torch.ones((), device="meta")), ValueError, "normalizer is on meta, logp on cpu"
    ),
    "temperature text": (lambda: ops.logprob(X, TARGETS, temperature="1"), TypeError, "'1' is not a number"),
    "temperature None": (lambda: ops.logprob(X, TARGETS, temperature=None), TypeError, "None is not a number"),
    "keep_bytes None": (
        lambda: ops.linear_logprob(X, W, TARGETS, keep_bytes=None), TypeError, "keep_bytes=None is not a number"
    ),
    "keep_bytes two": (
        lambda: ops.linear_logprob(X, W, TARGETS, keep_bytes=torch.ones(2)), TypeError, "keep_bytes=tensor.* is not a n"
    ),
    "scale text": (
        lambda: ops.attention(Q, Q, Q, CU, max_seqlen_q=3, scale="x"), TypeError, "attention: scale='x' is not a number"
    ),
    "clip_dual text": (lambda: policy_loss(clip_dual="x"), TypeError, "policy_loss: clip_dual='x' is not a number"),
    "clip_dual small": (lambda: policy_loss(clip_dual=1.1), ValueError, "clip_dual=1.1 must exceed 1 . clip_high"),
    "tis_cap text": (
        lambda: policy_loss(tis_cap="x", rollout_logp=torch.zeros(3)), TypeError, "tis_cap='x' is not a number"
    ),
    "tis_cap alone": (lambda: policy_loss(tis_cap=1.0), ValueError, "policy_loss: tis_cap=1.0 needs rollout_logp"),
    "betas None": (lambda: adamw(betas=None), TypeError, r"adamw_: betas=None; expected two numbers in \[0, 1\)"),
    "pack None": (lambda: ops.pack(None), TypeError, "pack: sequences is of type NoneType; expected a list"),
    "pack text": (lambda: ops.pack("ab"), TypeError, "pack: sequences is of type str; expected a list"),
    "pack ids": (lambda: ops.pack([1, 2]), TypeError, r"pack: sequences\[0\] is neither a tensor nor a list"),
    "pack texts": (lambda: ops.pack([[1], ["a"]]), TypeError, r"pack: sequences\[1\] is neither .*; pass token ids"),
    "pack 2^63": (lambda: ops.pack([[2**63]]), TypeError, r"pack: sequences\[0\] is neither .* below 2\^63; pass"),
    "unpack None": (lambda: ops.unpack(None, CU), TypeError, "unpack: flat is of type NoneType"),
    "unpack scalar": (lambda: ops.unpack(torch.ones(()), CU), ValueError, "unpack: flat is a scalar"),
    "unpack list": (lambda: ops.unpack(X, [0, 3]), TypeError, "unpack: cu_seqlens is of type list"),
    "unpack floats": (
        lambda: ops.unpack(X, torch.tensor([0.0, 3.0])), TypeError, r"unpack: cu_seqlens is \(2,\) torch.float32; ex"
    ),
    "qk_norm_rope_store None": (
        lambda: ops.qk_norm_rope_store(None, *[X] * 10), TypeError, "qk_norm_rope_store: q is of type NoneType"
    ),
    "qk_norm_rope_store v": (
        lambda: store(v=torch.ones(3, 2, 4)), ValueError, r"qk_norm_rope_store: k is \(3, 2, 8\), v \(3, 2, 4\), slots"
    ),
    "qk_norm_rope_store k": (
        lambda: store(k=torch.ones(2, 2, 8)), ValueError, r"qk_norm_rope_store: k is \(2, 2, 8\) .* to fit q"
    ),
    "qk_norm_rope_store slots": (
        lambda: store(slots=[0, 1, 2]), TypeError, "qk_norm_rope_store: slots is of type list"
    ),
    "qk_norm_rope_store gradient": (
        lambda: store(q_weight=torch.ones(8, requires_grad=True)), RuntimeError, "qk_norm_rope_store: q_weight requires"
    ),
    "ids_to_kept floats": (
        lambda: ops.ids_to_kept(torch.tensor([1.7, 2.2]), torch.tensor([0, 2]), 8),
        TypeError, r"ids_to_kept: ids is \(2,\) torch.float32; expected \[N\] int32 or int64",
    ),
    "ids_to_kept float offsets": (
        lambda: ops.ids_to_kept(torch.tensor([1, 2]), torch.tensor([0.0, 2.0]), 8),
        TypeError, r"ids_to_kept: offsets is \(2,\) torch.float32; expected \[T\+1\] int32",
    ),
    "ids_to_kept V": (
        lambda: ops.ids_to_kept(torch.tensor([1, 2]), torch.tensor([0, 2]), None),
        TypeError, "ids_to_kept: vocab_size=None is not an integer",
    ),
    "unpack_kept V": (
        lambda: ops.unpack_kept(torch.zeros(1, 1, dtype=torch.int32), 8.0), TypeError, "unpack_kept: vocab_size=8.0 is"
    ),
    "unpack_kept V < 0": (
        lambda: ops.unpack_kept(torch.zeros(1, 0, dtype=torch.int32), -1), ValueError, "unpack_kept: vocab_size=-1 must"
    ),
    "kept_to_ids V": (
        lambda: ops.kept_to_ids(torch.zeros(1, 1, dtype=torch.int32), None), TypeError, "kept_to_ids: vocab_size=None"
    ),
    "kept_to_ids kept": (
        lambda: ops.kept_to_ids(torch.zeros(1, 1), 8), ValueError, r"kept_to_ids: kept is \(1, 1\) torch.float32"
    ),
    "pack_kept list": (lambda: ops.pack_kept([[True]]), TypeError, "pack_kept: mask is of type list"),
    "unpack_kept list": (lambda: ops.unpack_kept([[1]], 8), TypeError, "unpack_kept: kept is of type list"),
    "ids_to_kept list": (lambda: ops.ids_to_kept([1], TARGETS, 8), TypeError, "ids_to_kept: ids is of type list"),
    # optimizer
    "generator to norm": (
        lambda: ops.grad_norm(x for x in [X]), TypeError, "grad_norm: grads is of type generator; expected a list"
    ),
    "one tensor": (lambda: adamw(grads=X), TypeError, "adamw_: grads is of type Tensor; expected a list"),
    "step 2^70": (lambda: adamw(step=2**70), ValueError, "adamw_: step=1180591620717411303424 must be a whole number"),
    "lr inf": (lambda: adamw(lr=math.inf), ValueError, "lr=inf must be finite"),
    "eps inf": (lambda: adamw(eps=math.inf), ValueError, "eps=inf must be finite"),
    "eps that fp32 has not": (lambda: adamw(eps=1e-50), ValueError, "eps=1e-50 must be finite in .* at least 1.4e-45"),
    "weight_decay inf": (lambda: adamw(weight_decay=math.inf), ValueError, "weight_decay=inf must be finite"),
    "betas": (lambda: adamw(betas=(0.9,)), ValueError, r"betas=\(0.9,\) must be two numbers"),
    "step": (lambda: adamw(step=1.5), ValueError, "step=1.5 must be a whole number"),
    "scale number": (lambda: adamw(scale=1.0), TypeError, "adamw_: scale=1.0 is not a tensor; expected one float32"),
    "no gradient": (
        lambda: adamw(grads=[None]), TypeError, r"grads\[0\] is NoneType, .*; leave a parameter without a gradient"
    ),
    "no gradient to norm": (
        lambda: ops.grad_norm([X, None]), TypeError, r"grad_norm: grads\[1\] is NoneType, .*without a gradient out"
    ),
    "no parameter": (lambda: adamw(params=[None]), TypeError, r"adamw_: params\[0\] is NoneType, expected a tensor$"),
    "loss_scale number": (lambda: ops.grad_norm([X], loss_scale=8.0), TypeError, "loss_scale=8.0 is not a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("length", (None, "x", 3.0, math.nan, math.inf, 1e300, 1j, -1, 2**31))
@pytest.mark.parametrize("argument", ("max_seqlen_q", "max_seqlen_k"))
@pytest.mark.parametrize("op", ("attention", "paged_attention"))
def test_lengths_are_integers(op: str, argument: str, length: Any) -> None:
    if (op, argument, length) == ("attention", "max_seqlen_k", None):
        with pytest.raises(ValueError, match="cu_seqlens_k is given without max_seqlen_k; pass both"):
            ops.attention(Q, Q, Q, CU, CU, max_seqlen_q=3)
        return
    longest = {"max_seqlen_q": 3, "max_seqlen_k": 3, argument: length}
    error, message = (
        (ValueError, "must be the") if isinstance(length, int) else (TypeError, "is not an integer; it must")
    )
    with pytest.raises(error, match=rf"{op}: {argument}={re.escape(repr(length))} {message}"):
        if op == "attention":
            ops.attention(Q, Q, Q, CU, CU, **longest)
        else:
            pages = torch.zeros(1, 4, *Q.shape[1:])
            table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
            ops.paged_attention(Q, pages, pages, table, CU, lengths, **longest)


def test_numbers_of_any_kind_are_taken() -> None:
    expected = ops.group_advantages(EIGHT, 2, eps=0.5)
    assert torch.equal(ops.group_advantages(EIGHT, 2, eps=Fraction(1, 2)), expected)
    assert ops.group_advantages(EIGHT, 2, eps=10**30).isfinite().all()
    logp = ops.logprob(X, TARGETS, temperature=0.5).logp
    assert torch.equal(ops.logprob(X, TARGETS, temperature=Fraction(1, 2)).logp, logp)
    assert ops.logprob(X, TARGETS, temperature=10**30).logp.isfinite().all()
    out = ops.attention(Q, Q, Q, CU, max_seqlen_q=3)[0]
    for length in (numpy.int64(3), torch.tensor(3), 2**31 - 1):
        assert torch.equal(ops.attention(Q, Q, Q, CU, max_seqlen_q=length)[0], out)


NUMBERS = {  # calls whose numbers reach a kernel
    "rms_norm": lambda n: ops.rms_norm(X, EIGHT, eps=n(0.5)),
    "rms_norm residual": lambda n: ops.rms_norm(X, EIGHT, eps=n(0.5), residual=X),
    "rms_norm backward": lambda n: ops.rms_norm(X.clone().requires_grad_(), EIGHT, eps=n(0.5)).sum().backward(),
    "qk_norm_rope": lambda n: ops.qk_norm_rope(Q, Q, EIGHT, EIGHT, n(0.5), TARGETS, COS),
    "qk_norm_rope_store": lambda n: store(eps=n(0.5)),
    "policy_loss clip": lambda n: policy_loss(clip_low=n(0.25), clip_high=n(0.5), clip_dual=n(3.0)),
    "policy_loss terms": lambda n: policy_loss(
        ref_logp=torch.zeros(3), entropy=torch.ones(3), rollout_logp=torch.zeros(3),
        kl_coef=n(0.5), entropy_coef=n(0.25), tis_cap=n(2.0), normalizer=n(3.0),
    ),
    "adamw_": lambda n: adamw(lr=n(0.5), betas=(n(0.5), n(0.75)), eps=n(0.5), weight_decay=n(0.5)),
    "grad_norm": lambda n: ops.grad_norm([X], max_norm=n(0.5)),
}  # fmt: skip


@pytest.mark.parametrize("kind", (numpy.float32, Fraction))
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_reach_the_kernels_as_floats(monkeypatch: pytest.MonkeyPatch, name: str, kind: Any) -> None:
    given, chosen = [], select.choose  # Triton does not take numpy's numbers, CPU kernels do

    def watched(op: str, device: str) -> select.Choice:
        choice = chosen(op, device)
        flat = lambda args: args[0] if hasattr(args[0], "_fields") else args  # a NamedTuple of inputs
        return replace(choice, fn=lambda *args: (given.extend(flat(args)), choice.fn(*args))[1])

    monkeypatch.setattr(select, "choose", watched)
    NUMBERS[name](kind)
    others = {type(a) for a in given if not isinstance(a, Tensor)}
    assert others <= {float, int, bool, str, list, tuple, type(None)} and float in others


SPARSE = {
    "linear: x": lambda s: ops.linear(s, W),
    "linear: weight": lambda s: ops.linear(X, s),
    "swiglu: gate_up": lambda s: ops.swiglu(s),
    "logprob: logits": lambda s: ops.logprob(s, TARGETS),
    "linear_logprob: hidden": lambda s: ops.linear_logprob(s, W, TARGETS),
    "attention: v": lambda s: ops.attention(Q, Q, Q.to_sparse().requires_grad_(s.requires_grad), CU, max_seqlen_q=3),
    "group_advantages: rewards": lambda s: ops.group_advantages(EIGHT.to_sparse(), 2),
    "gae: values": lambda s: ops.gae(EIGHT, EIGHT.to_sparse(), torch.tensor([0, 8]).int()),
    "unpack: flat": lambda s: ops.unpack(s, CU),
    "unpack: cu_seqlens": lambda s: ops.unpack(X, CU.to_sparse()),
    "pack_kept: mask": lambda s: ops.pack_kept(s),
    "unpack_kept: kept": lambda s: ops.unpack_kept(s, 8),
    "kept_to_ids: kept": lambda s: ops.kept_to_ids(s, 8),
    "ids_to_kept: ids": lambda s: ops.ids_to_kept(TARGETS.to_sparse(), torch.tensor([0, 3]), 8),
    "embedding: weight": lambda s: ops.embedding(torch.tensor([0, 1]), s),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors(name: str) -> None:
    for recorded in (False, True):
        sparse = X.to_sparse().requires_grad_(recorded)
        with pytest.raises(TypeError, match=f"{name} is torch.sparse_coo; expected a dense tensor, pass .*to_dense"):
            SPARSE[name](sparse)


@pytest.mark.parametrize("name", REFUSED)
def test_says_which_argument_and_what_to_do(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_advantages_are_not_named_log_probabilities() -> None:
    with pytest.raises(TypeError, match=r"advantages is torch.bfloat16, expected torch.float32; .*float32$"):
        policy_loss(advantages=torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="rounded to fewer bits"):
        policy_loss(ref_logp=torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("op", ("linear", "linear_logprob", "rms_norm", "embedding"))
def test_main_grad_that_does_not_fit(op: str) -> None:
    weight = torch.randn(8, 8).requires_grad_()
    weight.main_grad = torch.zeros(8, 7)  # type: ignore[attr-defined]
    run = {
        "linear": lambda: ops.linear(X, weight),
        "linear_logprob": lambda: ops.linear_logprob(X, weight, TARGETS).logp,
        "embedding": lambda: ops.embedding(TARGETS, weight),
        "rms_norm": lambda: ops.rms_norm(X, norm, 0.1),
    }
    norm = torch.ones(8).requires_grad_()
    norm.main_grad = torch.zeros(7)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"^{op}: main_grad is .*; expected a contiguous float32 tensor"):
        run[op]().sum().backward()
    weight.main_grad = norm.main_grad = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=rf"^{op}: main_grad is of type int; expected a tensor"):
        run[op]().sum().backward()
