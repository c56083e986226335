"""Reads rows of data files: JSONL, Parquet, and directories that `datasets` wrote with `save_to_disk`.

The format is recognised by content and not by name. Every error names the file and the line or row.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkernel.data.errors import InputError

Row = dict[str, Any]
_WILDCARDS = frozenset("*?[")
_PARQUET = b"PAR1"
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # files of `save_to_disk`


def read_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """Yields (place, row) for each row; the place is `file:line` of a JSONL file, else `file, row N` (from 1).

    Args:
        path: a JSONL or Parquet file, a directory of `Dataset.save_to_disk`, or a pattern such as
            `train-*.parquet`, whose files are read in the order of their names.

    Raises:
        InputError: nothing can be read there, there are no rows, a row is not a JSON object or has a duplicate key or
            a lone surrogate, or a column has a type that JSON lacks (bytes, images, times).
    """
    found = False
    for file in data_files(path):
        if file.suffix == ".arrow":
            rows = _read_arrow(file)
        elif _starts_as_parquet(file):
            rows = _read_parquet(file)
        else:
            rows = _read_jsonl(file)
        for place_and_row in rows:
            found = True
            yield place_and_row
    if not found:
        raise InputError(f"data: {path} has no rows; each line must be one JSON object")


def data_files(path: str | Path) -> list[Path]:
    """The files that `read_rows` reads for a path, in their order.

    Raises:
        InputError: a pattern that matches nothing, or a directory that is not one of `Dataset.save_to_disk`.
    """
    path = Path(path)
    if path.is_dir():
        return _files_of_dataset(path)
    if _WILDCARDS & set(str(path)) and not path.exists():
        files = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not files:
            raise InputError(f"data: no file matches {path}; give the path of a file, or a pattern that matches some")
        return files
    return [path]


def _files_of_dataset(directory: Path) -> list[Path]:
    """The Arrow files of a `save_to_disk` directory."""
    if (directory / _SPLITS).is_file():
        splits = _read_object(directory / _SPLITS).get("splits") or []
        raise InputError(
            f"data: {directory} holds the splits {', '.join(map(str, splits))}; give one, such as "
            f"{directory / str(splits[0] if splits else 'train')}"
        )
    if not (directory / _STATE).is_file():
        raise InputError(
            f"data: {directory} is a directory without {_STATE}; give a JSONL or Parquet file, a pattern such as "
            f"{directory}/*.parquet, or a directory that datasets' save_to_disk wrote"
        )
    listed = _read_object(directory / _STATE).get("_data_files") or []
    return [directory / str(entry["filename"]) for entry in listed]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"data: cannot read {file}: {error}; save the dataset again") from None
    if not isinstance(value, dict):
        raise InputError(f"data: {file} holds a JSON {type(value).__name__}, not an object; save the dataset again")
    return value


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"data: cannot read {path}: {error.strerror or error}; give the path of a JSONL or Parquet file")


def _starts_as_parquet(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise _unreadable(file, error) from None


# JSONL


class _DuplicateKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> Row:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKey(next(name for name in names if names.count(name) > 1))
    return made


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # spreadsheets write a byte order mark
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise InputError(f"data: {path} is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except _DuplicateKey as error:
            raise InputError(
                f"{where}: the key {str(error)!r} occurs twice in one object, and JSON does not say which value "
                "counts; remove one"
            ) from None
        except (ValueError, RecursionError) as error:  # includes Python's limits on digits and nesting
            raise InputError(
                f"{where}: not JSON that can be read ({error}); each line must be one JSON object"
            ) from None
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected a JSON object such as {{"prompt": "..."}}, got {type(row).__name__}')
        if "\\u" in line:  # in UTF-8 a surrogate can only be written as an escape
            for column, value in row.items():
                if (text := _with_surrogate(column) or _with_surrogate(value)) is not None:
                    raise InputError(
                        f"{where}: column {column!r} holds {text!r}, which has half of a surrogate pair and is not "
                        "Unicode text; remove that character"
                    )
        yield where, row


def _with_surrogate(value: Any) -> str | None:
    """The part around the first lone surrogate of a text anywhere in a JSON value, or None."""
    if isinstance(value, str):
        at = next((i for i, c in enumerate(value) if "\ud800" <= c <= "\udfff"), None)
        return None if at is None else value[max(0, at - 20) : at + 20]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return next((text for item in value if (text := _with_surrogate(item)) is not None), None)
    return None


# Arrow and Parquet


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"data: {path} needs pyarrow; install it with: pip install 'rlkernel[data]'") from None
    return pyarrow


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    arrow = _pyarrow(path)
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield from _rows(path, file.schema_arrow, file.iter_batches())
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"data: cannot read {path}: {_one_line(error)}; write the file again") from None


def _read_arrow(path: Path) -> Iterator[tuple[str, Row]]:
    arrow = _pyarrow(path)
    try:
        with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as stream:
            yield from _rows(path, stream.schema, stream)
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"data: cannot read {path}: {_one_line(error)}; save the dataset again") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _rows(path: Path, schema: Any, batches: Any) -> Iterator[tuple[str, Row]]:
    for field in schema:
        if not _is_json(field.type):
            raise InputError(
                f"{path}: column {field.name!r} has the type {str(field.type)[:80]}, which JSON does not have; remove "
                f"or convert the column (dataset.remove_columns({field.name!r}))"
            )
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _is_json(kind: Any) -> bool:
    """Whether values of an Arrow type are JSON values in Python: numbers, texts, booleans, nulls, lists, structs."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    scalars = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
    return types.is_null(kind) or any(check(kind) for check in scalars)
