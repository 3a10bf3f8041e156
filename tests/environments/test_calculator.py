"""The calculator against Python's own arithmetic, and against everything that is none."""

from __future__ import annotations

import asyncio
import random
import time
from fractions import Fraction

import pytest

from rl_tpu.environments.tool import ToolError
from rl_tpu.environments.tools.calculator import Calculator, calculate


def random_expression(dice: random.Random, depth: int) -> str:
    if depth == 0 or dice.random() < 0.2:
        return str(dice.randrange(-99, 1000))
    operator = dice.choice(["+", "-", "*", "//", "%"])
    return f"({random_expression(dice, depth - 1)}) {operator} ({random_expression(dice, depth - 1)})"


def test_whole_numbers_come_out_as_in_python():
    dice = random.Random(0)
    compared = 0
    while compared < 500:
        expression = random_expression(dice, 4)
        try:
            wanted = str(eval(expression))
        except ZeroDivisionError:
            with pytest.raises(ToolError, match="division by zero"):
                calculate(expression)
            continue
        assert calculate(expression) == wanted, expression
        compared += 1


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1234 × 5,678", "7006652"),
        ("7 ÷ 2", "3.5"),
        ("5 − 8 =", "-3"),
        ("2^10", "1024"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("1/3 * 3", "1"),
        ("1/3", "0.333333333333"),
        ("-2/3", "-0.666666666667"),
        ("2 ** 0.5", "1.41421356237"),
        ("1.5e3 + .5", "1500.5"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1,234,567 + 1", "1234568"),
        ("10**40", "1" + "0" * 40),
        ("-0.05", "-0.05"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


def test_long_decimals_are_right_in_twelve_places():
    dice = random.Random(1)
    for _ in range(200):
        top, bottom = dice.randrange(1, 10**6), dice.randrange(1, 10**4)
        exact = Fraction(top, bottom)
        assert abs(Fraction(calculate(f"{top}/{bottom}")) - exact) <= exact * Fraction(1, 10**11)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**9**9**9",
        "1e999999999",
        "2**100000",
        "0.5**100000",
        "(10**300)**300",
        "99999*" * 90 + "9" * 40 + "**99",
    ],
)
def test_what_would_never_end_ends_at_once(expression):
    started = time.perf_counter()
    with pytest.raises(ToolError, match=r"too large|longer than"):
        calculate(expression)
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "two plus two",
        "__import__('os').getcwd()",
        "(1).real",
        "1 if 1 else 2",
        "[1, 2]",
        "1, 2",
        "3,1415",
        "2 +",
        "1j",
        "True",
        "1 < 2",
        "x := 3",
        "print(1)",
        "'a' * 3",
        "(" * 300,
        "-" * 499 + "1j",
        "\x00",
        "(-8) ** 0.5",
        "0 ** -1",
        "50%",
        "1 2",
    ],
)
def test_whatever_is_no_arithmetic_is_refused_in_one_line(expression):
    with pytest.raises(ToolError) as refused:
        calculate(expression)
    assert "\n" not in str(refused.value)
    assert str(refused.value)


def test_the_tool_answers_and_describes_itself():
    tool = Calculator()
    assert asyncio.run(tool.call(expression="12 * (3 + 4)")) == "84"
    assert tool.schema["function"]["name"] == tool.name
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["expression"]
