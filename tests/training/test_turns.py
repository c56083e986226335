"""Rollouts with an environment: observations are in the context and not in the loss, all sampled tokens are exact."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_checkpoint_of_runs import assert_same
from training.tiny import settings_of, trainer_of

from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.tokenizer import Tokenizer
from rlkernel.engine.request import CompletionOutput
from rlkernel.training.batch import Trajectory, pack_trajectories, score
from rlkernel.training.config import Settings, resolve
from rlkernel.training.policy_metrics import known
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training
from rlkernel.training.turns import Completion, observation_ids

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "multi_turn.md"
ENVIRONMENT = """
import os

def game(messages, answer, hint="="):
    assert messages[0] == {"role": "user", "content": messages[0]["content"]} and len(answer) == 3
    said = "".join(message["content"] for message in messages)
    if said.count("7") == 3:
        return None
    return [{"role": "tool", "content": "+0"}, {"role": "user", "content": hint}] if "8" in said else hint

async def fails(messages):
    print("called")
    said = messages[-1]["content"]
    if "8" in said:
        raise ValueError("no eights")
    if "9" in said:
        os._exit(3)
    return 5 if "0" in said else "="

def late(messages, missing):
    return None

def always(messages):
    raise ValueError("never")
"""


def turn_settings(folder: Path, function: str, *words: str, algorithm: str = "grpo") -> Settings:
    folder.mkdir(exist_ok=True)
    (folder / "env.py").write_text(ENVIRONMENT)
    more = [f"rollout.environment={folder / 'env.py'}:{function}", "rollout.stop=['1', '2', '3']", "train.steps=3"]
    return settings_of(folder, *more, "rollout.max_tokens=24", "rollout.max_turns=4", *words, algorithm=algorithm)


def sampled(folder: Path, function: str, *words: str) -> tuple[Any, list[Completion]]:
    """(trainer, completions of its first rollout)."""
    trainer, run = trainer_of(turn_settings(folder, function, *words), folder)
    with run:
        return trainer, [one.completion for one in trainer.rollout(1)]


def test_the_context_is_what_was_sampled_and_observed(tmp_path: Path) -> None:
    words = ["rollout.prompts=6", "rollout.max_turns=3", "rollout.top_k=9"]
    trainer, completions = sampled(tmp_path, "game", *words)
    tokenizer, ends = trainer.parts.tokenizer, set()
    trainer.sampler.llm.wake()
    for one in completions:
        trajectory, context = one.trajectory, []
        for message in one.messages:
            if message["role"] != "assistant":
                context += tokenizer.encode(message["content"])
                continue
            start = len(context)
            while len(context) in trajectory.positions:
                context.append(trajectory.completion[len(context)])
            turn = tokenizer.decode(context[start:])
            assert turn.startswith(message["content"]) and len(turn) - len(message["content"]) <= 1, "a stop string"
        assert context == trajectory.completion and trajectory.positions[-1] == len(context) - 1
        rows = len(known(trajectory.logp)), len(known(trajectory.kept)), len(trajectory.targets)
        assert len(set(rows)) == 1 and len(context) <= 24 and one.turns <= 3
        ended = "max_tokens" if one.truncated else "max_turns" if one.turns == 3 else "None"
        ends.add(ended)
        text = tokenizer.decode(context)
        assert text.startswith(one.text) and len(text) - len(one.text) <= 1
        if ended == "None":
            assert (tokenizer.decode(trajectory.prompt) + one.text).count("7") == 3
    assert ends == {"max_tokens", "max_turns", "None"}
    assert any(len(message["content"]) == 2 for one in completions for message in one.messages)


def test_log_probabilities_are_those_of_the_context(tmp_path: Path) -> None:
    trainer, completions = sampled(tmp_path, "game")
    trainer.sampler.llm.wake()
    differing = 0
    for one in (each.trajectory for each in completions if each.turns > 1):
        logp = known(one.logp)
        (scored,) = trainer.sampler.llm.score([one.prompt + one.completion])
        assert_bitwise(scored[torch.tensor(one.positions) + len(one.prompt) - 1], logp, "the engine, at once")
        trained = score(trainer.model, pack_trajectories([one], "cpu"))
        assert_bitwise(trained.logp.detach(), logp, "the training forward")
        (blind,) = trainer.sampler.llm.score([one.prompt + one.targets])
        differing += compare_bitwise(blind[len(one.prompt) - 1 :], logp).mismatches
    assert differing, "control: without the observations in the context the numbers differ"


def test_observations_have_no_gradient(tmp_path: Path) -> None:
    trainer, _ = sampled(tmp_path, "game")
    one = Trajectory([3, 4], [5, 6, 7, 8, 9], sampled=[0, 1, 4])
    packed = pack_trajectories([one, Trajectory([4], [5])], "cpu")
    assert packed.batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 4]
    assert packed.rows.tolist() == [1, 2, 5, 6] and packed.targets.tolist() == [5, 6, 9, 5]
    assert packed.cu_seqlens.tolist() == [0, 3, 4]

    def gradient(trajectory: Trajectory, weights: list[float]) -> torch.Tensor:
        trainer.optimizer.discard()
        (score(trainer.model, pack_trajectories([trajectory], "cpu")).logp * torch.tensor(weights)).sum().backward()
        trainer.optimizer.gather()
        return torch.cat([parameter.main_grad.flatten() for parameter in trainer.model.parameters()])

    whole = Trajectory(one.prompt, one.completion)
    ours = gradient(one, [1.0] * 3)
    assert torch.allclose(ours, gradient(whole, [1.0, 1.0, 0.0, 0.0, 1.0]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(ours, gradient(whole, [1.0] * 5), rtol=0.1, atol=1e-3), "control: with observations"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_is_exact_and_resumes_to_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    more = ["train.minibatches=2", "kl.coef=0.1", "run.probe_rollouts=1", "loss.old_policy=rollout"]
    folder = run_training(turn_settings(tmp_path / "a", "game", *more, algorithm=algorithm))
    metrics, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    for row in metrics:
        assert row["exact_frac"] == 1.0 and row["dropped"] == 0 and row["grad_norm"] > 0 and 1 < row["turns"] <= 4
        assert row["tokens"] == pytest.approx(row["length"] * 12)
    for row in (row for row in samples if isinstance(row["completion"], list)):
        roles = [message["role"] for message in row["completion"]]
        assert roles[0] == roles[-1] == "assistant" and {"user", "tool"} & set(roles)
        told = "".join(token["text"] for token in row["tokens"] if token["id"] > 1)
        said = "".join(m["content"] for m in row["completion"] if m["role"] == "assistant")
        assert re.sub("[123]", "", told) == said, "the tokens of a record are the sampled ones"
    assert any(isinstance(row["completion"], list) for row in samples)
    report = (folder / "report.html").read_text()
    assert "Turns" in report and "<em>tool:</em> <code><bdi>+0" in report

    more += ["engine.max_num_seqs=2", "engine.prefix_caching=false", "train.save_every=1"]
    other = turn_settings(tmp_path / "b", "game", *more, algorithm=algorithm)
    assert_same(run_training(other), folder)
    resumed = Path(str(other.run.output))
    assert_same(run_training(other, resume=resumed / "checkpoints" / "step-00000002"), folder)


def test_a_failure_of_the_environment_drops_the_completion(tmp_path: Path) -> None:
    words = ["reward_pool.in_process=false", "rewards=[{function: length, options: {target: 9}}]", "rollout.prompts=6"]
    words += ["run.samples=6", "eval.rows=32"]
    folder = run_training(turn_settings(tmp_path, "fails", *words))
    assert_same(run_training(turn_settings(tmp_path, "fails", *words, "reward_pool.workers=1")), folder)
    metrics, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    for row in metrics:
        assert row["exact_frac"] == 1.0 and 0 < row["dropped"] == row["dropped/environment"] < 24
    messages = {row["failure"].partition(" (")[0] for row in samples if "failure" in row}
    assert messages == {
        "raised ValueError: no eights",
        "ended its process with status 3",
        'returned int; an environment returns text, {"role": ..., "content": text}, a list of such messages, or None',
    }
    assert all(row["reward"] is None and row["dropped"] == "environment" for row in samples if "failure" in row)
    assert "called" in (folder / "environment.log").read_text()


def test_errors_before_the_first_step_and_an_environment_that_always_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rollout.environment: .*takes 'missing', which task arithmetic lacks"):
        run_training(turn_settings(tmp_path, "late"))
    with pytest.raises(InputError, match=r"rollout.environment: .* has no 'gone'"):
        run_training(turn_settings(tmp_path, "gone"))
    with pytest.raises(InputError, match=r"(?s)environment: raised ValueError: never.*were dropped.*Traceback"):
        run_training(turn_settings(tmp_path, "always"))


def turn_of(ids: list[int], stop: int | str | None) -> CompletionOutput:
    return CompletionOutput(0, ids, "", [], torch.zeros(len(ids)), "stop", stop, None, 0)


def test_a_chat_template_renders_what_follows_a_turn(tmp_path: Path) -> None:
    """Also one that, like Qwen3's, renders a last turn differently than an earlier one."""
    save_tokenizer(character_tokenizer("0123456789 aeilnorstu:;#"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and loop.last %}#{% endif %}{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = Tokenizer(tmp_path)
    chat, answer = [{"role": "user", "content": "12"}], [{"role": "tool", "content": "5"}]
    end = tokenizer.encode(";")[0]
    expected = tokenizer.encode(";tool:5;assistant:")
    assert observation_ids(tokenizer, {}, chat, turn_of([9], "2"), answer) == expected
    assert observation_ids(tokenizer, {}, chat, turn_of([9, end], end), answer) == expected[1:], "the end is sampled"
    begun = [*chat, {"role": "assistant", "content": "3 "}]
    assert observation_ids(tokenizer, {}, begun, turn_of([9], "2"), answer) == expected
    assert observation_ids(tokenizer, {}, "12", turn_of([9, end], end), answer) == tokenizer.encode("5")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no tools') }}")
    with pytest.raises(InputError, match=r"rollout.environment: .*no tools"):
        observation_ids(Tokenizer(tmp_path), {}, chat, turn_of([9], "2"), answer)


CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}{{ eos_token }}{% else %}+{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CALLED = """
def again(messages):
    assert [m["role"] for m in messages][:3] == ["user", "user", "assistant"]
    return "42"

def digits(completions, completion_ids):
    for messages in completions:
        assert [m["role"] for m in messages] == (["assistant", "user"] * 9)[: len(messages)] and len(messages) % 2
    return [sum(map(len, completion_ids)) + len(completions[0][-1]["content"])]
"""


def test_a_chat_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages reach environment and rewards, the context is the template's, and only observations are tokenized."""
    model = run_training(settings_of(tmp_path, "train.steps=1", "run.probe_rollouts=0")) / "model"
    (model / "chat_template.jinja").write_text(CHAT)
    prompt = [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for _ in range(8)))
    (tmp_path / "env.py").write_text(CALLED)
    options = {"model.path": str(model), "data.train": str(tmp_path / "d.jsonl"), "run.output": str(tmp_path / "out")}
    called = [f"rewards=['{tmp_path / 'env.py'}:digits']", f"rollout.environment={tmp_path / 'env.py'}:again"]
    called.append("reward_pool.in_process=true")
    words = ["rollout.max_tokens=40", "rollout.prompts=8", "rollout.group_size=4", "run.device=cpu", "train.steps=1"]
    trainer, run = trainer_of(resolve("grpo", options=options, overrides=[*words, *called]), tmp_path)
    tokenizer, encode, encoded = trainer.parts.tokenizer, Tokenizer.encode, []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **k: (encoded.append(text), encode(self, text, **k))[1])
    rollout, kept = trainer.rollout, []
    monkeypatch.setattr(trainer, "rollout", lambda step: (kept.extend(found := rollout(step)), found)[1])
    with run:
        metrics, exact = trainer.step(1)
    assert exact.tokens and metrics["exact_frac"] == 1.0 and metrics["dropped"] == 0
    assert set(encoded) == {f"{tokenizer.special_tokens['eos_token']}+42="}
    assert max(one.completion.turns for one in kept) > 2
    for one in (each.completion for each in kept):
        ids = [*one.trajectory.prompt, *one.trajectory.completion]
        rendered = tokenizer.apply_chat_template([*prompt, *one.messages], add_generation_prompt=False)
        context = tokenizer.decode(ids, skip_special_tokens=False)
        assert rendered.startswith(context.replace("<pad>", "")), "messages have no special tokens, the context has"


def example() -> str:
    """The example of the page."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "retry.py").write_text(example())
    words = [f"rewards=['{tmp_path / 'retry.py'}:last_try']", f"rollout.environment={tmp_path / 'retry.py'}:again"]
    folder = run_training(settings_of(tmp_path, *words, "rollout.max_turns=3", "rollout.stop=['1']", "train.steps=1"))
    (row,) = read_jsonl(folder / "metrics.jsonl")
    assert row["turns"] > 1 and row["exact_frac"] == 1.0
