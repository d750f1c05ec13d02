"""Remains of a node on its machine: which files lie where, of what use each is, and how they are removed.

    data folder      ─► what Shoal wrote there, by name; whatever else lies there is its user's, and stays. Some of
                        the names anybody may give: a folder without one that only a node gives is no data folder,
                        and one in it with anything that no node puts there stays whole
    state folder     ─► what the node founded, in the record of all that its user did (`founded.py`)

Keys are told apart: a node's is its identity, of the authority's there is no other, and neither can be made again. Nor
can its lines in the record: they go with the keys.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from shoal.node.founded import forget, founded_by, line_of, record_path
from shoal.node.state.folder_contents import is_a_nodes
from shoal.node.state.store import disk_errors, locked

KEYS: Final = {
    "node.key": "this node's identity",
    "node.key.*": "the identity of an earlier node here",
    "authority.key": "the authority's key: there is no other",
    ".*.key.*": "a copy of a key that nobody lived to put in its place",
    "relay.key": "the identity of a relay",
    "relay.libp2p-key": "the identity of a relay, as its daemon reads it",
}
FILES: Final = {
    "agreement.log": "what this node promised",
    "agreement.log.*": "what an earlier node here promised",
    "chain.log": "the certificates of all rounds",
    "*.damaged": "a log as it was when damage was found",
    "boot": "how often a node started here",
    "boot.*": "how often an earlier node started here",
    "name": "the name that --name gave it",
    "swarm": "which swarm it is of",
    "swarm.toml": "the manifest",
    "layout.json": "names and shapes of the parameters",
    "state": "the certified state",
    "finals": "the results of the last rounds",
    "resume": "this node's own work",
    "transfer": "states on their way here",
    "checkpoints": "checkpoints",
    "rollback": "states to go back to",
    "*.order": "orders of its user",
    "evidence": "evidence against members",
    "rebases.log": "what the authority decided",
    "forks.log": "forks that were seen",
    "elsewhere": "that this key was seen elsewhere",
    "checkpoint": "where the link points that it came with",
    "peers.json": "addresses of peers",
    "peers.json.*": "addresses of an earlier node's peers",
    "invite": "its invite",
    "revocations": "who is shut out",
    "events*.jsonl": "the event log",
    "daemon.log": "the log of a daemon that `join` started",
    "dashboard.token": "the page's token",
    "control.sock": "a socket",
    "control.path": "where its control socket lies",
    "trainer.sock": "a socket",
    "rollouts": "its policy, and the rollouts that it has",
    "rounds": "what a testnet checks",
    "shoal-work-*": "work of others that a node did not live to weigh",
    "lock": "held while a node runs here",
}
"""Files that Shoal writes into a data folder, besides keys, and of what use each is."""
TELLING: Final = frozenset((*KEYS, "agreement.log", "chain.log", "dashboard.token", "control.sock", "control.path"))
"""Names that nobody else gives: one of them at least is in every data folder."""

DISTRIBUTIONS: Final = {"shoal": "shoal.node", "shoal-lab": "shoal.lab"}
"""Distributions of Shoal, and a package by which each is known to be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """A file or folder of Shoal's. size: in bytes, of all that is in it. is_key: it cannot be made again."""

    path: Path
    use: str
    size: int
    is_key: bool = False


def find_remains(data_dir: Path) -> list[Remains]:
    """List what Shoal left: in the data folder, keys first, and what its node founded in the record of its user."""
    with disk_errors(data_dir):
        found = sorted(_of_folder(data_dir), key=lambda one: (not one.is_key, -one.size, one.path))
        record, own = record_path(), founded_by(data_dir)
        if record is not None and own:
            size = sum(len(line_of(founding)) for founding in own)
            found.append(Remains(path=record, use="what `shoal init` founded here", size=size, is_key=True))
    return found


def others_in(data_dir: Path) -> list[Path]:
    """List what lies in a data folder and is not Shoal's."""
    with disk_errors(data_dir):
        return sorted(set(_entries(data_dir)).difference(one.path for one in _of_folder(data_dir)))


def remove_remains(data_dir: Path, *, keys: bool) -> list[Remains]:
    """Remove what Shoal left, the keys only if they are meant too; returns what was removed.

    A data folder in which nothing is left goes too. Raises ConfigError if a node runs there, StorageError.
    """
    wanted, own = [one for one in find_remains(data_dir) if keys or not one.is_key], founded_by(data_dir)
    is_there = any(one.path.parent == data_dir for one in wanted)
    with disk_errors(data_dir), locked(data_dir) if is_there else nullcontext():
        for one in wanted:
            if one.path == record_path():
                forget(own)
            elif one.path.is_dir() and not one.path.is_symlink():
                shutil.rmtree(one.path)
            else:
                one.path.unlink(missing_ok=True)
    with disk_errors(data_dir):
        if is_there:
            (data_dir / "lock").unlink(missing_ok=True)
        if data_dir.is_dir() and not data_dir.is_symlink() and not any(data_dir.iterdir()):
            data_dir.rmdir()
    return wanted


def set_up_beside() -> list[tuple[Path, str]]:
    """List what a user set up for Shoal by hand, as its documents say, and the command that takes each away."""
    home = Path.home()
    units = [
        (Path("/etc/systemd/system/shoal.service"), "sudo systemctl disable --now shoal && sudo rm"),
        (home / ".config/systemd/user/shoal.service", "systemctl --user disable --now shoal && rm"),
    ]
    completions = [
        home / ".bash_completions/shoal.sh",
        home / ".zfunc/_shoal",
        home / ".config/fish/completions/shoal.fish",
    ]
    commands = [*units, *((path, "rm") for path in completions)]
    if _mentions(home / ".bashrc", completions[0]):
        commands.append((home / ".bashrc", f"sed -i '\\|{completions[0]}|d'"))
    return [(path, f"{command} {shlex.quote(str(path))}") for path, command in commands if path.exists()]


def _mentions(path: Path, other: Path) -> bool:
    """True if a file of the user's names another. Raises nothing."""
    try:
        return str(other).encode() in path.read_bytes()
    except OSError:
        return False


def removal_of_program() -> str:
    """Return what removes the program: what is installed of it, or the virtual environment with all that it needs."""
    names = [name for name, package in DISTRIBUTIONS.items() if importlib.util.find_spec(package) is not None]
    alone = f"`{shlex.quote(sys.executable)} -m pip uninstall {' '.join(names)}`"
    if sys.prefix == sys.base_prefix:
        return alone
    return f"{alone}, or, if all else in there may go too, `rm -r {shlex.quote(sys.prefix)}`"


def _of_folder(data_dir: Path) -> Iterator[Remains]:
    paths = _entries(data_dir)
    if not any(fnmatchcase(path.name, name) for path in paths for name in TELLING):
        return
    for path in paths:
        key, use = _use(path, KEYS), _use(path, FILES)
        if key is not None or (use is not None and is_a_nodes(path)):
            yield Remains(path=path, use=key or use or "", size=_size(path), is_key=key is not None)


def _entries(data_dir: Path) -> list[Path]:
    return list(data_dir.iterdir()) if data_dir.is_dir() else []


def _use(path: Path, names: dict[str, str]) -> str | None:
    name = path.name.removesuffix(".partial")  # which nobody lived to write
    return next((use for pattern, use in names.items() if fnmatchcase(name, pattern)), None)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as themselves."""
    if path.is_dir() and not path.is_symlink():
        return sum(_size(inner) for inner in path.iterdir())
    return path.lstat().st_size
