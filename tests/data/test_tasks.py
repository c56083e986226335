"""Built-in tasks: what every task promises, and the character tokenizer as a real Hugging Face tokenizer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.data.tasks import TASKS, load_task


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"shapes"}))  # whose prompts are images: test_shapes.py
def test_a_task_keeps_its_promises(name: str) -> None:
    task = load_task(name)
    rows = list(islice(task.train_prompts(3), 500))
    assert rows == list(islice(task.train_prompts(3), 500))
    assert rows != list(islice(task.train_prompts(4), 500))
    heldout = task.heldout()
    assert heldout == task.heldout()
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in heldout}
    examples = task.sft_examples(50, 1)
    assert len(examples) == 50 and examples == task.sft_examples(50, 1)
    assert not {row["prompt"] for row in examples} & {row["prompt"] for row in heldout}
    tokenizer = task.tokenizer()
    config = task.model_config()
    assert config["vocab_size"] >= tokenizer.get_vocab_size()
    assert config["eos_token_id"] == tokenizer.token_to_id("<eos>")
    for row in [*rows[:50], *heldout]:
        assert tokenizer.decode(tokenizer.encode(row["prompt"]).ids) == row["prompt"]
    columns = {key: [row[key] for row in heldout] for key in heldout[0] if key != "prompt"}
    rewards = task.reward([row["prompt"] for row in heldout], ["" for _ in heldout], **columns, trainer_state=None)
    assert len(rewards) == len(heldout) and all(isinstance(reward, float) for reward in rewards)


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="task 'chess' does not exist; built-in tasks: arithmetic"):
        load_task("chess")


def test_the_character_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from rlkernel.data.tokenizer import Tokenizer

    save_tokenizer(character_tokenizer("0123456789+= \n"), tmp_path)
    text = "12 +3=\n15"
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    assert theirs(text).input_ids == ours.encode(text) and len(ours.encode(text)) == len(text)
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text
    assert (ours.pad_token_id, ours.eos_token_id) == (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)
    assert ours.decode([2, 1]) == "0"


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_has_each_character_once(alphabet: str) -> None:
    with pytest.raises(ValueError, match="each only once"):
        character_tokenizer(alphabet)
