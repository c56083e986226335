"""`rlkernel data check`: counts, lengths and duplicates of a file, and its first bad line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlkernel.cli.main import main
from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.models import ModelConfig
from rlkernel.models.config import to_hf

CONFIG = ModelConfig(
    "qwen3", vocab_size=16, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position_embeddings=16, eos_token_id=(1,), tie_word_embeddings=True,
)  # fmt: skip
CHAT = [{"role": "user", "content": "12"}]
FILES: dict[str, list[Any]] = {
    "prompts": [{"prompt": "1" * n, "answer": n or None} for n in (1, 2, 3, 2)] + [{"prompt": CHAT, "answer": [1]}],
    "examples": [{"prompt": "1", "completion": "234"}, {"prompt": "1" * 15, "completion": "2"}],
    "pairs": [{"chosen": "12", "rejected": "13"}, {"prompt": [3], "chosen": [4, 5], "rejected": [6]}],
    "bad": [{"prompt": "1"}, {"prompt": "2"}, {"prompt": ""}, {"prompt": 1}],
    "unknown": [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "a"}]}],
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in FILES.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tokenizer(character_tokenizer("0123456789:;"), "m")
    Path("m/config.json").write_text(json.dumps(to_hf(CONFIG)))
    Path("m/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if long %}:::{% endif %}{% endfor %}"
    )


def check(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[dict[str, str], str]:
    """The figures by name (the title's name is empty), and standard error."""
    assert main(["data", "check", *words]) == status
    found = capsys.readouterr()
    title, *lines = found.out.splitlines() or [""]
    return {"": title, **dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)}, found.err  # type: ignore[arg-type]


def test_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = check(capsys, "prompts", "--model", "m", "--max-tokens", "14", "--chat-template-args", "long=true")
    assert found == {
        "": "prompts: 5 rows, read for grpo",
        "distinct prompts": "4",
        "duplicate rows": "1, the first: prompts:4 repeats prompts:2",
        "column prompt": "text 4, messages 1",
        "column answer": "int 4, list 1",
        "prompt, characters": "min 1, median 2, p95 3, max 3",
        "prompt, tokens": "min 1, median 2, p95 5, max 5",
        "exceed the context": "2, the first: prompts:3: the prompt has 3 tokens, which leaves 13 of the model's "
        "context of 16 for rollout.max_tokens=14; data.overlong=drop leaves them out",
    }


def test_examples_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = check(capsys, "examples", "--model", "m")
    assert found[""] == "examples: 2 rows, read for sft" and found["completion, tokens"].endswith("max 4")
    assert found["exceed the context"].startswith("1, the first: examples:2: prompt and completion have 17 tokens")
    found, _ = check(capsys, "pairs", "--model", "m")
    assert found[""] == "pairs: 2 rows, read for dpo" and found["column chosen"] == "text 1, token ids 1"
    assert found["chosen, tokens"] == "min 2, median 2, p95 2, max 2" and found["exceed the context"] == "0"
    assert found["chosen, characters"] == "min 1, median 1, p95 1, max 1"


def test_the_first_bad_line(capsys: pytest.CaptureFixture[str]) -> None:
    found, error = check(capsys, "bad", status=2)
    assert found[""] == "bad: 2 rows before the first bad line, read for grpo" and found["distinct prompts"] == "2"
    assert error == "rlkernel: data check: bad:3: column 'prompt' is empty; it must hold at least one token\n"
    for words, message in (
        (["bad", "--algorithm", "sft"], "bad:1: column 'completion' is missing"),
        (["absent"], "cannot read absent: No such file"),
        (["prompts", "--model", "absent"], "data check: absent does not exist; expected a local Hugging Face model"),
        (
            ["prompts", "--model", "m", "--chat-template-args", "lang=1"],
            "does not read 'lang'; it reads long, messages",
        ),
        (["prompts", "--model", "m", "--chat-template-args", "long"], "'long': expected NAME=VALUE"),
        (["prompts", "--model", "m", "--chat-template-args", '{"long": tru}'], "Expecting value"),
    ):
        assert message in check(capsys, *words, status=2)[1]
    assert main(["data", "check", "prompts", "--model", "m", "--chat-template-args", '{"long": true}']) == 0
