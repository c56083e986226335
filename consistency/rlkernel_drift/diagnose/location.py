"""Where a difference arises: which tokens it affects, which operator fails, which tensor it points to.

A recorded operator is replayed on its recorded inputs, and its error is compared with its rounding on the same inputs.
Without a recording, gradients of the log-probabilities show which tensor's random change explains the differences best.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from rlkernel_drift.capsule import Capsule, Floor, Tensor, layer_of
from rlkernel_drift.diagnose.context import RACED, Context, Residual, residual
from rlkernel_drift.gates import first_few
from rlkernel_drift.scoring.operators import as_torch, forward, points, replay, spliced
from rlkernel_drift.scoring.semantics import processed
from rlkernel_drift.scoring.sequences import Sequences

_EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
OUTLIER = 3.0
"""Local error in multiples of the rounding, beyond which an operator computes something else."""
_MAX_SEQUENCES = 4  # that are replayed


@dataclass(frozen=True)
class LocalError:
    """Relative error of an operator replayed on recorded inputs, and its rounding on the same inputs.

    Attributes:
        tokens, channels: [tokens of the replayed sequences], [width] bool: where the error is more than `OUTLIER` times
            the rounding.
    """

    error: float
    rounding: float
    tokens: torch.Tensor
    channels: torch.Tensor

    @property
    def ratio(self) -> float:
        """About 1 for a healthy operator, infinite for one that makes NaN of finite inputs."""
        return self.error / self.rounding


def recorded_sequences(capsule: Capsule) -> list[tuple[int, np.ndarray]]:
    """Sequences of which every token was recorded with values: (number, rows in the recording)."""
    operators = capsule.operators
    values = [t for t in operators.values.values() if t.values.ndim == 2]
    if not values:
        return []
    rows = np.arange(capsule.tokens) if operators.rows is None else operators.rows
    found = []
    for i in range(capsule.sequences):
        part = capsule.sequence(i)
        low, high = np.searchsorted(rows, (part.start, part.stop))
        if high - low == part.stop - part.start:
            found.append((i, np.arange(low, high)))
    return found[:_MAX_SEQUENCES]


def local_errors(context: Context, capsule: Capsule) -> dict[str, LocalError] | None:
    """Local errors of the recorded operators, in their order; None if no sequence was recorded completely."""
    chosen = recorded_sequences(capsule)
    if not chosen:
        return None
    values = {n: t for n, t in capsule.operators.values.items() if t.values.ndim == 2}
    sums: dict[str, _Sums] = {}
    wide = _WIDE[context.dtype]
    with context.model.edited(context.merged, context.dtype), context.model.edited(context.merged, wide):
        for i, rows in chosen:
            part = capsule.sequence(i)
            ids = torch.from_numpy(capsule.ids[part].astype(np.int64))
            positions = torch.from_numpy(capsule.positions[part].astype(np.int64))
            recorded = {n: as_torch(Tensor(t.values[rows], t.dtype)) for n, t in values.items()}
            narrow = replay(context.model.in_dtype(context.dtype), ids, positions, recorded)
            exact = replay(context.model.in_dtype(wide), ids, positions, recorded)
            for name, value in recorded.items():
                if name in narrow:
                    layer, _, kind = name.rpartition(".")
                    routed = kind in ("experts", "mlp") and f"{layer}.experts" in narrow
                    near_ties = routed and context.dtype != torch.float32
                    found = sums.setdefault(name, _Sums(_EPS[context.dtype] / 2, near_ties))
                    found.add(value, narrow[name].cpu(), exact[name].cpu())
    return {name: found.local_error() for name, found in sums.items()}


class _Sums:
    """Squares of an operator's error, of its rounding and of its exact outputs, by token and by channel.

    Args:
        least: relative rounding that every operator may have.
        near_ties: whether single tokens may go to other experts by rounding alone; then the worst ones do not count.
    """

    def __init__(self, least: float, near_ties: bool) -> None:
        self.least, self.near_ties = least, near_ties
        self.by_token: list[torch.Tensor] = []  # [3, L] of each sequence
        self.by_channel = torch.zeros(3, 1)  # [3, width]

    def add(self, recorded: torch.Tensor, narrow: torch.Tensor, exact: torch.Tensor) -> None:
        # Where the inputs make the replay NaN as well, the fault is in an earlier operator.
        there = narrow.isfinite() & exact.isfinite()
        wide, narrow, exact = (torch.where(there, x.double(), 0.0) for x in (recorded, narrow, exact))
        # The nearer replay counts, because an engine may keep more digits inside an operator than transformers does.
        errors = ((wide - x).square().nan_to_num(torch.inf, torch.inf) for x in (narrow, exact))
        squares = torch.stack([min(errors, key=lambda e: float(e.sum())), (narrow - exact).square(), exact.square()])
        self.by_token.append(squares.sum(2))
        self.by_channel = self.by_channel + squares.sum(1)

    def local_error(self) -> LocalError:
        tokens = torch.cat(self.by_token, 1)
        counted = tokens[:, tokens[0].argsort(descending=True)[RACED - 1 :]] if self.near_ties else tokens
        error, rounding, norm = (float(x) for x in counted.sum(1))
        size = lambda x: (x / max(norm, 1e-60)) ** 0.5
        return LocalError(
            size(error), max(size(rounding), self.least), self._wrong(tokens), self._wrong(self.by_channel)
        )

    def _wrong(self, squares: torch.Tensor) -> torch.Tensor:
        error, rounding, norm = squares
        return ~(error <= OUTLIER**2 * torch.maximum(rounding, self.least**2 * norm))


_OF_A_CLASS = 0.8
"""Share of the tokens of a class that must be wrong for the class to be named."""
_WITH_HEADS = ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "attention")


def part_of(name: str, local: LocalError, context: Context, capsule: Capsule) -> str:
    """The tokens, and the heads or channels, of an operator's output that are wrong, in words; "" where all are."""
    if not local.tokens.any():
        return ""
    head = context.model.head_width if name.rpartition(".")[2] in _WITH_HEADS else 0
    words = [_tokens_in_words(local.tokens, capsule), _channels_in_words(local.channels, head)]
    return "".join(f", in {word}" for word in words if word)


def _tokens_in_words(wrong: torch.Tensor, capsule: Capsule) -> str:
    """The class of tokens that are wrong; "" where most are."""
    chosen = [i for i, _ in recorded_sequences(capsule)]
    parts = [capsule.sequence(i) for i in chosen]
    owner = torch.cat([torch.full((part.stop - part.start,), i) for i, part in zip(chosen, parts, strict=True)])
    place = torch.cat([torch.arange(part.stop - part.start) for part in parts])
    sampled = torch.cat([torch.from_numpy(np.cumsum(capsule.mask[part]) > 0) for part in parts])
    first, last = (int(x) for x in place[wrong].aminmax())
    affected = owner[wrong].unique().tolist()
    exactly = lambda where: not wrong[~where].any() and float(wrong[where].float().mean()) > _OF_A_CLASS
    everywhere = lambda where: set(affected) == set(owner[where].tolist())
    for where, words in ((sampled, "tokens of completions"), (~sampled, "tokens of prompts")):
        if not where.all() and exactly(where):
            return words
    if exactly(torch.ones_like(wrong)):
        return ""
    for where, words in (
        (place >= first, f"tokens from number {first} of each sequence on"),
        (place <= last, f"tokens up to number {last} of each sequence"),
        (torch.isin(owner, torch.tensor(affected)), f"sequence{'s' * (len(affected) > 1)} {first_few(affected, 8)}"),
    ):
        if exactly(where) and everywhere(where):
            return words
    return f"{int(wrong.sum())} of {len(wrong)} tokens"


def _channels_in_words(wrong: torch.Tensor, head: int) -> str:
    """The heads that are wrong, each `head` channels wide, or the channels of an operator without heads (0).

    "" where all heads or most channels are wrong.
    """
    width, at = len(wrong), wrong.nonzero()[:, 0]
    if head and width % head == 0:
        chosen, heads = wrong.view(-1, head).any(1).nonzero()[:, 0].tolist(), width // head
        plural = "s" * (len(chosen) > 1)
        return f"head{plural} {first_few(chosen, 8)} of {heads}" if 0 < len(chosen) < heads else ""
    if not 0 < len(at) <= width // 2:
        return ""
    first, last = int(at[0]), int(at[-1])
    return f"channels {first} to {last} of {width}" if last - first < len(at) else f"{len(at)} of {width} channels"


def splice(context: Context, capsule: Capsule) -> list[float]:
    """Mean |difference| that is left when layer k's output is replaced by the recorded one, for every layer.

    The first entry is the difference without a replacement.

    Args:
        context: of the recorded sequences only, in the order of `recorded_sequences`.
    """
    layers = [n for n in capsule.operators.values if n.startswith("layers.") and n.endswith(".output")]
    rows_of = dict(recorded_sequences(capsule))
    sequences = context.sequences
    numbers = [capsule.place(int(sequences.token[sequences.owner == k][0]))[0] for k in range(len(sequences))]
    model = context.model.in_dtype(context.dtype)
    score = lambda hidden: processed(
        context.model.head(hidden, context.head), sequences.targets.to(hidden.device), context.sampling
    ).cpu()
    left = []
    with context.model.edited(context.merged, context.dtype):
        for name in (None, *layers):
            hidden = []
            for k, number in enumerate(numbers):
                ids, positions = sequences.ids[k], sequences.positions[k]
                if name is None:
                    out = forward(model, ids, positions)
                else:
                    tensor = capsule.operators.values[name]
                    output = as_torch(Tensor(tensor.values[rows_of[number]], tensor.dtype))
                    out = spliced(model, ids, positions, name, output)
                hidden.append(out[sequences.rows[k].to(out.device)])
            left.append(float((score(torch.cat(hidden)) - context.target).abs().nanmean()))
    return left


# ---- which tokens --------------------------------------------------------------------------------------------------

_FAR = 4.0  # times the floor's 99% quantile, beyond which a token differs
_CLEAN = 0.06  # share of differing tokens up to which a request matches
_COVERED = 0.9  # share of the differing tokens that the first or later tokens of the completions must hold
_WHOLE = 0.3  # share of differing tokens from which on requests are named before tokens


@dataclass(frozen=True)
class Region:
    """A part of the tokens that differs while the rest matches the model.

    Attributes:
        kind: requests, later, earlier, steps (every n-th token of the completions) or tokens. where: [N] the tokens.
        words: the part in words.
    """

    kind: Literal["requests", "later", "earlier", "steps", "tokens"]
    where: torch.Tensor
    words: str
    places: list[int]


def regions(context: Context, as_is: torch.Tensor) -> list[Region]:
    """Parts of the tokens that carry the difference, largest first; empty where all tokens may."""
    assert context.floor is not None
    owner, count = context.sequences.owner, len(context.sequences)
    size = (as_is - context.target).abs()
    bad = ~(size <= _FAR * context.floor.p99)
    mine = [(owner == i).nonzero()[:, 0] for i in range(count)]
    share = torch.tensor([float(bad[m].float().mean()) for m in mine])
    clean = lambda where: bool(where.any()) and float(size[where].mean()) <= 2 * context.floor.mean
    found: list[Region] = []
    affected = [i for i in range(count) if share[i] > _CLEAN]
    if 0 < len(affected) < count:
        where = torch.isin(owner, torch.tensor(affected))
        if clean(~where):
            names = first_few(affected, 8)
            found.append(Region("requests", where, f"{len(affected)} of {count} requests ({names})", affected))
    found += _later(context, size, mine)
    total = int(bad.sum())
    place = torch.cat([row - row[0] for row in context.sequences.rows])
    for period, first in ((n, i) for n in range(2, _PERIODS) for i in range(n)):
        if int(place.max()) < first + 2 * period:
            continue
        where = place % period == first
        if clean(~where) and float(bad[where].float().mean()) > _EACH:
            words = f"one token in {period} of the completions, from token {first + 1} on"
            return [Region("steps", where, words, [first])]
    if 0 < total <= max(2, 0.15 * len(bad)) and clean(~bad):
        few = Region("tokens", bad, f"{total} of {len(bad)} tokens", bad.nonzero()[:, 0].tolist())
        requests = [r for r in found if r.kind == "requests"]
        whole = bool(requests) and float(bad[requests[0].where].float().mean()) > _WHOLE
        later = [r for r in found if r not in requests and float(bad[r.where].sum()) > _COVERED * total]
        found = [*later, *([*requests, few] if whole else [few, *requests])]
    return found


_DENSE = 0.4  # least share of differing tokens in a region of later or earlier tokens
_PERIODS, _EACH = 17, 0.7  # periods of steps are below the first; share of a step's tokens that must differ
_GAIN = 6.0  # nats of log-likelihood that a change of the scale must explain in a request


def _later(context: Context, size: torch.Tensor, mine: list[torch.Tensor]) -> list[Region]:
    """Requests that match the model up to a token and differ behind it, or the reverse."""
    assert context.floor is not None
    found = []
    for later in (True, False):
        where, places, considered = torch.zeros(len(size), dtype=torch.bool), [], 0
        for tokens in mine:
            own = size[tokens].nan_to_num(20.0).clamp(min=1e-3 * context.floor.mean)
            if float(own.mean()) <= 1.5 * context.floor.mean:
                continue
            considered += 1
            at = _split(own, 1.6 * context.floor.mean, later)
            if at is not None:
                places.append(at)
                where[tokens[at:] if later else tokens[:at]] = True
        dense = bool(where.any()) and float((size[where] > 2 * context.floor.mean).float().mean()) > _DENSE
        if len(places) >= 0.7 * considered and considered >= 0.5 * len(mine) and dense:
            places.sort()
            spread = f"{places[0]}" if places[0] == places[-1] else f"{places[0]} to {places[-1]}"
            side = (
                f"the tokens from {spread} of each completion on"
                if later
                else f"the first {spread} tokens of each completion"
            )
            found.append(Region("later" if later else "earlier", where, side, places))
    return found


def _split(size: torch.Tensor, limit: float, later: bool) -> int | None:
    """The token at which |differences| change from noise to more, by the likelihood of two scales against one."""
    n = len(size)
    if n < 8:
        return None
    sums = torch.cat([torch.zeros(1), size.cumsum(0)]).double()
    places = torch.arange(3, n - 2)
    before, after = sums[places] / places, (sums[n] - sums[places]) / (n - places)
    gain = n * (sums[n] / n).log() - places * before.log() - (n - places) * after.log()
    clean, rest = (before, after) if later else (after, before)
    gain[(clean > limit) | (rest < 3 * clean)] = -torch.inf
    best = int(gain.argmax())
    return int(places[best]) if float(gain[best]) > _GAIN else None


# ---- which tensor --------------------------------------------------------------------------------------------------

_PROBED = 160  # tokens of which gradients are computed, in whole sequences
_LEAST = 24  # tokens
_EXACT, _AT_ONCE = 1 << 14, 1 << 27  # numbers per token up to which gradients are not folded; those held at once
_SKETCH = 1024  # numbers per token in the sketch of an embedding's gradients
_HEAD = "lm_head"


@dataclass(frozen=True)
class Suspect:
    """A tensor, or a group of them, whose random change would cause the differences; or an operator's output.

    Attributes:
        likelihood: logarithm of the likelihood of the differences. noise: variance that it leaves to independent noise.
        weights: whether it is the weights that change, and not the output, by other amounts in each token.
    """

    name: str
    likelihood: float
    noise: float
    weights: bool = True


def probe(context: Context, difference: torch.Tensor, seconds: float) -> list[Suspect]:
    """Tensors by how likely a random change of each causes the differences, best first.

    If the weights of one linear operator changed at random, the differences of the log-probabilities would be Gaussian
    with the covariance of their gradients in this tensor; the likelihood of the measured differences under the
    covariance of each tensor compares them. A fault of an operator changes its output in each token independently, and
    has another covariance; it is compared too, because otherwise a tensor next to such a fault is blamed for it.

    Args:
        difference: [N] of the log-probabilities.
    """
    found = _gradients_of_worst(context, difference, time.thread_time() + seconds)
    if found is None:
        return []
    features, outputs, d = found
    there = d.isfinite()
    d = d[there]
    if len(d) < _LEAST:
        return []
    kernels = {}
    for name, parts in features.items():
        x = torch.cat(parts)[there]
        if name == _HEAD:
            slope, rows = x[:, : context.model.vocab_size], x[:, context.model.vocab_size :]
            kernels["logits"] = (slope @ slope.t()).double()
            kernels[_HEAD] = kernels["logits"] * (rows @ rows.t()).double()
        else:
            kernels[name] = (x @ x.t()).double()
    normal = {name: kernel / kernel.diagonal().mean().clamp(min=1e-300) for name, kernel in kernels.items()}
    groups = _groups(list(kernels), context.model.tied)
    suspects = [_suspect(name, sum(normal[n] for n in names), d) for name, names in groups.items() if names]  # type: ignore[arg-type]
    for name, blocks in outputs.items():
        kernel = torch.block_diag(*blocks)[there][:, there].double()
        suspects.append(replace(_suspect(name, kernel, d), weights=False))
    return sorted(suspects, key=lambda s: -s.likelihood)


def _gradients_of_worst(
    context: Context, difference: torch.Tensor, deadline: float
) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]], torch.Tensor] | None:
    """`_features` of the sequences that differ most, up to `_PROBED` tokens, and the differences of these tokens [n].

    None if no sequence is done before the deadline, in seconds of this thread's processor time.
    """
    count = len(context.sequences)
    sizes = residual(torch.zeros_like(difference), difference, context.sequences.owner, count).sequences
    chosen, total = [], 0
    for i in sizes.nan_to_num(-1).argsort(descending=True).tolist():
        if total >= _PROBED:
            break
        chosen.append(i)
        total += int((context.sequences.owner == i).sum())
    small = replace(context, target=difference).part(sorted(chosen))
    features: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    known: list[torch.Tensor] = []
    model = context.model.in_dtype(torch.float32)
    with context.model.edited(context.merged, torch.float32):
        for i in range(len(small.sequences)):
            if time.thread_time() > deadline:
                break
            of_weights, of_outputs = _features(small, model, i)
            for name, rows in of_weights.items():
                features.setdefault(name, []).append(rows)
            for name, kernel in of_outputs.items():
                outputs.setdefault(name, []).append(kernel)
            known.append(small.target[small.sequences.owner == i])
    return (features, outputs, torch.cat(known).double()) if known else None


def _groups(names: list[str], tied: bool) -> dict[str, list[str]]:
    """Each tensor alone, a tied head with the embedding, and linear operators by layer, by kind and all together."""
    groups = {name: [name] for name in names}
    linear = [name for name in names if "norm" not in name and name not in ("embedding", "logits", _HEAD)]
    if tied:
        groups["embedding and head"] = ["embedding", _HEAD]
    for name in linear:
        if (layer := layer_of(name)) is not None:
            groups.setdefault(f"layers.{layer}", []).append(name)
            groups.setdefault(f"{name.rpartition('.')[2]} in every layer", []).append(name)
    return {**groups, "all layers": linear}


def _suspect(name: str, kernel: torch.Tensor, d: torch.Tensor) -> Suspect:
    """The log-likelihood of d under a multiple of the kernel plus noise, for the best multiple and noise."""
    scale = float(kernel.diagonal().mean())
    if not scale > 0 or not math.isfinite(scale):
        return Suspect(name, -math.inf, 1.0)
    values, vectors = torch.linalg.eigh(kernel / scale)
    squares, best = (vectors.t() @ d).square(), Suspect(name, -math.inf, 1.0)
    for power in range(-16, 3):
        spectrum = values.clamp(min=0) + 10.0 ** (power / 2)
        amount = max(float((squares / spectrum).mean()), 1e-300)
        value = -0.5 * float(len(d) * (1 + math.log(amount)) + spectrum.log().sum())
        if value > best.likelihood:
            best = Suspect(name, value, 10.0 ** (power / 2))
    return best


_EVIDENCE, _WITHIN, _RARER = 9.0, 3.0, 4.0
"""Nats of log-likelihood by which a place must be more likely than every other place; by which a tensor must be more
likely than the groups that contain it; and prior against outputs that change in each token independently."""
_LINEAR = 0.5  # nats, root mean square; larger differences are beyond what gradients describe
_NOISE = 1e-3  # largest share of the variance that a place may leave unexplained, unless the noise floor is larger


def probable_place(left: Residual, floor: Floor, suspects: Callable[[], list[Suspect]]) -> tuple[str, str]:
    """The place whose random change has the direction of the differences, and the evidence in words; "" for none.

    Args:
        suspects: `probe` of the differences, which takes seconds; not called if they are too large.
    """
    variance = float(left.tokens[left.tokens.isfinite()].square().mean())
    found = suspects() if variance < _LINEAR**2 else []
    best = found[0] if found else None
    if best is None or not best.weights or best.name.startswith("all ") or best.name.endswith("every layer"):
        return "", ""
    if best.noise > max(_NOISE, 9 * floor.mean**2 / variance):
        return "", ""
    likelihood = lambda s: s.likelihood - (0 if s.weights else _RARER)
    ahead = lambda within: (
        likelihood(best) - max((likelihood(s) for s in found if not within(s.name)), default=-math.inf)
    )
    layer, kind = layer_of(best.name), best.name.rpartition(".")[2]
    holds = {best.name, f"layers.{layer}", f"{kind} in every layer", "all layers"}
    margin = ahead(lambda name: name in holds)
    within = ahead(lambda name: name == best.name)
    if margin >= _EVIDENCE and within >= _WITHIN:
        place = best.name
    else:
        layer = int(best.name.split(".")[1]) if best.name.startswith("layers.") else None
        margin = ahead(lambda name: name.startswith(f"layers.{layer}.") or name == f"layers.{layer}")
        if layer is None or margin < _EVIDENCE:
            return "", ""
        place = f"layers.{layer}"
    # A change of the logits' processing has the head's direction too.
    result = "of how its logits are processed" if place in ("lm_head", "embedding and head") else "of its result"
    words = (
        f"The differences have the direction of a change of the weights of {place}, or {result}: the gradients make "
        f"it {margin:.0f} nats more likely than any other place"
    )
    return place, words


def layer_count(model: Any) -> int:
    """Layers of a transformers decoder."""
    return len(getattr(model.base_model, "layers", ()))


def _features(context: Context, model: Any, i: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients [n, F] of the log-probabilities of one sequence in each linear operator's weight and norm's gain.

    Also the inner products [n, n] of their gradients in the linear operators' outputs.
    """
    modules = {p.name: p.module for p in points(model) if p.where == "out" and not p.name.endswith("output")}
    # The MLP as a whole stands for its tensors only where they are not modules of their own.
    for name in [n for n in modules if n.endswith(".mlp") and n.replace(".mlp", ".down_proj") in modules]:
        del modules[name]
    s = context.sequences
    grads, inputs, outputs, rows, slope = _gradients(context, model, s, i, modules)
    found = {}
    for name, grad in grads.items():
        if name == "embedding":
            found[name] = _embedding_features(grad[:, 0], s.ids[i].to(grad.device)).cpu()
        else:
            found[name] = _operator_features(name, grad, inputs[name], outputs[name].detach()).cpu()
    found[_HEAD] = torch.cat([slope, rows], 1).cpu()
    products = {n: (g.flatten(1) @ g.flatten(1).mT).cpu() for n, g in grads.items() if "norm" not in n}
    products["logits"] = slope.square().sum(1).diag().cpu()
    return found, products


def _gradients(
    context: Context, model: Any, s: Sequences, i: int, modules: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Gradients of the log-probabilities of sequence i in the modules' outputs, these modules' inputs and outputs.

    Also the hidden states of the counted rows, and the gradients in the logits.
    """
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    embedding = model.get_input_embeddings()
    handles = [embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))]
    for name, module in modules.items():

        def keep(module: Any, args: Any, output: Any, name: str = name) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if args and isinstance(args[0], torch.Tensor) and value.requires_grad:
                inputs[name], outputs[name] = args[0].detach(), value

        handles.append(module.register_forward_hook(keep))
    try:
        hidden = forward(model, s.ids[i], s.positions[i], grad=True)
    finally:
        for handle in handles:
            handle.remove()
    rows = hidden[s.rows[i].to(hidden.device)]
    z = _head_logits(context, rows)
    targets = s.targets[s.owner == i].to(z.device)
    logp = (z / (context.sampling.temperature or 1.0)).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    each = torch.eye(len(logp), device=logp.device)
    grads = torch.autograd.grad(logp, [*outputs.values()], each, is_grads_batched=True, allow_unused=True)
    slope = torch.zeros_like(z).scatter(1, targets[:, None], 1.0) - z.softmax(-1)
    found = {name: grad for name, grad in zip(outputs, grads, strict=True) if grad is not None}
    return found, inputs, outputs, rows.detach(), slope.detach()


def _head_logits(context: Context, hidden: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        module = context.model.in_dtype(torch.float32).get_output_embeddings()
        z = torch.nn.functional.linear(hidden, module.weight, module.bias)
        if scale := getattr(context.model.config, "logits_scaling", None):
            z = z / scale
        if cap := getattr(context.model.config, "final_logit_softcapping", None):
            z = torch.tanh(z / cap) * cap
        return z


def _operator_features(name: str, grad: torch.Tensor, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Gradients [n, F] in a norm's gain, or in a linear operator's weight, those of a large weight folded."""
    if "norm" in name or output.dim() != 3 or given.dim() != 3:
        return (grad * output).flatten(1, -2).sum(1)
    delta, x = grad[:, 0], given[0]
    width = delta.shape[2] * x.shape[1]
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    signs = (signs * 2 - 1).to(delta)
    parts = delta.split(max(1, _AT_ONCE // width))
    return torch.cat([_folded((part.mT @ x).flatten(1) * signs) for part in parts])


def _folded(x: torch.Tensor) -> torch.Tensor:
    """Sums [n, F] in chunks of `_EXACT`: with random signs it keeps inner products in the mean."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % _EXACT)).unflatten(1, (-1, _EXACT)).sum(1)


def _embedding_features(grad: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A sketch of the gradients in the rows of the embedding: a random projection for each row."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(grad.shape[2], _SKETCH, generator=generator).to(grad)
    signs = torch.randint(0, 2, (int(ids.max()) + 1, _SKETCH), generator=generator).to(grad) * 2 - 1
    return torch.einsum("nls,ls->ns", grad @ left, signs[ids]) / _SKETCH**0.5
