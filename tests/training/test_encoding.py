"""From rows to token ids: forms of prompts, template arguments, rows longer than the context, nothing encoded twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training.tiny import settings_of

from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import ModelConfig
from rlkernel.training.config import resolve
from rlkernel.training.encoding import Encoder
from rlkernel.training.parts import assemble
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if not thinking %}#{% endif %}{% endif %}"
)
CONFIG = ModelConfig(
    "qwen3", vocab_size=80, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position_embeddings=16, eos_token_id=(1,), tie_word_embeddings=True,
)  # fmt: skip
USER, ANSWER = {"role": "user", "content": "12"}, {"role": "assistant", "content": "3 4"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(character_tokenizer("0123456789 aus:;#"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def encoder_of(tokenizer: Tokenizer, **more: Any) -> Encoder:
    return Encoder(CONFIG, tokenizer, **{"max_tokens": 4, "template_args": {"thinking": True}, **more})


def test_the_forms_of_rows(tokenizer: Tokenizer) -> None:
    encoder = encoder_of(tokenizer)

    def prompt(content: Any) -> str:
        return tokenizer.decode(encoder.prompt({"prompt": content}).ids)

    assert prompt("12") == "12" and prompt([USER]) == "u:12;a:"
    assert prompt([USER, ANSWER]) == "u:12;a:3 4", "an answer that has begun is continued, as in TRL"
    assert encoder.prompt({"prompt": [5, 79]}).ids == [5, 79], "ids are taken as they are, also without text"
    made = encoder.example({"prompt": [USER], "completion": [ANSWER]})
    assert (tokenizer.decode(made.prompt), tokenizer.decode(made.completion)) == ("u:12;a:", "3 4;")
    made = encoder.example({"prompt": "12", "completion": "3"})
    assert made.completion == [*tokenizer.encode("3"), 1]
    made = encoder.example({"prompt": [5], "completion": [6, 7]})
    assert (made.prompt, made.completion) == ([5], [6, 7])
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "5"}], "__where__": "f:1"}
    chosen, rejected = encoder.preference(row)
    assert chosen.prompt == rejected.prompt and tokenizer.decode(rejected.completion) == "5;"
    with pytest.raises(InputError, match="token id 80 in the prompt is not below the model's vocab_size 80; the row"):
        encoder.prompt({"prompt": [80]})


def test_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    thinking, silent = (encoder_of(tokenizer, template_args={"thinking": value}) for value in (True, False))
    for encoder, text in ((thinking, "u:12;a:"), (silent, "u:12;a:#")):
        assert tokenizer.decode(encoder.prompt({"prompt": [USER]}).ids) == text
    with pytest.raises(
        InputError, match=r"chat_template_args: the chat template of .* does not read 'thinkin'; it reads"
    ):
        encoder_of(tokenizer, template_args={"thinkin": True})
    with pytest.raises(InputError, match="'messages' is set by rlkernel"):
        encoder_of(tokenizer, template_args={"messages": []})
    with pytest.raises(InputError, match="renders the conversation differently once the answer is added"):
        silent.example({"prompt": [USER], "completion": [ANSWER]})
    with pytest.raises(TokenizerError, match="so it cannot be continued"):
        tokenizer.encode_prompt([USER, {**ANSWER, "content": ""}], {})


def test_rows_longer_than_the_context(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1" * n, "completion": "2" * 5, "__where__": f"f:{n}"} for n in (10, 13, 12, 16)]
    refuses = r"f:13: the prompt has 13 tokens, which leaves 3 of .* of 16 for rollout.max_tokens=4; shorten it, or set"
    with pytest.raises(InputError, match=refuses):
        encoder_of(tokenizer).all_of(rows, encoder_of(tokenizer).prompt, "data.train")
    encoder = encoder_of(tokenizer, drops=True)
    assert [len(prompt.ids) for prompt in encoder.all_of(rows, encoder.prompt, "data.train")] == [10, 12]
    assert [len(made.prompt) for made in encoder.all_of(rows, encoder.example, "data.train")] == [10]
    assert [text.split(":")[1] for text in encoder.dropped] == ["13", "16", "13", "12", "16"]
    assert encoder.dropped[2].endswith("prompt and completion have 19 tokens, the model's context is 16")
    with pytest.raises(
        InputError, match=r"data\.heldout: data\.overlong=drop leaves no row.*\(f:16: the prompt has 16"
    ):
        encoder.all_of(rows[3:], encoder.prompt, "data.heldout")


def test_a_run_counts_what_it_drops_and_encodes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids of prompts and completions go from engine to trainer: after the start no text is tokenized."""
    rows = [{"prompt": f"{i}+{i}="} for i in range(4)] + [{"prompt": [5] * 60}, {"prompt": [5, 6]}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = settings_of(tmp_path, "run.save=true", "train.steps=1", "run.probe_rollouts=0")
    model = run_training(source) / "model"

    def fails(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError("a text was tokenized after the start")

    def assembled(*more: Any) -> Any:
        parts = assemble(*more)
        monkeypatch.setattr(Tokenizer, "encode", fails)
        return parts

    options = {"model.path": str(model), "data.train": str(tmp_path / "d.jsonl"), "rewards": ["training.tiny:digits"]}
    words = ["rollout.max_tokens=12", "rollout.prompts=5", "rollout.group_size=2", "run.device=cpu", "train.steps=2"]
    settings = resolve("grpo", options={**options, "run.output": str(tmp_path / "out")}, overrides=words)
    with pytest.raises(InputError, match=r"d\.jsonl:5: the prompt has 60 tokens"):
        run_training(settings)
    settings.data.overlong = "drop"
    capsys.readouterr()
    monkeypatch.setattr("rlkernel.training.session.assemble", assembled)
    folder = run_training(settings)
    assert "exceed the model's context and were dropped (data.overlong): 1; the first: " in capsys.readouterr().out
    assert json.loads((folder / "summary.json").read_text())["dropped_rows"] == 1
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [row["exact_frac"] for row in metrics] == [1.0, 1.0]
