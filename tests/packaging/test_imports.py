"""Imports of the product go one way: what a module imports, at whatever place and for whatever use, leads not back."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("protocol", "swarm", "collectives", "node", "testnet", "cli")


def modules() -> dict[str, Path]:
    """Every module of the product, by its name."""
    found = {}
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("shoal", *(part for part in parts if part != "__init__")))] = path
    return found


def imports(text: str, known: Mapping[str, object]) -> Iterator[str]:
    """The known modules that a text imports: on top, in functions, and for its types alone."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                yield from [one for one in (module if module in known else node.module,) if one in known]


def circles(graph: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Modules that lead back to themselves: what is left when all that lead nowhere, or come from nowhere, are gone."""
    left = {name: set(found) - {name} for name, found in graph.items()}
    while True:
        wanted = set[str]().union(*left.values())
        ends = {name for name, found in left.items() if not found or name not in wanted}
        if not ends:
            return [[name, *sorted(found)] for name, found in sorted(left.items())]
        left = {name: found - ends for name, found in left.items() if name not in ends}


def test_a_circle_is_found_also_where_it_is_closed_for_types_or_in_a_function() -> None:
    known = {"shoal.a": 0, "shoal.b": 0, "shoal.c": 0}
    text = "if TYPE_CHECKING:\n    from shoal.b import B\ndef later():\n    from shoal import c\n"
    assert set(imports(text, known)) == {"shoal.b", "shoal.c"}
    graph = {"d": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a", "e"}, "e": set[str]()}
    found = circles({name: frozenset(others) for name, others in graph.items()})
    assert [name for name, *_ in found] == ["a", "b", "c"]
    assert circles({"a": frozenset({"b"}), "b": frozenset()}) == []


def test_no_module_of_the_product_leads_back_to_itself() -> None:
    known = modules()
    assert len(known) > 300
    graph = {name: frozenset(imports(path.read_text(), known)) for name, path in known.items()}
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == []
