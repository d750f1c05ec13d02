"""What a planted bug is, and how one is planted in a copy of the tree and seen by its test.

A bug is held by the text that it replaces, which stands in exactly one place of the product, whatever file that is in:
so it survives a move. Text of several lines stands here without its indentation, and is found under any.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRODUCT = ("protocol", "collectives", "swarm", "node", "cli", "testnet")
"""Where bugs are planted."""
PACKAGES = (*PRODUCT, "lab")
DEADLINE_S = 400
"""For importing what one test needs with one bug: the test itself has a limit of its own (tests/conftest.py)."""
THIRD_PARTY = (
    *("numpy", "torch", "trio.testing", "msgspec", "cryptography", "blake3", "safetensors", "libp2p", "multiaddr"),
    *("hypothesis", "_hypothesis_pytestplugin", "anyio.pytest_plugin"),
)
"""What tests import that takes long: once for all bugs."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of text that the product has once, within a line or of whole lines, and what stands there instead."""

    was: str
    planted: str


@dataclass(frozen=True, slots=True)
class Bug:
    """name: what is wrong, in plain English. test: where that is seen, as pytest names it."""

    name: str
    test: str
    edits: tuple[Edit, ...]


def bug(name: str, test: str, *texts: str) -> Bug:
    """A bug of one edit or several: `texts` are what stands there and what is planted, by turns."""
    return Bug(name, test, tuple(Edit(was, planted) for was, planted in zip(texts[::2], texts[1::2], strict=True)))


class NotPlanted(Exception):
    """The product has no such text, or has it more than once."""


def copy_tree(target: Path) -> None:
    """The product and its tests, laid out so that `shoal` is the copy."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "shoal").mkdir()
    for name in PACKAGES:
        (target / "shoal" / name).symlink_to(target / name)


def product(tree: Path) -> dict[Path, str]:
    """The text of every module in which bugs may be planted."""
    return {path: path.read_text() for name in PRODUCT for path in sorted((tree / name).rglob("*.py"))}


def planted_in(text: str, edit: Edit) -> list[str]:
    """`text` with the edit made, once for each place where it can be."""
    if "\n" not in edit.was:
        if edit.was not in text:  # as in all modules but one or two, and that is quicker to see
            return []
        places = [match.start() for match in re.finditer(re.escape(edit.was), text)]
        return [text[:at] + edit.planted + text[at + len(edit.was) :] for at in places]
    first, *others = _lines(edit.was)
    if first.strip() not in text:
        return []
    within = "".join(rf"\n(?P=indent){re.escape(line)}" if line else r"\n" for line in others)
    whole = re.compile(rf"^(?P<indent> *){re.escape(first)}{within}$", re.MULTILINE)
    changed = []
    for match in whole.finditer(text):
        lines = [f"{match['indent']}{line}" if line else "" for line in _lines(edit.planted)]
        changed.append(text[: match.start()] + "\n".join(lines) + text[match.end() :])
    return changed


def _lines(block: str) -> list[str]:
    return textwrap.dedent(block).strip("\n").split("\n")


def edited(texts: dict[Path, str], planted: Bug) -> dict[Path, str]:
    """The files that a bug changes, as they are with it. Raises NotPlanted."""
    changed: dict[Path, str] = {}
    for edit in planted.edits:
        found = [(path, one) for path, text in texts.items() for one in planted_in(changed.get(path, text), edit)]
        if len(found) != 1:
            raise NotPlanted(f"the product has {len(found)} times: {edit.was!r}")
        changed.update(found)
    return changed


@contextlib.contextmanager
def plant(tree: Path, planted: Bug) -> Iterator[None]:
    """Plant a bug in a tree, and take it out again. Raises NotPlanted."""
    before = product(tree)
    changed = edited(before, planted)
    try:
        for path, text in changed.items():
            _write(path, text)
        yield
    finally:
        for path in changed:
            _write(path, before[path])


def _write(path: Path, text: str) -> None:
    """Replace a module; what was compiled of it could be taken for that of the new text, if that has the same size."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of pytest ended: its exit code, what it said, and how long it took."""

    code: int
    said: str
    seconds: float


def run_tests(tree: Path, *tests: str) -> Run:
    """Run tests up to the first that fails in a tree of `copy_tree`'s, in a child of this process.

    The child has what this process imported of others, and imports of the product what the tree has.
    """
    began = time.monotonic()
    faulthandler.cancel_dump_traceback_later()  # a child would wait for ever for the thread that watches this test
    with tempfile.TemporaryFile() as output:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads that are not its own
            child = os.fork()
        if not child:
            _run_here(tree, tests, output.fileno())
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what a test left behind
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Run(code, said, time.monotonic() - began)


def _run_here(tree: Path, tests: tuple[str, ...], output: int) -> None:
    """Run tests in this process, a child, and end it."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.alarm(DEADLINE_S)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "shoal")]:
            del sys.modules[name]
        sys.path.insert(0, str(tree))
        imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins among them
        options = ["-q", "-x", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", *imported]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def see(tree: Path, planted: Bug) -> Run:
    """Plant a bug in a tree, run its test, and take the bug out again. Returns how the test failed.

    Raises NotPlanted; AssertionError if the test does not see the bug.
    """
    with plant(tree, planted):
        run = run_tests(tree, planted.test)
    assert run.code == 1, f"{planted.name}: not seen by {planted.test} (exit code {run.code})\n{run.said[-2000:]}"
    return run
