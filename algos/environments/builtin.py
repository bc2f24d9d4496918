"""Tools that stand ready: a calculator and SQL, which are safe for what a model writes."""

from __future__ import annotations

import re
import sqlite3
from collections import deque
from decimal import Decimal
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path

_TOKEN = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+|[-+*/()]", re.ASCII)
_OPERATIONS = {"+": (1, add), "-": (1, sub), "*": (2, mul), "/": (2, truediv)}
"""How tightly each sign binds, and what it does."""
_MOST_CHARS = 100
_MOST_ROWS = 50
_MOST_STEPS = 1_000_000
_MOST_VALUE, _MOST_COLUMNS = 1 << 16, 32
"""Bytes of one value, and values of a row."""
_MOST_TEXT = 4096
_HANDLER_STEPS = 10_000
_ENDLESS = ("printf", "format")
"""Functions that no limit of SQLite ends: printf('%.*c', 1000000000, 'x')."""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def calculator(expression: str) -> str:
    """
    Calculates with numbers.

    Args:
        expression: Numbers with +, -, *, / and parentheses, as (12.5+3)*4
    """
    tokens = deque([*_TOKEN.findall(expression), ""])
    try:
        if len(expression) > _MOST_CHARS or _TOKEN.sub("", expression).strip():
            raise ValueError
        value = _take_value(tokens)
        if tokens != deque([""]):
            raise ValueError
    except ValueError:
        what = f"numbers with +, -, *, / and parentheses, in {_MOST_CHARS} characters"
        raise ValueError(f"{expression[:_MOST_CHARS]!r}: must be {what}") from None
    except ZeroDivisionError:
        raise ZeroDivisionError(f"{expression!r}: divides by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{Decimal(f'{float(value):.10g}'):f}"


def _take_value(tokens: deque[str], binds: int = 0) -> Fraction:
    """Takes an expression from the tokens, up to a sign that binds no tighter than `binds`. Raises `ValueError`."""
    token = tokens.popleft()
    if token in ("+", "-"):
        value = _take_value(tokens, 2) * (-1 if token == "-" else 1)
    elif token == "(":
        value = _take_value(tokens)
        if tokens.popleft() != ")":
            raise ValueError
    else:
        value = Fraction(token.replace(",", ""))
    while _OPERATIONS.get(tokens[0], (0,))[0] > binds:
        next_binds, operation = _OPERATIONS[tokens.popleft()]
        value = operation(value, _take_value(tokens, next_binds))
    return value


def run_query(database: sqlite3.Connection, sql: str) -> str:
    """Returns the rows of one SELECT: a line each, with " | " between values; cut, and then "...", after 50 rows or
    4096 characters.

    Raises `sqlite3.Error` for anything but reading, for SQL that is wrong, takes more than a million steps of SQLite's
    machine, or makes a value of more than 64 KiB.
    """
    num_calls = 0

    def is_too_long() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls * _HANDLER_STEPS > _MOST_STEPS

    def authorize(action: int, _: str | None, name: str | None, *rest: str | None) -> int:
        is_function = action == sqlite3.SQLITE_FUNCTION
        is_allowed = action in _ALLOWED and not (is_function and name in _ENDLESS)
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    database.set_authorizer(authorize)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE)
    database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _MOST_COLUMNS)
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _MOST_CHARS)
    database.set_progress_handler(is_too_long, _HANDLER_STEPS)
    try:
        rows = database.execute(sql).fetchmany(_MOST_ROWS + 1)
    finally:
        database.set_progress_handler(None, 0)
        database.set_authorizer(None)
    lines = [" | ".join("" if value is None else str(value) for value in row) for row in rows[:_MOST_ROWS]]
    text = "\n".join(lines)
    is_cut = len(rows) > _MOST_ROWS or len(text) > _MOST_TEXT
    return text[:_MOST_TEXT] + "\n..." * is_cut or "no rows"


class Sqlite:
    """The tool `sql` over the database file that the problem's column `database` names; nothing can be written."""

    def reset(self, database: str, **columns: object) -> None:
        self._database = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro&immutable=1", uri=True)

    def sql(self, query: str) -> str:
        """
        Reads from the database.

        Args:
            query: One SELECT in SQLite's dialect
        """
        return run_query(self._database, query)

    def close(self) -> None:
        self._database.close()
