"""Metrics files under the frameworks' own names, run folders, vLLM's hidden states; trends and their change points."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drift_cases import SAMPLED, capsule, sequences

from rlkernel_drift.capsule import Tensor, is_capsule, write_capsule
from rlkernel_drift.capsule.tensor_file import write_tensors
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import compare, with_settings
from rlkernel_drift.compare_metrics import change_point
from rlkernel_drift.errors import CapsuleError, DriftError, Refusal
from rlkernel_drift.inputs import Model, Source, open_input
from rlkernel_drift.inputs.hidden_states import read_hidden_states
from rlkernel_drift.inputs.metrics import read_metrics
from rlkernel_drift.inputs.model import scored


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row, framework, statistic",
    [
        ({"training/rollout_probs_diff_mean": 0.01}, "verl", "tokens.probability_mean"),
        ({"training/rollout_actor_probs_pearson_corr": 0.99}, "verl", "tokens.pearson_probability"),
        ({"rollout_corr/k3_kl": 0.01}, "verl", "tokens.k3"),
        ({"rollout_corr/chi2_token": 0.01}, "verl", "tokens.chi_square"),
        ({"train/train_rollout_logprob_abs_diff": 0.01}, "slime", "tokens.mean"),
        ({"mismatch_kl/all/mean": 0.01}, "prime-rl", "tokens.k3"),
        ({"train/token_mult_prob_error": 1.01}, "NeMo RL", "tokens.multiplicative"),
        ({"train": {"gen_kl_error": 0.01}}, "NeMo RL", "tokens.k3"),
        ({"sampling/sampling_logp_difference/mean": 0.01}, "TRL", "tokens.mean"),
        ({"exact_frac": 1.0}, "rlkernel", "tokens.equal"),
    ],
)
def test_every_framework_by_its_own_names(tmp_path: Path, row: Any, framework: str, statistic: str) -> None:
    metrics = read_metrics(jsonl(tmp_path / "m.jsonl", [{"step": 5 + i, **row} for i in range(3)]))
    assert metrics.frameworks == [framework] and list(metrics.values) == [statistic] and metrics.steps == [5, 6, 7]


def test_formats(tmp_path: Path) -> None:
    name, values = "sampling/sampling_logp_difference/mean", [0.01, 0.02, 0.2]
    rows = [{"step": i, name: v} for i, v in enumerate(values)]
    files = [jsonl(tmp_path / "a.jsonl", rows), tmp_path / "trainer_state.json", tmp_path / "c.csv", tmp_path / "d.log"]
    files[1].write_text(json.dumps({"log_history": rows}))
    files[2].write_text(f"step,{name},note\n" + "".join(f"{r['step']},{r[name]},x\n" for r in rows))
    files[3].write_text("".join(f"step:{r['step']} - {name}:{r[name]} - reward:0.5\n" for r in rows))
    for file in files:
        metrics = read_metrics(file)
        assert metrics.values["tokens.mean"] == values and metrics.steps == [0, 1, 2], file


def test_verdicts_from_metrics_files(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", [{"mismatch_kl/all/mean": 0.003}] * 4)
    bad = jsonl(tmp_path / "bad.jsonl", [{"mismatch_kl/all/mean": 0.03}] * 4)
    assert compare(good, profile="prime-rl").exit_code == 0 and compare(bad, profile="prime-rl").exit_code == 1
    assert compare(good).exit_code == 0
    assert compare(good, profile="nemo").exit_code == 3  # its statistic is not in the file
    none = [{"training/rollout_probs_diff_mean": 0.0, "training/rollout_probs_diff_valid": 0}]
    assert compare(jsonl(tmp_path / "none.jsonl", none)).exit_code == 3  # verl reports an empty comparison
    nan = jsonl(tmp_path / "nan.jsonl", [{"mismatch_kl/all/mean": float("nan")}])
    verdict = compare(nan, profile="prime-rl")
    assert verdict.exit_code == 1 and "NaN or infinite at 1 of 1 steps" in verdict.headline


K3 = "rollout_corr/k3_kl"


def test_every_step_is_judged(tmp_path: Path) -> None:
    verdict = compare(jsonl(tmp_path / "late.jsonl", [{"step": i, K3: 1e-4 if i < 60 else 0.5} for i in range(61)]))
    assert verdict.exit_code == 1 and "worst of 61 steps: step 60" in verdict.headline
    assert verdict.trends[0].change == 60
    low = [{"sampling/importance_sampling_ratio/mean": 0.9 if i == 2 else 1.0} for i in range(5)]
    assert compare(jsonl(tmp_path / "low.jsonl", low), profile="mlperf").exit_code == 1


def test_steps_that_are_not_numbers_fail(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), "NaN", 10**400):
        rows = [{"step": i, K3: value if i == 3 else 1e-4} for i in range(6)]
        verdict = compare(jsonl(tmp_path / "m.jsonl", rows))
        assert verdict.exit_code == 1 and "first at step 3" in verdict.headline, value


def test_a_metrics_file_stands_alone(tmp_path: Path) -> None:
    good, bad = (jsonl(tmp_path / f"{value}.jsonl", [{K3: value}] * 3) for value in (1e-4, 0.5))
    for sides in ((good, bad), (good, capsule("train")), (capsule(), bad)):
        with pytest.raises(DriftError, match="metrics file alone"):
            compare(*sides)
    assert compare(good, good).exit_code == 0


def test_the_default_bars_of_metrics_files(tmp_path: Path) -> None:
    trl = {"sampling/sampling_logp_difference/mean": 0.005, "sampling/importance_sampling_ratio/mean": 0.98}
    verdict = compare(jsonl(tmp_path / "trl.jsonl", [trl] * 4))
    assert verdict.exit_code == 0
    nemo = compare(jsonl(tmp_path / "nemo.jsonl", [{"token_mult_prob_error": 1.2, "gen_kl_error": 1e-3}]))
    assert nemo.exit_code == 1 and "exp|d|" in nemo.headline


@pytest.mark.parametrize(
    "lines, framework, steps, values",
    [
        (
            "(MegatronTrainRayActor pid=1) [2026-04-15 07:57:53] model.py:847 - step 7: {'train/loss': 1e-07, "
            "'train/train_rollout_logprob_abs_diff': np.float64(0.012)}\n",
            "slime",
            [7],
            [0.012],
        ),
        (
            "{'loss': '0.1', 'sampling/sampling_logp_difference/mean': '0.005', 'epoch': '0.1'}\n  1%| | 1/9 [00:01<]\n"
            "{'loss': 0.1, 'sampling/sampling_logp_difference/mean': 0.006}\n",
            "TRL",
            [0, 1],
            [0.005, 0.006],
        ),
        (
            "\x1b[32m12:00 SUCCESS\x1b[0m Step 12 | 3.2s | Loss 0.1 | Mismatch KL 0.0005 | Grad. Norm 1\n"
            "Micro Step 1/4 | Mismatch KL: 0.9\nSUCCESS Step 13 | Time: 3s | Mismatch KL: 0.0006 | LR: 1e-6\n",
            "prime-rl",
            [12, 13],
            [0.0005, 0.0006],
        ),
        (
            "(TaskRunner pid=2) step:1 - training/global_step:0.000 - rollout_corr/k3_kl:np.float64(0.0005) - a:1\n",
            "verl",
            [1],
            [0.0005],
        ),
        (
            "===== Step 3/10 =====\n  • Loss: 0.1\n  • Generation KL Error: 0.0010\n",
            "NeMo RL",
            [3],
            [0.001],
        ),
    ],
)
def test_console_logs(tmp_path: Path, lines: str, framework: str, steps: list[int], values: list[float]) -> None:
    (tmp_path / "run.log").write_text(lines)
    metrics = read_metrics(tmp_path / "run.log")
    assert metrics.frameworks == [framework] and metrics.steps == steps
    assert list(metrics.values.values()) == [values]


def test_odd_rows_are_read_or_refused(tmp_path: Path) -> None:
    for step in ("abc", float("inf"), None, [1], 10**400):
        metrics = read_metrics(jsonl(tmp_path / "m.jsonl", [{"step": step, K3: "1e-3", "weight_version": 2.5}]))
        assert metrics.steps == [0] and metrics.values["tokens.k3"] == [1e-3]
    (tmp_path / "m.csv").write_text(f"step,{K3}\n1,0.1\n2,0.1,7\n")
    with pytest.raises(DriftError, match="line 3 has more fields"):
        read_metrics(tmp_path / "m.csv")
    with pytest.raises(DriftError) as error:
        read_metrics(jsonl(tmp_path / "m.jsonl", [{"loss": 1}]))
    assert "verl: training/rollout_probs_diff_mean" in str(error.value) and "(" not in str(error.value).split("(", 1)[1]


def test_files_without_metrics_are_unusable(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"loss": 1}\n'), ("b.jsonl", "{"), ("c.json", "[" * 100000), ("d.bin", "\udcff")):
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DriftError):
            open_input(str(tmp_path / name), "rollout")


def test_trend_names_step_and_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"step": i, "weight_version": i // 5, "mismatch_kl/all/mean": (0.004 if i < 30 else 0.02) + rng.normal(0, 1e-3)}
        for i in range(60)
    ]
    (trend,) = compare(jsonl(tmp_path / "m.jsonl", rows), profile="prime-rl").trends
    assert (trend.change, trend.version) == (30, 6) and "step 30" in trend.words


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_change_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert change_point(np.abs(rng.normal(0.01, 0.002, 80))) is None
    assert change_point(np.full(50, 0.01)) is None and change_point(np.zeros(0)) is None


def test_two_names_of_one_statistic_are_two_columns(tmp_path: Path) -> None:
    train, val = "mismatch_kl/all/mean", "val/mismatch_kl/all/mean"
    for bad in (0.5, float("nan")):
        for row in ({train: bad, val: 0.001}, {val: 0.001, train: bad}):
            verdict = compare(jsonl(tmp_path / "m.jsonl", [row] * 3))
            assert verdict.exit_code == 1 and train in verdict.headline
    assert compare(jsonl(tmp_path / "m.jsonl", [{train: 0.002, val: 0.001}] * 3)).exit_code == 0
    metrics = read_metrics(tmp_path / "m.jsonl")
    assert metrics.columns == {train: [0.002] * 3, val: [0.001] * 3}
    with pytest.raises(DriftError, match=r"line 1 is not JSON: .* occurs twice"):
        (tmp_path / "m.jsonl").write_text(f'{{"{K3}": 0.5, "{K3}": 0.001}}\n')
        read_metrics(tmp_path / "m.jsonl")
    with pytest.raises(DriftError, match="twice"):
        (tmp_path / "m.csv").write_text(f"{K3},{K3}\n0.5,0.001\n")
        read_metrics(tmp_path / "m.csv")


def test_steps_without_a_value_are_reported(tmp_path: Path) -> None:
    def rows(empty: set[int]) -> list[dict[str, Any]]:
        return [{"step": i, K3: None if i in empty else 1e-4} for i in range(10)]

    end = compare(jsonl(tmp_path / "end.jsonl", rows(set(range(4, 10)))))
    assert end.exit_code == 3 and "no value at 6 of 10 steps" in end.headline
    middle = compare(jsonl(tmp_path / "middle.jsonl", rows({3})))
    assert middle.exit_code == 0 and "no value at 1 of 10 steps, last at step 3" in middle.headline
    (tmp_path / "end.csv").write_text(f"step,{K3}\n1,1e-4\n2,\n")
    assert compare(tmp_path / "end.csv").exit_code == 3
    # Another row of the step has it.
    both = [{"step": 1, K3: 1e-4}, {"step": 1, K3: None}]
    assert compare(jsonl(tmp_path / "both.jsonl", both)).exit_code == 0


@pytest.mark.parametrize(
    "row, words",
    [
        ({K3: "oops"}, "line 2: rollout_corr/k3_kl is 'oops'; expected a number"),
        ({K3: True}, "expected a number"),
        ({K3: -3}, "cannot be below 0"),
        ({"train_rollout_logprob_abs_diff": -5}, "line 2: train_rollout_logprob_abs_diff is -5; it cannot be below 0"),
        ({"token_mult_prob_error": 0.5}, "cannot be below 1"),
        ({"exact_frac": 1.2}, "cannot be above 1"),
        ({"exact_frac": 1.0, "max_abs_diff": 3.0}, "all bits are equal and the largest difference is 3"),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DriftError, match=words):
        read_metrics(jsonl(tmp_path / "m.jsonl", [{K3: 1e-4}, row]))


def test_lines_that_are_cut(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", [{"step": i, K3: 1e-4} for i in range(3)])
    path.write_text(path.read_text() + '{"step": 3, "rollo')
    verdict = compare(path)
    assert verdict.exit_code == 0 and "line 4 of m.jsonl is cut" in verdict.headline
    path.write_text(path.read_text() + "\n{}\n")
    with pytest.raises(DriftError, match="line 4 is not JSON: Invalid control character"):
        read_metrics(path)


def test_missing_statistics_name_the_setting(tmp_path: Path) -> None:
    verl = compare(jsonl(tmp_path / "m.jsonl", [{"training/rollout_probs_diff_mean": 1e-3}] * 3))
    assert verl.exit_code == 3 and "calculate_log_probs" in verl.headline


# ---- sequences -----------------------------------------------------------------------------------------------------


def records(noise: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    prompts, completions, logprobs = sequences()
    rng = np.random.default_rng(1)
    moved = [np.minimum(v + rng.normal(0, noise, len(v)), 0) for v in logprobs]
    return [
        {"prompt_token_ids": p, "token_ids": c, "logprobs": v.tolist(), **{k: f[i] for k, f in fields.items()}}
        for i, (p, c, v) in enumerate(zip(prompts, completions, moved, strict=True))
    ]


def vllm(row: dict[str, Any], i: int) -> dict[str, Any]:
    each = [
        {str(token): {"logprob": value, "rank": 2}, "7777": {"logprob": -0.1, "rank": 1}}
        for token, value in zip(row["token_ids"], row["logprobs"], strict=True)
    ]
    return {
        "request_id": str(8 + i),
        "prompt": "text",
        "prompt_token_ids": row["prompt_token_ids"],
        "outputs": [{"index": 0, "text": "t", "token_ids": row["token_ids"], "logprobs": each}],
    }


def server(row: dict[str, Any], i: int) -> dict[str, Any]:
    each = {"tokens": ["t"] * len(row["token_ids"]), "token_logprobs": row["logprobs"]}
    part = {"prompt_token_ids": row["prompt_token_ids"], "token_ids": row["token_ids"], "logprobs": each}
    return {"id": f"cmpl-{i * 7919}", "object": "text_completion", "choices": [part]}


def chat(row: dict[str, Any], i: int) -> dict[str, Any]:
    content = {"content": [{"token": "t", "logprob": value} for value in row["logprobs"]]}
    part = {"message": {}, "token_ids": row["token_ids"], "logprobs": content}
    return {"id": f"chat-{i}", "prompt_token_ids": row["prompt_token_ids"], "choices": [part]}


def trainer(row: dict[str, Any], i: int) -> dict[str, Any]:
    names = ("prompt_ids", "completion_ids", "completion_logprobs")
    return dict(zip(names, row.values(), strict=True)) | {"reward": 1.0}


@pytest.mark.parametrize("form", [lambda row, i: row, vllm, server, chat, trainer])
def test_lines_of_sequences(tmp_path: Path, form: Any) -> None:
    a = jsonl(tmp_path / "a.jsonl", records())
    b = jsonl(tmp_path / "b.jsonl", [form(row, i) for i, row in enumerate(records(0.01))])
    verdict = compare(str(a), str(b))
    assert (verdict.exit_code, verdict.profile) == (0, "general") and verdict.coverage is not None
    assert verdict.coverage.sequences == 8 and verdict.statistics is not None and verdict.statistics.tokens == 348
    assert compare(str(b), str(a)).exit_code == 0
    # a file compared with a capsule, and a file that drifts
    assert compare(capsule(), str(b)).exit_code == 0 == compare(str(b), capsule("train")).exit_code
    c = jsonl(tmp_path / "c.jsonl", [form(row, i) for i, row in enumerate(records(0.3))])
    assert compare(str(a), str(c)).exit_code == 1


def test_what_generate_writes(tmp_path: Path) -> None:
    """A file of `rlkernel generate --output`: contract, texts, ids, other columns; several completions per prompt."""
    ids = [f"prompt {i // 2}" for i in range(8)]
    texts = [[f" t{token}" for token in row["token_ids"]] for row in records()]
    own = {"contract": ["rlk-2"] * 8, "id": ids, "tokens": texts, "mask": [None] * 8, "prompt": [None] * 8}
    a, b = (jsonl(tmp_path / f"{name}.jsonl", records(**own)) for name in "ab")
    verdict = compare(str(a), str(b))
    assert (verdict.exit_code, verdict.profile) == (0, "bitwise") and "equal bits" in verdict.headline
    jsonl(b, records(1e-4, **own)[2:] + records(1e-4, **own)[:2])
    verdict = compare(str(a), str(b))
    assert verdict.exit_code == 1 and verdict.tokens is not None and str(verdict.tokens.worst[0].text).startswith(" t")
    assert compare(str(a), str(a)).exit_code == 3


def test_sequences_without_prompts(tmp_path: Path) -> None:
    bare = [{k: v for k, v in row.items() if k != "prompt_token_ids"} for row in records(0.01)]
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    jsonl(a, records()), jsonl(b, bare), jsonl(c, [{**row, "mask": [1] * len(row["logprobs"])} for row in bare])
    verdict = compare(str(b), str(c), profile="bitwise")
    assert verdict.exit_code == 0 and "left out: token ids of the prompts" in verdict.to_json()
    for sides in (a, b), (b, a):
        with pytest.raises(DriftError, match=r"b\.jsonl has no prompt_token_ids, and a\.jsonl has prompts"):
            compare(*map(str, sides))
    with pytest.raises(DriftError, match=r"b\.jsonl has no prompt of sequence 0.* record prompt_token_ids"):
        scored(Source("m", "model", model=Model("hf", tmp_path)), open_input(str(b), "rollout"))
    with pytest.raises(DriftError, match="one side only"):
        compare(str(a))


def test_sequences_that_mean_something_else(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for settings, exit_code in (({"temperature": 0.7}, 4), ({"temperature": 1.0}, 0)):
        jsonl(a, records(sampling=[settings] * 8)), jsonl(b, records(0.01, sampling=[{"top_k": 0}] * 8))
        assert compare(str(a), str(b)).exit_code == exit_code
    jsonl(b, records())
    for sides in (str(b), capsule(sampling=SAMPLED)), (capsule(sampling=SAMPLED), str(b)):
        with pytest.raises(DriftError, match=r'b\.jsonl does not say how .* add "sampling": \{"temperature":0.7\} to'):
            compare(*sides)
    jsonl(a, records(sampling=[{"temperature": 0.7}] * 8))
    known, unknown = open_input(str(a), "rollout"), open_input(str(b), "train")
    for taken in with_settings(known, unknown)[1], with_settings(unknown, known)[0]:
        assert taken.capsule is not None and taken.capsule.manifest.sampling.temperature == 0.7
        assert taken.capsule.manifest.left_out == ["sampling settings, taken from a.jsonl"]
    rows = records()
    rows[0]["logprobs"][2] = None  # as JSON writes NaN
    jsonl(a, rows)
    assert "1 NaN and 0 infinite" in compare(str(a), str(b)).headline
    rows = records(mask=[[i > 0 for i in range(len(row["logprobs"]))] for row in records()])
    assert compare(str(jsonl(a, rows)), str(b)).exit_code == 4
    text = "".join(json.dumps(row) + "\n" for row in records(0.01))
    a.write_text(text[:-40])
    verdict = compare(str(a), str(b))
    assert verdict.headline.endswith("compared 7 of 8 sequences with 301 of 348 tokens.")
    assert "line 8, which is cut" in verdict.to_json()


@pytest.mark.parametrize(
    "update, words",
    [
        ({"token_ids": "abc"}, r"token_ids is 'abc'; expected a list of token ids"),
        ({"token_ids": [1, True]}, r"token_ids\[1\] is True; expected a token id from 0 to 2147483647"),
        ({"token_ids": [1, -2]}, r"token_ids\[1\] is -2; expected a token id"),
        ({"token_ids": None}, "has no token_ids, which are compared instead of texts"),
        ({"logprobs": [-1.0]}, "logprobs has 1 values for 41 token ids; expected one for each"),
        ({"logprobs": ["x"] * 41}, r"logprobs\[0\] is 'x'; expected a number"),
        ({"logprobs": [{"7": -1.0}] * 41}, r"logprobs\[0\] has no value of token"),
        ({"logprobs": None}, "has no logprobs; expected a list of numbers"),
        ({"id": 1}, "line 1 has no id, and .*line 2 has one"),
        ({"id": [1]}, r"id is \[1\]; expected a text or an integer"),
        ({"mask": [1]}, r"mask is \[1\]; expected 41 times 0 or 1"),
        ({"prompt_token_ids": None}, "line 2 has no prompt_token_ids, and .*line 1 has one"),
        ({"sampling": {"temperature": 0.5}}, "sampling differs from the first record"),
        ({"outputs": "x"}, "outputs is 'x'; expected a list of objects"),
    ],
)
def test_bad_sequences_are_refused(tmp_path: Path, update: dict[str, Any], words: str) -> None:
    rows = records()
    rows[1] |= update
    with pytest.raises(DriftError, match=rf"a\.jsonl, line \d.*{words}" if "line" not in words else words):
        open_input(str(jsonl(tmp_path / "a.jsonl", rows)), "rollout")


def test_files_with_nothing_in_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DriftError, match=r"a\.jsonl is empty"):
        open_input(str(tmp_path / "a.jsonl"), "rollout")
    with pytest.raises(DriftError, match=r"a\.jsonl, line 2 is not a JSON object"):
        open_input(str(jsonl(tmp_path / "a.jsonl", [records()[0], [1]])), "rollout")
    # A byte order mark and another name change nothing.
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + jsonl(tmp_path / "a.jsonl", records()).read_bytes())
    assert compare(str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"), profile="bitwise").exit_code == 0


# ---- run folders ---------------------------------------------------------------------------------------------------


def bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def run_folder(path: Path, off: float = 0.0, exact: float = 1.0) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text("algorithm: grpo\nrollout: {temperature: 0.8}\nrun: {backend: rlkernel}\n")
    jsonl(path / "metrics.jsonl", [{"step": i, "contract": "rlk-2", "exact_frac": exact} for i in (1, 2)])
    tokens = [
        {"id": i, "text": "x", "logp": -1.0, "rollout": bits(-1.0 - i), "training": bits(-1.0 - i + off)}
        for i in range(40)
    ]
    jsonl(path / "samples.jsonl", [{"step": 1, "prompt": "p", "completion": "c", "exact": not off, "tokens": tokens}])
    return path


def test_a_run_folder_holds_both_sides(tmp_path: Path) -> None:
    verdict = compare(run_folder(tmp_path / "good"))
    assert verdict.exit_code == 0 and verdict.profile == "bitwise" and verdict.rollout is not None
    assert verdict.rollout.kind == "run folder" and verdict.rollout.contract == "rlk-2"
    assert compare(run_folder(tmp_path / "bad", off=1e-6)).exit_code == 1
    # The samples agree, but the run's own metrics over all tokens do not.
    assert compare(run_folder(tmp_path / "tally", exact=0.999)).exit_code == 1
    assert compare(run_folder(tmp_path / "nan", exact=float("nan"))).exit_code == 1


def test_a_runs_own_metrics_are_judged_by_any_profile(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    off = [{"step": i, "exact_frac": 0.1, "max_abs_diff": 9.0} for i in (1, 2)]
    jsonl(folder / "metrics.jsonl", off)
    for profile in ("miles", None):
        verdict = compare(folder, profile=profile)
        assert verdict.exit_code == 3 and "tokens.maximum 9" in verdict.headline
    # The metrics bound every token: half of them differ, by little.
    jsonl(folder / "metrics.jsonl", [{"step": 1, "exact_frac": 0.5, "max_abs_diff": 0.02}])
    verdict = compare(folder, profile="miles")
    assert verdict.exit_code == 0 and "its own figures of 1 steps agree" in verdict.headline


def captured_steps(path: Path, differences: dict[int, float]) -> Path:
    for step in differences:
        for side in ("rollout", "train"):
            write_capsule(capsule(side, step=step), path / f"step-{step:06d}" / side)
    name = "sampling/sampling_logp_difference/mean"
    jsonl(path / "metrics.jsonl", [{"step": step, name: value} for step, value in differences.items()])
    return path


def test_captured_steps_before_the_last_count(tmp_path: Path) -> None:
    verdict = compare(captured_steps(tmp_path / "run", {10: 0.5, 20: 0.5, 30: 0.0}))
    assert verdict.exit_code == 1 and "worst of 3 steps: step 10" in verdict.headline
    good = compare(captured_steps(tmp_path / "good", {10: 0.001, 20: 0.001, 30: 0.0}))
    assert good.exit_code == 0 and "the tokens of step 30, its own figures of 3 steps agree" in good.headline


def test_the_last_step_is_the_one_with_the_largest_number(tmp_path: Path) -> None:
    folder = captured_steps(tmp_path / "run", {999999: 0.0, 1000000: 0.0})
    verdict = compare(folder)
    assert verdict.rollout is not None and verdict.rollout.step == 1000000
    shutil.rmtree(folder / "step-1000000" / "train")
    with pytest.raises(DriftError, match="step-1000000 has no capsule train"):
        compare(folder)


def test_a_refusal_names_the_capsule(tmp_path: Path) -> None:
    good, bad = (write_capsule(capsule(side), tmp_path / side) for side in ("rollout", "train"))
    (bad / "tokens.safetensors").write_bytes(b"x")
    with pytest.raises(CapsuleError, match=f"{bad}: tokens.safetensors") as error:
        compare(good, bad)
    assert error.value.refusal == Refusal.TRUNCATED


@pytest.mark.parametrize("size", [0, 1, 40, -1, -3])
def test_a_cut_manifest_is_named(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("rollout", "train"):
        write_capsule(capsule(side), tmp_path / side)
    manifest = tmp_path / "train" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().rstrip()[:size])
    for sides in ([str(tmp_path / "rollout"), str(tmp_path / "train")], [str(tmp_path)]):
        assert main(["compare", *sides]) == 2
        words = " ".join(capsys.readouterr().err.split()).replace("/ ", "/")
        assert "json-malformed" in words and "manifest.json" in words and "is damaged" in words
    manifest.unlink()
    for sides in ([str(tmp_path / "rollout"), str(tmp_path / "train")], [str(tmp_path)]):
        assert main(["compare", *sides]) == 2 and "file-missing" in capsys.readouterr().err


def test_a_long_manifest_is_that_of_a_capsule(tmp_path: Path) -> None:
    texts = {str(i): "x" * 500 for i in range(200)}
    path = write_capsule(capsule(vocabulary=texts), tmp_path / "c")
    (path / "tokens.safetensors").rename(tmp_path / "t")
    assert (path / "manifest.json").stat().st_size > 1 << 16 and is_capsule(path)


def test_a_real_run_folder(tmp_path: Path) -> None:
    from rlkernel.training.exactness import hex_bits

    assert hex_bits(-1.5) == bits(-1.5)


# ---- vLLM's hidden states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["layers first", "tokens first"])
def test_hidden_states_of_vllm(tmp_path: Path, order: str) -> None:
    side = capsule()
    first = side.sequence(0)
    values = np.random.default_rng(0).normal(size=(2, first.stop, 4)).astype(np.float32)
    shown = values if order == "layers first" else values.swapaxes(0, 1)
    ids = Tensor.of(side.ids[first].astype(np.int64))
    path = tmp_path / "request.safetensors"
    write_tensors(path, {"token_ids": ids, "hidden_states": Tensor.bfloat16(shown)})
    read = read_hidden_states(path, [0, 4])
    assert list(read.operators.values) == ["embedding", "layers.3.output"] and read.sequences == 1
    np.testing.assert_array_equal(
        read.operators.values["layers.3.output"].float32(), Tensor.bfloat16(values[1]).float32()
    )
    with pytest.raises(DriftError, match="2 layers; 3 numbers"):
        open_input(f"{path}@0,1,2", "rollout")
    assert compare(path, side).exit_code == 3  # without log-probabilities the difference is located but not judged
    far = Tensor.of(side.ids[first].astype(np.int64) + (1 << 40))
    write_tensors(tmp_path / "far.safetensors", {"token_ids": far, "hidden_states": Tensor.bfloat16(shown)})
    with pytest.raises(DriftError, match="token_ids must be integers"):
        open_input(str(tmp_path / "far.safetensors"), "rollout")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CapsuleError):
        open_input(str(path), "rollout")
