"""Tools as an environment: what is read of a turn, what is called, what is observed; and the tools that stand ready."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from algos.environments.builtin import calculator, run_query
from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from engines.models.chat import ChatTemplate
from tests.algos.environment_classes import Incrementer, multiply, slow_add
from tests.algos.test_environments import CLASSES, Engine
from tests.chat_models import chat_tokenizer


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def functions() -> Iterator[Engine]:
    with EnvironmentPool(f"{CLASSES}:multiply,slow_add, fails", EnvironmentConfig(workers=1)) as pool:
        yield Engine(pool)


def test_schemas_are_those_of_transformers(functions: Engine) -> None:
    tools = functions.pool.tools
    assert tools[:0] == [] and [one["function"]["name"] for one in tools] == ["fails", "multiply", "slow_add"]
    assert tools[1:] == [get_json_schema(multiply), get_json_schema(slow_add)]
    tokenizer = chat_tokenizer("qwen2.5")
    prompt = [{"role": "user", "content": "2*3?"}]
    chat = ChatTemplate(tokenizer=tokenizer)
    assert chat.render(prompt, tools=tools[1:]) == chat.render(prompt, tools=[multiply, slow_add])


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        (call("multiply", a=6, b=7), "42"),
        ("I think " + call("slow_add", a=6) + call("multiply", a=2, b=3) + "so", "7\n6"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}', "6"),
        (call("divide", a=1), "error: there is no tool 'divide'; there are fails, multiply, slow_add"),
        (call("multiply", a=1), "error: TypeError: .*missing 1 required positional argument: 'b'"),
        (call("multiply", a=1, b=2, c=3), "error: TypeError: .*unexpected keyword argument 'c'"),
        (call("fails", how="so"), "error: KeyError: 'so'"),
        ("<tool_call>{'name': 1}</tool_call>", r"error: malformed tool call \(.*\); write {.*} between the tags"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: malformed tool call .*missing required field `name`"),
        ('<tool_call>{"name": "multiply", "arguments": "a"}</tool_call>', "error: malformed tool call .*Expected"),
        ("<tool_call></tool_call>", "error: malformed tool call"),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', "error: malformed tool call"),
        ("<tool_call>" + "[" * 100_000, "error: malformed tool call"),
    ],
)
def test_a_turn_s_calls_are_made(functions: Engine, text: str, observed: str) -> None:
    functions.begin(1, anything=1)
    answer = functions.step(1, text)
    assert (answer.role, answer.done, answer.failure) == ("tool", False, None)
    assert answer.text is not None and re.match(observed, answer.text) and len(answer.text) < 1000
    assert functions.step(1, "The answer is 42.").done
    assert functions.end(1) is None


def test_a_tool_that_exits_fails_the_trajectory(functions: Engine) -> None:
    functions.begin(1)
    answer = functions.step(1, call("fails", how="exit"))
    assert answer.failure == "raised" and "SystemExit" in answer.error


def test_a_class_of_tools_keeps_its_state() -> None:
    with EnvironmentPool(f"{CLASSES}:Incrementer", EnvironmentConfig(workers=1)) as pool:
        engine = Engine(pool)
        assert pool.tools == [get_json_schema(Incrementer().increment)]
        assert engine.begin(1, start=2).text == "The counter is at 2." and engine.begin(2).text is not None
        observed = [engine.step(uid, call("increment", step=3)).text for uid in (1, 2, 1)]
        assert observed == ["5", "3", "8"]
        assert "no tool '_hidden'" in (engine.step(1, call("_hidden")).text or "")
        assert "no tool 'reset'" in (engine.step(1, call("reset")).text or "")
        assert [engine.end(uid) for uid in (1, 2)] == [8.0, 3.0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("untyped", "tool 'untyped': .*docstring"),
        ("multiply,absent", "has no environment or tool 'absent'"),
        ("multiply,Incrementer", "Incrementer is a class; name one class, or functions alone"),
        ("NoReset", "NoReset has no method reset"),
        ("NoStep", "NoStep has neither `step` nor another public method"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(names: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be used: .*{message}"):
        EnvironmentPool(f"{CLASSES}:{names}")


# -- the calculator


def test_the_calculator_agrees_with_fractions() -> None:
    rng = random.Random(0)
    for _ in range(500):
        left, right = (round(rng.uniform(-1000, 1000), rng.randrange(4)) for _ in range(2))
        sign = rng.choice("+-*/")
        if sign == "/" and right == 0:
            continue
        exact = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}[sign](
            Fraction(str(left)), Fraction(str(right))
        )
        text = calculator(f" {left} {sign}{right}")
        assert abs(Fraction(text) - exact) <= abs(exact) * Fraction(1, 10**9)
        assert exact.denominator > 1 or text == str(exact)
    assert calculator("1,200*3") == "3600" and calculator("48/2") == "24" and calculator(".5--1") == "1.5"
    assert calculator("12345678901234567890*10") == "123456789012345678900"


def expression_and_value(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression with all parentheses that it needs, and some that it does not, and its exact value."""
    if depth == 0 or rng.random() < 0.2:
        number = rng.choice(["0", "7", "1,200", "2.5", ".5", "3.", "-4", "+6"])
        return number, Fraction(number.replace(",", ""))
    (left, a), (right, b) = (expression_and_value(rng, depth - 1) for _ in range(2))
    sign = rng.choice("+-*/" if b else "+-*")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign]
    return rng.choice([f"({left}){sign}({right})", f"( ({left})  {sign} -(-({right})) )"]), value


def test_the_calculator_agrees_with_fractions_on_longer_expressions() -> None:
    rng, num_long = random.Random(1), 0
    for _ in range(300):
        expression, exact = expression_and_value(rng, 3)
        if len(expression) <= 100:
            text = calculator(expression)
            assert abs(Fraction(text) - exact) <= abs(exact) * Fraction(1, 10**9), expression
            num_long += expression.count("(") > 5
    assert num_long > 30


@pytest.mark.parametrize(
    "expression", ["16-3-4", "2+3*4", "2*3+4", "8/2/2*3", "-2*3-1", "2--3", "1-2*-3", "7", "2*(3-5)"]
)
def test_the_calculator_binds_signs_as_python_does(expression: str) -> None:
    assert calculator(expression) == str(round(eval(expression)))


def test_the_calculator_s_numbers_are_its_own_input() -> None:
    assert (calculator("1/80000000"), calculator("1/3*10")) == ("0.0000000125", "3.333333333")
    assert calculator(calculator("100000000000000000000/3") + "*1") == "33333333330000000000"


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1+", "__import__('os')", "9**9", "560//10", "1e9*2", "1e999", "٣+1", "5−3", "1 2", "()", "(1+2", "1+2)"),
        *("1,5", "1,0000", "1..2", ".", "1=1", "nan", "(" * 99, "-" * 100, "1" * 60 + "*" + "1" * 60),
    ],
)
def test_the_calculator_refuses_what_is_no_calculation(expression: str) -> None:
    with pytest.raises(ValueError, match="must be numbers with"):
        calculator(expression)


def test_the_calculator_does_not_divide_by_zero() -> None:
    with pytest.raises(ZeroDivisionError, match=r"'1/\(2-2\)': divides by zero"):
        calculator("1/(2-2)")


# -- SQL


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "it's.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table fruit (name text, number integer)")
        connection.executemany("insert into fruit values (?, ?)", [(f"fruit {i}", i) for i in range(100)])
        connection.execute("insert into fruit values (null, 7)")
    connection.close()
    return path


def test_a_query_returns_the_rows(database: Path) -> None:
    connection = sqlite3.connect(database)
    assert run_query(connection, "select name, number from fruit where number = 7") == "fruit 7 | 7\n | 7"
    assert run_query(connection, "select 1 where 0") == "no rows"
    rows = run_query(connection, "select number from fruit").splitlines()
    assert rows == [*map(str, range(50)), "..."]
    recursive = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 9) select sum(i) from n"
    assert run_query(connection, recursive) == "45"
    long = run_query(connection, "select hex(zeroblob(2500))")
    assert len(long) == 4096 + 4 and long.endswith("\n...")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("drop table fruit", "not authorized"),
        ("insert into fruit values ('a', 1)", "not authorized"),
        ("pragma writable_schema = 1", "not authorized"),
        ("attach ':memory:' as other", "not authorized"),
        ("create temp table a (b)", "not authorized"),
        ("select 1; drop table fruit", "one statement at a time"),
        ("with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n", "interrupted"),
        ("select randomblob(1000000000)", "too big"),
        ("select printf('%.*c', 1000000000, 'x')", "not authorized to use function: printf"),
        ("select " + ",".join(["1"] * 40), "too many columns"),
        ("select load_extension('x')", "not authorized|no such function"),
        ("select absent", "no such column"),
        ("", "^$"),
    ],
)
def test_a_query_can_only_read(database: Path, sql: str, message: str) -> None:
    connection = sqlite3.connect(database)
    if not sql:
        assert run_query(connection, sql) == "no rows"
        return
    with pytest.raises((sqlite3.Error, sqlite3.Warning), match=message):
        run_query(connection, sql)
    assert run_query(connection, "select count(*) from fruit") == "101", "the limits end with the query"


def test_sqlite_is_a_tool(database: Path) -> None:
    with EnvironmentPool("algos.environments.builtin:Sqlite", EnvironmentConfig(workers=1)) as pool:
        engine = Engine(pool)
        assert [one["function"]["name"] for one in pool.tools] == ["sql"]
        engine.begin(1, database=str(database))
        assert engine.step(1, call("sql", query="select max(number) from fruit")).text == "99"
        assert "not authorized" in (engine.step(1, call("sql", query="delete from fruit")).text or "")
        with pytest.raises(ValueError, match=r"reset wants \['database'\]"):
            engine.begin(2)
