"""Plain torch for every op: the control (`ops.stock()`, `--backend torch`) and the baseline of the accuracy tests.

These functions do not follow the contract. Arguments and results are those of the public ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.adamw import adamw

from rlkernel.kernels.adamw import AdamwInputs
from rlkernel.kernels.policy_loss import PolicyLossInputs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r = x + residual
    return rms_norm(r, weight, eps), r


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions][:, None].to(q.dtype).chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin

    return rotate(q), rotate(k)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def group_advantages(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    rows = rewards.view(-1, group_size)
    if mode == "none" or rewards.numel() == 0:
        return rewards.clone()
    if group_size == 1:
        return torch.zeros_like(rewards)
    out = rows - rows.mean(1, keepdim=True)
    if mode == "leave_one_out":
        out = out * (group_size / (group_size - 1))
    elif normalize_std:
        out = out / ((rows.std(1, keepdim=True) if mode == "group" else rewards.std()) + eps)
    return out.view(-1)


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    if rewards.numel() == 0:
        return rewards.clone(), rewards.clone()
    lengths = cu_seqlens.diff()
    r, v = (pad_sequence(x.split(lengths.tolist()), batch_first=True) for x in (rewards, values))
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    columns = [torch.zeros_like(delta[:, 0])]
    for column in reversed(delta.unbind(1)):
        columns.append(column + gamma * lam * columns[-1])
    inside = torch.arange(delta.shape[1], device=delta.device) < lengths[:, None]
    advantages = torch.stack(columns[:0:-1], dim=1)[inside]
    return advantages, advantages + values


def policy_loss(x: PolicyLossInputs) -> tuple[Tensor, Tensor, Tensor]:
    batch, (t,) = x.cu_seqlens.shape[0] - 1, x.logp.shape
    lengths = x.cu_seqlens.diff().long()
    owner = torch.repeat_interleave(torch.arange(batch, device=x.logp.device), lengths, output_size=t)
    on = torch.ones_like(x.logp, dtype=torch.bool) if x.mask is None else x.mask

    def keep(v: Tensor) -> Tensor:
        return v.masked_fill(~on, 0.0)

    def per_sequence(v: Tensor) -> Tensor:
        return v.new_zeros(batch).index_add(0, owner, v)

    n = per_sequence(on.float())
    total = n.sum()
    logp, old = keep(x.logp), keep(x.old_logp.detach())
    a = keep(x.advantages[owner] if x.advantages.shape[0] == batch else x.advantages)
    log_ratio = logp - old
    ratio = torch.exp((per_sequence(log_ratio) / n.clamp(min=1))[owner] if x.sequence_ratio else log_ratio)
    low, high = ratio < 1 - x.clip_low, ratio > 1 + x.clip_high
    dual = torch.zeros_like(on)
    if x.loss_type == "cispo":
        loss = -ratio.clamp(1 - x.clip_low, 1 + x.clip_high).detach() * a * logp
    elif x.loss_type == "reinforce":
        low, high = torch.zeros_like(on), torch.zeros_like(on)
        loss = -a * logp
    else:
        gain = torch.minimum(ratio * a, ratio.clamp(1 - x.clip_low, 1 + x.clip_high) * a)
        if x.clip_dual is not None:
            dual = (a < 0) & (ratio > x.clip_dual)
            gain = torch.where(a < 0, torch.maximum(gain, x.clip_dual * a), gain)
        loss, low, high = -gain, low & (a < 0), high & (a > 0)
    zero = torch.zeros_like(logp)
    tis = drift = kl = entropy = zero
    tis_cut = torch.zeros_like(on)
    if x.rollout_logp is not None:
        rollout = keep(x.rollout_logp.detach())
        drift = (logp - rollout).abs()
        if x.tis_cap is not None:
            raw = torch.exp(old - rollout)
            tis, tis_cut = raw.clamp(max=x.tis_cap), raw > x.tis_cap
            loss = loss * tis
    if x.ref_logp is not None:
        d = logp - keep(x.ref_logp.detach())
        kl = d if x.kl_type == "k1" else d.square() / 2 if x.kl_type == "k2" else torch.exp(-d) - 1 + d
        loss = loss + x.kl_coef * kl
    if x.entropy is not None:
        entropy = keep(x.entropy)
        loss = loss - x.entropy_coef * entropy
    loss = keep(loss)
    if x.loss_type in ("grpo", "gspo"):
        loss = per_sequence(loss) / n.clamp(min=1)
    by_tokens = x.loss_type in ("bnpo", "dapo", "cispo")
    denominator = total.clamp(min=1) if by_tokens else torch.full_like(total, max(1, batch))
    normalizer = x.normalizer if x.divisor is None else torch.full_like(total, x.divisor)
    if normalizer is not None:
        denominator = torch.where(total > 0, normalizer, denominator)
    with torch.no_grad():
        k3 = torch.exp(log_ratio) - 1 - log_ratio
        means = [keep(v).sum() / total.clamp(min=1) for v in (ratio, -log_ratio, k3, kl, entropy, tis, drift)]
        ends = [ratio[on].min(), ratio[on].max(), drift[on].max()] if bool(on.any()) else [total.new_zeros(())] * 3
        counts = [total, (n > 0).sum(), *((cut & on).sum() for cut in (low, high, dual, tis_cut))]
        shares = [c / total.clamp(min=1) for c in counts[2:]]
    return loss.sum() / denominator, torch.stack([*means, *ends, *shares]), torch.stack([c.long() for c in counts])


def adamw_(x: AdamwInputs) -> None:
    if x.scale is None or bool(torch.isfinite(x.scale)):
        adamw(
            x.masters,
            [g.float() if x.scale is None else g.float() * x.scale for g in x.grads],
            x.exp_avgs,
            x.exp_avg_sqs,
            [],
            [torch.tensor(float(x.step - 1)) for _ in x.masters],
            foreach=x.masters[0].is_cuda,
            amsgrad=False,
            beta1=x.beta1,
            beta2=x.beta2,
            lr=x.lr,
            weight_decay=x.weight_decay,
            eps=x.eps,
            maximize=False,
        )
        for param, master in zip(x.params, x.masters, strict=bool(x.params)):
            param.copy_(master)
    if x.zero_grad:
        torch._foreach_zero_(x.grads)


def grad_norm(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    norm = torch.linalg.vector_norm(norms)
    by = torch.ones_like(norm) if loss_scale is None else loss_scale
    norm = norm / by
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / norm).clamp(max=1.0)
    scale = torch.where(torch.isfinite(norm), factor / by, torch.nan)
    return norm.double(), scale, norms.double().square()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """torch's scaled_dot_product_attention per sequence; sequences of one shape share a call."""
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    shapes: dict[tuple[int, int], list[int]] = {}
    for b in range(len(cu_q) - 1):
        shapes.setdefault((cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]), []).append(b)
    outs, tops, order = [], [], []
    for (nq, nk), batch in shapes.items():
        if nq == 0:
            continue
        rows = torch.tensor([list(range(cu_q[b], cu_q[b + 1])) for b in batch], device=q.device).view(-1)
        keys = torch.tensor([list(range(cu_k[b], cu_k[b + 1])) for b in batch], device=q.device).view(-1)
        split = lambda x, index, n: x[index].view(len(batch), n, *x.shape[1:]).transpose(1, 2)  # noqa: B023
        out, top = _sdpa(split(q, rows, nq), split(k, keys, nk), split(v, keys, nk), scale, window, causal)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        tops.append(top.transpose(1, 2).flatten(0, 1))
        order.append(rows)
    if not outs:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    back = torch.argsort(torch.cat(order))
    return torch.cat(outs)[back], torch.cat(tops)[back]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp of queries [n,H,Lq,D], which are the last tokens of the keys [n,HK,Lk,D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    nq, nk = q.shape[2], k.shape[2]
    distance = torch.arange(nk - nq, nk, device=q.device)[:, None] - torch.arange(nk, device=q.device)
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden if window is None else hidden | (distance >= window)
    mask = torch.zeros(nq, nk, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    if not causal or (nq == nk and window is None):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    with torch.no_grad():
        top = torch.logsumexp((q @ k.transpose(2, 3)).float() * scale + mask, -1)
    return out, top


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    lens, page = seq_lens_k.tolist(), k_cache.shape[1]
    slots = [block_table[b, torch.arange(n, device=q.device) // page] * page for b, n in enumerate(lens)]
    offsets = [torch.arange(n, device=q.device) % page for n in lens]
    index = torch.cat(slots) + torch.cat(offsets)
    cu_k = torch.nn.functional.pad(seq_lens_k.cumsum(0), (1, 0)).to(torch.int32)
    k, v = k_cache.flatten(0, 1)[index], v_cache.flatten(0, 1)[index]
    return attention(q, k, v, cu_seqlens_q, cu_k, scale, window)


def logprob(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.float()
    if inv_temperature is not None:
        z = z * inv_temperature[:, None]
    if kept is not None:
        z = z.masked_fill(~_kept_mask(kept, z.shape[1]), -torch.inf)
    logp = F.log_softmax(z, dim=-1)
    selected = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return selected, entropy, torch.logsumexp(z.detach(), dim=-1)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return logprob(F.linear(hidden, weight), targets, inv_temperature, kept)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    greedy = temperature == 0
    z = full = logits / torch.where(greedy, 1.0, temperature)[:, None]
    mask = None
    if top_k is not None or top_p is not None or min_p is not None:
        keep = torch.ones_like(z, dtype=torch.bool)
        ranked, order = z.sort(dim=-1, descending=True)
        if top_k is not None:
            k = torch.where((top_k <= 0) | (top_k > z.shape[1]), z.shape[1], top_k).long()
            keep &= z >= ranked.gather(-1, k[:, None] - 1)
        if top_p is not None:
            share = ranked.masked_fill(~keep.gather(-1, order), -torch.inf).softmax(dim=-1)
            inside = share.cumsum(dim=-1) - share < top_p[:, None]
            keep &= torch.zeros_like(keep).scatter(-1, order, inside)
        if min_p is not None:
            p = z.softmax(dim=-1)
            keep &= p >= min_p[:, None] * p.amax(dim=-1, keepdim=True)
        keep |= greedy[:, None]
        z = z.masked_fill(~keep, -torch.inf)
        mask = _pack_mask(keep)
    tokens = torch.where(greedy, logits.argmax(dim=-1), torch.multinomial(z.softmax(dim=-1), 1)[:, 0])
    logp, full_logp = (x.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0] for x in (z, full))
    return tokens, logp, mask, full_logp


def _kept_mask(kept: Tensor, vocab_size: int) -> Tensor:
    bits = (kept[:, :, None] >> torch.arange(32, dtype=torch.int32, device=kept.device)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _pack_mask(mask: Tensor) -> Tensor:
    bits = F.pad(mask, (0, -mask.shape[1] % 32)).unflatten(1, (-1, 32)).to(torch.int64)
    words = (bits << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
