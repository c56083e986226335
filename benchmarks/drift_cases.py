"""Faults planted in plain transformers and torch, and what `rlkernel-drift diagnose` says about them.

The kinds do not use the analyser's own code. Half of them are held out: they were not run while it was written.

    python benchmarks/drift_cases.py --models FOLDER --seeds 1 --json FILE [--held-out] [--healthy N] [--kind NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drift_models import BOS, EOS, FAMILIES, PAD, SEPARATOR, VOCABULARY, phrase_book, text, trained
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Manifest, Sampling, build_capsule

Rows = list[Tensor]  # of each request, [n, V] logits or [n] log-probabilities


@dataclass
class World:
    """One rollout: a model, prompts and sampled completions; `plant` changes what the rollout computes."""

    family: str
    path: Path
    model: Any
    rng: random.Random
    dtype: torch.dtype
    prompts: list[list[int]]
    completions: list[list[int]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    previous: Any = None
    declared: Sampling = field(default_factory=Sampling)
    operators: bool = False
    layers: int = 4

    def copy(self) -> Any:
        return copy.deepcopy(self.model)


@torch.no_grad()
def logits(
    model: Any,
    prompts: list[list[int]],
    completions: list[list[int]],
    *,
    pad: str = "right",
    batch: int = 8,
    positions: Callable[[Tensor, int], Tensor] | None = None,
    attend: bool = False,
) -> Rows:
    """Logits that predict each completion token, in fp32."""
    found: Rows = []
    for start in range(0, len(prompts), batch):
        rows = [p + c for p, c in zip(prompts[start : start + batch], completions[start : start + batch], strict=True)]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), PAD)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        place = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            begin = width - len(row) if pad == "left" else 0
            ids[i, begin : begin + len(row)] = torch.tensor(row)
            mask[i, begin : begin + len(row)] = 1
            own = torch.arange(len(row))
            place[i, begin : begin + len(row)] = own if positions is None else positions(own, len(prompts[start + i]))
        if attend:
            mask[:], place = 1, torch.arange(width).expand(len(rows), width)
        out = model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits.float()
        for i, row in enumerate(rows):
            begin = width - len(row) if pad == "left" else 0
            first = begin + len(prompts[start + i]) - 1
            found.append(out[i, first : first + len(completions[start + i])])
    return found


def picked(rows: Rows, completions: list[list[int]], temperature: float = 1.0) -> Rows:
    """Log-probabilities of the completions."""
    return [
        (z / temperature).log_softmax(-1).gather(1, torch.tensor(c)[:, None])[:, 0]
        for z, c in zip(rows, completions, strict=True)
    ]


Filter = Callable[[Tensor, list[list[int]], list[list[int]]], Tensor]


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], lengths: list[int], seed: int, process: Filter | None = None
) -> list[list[int]]:
    """Completions; `process(logits [B, V], prompts, completions)` changes the logits first."""
    generator = torch.Generator().manual_seed(seed)
    done: list[list[int]] = [[] for _ in prompts]
    for _ in range(max(lengths)):
        last = torch.stack([z[-1] for z in logits(model, prompts, [[*c, 5] for c in done])])
        last = last if process is None else process(last, prompts, done)
        for i, token in enumerate(torch.multinomial(last.softmax(-1), 1, generator=generator)[:, 0].tolist()):
            done[i].append(token)
    return [c[:n] for c, n in zip(done, lengths, strict=True)]


def world(models: Path, family: str, seed: int, dtype: str = "", path: Path | None = None) -> World:
    """A healthy world; prompts are the beginnings of texts."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rng = random.Random(f"{family}{seed}")
    path = path or trained(models, family)
    attention = "eager" if family in ("gemma2", "gpt_oss") else rng.choice(("eager", "sdpa"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=attention, dtype=torch.float32
    ).eval()
    kind = getattr(torch, dtype or rng.choice(("float32", "float32", "bfloat16")))
    book = phrase_book()
    prompts = [text(rng, rng.randint(12, 30), book) for _ in range(8)]
    made = World(family, path, model.to(kind), rng, kind, prompts)
    made.layout = {"pad": rng.choice(("left", "right")), "batch": rng.choice((1, 8))}
    return made


def fill(w: World, seed: int, process: Filter | None = None, model: Any = None) -> None:
    lengths = [w.rng.randint(18, 36) for _ in w.prompts]
    w.completions = sample(model or w.model, w.prompts, lengths, seed, process)


# ---- kinds ---------------------------------------------------------------------------------------------------------

Plant = Callable[[World, int], Rows]


@dataclass(frozen=True)
class Kind:
    """`right` is a regular expression on cause, statement and parameters; `families` limits where the kind exists."""

    name: str
    plant: Plant
    right: str
    held: bool
    families: tuple[str, ...] = tuple(FAMILIES)
    dtype: str = ""
    previous: bool = False


KINDS: dict[str, Kind] = {}
ROPE = tuple(FAMILIES)


def kind(name: str, right: str, held: bool = False, **options: Any) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        KINDS[name] = Kind(name, plant, right, held, **options)
        return plant

    return register


def scored(w: World, model: Any = None, **layout: Any) -> Rows:
    return picked(logits(model or w.model, w.prompts, w.completions, **{**w.layout, **layout}), w.completions)


def on_logits(change: Callable[[World, Tensor, list[int], list[int]], Tensor], sampled: bool = True) -> Plant:
    """A fault of the logits' processing: `change(world, z [n, V], prompt, completion)`."""

    def plant(w: World, seed: int) -> Rows:
        def process(last: Tensor, prompts: list[list[int]], done: list[list[int]]) -> Tensor:
            return torch.stack([_last(w, z, p, c) for z, p, c in zip(last, prompts, done, strict=True)])

        def _last(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
            rows = torch.zeros(len(c) + 1, z.shape[0])
            rows[-1] = z
            return change(w, rows, p, [*c, 0])[-1]

        fill(w, seed, process if sampled else None)
        z = logits(w.model, w.prompts, w.completions, **w.layout)
        return picked([change(w, *each) for each in zip(z, w.prompts, w.completions, strict=True)], w.completions)

    return plant


def drawn(w: World, name: str, value: Any) -> Any:
    return w.note.setdefault(name, value)


def _repetition(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
    r, z = drawn(w, "repetition", w.rng.uniform(1.05, 1.4)), z.clone()
    for i in range(len(z)):
        seen = torch.tensor(sorted({*p, *c[:i]}))
        z[i, seen] = torch.where(z[i, seen] > 0, z[i, seen] / r, z[i, seen] * r)
    return z


def _counted(frequency: bool) -> Callable[[World, Tensor, list[int], list[int]], Tensor]:
    def change(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
        a, z = drawn(w, "penalty", w.rng.uniform(0.2, 1.5)), z.clone()
        for i in range(len(z)):
            counts = torch.bincount(torch.tensor(c[:i], dtype=torch.int64), minlength=z.shape[1]).float()
            z[i] -= a * (counts if frequency else (counts > 0).float())
        return z

    return change


def _bias(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
    z = z.clone()
    z[:, drawn(w, "token", w.rng.choice((EOS, SEPARATOR, 40)))] += drawn(w, "bias", w.rng.choice((-4.0, 2.0, 3.0)))
    return z


def _banned(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
    z = z.clone()
    z[:, drawn(w, "tokens", w.rng.choice(([SEPARATOR], [EOS, SEPARATOR], list(range(150, VOCABULARY)))))] = -1e9
    return z


def _minimum(w: World, z: Tensor, p: list[int], c: list[int]) -> Tensor:
    z = z.clone()
    z[: drawn(w, "min_tokens", w.rng.randint(5, 12)), SEPARATOR] = -1e9
    return z


kind("repetition penalty", "repetition")(on_logits(_repetition))
kind("frequency penalty", "frequency")(on_logits(_counted(True)))
kind("presence penalty", "presence", held=True)(on_logits(_counted(False)))
kind("bias of a token", "bias")(on_logits(_bias))
kind("banned tokens", "mask|ban|bias", held=True)(on_logits(_banned))
kind("min tokens", "mask|ban|bias|min", held=True)(on_logits(_minimum))
kind("temperature", "temperature")(on_logits(lambda w, z, p, c: z / drawn(w, "t", w.rng.uniform(0.6, 0.9))))
kind("soft cap of logits", "cap", held=True, families=("llama", "qwen2", "mistral", "olmo2"))(
    on_logits(lambda w, z, p, c: torch.tanh(z / drawn(w, "cap", w.rng.uniform(6, 20))) * w.note["cap"])
)


@kind("temperature by request", "temperature", held=True)
def temperature_by_request(w: World, seed: int) -> Rows:
    fill(w, seed)
    z = logits(w.model, w.prompts, w.completions, **w.layout)
    return picked([x / w.rng.choice((0.6, 0.7, 0.8, 1.2)) for x in z], w.completions)


@kind("top-p and temperature", "top.p", held=True)
def top_p_and_temperature(w: World, seed: int) -> Rows:
    t, top = w.rng.uniform(0.7, 0.9), w.rng.uniform(0.8, 0.95)

    def process(z: Tensor, *_: Any) -> Tensor:
        values, order = (z / t).sort(-1, descending=True)
        mass = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        return torch.full_like(z, -1e9).scatter(-1, order, values.masked_fill(mass >= top, -1e9))

    fill(w, seed, process)
    z = logits(w.model, w.prompts, w.completions, **w.layout)
    return picked([process(x) for x in z], w.completions)


def on_stream(change: Callable[[World, Rows, Rows], Rows]) -> Plant:
    def plant(w: World, seed: int) -> Rows:
        fill(w, seed)
        z = logits(w.model, w.prompts, w.completions, **w.layout)
        return change(w, picked(z, w.completions), z)

    return plant


kind("log base 2", "unit|factor|log2|base.2")(on_stream(lambda w, x, z: [v / np.log(2) for v in x]))
kind("probabilities", "probabilit|unit", held=True)(on_stream(lambda w, x, z: [v.exp() for v in x]))
kind("negative log-likelihood", "sign|unit|above-zero", held=True)(on_stream(lambda w, x, z: [-v for v in x]))
kind("clamped", "clamp")(
    on_stream(lambda w, x, z: [v.clamp(min=-drawn(w, "bound", w.rng.choice((3.0, 2.0)))) for v in x])
)
kind("bfloat16 log-probabilities", "bf16|bfloat16", dtype="float32")(
    on_stream(lambda w, x, z: [v.bfloat16().float() for v in x])
)
kind("float16 log-probabilities", "fp16|float16", held=True, dtype="float32")(
    on_stream(lambda w, x, z: [v.half().float() for v in x])
)
kind("decimals", "decimal", dtype="float32")(
    on_stream(lambda w, x, z: [v.round(decimals=drawn(w, "decimals", w.rng.choice((2, 3)))) for v in x])
)
kind("exchanged requests", "exchanged|swapped|order")(
    on_stream(lambda w, x, z: [_fit(x[i ^ 1], v) for i, v in enumerate(x)])
)
kind("wrong candidate", "candidate|most likely|top|rank", held=True)(
    on_stream(lambda w, x, z: [v.log_softmax(-1).max(-1).values for v in z])
)
kind("wrong candidate now and then", "candidate|most likely|top|rank|few|race")(
    on_stream(
        lambda w, x, z: [
            torch.where(
                torch.rand(len(v), generator=torch.Generator().manual_seed(w.rng.randrange(99))) < 0.1,
                y.log_softmax(-1).max(-1).values,
                v,
            )
            for v, y in zip(x, z, strict=True)
        ]
    )
)
kind("race of a few tokens", "few|race", held=True)(on_stream(lambda w, x, z: _raced(w, x)))
kind("off by one", "off.by.one|shift")(on_stream(lambda w, x, z: [torch.cat([v[1:], v[-1:]]) for v in x]))


def _fit(other: Tensor, mine: Tensor) -> Tensor:
    return torch.cat([other, mine])[: len(mine)] if len(other) < len(mine) else other[: len(mine)]


def _raced(w: World, x: Rows) -> Rows:
    x = [v.clone() for v in x]
    for _ in range(4):
        v = x[w.rng.randrange(len(x))]
        v[w.rng.randrange(len(v))] -= w.rng.uniform(0.2, 2.0)
    return x


def on_config(change: Callable[[World, Any], None], **model_options: Any) -> Plant:
    """A model with the same weights and another configuration."""

    def plant(w: World, seed: int) -> Rows:
        fill(w, seed)
        return scored(w, rebuilt(w, change))

    return plant


def rebuilt(w: World, change: Callable[[World, Any], None]) -> Any:
    config = copy.deepcopy(w.model.config)
    change(w, config)
    model = type(w.model)(config)
    model.load_state_dict(w.model.state_dict(), strict=False)
    model.set_attn_implementation(w.model.config._attn_implementation)
    model = model.float()
    fresh = {n: b.clone() for n, b in model.named_buffers()}
    model = model.to(w.dtype).eval()
    for name, value in fresh.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, value)
    return model


def _set(name: str, draw: Callable[[random.Random], Any]) -> Callable[[World, Any], None]:
    def change(w: World, config: Any) -> None:
        setattr(config, name, drawn(w, name, draw(w.rng)))

    return change


def _rope(draw: Callable[[random.Random], dict[str, Any]]) -> Callable[[World, Any], None]:
    def change(w: World, config: Any) -> None:
        config.rope_parameters = {**config.rope_parameters, **drawn(w, "rope", draw(w.rng))}

    return change


PLAIN = ("llama", "qwen3", "qwen2", "mistral", "granite", "olmo2", "gemma2")
kind("epsilon", "eps")(on_config(_set("rms_norm_eps", lambda r: 10 ** r.uniform(-3, -1))))
kind("rope base", "rope|theta", families=PLAIN)(on_config(_rope(lambda r: {"rope_theta": 10 ** r.uniform(2.7, 3.6)})))
kind("yarn", "yarn|rope|position", held=True, families=PLAIN)(
    on_config(
        _rope(lambda r: {"rope_type": "yarn", "factor": r.choice((2.0, 4.0)), "original_max_position_embeddings": 128})
    )
)
kind("linear rope", "rope|position", families=PLAIN)(
    on_config(_rope(lambda r: {"rope_type": "linear", "factor": r.uniform(2, 6)}))
)
kind("window", "window", families=("mistral", "gpt_oss", "gemma2"))(
    on_config(_set("sliding_window", lambda r: r.choice((6, 12, 400))))
)
kind("attention soft cap", "cap", families=("gemma2",))(
    on_config(_set("attn_logit_softcapping", lambda r: r.choice((None, 1.0, 2.0))))
)
kind("final soft cap", "cap", families=("gemma2",))(
    on_config(_set("final_logit_softcapping", lambda r: r.choice((None, 6.0))))
)
kind("query scale", "query_pre|scal|attention", held=True, families=("gemma2",))(
    on_config(_set("query_pre_attn_scalar", lambda r: r.choice((64, 256))))
)
kind("granite multiplier", "multiplier|scal", families=("granite",))(
    on_config(
        lambda w, c: setattr(
            c,
            n := w.rng.choice(("attention_multiplier", "residual_multiplier", "embedding_multiplier")),
            getattr(c, n) * w.rng.uniform(1.2, 2),
        )
    )
)
kind("logits scaling", "logits_scaling|temperature", held=True, families=("granite",))(
    on_config(_set("logits_scaling", lambda r: r.uniform(1.0, 1.7)))
)
kind("experts per token", "expert", held=True, families=("gpt_oss",))(
    on_config(_set("num_experts_per_tok", lambda r: r.choice((1, 3, 4))))
)
kind("activation", "act", held=True, families=PLAIN)(
    on_config(_set("hidden_act", lambda r: r.choice(("gelu", "relu", "gelu_pytorch_tanh"))))
)


def on_weights(change: Callable[[World, dict[str, Tensor]], None]) -> Plant:
    def plant(w: World, seed: int) -> Rows:
        fill(w, seed)
        model = w.copy()
        with torch.no_grad():
            change(w, {n: p.data for n, p in model.named_parameters()})
        return scored(w, model)

    return plant


def _pick(w: World, tensors: dict[str, Tensor], pattern: str) -> tuple[str, Tensor]:
    names = sorted(n for n in tensors if re.search(pattern, n))
    name = drawn(w, "tensor", w.rng.choice(names))
    return name, tensors[name]


def _noisy(w: World, t: dict[str, Tensor]) -> None:
    x = _pick(w, t, r"(q|k|v|o|gate|up|down)_proj(\.weight)?$" if w.family != "gpt_oss" else r"(q|k|v|o)_proj.weight")[
        1
    ]
    x.add_(
        torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) * x.float().std() * w.rng.uniform(0.05, 0.3)
    )


def _scaled(w: World, t: dict[str, Tensor]) -> None:
    _pick(w, t, r"(norm|_proj)\.weight$")[1].mul_(w.rng.uniform(1.1, 1.6))


def _rounded(to: Any, pattern: str) -> Callable[[World, dict[str, Tensor]], None]:
    def change(w: World, t: dict[str, Tensor]) -> None:
        for name, x in t.items():
            if re.search(pattern, name):
                scale = x.float().abs().amax(-1, keepdim=True) / (7 if to == "int4" else 448)
                x.copy_((x / scale).round() * scale if to == "int4" else (x / scale).to(to).float() * scale)

    return change


def _shards(w: World, t: dict[str, Tensor]) -> None:
    x = _pick(w, t, r"(q_proj|o_proj|down_proj|gate_proj)\.weight$")[1]
    axis = w.rng.choice((0, 1))
    x.copy_(torch.cat(list(x.chunk(2, axis))[::-1], axis))


def _interleaved(w: World, t: dict[str, Tensor]) -> None:
    """Rotary layout: halves for neighbouring pairs, in q and k of all layers."""
    for name, x in t.items():
        if re.search(r"(q|k)_proj\.(weight|bias)$", name):
            heads = x.shape[0] // 16
            x.copy_(x.view(heads, 2, 8, -1).transpose(1, 2).reshape(x.shape))


PROJ = ("llama", "qwen3", "qwen2", "mistral", "granite", "olmo2", "gemma2")
kind("one tensor of another version", "tensor|layer")(on_weights(_noisy))
kind("scaled tensor", "tensor|layer|norm|proj|final", families=PROJ)(on_weights(_scaled))
kind("fp8 weights", "fp8|quanti|round|grid", held=True, dtype="float32")(
    on_weights(_rounded(torch.float8_e4m3fn, r"_proj\.weight$"))
)
kind("int4 weights", "int4|quanti|round|grid|weights", held=True, dtype="float32")(
    on_weights(_rounded("int4", r"_proj\.weight$"))
)
kind("swapped shards", "shard|swap|halves|tensor|layer", families=PROJ)(on_weights(_shards))
kind(
    "rotary layout",
    "interleav|permut|rotary|rope|q_proj|k_proj",
    held=True,
    families=("llama", "qwen2", "mistral", "granite"),
)(on_weights(_interleaved))
kind("missing bias", "bias|missing|zero", families=("qwen2",))(
    on_weights(
        lambda w, t: [
            x.zero_()
            for n, x in t.items()
            if re.search(w.note.setdefault("which", w.rng.choice(("q_proj", "v_proj", "[qkv]_proj"))) + r"\.bias", n)
        ]
    )
)
kind("missing norm of queries", "q_norm|k_norm|norm", held=True, families=("qwen3",))(
    on_weights(lambda w, t: [x.fill_(1.0) for n, x in t.items() if "q_norm" in n])
)
kind("exchanged projections", "swap|exchang", families=PROJ)(
    on_weights(
        lambda w, t: [_exchange(t, n, n.replace("gate_proj", "up_proj")) for n in t if n.endswith("gate_proj.weight")]
    )
)


def _exchange(t: dict[str, Tensor], a: str, b: str) -> None:
    x = t[a].clone()
    t[a].copy_(t[b])
    t[b].copy_(x)


def _previous(w: World) -> Any:
    old = w.copy()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in old.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * p.float().std().nan_to_num(0.05) * 0.08)
    return old


def _mid(w: World, old: Rows, new: Rows) -> Rows:
    at = w.rng.randint(6, 14)
    return [torch.cat([a[:at], b[at:]]) for a, b in zip(old, new, strict=True)]


@kind("weights changed in mid-request", "mid|previous|from (the|token)|first \\d+|version")
def mid_request(w: World, seed: int) -> Rows:
    fill(w, seed)
    return _mid(w, scored(w, _previous(w)), scored(w))


@kind("weights changed in mid-request, previous given", "mid|previous|version", held=True, previous=True)
def mid_request_known(w: World, seed: int) -> Rows:
    w.previous = _previous(w)
    fill(w, seed)
    return _mid(w, scored(w, w.previous), scored(w))


@kind("stale weights", "stale|previous", previous=True)
def stale(w: World, seed: int) -> Rows:
    w.previous = _previous(w)
    fill(w, seed)
    return scored(w, w.previous)


# ---- input ---------------------------------------------------------------------------------------------------------


def on_prompts(change: Callable[[World, list[int]], list[int]]) -> Plant:
    """The rollout computes with other prompts than are recorded."""

    def plant(w: World, seed: int) -> Rows:
        fill(w, seed)
        given = [change(w, p) for p in w.prompts]
        return picked(logits(w.model, given, w.completions, **w.layout), w.completions)

    return plant


def _drop_span(w: World, p: list[int]) -> list[int]:
    a = w.rng.randint(2, 5)
    return p[:a] + p[a + w.rng.randint(2, 5) :]


kind("missing first token", "first|bos")(on_prompts(lambda w, p: p[1:]))
kind("left truncation", "trunc|beginning|drop|missing")(on_prompts(lambda w, p: p[-10:]))
kind("hidden turn", "prompt|turn|input|span", held=True)(on_prompts(_drop_span))
kind("separator at the end", "separator|token|insert|prompt", held=True)(on_prompts(lambda w, p: [*p, SEPARATOR]))
kind("doubled first token", "first|bos|second")(on_prompts(lambda w, p: [BOS, *p]))
kind("separators left out", "separator|token|prompt|input", held=True)(
    on_prompts(lambda w, p: [t for t in p if t != SEPARATOR])
)


@kind("positions restart", "position", families=ROPE)
def positions_restart(w: World, seed: int) -> Rows:
    fill(w, seed)
    return scored(w, positions=lambda own, n: torch.where(own < n, own, own - n), batch=8)


@kind("positions from padding", "position", held=True)
def positions_from_padding(w: World, seed: int) -> Rows:
    """The response's positions count from the padded prompt."""
    fill(w, seed)
    width = max(map(len, w.prompts))
    return scored(w, positions=lambda own, n: torch.where(own < n, own, own - n + width))


@kind("padding attended to", "padd")
def padding_attended(w: World, seed: int) -> Rows:
    fill(w, seed)
    return scored(w, pad="left", batch=8, attend=True)


@kind("packed without boundaries", "pack|boundar|other request|earlier sequence")
def packed(w: World, seed: int) -> Rows:
    fill(w, seed)
    found: Rows = []
    group = w.rng.choice((2, 4, 8))
    restart = w.rng.choice((True, False))
    for start in range(0, 8, group):
        rows = [
            p + c for p, c in zip(w.prompts[start : start + group], w.completions[start : start + group], strict=True)
        ]
        ids = torch.tensor([[t for row in rows for t in row]])
        place = torch.cat([torch.arange(len(r)) for r in rows]) if restart else torch.arange(ids.shape[1])
        length = ids.shape[1]
        mask = (
            torch.zeros(1, 1, length, length)
            .masked_fill(torch.ones(length, length).triu(1).bool(), torch.finfo(w.dtype).min)
            .to(w.dtype)
        )
        if w.family in ("gemma2", "gpt_oss", "mistral"):
            far = torch.arange(length)[:, None] - torch.arange(length)[None] >= 24
            near = mask.masked_fill(far, torch.finfo(w.dtype).min)
            given: Any = near if w.family == "mistral" else {"full_attention": mask, "sliding_attention": near}
        else:
            given = mask
        with torch.no_grad():
            z = (
                w.model(input_ids=ids, position_ids=place[None], attention_mask=given, use_cache=False)
                .logits[0]
                .float()
            )
        at = 0
        for p, c in zip(w.prompts[start : start + group], w.completions[start : start + group], strict=True):
            found.append(z[at + len(p) - 1 : at + len(p) - 1 + len(c)])
            at += len(p) + len(c)
    return picked(found, w.completions)


# ---- operators and the cache ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def hooked(model: Any, pattern: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handles = [
        m.register_forward_hook(
            lambda _m, _a, out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
        )
        for n, m in model.named_modules()
        if re.search(pattern, n)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def on_operator(pattern: str, change: Callable[[World, Tensor], Tensor]) -> Plant:
    def plant(w: World, seed: int) -> Rows:
        fill(w, seed)
        names = [n for n, _ in w.model.named_modules() if re.search(pattern, n)]
        name = drawn(w, "module", w.rng.choice(names))
        with hooked(w.model, "^" + re.escape(name) + "$", lambda x: change(w, x)):
            return scored(w)

    return plant


_NAMED = "{layer}|layer"
kind("scale of a layer's MLP", "mlp|down_proj|up_proj|activation", families=PROJ)(
    on_operator(r"layers\.\d+\.mlp$", lambda w, x: x * drawn(w, "f", w.rng.uniform(1.1, 1.5)))
)
kind("noise in a layer's attention", "attention|o_proj|v_proj|layer", held=True, families=PROJ)(
    on_operator(
        r"layers\.\d+\.self_attn$",
        lambda w, x: x + x.std() * 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype),
    )
)
kind("rounded norm in a layer", "norm|round", held=True, dtype="float32", families=PROJ)(
    on_operator(
        r"layers\.\d+\.input_layernorm$|layers\.\d+\.post_attention_layernorm$", lambda w, x: x.bfloat16().float()
    )
)


def _fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


@kind("fp8 values and keys", "kv|cache|k_proj|v_proj|key|value|fp8", dtype="float32")
def fp8_cache(w: World, seed: int) -> Rows:
    """Keys (after rope) and values rounded to fp8 for all queries."""
    import sys as _sys

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    fill(w, seed)
    module = _sys.modules[type(w.model).__module__]
    eager = module.eager_attention_forward

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> Any:
        return eager(m, q, _fp8(k), _fp8(v), *args, **kw)

    ALL_ATTENTION_FUNCTIONS.register("planted", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("planted", eager_mask)
    model = w.copy()
    model.set_attn_implementation("planted")
    return scored(w, model)


@kind("sinks dropped", "sink", families=("gpt_oss",))
def sinks(w: World, seed: int) -> Rows:
    fill(w, seed)
    model = w.copy()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith("sinks"):
                p.fill_(-1e4)
    return scored(w, model)


# ---- judging -------------------------------------------------------------------------------------------------------


def capsules(w: World, rollout: Rows, train: Rows, declared: dict[str, Any]) -> tuple[Capsule, Capsule]:
    made = []
    for side, stream, values in (("rollout", "recorded.processed", rollout), ("train", "train.processed", train)):
        manifest = Manifest(side=side, engine="plain", config=declared)  # type: ignore[arg-type]
        made.append(build_capsule(manifest, w.prompts, w.completions, {stream: [v.float().numpy() for v in values]}))
    return made[0], made[1]


def judged(w: World, rollout: Rows, declare: bool = True) -> dict[str, Any]:
    from rlkernel_drift.compare import Options, compare_capsules
    from rlkernel_drift.diagnose.attach import diagnose_verdict
    from rlkernel_drift.diagnose.context import References
    from rlkernel_drift.scoring.model import ReferenceModel

    train = scored(w, pad="right", batch=8)
    declared = {"dtype": str(w.dtype).removeprefix("torch.")} if declare else {}
    a, b = capsules(w, rollout, train, declared)
    verdict = compare_capsules(a, b, Options())
    begin, own = time.perf_counter(), time.process_time()
    previous = None if w.previous is None else ReferenceModel(w.previous.float())
    found = diagnose_verdict(verdict, a, b, lambda: References(ReferenceModel.load(w.path), previous))
    d = found.diagnosis
    size = float((torch.cat(rollout) - torch.cat(train)).abs().nan_to_num(20).clamp(max=20).mean())
    said = "" if d is None else f"{d.cause} | {d.statement} | {d.parameters}"
    return {
        "seconds": time.process_time() - own,
        "wall": time.perf_counter() - begin,
        "compare": verdict.status.value,
        "status": found.status.value,
        "cause": None if d is None else d.cause,
        "confidence": getattr(d, "confidence", ""),
        "said": said,
        "size": size,
        "floor": None if d is None else d.floor,
    }


def run(models: Path, name: str, family: str, seed: int) -> dict[str, Any]:
    k = KINDS[name]
    w = world(models, family, seed, k.dtype)
    torch.manual_seed(seed)
    rollout = k.plant(w, seed)
    found = judged(w, rollout)
    claim = re.sub(r"tried: [^.]*", "", found["said"].lower().replace("unexplained", ""))
    named = found["cause"] not in (None, "none", "unexplained")
    found["place"] = found["cause"] in ("operator", "some-requests", "few-tokens", "mid-request")
    right = named and bool(re.search(k.right, claim))
    above = found["floor"] is None or found["size"] > 1.5 * found["floor"]
    return {
        "kind": name,
        "family": family,
        "seed": seed,
        "dtype": str(w.dtype),
        "note": str(w.note),
        "held": k.held,
        "above": above,
        "named": named,
        "right": right,
        **found,
    }


def healthy(models: Path, family: str, seed: int) -> dict[str, Any]:
    w = world(models, family, 1000 + seed)
    fill(w, seed)
    if w.rng.random() < 0.5:
        w.model.set_attn_implementation("eager")
    rollout = scored(w)
    found = judged(w, rollout, declare=seed % 3 != 0)
    return {
        "kind": "healthy",
        "family": family,
        "seed": seed,
        "dtype": str(w.dtype),
        "declared": seed % 3 != 0,
        "alarm": found["compare"] != "aligned" or found["cause"] not in (None, "none"),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--families", type=int, default=2, help="families per kind")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for i, (name, k) in enumerate(KINDS.items()):
        if (
            (args.kind and name not in args.kind)
            or (not args.kind and k.held != args.held_out)
            or (args.healthy and not args.kind)
        ):
            continue
        for seed in range(args.first, args.first + args.seeds):
            for j in range(min(args.families, len(k.families))):
                family = k.families[(i + j * 3 + seed) % len(k.families)]
                row = run(args.models, name, family, seed)
                rows.append(row)
                mark = (
                    "ok   " if row["right"] else "below" if not row["above"] else "WRONG" if row["named"] else "-----"
                )
                print(
                    f"{mark} {row['seconds']:5.1f}s {name:32s} {family:8s} {row['dtype'][6:]:9s} "
                    f"d={row['size']:.2g} {row['said'][:230]}",
                    flush=True,
                )
    for i in range(args.healthy):
        row = healthy(args.models, list(FAMILIES)[i % len(FAMILIES)], args.first + i)
        rows.append(row)
        if row["alarm"]:
            print(
                f"ALARM {row['family']} {row['dtype']} {row['seed']} declared={row['declared']} {row['compare']} "
                f"{row['said'][:300]}",
                flush=True,
            )
    above = [r for r in rows if r.get("above")]
    print(
        f"{len(above)} above the floor, right {sum(r['right'] for r in above)}, "
        f"wrong names {sum(r['named'] and not r['right'] for r in above)}; "
        f"longest {max(r['seconds'] for r in rows):.1f} s; "
        f"healthy alarms {sum(r.get('alarm', 0) for r in rows)} of {args.healthy}"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, default=str))


if __name__ == "__main__":
    main()
