"""Prompt and example files: what is read, and that every bad line is an error with its file and number."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.contents import WHERE
from rlkernel.data.errors import InputError
from rlkernel.data.prompts import columns_of, load_examples, load_prompts
from rlkernel.data.splits import shuffled, split_heldout


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_prompts_keep_their_extra_columns_and_their_place(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "héllo"}]
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "answer": 1}, "", {"prompt": chat, "answer": None}, "")
    rows = load_prompts(path)
    assert [row["prompt"] for row in rows] == ["a", chat]
    assert [row[WHERE] for row in rows] == [f"{path}:1", f"{path}:3"]
    assert columns_of(rows) == {"answer": [1, None]}


def test_a_file_that_a_spreadsheet_saved(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "\\ud83d\\ude00"}\r\n')
    assert [(row["prompt"], row[WHERE]) for row in load_prompts(path)] == [("a", f"{path}:1"), ("😀", f"{path}:3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "p.jsonl:2: not JSON"),
        ("[1]", "p.jsonl:2: expected a JSON object"),
        ('{"text": "a"}', "p.jsonl:2: column 'prompt' is missing (columns found: 'text')"),
        ("{}", "columns found: none"),
        ('{"prompt": ""}', "p.jsonl:2: column 'prompt' is empty"),
        ('{"prompt": []}', "p.jsonl:2: column 'prompt' is an empty list"),
        ('{"prompt": 3}', "must be text, a list of chat messages or a list of token ids, got int"),
        ('{"prompt": [{"role": "robot", "content": "x"}]}', "message 0"),
        ('{"prompt": [{"role": "user"}]}', "message 0"),
        ('{"prompt": "b", "completions": 1}', "column 'completions' is an argument of every reward"),
        ('{"prompt": "b", "new": 1}', "p.jsonl:2: column 'new' is new"),
        ('{"prompt": "b", "trainer_state": 1}', "column 'trainer_state' is an argument of every reward"),
        ('{"prompt": "b", "answer": %s}' % ("9" * 5000), "p.jsonl:2: not JSON that can be read (Exceeds the limit"),
        ('{"prompt": "b", "answer": %s}' % ("[" * 99999 + "]" * 99999), "p.jsonl:2: not JSON that can be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, line)
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    assert message in str(caught.value)


def test_a_column_that_a_later_row_lacks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b"})
    with pytest.raises(InputError, match=r"p\.jsonl:2: column 'answer' is missing, which .*p\.jsonl:1 has"):
        load_prompts(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="has no rows"):
        load_prompts(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InputError, match="is not UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")


def test_examples_of_text_and_of_messages(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = write(
        tmp_path / "e.jsonl",
        {"prompt": "q", "completion": "a"},
        {"prompt": [user], "completion": [answer]},
        {"messages": [user, answer]},
    )
    rows = load_examples(path)
    assert (rows[0]["prompt"], rows[0]["completion"]) == ("q", "a")
    assert (
        (rows[1]["prompt"], rows[1]["completion"]) == (rows[2]["prompt"], rows[2]["completion"]) == ([user], [answer])
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q"}, "column 'completion' is missing"),
        ({"prompt": "q", "completion": ""}, "column 'completion' is empty"),
        (
            {"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]},
            "'prompt' is text and 'completion' is messages",
        ),
        ({"messages": [{"role": "user", "content": "q"}]}, "end with the assistant's message"),
        ({"messages": "q"}, "must be a list"),
    ],
)
def test_a_bad_example_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "e.jsonl", row)
    with pytest.raises(InputError) as caught:
        load_examples(path)
    assert f"{path}:1" in str(caught.value) and message in str(caught.value)


def test_held_out_prompts_are_never_trained_on() -> None:
    rows = [{"prompt": str(i % 7), "n": i} for i in range(21)]
    train, heldout = split_heldout(rows, 3)
    assert len(heldout) == 3
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert split_heldout(rows, 3) == (train, heldout)
    assert split_heldout(rows, 0) == (rows, [])


def test_the_order_is_fixed_by_the_seed_and_covers_the_data() -> None:
    rows = [{"prompt": str(i)} for i in range(10)]
    first = list(islice(shuffled(rows, 1), 30))
    assert first == list(islice(shuffled(rows, 1), 30))
    assert first != list(islice(shuffled(rows, 2), 30))
    for start in (0, 10, 20):
        assert sorted(row["prompt"] for row in first[start : start + 10]) == sorted(row["prompt"] for row in rows)
