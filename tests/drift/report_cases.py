"""Verdicts for the report's tests and its example: made-up numbers of the size that real pairs have, real gates.

`python tests/drift/report_cases.py FOLDER [NAME ...]` writes each as HTML and PNG.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlkernel_drift.capsule import Capsule, Floor, Manifest, Model, Operators, Sampling, Tensor, build_capsule
from rlkernel_drift.capsule.manifest import Weights
from rlkernel_drift.compare import Options, compare, compare_sources
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates import unusable
from rlkernel_drift.inputs import Source, open_input
from rlkernel_drift.knowledge import finding
from rlkernel_drift.profiles import load_profile
from rlkernel_drift.verdict import Diagnosis, HypothesisResult, Verdict

PROMPTS = [
    "<|user|>\n"
    "A tank holds 240 litres. A pump fills 18 litres a minute while a leak loses 3. When is it full?\n"
    "<|assistant|>\n",
    "<|user|>\nWrite a Python function that returns the longest common prefix of a list of words.\n<|assistant|>\n",
    "<|user|>\nWie viele Primzahlen liegen zwischen 20 und 50?\n<|assistant|>\n",
    "<|user|>\nExplain why 0.1 + 0.2 is not 0.3 in floating point.\n<|assistant|>\n",
]
COMPLETIONS = [
    "<think>\n"
    "The pump adds 18 litres a minute and the leak takes 3 away, so the net rate is 18 - 3 = 15 litres a "
    "minute. From empty the tank needs 240 / 15 = 16 minutes.\n\n"
    "Check: 16 * 18 = 288 litres pumped, 16 * 3 = 48 litres lost, and 288 - 48 = 240. Good.\n"
    "</think>\n\n"
    "The tank is full after **16 minutes**, since it gains 15 litres each minute and holds 240 litres.",
    "<think>\n"
    "Compare the smallest and the largest word: whatever these two share, all words in between share too.\n"
    "</think>\n\n"
    "```python\n"
    "def common_prefix(words: list[str]) -> str:\n"
    '    """Longest prefix of all words."""\n'
    "    if not words:\n"
    '        return ""\n'
    "    first, last = min(words), max(words)\n"
    "    for i, letter in enumerate(first):\n"
    "        if letter != last[i]:\n"
    "            return first[:i]\n"
    "    return first\n"
    "```\n\n"
    "`min` and `max` order words by their letters, so one pass over the shorter of the two is enough.",
    "<think>\n"
    "Primzahlen ab 20: 23, 29, 31, 37, 41, 43, 47. Das sind sieben. 49 ist 7 * 7, also keine.\n"
    "</think>\n\n"
    "Zwischen 20 und 50 liegen **sieben** Primzahlen: 23, 29, 31, 37, 41, 43 und 47.",
    "<think>\n"
    "Binary fractions end only where the denominator is a power of two.\n"
    "</think>\n\n"
    "Neither 0.1 nor 0.2 is a sum of finitely many powers of two. Each is rounded to the nearest double, "
    "and the rounded sum is not the double nearest to 0.3: it is one step above it, 0.30000000000000004. "
    "Compare with a tolerance, or count in whole cents.",
]
_PIECE = re.compile(r"<\|?/?\w+\|?>|\n+| ?[A-Za-zÀ-ÿ]+| ?\d| +|[^\w\s]")
LAYERS = 12
OPERATORS = [
    *("attn_norm", "q_proj", "k_proj", "v_proj", "attention", "o_proj"),
    *("mlp_norm", "gate_proj", "up_proj", "down_proj", "output"),
]


class Text:
    """Ids of the pieces of the texts, and the vocabulary."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, 1000 + 37 * len(self.ids)) for piece in _PIECE.findall(text)]

    @property
    def vocabulary(self) -> dict[str, str]:
        return {str(number): piece for piece, number in self.ids.items()}


def pair(
    noise: Any,
    *,
    copies: int = 8,
    seed: int = 0,
    rollout: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    operators: tuple[Operators, Operators] | None = None,
) -> tuple[Capsule, Capsule]:
    """Two capsules; `noise(rng, logprobs)` makes the train side's log-probabilities."""
    rng = np.random.default_rng(seed)
    text = Text()
    prompts = [text.encode(p) for _ in range(copies) for p in PROMPTS]
    completions = [text.encode(c) for _ in range(copies) for c in COMPLETIONS]
    own = [-np.minimum(rng.exponential(0.35, len(c)) ** 1.6, 12).astype(np.float32) for c in completions]
    other = [noise(rng, values).astype(np.float32) for values in own]
    config = {"dtype": "bfloat16", "tensor_parallel": 1, "max_model_len": 4096, "seed": 7}
    versions = {"torch": "2.11.0", "example-trainer": "2.0.0", "python": "3.12.4"}
    model = Model(name="synthetic-12-layers", family="none", vocab_size=16384)
    base = {"model": model, "vocabulary": text.vocabulary, "sampling": Sampling(temperature=1.0)}
    sides = []
    for side, name, values, extra in (("rollout", "recorded", own, rollout), ("train", "train", other, train)):
        given = {
            "config": config,
            "versions": versions,
            "hardware": {"device": "none: synthetic numbers"},
            **base,
            **(extra or {}),
        }
        streams = {f"{name}.processed": values}
        if side == "rollout":
            streams["prefill.processed"] = [v + rng.normal(0, 2e-3, len(v)).astype(np.float32) for v in values]
        recorded = None if operators is None else operators[side == "train"]
        sides.append(build_capsule(Manifest(side=side, **given), prompts, completions, streams, operators=recorded))
    return sides[0], sides[1]


def names() -> list[str]:
    return ["embedding", *(f"layers.{i}.{o}" for i in range(LAYERS) for o in OPERATORS), "final_norm", "lm_head"]


def recordings(tokens: int, faulty: str, seed: int = 5) -> tuple[Operators, Operators]:
    """Sampled rows of all operators: errors grow along the layers, a little more from the faulty one on."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(tokens, 192, replace=False))
    left, right = {}, {}
    size = 3e-3
    token_scale = np.exp(rng.normal(0, 0.35, (len(rows), 1)))
    for name in names():
        size *= 1.35 if name == faulty else 1.004
        value = rng.normal(size=(len(rows), 16)).astype(np.float32)
        left[name] = Tensor.of(value)
        wobble = size * token_scale * (0.6 if name.endswith("norm") else 1.0) * (0 if name == "embedding" else 1)
        right[name] = Tensor.of((value + wobble * rng.normal(size=value.shape)).astype(np.float32))
    return Operators(rows, left), Operators(rows, right)


def operator_fault() -> Verdict:
    """A faulty operator in layer 7: drift, localised, diagnosed."""
    faulty = "layers.7.down_proj"
    model = ["--model", "synthetic-12-layers"]
    recorded = ["rlkernel-drift", "capture", "--engine", "example", *model, "--prompts", "prompts.jsonl"]
    common = {"dtype": "bfloat16", "tensor_parallel": 1, "seed": 7}
    rollout = {
        "engine": "example-engine",
        "config": {**common, "attention_backend": "FLASH_ATTN", "quantization": "fp8"},
        "versions": {"torch": "2.11.0", "example-engine": "1.4.0", "python": "3.12.4"},
        "command": recorded,
        "step": 140,
        "weights": Weights(version=35),
    }
    train = {
        "engine": "example-trainer",
        "config": {**common, "attention_backend": "sdpa", "quantization": "none"},
        "command": recorded,
        "step": 140,
        "weights": Weights(version=35),
        "floor": Floor(mean=0.017, p99=0.09, maximum=0.6, k3=4e-4, tokens=4096, permutations=["batch", "padding"]),
    }
    noise = lambda rng, v: np.minimum(v + rng.normal(0.004, 0.02 + 0.06 * np.abs(v)), 0)
    made = pair(noise, rollout=rollout, train=train)
    made = pair(noise, rollout=rollout, train=train, operators=recordings(made[0].tokens, faulty))
    verdict = compare(*made)
    assert verdict.layers is not None and verdict.statistics is not None
    rng = np.random.default_rng(8)
    view = verdict.layers
    floor = [float(4.4e-3 * (0.5 if n.endswith("norm") else 1) * np.exp(rng.normal(0, 0.03))) for n in view.operators]
    local = [f * float(np.exp(rng.normal(-0.05, 0.07))) for f in floor]
    place = view.operators.index(faulty)
    local[place] *= 2.1
    as_is = verdict.statistics.mean
    splice: list[float | None] = [None] * len(floor)
    for i, name in enumerate(view.operators):
        if name.endswith(".output"):
            left = (0.97 if i < place else 0.53) * (1 - 0.4 * i / len(floor))
            splice[i] = as_is * (left + float(rng.normal(0, 0.01)))
    layers = view.model_copy(update={"local": local, "floor": floor, "splice": splice})
    around = [value for value in splice[place - len(OPERATORS) : place + len(OPERATORS)] if value is not None]
    message = (
        f"{faulty} is {local[place] / floor[place]:.2g} times its floor; "
        f"exchanging the layer's output takes {(around[0] - around[-1]) / as_is:.0%} of the difference away"
    )
    hypotheses = [
        ("layer output exchanged", "operator", "rollout", {"operator": faulty}, 0.0169),
        ("body in another dtype", "body-dtype", "rollout", {"dtype": "float16"}, 0.0391),
        ("temperature", "temperature", "train", {"temperature": 1.01}, 0.0402),
        ("logits in bfloat16", "bf16-logits", "rollout", {}, 0.0408),
        ("top-p renormalised", "top-p", "rollout", {"top_p": 0.99}, 0.0411),
        ("weights of the version before", "stale-weights", "rollout", {"version": 34}, 0.102),
        ("positions restart", "positions-restart", "train", {}, 0.58),
        ("one token late", "off-by-one", "train", {}, 1.94),
    ]
    diagnosis = Diagnosis(
        cause="operator",
        side="rollout",
        statement=f"The rollout computes {faulty} differently: as after rounding its input to eight bits.",
        residual=0.0169,
        as_is=as_is,
        floor=0.017,
        floor_source="rlkernel-drift floor, 4096 tokens",
        hypotheses=[
            HypothesisResult(name=n, cause=c, side=s, parameters=p, residual=r, tail=3 * r, over_floor=r / 0.017)
            for n, c, s, p, r in hypotheses
        ],
        excluded=["missing BOS: both sides start with the same ids", "LoRA: neither side has an adapter"],
        finding=finding("operator", message, operator=faulty, local=local[place], floor=floor[place]),
    )
    update = {
        "layers": layers,
        "diagnosis": diagnosis,
        "command": ["rlkernel-drift", "compare", "rollout.capsule", "train.capsule", "--html", "report.html"],
        "headline": verdict.headline,
    }
    sides = {
        "rollout": verdict.rollout or _side("rollout.capsule", made[0]),
        "train": verdict.train or _side("train.capsule", made[1]),
    }
    return verdict.model_copy(update={**update, **sides})


def _side(label: str, capsule: Capsule) -> Any:
    from rlkernel_drift.compare import _side

    return _side(Source(label, "capsule", capsule=capsule), capsule)


def _compare(made: tuple[Capsule, Capsule], profile: str | None = None) -> Verdict:
    sources = [
        Source(f"{name}.capsule", "capsule", capsule=c) for name, c in zip(("rollout", "train"), made, strict=True)
    ]
    command = ["rlkernel-drift", "compare", "rollout.capsule", "train.capsule", "--html", "report.html"]
    options = Options(profile=load_profile(profile) if profile else None, command=command)
    return compare_sources(sources[0], sources[1], options)


def lattice() -> Verdict:
    """bf16 logits: differences are multiples of 1/32; nothing diagnosed."""
    noise = lambda rng, v: v - rng.integers(0, 7, len(v)) * (v < -0.2) / 32
    config = {"dtype": "bfloat16", "logits_dtype": "bfloat16"}
    return _compare(
        pair(
            noise,
            rollout={"engine": "example-engine", "config": config},
            train={"engine": "example-trainer", "config": {"dtype": "bfloat16", "logits_dtype": "float32"}},
        )
    )


def aligned() -> Verdict:
    """All bits equal, all operators recorded."""
    made = pair(
        lambda rng, v: v,
        rollout={"engine": "rlkernel", "contract": "rlk-2"},
        train={"engine": "rlkernel", "contract": "rlk-2"},
    )
    return _compare(made)


def bits() -> Verdict:
    """A difference of one ulp in one operator and its consequences, under the bitwise profile."""
    noise = lambda rng, v: np.where(rng.random(len(v)) < 0.3, v * np.float32(1 + 3e-7 * rng.normal()), v)
    made = pair(noise)
    rows, left, right = np.arange(0, made[0].tokens, 16), {}, {}
    rng = np.random.default_rng(2)
    size = 0.0
    for name in names():
        value = rng.normal(size=(len(rows), 16)).astype(np.float32)
        size = 6e-8 if name == "layers.5.attention" else size * 1.01
        moved = (value * (1 + size * rng.normal(size=value.shape))).astype(np.float32)
        moved[: len(rows) // 3] = value[: len(rows) // 3]
        left[name], right[name] = Tensor.of(value), Tensor.of(moved)
    return _compare(pair(noise, operators=(Operators(rows, left), Operators(rows, right))), "bitwise")


def semantics() -> Verdict:
    """Temperature differs: the inputs differ, later gates are not reached."""
    return _compare(pair(lambda rng, v: v * 0.7, rollout={"sampling": Sampling(temperature=0.7)}))


def metrics() -> Verdict:
    """A metrics file of a run whose level changes at a step."""
    rng = np.random.default_rng(4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for step in range(240):
                size = (0.011 if step < 150 else 0.036) * float(np.exp(rng.normal(0, 0.12)))
                row = {
                    "step": step,
                    "train_rollout_logprob_abs_diff": size,
                    "mismatch_kl/all/mean": size**2 * 3,
                    "weights_version": step // 2,
                }
                file.write(json.dumps(row) + "\n")
        source = open_input(str(path), "rollout")
        verdict = compare_sources(source, source, Options(command=["rlkernel-drift", "compare", "metrics.jsonl"]))
    return Verdict.model_validate_json(verdict.to_json().replace(folder + "/", ""))


def broken() -> Verdict:
    """An input that cannot be read."""
    return unusable(
        DriftError("rollout.capsule/manifest.json nests deeper than 16 levels"), ["rlkernel-drift", "compare", "a", "b"]
    )


def nothing() -> Verdict:
    """No token counts on both sides."""
    made = pair(lambda rng, v: np.full(len(v), np.nan, np.float32))
    return _compare(made)


CASES = {
    "operator": operator_fault,
    "lattice": lattice,
    "aligned": aligned,
    "bits": bits,
    "semantics": semantics,
    "metrics": metrics,
    "broken": broken,
    "nothing": nothing,
}


def main(folder: str, *wanted: str) -> None:
    """Writes the cases."""
    from rlkernel_drift.report import write_html
    from rlkernel_drift.report.figure import write_png

    for name in wanted or CASES:
        verdict = CASES[name]()
        (Path(folder) / f"{name}.html").write_text(write_html(verdict), encoding="utf-8")
        write_png(verdict, Path(folder) / f"{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
