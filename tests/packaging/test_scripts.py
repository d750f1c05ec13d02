"""Programs that stand as text in a test: they can be read, also those that only long tests run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
IMPORTS = re.compile(r"^(import \w|from \w[\w.]* import )", re.MULTILINE)


PLACE = re.compile(r"\{\w+\}")
"""Of a template: where a test puts a name."""


def programs() -> Iterator[tuple[str, str]]:
    """Every text of a module of the tests that imports something, and where it stands."""
    for path in sorted(TESTS.rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            text = getattr(getattr(statement, "value", None), "value", None)
            if isinstance(statement, ast.Assign) and isinstance(text, str) and IMPORTS.search(text):
                yield f"{path.relative_to(TESTS)}:{statement.lineno}", text


def error_in(program: str) -> str | None:
    """Why a program cannot be read; None if it can."""
    try:
        ast.parse(program)
    except SyntaxError as error:
        return str(error)
    return None


def test_programs_that_stand_in_tests_can_be_read() -> None:
    found = dict(programs())
    assert len(found) >= 10, "there are programs to read"
    errors = {where: error_in(PLACE.sub("name", text)) for where, text in found.items()}
    assert {where: error for where, error in errors.items() if error is not None} == {}
    assert error_in('print("a\n")'.replace("\\n", "\n")) is not None, "a line that a newline broke"
