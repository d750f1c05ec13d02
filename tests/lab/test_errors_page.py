"""Every text with which Shoal refuses something says what to do, and the page lists them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from shoal.lab.errors_page import ErrorText, _kinds, _texts, collect, escaped, render
from shoal.lab.source import trees

ACTIONS = (
    "add|allow|ask|attach|build|change|check|choose|complete|copy|correct|create|end|export|find|free|get|give|go|have|"
    "install|join|keep|leave|let|look|lower|make|move|name|open|pass|pick|point|put|raise|read|remove|rename|repeat|"
    "replace|report|restart|run|see|set|shorten|split|start|stop|take|train|try|turn|upgrade|use|wait|write"
)
WAYS = {
    "an option to give": r"--[a-z]",
    "a command to run": r"`[^`]+`|(?:pip|apt-get) install|ulimit",
    "something to do": rf"(?:^|[;,:.(] ?|\b(?:and|or|then|to) )(?:do|{ACTIONS})\b",
    "what would be right": (
        r"must be|must have|is not in |is not one of|one of|expected|looks like|, like |like its default|is written|"
        r"at most|installed are|installed:|it has \{|what can: |did you mean|has \{\w+\} to \{\w+\}"
    ),
    "words made where the case is known": (
        r"\{(?:remedy|hint|advice|problem|reason|nearest)\}$|was not written: \{error\}$"
    ),
}
"""How a text may say what to do; a text that has none of these is to be improved."""


def says_what_to_do(text: str) -> bool:
    return any(re.search(way, text, re.IGNORECASE) for way in WAYS.values())


@pytest.fixture(scope="module", autouse=True)
def _no_trees_afterwards() -> Iterator[None]:
    """They are a million objects, at which every search for garbage would look."""
    yield
    trees.cache_clear()


def test_every_text_that_a_user_meets_says_what_to_do() -> None:
    texts = [text for text in collect() if text.section in ("config", "network")]
    assert len(texts) > 200
    assert [text for text in texts if not says_what_to_do(text.text)] == []


def test_every_text_is_one_line_that_begins_small() -> None:
    for text in collect():
        assert "\n" not in text.text
        assert not re.match(r"[A-Z][a-z]+ [a-z]+ ", text.text), text
        assert not text.text.endswith("."), text


def test_page_lists_each_text_beneath_its_module() -> None:
    page = render(collect())
    for text in collect():
        told = page[page.index(f"**{text.module.removeprefix('shoal.')}**") :]
        assert escaped(text.text) in told


@pytest.mark.parametrize(
    "text",
    [
        "the node is broken",
        "{error}",
        "something with an option is wrong: {error}",
        "no member was found within {deadline_s} s",
    ],
)
def test_a_text_that_only_complains_is_found(text: str) -> None:
    assert not says_what_to_do(text)


def test_texts_are_read_off_the_source() -> None:
    tree = ast.parse(
        "class Late(NetworkError): ...\n"
        "def f(a, error):\n"
        '    raise ConfigError(f"{a.path} is bad ({len(error.names)}); " "remove it")\n'
        "def g(hint):\n"
        '    error = Late("one" if hint else f"two {_hint(hint)}")\n'
        "    raise ConfigError(str(error)) from None\n"
    )
    kinds = _kinds([tree])
    assert kinds == {"ConfigError": "config", "NetworkError": "network", "Late": "network"}
    assert list(_texts(tree, kinds)) == [
        ("ConfigError", "{path} is bad ({names}); remove it"),
        ("Late", "one"),
        ("Late", "two {hint}"),
    ]


def test_nothing_on_the_page_is_taken_for_markup() -> None:
    text = ErrorText("config", "shoal.x", "[swarm] a_b <c> is *not* `--d_e`")
    assert r"* \[swarm\] a\_b \<c\> is \*not\* `--d_e`" in render([text])
