"""What nodes write into their event logs, as text: every event with its fields, read off the source.

    python -m tests.node.reporting.event_list

writes `events.txt` beside this file. Pages, reports and users' own scripts read these: a field that goes breaks some.
A name or fields that are only known at run time stand there as the source has them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("events.txt")
WRITERS = {"events", "_events"}


def collect() -> list[str]:
    """One line for each field of each event."""
    fields: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "node").rglob("*.py")):
        for call in _writes(ast.parse(path.read_bytes())):
            name = call.args[0].value if isinstance(call.args[0], ast.Constant) else f"({ast.unparse(call.args[0])})"
            fields[str(name)] |= {word.arg or f"**{ast.unparse(word.value)}" for word in call.keywords} or {""}
    return sorted(f"{event} {field}".rstrip() for event, some in fields.items() for field in some)


def _writes(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write":
            writer = node.func.value
            if isinstance(writer, ast.Attribute) and writer.attr in WRITERS and node.args:
                yield node


if __name__ == "__main__":
    LIST.write_text("\n".join(collect()) + "\n", encoding="utf-8")
