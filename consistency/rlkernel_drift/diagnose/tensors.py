"""Changes of the weights: another version, an adapter, rounding, and tensors exchanged, permuted, scaled or missing."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.attention import scaled_to
from rlkernel_drift.diagnose.context import Computation, Context
from rlkernel_drift.diagnose.trials import NEAR_FLOOR, Change, each_request
from rlkernel_drift.scoring.model import name_of
from rlkernel_drift.scoring.weights import QUANTISATIONS, quantised

_FACTORS = (0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)
_PAIRS = (("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_norm", "k_norm"), ("q_proj", "o_proj"))
_PREFIXES = 48  # tokens that may have been computed with the previous version
_PAIRS_OF_LAYERS = 160  # beyond this number only neighbouring layers are exchanged

Edit = Callable[[Tensor], Tensor]


def versions(context: Context) -> Iterator[Change]:
    """The previous version, the adapter, and the matrix of the head."""
    if context.references.previous is not None:
        yield from _previous(context)
        yield from _cached_with_previous(context)
    yield from _adapter(context)
    yield from _head(context)


def _previous(context: Context) -> Iterator[Change]:
    """All or some tensors of the previous version."""
    yield Change(
        "the previous version of the weights",
        "stale-weights",
        "versions",
        lambda c, _: c.with_body(previous=True, edits={}),
    )
    yield Change(
        "weights between the previous version and this one",
        "stale-weights",
        "versions",
        lambda c, share: c.with_edits(
            {n: context.weight(n) + share * (old - context.weight(n)) for n, old in old_tensors(context).items()}
        ),
        (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95),
        True,
        start=0.0,
        parameter="share of the previous",
        effort=2,
        implies=frozenset({"stale-weights"}),
    )
    yield Change(
        "some tensors of the previous version",
        "partial-sync",
        "versions",
        lambda c, old: c.with_edits(old),
        fit=_partial,
        parameter="tensors",
        shown=lambda old: ", ".join(sorted(old)[:3]) + (", ..." if len(old) > 3 else ""),
        effort=2,
    )


def _cached_with_previous(context: Context) -> Iterator[Change]:
    """Keys and values of the first tokens that the previous version computed."""
    old_up_to = lambda c, n: c.with_body(prefix=tuple(n for _ in c.body.sequences.ids))
    old_after_prompt = lambda c, k: c.with_body(prefix=tuple(n + k for n in c.body.sequences.prompt))
    yield Change(
        "prefixes cached with the previous weights",
        "prefix-cache",
        "versions",
        old_up_to,
        tuple(range(1, min(_PREFIXES, *context.sequences.prompt))),
        parameter="tokens",
    )
    yield Change(
        "whole blocks of the prompts cached with the previous weights",
        "prefix-cache",
        "versions",
        lambda c, v: c.with_body(prefix=tuple(min((n - v[1]) // v[0] * v[0], n - 1) for n in c.body.sequences.prompt)),
        tuple((size, last) for size in (2, 4, 8, 16, 32, 64) for last in (0, 1)),
        parameter="tokens of a block",
        shown=lambda v: v[0],
    )
    yield Change(
        "prompts cached with the previous weights",
        "prefix-cache",
        "versions",
        old_after_prompt,
        (-1, 0),
        parameter="tokens of the completion",
    )
    yield Change(
        "the previous weights in the first tokens of each completion",
        "mid-request",
        "versions",
        old_after_prompt,
        tuple(range(1, _PREFIXES)),
        parameter="tokens",
        shown=lambda k: k + 1,
    )
    yield Change(
        "the previous weights up to a token of each completion",
        "mid-request",
        "versions",
        lambda c, ks: c.with_body(prefix=tuple(n + k for n, k in zip(c.body.sequences.prompt, ks, strict=True))),
        fit=lambda c, base: _switches(c, base, old_after_prompt),
        parameter="tokens",
        shown=lambda ks: ", ".join(str(k + 1) for k in ks),
        effort=2,
        whole=True,
    )


def _head(context: Context) -> Iterator[Change]:
    """Head and embedding confused, or a tied head of the previous version."""
    if not context.model.tied:
        embedding, head = (
            m.weight.data
            for m in (context.model.model.get_input_embeddings(), context.model.model.get_output_embeddings())
        )
        yield Change(
            "the head is the embedding", "tied-embedding", "versions", lambda c, _: replace(c, weight=embedding)
        )
        name = next(n for n, p in context.model.model.named_parameters() if p.data_ptr() == embedding.data_ptr())
        yield Change("the embedding is the head", "tied-embedding", "versions", lambda c, _: c.with_edits({name: head}))
    elif context.references.previous is not None:
        weight = context.references.previous.model.get_output_embeddings().weight.data
        yield Change(
            "the tied head is of the previous version",
            "tied-embedding",
            "versions",
            lambda c, _: replace(c, weight=weight),
        )


def _switches(context: Context, base: Computation, old_after_prompt: Callable[[Computation, int], Computation]) -> Any:
    """The token at which each request changes from the previous weights; None unless they explain the first tokens."""
    begin = context.sequences.owner != context.sequences.owner.roll(1)
    far = lambda c: float((context.score(c) - context.target)[begin].abs().nanmedian())
    if far(old_after_prompt(base, 1)) > 0.5 * far(base):
        return None
    longest = int(torch.bincount(context.sequences.owner).max())
    return each_request(context, base, old_after_prompt, range(longest), -1)


def _adapter(context: Context) -> Iterator[Change]:
    adapter = context.references.adapter
    if adapter is None:
        return
    merged = lambda factor, names=None: {
        n: context.model.parameter(n) + (factor if names is None or n in names else 1.0) * u
        for n, u in adapter.updates.items()
    }
    yield Change("no LoRA adapter", "lora-missing", "versions", lambda c, _: c.with_edits(merged(0.0)))
    yield Change(
        "the LoRA adapter at another scale",
        "lora-scale",
        "versions",
        lambda c, f: c.with_edits(merged(f)),
        _FACTORS[1:],
        True,
        start=1.0,
        parameter="factor",
        effort=2,
        implies=frozenset({"lora-missing"}),
    )
    for dtype in (torch.bfloat16, torch.float16):
        yield Change(
            f"the LoRA adapter merged in {name_of(dtype)}",
            "lora-precision",
            "versions",
            partial(lambda dtype, c, _: c.with_edits({n: v.to(dtype).to(v) for n, v in merged(1.0).items()}), dtype),
            rounds=True,
        )
    kinds = {n.split(".")[-2] for n in adapter.updates} | {
        m.group() for n in adapter.updates if (m := re.search(r"layers\.\d+\.", n))
    }
    yield Change(
        "the LoRA adapter is missing in a part",
        "lora-missing",
        "versions",
        lambda c, kind: c.with_edits(merged(0.0, {n for n in adapter.updates if kind in n})),
        tuple(sorted(kinds)),
        parameter="modules",
        effort=2,
    )


def old_tensors(c: Context) -> dict[str, Tensor]:
    """Tensors of the previous version that differ from the model's, by name."""
    assert c.references.previous is not None
    old = dict(c.references.previous.model.named_parameters())
    new = dict(c.model.model.named_parameters())
    return {n: v.data for n, v in old.items() if n in new and v.shape == new[n].shape and not v.equal(new[n])}


def _partial(c: Context, base: Computation) -> dict[str, Tensor] | None:
    """Greedily adds the tensor whose old value explains most, until the next one does not help.

    None if all old tensors together leave only noise, because then the whole version is old.
    """
    old = old_tensors(c)
    if len(old) < 2:
        return None
    enough = 0.0 if c.floor is None else NEAR_FLOOR * c.floor.mean
    chosen: dict[str, Tensor] = {}
    error = c.error(base)
    if c.error(base.with_edits(old)) <= enough:
        return None
    groups = _groups(old)
    while len(chosen) < len(old) // 2 and error > enough:
        trials = {
            key: c.error(base.with_edits(chosen | {n: old[n] for n in names}))
            for key, names in groups.items()
            if not set(names) <= set(chosen)
        }
        if not trials:
            break
        best = min(trials, key=trials.__getitem__)
        if trials[best] > 0.8 * error:
            break
        chosen |= {n: old[n] for n in groups[best]}
        error = trials[best]
        if len(groups[best]) > 1:
            groups = {n: [n] for n in old}
    return chosen or None


def _groups(old: dict[str, Tensor]) -> dict[str, list[str]]:
    """Single tensors in a small model; whole layers first in a deep one, because the scan would take hours."""
    if len(old) <= 128:
        return {name: [name] for name in old}
    groups: dict[str, list[str]] = {}
    for name in old:
        key = name.split(".layers.")[1].split(".")[0] if ".layers." in name else name
        groups.setdefault(key, []).append(name)
    return groups


# ---- edits ---------------------------------------------------------------------------------------------------------


def edits(context: Context) -> Iterator[Change]:
    """Rounding, exchanges, permutations and missing tensors: all layers first, then single tensors."""
    model = context.model
    names = [n for n, _ in model.model.named_parameters()]
    kinds = _by_kind(names)
    linear = [n for n in names if ".layers." in n and model.parameter(n).dim() >= 2]
    # In a dense model the matrices of the layers are its projections; in a mixture of experts the routers are not.
    projections = [n for n in linear if re.search(r"proj(\.weight)?$", n)]
    every = [n for n in names if model.parameter(n).dim() >= 2]
    of = lambda *names: [n for n in linear if any(f".{name}" in n for name in names)]
    sets = [("weights of the layers", linear), ("all weights", every), ("projections of the layers", projections)]
    sets += [("q_proj, k_proj and v_proj", of("q_proj", "k_proj", "v_proj")), ("attention", of("self_attn."))]
    sets += [("MLPs", of("mlp.")), ("experts", of("experts."))]
    unique: dict[tuple[str, ...], str] = {}
    for words, chosen in sets:
        if chosen:
            unique.setdefault(tuple(chosen), words)
    for each, words in unique.items():
        chosen = list(each)
        for how, function in _rounders().items():
            yield _edit(context, f"{words} rounded to {how}", "quantised-weights", chosen, function, rounds=True)
    gains = [n for n in names if "norm" in n and n.endswith("weight")]
    for words, chosen in (("every norm", gains), ("every norm but q_norm and k_norm", _without_heads(gains))):
        for option, function in _OFFSETS.items():
            yield _edit(context, f"{words} {option}", "missing-weights", chosen, function, operator=words)
    for left, right in _PAIRS:
        yield _exchange(context, f"{left} and {right} exchanged in every layer", names, left, right, both=True)
        for a, b in ((left, right), (right, left)):
            yield _exchange(context, f"{a} holds the weights of {b} in every layer", names, a, b, both=False)
    head = context.model.head_width
    rotated = [n for n in names if re.search(r"\.(q|k)_proj\.(weight|bias)$", n)]
    for words, function in (
        ("halves in place of neighbouring pairs", lambda w: _pairs_to_halves(w, head)),
        ("neighbouring pairs in place of halves", lambda w: _halves_to_pairs(w, head)),
    ):
        yield _edit(context, f"rows of q_proj and k_proj permuted for rope ({words})", "rope-layout", rotated, function)
    yield from _embedding_shards(context)
    biases = [n for n in names if n.endswith("bias")]
    if biases:
        yield _edit(context, "all biases are zero", "missing-weights", biases, torch.zeros_like)
    for kind, chosen in kinds.items():
        if len(chosen) > 1:
            yield from _group(context, f"{kind} in every layer", chosen)
    yield from _exchanged(context, names)


_OFFSETS: dict[str, Edit] = {"lacks the added one": lambda w: w - 1, "has a one added": lambda w: w + 1}


def _without_heads(gains: list[str]) -> list[str]:
    """Norms of the residual stream, not those of the heads."""
    found = [n for n in gains if ".self_attn." not in n]
    return found if len(found) < len(gains) else []


def _embedding_shards(context: Context) -> Iterator[Change]:
    """A part of the embedding's rows is zero, as of a rank that a vocabulary-parallel lookup lacks."""
    embedding = context.model.model.get_input_embeddings()
    size = embedding.num_embeddings

    def lookup(part: tuple[int, int], model: Any) -> Any:
        count, i = part

        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            return output * (args[0] * count // size != i)[..., None]

        stack = contextlib.ExitStack()
        stack.callback(model.get_input_embeddings().register_forward_hook(hook).remove)
        return stack

    yield Change(
        "a part of the embedding is zero",
        "missing-weights",
        "tensors",
        lambda c, part: c.with_patch(partial(lookup, part)),
        tuple((count, i) for count in (2, 4, 8) for i in range(count)),
        operator="embedding",
        parameter="part",
        shown=lambda part: f"{part[1] + 1} of {part[0]}",
    )


def single(context: Context) -> Iterator[Change]:
    """Changes of single tensors."""
    for name, _ in context.model.model.named_parameters():
        yield from _group(context, name, [name])


def closely(context: Context, suspects: list[str]) -> Iterator[Change]:
    """Suspected tensors rounded, rolled, or zero in part."""
    modules = ["embed_tokens" if name == "embedding" else name.removeprefix("layers.") for name in suspects]
    suspected = [module.split(".") for module in modules]
    for name, value in context.model.model.named_parameters():
        if value.dim() > 1 and any(all(f".{part}." in f".{name}." for part in parts) for parts in suspected):
            yield from _closely(context, name)


def _group(context: Context, words: str, chosen: list[str]) -> Iterator[Change]:
    """Tensors of one kind, or a single one: missing, permuted, scaled."""
    model, single = context.model, len(chosen) == 1
    one_dimension = model.parameter(chosen[0]).dim() == 1
    options: dict[str, tuple[str, Edit]] = {"is zero": ("missing-weights", torch.zeros_like)}
    if "sink" in words:
        options = {"is left out": ("attention-sinks", lambda w: torch.full_like(w, -1e4))}
    elif one_dimension and chosen[0].endswith("weight"):
        options = {"is one": ("missing-weights", torch.ones_like)}
        options |= {words: ("missing-weights", function) for words, function in _OFFSETS.items()}
    elif not one_dimension:
        options |= {
            "has its row halves exchanged": ("swapped-weights", lambda w: torch.cat(w.chunk(2, 0)[::-1], 0)),
            "has its column halves exchanged": ("swapped-weights", lambda w: torch.cat(w.chunk(2, -1)[::-1], -1)),
            "has its row quarters reversed": ("swapped-weights", lambda w: torch.cat(w.chunk(4, 0)[::-1], 0)),
            "holds the even rows before the odd ones": ("swapped-weights", lambda w: torch.cat([w[::2], w[1::2]], 0)),
            "interleaves its row halves": ("swapped-weights", lambda w: torch.stack(w.chunk(2, 0), 1).flatten(0, 1)),
        }
        if model.parameter(chosen[0]).shape[-1] == model.parameter(chosen[0]).shape[-2]:
            options["is transposed"] = ("swapped-weights", lambda w: w.transpose(-1, -2))
    for option, (cause, function) in options.items():
        yield _edit(context, f"{words} {option}", cause, chosen, function, operator=words, effort=1 + (not single))
    if single and not one_dimension:
        width = context.model.head_width
        yield Change(
            f"{words} is rolled",
            "swapped-weights",
            "tensors",
            lambda c, v: c.with_edits({chosen[0]: context.weight(chosen[0]).roll(v[1], v[0])}),
            tuple((dim, n) for dim, n in ((-2, 1), (-2, -1), (-2, width), (-1, width))),
            operator=words,
            parameter="by",
            shown=lambda v: v[1],
            effort=2,
        )
    yield Change(
        f"{words} is scaled",
        "scaled-weights",
        "tensors",
        lambda c, f: c.with_edits({n: context.weight(n) * f for n in chosen}),
        (0.5, 1.25),
        True,
        start=1.0,
        parameter="scale",
        operator=words,
        effort=2 + (not single),
    )


def _closely(context: Context, name: str) -> Iterator[Change]:
    """One matrix rounded, or with channels that are zero."""
    rows, columns = context.model.parameter(name).shape[-2:]
    rounders = _rounders()
    yield Change(
        f"{name} is rounded",
        "quantised-weights",
        "tensors",
        lambda c, how: c.with_edits({name: rounders[how](context.weight(name))}),
        tuple(rounders),
        rounds=True,
        operator=name,
        parameter="to",
        effort=2,
    )
    first = [(0, n) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < rows]
    first += [(1, n) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < columns]
    yield Change(
        f"the first channels of {name} are zero",
        "missing-weights",
        "tensors",
        lambda c, v: c.with_edits({name: _without_first(context.weight(name), *v)}),
        tuple(first),
        operator=name,
        parameter="channels",
        shown=lambda v: v[1],
        effort=2,
    )


def _without_first(w: Tensor, dim: int, count: int) -> Tensor:
    w = w.clone()
    w.narrow(dim - 2, 0, count).zero_()
    return w


def _edit(context: Context, name: str, cause: str, names: list[str], function: Edit, **options: Any) -> Change:
    made = lambda: {n: function(context.weight(n)) for n in names}
    return Change(name, cause, "tensors", lambda c, _: c.with_edits(made()) if names else None, **options)


def _by_kind(names: list[str]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        if ".layers." in name:
            kinds.setdefault(re.sub(r"^.*\.layers\.\d+\.", "", name), []).append(name)
    return kinds


def _exchange(context: Context, words: str, names: list[str], left: str, right: str, both: bool) -> Change:
    found: dict[str, Tensor] = {}
    for name in names:
        other = name.replace(f".{left}.", f".{right}.")
        if f".{left}." in name and other in names:
            a, b = context.model.parameter(name), context.model.parameter(other)
            if a.shape == b.shape:
                found |= {name: b, other: a} if both else {name: b}
    return Change(words, "swapped-weights", "tensors", lambda c, _: c.with_edits(found) if found else None)


def _exchanged(context: Context, names: list[str]) -> Iterator[Change]:
    """Two layers exchanged, two layers' tensors of one kind, or two tensors of one layer with the same shape."""
    layers = sorted({int(m.group(1)) for n in names if (m := re.search(r"\.layers\.(\d+)\.", n))})
    pairs = [(a, b) for a in layers for b in layers if a < b]
    if len(pairs) > _PAIRS_OF_LAYERS:
        pairs = [(a, a + 1) for a in layers[:-1]]
    swap = lambda old, new: {n: n.replace(old, new, 1) for n in names if old in n}
    both = lambda a, b, kind="": (
        swap(f".layers.{a}.{kind}", f".layers.{b}.{kind}") | swap(f".layers.{b}.{kind}", f".layers.{a}.{kind}")
    )
    values: list[tuple[str, dict[str, str]]] = [(f"layers {a} and {b}", both(a, b)) for a, b in pairs]
    kinds = sorted({kind.rpartition(".")[0] for kind in _by_kind(names)})
    values += [(f"{kind} of layers {a} and {b}", both(a, b, f"{kind}.")) for kind in kinds for a, b in pairs]
    for n in names:
        for left, right in _PAIRS:
            other = n.replace(f".{left}.", f".{right}.")
            if other != n and other in names:
                values.append((f"{n} and {other}", {n: other, other: n}))
                values += [(f"{a} holds the weights of {b}", {a: b}) for a, b in ((n, other), (other, n))]
    for a, b in itertools.permutations(layers, 2):
        if abs(a - b) == 1:
            values.append((f"layer {a} holds the weights of layer {b}", swap(f".layers.{a}.", f".layers.{b}.")))
    parameter = context.model.parameter
    values = [v for v in values if all(parameter(n).shape == parameter(other).shape for n, other in v[1].items())]
    yield Change(
        "tensors exchanged",
        "swapped-weights",
        "tensors",
        lambda c, v: c.with_edits({n: context.weight(other) for n, other in v[1].items()}),
        tuple(values),
        parameter="tensors",
        shown=lambda v: v[0],
    )


def _halves_to_pairs(w: Tensor, size: int) -> Tensor:
    heads = w.shape[0] // size
    return w.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(w.shape)


def _pairs_to_halves(w: Tensor, size: int) -> Tensor:
    heads = w.shape[0] // size
    return w.view(heads, size // 2, 2, -1).transpose(1, 2).reshape(w.shape)


def _rounders() -> dict[str, Edit]:
    names = {
        "fp8": "fp8",
        "fp8 per tensor": "fp8 with a scale of the tensor",
        "fp8 per row": "fp8 with a scale of each row",
        "int8 per row": "int8 with a scale of each row",
    }
    found: dict[str, Edit] = {names[how]: partial(quantised, how=how) for how in QUANTISATIONS}
    for bits, largest in ((8, 127), (4, 7)):
        for size in (0, 16, 32, 64, 128):
            if bits == 4 or size:
                words = f"int{bits} with a scale of each {f'{size} columns' if size else 'row'}"
                found[words] = partial(_integers, largest=largest, size=size)
    for size in (0, 16, 32, 64, 128):
        words = f"int4 with a scale and a zero point of each {f'{size} columns' if size else 'row'}"
        found[words] = partial(_integers_from_zero, size=size)
    found["fp8 with a scale of each expert"] = _each_expert
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        found[name_of(dtype)] = partial(lambda dtype, w: w.float().to(dtype).to(w.dtype), dtype)
    top = torch.finfo(torch.float8_e5m2).max
    found["fp8 (e5m2) with a scale of the tensor"] = scaled_to(top, torch.float8_e5m2, ())
    found["fp8 (e5m2) with a scale of each row"] = scaled_to(top, torch.float8_e5m2, (-1,))
    for size in (16, 32, 64, 128):
        found[f"fp8 with a scale of each {size}x{size} block"] = partial(_blocks, size, size)
        found[f"fp8 with a scale of each {size} columns"] = partial(_blocks, 1, size)
    return found


def _groups_of_columns(w: Tensor, size: int) -> Tensor:
    """[..., groups, size] in fp32; one group per row if `size` is 0 or does not divide the columns."""
    x = w.float()
    return x.unflatten(-1, (-1, size)) if size and w.shape[-1] % size == 0 else x[..., None, :]


def _integers(w: Tensor, largest: int, size: int) -> Tensor:
    x = _groups_of_columns(w, size)
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
    return ((x / scale).round() * scale).reshape(w.shape).to(w.dtype)


def _integers_from_zero(w: Tensor, size: int) -> Tensor:
    """Rounding to four bits with a scale and a zero point."""
    x = _groups_of_columns(w, size)
    low = x.amin(-1, keepdim=True).clamp(max=0)
    scale = ((x.amax(-1, keepdim=True).clamp(min=0) - low) / 15).clamp(min=1e-12)
    zero = (-low / scale).round()
    return ((((x / scale).round() + zero).clamp(0, 15) - zero) * scale).reshape(w.shape).to(w.dtype)


def _each_expert(w: Tensor) -> Tensor:
    """fp8 with a scale of each expert; other weights are left as they are."""
    return torch.stack([quantised(each, "fp8 per tensor") for each in w]) if w.dim() == 3 else w


def _blocks(rows: int, columns: int, w: Tensor) -> Tensor:
    """fp8 with a scale of each block."""
    if w.dim() < 2:
        return w
    x = torch.nn.functional.pad(w.float(), (0, -w.shape[-1] % columns, 0, -w.shape[-2] % rows))
    blocks = x.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
    scale = (blocks.abs().amax((-3, -1), keepdim=True) / 448).clamp(min=1e-12)
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2, -1).flatten(-3, -2)[..., : w.shape[-2], : w.shape[-1]].to(w.dtype)
