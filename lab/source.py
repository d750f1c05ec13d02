"""The source as the pages of the site read it: every module, parsed and not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

LAYERS: Final = ("protocol", "swarm", "collectives", "node", "testnet", "cli", "lab")


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the installed source by its full name, parsed."""
    return {module: ast.parse(text) for module, text in texts().items()}


@cache
def texts() -> dict[str, str]:
    """Every module of the installed source by its full name, as it is written."""
    return {module: path.read_text(encoding="utf-8") for module, path in _modules()}


def first_line(tree: ast.Module | ast.ClassDef) -> str:
    """The first line of a docstring, continued to the end of its sentence; nothing where there is none."""
    paragraph = (ast.get_docstring(tree) or "").split("\n\n")[0].strip()
    line, _, rest = paragraph.partition("\n")
    if rest and not line.rstrip().endswith((".", ":")):
        line = " ".join(paragraph.split()).split(". ")[0]
    return line.rstrip(".")


def escaped(text: str) -> str:
    """Escape a text for a cell or a list's point: nothing in it is markup."""
    return " ".join(text.translate({ord(sign): f"\\{sign}" for sign in r"\*_<>[]|"}).split())


def _modules() -> Iterator[tuple[str, Path]]:
    for layer in LAYERS:
        spec = find_spec(f"shoal.{layer}")
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(("shoal", layer, *(part for part in parts if part != "__init__"))), path
