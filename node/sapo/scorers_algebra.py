"""Sums, products, quotients and powers as a stranger writes them: parsed within bounds, exact, nothing evaluated.

An expression is whole and decimal numbers, names, brackets and + - * / **, with Python's precedence. Its value is a
polynomial over the names with rational coefficients and integer exponents, negative ones too; so a divisor and the
base of a negative power have one term. All work is bounded: terms multiplied and names in them, bits of a coefficient,
depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

EXPRESSION_LIMIT_CHARS = 2048
EXPRESSION_LIMIT_DEPTH = 64
"""Brackets, signs and exponents inside each other."""
WORK_LIMIT = 20_000
"""Terms added or multiplied, and names in each of them, over the whole expression."""
COEFFICIENT_LIMIT_BITS = 2048
EXPONENT_LIMIT = 1000

Monomial = tuple[tuple[str, int], ...]
"""Names with their exponents, none of them 0, in the order of the names."""
Polynomial = Mapping[Monomial, Fraction]
"""No coefficient is 0."""

_TOKEN = re.compile(
    r"[ \t]*(?:(\d{1,40}\.\d{0,40}|\.\d{1,40}|(?:0|[1-9]\d{0,39})(?![\d.]))|([A-Za-z]\w{0,15})|(\*\*|[-+*/()]))[ \t]*",
    re.ASCII,
)


class ExpressionError(ValueError):
    """The text is no such expression."""


def polynomial(text: str) -> Polynomial:
    """The value of the expression `text`. Raises ExpressionError."""
    if len(text) > EXPRESSION_LIMIT_CHARS:
        raise ExpressionError("too long")
    reader = _Reader(text)
    value = reader.sum(0)
    reader.finish()
    return value


def number(text: str) -> Fraction:
    """The value of an expression without names. Raises ExpressionError."""
    return _constant(polynomial(text))


def derivative(value: Polynomial, name: str) -> Polynomial:
    """Differentiate by `name`."""
    made: dict[Monomial, Fraction] = {}
    for monomial, coefficient in value.items():
        exponent = dict(monomial).get(name, 0)
        if exponent:
            made[_times(monomial, ((name, -1),))] = coefficient * exponent
    return made


def _constant(value: Polynomial) -> Fraction:
    if not value:
        return Fraction(0)
    if set(value) != {()}:
        raise ExpressionError("a name where a number is due")
    return value[()]


def _times(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    if any(abs(exponent) > EXPONENT_LIMIT for exponent in exponents.values()):
        raise ExpressionError("too large an exponent")
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


class _Reader:
    """Recursive descent; the depth of its recursion is bounded by `EXPRESSION_LIMIT_DEPTH`."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, str]] = []
        self._at = 0
        self._work = 0
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise ExpressionError("no number, name or operator")
            self._tokens.append((found[1] or "", found[2] or "", found[3] or ""))
            place = found.end()

    def finish(self) -> None:
        if self._at < len(self._tokens):
            raise ExpressionError("text after the expression")

    def sum(self, depth: int) -> Polynomial:
        value = self._product(depth)
        while (operator := self._operator()) in ("+", "-"):
            self._at += 1
            value = self._add(value, self._product(depth), 1 if operator == "+" else -1)
        return value

    def _product(self, depth: int) -> Polynomial:
        value = self._signed(depth)
        while (operator := self._operator()) in ("*", "/"):
            self._at += 1
            factor = self._signed(depth)
            value = self._multiply(value, factor if operator == "*" else self._inverse(factor))
        return value

    def _signed(self, depth: int) -> Polynomial:
        if depth > EXPRESSION_LIMIT_DEPTH:
            raise ExpressionError("too deep")
        operator = self._operator()
        if operator in ("+", "-"):
            self._at += 1
            return self._add({}, self._signed(depth + 1), 1 if operator == "+" else -1)
        base = self._operand(depth)
        if self._operator() != "**":
            return base
        self._at += 1
        return self._power(base, _constant(self._signed(depth + 1)))

    def _operand(self, depth: int) -> Polynomial:
        if self._at == len(self._tokens):
            raise ExpressionError("it ends too early")
        digits, name, operator = self._tokens[self._at]
        self._at += 1
        if digits:
            value = Fraction(digits)
            return {(): value} if value else {}
        if name:
            return {((name, 1),): Fraction(1)}
        if operator != "(":
            raise ExpressionError(f"{operator} where a number is due")
        inner = self.sum(depth + 1)
        if self._operator() != ")":
            raise ExpressionError("a bracket that does not close")
        self._at += 1
        return inner

    def _operator(self) -> str:
        return self._tokens[self._at][2] if self._at < len(self._tokens) else ""

    def _add(self, left: Polynomial, right: Polynomial, sign: int) -> Polynomial:
        self._spend(_size(left) + _size(right))
        made = dict(left)
        for monomial, coefficient in right.items():
            made[monomial] = _bounded(made.get(monomial, Fraction(0)) + sign * coefficient)
        return {monomial: coefficient for monomial, coefficient in made.items() if coefficient}

    def _multiply(self, left: Polynomial, right: Polynomial) -> Polynomial:
        self._spend(_size(left) * len(right) + len(left) * _size(right))
        made: dict[Monomial, Fraction] = {}
        for one, first in left.items():
            for other, second in right.items():
                monomial = _times(one, other)
                made[monomial] = _bounded(made.get(monomial, Fraction(0)) + first * second)
        return {monomial: coefficient for monomial, coefficient in made.items() if coefficient}

    def _inverse(self, value: Polynomial) -> Polynomial:
        if len(value) != 1:
            raise ExpressionError("a divisor of no terms or of several")
        ((monomial, coefficient),) = value.items()
        return {tuple((name, -exponent) for name, exponent in monomial): 1 / coefficient}

    def _power(self, base: Polynomial, exponent: Fraction) -> Polynomial:
        if exponent.denominator != 1 or abs(exponent) > EXPONENT_LIMIT:
            raise ExpressionError("an exponent that is not whole, or too large")
        factor = base if exponent >= 0 else self._inverse(base)
        value: Polynomial = {(): Fraction(1)}
        for _ in range(abs(int(exponent))):
            value = self._multiply(value, factor)
        return value

    def _spend(self, work: int) -> None:
        self._work += work + 1
        if self._work > WORK_LIMIT:
            raise ExpressionError("too much work")


def _size(value: Polynomial) -> int:
    """The number of terms and of the names in them."""
    return len(value) + sum(map(len, value))


def _bounded(coefficient: Fraction) -> Fraction:
    if max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length()) > COEFFICIENT_LIMIT_BITS:
        raise ExpressionError("too large a number")
    return coefficient
