"""The page of bounds: every limit of the source with its unit, read off when the site is built.

    python -m shoal.lab.bounds_page

A bound is a constant of a module whose name says what it limits and in what: `FRAME_LIMIT_BYTES`, `STALL_S`,
`HANDSHAKES_PER_S`, `FINALS_KEPT`. Its value is worked out from the source; nothing is imported. What stands beside it
is the text beneath it in the source.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from shoal.lab.source import escaped, first_line, texts, trees

OF_A_NODE: Final = ("shoal.protocol", "shoal.collectives", "shoal.swarm", "shoal.node", "shoal.cli")
BOUND: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
WORDS: Final = re.compile(
    r"LIMIT|BURST|KEPT|PERIOD|WINDOW|LEAST|MIN|SHARES?|FACTOR|TOLERANCE|NEEDED|ATTEMPTS|REST|RISE|OVERDUE|"
    r"S|BYTES|SLOTS|TURNS|TIMES|PEERS|MEMBERS|LANES|DONORS|FORWARDERS|DEGREE"
)
"""A constant whose name has one of these limits something."""

_OPERATORS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: lambda value, by: int(value) << int(by),
}

_HEAD: Final = """\
# Every bound, with its unit

Read off the source when this site was built. What is larger, longer, later or more than this is refused, dropped, given
up or made to wait, as the module beside it says. `…_S` are seconds, `…_BYTES` bytes; others count what they name.

"""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Bound:
    """One constant. value: in the unit that its name ends with; text: what the source says of it."""

    module: str
    name: str
    value: float
    text: str


@cache
def collect() -> list[Bound]:
    """All bounds of what a node runs, by module, in the order of the source."""
    return [bound for module in trees() if module.startswith(OF_A_NODE) for bound in _of_module(module)]


def _of_module(module: str) -> Iterator[Bound]:
    body, lines = trees()[module].body, texts()[module].splitlines()
    for at, statement in enumerate(body):
        for name in _assigned(statement):
            value = _value(module, name) if any(map(WORDS.fullmatch, name.split("_"))) else None
            if value is not None:
                text = _told(body, at, name) or _comment(lines[statement.lineno - 1])
                yield Bound(module=module, name=name, value=value, text=text)


def _assigned(statement: ast.stmt) -> dict[str, ast.expr]:
    """Return the expressions of the constants that a statement defines and others may read, by name."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            made = {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            made = {name: value}
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            made = {name.id: value for name, value in zip(names, values, strict=False) if isinstance(name, ast.Name)}
        case _:
            made = {}
    return {name: value for name, value in made.items() if BOUND.fullmatch(name)}


def _told(body: list[ast.stmt], at: int, name: str) -> str:
    """The text beneath a constant; one beneath several that begin with the same word tells of them all."""
    for statement in body[at + 1 :]:
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))):
                return " ".join(text.split()).rstrip(".")
        if name.split("_")[0] not in {other.split("_")[0] for other in _assigned(statement)}:
            break
    return ""


def _comment(line: str) -> str:
    return line.partition("  # ")[2].strip()


def _value(module: str, name: str) -> float | None:
    """The number that a name stands for in a module, whether made there or imported from another; else None."""
    for statement in trees()[module].body if module in trees() else ():
        made = _assigned(statement)
        if name in made:
            return _number(module, made[name])
        match statement:
            case ast.ImportFrom(module=str(origin), names=names) if origin in trees():
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return _value(origin, alias.name)
    return None


def _number(module: str, node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            negated = _number(module, operand)
            return None if negated is None else -negated
        case ast.Name(id=name):
            return _value(module, name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return next((_value(other, attribute) for other in _imported(module, name)), None)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = _number(module, left), _number(module, right)
            return None if one is None or other is None else _OPERATORS[type(op)](one, other)
        case _:
            return None


def _imported(module: str, name: str) -> Iterator[str]:
    """The module that another one imports under a name."""
    for statement in trees()[module].body:
        match statement:
            case ast.ImportFrom(module=str(origin), names=names):
                yield from (f"{origin}.{one.name}" for one in names if (one.asname or one.name) == name)


def render(bounds: list[Bound]) -> str:
    """The whole page."""
    lines, module = [_HEAD.rstrip("\n")], ""
    for bound in bounds:
        if bound.module != module:
            module = bound.module
            lines += ["", f"## {module.removeprefix('shoal.')}", "", escaped(first_line(trees()[module])), ""]
            lines += ["| name | value | |", "| --- | ---: | --- |"]
        lines.append(f"| `{bound.name}` | {told(bound.name, bound.value)} | {escaped(bound.text)} |")
    return "\n".join(lines) + "\n"


def told(name: str, value: float) -> str:
    """A value with its unit, as a person reads it."""
    if name.endswith("BYTES_PER_S"):
        return f"{_size(value)}/s"
    if name.endswith("_PER_S"):
        return f"{_plain(value)} /s"
    if name.endswith("BYTES"):
        return _size(value)
    return f"{_plain(value)} s" if name.endswith("_S") else _plain(value)


def _size(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size and value % (size // 4 if size > 1 << 10 else size) == 0:
            return f"{_plain(value / size)} {unit}"
    return f"{_plain(value)} B"


def _plain(value: float) -> str:
    if isinstance(value, int) and value >= 1 << 24:
        if value & (value - 1) == 0:
            return f"2^{value.bit_length() - 1}"
        if value & (value + 1) == 0:
            return f"2^{value.bit_length()} − 1"
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


if __name__ == "__main__":
    sys.stdout.write(render(collect()))
