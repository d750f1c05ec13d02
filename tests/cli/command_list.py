"""All that users type, as text: every command of `shoal` with what it takes, of which kind, and what stands without.

    python -m tests.cli.command_list

writes `commands.txt` beside this file. Scripts say what is in it: a line that goes or changes breaks some, and is for a
release that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from shoal.cli.commands import app_of

LIST = Path(__file__).with_name("commands.txt")


def collect() -> list[str]:
    """One line for each command, and for each thing that one takes."""
    return sorted(_lines("shoal", get_command(app_of())))


def _lines(path: str, command: Any) -> Iterator[str]:
    commands = getattr(command, "commands", {})
    if not commands or command.params:
        yield path
    for taken in command.params:
        if "completion" in taken.name:
            continue  # typer's own, as it finds the shell
        words = [path, *taken.opts, *taken.secondary_opts, f"<{_kind(taken.type_descriptor.annotation)}>"]
        default = str(taken.default).replace(str(Path.home()), "~")
        yield " ".join([*words, *(["..."] if taken.multiple else []), *(["=", default] if taken.default else [])])
    for name, one in commands.items():
        yield from _lines(f"{path} {name}", one)


def _kind(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


if __name__ == "__main__":
    LIST.write_text("\n".join(collect()) + "\n", encoding="utf-8")
