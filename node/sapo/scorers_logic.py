"""Propositional formulas as a stranger writes them: parsed within bounds, compared by truth tables.

A formula is variables (one capital letter each), brackets, and ¬ ∧ ∨ → ↔ from the tightest to the loosest; each of
the binary ones groups to the left. Its value is kept for all assignments at once: bit i of an integer is the value
under assignment i, so that a connective is one operation on integers of 2^(variables) bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORMULA_LIMIT_CHARS = 2048
FORMULA_LIMIT_DEPTH = 64
"""Brackets and negations inside each other."""
VARIABLE_LIMIT = 10

_BINARY = ("↔", "→", "∨", "∧")
"""Loosest first."""


class FormulaError(ValueError):
    """The text is no formula over the variables."""


def truth_table_width(variables: Sequence[str]) -> int:
    """Count the assignments. Raises FormulaError beyond `VARIABLE_LIMIT` variables."""
    if len(variables) > VARIABLE_LIMIT:
        raise FormulaError(f"{len(variables)} variables")
    return 1 << len(variables)


def truth_table(text: str, variables: Sequence[str]) -> int:
    """The values of the formula `text` under all assignments. Raises FormulaError."""
    if len(text) > FORMULA_LIMIT_CHARS:
        raise FormulaError("too long")
    width = truth_table_width(variables)
    columns = {
        name: sum(1 << assignment for assignment in range(width) if assignment >> place & 1)
        for place, name in enumerate(variables)
    }
    reader = _Reader("".join(text.split()), columns, (1 << width) - 1)
    table = reader.binary(0, 0)
    reader.finish()
    return table


def is_atom(text: str) -> bool:
    """Return whether a formula is one variable and brackets."""
    return len("".join(text.split()).strip("()")) == 1


class _Reader:
    """Recursive descent; the depth of its recursion is bounded by `FORMULA_LIMIT_DEPTH`."""

    def __init__(self, text: str, columns: Mapping[str, int], everywhere: int) -> None:
        self._text = text
        self._at = 0
        self._columns = columns
        self._everywhere = everywhere

    def finish(self) -> None:
        if self._at < len(self._text):
            raise FormulaError("text after the formula")

    def binary(self, level: int, depth: int) -> int:
        if level == len(_BINARY):
            return self._operand(depth)
        value = self.binary(level + 1, depth)
        while self._next() == _BINARY[level]:
            self._at += 1
            value = self._connect(_BINARY[level], value, self.binary(level + 1, depth))
        return value

    def _connect(self, operator: str, left: int, right: int) -> int:
        if operator == "∧":
            return left & right
        if operator == "∨":
            return left | right
        if operator == "→":
            return (self._everywhere ^ left) | right
        return self._everywhere ^ left ^ right

    def _operand(self, depth: int) -> int:
        if depth > FORMULA_LIMIT_DEPTH:
            raise FormulaError("too deep")
        character = self._next()
        self._at += 1
        if character == "¬":
            return self._everywhere ^ self._operand(depth + 1)
        if character == "(":
            value = self.binary(0, depth + 1)
            if self._next() != ")":
                raise FormulaError("a bracket that does not close")
            self._at += 1
            return value
        if character not in self._columns:
            raise FormulaError(f"no variable {character!r}")
        return self._columns[character]

    def _next(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""
