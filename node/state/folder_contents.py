"""Contents of the folders in a data folder: what a node gives these names to, and what it may therefore remove.

A node tidies its folders: what is in them and no work of its own is removed, as are they when Shoal is uninstalled.
Their names are plain, and many a project has some of the same. So a folder with anything in it that no node gives
that name to is its user's: nobody removes it, and no data folder begins around it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from shoal.protocol.errors import ConfigError

_POSITION: Final = r"\d+\.\d+-\d+"
_CONTENTS: Final = {
    "state": r"\d+(\.image)?\.safetensors",
    "finals": r"\d+-[0-9a-f]+",
    "resume": rf"{_POSITION}\.(work|trainer)|midway",
    "transfer": rf"{_POSITION}-[0-9a-f]+",
    "checkpoints": _POSITION,
    "rollback": r"\d+\.safetensors",
    "evidence": r"[0-9a-f]{64}",
    "rollouts": r"agent|groups|announced",
    "rounds": _POSITION,
}
_HALF_WRITTEN: Final = r"(\.\d+)?(\.partial)?"


def is_a_nodes(folder: Path) -> bool:
    """True unless something lies in a folder of this name that no node puts there. Raises OSError."""
    name = re.compile(f"({_CONTENTS[folder.name]}){_HALF_WRITTEN}") if folder.name in _CONTENTS else None
    if name is None or not folder.is_dir() or folder.is_symlink():
        return True
    return all(name.fullmatch(path.name) for path in folder.iterdir())


def check_no_others(data_dir: Path) -> None:
    """Raise ConfigError where a data folder is to begin around a folder of its user's, in which a node would tidy."""
    for name in _CONTENTS:
        if not is_a_nodes(data_dir / name):
            raise ConfigError(
                f"{data_dir / name} has files that are no node's, and a node removes what is not its own there; choose "
                "another --data-dir"
            )
