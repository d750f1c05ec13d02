"""Options as they are declared: what a text becomes, what is refused by its name, and which are not the defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest

from shoal.node.option import (
    Option,
    Within,
    check_exists,
    check_options,
    given_options,
    options_of,
    parse_host_port,
    parse_rate,
)
from shoal.node.options import NodeOptions, PageAddress
from shoal.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10M", 10_000_000),
        ("10MB/s", 10_000_000),
        ("5MiB/s", 5 * 2**20),
        ("80Mbit", 10_000_000),
        ("80 Mbit/s", 10_000_000),
        ("8kbps", 1000),
        ("1.5K", 1500),
        ("0.5Gi", 2**29),
        ("123456", 123_456),
        (" 1G ", 10**9),
    ],
)
def test_rate_is_read_in_bytes_per_second(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text, "--max-upload") == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "-1M", "0", "7bit", "10m", "1e6", "M", "10Mb", "9999G", "1" * 13, "٣M"])
def test_rate_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--max-upload: "):
        parse_rate(text, "--max-upload")


@pytest.mark.parametrize(
    ("text", "pair"),
    [("0.0.0.0:4100", ("0.0.0.0", 4100)), ("[::]:0", ("::", 0)), ("localhost:1", ("localhost", 1))],
)
def test_host_port_is_read(text: str, pair: tuple[str, int]) -> None:
    assert parse_host_port(text, "--lane-listen") == pair


@pytest.mark.parametrize("text", ["", "4100", ":4100", "::1:4100", "[x]:1", "a:", "a:65536", "a b:1", "a:1:2"])
def test_host_port_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lane-listen: .* is not HOST:PORT"):
        parse_host_port(text, "--lane-listen")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A field of the user's with a check, one without, one that is none of the user's."""

    parts: Annotated[int | None, Option("--parts", "-p", help="How many.", check=Within(1, 8, "1 cuts nothing"))] = None
    quick: Annotated[bool, Option("--quick/--slow", help="How.")] = True
    folder: Path = Path()


def test_option_has_the_name_and_the_variable_of_its_first_long_name() -> None:
    assert {field: option.name for field, option in options_of(Sample).items()} == {
        "parts": "--parts",
        "quick": "--quick",
    }
    assert Option("-o", "--some-where/--no-where", help="").variable == "SHOAL_SOME_WHERE"


@pytest.mark.parametrize("parts", [0, 9, -1])
def test_value_out_of_range_is_refused_by_the_options_name(parts: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--parts: {parts} is not in 1\.\.8; 1 cuts nothing$"):
        check_options(Sample(parts=parts))


def test_value_in_range_and_none_pass() -> None:
    for parts in (None, 1, 8):
        check_options(Sample(parts=parts))


def test_number_that_is_none_is_within_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^--wait: nan is no number of seconds; 0 is for ever$"):
        Within(0, 10, "0 is for ever", what="number of seconds")(float("nan"), "--wait")


def test_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    check_exists(tmp_path, "--data")
    with pytest.raises(ConfigError, match=r"^--data: there is no .*missing; check the path$"):
        check_exists(tmp_path / "missing", "--data")


def test_options_given_are_those_that_differ_from_the_defaults() -> None:
    assert list(given_options(Sample(folder=Path("here")))) == []
    assert [option.name for option in given_options(Sample(quick=False, parts=3))] == ["--parts", "--quick"]


def test_every_setting_of_a_node_is_an_option_that_its_user_has() -> None:
    declared = options_of(NodeOptions)
    assert set(declared) == {field.name for field in fields(NodeOptions)}
    assert len({option.name for option in declared.values()}) == len(declared)
    check_options(NodeOptions())


def test_default_written_as_text_is_read_as_itself() -> None:
    for field in fields(NodeOptions):
        option = options_of(NodeOptions)[field.name]
        if option.parse is not None and field.default not in (None, ()):
            assert option.parse(str(field.default), option.name) == field.default


def test_address_is_written_as_it_is_read() -> None:
    for text in ("[::1]:80", "localhost:0"):
        assert str(parse_host_port(text, "--lane-listen")) == text


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("off", None),
        ("127.0.0.1:8420", PageAddress()),
        ("127.0.0.1:8421", PageAddress(port=8421, or_free=False)),
        ("[::]:0", PageAddress(host="::", port=0, or_free=False)),
    ],
)
def test_page_is_where_its_user_says(text: str, page: PageAddress | None) -> None:
    assert PageAddress.parse(text, "--dashboard") == page
