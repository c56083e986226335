"""Rewards in this process: TRL's signature, weights, abstention, units, and that no wrong answer becomes a number."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Reward, Rewards, Scores, TrainerState, load_reward

BATCH: dict[str, list[Any]] = {"prompts": ["a", "b"], "completions": ["x", "yy"], "completion_ids": [[1], [2, 3]]}


def scores_of(
    *functions: Any, weights: tuple[float, ...] = (), columns: dict[str, list[Any]] | None = None, unit: Any = "batch"
) -> Scores:
    made = [
        Reward(f"{getattr(function, '__name__', 'r')}{i}", function, weights[i] if weights else 1.0, unit)
        for i, function in enumerate(functions)
    ]
    rewards = Rewards(made)
    rewards.require(columns or {})
    return rewards({**BATCH, **(columns or {})})


def judge(*functions: Any, **options: Any) -> list[float | None]:
    return scores_of(*functions, **options).total


def test_a_reward_gets_everything_that_trl_passes() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [1, 2.5]

    assert judge(reward, columns={"answer": [7, 8]}) == [1.0, 2.5]
    data = {**BATCH, "answer": [7, 8]}
    assert {name: seen[name] for name in data} == data
    assert set(seen) == {*data, "trainer_state", "log_metric", "log_extra"}


def test_what_a_reward_logs_and_reads_of_the_run() -> None:
    def a(completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("mean", 1.0)
        log_extra("parsed", ["x", object()])
        return [float(trainer_state.global_step), float(trainer_state.max_steps)]

    async def b(log_metric: Any, **_: Any) -> list[float]:
        log_metric("mean", 2)
        return [0.0, 0.0]

    rewards = Rewards([Reward("a", a, unit="batch"), Reward("b", b, unit="batch")])
    scores = rewards(BATCH, TrainerState(3, 9))
    assert scores.total == [3.0, 9.0] and scores.metrics == {"mean": 1.5}
    assert scores.extra["parsed"][0] == "x" and scores.extra["parsed"][1].startswith("<object object")
    with pytest.raises(InputError, match=r"log_extra\('n'\): 1 values for 2 completions \(.*test_rewards\.py:\d+\)"):
        judge(lambda log_extra, **_: log_extra("n", [1]))


def test_a_reward_without_kwargs_gets_what_it_names() -> None:
    assert judge(lambda completions: [len(c) for c in completions], columns={"answer": [7, 8]}) == [1.0, 2.0]
    assert judge(lambda completions, answer: answer, columns={"answer": [7, 8]}) == [7.0, 8.0]
    with pytest.raises(InputError, match=r"it takes 'anwser', which the data lacks .*answer"):
        judge(lambda completions, anwser: anwser, columns={"answer": [7, 8]})


def test_a_reward_that_empties_its_lists_changes_nothing_for_the_next() -> None:
    def empties(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
        for arguments in (prompts, completions, answer):
            arguments.clear()
        return [1.0, 2.0]

    assert judge(empties, lambda answer, **_: answer, columns={"answer": [7, 8]}) == [8.0, 10.0]


def test_weights_and_abstention() -> None:
    assert judge(lambda **_: [1, 2], lambda **_: [None, 10], weights=(1.0, 0.5)) == [1.0, 7.0]
    scores = scores_of(lambda **_: [1, None], lambda **_: [1, None])
    assert scores.total == [2.0, None] and scores.dropped == {1: "none"}


def boom(**_: Any) -> list[float]:
    raise KeyError("missing thing")


def leave(**_: Any) -> list[float]:
    raise SystemExit(0)  # not sys.exit, which wandb replaces in the tests of loggers


def cancel(**_: Any) -> list[float]:
    raise asyncio.CancelledError


def late(completions: list[str]) -> Any:
    yield 1.0
    raise ValueError("two\nlines")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            boom,
            r"raised KeyError: 'missing thing' \(.*test_rewards\.py:\d+\); all 2 .*\(raised 2\)(.|\n)*Traceback",
        ),
        (leave, r"raised SystemExit: 0 \(.*test_rewards\.py:\d+\)"),
        (cancel, "raised CancelledError"),
        (late, r"raised ValueError: two lines \("),
        (max, r"Python cannot read its parameters; wrap it in `def "),
        (lambda **_: None, "returned None; it must return a list"),
        (lambda **_: {1.0, 2.0}, "returned set"),
        (
            lambda completions, **_: [c["content"] for c in completions],
            "prompts are text, therefore each",
        ),
        (lambda **_: [None, None], "completion 0 was judged by none"),
        (lambda **_: [float("nan")] * 2, "value 0 is nan"),
        (lambda **_: [1.0], "returned 1 values for 2 completions"),
        (lambda **_: [1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (lambda **_: 1.0, "returned float; it must return a list"),
        (lambda **_: "12", "returned str"),
    ],
)
def test_a_reward_that_fails_for_every_completion_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        judge(function)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10**400, r"value 0 is 1000+\.\.\.; it must be a finite number of at most 1e\+15 in size"),
        (10**5000, "value 0 is an object of type int"),
        (-2e15, r"value 0 is -2000000000000000\.0; it must be"),
        ("\ud800", "value 0 is '.ud800'"),
        (b"2", "value 0 is b'2'"),
        (torch.ones(2), r"value 0 is tensor\(\[1., 1.\]\)"),
        (float("nan"), "value 0 is nan"),
        (float("-inf"), "value 0 is -inf"),
        ("2", "value 0 is '2'"),
        ([2], r"value 0 is \[2\]"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_is_no_number_drops_its_completion(value: Any, message: str) -> None:
    scores = scores_of(lambda **_: [1.0, value])
    assert scores.total == [1.0, None] and scores.dropped == {1: "invalid"} and scores.reasons == {"invalid": 1}
    with pytest.raises(InputError, match=message):
        judge(lambda **_: [value, value])


def test_what_a_call_judges_and_what_a_failure_drops() -> None:
    """A unit is what one call gets; a call that fails drops it whole."""

    def picky(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if "bad" in completions:
            raise ValueError
        return [1.0] * len(completions)

    for unit, sizes, dropped in (
        ("completion", [1] * 4, {2: "raised"}),
        ("group", [2, 2], {2: "raised", 3: "raised"}),
        ("batch", [4], None),
    ):
        calls: list[int] = []
        pending = Rewards([Reward("picky", picky, unit=unit)]).begin()  # type: ignore[arg-type]
        for start, texts in ((2, ["bad", "d"]), (0, ["a", "b"])):  # in the order in which they are ready
            pending.add(start, {"prompts": ["p"] * 2, "completions": texts, "completion_ids": [[1]] * 2})
        if dropped is None:
            with pytest.raises(InputError, match=r"reward picky: raised ValueError"):
                pending.result()
        else:
            scores = pending.result()
            assert scores.dropped == dropped
            assert scores.total == [None if i in dropped else 1.0 for i in range(4)]
        assert calls == sizes


def test_a_text_reward_is_told_what_chat_completions_are() -> None:
    chats = [[{"role": "assistant", "content": text}] for text in BATCH["completions"]]
    prompts = [[{"role": "user", "content": text}] for text in BATCH["prompts"]]
    rewards = Rewards([Reward("r", lambda completions, **_: [float(c.strip() == "x") for c in completions])])
    with pytest.raises(InputError, match=r"no attribute 'strip' .*read its text as completion\[0\]\[\"content\"\]"):
        rewards({**BATCH, "prompts": prompts, "completions": chats})


def test_a_sum_that_is_too_large_is_dropped() -> None:
    assert scores_of(lambda **_: [1.0, 1e8], weights=(1e8,)).dropped == {1: "invalid"}
    with pytest.raises(InputError, match=r"the weighted sum of <lambda>0 for completion 0 is above 1e\+15"):
        judge(lambda **_: [1e8, 1e8], weights=(1e8,))


CHANGES = """
import os, torch
os.chdir("/")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_num_threads(torch.get_num_threads() + 1)
torch.set_grad_enabled(False)
"""


@pytest.mark.parametrize("place", ["call", "import"])
def test_what_a_reward_changes_of_the_process_is_put_back(tmp_path: Path, place: str) -> None:
    state = lambda: (
        Path.cwd(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
    )
    before = state()
    body = f"exec({CHANGES!r})\n"
    file = tmp_path / "r.py"
    file.write_text(
        (body if place == "import" else "")
        + "def f(completions):\n"
        + ("    " + body if place == "call" else "")
        + "    return [1.0] * len(completions)\n"
    )
    assert Rewards([Reward("f", f"{file}:f")])(BATCH).total == [1.0, 1.0]
    assert state() == before


def test_a_reward_imports_modules_next_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("first_helper", "second_helper"):
        (tmp_path / f"{name}.py").write_text("value = 2.0\n")
    file = tmp_path / "r.py"
    file.write_text(
        "from first_helper import value\n"
        "def f(completions):\n    import second_helper\n    return [value * second_helper.value] * len(completions)\n"
    )
    assert judge(load_reward(f"{file}:f")) == [4.0, 4.0]
    assert sys.path[-1] == str(tmp_path), "it cannot hide a library from later imports"
    for name in ("first_helper", "second_helper"):
        monkeypatch.delitem(sys.modules, name)


def test_loading_from_a_file_and_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def good(completions, **_):\n    return [1.0] * len(completions)\n\nvalue = 3\n")
    assert load_reward(f"{file}:good")(completions=["x"]) == [1.0]
    assert load_reward("math:fsum")([1.0]) == 1.0
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert load_reward("my_reward:good")(completions=["x"]) == [1.0]
    monkeypatch.delitem(sys.modules, "my_reward")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("reward", "expected FILE.py:function"),
        (":f", "expected FILE.py:function"),
        ("absent.py:f", "file absent.py does not exist"),
        ("no_such_module_anywhere:f", "importing no_such_module_anywhere failed: ModuleNotFoundError"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:pi", "'pi' is float, not a function"),
    ],
)
def test_references_that_do_not_load(reference: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_reward(reference)


def test_a_file_that_fails_on_import_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(InputError, match=r"broken\.py failed: ZeroDivisionError: division by zero \(.*broken\.py:1\)"):
        load_reward(f"{file}:f")
    file.write_text("\nraise SystemExit(0)\n")
    with pytest.raises(InputError, match=r"broken\.py failed: SystemExit: 0 \(.*broken\.py:2\)"):
        load_reward(f"{file}:f")


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two rewards are called 'r'"):
        Rewards([Reward("r", len), Reward("r", len)])
    with pytest.raises(InputError, match="none given"):
        Rewards([])


def test_options_are_arguments_and_misspelt_ones_are_errors() -> None:
    rewards = Rewards([Reward("length", "length", options={"target": 2})])
    assert rewards(BATCH).total == [0.5, 1.0]
    with pytest.raises(
        InputError, match=r"reward length: it has no option 'targte' \(parameters: target, limit, buffer\)"
    ):
        Rewards([Reward("length", "length", options={"targte": 2})])
    with pytest.raises(
        InputError, match=r"reward format: it takes 'pattern', which f\.jsonl lacks .* its options do not"
    ):
        Rewards([Reward("format", "format")]).require(["answer"], "f.jsonl")
    with pytest.raises(InputError, match="'target' is an option and a column of the data"):
        rewards.require(["target"])
