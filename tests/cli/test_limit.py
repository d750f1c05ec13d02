"""`shoal limit`: what the node is told, and what its user is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.cli import limit
from shoal.cli.main import execute
from shoal.node.control_client import JsonValue


class FakeNode:
    """Keeps what it was asked; `caps` are those that it has then."""

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []
        self.caps: dict[str, JsonValue] = {"upload": 5_000_000, "download": None}

    def request(self, data_dir: Path, op: str, *arguments: str, deadline_s: float) -> dict[str, JsonValue]:
        self.asked.append((op, *arguments))
        return self.caps


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    monkeypatch.setattr(limit, "request", fake.request)
    return fake


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], ("", "")),
        (["--max-upload", "40Mbit"], ("5000000", "")),
        (["--max-download", "none"], ("", "none")),
        (["--max-upload", "none", "--max-download", "2MiB/s"], ("none", str(2 << 20))),
    ],
)
def test_caps_reach_the_node_and_those_that_are_left_out_stay(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: tuple[str, str]
) -> None:
    assert execute(["limit", *options, "--data-dir", str(tmp_path)]) == 0
    assert node.asked == [("limit", *told)]
    assert capsys.readouterr().out == (
        f"the node on {tmp_path} uploads 5.0 MB/s at most, and downloads without a cap\n"
    )


def test_what_is_no_rate_is_told_in_one_line(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["limit", "--max-upload", "fast"]) == 2
    assert capsys.readouterr().err == (
        "shoal: --max-upload: 'fast' is not a rate; write 10M or 10MB/s for bytes, 80Mbit for bits a second; "
        "write none for no cap\n"
    )
    assert node.asked == []
