"""What the mismatch does to the gradient: that of these tokens weighted by the true ratios, and unweighted.

The tokens were drawn from the rollout's distribution; a trainer that takes them for its own computes the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.verdict import Consequence

_MAX_PARAMETERS = 2_000_000_000
_MAX_TOKENS = 512


def gradient_consequence(context: Context, rollout: Tensor, train: Tensor, seed: int = 0) -> Consequence | None:
    """Cosine of the two gradients, with advantages of one sign a sequence drawn at random.

    Args:
        context: of the train side; rollout, train: [N] log-probabilities of its counted tokens.
    """
    model = context.model.in_dtype(torch.float32)
    parameters = list(model.parameters())
    if sum(p.numel() for p in parameters) > _MAX_PARAMETERS or not context.sequences.counted:
        return None
    generator = torch.Generator().manual_seed(seed)
    sign = (torch.rand(len(context.sequences), generator=generator) < 0.5).float() * 2 - 1
    ratio = (train - rollout).clamp(-20, 20).exp()
    known = torch.isfinite(ratio)
    weighted = [torch.zeros_like(p) for p in parameters]
    plain = [torch.zeros_like(p) for p in parameters]
    seen = 0
    for p in parameters:
        p.requires_grad_(True)
    try:
        for i in range(len(context.sequences)):
            mine = context.sequences.owner == i
            logp = _logp(context, model, i)
            weight = torch.where(known[mine], ratio[mine], torch.zeros(())).to(logp.device)
            for target, w in ((weighted, weight), (plain, (weight > 0).float())):
                loss = -(logp * w * sign[i]).sum()
                grads = torch.autograd.grad(loss, parameters, retain_graph=target is weighted, allow_unused=True)
                for total, g in zip(target, grads, strict=True):
                    if g is not None:
                        total += g
            seen += int(mine.sum())
            if seen >= _MAX_TOKENS:
                break
    finally:
        for p in parameters:
            p.requires_grad_(False)
    dot = lambda a, b: sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    scale = (dot(weighted, weighted) * dot(plain, plain)) ** 0.5
    if scale == 0:
        return None
    cosine, length = dot(weighted, plain) / scale, (dot(plain, plain) / dot(weighted, weighted)) ** 0.5
    return Consequence(
        name="gradient",
        setting=f"{seen} tokens, advantages of random sign",
        cosine=cosine,
        length=length,
        words=f"cosine {cosine:.4f} between the gradient and the one with true ratios, {length:.3f} times as long",
    )


def _logp(context: Context, model: object, i: int) -> Tensor:
    sequences = context.sequences
    device = context.model.device
    out = model.base_model(  # type: ignore[attr-defined]
        input_ids=sequences.ids[i][None].to(device),
        position_ids=sequences.positions[i][None].to(device),
        attention_mask=torch.ones_like(sequences.ids[i][None]).to(device),
        use_cache=False,
    ).last_hidden_state[0]
    head = model.get_output_embeddings()  # type: ignore[attr-defined]
    logits = torch.nn.functional.linear(out[sequences.rows[i].to(device)].float(), head.weight.float(), head.bias)
    logits = logits / (context.sampling.temperature or 1.0)
    targets = sequences.targets[sequences.owner == i].to(device)
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
