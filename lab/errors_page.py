"""The page of errors: every text with which Shoal refuses something, read off the source when the site is built.

    python -m shoal.lab.errors_page

An error's text is what stands between the brackets of its `raise`, with what is filled in as `{…}`. Texts that are
passed on from elsewhere have no words of their own here and are not listed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from shoal.lab.source import trees

ROOTS: Final = {"ConfigError": "config", "NetworkError": "network"}

MET_BY_USERS: Final = ("shoal.cli.", "shoal.lab.cli.", "shoal.node.control_client", "shoal.swarm.manifest_exchange")
"""Modules whose NetworkErrors end a command that speaks with a node."""
MEASURING: Final = ("shoal.testnet.", "shoal.lab.")
"""Those of testnets and benchmarks. A running node handles all others itself."""

_HEAD: Final = """\
# What Shoal says when it refuses

Read off the source when this site was built. `{…}` stands for what is filled in. A command that meets one of these
prints it in one line on stderr, after `shoal: `.

"""
_SECTIONS: Final = {
    "config": (
        "## What you gave cannot be used",
        "`ConfigError`, exit code 2 (1 where no node runs, and where a disk is full, which another start may find with "
        "room): an option, a manifest, a file, a folder. The text says what to do.",
    ),
    "network": (
        "## The network, or a process, did not do its part",
        "`NetworkError`, exit code 1, of commands that speak with a node or start some.",
    ),
    "unfinished": (
        "## A testnet or a benchmark did not come to its end",
        "`NetworkError`, exit code 1: what is written is what happened. The nodes' own words are in `nodes/*/log.txt` "
        "of its folder, and the moment in `nodes/*/events.jsonl`: `shoal report FOLDER` draws them.",
    ),
    "handled": (
        "## What a running node handles itself",
        "`NetworkError` of one connection: the node dials again, goes another way, or does without that peer. It is "
        "seen in the log at most, and nothing is to be done. If it goes on, let `shoal doctor` look at the machine.",
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class ErrorText:
    """One text. section: config, network, unfinished or handled; module: where it is raised."""

    section: str
    module: str
    text: str


@cache
def collect() -> list[ErrorText]:
    """All texts of the installed source, sorted, each once per module."""
    kinds = _kinds(list(trees().values()))
    found = {
        ErrorText(_section(kinds[name], module), module, text)
        for module, tree in trees().items()
        for name, text in _texts(tree, kinds)
    }
    return sorted(found)


def _kinds(trees: list[ast.Module]) -> dict[str, str]:
    """The names of both errors and of all classes that derive from them, and which of the two each is."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = dict(ROOTS)
    while found := {
        name: kinds[base] for name, derived in bases.items() for base in derived if name not in kinds and base in kinds
    }:
        kinds |= found
    return kinds


def _section(kind: str, module: str) -> str:
    if kind != "network" or module.startswith(MET_BY_USERS):
        return kind
    return "unfinished" if module.startswith(MEASURING) else "handled"


def _texts(tree: ast.Module, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(class, text) of every error that is made in a module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in kinds:
            continue
        if node.args:
            for text in _words(node.args[0]):
                if re.search(r"[a-z]{3}", re.sub(r"{[^}]*}", "", text)):
                    yield node.func.id, text


def _words(node: ast.expr) -> list[str]:
    """The texts that an expression can become."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(_words(value)[0] for value in values)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [one + other for one in _words(left) for other in _words(right)]
        case ast.IfExp(body=body, orelse=orelse):
            return _words(body) + _words(orelse)
        case ast.FormattedValue(value=value):
            return [f"{{{_placeholder(value)}}}"]
        case _:
            return [f"{{{_placeholder(node)}}}"]


def _placeholder(node: ast.expr) -> str:
    """A name for what is filled in: the last one in the expression that says something."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Call(func=ast.Name(id=name)) if name.startswith("_"):
            return name.strip("_").lower()
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner, *_]) | ast.Call(func=ast.Name(), args=[inner, *_]):
            return _placeholder(inner)
        case ast.Call(func=func):
            return _placeholder(func)
        case ast.Subscript(value=value) | ast.UnaryOp(operand=value) | ast.Starred(value=value):
            return _placeholder(value)
        case ast.BoolOp(values=[value, *_]):
            return _placeholder(value)
        case ast.BinOp(left=left):
            return _placeholder(left)
        case _:
            return "…"


def render(texts: list[ErrorText]) -> str:
    """The whole page."""
    lines = [_HEAD.rstrip("\n")]
    for section, (head, intro) in _SECTIONS.items():
        lines += ["", head, "", intro]
        module = ""
        for text in texts:
            if text.section != section:
                continue
            if text.module != module:
                module = text.module
                lines += ["", f"**{module.removeprefix('shoal.')}**", ""]
            lines.append(f"* {escaped(text.text)}")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Escape a text for a Markdown list: nothing in it is markup but what it puts in backticks itself."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render(collect()))
