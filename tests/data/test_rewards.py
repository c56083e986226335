"""Rewards: TRL's signature, weights, abstention, and that no wrong answer of a reward becomes a number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Reward, Rewards, load_reward

PROMPTS, TEXTS, IDS = ["a", "b"], ["x", "yy"], [[1], [2, 3]]


def judge(*functions: Any, weights: tuple[float, ...] = (), columns: dict[str, list[Any]] | None = None) -> list[float]:
    rewards = [
        Reward(f"{getattr(function, '__name__', 'r')}{i}", function, weights[i] if weights else 1.0)
        for i, function in enumerate(functions)
    ]
    return Rewards(rewards)(PROMPTS, TEXTS, IDS, columns or {}).total


def test_a_reward_gets_everything_that_trl_passes() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [1, 2.5]

    assert judge(reward, columns={"answer": [7, 8]}) == [1.0, 2.5]
    assert seen == {"prompts": PROMPTS, "completions": TEXTS, "completion_ids": IDS, "answer": [7, 8]}


def test_a_reward_without_kwargs_gets_what_it_names() -> None:
    assert judge(lambda completions: [len(c) for c in completions], columns={"answer": [7, 8]}) == [1.0, 2.0]
    assert judge(lambda completions, answer: answer, columns={"answer": [7, 8]}) == [7.0, 8.0]
    with pytest.raises(InputError, match=r"it takes 'anwser', which the data lacks .*answer"):
        judge(lambda completions, anwser: anwser, columns={"answer": [7, 8]})


def test_weights_and_abstention() -> None:
    assert judge(lambda **_: [1, 2], lambda **_: [None, 10], weights=(1.0, 0.5)) == [1.0, 7.0]
    with pytest.raises(InputError, match="completion 1 was judged by none"):
        judge(lambda **_: [1, None], lambda **_: [1, None])


def boom(**_: Any) -> list[float]:
    raise KeyError("missing thing")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (boom, r"raised KeyError: 'missing thing' \(.*test_rewards\.py:\d+\)"),
        (lambda **_: None, "returned None; it must return a list"),
        (lambda **_: [None, None], "completion 0 was judged by none"),
        (lambda **_: [1.0, float("nan")], "value 1 is nan"),
        (lambda **_: [1.0, float("-inf")], "value 1 is -inf"),
        (lambda **_: [1.0], "returned 1 values for 2 completions"),
        (lambda **_: [1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (lambda **_: 1.0, "returned float; it must return a list"),
        (lambda **_: "12", "returned str"),
        (lambda **_: [1.0, "2"], "value 1 is '2'"),
        (lambda **_: [1.0, [2]], r"value 1 is \[2\]"),
    ],
)
def test_a_wrong_answer_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        judge(function)


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
    with pytest.raises(InputError, match=r"broken\.py failed: ZeroDivisionError"):
        load_reward(f"{file}:f")


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two rewards are called 'r'"):
        Rewards([Reward("r", len), Reward("r", len)])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="none given"):
        Rewards([])
