r"""Comparing arithmetic by its value, a thousand times faster than by symbols.

Reads the part of LaTeX that most answers are written in: numbers, letters, ``+ - * / ^``, ``\frac``, ``\sqrt``, ``\pi``. Two
expressions with different values at some point are different. With equal values at several points they are the same
(Schwartz-Zippel), if the values are exact. Whatever is not surely read as it was meant is left to others.
"""

from __future__ import annotations

import cmath
import math
import re
import zlib
from fractions import Fraction

Value = Fraction | complex

POINTS = 3
SURELY_DIFFERENT = 1e-6
MAX_BITS = 4096
_SYNONYMS = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\cdot": "*",
    r"\times": "*",
    r"\div": "/",
    "−": "-",
    r"\left": "",
    r"\right": "",
    r"\,": "",
    r"\;": "",
    r"\ ": "",
    r"\!": "",
    "**": "^",
}
_TOKEN = re.compile(r"\s*(\\[A-Za-z]+|\\.|\d+\.\d+|\.\d+|\d+|\*\*|\S)")
_GREEK = {
    rf"\{name}" for name in ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega", "rho", "tau")
}


def compare(expected: str, given: str) -> bool | None:
    """Whether two expressions are the same; None if one of them is not read, or if it cannot be told by values."""
    one, other = _tokens(expected), _tokens(given)
    if one == other:
        return True
    try:
        for point in range(POINTS):
            a, b = _Reader(one, point).whole(), _Reader(other, point).whole()
            if isinstance(a, Fraction) and isinstance(b, Fraction) and a == b:
                continue
            if isinstance(a, Fraction) and isinstance(b, Fraction) and not any("." in token for token in one + other):
                return False
            apart = abs(complex(a) - complex(b))
            return False if apart > SURELY_DIFFERENT * max(abs(complex(a)), abs(complex(b))) else None
    except (_NotReadError, ArithmeticError, ValueError, RecursionError):
        return None
    return True


class _NotReadError(Exception):
    """Not arithmetic, or not surely what it seems."""


def _tokens(text: str) -> list[str]:
    tokens = [_SYNONYMS.get(token, token) for token in _TOKEN.findall(text)]
    return [token for token in tokens if token]


class _Reader:
    """Recursive descent over tokens that evaluates as it reads. A letter has another value at every ``point``."""

    def __init__(self, tokens: list[str], point: int) -> None:
        self._tokens = tokens
        self._next = 0
        self._point = point

    def whole(self) -> Value:
        value = self._sum()
        if self._next < len(self._tokens):
            raise _NotReadError
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if not token or (wanted is not None and token != wanted):
            raise _NotReadError
        self._next += 1
        return token

    def _sum(self) -> Value:
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Value:
        if self._peek() in ("+", "-"):
            return self._product() if self._take() == "+" else -self._product()
        value, divided, letters = self._power(), False, self._previous_is_letter()
        while (token := self._peek()) in ("*", "/") or _starts_factor(token):
            if token in ("*", "/"):
                self._take()
                right, divided, letters = self._power(), token == "/", 0
            else:
                # 1/2x, 1 1/2, x2, f(x), words
                if divided or _is_number(token) or (self._previous_is_letter() and token == "("):
                    raise _NotReadError
                if token == r"\frac" and _is_number(self._tokens[self._next - 1]):
                    raise _NotReadError
                right = self._power()
                letters = letters + 1 if self._previous_is_letter() else 0
                if letters > 2:
                    raise _NotReadError
            value = value / right if token == "/" else value * right
            _check(value)
        return value

    def _power(self) -> Value:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._take()
        if len(self._peek()) > 1 and _is_number(self._peek()):  # x^12 is x^1 2 in LaTeX, and x^12 to its writer
            raise _NotReadError
        exponent = self._atom()
        if self._peek() == "^":
            raise _NotReadError
        whole = isinstance(exponent, Fraction) and exponent.denominator == 1
        if whole and isinstance(base, Fraction):
            if abs(exponent) * _bits(base) > MAX_BITS:
                raise _NotReadError
            return base ** int(exponent)
        return complex(base) ** complex(exponent)

    def _atom(self) -> Value:
        token = self._take()
        if _is_number(token):
            return Fraction(token)
        if token in ("(", "{"):
            value = self._sum()
            self._take(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            above, below = self._argument(), self._argument()
            return above / below
        if token == r"\sqrt":
            return self._root()
        if token == r"\pi":
            return complex(math.pi)
        if token == "e":
            return complex(math.e)
        if token == "i":
            return 1j
        if _is_letter(token):
            seed = zlib.crc32(f"{token}{self._point}".encode())
            return Fraction(seed % 9973 + 1, seed // 9973 % 997 + 1) * (-1) ** self._point
        raise _NotReadError

    def _argument(self) -> Value:
        r"""Of a command: a group, or one digit or letter, so that ``\frac12`` is a half."""
        token = self._peek()
        if _is_number(token) and len(token) > 1 and token.isdigit():
            self._tokens = [*self._tokens[: self._next], *token, *self._tokens[self._next + 1 :]]
        elif token != "{" and not _is_number(token) and not _is_letter(token):
            raise _NotReadError
        return self._atom()

    def _root(self) -> Value:
        degree: Value = Fraction(2)
        if self._peek() == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        value = self._argument()
        if degree != 2:
            if complex(value).imag or complex(value).real < 0:  # which of its roots?
                raise _NotReadError
            return complex(value) ** (1 / complex(degree))
        if isinstance(value, Fraction) and value >= 0:
            exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
            if exact * exact == value:
                return exact
        return cmath.sqrt(complex(value))

    def _previous_is_letter(self) -> int:
        return int(_is_letter(self._tokens[self._next - 1]))


def _is_number(token: str) -> bool:
    return token[:1].isdecimal() or (len(token) > 1 and token[0] == ".")


def _is_letter(token: str) -> bool:
    return (len(token) == 1 and token.isascii() and token.isalpha()) or token in _GREEK


def _starts_factor(token: str) -> bool:
    return bool(token) and (token in ("(", "{", r"\frac", r"\sqrt", r"\pi") or _is_letter(token) or _is_number(token))


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _check(value: Value) -> None:
    if isinstance(value, Fraction) and _bits(value) > MAX_BITS:
        raise _NotReadError
