"""The page of messages: every protocol, message and signature of the wire, made when the site is built.

    python -m shoal.lab.messages_page

Fields, types and bounds are those of `tests/protocol/wire_<version>.txt`, which a test holds to the source; what each
is for is its docstring's first sentence. Domains of signatures are read off the source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from shoal.lab.source import escaped, first_line, trees
from shoal.protocol.wire import WIRE_VERSION

APART: Final = ("shoal.lab", "shoal.testnet", "shoal.cli")
"""Packages that send nothing to peers by themselves."""
LIST: Final = Path("tests") / "protocol" / f"wire_{WIRE_VERSION}.txt"

_HEAD: Final = f"""\
# Every message, to the byte

Made when this site was built, for wire version {WIRE_VERSION}. A map is msgpack with its keys in sorted order, and says
what it is by the key `type`; an array has its fields in the order given here. A field with `=` may be left out. How
bytes are hashed, signed and enveloped, and what a node does with what it does not know, is in [the wire](wire.md).

"""
_SHORTER: Final = (
    (r" = b'(\\x00)+'", " = zeros"),
    (r" = NODEFAULT", " = left out"),
    (r"str<min_length 52, max_length 52>", "PeerId"),
    (r"bytes<min_length (\d+), max_length \1>", r"\1 bytes"),
    (r"int<ge 0, le 9223372036854775807>", "counter"),
    (r"<ge 0, lt 1048576>", " below 2^20"),
    (r"<min_length (\d+), max_length (\d+)>", r" of \1 to \2"),
    (r"<max_length (\d+)>", r" of at most \1"),
    (r"<ge (\S+), le (\S+)>", r" from \1 to \2"),
    (r"<ge (\S+), lt (\S+)>", r" from \1, below \2"),
)
"""Shorter forms of the list's types, for people."""


def entries(path: Path) -> dict[str, str]:
    """Read the list of the wire: each name's line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: line.strip() for name, line in zip(lines[::2], lines[1::2], strict=True)}


def domains() -> dict[str, str]:
    """The domains of signatures, each with the module that signs under it."""
    return dict(sorted((domain, module) for module, tree in _of_nodes().items() for domain in _domains(tree)))


def _domains(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=bytes(domain))):
                if name.endswith("_DOMAIN"):
                    yield domain.decode()


def render(found: Mapping[str, str]) -> str:
    """The whole page. found: as `entries` has it."""
    protocols = _protocols()
    lines = [_HEAD.rstrip("\n"), "", "## Protocols", "", "| name | of | which says of itself |", "| --- | --- | --- |"]
    for name in sorted(protocols):
        module = protocols[name]
        lines.append(f"| `{name}` | {_shown(module)} | {escaped(first_line(trees()[module]))} |")
    lines += ["", "## Domains, under which something is signed or derived", "", "| domain | of |", "| --- | --- |"]
    lines += [f"| `{domain}` | {_shown(module)} |" for domain, module in domains().items()]
    lines += ["", "## Told apart by their type", ""]
    lines += [f"* {name.removeprefix('one of ')}" for name in found if name.startswith("one of ")]
    lines += ["", "## Frames of lanes", ""]
    lines += [f"* {escaped(name)}: `{text}`" for name, text in found.items() if name.startswith("lane frame")]
    lines += ["", "## Messages, and what they are made of"]
    for name, text in found.items():
        if name.startswith(("/", "one of ", "lane frame")):
            continue
        form, _, text = text.partition(" (")
        fields = _fields(text)
        later = [other.removeprefix(f"{name}.") for other in found if other.startswith(f"{name}.")]
        module, line = _told(name, [*fields, *later])
        lines += ["", f"### {name}", "", f"{escaped(line)}. *{_shown(module)}*" if line else f"*{_shown(module)}*", ""]
        lines += [f"{form.capitalize()}:" if fields else f"{form.capitalize()}, without fields.", ""]
        lines += [f"* `{field}`" for field in fields]
    return "\n".join(lines) + "\n"


def _fields(text: str) -> list[str]:
    for pattern, shorter in _SHORTER:
        text = re.sub(pattern, shorter, text)
    return [field for field in text.removesuffix(")").split("; ") if field]


def _told(name: str, fields: list[str]) -> tuple[str, str]:
    """The module and the first line of the class of that name which has these fields, beside those it inherits."""
    names = {field.partition(":")[0] for field in fields}
    found = [
        (len(own), module, node)
        for module, tree in _of_nodes().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        if (own := {field for one in node.body for field in _field_of(one)}) <= names
    ]
    if not found:
        return "", ""
    _, module, node = max(found, key=lambda one: one[:2])
    return module, first_line(node)


def _field_of(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def _protocols() -> dict[str, str]:
    """The protocols of the source, each with the module that names it."""
    return {
        value: module
        for module, tree in _of_nodes().items()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.endswith("_PROTOCOL")
        if isinstance(value := node.value.value, str) and value.startswith("/")
    }


def _of_nodes() -> dict[str, ast.Module]:
    """The modules that nodes run."""
    return {module: tree for module, tree in trees().items() if not module.startswith(APART)}


def _shown(module: str) -> str:
    return f"`{module.removeprefix('shoal.').replace('.', '/')}.py`"


if __name__ == "__main__":
    sys.stdout.write(render(entries(Path.cwd() / LIST)))
