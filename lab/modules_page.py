"""The page of the code: every module with the first sentence of its docstring, read off the source.

python -m shoal.lab.modules_page
"""

from __future__ import annotations

import sys
from typing import Final

from shoal.lab.source import escaped, first_line, trees

FOLDERS: Final = ("cli", "testnet", "node", "collectives", "swarm", "protocol", "lab")
"""From above to below: a folder imports from those after it, and the laboratory from all."""

_HEAD: Final = """\
# Where things are in the code

Read off the source when this site was built. Each folder is installed as `shoal.<folder>`; [the
architecture](architecture.md#layers) says what each is for and what it may import. Tests are in `tests/<folder>`.

"""


def collect() -> dict[str, list[str]]:
    """The modules of each folder and of each below it, from above to below."""
    found: dict[str, list[str]] = {}
    for module in trees():
        folder, _, _name = module.removeprefix("shoal.").rpartition(".")
        if folder and module not in _packages():
            found.setdefault(folder, []).append(module)
    return dict(sorted(found.items(), key=lambda one: (FOLDERS.index(one[0].split(".")[0]), one[0])))


def _packages() -> set[str]:
    return {module.rpartition(".")[0] for module in trees()}


def render(folders: dict[str, list[str]]) -> str:
    """The whole page."""
    lines = [_HEAD.rstrip("\n")]
    for folder, modules in folders.items():
        lines += ["", f"## {folder.replace('.', '/')}", ""]
        lines += [f"* `{module.rpartition('.')[2]}`: {escaped(first_line(trees()[module]))}" for module in modules]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render(collect()))
