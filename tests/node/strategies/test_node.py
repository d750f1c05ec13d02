"""A node makes its parts and wires them, and is no part of any: it gives itself to nobody, for whatever strategy."""

from __future__ import annotations

import ast
from pathlib import Path

from shoal.node import node as module
from shoal.node.strategies.table import ROUNDS
from shoal.protocol.strategies.strategy import Exchanges

ROOT = Path(__file__).parents[3]
PRODUCT = ("node", "testnet", "cli", "lab")


def trees() -> dict[str, ast.Module]:
    """What might be made of a node, by file."""
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def given(tree: ast.AST) -> list[str]:
    """Calls to which `self` is given as it is, and where it is kept: in an argument, a value, a closure's default."""
    found = []
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) and node.value is not None:
            values = [node.value]
        found += [ast.unparse(node) for one in values if isinstance(one, ast.Name) and one.id == "self"]
    return found


def test_a_node_gives_itself_to_nobody() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    (node,) = (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == "Node")
    assert given(node) == []
    assert given(ast.parse("Reaching(self)\nthing.node = self\nmake(node=self)")) != []


def test_nobody_but_who_runs_a_node_knows_of_it_and_none_is_made_of_it() -> None:
    knowing = set()
    for path, tree in trees().items():
        for one in ast.walk(tree):
            if isinstance(one, ast.ImportFrom) and one.module == "shoal.node.node":
                knowing.add(path)
            if isinstance(one, ast.ClassDef):
                assert "Node" not in map(ast.unparse, one.bases), path
    assert knowing == {"cli/run.py"}


def test_there_are_rounds_for_whatever_a_strategy_exchanges() -> None:
    assert set(ROUNDS) == set(Exchanges)
