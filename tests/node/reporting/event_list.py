"""What nodes write into their event logs, as text: every event with its fields, as they are declared.

    python -m tests.node.reporting.event_list

writes `events.txt` beside this file. Pages, reports and users' own scripts read these: a field that goes breaks some.
`written` reads the product's source for what is constructed there: what is declared is written, all of it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shoal.node.reporting.events import EVENTS

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("events.txt")
DECLARATIONS = ROOT / "node" / "reporting" / "events.py"


def collect() -> list[str]:
    """One line for each field of each event."""
    return sorted(
        f"{name} {field}" for name, kind in EVENTS.items() for field in kind.__struct_fields__ if field != "at"
    )


def written() -> dict[str, list[set[str]]]:
    """By the name of an event's class, the fields that each place of the product gives it; `**name` as it stands."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    classes = {kind.__name__ for kind in EVENTS.values()}
    for path in sorted((ROOT / "node").rglob("*.py")):
        if path == DECLARATIONS:
            continue
        tree = ast.parse(path.read_bytes())
        imported = set(_imported(tree))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (name := _called(call.func, imported)) in classes:
                found[str(name)].append({word.arg or f"**{ast.unparse(word.value)}" for word in call.keywords})
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """What a module imports of the declarations, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "shoal.node.reporting.events":
            yield from (alias.name for alias in node.names)


def _called(func: ast.expr, imported: set[str]) -> str | None:
    """The class of `events.Class(…)`, or of `Class(…)` where it is imported."""
    match func:
        case ast.Attribute(value=ast.Name(id="events"), attr=name):
            return name
        case ast.Name(id=name) if name in imported:
            return name
    return None


if __name__ == "__main__":
    LIST.write_text("\n".join(collect()) + "\n", encoding="utf-8")
