"""What is refused of a TOML text before, and while, it is parsed."""

from __future__ import annotations

import tomllib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import ConfigError
from shoal.protocol.toml_text import parse_toml
from shoal.protocol.wire import DEPTH_LIMIT

FUZZ = settings(derandomize=True)

LIMIT_BYTES = 16_384
MEMORY_LIMIT_BYTES = 64 << 20
"""What a text within the limits may take while it is parsed; 200 kB of dotted keys took 21 GB."""


def nested(depth: int, form: str) -> str:
    """A text with a value, or a table, that so many others are around."""
    names = [f"k{number}" for number in range(depth)]
    return {
        "dotted key": f"{'.'.join(names)} = 1",
        "quoted key": " . ".join(f'"{name}"' for name in names) + " = 1",
        "literal key": "\t.".join(f"'{name}'" for name in names) + " = 1",
        "header": f"[{'.'.join(names)}]",
        "array of tables": f"[[{'.'.join(names)}]]",
        "array": f"a = {'[' * depth}{']' * depth}",
        "array over lines": f"a = {('[ # one more' + chr(10)) * depth}{']' * depth}",
        "inline table": f"a = {''.join(f'{{{name} = ' for name in names)}1{'}' * depth}",
        "number": f"a = {'1.' * depth}0",
    }[form]


FORMS = ["dotted key", "quoted key", "literal key", "header", "array of tables", "array", "array over lines"]


@pytest.mark.parametrize("form", [*FORMS, "inline table"])
def test_text_may_be_nested_so_deep_and_no_deeper(form: str) -> None:
    text = nested(DEPTH_LIMIT, form)
    assert parse_toml(text, source="it", limit_bytes=LIMIT_BYTES) == tomllib.loads(text)
    with pytest.raises(ConfigError, match=f"it: nested deeper than {DEPTH_LIMIT} tables or lists"):
        parse_toml(nested(DEPTH_LIMIT + 1, form), source="it", limit_bytes=LIMIT_BYTES)


@pytest.mark.parametrize("form", [*FORMS, "inline table", "number"])
@pytest.mark.parametrize("before", ["", 'a = """\\""""\n', "b = '''x'''''\n", 'c = "\\" \\\\"\n', "d = 'x' # '\n"])
def test_what_is_nested_very_deep_takes_no_memory(form: str, before: str) -> None:
    text = before + nested(1, form)
    depth = 1
    while len(longer := before + nested(2 * depth, form)) < LIMIT_BYTES:
        text, depth = longer, 2 * depth
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            parse_toml(text, source="it", limit_bytes=LIMIT_BYTES)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT_BYTES // 8
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_many_keys_as_deep_as_they_may_be_take_little_memory() -> None:
    deep = ".".join("abcdefghijklmnop"[:DEPTH_LIMIT])
    lines, number = [f"[{deep}]"], 0
    while len("\n".join(lines)) < LIMIT_BYTES - 64:
        lines.append(f"{deep}{number} = 1")
        number += 1
    tracemalloc.start()
    try:
        parse_toml("\n".join(lines), source="it", limit_bytes=LIMIT_BYTES)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        'a = "' + "[" * 100 + '"',
        "a = '" + "{" * 100 + "'",
        'a = """' + ".x" * 100 + '\n"" "quoted" [[[[[[[[[[[[[[[[[[[[ """',
        "a = '''" + "[" * 100 + "\n'' 'quoted' [[[[[[[[[[[[[[[[[[[[ '''",
        "a = 1 # " + "[" * 100 + ".x" * 100,
        'a = "\\"' + "[" * 100 + '\\\\"',
        'a = """\\"""' + "[" * 100 + '"""""',
        "a = [\n" + "1.5, 2.5,\n" * 100 + "]",
        "\n".join(f"a{number}.b = 1.5" for number in range(100)),
        "\n".join(f'a{number} = "x"' for number in range(100)),
    ],
)
def test_what_stands_in_texts_and_comments_nests_nothing(text: str) -> None:
    assert parse_toml(text, source="it", limit_bytes=LIMIT_BYTES) == tomllib.loads(text)


def test_text_is_measured_in_bytes_before_it_is_parsed() -> None:
    fits = "# " + "ü" * ((LIMIT_BYTES - 2) // 2)
    assert parse_toml(fits, source="it", limit_bytes=LIMIT_BYTES) == {}
    with pytest.raises(ConfigError, match="it is larger than 16384 bytes"):
        parse_toml(fits + "ü", source="it", limit_bytes=LIMIT_BYTES)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = [-" + "1" * 5000 + "]"])
def test_number_of_five_thousand_digits_is_the_users_to_correct(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^it: not valid TOML: a number has too many digits; correct it there$"):
        parse_toml(text, source="it", limit_bytes=LIMIT_BYTES)


PIECES = ["a.b", "a=", *list("\"'#[]{}.,=\\ \n\t1a"), '"""', "'''", '\\"']


@given(st.lists(st.sampled_from(PIECES), max_size=40))
@FUZZ
def test_any_text_is_parsed_as_python_does_or_refused(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        wanted = None
    try:
        found = parse_toml(text, source="it", limit_bytes=LIMIT_BYTES)
    except ConfigError:
        assert wanted is None or _depth(wanted) > DEPTH_LIMIT
    else:
        assert found == wanted


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
