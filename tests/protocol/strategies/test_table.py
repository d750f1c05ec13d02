"""Strategies are objects: nobody outside their package goes by a name, or knows one of them from the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.protocol.strategies.strategy import Exchanges, Nesterov
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, STRATEGIES, named, strategy_named

ROOT = Path(__file__).parents[3]
PRODUCT = ("protocol", "collectives", "swarm", "node", "testnet", "cli", "lab")
PACKAGE = "shoal.protocol.strategies"
OPEN = {f"{PACKAGE}.strategy", f"{PACKAGE}.table"}
"""What of the package others may import: the interface, and the table."""
OTHER_WORDS = {"kind", "way", "ways"}
"""What an event's kind is called, or a way to simulate, is no strategy, though it may have the name of one."""


def test_a_strategy_is_found_by_its_name_and_an_unknown_one_says_which_there_are() -> None:
    assert all(strategy_named(name).name == name for name in STRATEGIES)
    assert DEFAULT_STRATEGY in STRATEGIES
    with pytest.raises(ValueError, match="'magic' is none of diloco, ddp, streaming, sparse, gossip, rollouts"):
        strategy_named("magic")
    assert named([STRATEGIES["diloco"], STRATEGIES["ddp"]]) == '"diloco" or "ddp"'


def test_one_state_is_certified_where_updates_or_gradients_are_averaged() -> None:
    certified = {name for name, one in STRATEGIES.items() if one.certifies}
    assert certified == {"diloco", "ddp", "streaming", "sparse"}
    others = {one.exchanges for one in STRATEGIES.values() if not one.certifies}
    assert others == {Exchanges.MODELS, Exchanges.ROLLOUTS}


def product_files() -> list[Path]:
    return [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]


def outside(path: Path) -> bool:
    return path.parent.name != "strategies"


def says_a_strategy(node: ast.expr) -> bool:
    """Whether an expression is what somebody keeps a strategy's name in: `….strategy`, `strategy`, `…["strategy"]`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "strategy"
    if isinstance(node, ast.Name):
        return node.id == "strategy"
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "strategy"
    return isinstance(node, ast.Call) and any(
        isinstance(argument, ast.Constant) and argument.value == "strategy" for argument in node.args
    )


def names_one(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and part.value in STRATEGIES for part in ast.walk(node))


def comparisons(tree: ast.AST) -> Iterator[str]:
    """What is compared with a strategy's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(how, ast.Is | ast.IsNot) for how in node.ops):  # of objects
                continue
            words = {ast.unparse(side).rpartition(".")[2] for side in sides}
            by_name = any(map(names_one, sides)) and not words & OTHER_WORDS
            if by_name or any(map(says_a_strategy, sides)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and says_a_strategy(node.subject):
            yield f"match {ast.unparse(node.subject)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sync.strategy == 'x'", True),
        ("tables['strategy'] != NAME", True),
        ("how in ('gossip', 'rollouts')", True),
        ("given.get('strategy') in KNOWN", True),
        ("match sync.strategy:\n    case 'x':\n        pass", True),
        ("kind == 'rollouts'", False),
        ("strategy is not None", False),
        ("manifest.strategy.certifies", False),
    ],
)
def test_the_search_below_finds_what_it_looks_for(text: str, found: bool) -> None:
    assert bool(list(comparisons(ast.parse(text)))) == found


def test_nobody_outside_the_package_compares_names_of_strategies() -> None:
    texts = {path: path.read_text() for path in product_files() if outside(path)}
    assert len(texts) > 200
    words = ("strategy", *STRATEGIES)  # what has none of them is not parsed, which takes long
    may_compare = {path: text for path, text in texts.items() if any(word in text for word in words)}
    found = {str(path.relative_to(ROOT)): list(comparisons(ast.parse(text))) for path, text in may_compare.items()}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_nobody_but_the_table_knows_one_strategy_from_the_others() -> None:
    knowing = set()
    texts = {path: path.read_text() for path in product_files()}
    for path in (path for path, text in texts.items() if PACKAGE in text):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(PACKAGE):
                assert node.module != PACKAGE, f"{path} imports the package and not a module"
                if node.module not in OPEN:
                    knowing.add(str(path.relative_to(ROOT)))
    assert knowing == {"protocol/strategies/table.py"}


def test_the_outer_step_is_nesterov_momentum_where_a_strategy_says_nothing() -> None:
    class Settings:
        inner_steps, mixing, outer_lr, outer_momentum, gossip_gamma = 4, 0.5, 0.25, 0.75, 0.6
        codec, error_feedback, norm_clip = "fp32", 1.0, False

    step = STRATEGIES["streaming"].outer_step(Settings())
    assert step == Nesterov(lr=0.25, momentum=0.75)
    assert STRATEGIES["streaming"].mixing(Settings()) == 0.5
    assert STRATEGIES["diloco"].mixing(Settings()) is None
