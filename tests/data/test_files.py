"""Data files: JSONL, Parquet and `save_to_disk` directories give the same rows; what is not JSON is named."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.contents import WHERE
from rlkernel.data.errors import InputError
from rlkernel.data.files import data_files, read_rows
from rlkernel.data.prompts import load_examples, load_prompts

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "héllo"}], "answer": {"n": 1, "parts": [0.5, None]}, "id": i}
    for i in range(3)
]


def test_the_formats_hold_the_same_rows(tmp_path: Path) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    data = datasets.Dataset.from_list(ROWS)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data.to_parquet(tmp_path / "named.jsonl.parquet")
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    for i in (0, 1):
        parquet.write_table(data.data.table.slice(2 * i, 2), tmp_path / f"shard-{i}.parquet")
    (tmp_path / "named.jsonl.parquet").rename(tmp_path / "named.jsonl")  # the content decides, not the name
    places = {
        "d.jsonl": ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"],
        "named.jsonl": ["named.jsonl, row 1", "named.jsonl, row 2", "named.jsonl, row 3"],
        "saved": [f"saved/data-0000{shard}-of-00002.arrow, row {row}" for shard, row in ((0, 1), (0, 2), (1, 1))],
        "shard-*.parquet": ["shard-0.parquet, row 1", "shard-0.parquet, row 2", "shard-1.parquet, row 1"],
    }
    for name, expected in places.items():
        rows = load_prompts(tmp_path / name)
        assert [str(row.pop(WHERE)).removeprefix(f"{tmp_path}/") for row in rows] == expected
        assert rows == ROWS, name
    assert len(data_files(tmp_path / "saved")) == 2
    splits = datasets.DatasetDict({"train": data, "test": data})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match=r"holds the splits train, test; give one, such as .*/splits/train$"):
        load_prompts(tmp_path / "splits")


def test_null_keys_of_arrow_structs_are_left_out(tmp_path: Path) -> None:
    """Arrow gives every message the keys of all messages, which a template would render."""
    datasets = pytest.importorskip("datasets")
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}
    columns = {"messages": [[user, answer], None], "prompt": [None, "q"], "completion": [None, "a"]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
    chat, text = load_examples(tmp_path / "d")
    assert chat["prompt"] == [user] and chat["completion"] == [answer] and text["prompt"] == "q"


def test_columns_that_json_lacks_are_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    for kind, shown in ((image, "struct<bytes: binary"), (arrow.list_(arrow.timestamp("s")), "list<")):
        table = arrow.table({"prompt": ["a"], "extra": arrow.array([None], kind)})
        parquet.write_table(table, tmp_path / "d.parquet")
        with pytest.raises(InputError, match=f"d.parquet: column 'extra' has the type {re.escape(shown)}.*; remove or"):
            load_prompts(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "n": 1, "prompt": "b"}', "the key 'prompt' occurs twice in one object"),
        ('{"prompt": [{"role": "user", "content": "a", "role": "system"}]}', "the key 'role' occurs twice"),
        ('{"prompt": "a\\ud800b"}', "column 'prompt' holds 'a\\ud800b', which has half of a surrogate pair"),
        ('{"prompt": "a", "n": {"k": ["\\udfff"]}}', "column 'n' holds '\\udfff'"),
        ('{"prompt": "a", "\\udc00": 1}', "column '\\udc00' holds '\\udc00'"),
    ],
)
def test_lines_that_are_json_and_mean_nothing_certain(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\n' + line)
    with pytest.raises(InputError) as caught:
        list(read_rows(tmp_path / "d.jsonl"))
    assert str(caught.value).startswith(f"{tmp_path / 'd.jsonl'}:2: ") and message in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "saved").mkdir()
    cases = [
        ("absent", "cannot read .*absent: No such file"),
        ("*.none", "no file matches"),
        ("saved", r"is a directory without state\.json; give a JSONL or Parquet file"),
        ("d.parquet", "cannot read .*d.parquet: .*; write the file again"),
    ]
    for name, message in cases:
        with pytest.raises(InputError, match=message):
            list(read_rows(tmp_path / name))
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    (tmp_path / "saved" / "d.arrow").write_bytes(b"no stream")
    with pytest.raises(InputError, match=r"cannot read .*d\.arrow: .*; save the dataset again"):
        list(read_rows(tmp_path / "saved"))
    real = builtins.__import__

    def absent(name: str, *more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(InputError, match=r"d.parquet needs pyarrow; install it with: pip install 'rlkernel\[data\]'"):
        list(read_rows(tmp_path / "d.parquet"))
