"""Rows of a user's data set: JSONL, a parquet file, or a folder that `datasets` has saved. Torch-free.

JSONL is read here, so that an error names the line; the other two need the libraries of the extra `data`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import msgspec

from engines.json_files import loads_finite

T = TypeVar("T")
_PLACE = re.compile(r"\\n|\\t|\\\\|\{\{|\}\}|\{([^{}]+)\}")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\", "{{": "{", "}}": "}"}


class Row(NamedTuple):
    """A row's values by column, and where it is, as messages name it."""

    place: str
    values: dict[str, Any]


def read_rows(option: str, path: str) -> list[Row]:
    """Returns the rows of a data set, whose values JSON can hold. All have the columns of all, and None where a row
    has no value. Raises ValueError, with the place, for what is missing or unreadable; `option` names the path."""
    try:
        if Path(path).is_dir() or path.endswith(".parquet"):
            rows = [Row(f"{path}, row {number}", values) for number, values in enumerate(_read_table(path), 1)]
        else:
            lines = enumerate(Path(path).read_bytes().split(b"\n"), 1)
            rows = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    except OSError as error:
        what = "give a JSONL or parquet file, or a folder that `datasets` has saved"
        raise ValueError(f"{option}={path!r}: cannot be read ({error.strerror or error}); {what}") from None
    if not rows:
        raise ValueError(f"{option}={path!r}: is empty; give at least one row, in JSONL one object on each line")
    columns = dict.fromkeys(name for row in rows for name in row.values)
    return [Row(row.place, {name: row.values.get(name) for name in columns}) for row in rows]


def _parse(line: bytes, place: str) -> Row:
    try:
        values = loads_finite(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not valid JSON ({error}); the file must have one JSON object on each line, so it may be CSV, an "
            "array, or truncated"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{place}: holds {_kind(values)}; give an object with a value for each column: the file must have one JSON "
            "object on each line"
        )
    try:
        msgspec.msgpack.encode(values)  # as a reward's process gets them
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"{place}: holds no plain text and numbers of 64 bits ({error})") from None
    return Row(place, values)


def _read_table(path: str) -> list[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(
            f"{path}: is read by the library datasets, which is missing ({error}); pip install datasets"
        ) from None
    try:
        table = load_from_disk(path) if Path(path).is_dir() else Dataset(read_table(path))
        rows = table.to_list() if isinstance(table, Dataset) else []
        # Dates become text, also those in nanoseconds, which pandas writes and which come as its own type.
        plain: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(rows, enc_hook=str))
    except Exception as error:  # what the libraries raise depends on what is wrong with the file
        raise ValueError(f"{path}: is no parquet file or folder that `datasets` has saved ({error})") from None
    if not isinstance(table, Dataset):
        raise ValueError(
            f"{path}: holds the splits {sorted(table)}; give the folder of one: {path}/{next(iter(table))}"
        )
    return [{name: _without_nulls(value) for name, value in row.items()} for row in plain]


def _without_nulls(value: Any) -> Any:
    """Drops the null fields of structs: Arrow gives all structs of a column the same fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def column(row: Row, name: str, option: str) -> Any:
    """Returns a value that the row must have. Raises ValueError, which names the columns that it has."""
    if row.values.get(name) is None:
        there = [key for key, value in row.values.items() if value is not None]
        raise ValueError(f"{row.place}: has no column {name!r}, only {there}; give its name by {option}")
    return row.values[name]


def text(row: Row, name: str, option: str) -> str:
    """Returns a value that must be text or a number, as text."""
    value = column(row, name, option)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{row.place}: column {name!r} holds {_kind(value)}; it must be text or a number")
    return str(value)


def fill(template: str, row: Row) -> str:
    r"""Fills a template: `{column}` is the row's value, `{{`, `}}`, `\\`, `\n` and `\t` are a character each, and all
    else stays as it is, `{}` included."""
    return _PLACE.sub(
        lambda match: (
            text(row, match[1], "{column} in the template; {{ and }} are braces") if match[1] else _ESCAPES[match[0]]
        ),
        template,
    )


def check_template(owner: str, template: str) -> None:
    if not any(match[1] for match in _PLACE.finditer(template)):
        raise ValueError(f"{owner}={template!r}: must contain a column's name in braces, such as {{question}}")


def split(
    rows: list[T], held_out: list[T] | None, fraction: float, key: Callable[[T], str], path: str
) -> tuple[list[T], list[T]]:
    """Returns the rows to train on, and those held out: `held_out`, or `fraction` of the keys, which their hash picks.

    A key is in one of the two only, however often the rows repeat it. Raises ValueError if none is left to train on.
    """
    if held_out is None:
        by_hash = sorted({key(row) for row in rows}, key=_hash)
        keys = set(by_hash[: max(1, round(len(by_hash) * fraction))])
        held_out = [row for row in rows if key(row) in keys]
    else:
        keys = {key(row) for row in held_out}
    train = [row for row in rows if key(row) not in keys]
    if not train:
        raise ValueError(f"{path}: no question is left to train on beside the held-out ones; add more")
    return train, held_out


def draw(rows: Sequence[T], index: int, seed: int) -> T:
    """Returns the row of a data position: in each epoch every row once, in an order of its own."""
    epoch, position = divmod(index, len(rows))
    return rows[_permutation(seed, epoch, len(rows))[position]]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
