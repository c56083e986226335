"""Preference files: explicit and implicit prompts as TRL reads them, and every bad row named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.contents import WHERE
from rlkernel.data.errors import InputError
from rlkernel.data.preferences import load_preferences

USER = {"role": "user", "content": "What color is the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": f"It is {color}."} for color in ("blue", "green"))


def load(folder: Path, *rows: Any) -> list[dict[str, Any]]:
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_preferences(file)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
        {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": "ignored", "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
    ],
    ids=("text", "implicit text", "messages", "implicit messages", "text beside messages"),
)
def test_a_pair_is_split_as_in_trl(tmp_path: Path, row: dict[str, Any]) -> None:
    trl_data = pytest.importorskip("trl.data_utils")
    (ours,) = load(tmp_path, row)
    assert ours.pop(WHERE) == f"{tmp_path / 'p.jsonl'}:1"
    assert ours == trl_data.maybe_extract_prompt(row)


def test_further_forms(tmp_path: Path) -> None:
    """Token ids; null columns, which other rows of one table fill; further columns are left out."""
    first, second = load(
        tmp_path,
        {"chosen": [5, 6, 7], "rejected": [5, 6, 8, 9], "prompt": None, "score": 1},
        {"prompt": [5], "chosen": [1], "rejected": [2]},
    )
    assert first == {"prompt": [5, 6], "chosen": [7], "rejected": [8, 9], WHERE: first[WHERE]}
    assert second["prompt"] == [5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "column 'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "column 'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": [GREEN]}, "'chosen' is text and 'rejected' is messages"),
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "'prompt' is messages and 'chosen' is text"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [GREEN]}, "messages of 'chosen' must end with the assistant"),
        ({"chosen": "b", "rejected": "c"}, "no common beginning"),
        ({"chosen": "ab", "rejected": "abc"}, "'chosen' has nothing after the common prompt"),
        ({"chosen": [USER, BLUE, USER, BLUE], "rejected": [USER, BLUE]}, "'rejected' has nothing after"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"p\.jsonl:2: ") as caught:
        load(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    assert message in str(caught.value)
