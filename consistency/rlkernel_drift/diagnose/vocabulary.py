"""Changes of single tokens' logits: biases and masks, and fits of the tokens that explain a side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Computation, Context, Rows

_MOST_TOKENS, _MOST_BIASES = 32, 12  # tokens that a fit masks, or biases
_NEWTON = 12  # steps
_GAIN = 0.997  # share of the error that a further masked token may leave


def known(context: Context, base: Computation) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and log-probabilities of the tokens whose target is finite."""
    z = context.logits(base)
    known = torch.isfinite(context.target)
    there = known.to(z.device)
    return z[there], context.sequences.targets.to(z.device)[there], context.target.to(z.device)[there]


def _masked(z: Tensor, rows: Rows, out: Tensor) -> Tensor:
    """Minus infinity where `out` [N, V] is true, except for the sampled tokens."""
    return z.masked_fill(out, -torch.inf).scatter(1, rows.index(z), z.gather(1, rows.index(z)))


def ngrams(z: Tensor, rows: Rows, size: int) -> Tensor:
    """Masks the tokens that would complete an n-gram again; a sampled one gets a very small logit."""
    z, n = z.clone(), 0
    for ids, places in zip(rows.sequences.ids, rows.sequences.rows, strict=True):
        words = ids.tolist()
        for row in places.tolist():
            last = words[row + 2 - size : row + 1]
            starts = (k for k in range(row + 2 - size) if words[k : k + size - 1] == last)
            banned = [words[k + size - 1] for k in starts if k + size - 1 <= row]
            z[n, banned] = -torch.inf
            n += 1
    own = rows.sampled(z)[:, None]
    return z.scatter(1, rows.index(z), torch.where(own.isinf(), -30.0, own))


def cutoff(least: float, temperature: float, z: Tensor, rows: Rows) -> Tensor:
    """Masks the tokens below a probability; the likeliest one is always kept."""
    p = (z / temperature).softmax(-1)
    return _masked(z, rows, ~(p >= p.amax(-1, keepdim=True).clamp(max=least)))


def without_likeliest(z: Tensor, rows: Rows, least: float) -> Tensor:
    """Masks all tokens above a probability except the unlikeliest of them."""
    p = z.softmax(-1)
    above = p >= least
    last = p.masked_fill(~above, 2.0).amin(-1, keepdim=True)
    return _masked(z, rows, above & (p > last))


def unended(context: Context) -> Callable[[Tensor, Rows, int], Tensor]:
    """Masks the tokens that end a sequence in the first tokens of each completion."""
    ends = getattr(context.model.config, "eos_token_id", None) if hasattr(context.model, "config") else None
    ends = [t for t in (ends if isinstance(ends, list) else [ends]) if isinstance(t, int)]

    def change(z: Tensor, rows: Rows, count: int) -> Tensor:
        early = torch.cat([row - row[0] < count for row in rows.sequences.rows]).to(z.device)
        out = torch.zeros_like(z, dtype=torch.bool)
        out[:, ends] = early[:, None]
        return _masked(z, rows, out)

    return change


def biased(z: Tensor, rows: Rows, biases: dict[int, float]) -> Tensor:
    """Adds a bias to the logits of some tokens."""
    z = z.clone()
    z[:, list(biases)] += torch.tensor(list(biases.values()), device=z.device)
    return z


def _newton(z: Tensor, targets: Tensor, own: Tensor, chosen: list[int], bias: Tensor) -> tuple[Tensor, float]:
    """Gauss-Newton steps of the biases of chosen tokens: log p changes by b[y] - log sum p exp(b)."""
    one = torch.zeros(len(z), len(chosen), dtype=torch.float64)
    place = {v: k for k, v in enumerate(chosen)}
    hit = torch.tensor([place.get(int(t), -1) for t in targets])
    one[hit >= 0, hit[hit >= 0]] = 1.0
    p = z.log_softmax(-1).exp()[:, chosen].double().cpu()
    logp = z.log_softmax(-1).gather(1, targets[:, None])[:, 0].double().cpu()
    d = own.double().cpu() - logp
    error = torch.inf
    for _ in range(_NEWTON):
        mass = (p * torch.expm1(bias)).sum(1) + 1
        rest = d - one @ bias + mass.clamp(min=1e-9).log()
        if not float(rest.abs().mean()) < 0.999 * error:
            break
        error, kept = float(rest.abs().mean()), bias
        slope = one - p * bias.exp() / mass[:, None]
        weight = 1 / (rest.abs() + 0.1 * rest.abs().mean()).clamp(min=1e-9)
        gram = (slope * weight[:, None]).t() @ slope
        gram += 1e-9 * gram.diagonal().mean() * torch.eye(len(chosen), dtype=torch.float64)
        bias = (bias + torch.linalg.solve(gram, (slope * weight[:, None]).t() @ rest)).clamp(-30, 30)
    return kept, error


def biases(context: Context, base: Computation) -> dict[int, float] | None:
    """Tokens added one at a time, by how much their biases explain, until one adds little."""
    z, targets, own = known(context, base)
    z = z / (base.sampling.temperature or 1.0)
    logp = z.log_softmax(-1)
    one = torch.zeros_like(logp).scatter(1, targets[:, None], 1.0)
    slope = one - logp.exp()
    norm = slope.square().sum(0).clamp(min=1e-9)
    chosen: list[int] = []
    bias = torch.zeros(0, dtype=torch.float64)
    first = error = float((own - logp.gather(1, targets[:, None])[:, 0]).abs().mean())
    while len(chosen) < _MOST_BIASES:
        now = z.clone()
        now[:, chosen] += bias.to(z)
        rest = own - now.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        score = (slope * rest[:, None]).sum(0).square() / norm
        score[chosen] = -1
        best = None
        for v in score.topk(min(3, len(score))).indices.tolist():
            tried = _newton(z, targets, own, [*chosen, v], torch.cat([bias, torch.zeros(1, dtype=torch.float64)]))
            if best is None or tried[1] < best[0]:
                best = tried[1], tried[0], v
        if best is None or best[0] > 0.93 * error:
            break
        error, bias = best[0], best[1]
        chosen.append(best[2])
    if error > 0.7 * first:
        return None
    return dict(zip(chosen, bias.tolist(), strict=True))


def all_biases(context: Context, base: Computation) -> dict[int, float] | None:
    """A bias on every token; None unless there are more log-probabilities than entries of the vocabulary."""
    z, targets, own = known(context, base)
    size = z.shape[1]
    if len(own) < 1.1 * size:
        return None
    z = z / (base.sampling.temperature or 1.0)
    bias, _ = _newton(z, targets, own, list(range(size)), torch.zeros(size, dtype=torch.float64))
    return dict(enumerate(bias.tolist()))


def masked(z: Tensor, rows: Rows, value: dict[str, Any]) -> Tensor:
    """Masks the tokens that `mask` found."""
    out = torch.zeros_like(z, dtype=torch.bool)
    out[:, json.loads(value["tokens"]) if "tokens" in value else slice(value["first"], value["last"] + 1)] = True
    return _masked(z, rows, out)


def mask(context: Context, base: Computation) -> dict[str, Any] | None:
    """The tokens to mask that explain most: a few, or all ids from or up to one.

    Masking tokens of probability p adds -log(1 - p) to the log-probabilities of the others.
    """
    z, targets, own = known(context, base)
    logp = (z / (base.sampling.temperature or 1.0)).log_softmax(-1)
    d = own - logp.gather(1, targets[:, None])[:, 0]
    p = logp.exp().scatter(1, targets[:, None], 0.0)
    size, before = p.shape[1], float(d.abs().mean())
    left = lambda mass: (d[:, None] + torch.log1p(-mass.clamp(max=1 - 1e-6))).abs().mean(0)
    below = p.cumsum(1)
    above = below[:, -1:] - below + p
    tail, head = left(above), left(below)
    found: list[tuple[float, dict[str, Any]]] = [
        (float(tail.min()), {"first": int(tail.argmin()), "last": size - 1}),
        (float(head.min()), {"first": 0, "last": int(head.argmin())}),
    ]
    chosen: set[int] = set()
    best = lambda errors: (float(errors.min()), int(errors.argmin()))
    mass, error, sign = torch.zeros_like(p[:, :1]), before, torch.ones(size, device=p.device)
    while len(chosen) < _MOST_TOKENS:
        # Adds or removes one token; if that gains nothing and most is explained, replaces one by another.
        now, token = best(left(mass + sign * p))
        gone: tuple[int, ...] = ()
        if now > _GAIN * error and len(chosen) > 1 and error < 0.3 * before:
            moves = [(best(left(mass - p[:, v : v + 1] + sign * p)), (v,)) for v in chosen]
            (now, token), gone = min(moves, key=lambda move: move[0])
        if now > _GAIN * error:
            break
        error = now
        for v in (token, *gone):
            mass = mass + sign[v] * p[:, v : v + 1]
            sign[v] *= -1
            chosen ^= {v}
    if chosen:
        found.append((error, {"tokens": json.dumps(sorted(chosen))}))
    error, value = min(found, key=lambda each: each[0])
    return value if error < 0.7 * before else None
