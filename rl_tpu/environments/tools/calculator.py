"""The tool `calculator`: exact arithmetic, at once."""

from __future__ import annotations

import ast
import operator
import re
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from rl_tpu.environments.tool import Tool, ToolError

MAX_CHARACTERS = 500
MAX_BITS = 4096
"""Of a result's numerator and denominator, at every step: about 1200 digits."""
_MAX_EXPONENT = 300
_DECIMALS = 12
_NOT_ASCII = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "^": "**"})
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(Tool):
    """Works out decimal numbers with `+ - * / // % **` and brackets; also `×`, `÷`, `^` and commas between thousands.

    It computes with fractions, so `0.1 + 0.2` is 0.3 and `1/3 * 3` is 1; a result that is no decimal number of up to 12
    places comes to 12 significant digits.
    """

    name = "calculator"
    schema: dict[str, Any] = {  # noqa: RUF012 - never changed
        "type": "function",
        "function": {
            "name": name,
            "description": "Works out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "For example 12 * (3 + 4)"}},
                "required": ["expression"],
            },
        },
    }

    async def call(self, expression: str) -> str:
        """Raises ToolError for whatever is not arithmetic, or too large."""
        return calculate(expression)


def calculate(expression: str) -> str:
    """The value as text. Raises ToolError."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.translate(_NOT_ASCII)).strip().removesuffix("=").strip()
    try:
        return _written(_value(ast.parse(text, mode="eval").body, text))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is no arithmetic expression") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            result = _number(node, text)
        case ast.UnaryOp(op=ast.USub()):
            result = -_value(node.operand, text)
        case ast.UnaryOp(op=ast.UAdd()):
            result = _value(node.operand, text)
        case ast.BinOp(op=ast.Pow()):
            result = _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))
        case _:
            raise ToolError(
                f"only numbers, brackets and + - * / // % ** are understood, not {ast.unparse(node)[:40]!r}"
            )
    result = Fraction(result)
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the result is too large")
    return result


def _number(node: ast.Constant, text: str) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    if isinstance(node.value, int):
        return Fraction(node.value)
    written = ast.get_source_segment(text, node).lower()
    if abs(int(written.partition("e")[2] or 0)) > _MAX_EXPONENT:
        raise ToolError("the result is too large")
    return Fraction(written)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base not in (0, 1, -1) and (bits - 1) * abs(exponent) > MAX_BITS:
            raise ToolError("the result is too large")
        return base ** int(exponent)
    if base < 0:
        raise ToolError("a root of a negative number")
    try:
        return Fraction(float(base) ** float(exponent))
    except OverflowError:
        raise ToolError("the result is too large") from None


def _written(value: Fraction) -> str:
    scaled = value * 10**_DECIMALS
    if scaled.denominator == 1:
        whole, places = divmod(abs(scaled.numerator), 10**_DECIMALS)
        decimals = f"{places:0{_DECIMALS}d}".rstrip("0")
        return f"{'-' * (value < 0)}{whole}{'.' * bool(decimals)}{decimals}"
    rounded = Context(prec=_DECIMALS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return str(rounded)
